"""Keeps the tensor cores busy: products of a loop are waited for a round later.

The plain form of a loop waits for every product at once. Here loops of independent accumulations (a matrix product, or
several) leave the products of one round in flight while the next round starts its own, and give the buffers back a
round later. Loops in which one product needs the result of another (attention) are rotated, see `rotate`, or wait for
their sums at the end of a round, see `defer`, where registers do not hold what rotation carries; loops that
fold products into sums themselves are in pairs of rounds by now, see `pairs`.
"""

from __future__ import annotations

import dataclasses
import functools

from jtile.ir import (
    AllocBarriers,
    Arrive,
    Builder,
    DotAsync,
    DotWait,
    For,
    Kernel,
    Op,
    Roles,
    Slot,
    TileType,
    Value,
)
from jtile.passes.affine import ranges
from jtile.passes.fold import number
from jtile.passes.intervals import Intervals
from jtile.passes.pipeline import Pass
from jtile.passes.rewrite import Copier, Form

from .chains import VIEWS, Products, filled_by, root_of, rounds_held
from .defer import Deferral, words
from .plan import for_tiles
from .rotate import Rotation, Turn

ROOM = for_tiles(240) * 128  # words of tiles of a warpgroup


def run(kernel: Kernel, turns: bool = False) -> Kernel:
    """The kernel with its loops of products overlapped.

    Args:
      turns: consumers with rotated loops start their products in turns, so that one computes while the other's products
        run, where each of them has one such loop.
    """
    overlap = _Overlap(ranges(kernel), filled_by(kernel), turns, _room(kernel))
    return Copier(overlap.forms(kernel)).whole(kernel)


def _room(kernel: Kernel) -> dict[For, int]:
    out: dict[For, int] = {}
    for roles in (op for op in kernel.body.walk() if isinstance(op, Roles)):
        for warps, registers, body in zip(roles.warps, roles.registers, roles.bodies, strict=True):
            loops = (op for op in body.walk() if isinstance(op, For))
            out |= dict.fromkeys(loops, for_tiles(registers) * warps * 32)
    return out


@dataclasses.dataclass
class _Overlap:
    """Overlaps the loops of products of a kernel; `filled`: the barriers of each allocation; `room`: words of tiles
    that the role of a loop has registers for."""

    known: Intervals
    filled: dict[Op, set[Value]]
    turns: bool
    room: dict[For, int]
    turn: dict[For, Turn] = dataclasses.field(default_factory=dict)

    def forms(self, kernel: Kernel) -> dict[Op, Form]:
        out: dict[Op, Form] = {}
        for op in kernel.body.walk():
            if isinstance(op, For) and (form := self.loop(op)) is not None:
                out[op] = form
            elif isinstance(op, Roles) and self.turns:
                out[op] = functools.partial(self.roles, op)
        return out

    def loop(self, op: For) -> Form | None:
        """The overlapped form of a loop, if it has one."""
        products = Products(op)
        if not products.waits:
            return None
        rotation = Rotation.of(products, self.filled)
        if rotation is not None:
            deferral = Deferral.of(rotation) if words(rotation) > self.room.get(op, ROOM) else None
            if deferral is not None:
                return deferral.build
            return lambda copier: rotation.build(copier, self.runs(op), self.turn.get(op))
        accumulation = _Accumulation.of(products)
        return None if accumulation is None else lambda copier: accumulation.build(copier, self.runs(op))

    def roles(self, op: Roles, copier: Copier) -> tuple[()]:
        self.plan_turns(op, copier.b)
        copier.put(op)
        return ()

    def plan_turns(self, roles: Roles, b: Builder) -> None:
        """Give every consumer its turns, in the order of the roles, if all of its products are those of one loop."""
        found: list[tuple[For, Value]] = []
        for body in roles.bodies:
            loops = [
                op for op in body.walk() if isinstance(op, For) and any(isinstance(x, DotAsync) for x in op.body.ops)
            ]
            rotations = [r for op in loops if (r := Rotation.of(Products(op), self.filled)) is not None]
            apart = sum(isinstance(op, DotAsync) for op in body.walk()) - sum(len(r.products.waits) for r in rotations)
            if len(loops) > 1 or len(rotations) < len(loops) or apart:  # products elsewhere use the rings too
                return
            found += [(r.products.loop, r.counter) for r in rotations if r.counter is not None]
            if len(rotations) != sum(r.counter is not None for r in rotations):
                return
        if len(found) > 1:
            barriers = b.value(AllocBarriers(len(found)), "turns")
            for n, (loop, counter) in enumerate(found):
                self.turn[loop] = Turn(barriers, n, (n + 1) % len(found), counter)

    def runs(self, op: For) -> bool:
        """Whether a loop surely makes a round."""
        lo, hi = self.known(op.lo), self.known(op.hi)
        return lo is not None and hi is not None and lo.hi < hi.lo


# -- accumulations ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Accumulation:
    """A loop all of whose products add to carries; `late`: the arrivals that give their buffers back."""

    products: Products
    late: list[Arrive]

    @staticmethod
    def of(products: Products) -> _Accumulation | None:
        """The accumulation of a loop; None where a product needs more than its accumulator from the round before, or
        where its operands would be written again meanwhile: a buffer, or registers that every round computes."""
        dots, chains = products.waits, products.chains
        made = {v for op in products.body.walk() for v in op.results}
        if any(isinstance(v.type, TileType) and v in made for d in dots for v in (d.a, d.b)):
            return None
        if sum(len(c.dots) for c in chains if not c.before) != len(dots):
            return None
        stored = products.stored()
        slots: set[Value] = set()
        for d in dots:
            for buffer in (d.a, d.b):
                if root_of(buffer) in stored and root_of(buffer) is not None:
                    return None
                slots |= set(_slot_numbers(buffer))
        late = [op for op in products.body.ops if isinstance(op, Arrive) and op.at in slots]
        if any(op.when is not None or rounds_held(op, products.body) < 2 for op in late):
            return None
        return _Accumulation(products, late)

    def build(self, outer: Copier, runs: bool) -> tuple[Value, ...]:
        loop, b = self.products.loop, outer.b
        inits = [*map(outer.look, loop.inits), *[b.index(0)] * len(self.late)]
        lo, hi, step = map(outer.look, (loop.lo, loop.hi, loop.step))
        types = [p.type for p in loop.body.params] + [op.at.type for op in self.late]
        names = (*(p.name for p in loop.body.params), *["before"] * len(self.late))
        n = len(loop.inits)
        with b.region(types, names) as body:
            copy = outer.within()
            copy.replace(loop.body.params, body.params[: 1 + n])
            self.body(copy, lo, body.params[1 + n :])
            body.yields = (*map(copy.look, loop.body.yields), *(copy.look(op.at) for op in self.late))
        names = (*(r.name for r in loop.results), *["last"] * len(self.late))
        b.loc = loop.loc
        new = b.add(dataclasses.replace(loop, lo=lo, hi=hi, step=step, inits=tuple(inits), body=body), *names)
        running = [c.carry for c in self.products.chains]
        done = b.add(DotWait(tuple(new.results[i] for i in running)), *(loop.results[i].name for i in running))
        results = dict(enumerate(new.results[:n])) | dict(zip(running, done.results, strict=True))
        ran = None if runs or not self.late else b.map("lt", lo, hi)
        for op, at in zip(self.late, new.results[n:], strict=True):
            b.add(Arrive(outer.look(op.barrier), at, op.count, ran))
        return tuple(results.values())

    def body(self, copy: Copier, lo: Value, before: tuple[Value, ...]) -> None:
        """One round: its products, the wait for those of the round before, and the arrivals for their buffers."""
        b, products = copy.b, self.products
        waits = set(products.waits.values())
        first = {c.dots[0]: products.loop.inits[c.carry] for c in products.chains}
        later = b.map("ne", copy.look(products.body.params[0]), lo)
        for op in products.body.ops:
            if op in waits:
                copy.env[op.results[0]] = copy.look(op.values[0])  # type: ignore[attr-defined]
            elif op not in self.late:
                new = copy.put(op)
                if not isinstance(op, DotAsync) or not isinstance(new, DotAsync) or op not in first:
                    continue
                if number(first[op]) == 0 and new.keep is None:
                    new.keep = later
        b.loc = products.loop.loc
        ends = [products.waits[c.dots[-1]].results[0] for c in products.chains]
        done = b.add(DotWait(tuple(map(copy.look, ends)), len(products.waits)), *(v.name for v in ends))
        copy.replace(ends, done.results)
        for op, at in zip(self.late, before, strict=True):
            b.loc = op.loc
            b.add(Arrive(copy.look(op.barrier), at, op.count, later))


def _slot_numbers(buffer: Value) -> list[Value]:
    """The numbers of the slots that a view of shared memory goes through."""
    out, op = [], buffer.op
    while isinstance(op, VIEWS):
        out += [op.at] if isinstance(op, Slot) else []
        op = op.buffer.op
    return out


overlap = Pass("overlap", "Products of a loop run while the next round is prepared.", run)
