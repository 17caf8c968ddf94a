"""Vectors of neighbours in memory: whole, and under a mask of lanes."""

from __future__ import annotations

import dataclasses

from .isa import Isa
from .llvm import Code, Val, intrinsic_suffix, lanes_of, scalar_of, vec

BYTES = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "bfloat": 2, "float": 4, "double": 8}


@dataclasses.dataclass(frozen=True)
class Lanes:
    """How many lanes the code at this place computes, and which of them are real (`mask=None`: all)."""

    count: int
    mask: Val | None = None


def zero(ty: str) -> Val:
    return Val(
        ty, "zeroinitializer" if lanes_of(ty) > 1 else "0.0" if ty in ("float", "double", "half", "bfloat") else "0"
    )


def load_lanes(code: Code, ty: str, ptr: Val, lanes: Lanes) -> Val:
    wide = vec(lanes.count, ty)
    if lanes.mask is None or lanes.count == 1:
        return code.load(wide, ptr, align=BYTES[ty])
    suffix = f"{intrinsic_suffix(wide)}.p0"
    return code.intrinsic("masked.load", wide, ptr, Val("i32", str(BYTES[ty])), lanes.mask, zero(wide), suffix=suffix)


def store_lanes(code: Code, isa: Isa, ty: str, raw: Val, ptr: Val, lanes: Lanes) -> None:
    if lanes.mask is None:
        code.store(raw, ptr, align=BYTES[ty])
        return
    mask = lanes.mask
    several = not mask.name.startswith("%") and mask.name.count("true") > 1
    if isa.has("avx512f") and scalar_of(raw.ty) in ("i8", "i16", "i32") and not several:
        mask = hidden(code, mask)
    suffix = f"{intrinsic_suffix(raw.ty)}.p0"
    code.intrinsic("masked.store", "void", raw, ptr, Val("i32", str(BYTES[ty])), mask, suffix=suffix)


def hidden(code: Code, mask: Val) -> Val:
    """A copy of a mask whose value LLVM cannot know.

    LLVM 22 turns a masked store of truncated lanes under a mask that it knows to have one lane into a scalar store of
    the wide lane (on AVX-512), which overwrites the neighbours.
    """
    n = lanes_of(mask.ty)
    bits = code.cast("bitcast", mask, f"i{n}")
    wide = code.cast("zext", bits, "i32") if n < 32 else bits
    wide = code.let(wide.ty, f'call {wide.ty} asm "", "=r,0"({wide})')
    return code.cast("bitcast", code.cast("trunc", wide, f"i{n}") if n < 32 else wide, mask.ty)
