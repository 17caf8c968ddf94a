"""Loads that are evaluated lane by lane where they are read: gathers, masks, and tiles that may hang over an edge."""

from __future__ import annotations

import dataclasses
import math

from jtile import ir

from . import access, strided
from .access import Lanes, const_value, place_vector, to_i64
from .convert import from_memory, memory_type
from .evaluate import Index, Point, rule
from .indexing import affine_axes, take_axes
from .llvm import Code, Val, const, i64, lanes_of, vec
from .packed import bytes_of, extract, is_packed
from .values import Buffer, Ix, Step, places_of

NARROW = 1 << 30  # positions that are compared in 32 bits


@dataclasses.dataclass
class Edge:
    """An axis of an array that the lanes of a load go along, by whole elements: lane 0 is at `at` of `limit`."""

    at: Val
    limit: int | Val


@dataclasses.dataclass
class Spot:
    """Where the lanes of one access stand.

    Attributes:
      linear: the element index of each lane, uniform or a vector.
      ok: which lanes are legal and not masked; None: all.
      step: how far the lanes are from the first; None: anywhere.
      bounds: whether the dimensions that are the same for all lanes lie in the array; None: yes.
      edge: the dimension that lanes go along, if they may leave it.
      one_axis: whether the lanes go along one dimension, whose elements lie side by side.
    """

    linear: Val
    ok: Val | None
    step: Step | None
    bounds: Val | None = None
    edge: Edge | None = None
    one_axis: bool = True


def locate(p: Point, op, ix: Index) -> Spot:
    """Element index and legality of every lane of an access at tile index `ix` (bounds, gathers and the user's
    mask)."""
    em, code = p.em, p.code
    ref = em.rep(op.ref)
    first, rank = take_axes(op)
    n = p.lanes.count if any(x.step for x in ix) else 1
    spot = Spot(i64(0), None, 0)
    for a, d, s, limit in zip(affine_axes(em, op), op.index, ref.strides, op.ref.shape, strict=True):
        if a is None:
            at = to_i64(code, p.at(d.indices, ix[first : first + rank]), d.indices.dtype)
            checked, step = True, None if lanes_of(at.ty) > 1 else 0
        else:
            x = Ix(i64(0)) if a.axis is None else ix[a.axis]
            lane0 = code.add(a.start, code.mul(x.base, a.stride))
            at = p.ints(Ix(lane0, x.step * a.stride))
            checked, step = a.checked, x.step * a.stride
        if step != 0:
            known = step is not None and spot.step is not None and isinstance(s, int)
            spot.one_axis = spot.step == 0 and s == 1
            spot.step = spot.step + step * s if known else None
        if checked:
            size = em.size(limit)
            good = code.cmp("icmp", "ult", at, code.splat(code.mul(size, 1), lanes_of(at.ty)))
            spot.ok = _both(code, spot.ok, good)
            if lanes_of(at.ty) == 1:
                spot.bounds = _both(code, spot.bounds, good)
            elif a is not None:
                spot.edge = Edge(lane0, size)
        spot.linear = _wide(code, "add", spot.linear, _wide(code, "mul", at, code.mul(s, 1)))
    if op.mask is not None:
        spot.ok = _both(code, spot.ok, p.at(op.mask, ix))
    if n == 1 or lanes_of(spot.linear.ty) == 1:
        spot.step = None
    return spot


def _both(code: Code, a: Val | None, b: Val) -> Val:
    return b if a is None else _wide(code, "and", a, b)


def _wide(code, op: str, a: Val, b: Val) -> Val:
    n = max(lanes_of(a.ty), lanes_of(b.ty))
    a, b = (x if lanes_of(x.ty) == n else code.splat(x, n) for x in (a, b))
    if n == 1 and a.ty == "i64" and op in ("add", "mul"):
        return code.add(a, b) if op == "add" else code.mul(a, b)
    return code.binary(op, a, b)


@rule(ir.Load)
def _lane_load(p: Point, op: ir.Load, ix: Index) -> Val:
    code, em = p.code, p.em
    ref = em.rep(op.ref)
    em.arena.touch(ref.alloc)
    spot = locate(p, op, ix)
    packed = is_packed(op.ref)
    n = lanes_of(spot.linear.ty)
    if not packed and (raw := _neighbours(p, ref, spot, n)) is not None:
        value = from_memory(code, em.isa, raw, op.ref.dtype)
        zeros = op.mask is None and _is_zero(op.pad)  # as elements outside of the array are
        return value if zeros else _padded(code, value, spot, op, n)
    if n == 1 and spot.ok is not None and lanes_of(spot.ok.ty) > 1:
        n = lanes_of(spot.ok.ty)
        spot = Spot(code.splat(spot.linear, n), spot.ok, None)
    where = bytes_of(code, spot.linear, ref.dtype) if packed else spot.linear
    raw = _raw_load(p, ref, where, spot, n, packed)
    value = from_memory(code, em.isa, extract(code, raw, spot.linear, ref.dtype) if packed else raw, op.ref.dtype)
    if op.pad == 0 and n > 1 and not packed and ir.DTYPES[op.ref.dtype].kind != "f":
        return value
    return _padded(code, value, spot, op, n)


def _is_zero(pad: float) -> bool:
    return pad == 0 and math.copysign(1, pad) > 0


def _padded(code: Code, value: Val, spot: Spot, op: ir.Load, n: int) -> Val:
    """The value, and the pad in lanes that are illegal or masked."""
    if spot.ok is None:
        return value
    pad = code.splat(const_value(op.pad, op.ref.dtype), n)
    ok = spot.ok if lanes_of(spot.ok.ty) == n else code.splat(spot.ok, n)
    return code.select(ok, value, pad)


def _neighbours(p: Point, ref: Buffer, spot: Spot, n: int) -> Val | None:
    """The elements of lanes that go along one dimension, in windows that end where the array does: masked lanes inside
    of it are read, too. Zeros outside of it. None: they do not lie near each other, or a mask of lanes has to say which
    are in the array."""
    code = p.code
    if spot.step is None or not spot.one_axis or (spot.edge is None and p.lanes.mask is not None):
        return None
    edge, places = spot.edge, places_of(spot.step, n)
    found = strided.loads(places, edge is not None or spot.bounds is not None)
    if spot.step != 1 and found is None:
        return None
    ty = memory_type(ref.dtype)
    first = code.let("i64", f"extractelement {spot.linear}, i64 0")

    def inside(start: int, count: int) -> Val | None:
        mask = None if edge is None else _in_array(code, edge, start, count)
        if spot.bounds is None:
            return mask
        return _wide(code, "and", code.splat(spot.bounds, count), mask or const(vec(count, "i1"), "true"))

    ptr = code.gep(ty, ref.ptr, first)
    if spot.step == 1:
        return access.load_lanes(code, ty, ptr, Lanes(n, inside(0, n)))
    return strided.load_windows(code, ty, ptr, found, inside)


def _in_array(code: Code, edge: Edge, start: int, count: int) -> Val:
    """Which of some elements in a row, beginning `start` behind lane 0, lie in the array."""
    at, limit = code.add(edge.at, start), edge.limit
    if isinstance(limit, Val) or limit > NARROW:
        position = code.binary("add", code.splat(at, count), access.iota_vector(count))
        return code.cmp("icmp", "ult", position, code.splat(code.mul(limit, 1), count))
    at = code.intrinsic("smin", "i64", code.intrinsic("smax", "i64", at, i64(-NARROW)), i64(NARROW))
    position = code.binary("add", code.splat(code.cast("trunc", at, "i32"), count), place_vector(range(count), "i32"))
    return code.cmp("icmp", "ult", position, code.splat(Val("i32", str(limit)), count))


def _raw_load(p: Point, ref: Buffer, where: Val, spot: Spot, n: int, packed: bool) -> Val:
    code = p.code
    ty = "i8" if packed else memory_type(ref.dtype)
    if n == 1:
        ptr = code.gep(ty, ref.ptr, where)
        if spot.ok is not None:
            ptr = code.select(spot.ok, ptr, code.var("i64", count=8, align=64))
        return code.load(ty, ptr, align=access.BYTES[ty])
    ok = spot.ok if spot.ok is None or lanes_of(spot.ok.ty) == n else code.splat(spot.ok, n)
    mask = ok if p.lanes.mask is None else p.lanes.mask if ok is None else code.binary("and", ok, p.lanes.mask)
    if spot.step is not None and not packed and access.is_near(spot.step, n, mask):
        first = code.let("i64", f"extractelement {where}, i64 0")
        return access.read_lanes(code, ty, code.gep(ty, ref.ptr, first), spot.step, Lanes(n, mask))
    return access.gather_lanes(code, ty, ref.ptr, where, Lanes(n, mask))
