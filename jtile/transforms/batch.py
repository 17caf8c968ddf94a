"""Batching: one more leading grid axis, and a leading index to every Ref that is batched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jtile import ir
from jtile._errors import TransformError
from jtile.ir.builder import build


def batch(kernel: ir.Kernel, size: int, batched: Sequence[bool]) -> ir.Kernel:
    """The kernel under one `vmap`.

    Args:
      size: programs along the new leading grid axis.
      batched: per input and output Ref, whether it gets a leading dimension of `size`, which the program's place on the
        new axis indexes. All programs along the axis share a Ref that is not; they may only accumulate into it.
    """
    lane = build(ir.ProgramId(0), kernel.loc, ("lane",))
    walk = _Batch(lane.results[0], size)
    flags = [*batched, *[False] * len(kernel.scratch), *[True] * len(kernel.shared)]
    if kernel.shared and not isinstance(size, int):
        raise TransformError(
            f"kernel {kernel.name} talks to other devices, with memory of its own for each lane of jax.vmap, so that "
            "the number of lanes must be known: it cannot be dynamic",
            (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None,
        )
    params = tuple(walk.param(p, size if b else None) for p, b in zip(kernel.params, flags, strict=True))
    body = walk.block(kernel.body)
    body.ops.insert(0, lane)
    grid, lanes = (size, *kernel.grid), kernel.lanes + 1
    return dataclasses.replace(kernel, params=params, grid=grid, lanes=lanes, body=body)


class _Batch:
    """Copies a body with indices and program ids shifted."""

    def __init__(self, lane: ir.Value, size: ir.Size):
        self.lane, self.size = lane, size
        self.env: dict[ir.Value, ir.Value] = {}
        self.wide: set[ir.Value] = set()  # new Refs with a leading dimension

    def look(self, v: ir.Value) -> ir.Value:
        return self.env.get(v, v)

    def param(self, old: ir.Value, size: int | None) -> ir.Value:
        t = old.type
        shape = t.shape if size is None else (size, *t.shape)
        new = ir.Value(dataclasses.replace(t, shape=shape), old.name)
        self.env[old] = new
        if size is not None:
            self.wide.add(new)
        return new

    def block(self, old: ir.Block) -> ir.Block:
        params = tuple(ir.Value(p.type, p.name) for p in old.params)
        self.env.update(zip(old.params, params, strict=True))
        ops: list[ir.Op] = []
        for op in old.ops:
            new = self.op(op)
            ops += [*self.counter(new), new] if isinstance(new, ir.LastArrival) else [new]
        return ir.Block(params, ops, tuple(map(self.look, old.yields)))

    def op(self, old: ir.Op) -> ir.Op:
        new = old.clone(self.look, self.block)
        match new:
            case ir.ProgramId() | ir.NumPrograms():
                new.axis += 1
            case (
                ir.Load()
                | ir.Store()
                | ir.Atomic()
                | ir.AsyncLoad()
                | ir.AsyncStore()
                | ir.Prefetch()
                | ir.Signal()
                | ir.WaitSignal()
                | ir.Post()
                | ir.Receive()
            ) if new.ref in self.wide:
                new.index = (ir.At(self.lane), *new.index)
            case ir.On():
                new = build(new, old.loc, (old.result.name,))
                self.wide.add(new.result)
        self.env.update(zip(old.results, new.results, strict=True))
        return new

    def counter(self, op: ir.LastArrival) -> list[ir.Op]:
        """The ops by which each lane arrives at counters of its own."""
        if not isinstance(self.size, int):
            raise TransformError(
                f"a kernel whose programs arrive at counters ({op.counters!r}) has one more set of them for each lane "
                "of jax.vmap, so that the number of lanes must be known: it cannot be dynamic",
                (op.loc.file, op.loc.line) if op.loc.file else None,
            )
        each = build(ir.Full(op.size, (), "int32"), op.loc)
        first = build(ir.Map("mul", (self.lane, each.result)), op.loc)
        at = build(ir.Map("add", (first.result, op.index)), op.loc)
        op.index, op.size = at.result, op.size * max(self.size, 1)
        return [each, first, at]
