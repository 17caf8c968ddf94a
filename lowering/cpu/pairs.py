"""Tiles whose last axis is short, such as the parts of complex numbers: that axis stands side by side in registers.

A pair is read by two loads of neighbours that are taken apart, and written by one store of both; so are 4 to 32
elements, in as many stores as there are vectors. Otherwise each element would be gathered and scattered by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jtile import ir

from . import access, plan
from .access import Lanes
from .convert import memory_type, to_memory
from .llvm import Code, Val, i64, lanes_of, shuffle
from .nest import Bounds, emit_nest
from .values import Buffer, Ix

if TYPE_CHECKING:
    from .emitter import Emitter
    from .evaluate import Index, Point


_MOST = 32  # parts, each of which takes a register


def parts(op: ir.Op | None) -> tuple[ir.Value, ...] | None:
    """The tiles [..., 1], a power of two, that an op puts side by side along the last axis; None of any other op."""
    if not isinstance(op, ir.Concat) or ir.DTYPES[op.result.dtype].bits < 16:
        return None
    count, last = len(op.xs), op.result.type.rank - 1
    if count not in range(2, _MOST + 1) or count & (count - 1) or op.axis != last:
        return None
    return tuple(op.xs) if all(x.shape == (*op.result.shape[:last], 1) for x in op.xs) else None


def is_stored_next(em: Emitter, op: ir.Concat) -> bool:
    """Whether the next op stores the pairs and nothing else reads them, so that they need no memory of their own."""
    k = em.pos + 1
    following = em.plan.block.ops[k] if k < len(em.plan.block.ops) else None
    if not isinstance(following, ir.Store) or em.plan.uses.get(op.result) != [k] or following.value is not op.result:
        return False
    *_, last = following.index
    n = len(op.xs)
    whole = isinstance(last, ir.Span) and (last.size, last.stride) == (n, 1) and following.ref.shape[-1] == n
    taken = any(isinstance(d, ir.Take) for d in following.index)
    simple = whole and not taken and following.mask is None
    # What is loaded from the Ref is computed before anything is stored to it.
    return simple and not plan.loads_from(op, plan.same_memory(em.kernel, following.ref))


def emit(em: Emitter, pair: tuple[ir.Value, ...], into: Buffer, bounds: Bounds) -> None:
    """Evaluate all parts of a pair at every place within the bounds, and write them side by side."""
    shape = pair[0].shape
    em.prepare(list(pair), shape if not bounds else ())

    def body(p: Point) -> None:
        values = [p.at(x, p.ix) for x in pair]
        write(p, into, p.ix, values)

    emit_nest(em, shape, em.bits(list(pair)), body, bounds=bounds)


def write(p: Point, buf: Buffer, ix: Index, values: list[Val]) -> None:
    """Store vectors at `ix`, whose last entry is 0, so that their elements alternate."""
    code, n, count = p.code, p.lanes.count, len(values)
    base, step = access.offset(code, buf, ix)
    if n == 1 or step != count or buf.strides[-1] != 1:
        for k, x in enumerate(values):
            access.write(code, p.em.isa, buf, (*ix[:-1], Ix(i64(k))), x, p.lanes)
        return
    wide = [x if lanes_of(x.ty) == n else code.splat(x, n) for x in values]
    raw = _alternating(code, [to_memory(code, p.em.isa, x, buf.dtype) for x in wide])
    mask = p.lanes.mask
    masks = [None] * count if mask is None else _alternating(code, [mask] * count)
    ty, each = memory_type(buf.dtype), n if count > 2 else 2 * n
    for k, (x, m) in enumerate(zip(raw, masks, strict=False)):
        access.store_lanes(code, p.em.isa, ty, x, code.gep(ty, buf.ptr, code.add(base, k * each)), Lanes(each, m))


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
