"""Reading and writing vectors of elements in memory: contiguous, reversed, strided, gathered, and under a lane mask."""

from __future__ import annotations

from collections.abc import Sequence

from jtile import ir
from jtile.ir.shapes import full_array

from . import strided
from .convert import from_memory, memory_type, register_type, to_memory
from .isa import Isa
from .llvm import Code, Val, const, i64, intrinsic_suffix, lanes_of, like, scalar_of, vec
from .math_expr import literal
from .values import Buffer, Ix, Places, Step, places_of
from .vectors import BYTES, Lanes, load_lanes, store_lanes, zero


def elem_bytes(dtype: str) -> int:
    """Bytes of one element in the worker's own buffers (4-bit types stand one a byte there)."""
    return BYTES[memory_type(dtype)]


def const_value(value, dtype: str, lanes: int = 1) -> Val:
    """A number in register form, rounded to its dtype."""
    if ir.DTYPES[dtype].kind == "f":
        value = float(full_array(value, (), dtype))
    return const(register_type(dtype, lanes), literal(scalar_of(register_type(dtype, 1)), value))


def iota_vector(lanes: int) -> Val:
    return place_vector(tuple(range(lanes))) if lanes > 1 else i64(0)


def tail_mask(code: Code, lanes: int, count: Val) -> Val:
    """A mask of lanes, in which lane l is real when l < count."""
    return code.cmp("icmp", "slt", iota_vector(lanes), code.splat(count, lanes))


def constant_mask(lanes: int, count: int) -> Val:
    return Val(vec(lanes, "i1"), "<" + ", ".join("i1 true" if k < count else "i1 false" for k in range(lanes)) + ">")


def offset(code: Code, buf: Buffer, ix: tuple[Ix, ...]) -> tuple[Val, Step | Val]:
    """Element offset of lane 0, and the distance between lanes, or a vector of the distances from lane 0."""
    base: Val = i64(0)
    step: Step | Val = 0
    for x, s, n in zip(ix, buf.strides, buf.shape, strict=True):
        if n > 1 or x.base.name != "0":
            base = code.add(base, code.mul(x.base, s))
        if x.step:
            step = _further(code, step, x.step * s if isinstance(s, int) else _times(code, x.step, s))
    if isinstance(step, Val) and step.name.lstrip("-").isdigit():
        step = int(step.name)
    return base, step


def _times(code: Code, step: Step, stride: Val) -> Val:
    if isinstance(step, int):
        return code.mul(step, stride)
    places = step.places
    return code.binary("mul", place_vector(places), code.splat(stride, len(places)))


def _further(code: Code, a: Step | Val, b: Step | Val) -> Step | Val:
    """The sum of two distances."""
    if not isinstance(a, Val) and not isinstance(b, Val):
        return a + b
    if a == 0:
        return b
    n = next((len(x.places) for x in (a, b) if isinstance(x, Places)), 0)
    n = max([n, *(lanes_of(x.ty) for x in (a, b) if isinstance(x, Val))])
    if n == 1:
        return code.add(*(x if isinstance(x, Val) else i64(x) for x in (a, b)))
    return code.binary("add", *(lane_offsets(code, x, n) for x in (a, b)))


def read(code: Code, isa: Isa, buf: Buffer, ix: tuple[Ix, ...], lanes: Lanes) -> Val:
    """The elements at `ix` in register form; one scalar where all lanes read the same element."""
    base, step = offset(code, buf, ix)
    ty = memory_type(buf.dtype)
    ptr = code.gep(ty, buf.ptr, base)
    if lanes.count == 1 or step == 0:
        return from_memory(code, isa, code.load(ty, ptr, align=BYTES[ty]), buf.dtype)
    return from_memory(code, isa, read_lanes(code, ty, ptr, step, lanes), buf.dtype)


def read_lanes(code: Code, ty: str, ptr: Val, step: Step | Val, lanes: Lanes) -> Val:
    """Elements of memory, `step` apart, in the lanes of a vector; zeros outside of the mask."""
    n = lanes.count
    if step == 1:
        return load_lanes(code, ty, ptr, lanes)
    near = None if isinstance(step, Val) else strided.load(code, ty, ptr, places_of(step, n), lanes.mask)
    return gather_lanes(code, ty, ptr, lane_offsets(code, step, n), lanes) if near is None else near


def is_near(step: Step, lanes: int, mask: Val | None) -> bool:
    """Whether `read_lanes` reads neighbours, with no gather."""
    return step == 1 or strided.loads(places_of(step, lanes), mask is not None) is not None


def place_vector(places: Sequence[int], scalar: str = "i64") -> Val:
    return Val(vec(len(places), scalar), "<" + ", ".join(f"{scalar} {k}" for k in places) + ">")


def lane_offsets(code: Code, step: Step | Val, n: int) -> Val:
    """The distance of each of n lanes from lane 0."""
    if not isinstance(step, Val):
        return place_vector(places_of(step, n))
    return step if lanes_of(step.ty) > 1 else code.binary("mul", iota_vector(n), code.splat(step, n))


def gather_lanes(code: Code, ty: str, ptr: Val, offsets: Val, lanes: Lanes, passthru: Val | None = None) -> Val:
    """Lane l reads `ptr[offsets[l]]`; lanes outside the mask give `passthru` (default 0)."""
    wide = vec(lanes.count, ty)
    ptrs = code.let(vec(lanes.count, "ptr"), f"getelementptr {ty}, {ptr}, {offsets}")
    mask = lanes.mask or const(vec(lanes.count, "i1"), "true")
    suffix = f"{intrinsic_suffix(wide)}.v{lanes.count}p0"
    return code.intrinsic(
        "masked.gather", wide, ptrs, Val("i32", str(BYTES[ty])), mask, passthru or zero(wide), suffix=suffix
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
        code.store(raw, ptr, align=BYTES[ty])
    elif step == 1:
        store_lanes(code, isa, ty, raw, ptr, lanes)
    elif isinstance(step, Val) or not strided.store(code, isa, ty, raw, ptr, places_of(step, lanes.count), lanes.mask):
        scatter_lanes(code, ty, raw, ptr, lane_offsets(code, step, lanes.count), lanes)


def scatter_lanes(code: Code, ty: str, raw: Val, ptr: Val, offsets: Val, lanes: Lanes) -> None:
    """Lane l writes `ptr[offsets[l]]`; two lanes with one offset: the later lane wins."""
    n = lanes.count
    ptrs = code.let(vec(n, "ptr"), f"getelementptr {ty}, {ptr}, {offsets}")
    mask = lanes.mask or const(vec(n, "i1"), "true")
    suffix = f"{intrinsic_suffix(raw.ty)}.v{n}p0"
    code.intrinsic("masked.scatter", "void", raw, ptrs, Val("i32", str(BYTES[ty])), mask, suffix=suffix)


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
