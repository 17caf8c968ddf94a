"""Rings of buffers between the producer and the consumers, and what a role needs to go around them."""

from __future__ import annotations

import dataclasses

from jtile.ir import (
    AllocBarriers,
    AllocShared,
    Block,
    Builder,
    Dim,
    For,
    If,
    Load,
    Op,
    Slot,
    Value,
    dim_value,
    with_dim_value,
)
from jtile.ir.types import INDEX
from jtile.passes.rewrite import is_pure

from .feeds import Feeds, Ring, Site
from .plan import Plan, refuse

Loads = dict[Load, Load]  # a load of the kernel -> the load of one consumer's share


@dataclasses.dataclass(eq=False)
class Held:
    """A ring in memory.

    Attributes:
      buffers: for each load of a site a ring of buffers, or, where a tile is cut, one for each consumer.
        Behind its slots a ring has spare ones where its tiles are replaced: one for each consumer that it serves.
      axes: for each load the axis along which its tile is cut, or None.
      full, empty: barriers, one a slot.
      clock: the number of the ring's counter of rounds: rings that the same blocks fill share one.
    """

    ring: Ring
    slots: int
    buffers: tuple[tuple[Value, ...], ...]
    axes: tuple[int | None, ...]
    full: Value
    empty: Value
    clock: int


Place = tuple[Held, Site, int]  # the ring of a load, its site, and its number in the site


def allocate(b: Builder, found: Feeds, plan: Plan, loads: Loads) -> list[Held]:
    """The rings of a plan; `loads` has the loads of the first share."""
    clocks: dict[object, int] = {}
    held = []
    for ring in found.rings:
        slots = plan.resident if ring.resident else plan.stages
        clock = clocks.setdefault(ring if ring.eager else ring.blocks, len(clocks))
        axes = tuple(_axis(ring, k, loads) for k in range(len(ring.sites[0].loads)))
        b.loc = ring.sites[0].loads[0].loc
        buffers = []
        for k, (x, axis) in enumerate(zip(ring.sites[0].loads, axes, strict=True)):
            spare = any(s.loads[k] in found.replaced for s in ring.sites) * (plan.consumers if axis is None else 1)
            several = [None] if axis is None else range(plan.consumers)
            buffers.append(tuple(_buffer(b, loads[x], slots + spare, w) for w in several))
        name = ring.sites[0].loads[0].ref.name
        full = b.value(AllocBarriers(slots, 1), f"{name}_full")
        empty = b.value(AllocBarriers(slots, plan.consumers), f"{name}_empty")
        held.append(Held(ring, slots, tuple(buffers), axes, full, empty, clock))
    return held


def _buffer(b: Builder, op: Load, slots: int, w: int | None) -> Value:
    """Slots for a load of consumer `w`, or of all consumers."""
    name = op.ref.name + ("" if w is None else str(w))
    return b.value(AllocShared(op.result.shape, op.result.dtype, slots), name)


def _axis(ring: Ring, k: int, loads: Loads) -> int | None:
    """The axis along which load k of every site is cut."""
    found = set()
    for site in ring.sites:
        whole, part = site.loads[k].result.shape, loads[site.loads[k]].result.shape
        found.add(tuple(a for a, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m))
    (axes,) = found if len(found) == 1 else ((),)
    if len(found) > 1 or len(axes) > 1:
        refuse("loads of one array are cut over the consumers in different ways", ring.sites[0].loads[k])
    return axes[0] if axes else None


class Role:
    """Copies a body for one role: the counters of the rings are further carries of its loops and branches.

    Attributes:
      place: the place of each load of this role's body.
      rounds: the counter of each clock, at the place that is built.
    """

    def __init__(self, place: dict[Load, Place]):
        self.place = place
        self.b = Builder()
        self.env: dict[Value, Value] = {}
        self.rounds: dict[int, Value] = {}

    def run(self, body: Block) -> Block:
        """The body of the role."""
        zero = self.b.index(0)
        self.rounds = {held.clock: zero for held, _, _ in self.place.values()}
        self.ops(body)
        self.finish()
        return self.b.block

    def finish(self) -> None:
        """Ops at the end of the role."""

    def ops(self, b: Block) -> None:
        """Copy the ops of a block to where the builder stands."""
        raise TypeError(f"{type(self).__name__} does not say how it copies ops")

    def kept(self, op: Op) -> list[int]:
        """Which results of a region op this role needs."""
        return list(range(len(op.results)))

    def look(self, v: Value) -> Value:
        return self.env.get(v, v)

    def dim(self, d: Dim) -> Dim:
        return with_dim_value(d, self.look(dim_value(d)))

    def sites(self, b: Block) -> dict[Site, Held]:
        """The sites among the ops of a block."""
        return {self.place[op][1]: self.place[op][0] for op in b.ops if isinstance(op, Load) and op in self.place}

    def clocks(self, op: Op) -> list[int]:
        """The clocks that go on inside the regions of an op."""
        inner = (x for b in op.blocks() for x in b.walk())
        return sorted({self.place[x][0].clock for x in inner if isinstance(x, Load) and x in self.place})

    def slot(self, held: Held) -> tuple[Value, Value]:
        """(slot, parity) of a ring in this round."""
        b, it = self.b, self.rounds[held.clock]
        if held.slots == 1:
            return b.index(0), b.map("and", it, b.index(1))
        n = b.index(held.slots)
        return b.map("rem", it, n), b.map("and", b.map("div", it, n), b.index(1))

    def buffer(self, held: Held, k: int, w: int, at: Value) -> Value:
        """Buffer of load k of a site for consumer w."""
        rings = held.buffers[k]
        return self.b.value(Slot(rings[w if len(rings) > 1 else 0], at), held.ring.sites[0].loads[k].ref.name)

    def advance(self, held: Held) -> None:
        """Go on to the next slot, where a site does so by itself."""
        if held.ring.eager:
            self._tick(held.clock)

    def next_round(self, sites: dict[Site, Held]) -> None:
        """Go on to the next slots at the end of a block."""
        for clock in dict.fromkeys(held.clock for held in sites.values() if not held.ring.eager):
            self._tick(clock)

    def _tick(self, clock: int) -> None:
        self.rounds[clock] = self.b.map("add", self.rounds[clock], self.b.index(1))

    # -- regions ------------------------------------------------------------------------------------------------------
    def region(self, op: Op) -> None:
        """Copy an op with regions."""
        clocks = self.clocks(op)
        if isinstance(op, For):
            self._loop(op, clocks)
        elif isinstance(op, If):
            self._branch(op, clocks)
        elif clocks or not is_pure(op):
            refuse(f"operands of matrix products are loaded inside {op.mnemonic!r}", op)
        else:
            self._whole(op)

    def _loop(self, op: For, clocks: list[int]) -> None:
        keep = self.kept(op)
        bounds = [self.look(v) for v in (op.lo, op.hi, op.step)]
        inits = [self.look(op.inits[i]) for i in keep] + [self.rounds[c] for c in clocks]
        old = [op.body.params[0], *(op.body.params[1 + i] for i in keep)]
        names = (*(p.name for p in old), *("round" for _ in clocks))
        with self.b.region([*(p.type for p in old), *(INDEX for _ in clocks)], names) as body:
            self.env.update(zip(old, body.params, strict=False))
            body.yields = self._inside(op.body, keep, dict(zip(clocks, body.params[len(old) :], strict=True)))
        self.b.loc = op.loc
        new = self.b.add(For(*bounds, tuple(inits), body, None, op.unroll), *("" for _ in inits))
        self._results(op, new, keep, clocks)

    def _branch(self, op: If, clocks: list[int]) -> None:
        keep = self.kept(op)
        cond = self.look(op.cond)
        new = []
        for old in (op.then, op.orelse):
            with self.b.region() as block:
                block.yields = self._inside(old, keep, {c: self.rounds[c] for c in clocks})
            new.append(block)
        self.b.loc = op.loc
        self._results(op, self.b.add(If(cond, *new)), keep, clocks)

    def _inside(self, old: Block, keep: list[int], rounds: dict[int, Value]) -> tuple[Value, ...]:
        """Copy the ops of a region; returns the values that it yields."""
        outer, self.rounds = self.rounds, {**self.rounds, **rounds}
        self.ops(old)
        out = (*(self.look(old.yields[i]) for i in keep), *(self.rounds[c] for c in rounds))
        self.rounds = outer
        return out

    def _results(self, op: Op, new: Op, keep: list[int], clocks: list[int]) -> None:
        self.env.update(zip((op.results[i] for i in keep), new.results, strict=False))
        self.rounds |= dict(zip(clocks, new.results[len(keep) :], strict=True))

    def _whole(self, op: Op) -> None:
        self.append(op.clone(self.look), op)

    def append(self, new: Op, old: Op) -> None:
        """Add a copy of an op."""
        self.b.block.ops.append(new)
        self.env.update(zip(old.results, new.results, strict=True))
