"""Tiles whose last axis is a pair, such as the parts of complex numbers: both elements side by side in registers.

A pair is read by two loads of neighbours that are taken apart, and written by one store of both; without this each of
its elements would be gathered and scattered by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jtile import ir

from . import access
from .access import Lanes
from .convert import memory_type, to_memory
from .llvm import Code, Val, i64, lanes_of, shuffle
from .nest import Bounds, emit_nest
from .values import Buffer, Ix

if TYPE_CHECKING:
    from .emitter import Emitter
    from .evaluate import Index, Point


def parts(op: ir.Op | None) -> tuple[ir.Value, ir.Value] | None:
    """The two tiles [..., 1] that an op puts side by side along the last axis; None of any other op."""
    if not isinstance(op, ir.Concat) or len(op.xs) != 2 or ir.DTYPES[op.result.dtype].bits < 16:
        return None
    first, second = op.xs
    last = op.result.type.rank - 1
    return (first, second) if op.axis == last and first.shape == second.shape and first.shape[last] == 1 else None


def is_stored_next(em: Emitter, op: ir.Concat) -> bool:
    """Whether the next op stores the pairs and nothing else reads them, so that they need no memory of their own."""
    k = em.pos + 1
    following = em.plan.block.ops[k] if k < len(em.plan.block.ops) else None
    if not isinstance(following, ir.Store) or em.plan.uses.get(op.result) != [k] or following.value is not op.result:
        return False
    *_, last = following.index
    whole = isinstance(last, ir.Span) and (last.size, last.stride) == (2, 1) and following.ref.shape[-1] == 2
    taken = any(isinstance(d, ir.Take) for d in following.index)
    return whole and not taken and following.mask is None and not _reads(op, _shared(em.kernel, following.ref))


def _shared(kernel: ir.Kernel, ref: ir.Value) -> set[ir.Value]:
    """The Refs that may share memory with one that is stored to."""
    pairs = [{kernel.inputs[i], kernel.outputs[o]} for i, o in kernel.aliases]
    return {ref}.union(*[pair for pair in pairs if ref in pair])


def _reads(op: ir.Op, refs: set[ir.Value]) -> bool:
    """Whether an expression loads from one of the Refs: then it is computed before anything is stored to it."""
    todo, seen = [op], {op}
    while todo:
        at = todo.pop()
        if isinstance(at, ir.Load | ir.Atomic) and at.ref in refs:
            return True
        made = [v.op for v in at.operands() if v.op is not None and v.op not in seen]
        seen.update(made)
        todo += made
    return False


def emit(em: Emitter, pair: tuple[ir.Value, ir.Value], into: Buffer, bounds: Bounds) -> None:
    """Evaluate both parts at every place, and write them side by side."""
    shape = pair[0].shape
    em.prepare(list(pair), shape if not bounds else ())

    def body(p: Point) -> None:
        values = [p.at(x, p.ix) for x in pair]
        write(p, into, p.ix, values)

    emit_nest(em, shape, em.bits(list(pair)), body, bounds=bounds)


def write(p: Point, buf: Buffer, ix: Index, values: list[Val]) -> None:
    """Store the pairs of two vectors at `ix`, whose last entry is 0."""
    code, n = p.code, p.lanes.count
    base, step = access.offset(code, buf, ix)
    if n == 1 or step != 2 or buf.strides[-1] != 1:
        for k, x in enumerate(values):
            access.write(code, p.em.isa, buf, (*ix[:-1], Ix(i64(k))), x, p.lanes)
        return
    wide = [x if lanes_of(x.ty) == n else code.splat(x, n) for x in values]
    raw = _interleaved(code, *[to_memory(code, p.em.isa, x, buf.dtype) for x in wide])
    mask = p.lanes.mask
    lanes = Lanes(2 * n, None if mask is None else _interleaved(code, mask, mask))
    ty = memory_type(buf.dtype)
    access.store_lanes(code, p.em.isa, ty, raw, code.gep(ty, buf.ptr, base), lanes)


def _interleaved(code: Code, a: Val, b: Val) -> Val:
    n = lanes_of(a.ty)
    return shuffle(code, a, b, [k // 2 + n * (k % 2) for k in range(2 * n)])
