"""Tile registers of x86 (AMX): eight of 16 rows of 64 bytes, and the instructions on them.

The registers are named by their numbers, 0 to 7, which LLVM keeps. `resize` says how many rows and bytes of a row each
has. All that tiles hold is lost when their sizes change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from .llvm import Code, Val, i64

REGISTERS, ROWS, ROW_BYTES = 8, 16, 64
TILE_BYTES = ROWS * ROW_BYTES
WHOLE = dict.fromkeys(range(REGISTERS), (ROWS, ROW_BYTES))


def resize(c: Code, sizes: Mapping[int, tuple[int, int]]) -> None:
    """Give registers their (rows, bytes of a row); no others may be used."""
    rows, row_bytes = ([sizes.get(tile, (0, 0))[i] for tile in range(REGISTERS)] for i in range(2))
    text = b"".join(n.to_bytes(2, "little") for n in row_bytes).ljust(32, b"\0") + bytes(rows).ljust(16, b"\0")
    _do(c, "ldtilecfg", Val("ptr", c.module.constant(b"\1".ljust(16, b"\0") + text)))  # 1: this layout of registers


@contextlib.contextmanager
def kept(c: Code) -> Iterator[None]:
    """Behind, the registers have the sizes that they had before, or none: then the system saves nothing with the
    thread. Others give them sizes once a thread and rely on these ever after, as llama.cpp does."""
    found = c.var("i8", count=64, align=64)
    _do(c, "sttilecfg", found)
    yield
    _do(c, "ldtilecfg", found)


def clear(c: Code, tile: int) -> None:
    _do(c, "tilezero", _number(tile))


def load(c: Code, tile: int, ptr: Val, row: Val | int = ROW_BYTES, passing: bool = False) -> None:
    """A tile from memory, whose rows are `row` bytes apart. passing: the first-level cache is to keep others."""
    _do(c, "tileloaddt164" if passing else "tileloadd64", _number(tile), ptr, _distance(row))


def store(c: Code, tile: int, ptr: Val, row: Val | int = ROW_BYTES) -> None:
    """A tile to memory, whose rows are `row` bytes apart."""
    _do(c, "tilestored64", _number(tile), ptr, _distance(row))


def multiply(c: Code, instruction: str, total: int, a: int, b: int) -> None:
    """total += a . b, where b has a row for each unit of 32 bits of a row of a: two bfloat16, whose subnormal numbers
    and sums are zeros ("tdpbf16ps"), or four bytes."""
    _do(c, instruction, *map(_number, (total, a, b)))


def _number(tile: int) -> Val:
    return Val("i8", str(tile))


def _distance(row: Val | int) -> Val:
    return i64(row) if isinstance(row, int) else row


def _do(c: Code, name: str, *args: Val) -> None:
    c.intrinsic(f"x86.{name}", "void", *args, suffix="")
