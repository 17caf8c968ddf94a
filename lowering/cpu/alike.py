"""What neighbouring programs compute alike, a worker computes once.

The fastest axis of a grid that has several programs often cuts up one operand alone: each program of a product takes
other rows of the weights, and all of them round the same rows of x. What such programs compute from memory that the
kernel does not write, and without their own place on that axis, stands in the worker's memory from one program to the
next. The first word there says for which programs; before a call it is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jtile import ir

from . import plan
from .emit_control import Carry, carry_places
from .emitter import Emitter
from .llvm import Val, i64
from .values import Buffer

HEADER = 64  # bytes in front of the workspace of a kernel that keeps something
_WORTH = 256  # elements that a kept value is computed from, at least: to look whether it is there takes a nanosecond
_DEAR = (ir.Reduce, ir.ArgReduce, ir.Cumulative, ir.Sort, ir.Dot, ir.DotScaled)  # what is worth keeping is made by one
_IN_PLACE = (*plan.LAZY_OPS, ir.Store, ir.Load, ir.Reduce)  # ops that compute what they read on the way


@dataclasses.dataclass(frozen=True)
class Alike:
    """Of a kernel: the values that programs keep for the next ones, the ops that make them, those of them that nothing
    else needs, and the axis along which programs are alike."""

    values: tuple[ir.Value, ...]
    ops: tuple[ir.Op, ...]
    gone: frozenset[ir.Op]
    axis: int


def alike(kernel: ir.Kernel) -> Alike | None:
    """What programs of a kernel compute alike; None: nothing that is worth keeping."""
    several = [k for k, n in enumerate(kernel.grid) if isinstance(n, ir.Extent) or n > 1]
    if not several or kernel.devices:
        return None
    same = _same(kernel, several[-1])
    dear = _dear(kernel)
    values: dict[ir.Value, None] = {}
    seen: set[ir.Value] = set()
    for op in kernel.body.ops:
        if op not in same:
            values |= dict.fromkeys(_worth_keeping(op, same, dear, seen))
    if not values:
        return None
    ops = _makers(kernel, values)
    return Alike(tuple(values), ops, _unneeded(kernel, ops, values), several[-1])


def _same(kernel: ir.Kernel, axis: int) -> set[ir.Op]:
    """The ops of a kernel that have the same results in all programs along an axis."""
    written = plan.written_refs(kernel)
    made = {v for op in kernel.body.ops for v in op.results}
    same: set[ir.Op] = set()

    def is_same(op: ir.Op) -> bool:
        if isinstance(op, ir.ProgramId):
            return op.axis != axis
        if isinstance(op, ir.Load):
            if ir.root(op.ref) in written:
                return False
        elif not plan.is_lazy(op) and not isinstance(op, _DEAR):
            return False
        return all(v.op in same for v in op.operands() if v in made)

    for op in kernel.body.ops:
        if is_same(op):
            same.add(op)
    return same


def _dear(kernel: ir.Kernel) -> set[ir.Value]:
    """The values that are made by a reduction or a product of many numbers."""
    dear: set[ir.Value] = set()
    for op in kernel.body.ops:
        sizes = (a.type.size for a in op.operands() if isinstance(a.type, ir.TileType))
        if (isinstance(op, _DEAR) and max(sizes, default=0) >= _WORTH) or not dear.isdisjoint(op.operands()):
            dear.update(op.results)
    return dear


def _worth_keeping(op: ir.Op, same: set[ir.Op], dear: set[ir.Value], seen: set[ir.Value]) -> Iterator[ir.Value]:
    """The dear values of `same` that an op outside of it reads; of what it computes on its way, those that this is made
    of. seen: the values on such ways so far."""
    todo = [v for v in plan.used_by(op) if v.op in same]
    while todo:
        v = todo.pop()
        if v not in dear:
            continue
        if not isinstance(op, _IN_PLACE) or isinstance(v.op, _DEAR):
            if v.type.rank:
                yield v
        elif v not in seen:
            seen.add(v)
            todo += v.op.operands()


def _makers(kernel: ir.Kernel, values: dict[ir.Value, None]) -> tuple[ir.Op, ...]:
    """The ops that make some values, in order."""
    wanted = set(values)
    ops = []
    for op in reversed(kernel.body.ops):
        if wanted.intersection(op.results):
            ops.append(op)
            wanted.update(op.operands())
    return tuple(reversed(ops))


def _unneeded(kernel: ir.Kernel, ops: tuple[ir.Op, ...], values: dict[ir.Value, None]) -> frozenset[ir.Op]:
    """Those of `ops` that nothing needs once the values are there."""
    inside = set(ops)
    needed: set[ir.Value] = set()
    gone = set()
    for op in reversed(kernel.body.ops):
        if op in inside and not needed.intersection(op.results):
            gone.add(op)
        else:
            needed.update(v for v in plan.used_by(op) if v not in values)
    return frozenset(gone)


def slots_of(em: Emitter, of: Alike) -> list[Buffer]:
    """Memory for the values of a kernel that stay."""
    return [dataclasses.replace(em.new_buffer(v.shape, v.dtype), owned=False) for v in of.values]


def emit(em: Emitter, of: Alike, slots: list[Buffer], header: Val, p: Val, grid: list[Val]) -> None:
    """Emit at the head of program number `p` what brings the values to their slots, if they are not there yet."""
    code = em.code
    along = grid[of.axis]  # axes behind it have one program
    one_row = all(n == 1 for n in em.kernel.grid[: of.axis])
    key = i64(1) if one_row else code.add(code.binary("udiv", p, along), i64(1))
    with code.when(code.cmp("icmp", "ne", code.load("i64", header, align=8), key)):
        saved = dict(em.env)
        block = ir.Block((), list(of.ops), of.values)
        em.block(block, prefer=carry_places(block, [None] * len(slots), slots))
        Carry(em, list(slots)).leave(block.yields)
        em.leave()
        code.store(key, header, align=8)
        em.env = saved
    em.arena.tick()
    em.done -= set(of.ops)
    em.done |= of.gone
    for v, slot in zip(of.values, slots, strict=True):
        em.env[v] = slot


__all__ = ["HEADER", "Alike", "alike", "emit", "slots_of"]
