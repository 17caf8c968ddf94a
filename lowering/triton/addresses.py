"""Where the lanes of an access stand in memory, and which of them are its own and inside the array.

Each dimension is a scalar start and a vector of lanes, so that loops only move a scalar and triton sees which lanes are
neighbours. Bounds are tested for each axis before it meets the others, against a scalar: `lane < side - start`. No
index, however large, wraps into the array: starts are clamped to where all of their lanes are outside.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jtile import ir
from jtile.passes.intervals import Interval, Intervals, walk

from .emitter import Buffer, Emitter, padded
from .ttir import Val, bits

BIG = 2**31  # the least number that i32 cannot hold


@dataclasses.dataclass(frozen=True)
class Line:
    """One dimension of an access: elements `first * scale + lane * step` for lane < size.

    Attributes:
      first: a scalar of at least 32 bits; for a gather the tile of positions.
      signed: how to read `first`.
      known: the bounds that `first` lies between, or None.
      side, stride: side and stride of the array; i32 and i64 scalars where they are known when the kernel runs.
      size: number of lanes; None for a dimension that is dropped, and for a gather.
      axis: the axis of the tile; for a gather the first of its axes.
    """

    first: Val
    signed: bool
    known: Interval | None
    side: int | Val
    stride: int | Val
    axis: int
    size: int | None = None
    scale: int = 1
    step: int = 1

    @property
    def extent(self) -> int:
        """The distance from the first lane to the last."""
        return max((self.size or 1) - 1, 0) * abs(self.step)


@dataclasses.dataclass(frozen=True)
class Places:
    """The lanes of an access: they stand at elements `base + lanes`, and count where `mask` is true (None: all count).

    Attributes:
      base: scalar offset in elements, i32 or i64.
      lanes: offsets of vectors and tiles, each with its first axis in the tile.
      shape: the shape of the access, not padded.
    """

    base: Val
    lanes: tuple[tuple[Val, int], ...]
    mask: Val | None
    shape: tuple[int, ...]


def addresses(em: Emitter, buf: Buffer, index: ir.Index, checked: bool = True) -> tuple[Val, Val | None]:
    """Pointers to the elements of an access (None in the place of a mask that lets all through)."""
    places = resolve(em, buf, lines(em, buf, index), ir.index_shape(index), checked)
    return pointers(em, buf.pointer, places), places.mask


def touches_nothing(buf: Buffer, index: ir.Index) -> bool:
    """Whether an access has no lane, or its array no element: it must not follow a pointer then."""
    return 0 in ir.index_shape(index) or any(isinstance(n, int) and n == 0 for n in buf.shape)


def ranges(em: Emitter) -> dict[int, list[Interval | None]]:
    """The bounds of the numbers in the index of each access, by the identity of the index."""
    if "ranges" not in em.memo:
        found = em.memo["ranges"] = {}

        def look(op: ir.Op, known: Intervals) -> None:
            if isinstance(op, ir.Load | ir.Store | ir.Atomic | ir.AsyncLoad | ir.AsyncStore | ir.Prefetch):
                found[id(op.index)] = [known(ir.dim_value(d)) for d in op.index]

        walk(em.kernel, look)
    return em.memo["ranges"]


def lines(em: Emitter, buf: Buffer, index: ir.Index) -> list[Line]:
    """The dimensions of an access in order."""
    out: list[Line] = []
    known = ranges(em).get(id(index)) or [None] * len(index)
    axis, taken = 0, None
    for d, n, stride, interval in zip(index, buf.shape, buf.strides, known, strict=True):
        v = ir.dim_value(d)
        first = em.integer(v, f"i{max(ir.DTYPES[v.dtype].bits, 32)}")
        signed = ir.DTYPES[v.dtype].kind == "i" or ir.DTYPES[v.dtype].bits < 32
        line = Line(first, signed, interval, n, stride, axis)
        if isinstance(d, ir.Take):
            taken = axis if taken is None else taken
            line = dataclasses.replace(line, axis=taken)
            axis += len(v.shape) if taken == axis else 0
        elif not isinstance(d, ir.At):
            span = isinstance(d, ir.Span)
            line = dataclasses.replace(line, size=d.size, scale=1 if span else d.step, step=d.stride if span else 1)
            axis += 1
        out.append(line)
    return out


def resolve(em: Emitter, buf: Buffer, found: Sequence[Line], shape: tuple[int, ...], checked: bool = True) -> Places:
    """The lanes of an access along `found`; `checked=False`: none of its own lanes is outside."""
    code, full = em.code, padded(shape)
    wide = "i64" if _is_big(buf) else "i32"
    base, cond = code.const(0, wide), None
    lanes: list[tuple[Val, int]] = []
    mask = _taken_lanes(em, found, shape)
    for line in found:
        if line.size is not None:
            start = first_element(em, line, checked)
            with code.vector(line.axis, full):
                inside = _span_mask(em, line, start, checked)
                offset = _offsets(em, line)
            lanes += [] if offset is None else [(offset, line.axis)]
        else:
            start = None if line.first.shape else line.first
            inside = _inside(em, line) if checked else None
            lanes += [(_taken_offsets(em, line), line.axis)] if line.first.shape else []
        if start is not None:
            at = code.to_int(start, wide, signed=line.signed)
            base = code.add(base, _times(em, at, line.stride))
        if inside is not None and inside.shape:
            mask = code.both(mask, lay(em, inside, line.axis, full))
        else:
            cond = code.both(cond, inside)
    if cond is not None:
        mask = code.both(mask, code.splat(cond, full))
    if any(_limits(line)[0] < 0 for line in found):
        base = em.unfolded(base)
    return Places(base, tuple(lanes), mask, shape)


def pointers(em: Emitter, pointer: Val, places: Places) -> Val:
    """Pointers to the lanes; offsets of 64 bits are added before axes are repeated."""
    code, full = em.code, padded(places.shape)
    if places.base.number != 0:
        pointer = _advance(em, pointer, places.base)
    if not full:
        return pointer
    narrow = [p for p in places.lanes if p[0].elem == "i32"]
    for v, axis in places.lanes:
        if v.elem == "i64":
            v = lay(em, v, axis, full, repeat=False)
            pointer = pointer if pointer.shape else code.splat(pointer, [1] * len(full))
            joint = [max(a, b) for a, b in zip(pointer.shape, v.shape, strict=True)]
            pointer = _advance(em, code.broadcast(pointer, joint), code.broadcast(v, joint))
    pointer = code.broadcast(pointer, full) if pointer.shape else code.splat(pointer, full)
    return _advance(em, pointer, code.broadcast(_sum(em, narrow, full), full)) if narrow else pointer


def offsets(em: Emitter, places: Places) -> Val:
    """The offsets of all lanes in elements, in one tensor (or a scalar)."""
    code, full = em.code, padded(places.shape)
    wide = "i64" if any(v.elem == "i64" for v, _ in places.lanes) else places.base.elem
    base = code.splat(code.to_int(places.base, wide), full)
    if not places.lanes:
        return base
    lanes = _sum(em, [(code.to_int(v, wide), axis) for v, axis in places.lanes], full)
    return code.add(base, code.broadcast(lanes, full))


def lay(em: Emitter, v: Val, axis: int, full: Sequence[int], *, repeat: bool = True) -> Val:
    """A vector or tile laid over the axes of a tensor, from `axis` on, and repeated over the others."""
    if not v.shape:
        return em.code.splat(v, full)
    v = em.code.laid(v, axis, len(full))
    return em.code.broadcast(v, full) if repeat else v


def _sum(em: Emitter, parts: Sequence[tuple[Val, int]], full: tuple[int, ...]) -> Val:
    """Offsets of several axes together, on no more axes than they have."""
    code, total = em.code, None
    for v, axis in parts:
        v = lay(em, v, axis, full, repeat=False)
        if total is None:
            total = v
            continue
        joint = [max(a, b) for a, b in zip(total.shape, v.shape, strict=True)]
        total = code.add(code.broadcast(total, joint), code.broadcast(v, joint))
    assert total is not None
    return total


def _advance(em: Emitter, pointer: Val, offset: Val) -> Val:
    right = f"tt.addptr {pointer.name}, {offset.name} : {pointer.type}, {offset.type}"
    return em.code.let(right, pointer.shape, pointer.elem)


def _is_big(buf: Buffer) -> bool:
    """Whether offsets into an array may need 64 bits."""
    return any(not isinstance(n, int) for n in buf.shape) or math.prod(buf.shape) >= BIG  # type: ignore[arg-type]


def _times(em: Emitter, at: Val, stride: int | Val) -> Val:
    if isinstance(stride, int):
        return _scaled(em, at, stride)
    return em.code.mul(at, em.code.splat(em.code.to_int(stride, at.elem), at.shape))


def _scaled(em: Emitter, v: Val, k: int) -> Val:
    """`v * k`; a constant is multiplied at once."""
    return em.code.scale(v, k) if v.number is None else em.code.const(int(v.number) * k, v.elem, v.shape)


# -- one start and its lanes ------------------------------------------------------------------------------------------


def first_element(em: Emitter, line: Line, checked: bool) -> Val:
    """Where a dimension starts. With `checked`, a start whose lanes are all outside may become another such start."""
    lo, hi = _limits(line)
    elem = "i32" if isinstance(line.side, int) and line.side + line.extent + line.scale < BIG else "i64"
    if line.size is None:
        return line.first
    if not checked or (lo >= 0 and hi < (BIG - 1 if elem == "i32" else 2**62)):
        start = em.code.to_int(line.first, elem, signed=line.signed)
    else:
        start = _clamped(em, line, elem)
    return _scaled(em, start, line.scale)


def _limits(line: Line) -> tuple[int, int]:
    """The bounds between which the start of a line lies."""
    lo, hi = (line.known.lo, line.known.hi) if line.known else (-(2**64), 2**64)
    return lo * line.scale, hi * line.scale


def _clamped(em: Emitter, line: Line, elem: str) -> Val:
    """`first`, moved to where its start fits `elem`: from places whose lanes are all outside to other such places."""
    code, v = em.code, line.first
    if elem == "i64" and line.signed:
        v = code.to_int(v, "i64")
    elif elem == "i64":
        v = code.to_int(v, "i64", signed=False)
    signed = line.signed or bits(v.elem) > bits(line.first.elem)
    past = line.extent if line.step < 0 else 0
    if isinstance(line.side, int):
        high = code.const(-(-(line.side + past) // line.scale), v.elem)
    else:
        high = code.shift(code.to_int(line.side, v.elem), past)
    v = code.op("arith.minsi" if signed else "arith.minui", v, high)
    if signed:
        before = 0 if line.step < 0 else line.extent
        v = code.op("arith.maxsi", v, code.const(-(before // line.scale + 1), v.elem))
    return code.to_int(v, elem)


def _span_mask(em: Emitter, line: Line, start: Val, checked: bool) -> Val | None:
    """The lanes of a span that are its own and inside the array, one vector; None where all are."""
    lo, hi = _limits(line)
    code, n = em.code, padded((line.size or 0,))[0]
    limit, side = line.extent + 1, line.side
    distance = _distances(em, line)
    forward = line.step > 0
    fixed = isinstance(side, int)
    above = not checked or (fixed and hi + line.extent < side if forward else lo - line.extent >= 0)
    below = not checked or (lo >= 0 if forward else fixed and hi < side)
    mask = None
    if not above:
        end = _minus(em, side, start) if forward else code.shift(start, 1)
        end = _lane(em, end, limit, distance.elem, own=n != line.size)
        mask = code.cmp("slt", distance, code.splat(end, (n,)))
    elif n != line.size:
        mask = code.cmp("slt", distance, code.const(limit, distance.elem, (n,)))
    if not below:
        first = code.sub(code.const(0, start.elem), start) if forward else code.shift(
            code.sub(start, _side(em, side, start.elem)), 1)  # fmt: skip
        first = _lane(em, first, limit, distance.elem, own=False)
        mask = code.both(mask, code.cmp("sge", distance, code.splat(first, (n,))))
    return mask


def _lane(em: Emitter, v: Val, limit: int, elem: str, *, own: bool) -> Val:
    """A bound on lanes in their width, at most `limit` where the lanes beyond are not the tile's own."""
    code = em.code
    if v.number is not None:
        return code.const(max(min(int(v.number), limit), 0), elem)
    if own or v.elem != elem:
        v = code.op("arith.minsi", v, code.const(limit, v.elem))
    if v.elem != elem:
        v = code.op("arith.maxsi", v, code.const(0, v.elem))
    return code.to_int(v, elem)


def _distances(em: Emitter, line: Line) -> Val:
    """How far each lane is from the first one."""
    n = padded((line.size or 0,))[0]
    step = abs(line.step)
    v = em.code.arange(n)
    return _scaled(em, v if n * step < BIG else em.code.to_int(v, "i64"), step)


def _offsets(em: Emitter, line: Line) -> Val | None:
    """How far each lane is from the first one in memory, in elements."""
    code, n = em.code, padded((line.size or 0,))[0]
    if n == 1:
        return None
    if isinstance(line.stride, int):
        reach = n * abs(line.step) * max(line.stride, 1)
        v = code.arange(n)
        return _scaled(em, v if reach < BIG else code.to_int(v, "i64"), line.step * line.stride)
    v = _scaled(em, code.to_int(code.arange(n), "i64"), line.step)
    return code.mul(v, code.splat(code.to_int(line.stride, "i64"), v.shape))


def _minus(em: Emitter, side: int | Val, start: Val) -> Val:
    if isinstance(side, int) and start.number is not None:
        return em.code.const(side - int(start.number), start.elem)
    return em.code.sub(_side(em, side, start.elem), start)


def _side(em: Emitter, side: int | Val, elem: str, shape: Sequence[int] = ()) -> Val:
    if isinstance(side, int):
        return em.code.const(side, elem, shape)
    return em.code.splat(em.code.to_int(side, elem), shape)


# -- single elements and gathers --------------------------------------------------------------------------------------


def _inside(em: Emitter, line: Line) -> Val | None:
    """0 <= first < side in one comparison; None where that is known."""
    code, v = em.code, line.first
    if line.known and isinstance(line.side, int) and line.known.lo >= 0 and line.known.hi < line.side:
        return None
    if isinstance(line.side, int) and line.side >= BIG and v.elem == "i32":
        v = code.to_int(v, "i64", signed=line.signed)
    return code.cmp("ult", v, _side(em, line.side, v.elem, v.shape))


def _taken_offsets(em: Emitter, line: Line) -> Val:
    fixed = isinstance(line.side, int) and isinstance(line.stride, int)
    elem = "i32" if fixed and line.side * line.stride < BIG else "i64"
    return _times(em, em.code.to_int(line.first, elem, signed=line.signed), line.stride)


def _taken_lanes(em: Emitter, found: Sequence[Line], shape: tuple[int, ...]) -> Val | None:
    """The mask of a gather's own lanes; the lanes of spans are masked with the spans."""
    takes = [line for line in found if line.first.shape]
    if not takes:
        return None
    first, rank = takes[0].axis, len(takes[0].first.shape)
    mask = em.valid(shape[first : first + rank])
    return None if mask is None else lay(em, mask, first, padded(shape))
