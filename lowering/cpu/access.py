"""Reading and writing vectors of elements in memory: contiguous, reversed, strided, gathered, and under a lane mask."""

from __future__ import annotations

import dataclasses

from jtile import ir
from jtile.ir.shapes import full_array

from .convert import from_memory, memory_type, register_type, to_memory
from .isa import Isa
from .llvm import Code, Val, const, i64, intrinsic_suffix, lanes_of, like, scalar_of, shuffle, vec
from .math_expr import literal
from .values import Buffer, Ix

_BYTES = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "bfloat": 2, "float": 4, "double": 8}


def elem_bytes(dtype: str) -> int:
    """Bytes of one element in the worker's own buffers (4-bit types stand one a byte there)."""
    return _BYTES[memory_type(dtype)]


@dataclasses.dataclass(frozen=True)
class Lanes:
    """How many lanes the code at this place computes, and which of them are real (`mask=None`: all)."""

    count: int
    mask: Val | None = None


def zero(ty: str) -> Val:
    return Val(
        ty, "zeroinitializer" if lanes_of(ty) > 1 else "0.0" if ty in ("float", "double", "half", "bfloat") else "0"
    )


def const_value(value, dtype: str, lanes: int = 1) -> Val:
    """A number in register form, rounded to its dtype."""
    if ir.DTYPES[dtype].kind == "f":
        value = float(full_array(value, (), dtype))
    return const(register_type(dtype, lanes), literal(scalar_of(register_type(dtype, 1)), value))


def iota_vector(code: Code, lanes: int, scalar: str = "i64", step: int = 1) -> Val:
    if lanes == 1:
        return Val(scalar, "0")
    return Val(vec(lanes, scalar), "<" + ", ".join(f"{scalar} {k * step}" for k in range(lanes)) + ">")


def tail_mask(code: Code, lanes: int, count: Val) -> Val:
    """A mask of lanes, in which lane l is real when l < count."""
    return code.cmp("icmp", "slt", iota_vector(code, lanes), code.splat(count, lanes))


def constant_mask(lanes: int, count: int) -> Val:
    return Val(vec(lanes, "i1"), "<" + ", ".join("i1 true" if k < count else "i1 false" for k in range(lanes)) + ">")


def offset(code: Code, buf: Buffer, ix: tuple[Ix, ...]) -> tuple[Val, int | Val]:
    """Element offset of lane 0, and the distance between lanes."""
    base: Val = i64(0)
    step: int | Val = 0
    for x, s, n in zip(ix, buf.strides, buf.shape, strict=True):
        if n > 1 or x.base.name != "0":
            base = code.add(base, code.mul(x.base, s))
        if x.step:
            part = code.mul(x.step, s)
            step = part if step == 0 else code.add(step, part)
    if isinstance(step, Val) and step.name.lstrip("-").isdigit():
        step = int(step.name)
    return base, step


def read(code: Code, isa: Isa, buf: Buffer, ix: tuple[Ix, ...], lanes: Lanes) -> Val:
    """The elements at `ix` in register form; one scalar where all lanes read the same element."""
    base, step = offset(code, buf, ix)
    ty = memory_type(buf.dtype)
    ptr = code.gep(ty, buf.ptr, base)
    if lanes.count == 1 or step == 0:
        return from_memory(code, isa, code.load(ty, ptr, align=_BYTES[ty]), buf.dtype)
    pairs = buf.shape[-1] == 2 and buf.strides[-1] == 1
    return from_memory(code, isa, _read_vector(code, ty, ptr, step, lanes, pairs), buf.dtype)


def _read_vector(code: Code, ty: str, ptr: Val, step: int | Val, lanes: Lanes, pairs: bool) -> Val:
    """Elements of memory, `step` apart, in the lanes of a vector. `pairs`: the elements lie in rows of two."""
    n = lanes.count
    if step == 1:
        return load_lanes(code, ty, ptr, lanes)
    if step == -1 and lanes.mask is None:
        x = code.load(vec(n, ty), code.gep(ty, ptr, -(n - 1)), align=_BYTES[ty])
        order = ", ".join(f"i32 {k}" for k in reversed(range(n)))
        return code.let(x.ty, f"shufflevector {x}, {x.ty} poison, <{n} x i32> <{order}>")
    if step == 2 and pairs and lanes.mask is None:  # two loads that overlap: nothing behind the last element is read
        near, far = (code.load(vec(n, ty), code.gep(ty, ptr, k), align=_BYTES[ty]) for k in (0, n - 1))
        return shuffle(code, near, far, [2 * k if 2 * k < n else 2 * k + 1 for k in range(n)])
    return gather_lanes(code, ty, ptr, lane_offsets(code, step, n), lanes)


def lane_offsets(code: Code, step: int | Val, n: int) -> Val:
    if isinstance(step, int):
        return iota_vector(code, n, step=step)
    return code.binary("mul", iota_vector(code, n), code.splat(step, n))


def load_lanes(code: Code, ty: str, ptr: Val, lanes: Lanes) -> Val:
    wide = vec(lanes.count, ty)
    if lanes.mask is None or lanes.count == 1:
        return code.load(wide, ptr, align=_BYTES[ty])
    suffix = f"{intrinsic_suffix(wide)}.p0"
    return code.intrinsic("masked.load", wide, ptr, Val("i32", str(_BYTES[ty])), lanes.mask, zero(wide), suffix=suffix)


def gather_lanes(code: Code, ty: str, ptr: Val, offsets: Val, lanes: Lanes, passthru: Val | None = None) -> Val:
    """Lane l reads `ptr[offsets[l]]`; lanes outside the mask give `passthru` (default 0)."""
    wide = vec(lanes.count, ty)
    ptrs = code.let(vec(lanes.count, "ptr"), f"getelementptr {ty}, {ptr}, {offsets}")
    mask = lanes.mask or const(vec(lanes.count, "i1"), "true")
    suffix = f"{intrinsic_suffix(wide)}.v{lanes.count}p0"
    return code.intrinsic(
        "masked.gather", wide, ptrs, Val("i32", str(_BYTES[ty])), mask, passthru or zero(wide), suffix=suffix
    )


def write(code: Code, isa: Isa, buf: Buffer, ix: tuple[Ix, ...], value: Val, lanes: Lanes) -> None:
    """Store register-form `value` (splatted if it is one scalar) at `ix`."""
    base, step = offset(code, buf, ix)
    ty = memory_type(buf.dtype)
    ptr = code.gep(ty, buf.ptr, base)
    if lanes.count > 1 and lanes_of(value.ty) == 1:
        value = code.splat(value, lanes.count)
    raw = to_memory(code, isa, value, buf.dtype)
    if lanes.count == 1:
        code.store(raw, ptr, align=_BYTES[ty])
    elif step == 1:
        store_lanes(code, isa, ty, raw, ptr, lanes)
    else:
        scatter_lanes(code, ty, raw, ptr, lane_offsets(code, step, lanes.count), lanes)


def store_lanes(code: Code, isa: Isa, ty: str, raw: Val, ptr: Val, lanes: Lanes) -> None:
    if lanes.mask is None:
        code.store(raw, ptr, align=_BYTES[ty])
        return
    mask = lanes.mask
    several = not mask.name.startswith("%") and mask.name.count("true") > 1
    if isa.has("avx512f") and scalar_of(raw.ty) in ("i8", "i16", "i32") and not several:
        mask = hidden(code, mask)
    suffix = f"{intrinsic_suffix(raw.ty)}.p0"
    code.intrinsic("masked.store", "void", raw, ptr, Val("i32", str(_BYTES[ty])), mask, suffix=suffix)


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


def scatter_lanes(code: Code, ty: str, raw: Val, ptr: Val, offsets: Val, lanes: Lanes) -> None:
    """Lane l writes `ptr[offsets[l]]`; two lanes with one offset: the later lane wins."""
    n = lanes.count
    ptrs = code.let(vec(n, "ptr"), f"getelementptr {ty}, {ptr}, {offsets}")
    mask = lanes.mask or const(vec(n, "i1"), "true")
    suffix = f"{intrinsic_suffix(raw.ty)}.v{n}p0"
    code.intrinsic("masked.scatter", "void", raw, ptrs, Val("i32", str(_BYTES[ty])), mask, suffix=suffix)


def to_i64(code: Code, x: Val, dtype: str) -> Val:
    """An integer register value as i64, by its sign."""
    scalar = scalar_of(x.ty)
    if scalar == "i64":
        return x
    if (x.name, dtype) in code.widened:
        return code.widened[x.name, dtype]
    signed = not dtype.startswith("u")
    if x.name.lstrip("-").isdigit() and lanes_of(x.ty) == 1:
        n = int(x.name)  # constants are written as signed numbers
        return i64(n if signed or n >= 0 else n + (1 << int(scalar[1:])))
    return code.cast("sext" if signed else "zext", x, like(x.ty, "i64"))
