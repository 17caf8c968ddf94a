"""The part of a role that other roles notice: barriers, memory of the block, and the scalars that say which."""

from __future__ import annotations

from typing import Any

from .block import (
    Arrive,
    AsyncLoad,
    AsyncStore,
    Expect,
    LoadShared,
    StoreShared,
    StoreWait,
    Wait,
)
from .block_products import DotAsync, DotWait
from .control import For, If, While
from .core import Block, Op, Value
from .placement import blocks_of
from .places import fills, reads, slot_number
from .shapes import Full

Event = Wait | Arrive | Expect | AsyncLoad
Touch = LoadShared | StoreShared | AsyncStore | StoreWait | DotAsync | DotWait


class Skeleton:
    """What barriers depend on in a role, and what it does to the memory of the block: for each region the ops that use
    them, and those that bounds, branches, slots and parities come from.

    Attributes:
      ops: for each region (by its id), the ops that matter.
      acts: ops with barriers in a region. touches: ops with uses of memory in a region.
      arrives: the barriers that the role may arrive at, and at which of them (None: not known).
    """

    def __init__(self, name: str, body: Block):
        self.name, self.body = name, body
        self.events = [op for op in body.walk() if isinstance(op, Event)]
        self.acts = self._around(Event)
        self.touches = self._around(Touch)
        self.arrives = {(op.barrier, _constant(op.at)) for op in self.events if not isinstance(op, Wait)}
        self.needed = self._closure()
        self.ops = {id(b): [op for op in b.ops if self._matters(op)] for b in blocks_of(body)}

    def _around(self, kind: Any) -> set[Op]:
        inside = {id(b) for b in blocks_of(self.body) if any(isinstance(op, kind) for op in b.walk())}
        return {op for op in self.body.walk() if any(id(b) in inside for b in op.blocks())}

    def _matters(self, op: Op) -> bool:
        here = isinstance(op, Event | Touch) or op in self.acts or op in self.touches
        return here or any(r in self.needed for r in op.results)

    def _closure(self) -> set[Value]:
        sources: dict[Value, tuple[Value, ...]] = {}
        todo: list[Value] = []
        for op in self.body.walk():
            sources |= _sources(op)
            if isinstance(op, Event):
                todo += [v for v in (op.at, op.when, getattr(op, "parity", None)) if v is not None]
            elif op in self.acts or op in self.touches:
                todo += _ways(op)
            todo += [at for v in (*reads(op), *fills(op)) if (at := slot_number(v)) is not None]
        needed: set[Value] = set()
        while todo:
            v = todo.pop()
            if v not in needed:
                needed.add(v)
                todo += sources.get(v, ())
        return needed


def _ways(op: Op) -> tuple[Value, ...]:
    """The operands of an op that decide how its regions run: bounds and conditions."""
    if isinstance(op, For):
        return (op.lo, op.hi, op.step)
    return op.cond.yields if isinstance(op, While) else (op.cond,) if isinstance(op, If) else ()


def _sources(op: Op) -> dict[Value, tuple[Value, ...]]:
    """The values from which each result of an op, and each parameter of its regions, comes."""
    out: dict[Value, tuple[Value, ...]] = {}
    if isinstance(op, For | While):
        first = op.body.params[-len(op.inits) :] if isinstance(op, For) else op.cond.params
        for p, init, y, r in zip(first if op.inits else (), op.inits, op.body.yields, op.results, strict=True):
            out[p] = (init, y)
            out[r] = (p, init, *_ways(op))
        if isinstance(op, For):
            out[op.body.params[0]] = (op.lo, op.step)
        else:
            out |= {q: (p,) for p, q in zip(op.cond.params, op.body.params, strict=True)}
    elif isinstance(op, If):
        pairs = zip(op.results, op.then.yields, op.orelse.yields, strict=True)
        out = {r: (a, b, op.cond) for r, a, b in pairs}
    else:
        out = {r: tuple(op.operands()) for r in op.results}
    return out


def _constant(v: Value) -> int | None:
    return int(v.op.value) if isinstance(v.op, Full) else None
