"""Tiles whose last axis is short, such as the parts of complex numbers: that axis stands side by side in registers.

A pair is read by two loads of neighbours that are taken apart, and written by one store of both; so are 4 to 32
elements, in as many stores as there are vectors. Otherwise each element would be gathered and scattered by itself.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

from jtile import ir

from . import access, plan, together
from .access import Lanes
from .convert import memory_type, to_memory
from .llvm import Code, Val, i64, lanes_of, shuffle
from .nest import Bounds, emit_nest
from .values import Buffer, Ix, Lazy, places_of

if TYPE_CHECKING:
    from .emitter import Emitter
    from .evaluate import Index, Point


_MOST = 32  # parts, each of which takes a register


class Parts(NamedTuple):
    """Tiles that an op puts side by side along the last axis that is longer than one element, one element of each."""

    op: ir.Concat
    axis: int


def parts(op: ir.Op | None) -> Parts | None:
    """The parts that an op puts side by side, a power of two of them; None of any other op."""
    if not isinstance(op, ir.Concat) or ir.DTYPES[op.result.dtype].bits < 16:
        return None
    count, shape = len(op.xs), op.result.shape
    if count not in range(2, _MOST + 1) or count & (count - 1) or math.prod(shape[op.axis :]) != count:
        return None
    return Parts(op, op.axis) if all(x.shape[op.axis] == 1 for x in op.xs) else None


def stored_next(em: Emitter, op: ir.Concat) -> ir.Store | None:
    """The next op, where it stores the parts, maybe as rows of all of them, and nothing else reads these, so that they
    need no memory of their own."""
    ops, k, value = em.plan.block.ops, em.pos + 1, op.result
    if k < len(ops) and _merges(ops[k], op) and em.plan.uses.get(value) == [k]:
        value = ops[k].results[0]
        k += 1
    following = ops[k] if k < len(ops) else None
    if not isinstance(following, ir.Store) or em.plan.uses.get(value) != [k] or following.value is not value:
        return None
    *_, last = following.index
    size = value.shape[-1]
    side_by_side = isinstance(last, ir.Tile) or (isinstance(last, ir.Span) and last.stride == 1)
    if value is op.result:
        whole = not following.checked or _begins_at_zero(last)
        side_by_side = side_by_side and whole and following.ref.shape[-1] == size == len(op.xs)
    taken = any(isinstance(d, ir.Take) for d in following.index)
    if not side_by_side or taken or following.mask is not None:
        return None
    # What is loaded from the Ref is computed before anything is stored to it.
    return None if plan.loads_from(op, plan.same_memory(em.kernel, following.ref)) else following


def _begins_at_zero(d: ir.Span | ir.Tile) -> bool:
    start = ir.dim_value(d).op
    return isinstance(start, ir.Full) and start.value == 0


def _merges(op: ir.Op, of: ir.Concat) -> bool:
    """Whether an op makes one axis of the parts and of the axis in front."""
    shape = of.result.shape
    whole = isinstance(op, ir.Reshape) and of.axis == len(shape) - 1 > 0
    return whole and op.x is of.result and op.shape == (*shape[:-2], shape[-2] * shape[-1])


def left_for(em: Emitter, op: ir.Store) -> Parts | None:
    """The parts that were left for this store."""
    made = op.value.op
    made = made.x.op if is_merged(em, made) else made
    return parts(made) if made is not None and isinstance(em.env.get(made.results[0]), Lazy) else None


def is_merged(em: Emitter, op: ir.Op | None) -> bool:
    """Whether an op makes rows of parts that were left for the store of them."""
    return isinstance(op, ir.Reshape) and isinstance(op.x.op, ir.Concat) and isinstance(em.env.get(op.x), Lazy)


def emit(em: Emitter, pair: Parts, into: Buffer, bounds: Bounds) -> None:
    """Evaluate all parts at every place within the bounds, and write them side by side: to a buffer of the shape of all
    parts, or to one in which their axis and the one in front are merged."""
    op, count, edge = pair.op, len(pair.op.xs), None
    if len(into.shape) < op.result.type.rank:
        *rest, n = into.shape
        into = dataclasses.replace(into, shape=(*rest, n // count, count), strides=(*into.strides[:-1], count, 1))
        edge = bounds.get(len(rest))
        if edge is not None:
            lo, hi = (em.code.let("i64", f"udiv {x}, {count}") for x in (edge[0], em.code.add(edge[1], count - 1)))
            bounds = {**bounds, len(rest): (lo, hi)}
    elif pair.axis in bounds:  # all of the parts, whose axis has one element in each
        bounds = {**bounds, pair.axis: (i64(0), i64(1))}
    shape, roots, readers = op.xs[0].shape, list(op.xs), [op]
    if pair.axis == len(shape) - 1 and not _reads_axis(em, roots, shape):
        readers, roots, shape = [x.op for x in roots], [x.op.x for x in roots], shape[:-1]
    if all(len(em.plan.uses[r.results[0]]) == 1 for r in readers if r is not op):
        em.flagged -= together.kept_for_nobody(em, roots, readers)
    em.prepare(roots, shape if not bounds else ())
    rest = (Ix(i64(0)),) * (len(into.shape) - len(shape))

    def body(p: Point) -> None:
        write(p, into, (*p.ix, *rest), pair.axis, [p.at(x, p.ix) for x in roots], edge)

    emit_nest(em, shape, em.bits(roots), body, bounds=bounds)


def _reads_axis(em: Emitter, roots: list[ir.Value], shape: tuple[int, ...]) -> bool:
    """Whether the tiles are anything but others with an axis of one element more."""
    adds = lambda x: isinstance(x.op, ir.Reshape) and x.op.x.shape == shape[:-1] and isinstance(em.env[x], Lazy)
    return not all(map(adds, roots))


def write(p: Point, buf: Buffer, ix: Index, axis: int, values: list[Val], edge: tuple[Val, Val] | None = None) -> None:
    """Store vectors at `ix`, which is 0 along the axis, so that their elements alternate; those whose place along this
    axis and the one in front is in `edge`, where it is given."""
    code, n, count = p.code, p.lanes.count, len(values)
    base, step = access.offset(code, buf, ix)
    if n == 1 or step != count or buf.strides[axis] != 1 or (edge is not None and ix[axis - 1].step != 1):
        for k, x in enumerate(values):
            _write_part(p, buf, (*ix[:axis], Ix(i64(k)), *ix[axis + 1 :]), axis, x, edge)
        return
    wide = [x if lanes_of(x.ty) == n else code.splat(x, n) for x in values]
    raw = _alternating(code, [to_memory(code, p.em.isa, x, buf.dtype) for x in wide])
    mask = p.lanes.mask
    ty, each = memory_type(buf.dtype), n if count > 2 else 2 * n
    masks = [None] * count if mask is None or edge is not None else _alternating(code, [mask] * count)
    for k, (x, m) in enumerate(zip(raw, masks, strict=False)):
        if edge is not None:
            first = code.add(code.mul(ix[axis - 1].base, count), k * each)
            m = within(code, Ix(first, 1), each, edge)
        access.store_lanes(code, p.em.isa, ty, x, code.gep(ty, buf.ptr, code.add(base, k * each)), Lanes(each, m))


def _write_part(p: Point, buf: Buffer, ix: Index, axis: int, x: Val, edge: tuple[Val, Val] | None) -> None:
    code, n, lanes = p.code, p.lanes.count, p.lanes
    if edge is None:
        access.write(code, p.em.isa, buf, ix, x, lanes)
        return
    count, row = buf.shape[axis], ix[axis - 1]
    inside = within(code, Ix(code.add(code.mul(row.base, count), ix[axis].base), row.step * count), n, edge)
    if n == 1:
        with code.when(inside):
            access.write(code, p.em.isa, buf, ix, x, lanes)
        return
    mask = inside if lanes.mask is None else code.binary("and", inside, lanes.mask)
    access.write(code, p.em.isa, buf, ix, x, Lanes(n, mask))


def within(code: Code, at: Ix, lanes: int, edge: tuple[Val, Val]) -> Val:
    """Which lanes are from `edge[0]` up to and without `edge[1]`."""
    narrow = lambda x: code.splat(code.cast("trunc", x, "i32"), lanes)  # places in a tile
    first, count = code.sub(at.base, edge[0]), code.sub(edge[1], edge[0])
    place = narrow(first)
    if lanes > 1:
        place = code.binary("add", place, access.place_vector(places_of(at.step, lanes), "i32"))
    return code.cmp("icmp", "ult", place, narrow(count))


def _alternating(code: Code, rows: list[Val]) -> list[Val]:
    """Vectors [part][lane] as vectors that hold [lane][part] one after the other; of two as one vector."""
    n = lanes_of(rows[0].ty)
    if len(rows) == 2:
        return [shuffle(code, *rows, _merged(range(2 * n), n))]
    groups = [[row] for row in rows]
    low, high = _merged(range(n), n), _merged(range(n, 2 * n), n)
    while len(groups) > 1:
        pairs = zip(groups[: len(groups) // 2], groups[len(groups) // 2 :], strict=True)
        groups = [
            [shuffle(code, a, b, order) for a, b in zip(*pair, strict=True) for order in (low, high)] for pair in pairs
        ]
    return groups[0]


def _merged(places: range, n: int) -> list[int]:
    """For a vector that takes elements of two vectors of n lanes in turn: the lane that each of the places holds."""
    return [k // 2 + n * (k % 2) for k in places]
