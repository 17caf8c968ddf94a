"""Copies of tiles whose rows hang over the array, in boxes of fewer rows.

A tensor map takes longer for rows outside of an array than for those inside: on an H200 a product of 72 rows, of which
tiles of 128 have 56 outside, took a fifth longer than one of 128. Where nobody needs the zeros there, such a tile comes
in boxes that hardly hang over, and what a box that is outside as a whole brings instead is the first rows of the array.

Nobody needs the zeros where no op mixes the rows of a product, and all that is stored of a row is stored in its row of
an array that ends where this one does: then no value of a row outside leaves the kernel, unless a loop that goes from
tile to tile carries it to another one.
"""

from __future__ import annotations

from collections.abc import Iterator

from jtile.ir import (
    Assert,
    At,
    Atomic,
    Builder,
    Dim,
    For,
    Index,
    Kernel,
    Load,
    Op,
    Select,
    Span,
    Store,
    Tile,
    Value,
    While,
    dim_value,
)
from jtile.ir.types import DTYPES

from .row_axes import index_axes
from .split_rows import Split, by_rows, made_in

LEAST = 16  # rows of the smallest box; fewer than these may hang over
LONGEST = 256  # bytes of a row of a buffer: copies of longer ones are many boxes already
MOST = 4  # rows of tiles: where there are more, the last is a small share, and zeros take less power to multiply


def hanging(kernel: Kernel, consumers: int) -> dict[Load, int]:
    """The loads whose tiles hang over by rows that nobody needs, with the rows of a box."""
    shares = by_rows(kernel)
    if not isinstance(shares, Split) or any(isinstance(op, Assert) for op in kernel.body.walk()):
        return {}
    found = {op: _rows(op, consumers) for op, axis in shares.axes.items() if axis == 0}
    return {op: rows for op, rows in found.items() if rows and _only_inside(shares, op)}


def _rows(op: Load, consumers: int) -> int | None:
    """Rows of the boxes of a load; None where the tile of a consumer is best copied as a whole."""
    shape, place = op.result.shape, row_dimension(op.index)
    d, n = op.index[place], op.ref.type.shape[place]
    if len(shape) != 2 or shape[1] * DTYPES[op.result.dtype].bits // 8 > LONGEST or op.pad != 0:
        return None
    if not isinstance(d, Tile) or d.size != d.step or not isinstance(n, int) or place == len(op.index) - 1:
        return None
    rows = whole = d.size // consumers
    while rows > LEAST and -n % rows >= LEAST:
        rows //= 2
    return rows if 0 < n <= MOST * d.size and (rows < whole or -n % d.size >= whole) else None


def row_dimension(index: Index) -> int:
    """Which dimension of an array the first axis of a tile is."""
    return next(i for i, d in enumerate(index) if not isinstance(d, At))


def _only_inside(shares: Split, load: Load) -> bool:
    """Whether rows that are outside in the load are outside in every array that they are written to."""
    place = row_dimension(load.index)
    d, n = load.index[place], load.ref.type.shape[place]
    same = all(_same_rows(op, shares.cut[op], d, n) for op in _writes(shares.kernel) if op in shares.cut)
    return same and not _moves(shares, dim_value(d))


def _moves(shares: Split, at: Value) -> bool:
    """Whether a loop that carries rows goes on to other rows: their place `at` is computed inside it."""
    loops = [op for op in shares.kernel.body.walk() if isinstance(op, For | While)]
    carrying = [op for op in loops if any(a is not None for r in op.results for a in shares.wanted.get(r, ()))]
    return any(at in made_in(loop) for loop in carrying)


def _writes(kernel: Kernel) -> Iterator[Op]:
    return (op for op in kernel.body.walk() if isinstance(op, Store | Atomic))


def _same_rows(op: Op, axis: int | None, d: Dim, n: int) -> bool:
    """Whether what an op writes along `axis` of its value are the rows d of at most n."""
    if not isinstance(op, Store) or axis is None:
        return False
    place, inside = index_axes(op.index)[axis]
    size = op.ref.type.shape[place]
    return op.index[place] == d and inside is None and isinstance(size, int) and size <= n


def boxes(b: Builder, d: Dim, n: int, rows: int) -> list[tuple[int, Dim]]:
    """The boxes of `rows` rows that an index dimension of an axis of n elements comes in: the first row of the buffer,
    and where it lies in the array."""
    assert isinstance(d, Tile)  # a Tile: its size is the step of its index
    first = b.map("mul", d.index, b.index(d.size))
    out: list[tuple[int, Dim]] = []
    for row in range(0, d.size, rows):
        at = b.map("add", first, b.index(row)) if row else first
        inside = b.map("lt", at, b.index(n))
        out.append((row, Span(b.value(Select(inside, at, b.index(0))), rows)))
    return out
