"""Loops that fold products into their sums themselves (products with scales for blocks: `acc += s * (a @ b)`).

Nothing of a round may start before its product has ended, so the tensor cores would stand still meanwhile. Here rounds
go in pairs: the product of the second one is started before the first one is folded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jtile.ir import Arrive, Block, DotAsync, DotWait, For, Kernel, Op, Roles, TileType, Value
from jtile.passes.fold import number
from jtile.passes.pipeline import Pass
from jtile.passes.rewrite import Copier, free_values, is_pure

from .chains import Products, rounds_held
from .plan import for_tiles

ROUNDS = 2  # rounds of a loop that become one


def run(kernel: Kernel) -> Kernel:
    found = (Pairs.of(Products(loop), room) for loop, room in _loops(kernel))
    return Copier({p.products.loop: p.build for p in found if p is not None}).whole(kernel)


def _loops(kernel: Kernel) -> Iterator[tuple[For, int]]:
    """The loops of roles, and the registers for tiles of all threads of the role."""
    for roles in kernel.body.walk():
        if isinstance(roles, Roles):
            for warps, registers, body in zip(roles.warps, roles.registers, roles.bodies, strict=True):
                yield from ((op, 32 * warps * for_tiles(registers)) for op in body.walk() if isinstance(op, For))


@dataclasses.dataclass
class Pairs:
    """A loop whose products start from zero and are folded by plain arithmetic.

    Attributes:
      head: what starts the products of a round, and counts it, in order.
      tail: the rest: waits, arrivals, the folding.
      sums: numbers of the carries that only the tail uses.
    """

    products: Products
    head: list[Op]
    tail: list[Op]
    sums: set[int]

    @staticmethod
    def of(products: Products, room: int) -> Pairs | None:
        """The pairs of a loop; None where a product adds to another one, where the rounds depend on each other in more
        than their sums, or where they need more than `room` registers, of all threads."""
        body, dots = products.body, list(products.waits)
        if not dots or any(d.acc is not None and number(d.acc) != 0 for d in dots):
            return None
        ends = [products.waits[d] for d in dots]
        reached = products.reached([r for w in ends for r in w.results])
        first = min(body.ops.index(w) for w in ends)
        arrivals = [op for op in body.ops[first:] if isinstance(op, Arrive)]
        if any(op.when is not None or rounds_held(op, body) <= ROUNDS for op in arrivals):
            return None
        folding = [op for op in body.ops if op not in ends and any(r in reached for r in op.results)]
        sums = {i for i, y in enumerate(body.yields) if y in reached}
        late = {*ends, *arrivals, *folding}
        early = _needed(body, late, sums)
        tail = [op for op in body.ops if op not in early]
        head = [op for op in body.ops if op in early]
        used = {v for op in head for v in op.operands()} | {y for i, y in enumerate(body.yields) if i not in sums}
        own = all(body.params[1 + i] not in used for i in sums)
        after = any(op.effect in ("write", "io") for op in head[_last(head) + 1 :])
        if not own or after or products.stored() or not all(map(is_pure, folding)) or not sums or late & early:
            return None
        values = [*(d.result for d in dots)] * ROUNDS + [body.params[1 + i] for i in sums]
        tiles = sum(math.prod(v.shape) for v in values if isinstance(v.type, TileType))
        return Pairs(products, head, tail, sums) if tiles <= room else None

    def build(self, outer: Copier) -> tuple[Value, ...]:
        """Builds the loop of pairs and, where the number of rounds may be odd, a loop for the rest."""
        old, b = self.products.loop, outer.b
        lo, hi, step = map(outer.look, (old.lo, old.hi, old.step))
        one = number(old.step)
        several = b.full(ROUNDS if one is None else ROUNDS * one, (), step.dtype)
        several = b.map("mul", step, several) if one is None else several
        rounds = None if None in (number(old.lo), number(old.hi)) else number(old.hi) - number(old.lo)
        even = rounds is not None and number(old.step) == 1 and rounds % ROUNDS == 0
        until = hi if even else b.map("sub", hi, b.map("sub", several, step))
        with b.region([p.type for p in old.body.params], tuple(p.name for p in old.body.params)) as body:
            body.yields = self.pair(outer, body.params, step)
        b.loc = old.loc
        inits = tuple(map(outer.look, old.inits))
        names = tuple(r.name for r in old.results)
        new = dataclasses.replace(old, lo=lo, hi=until, step=several, inits=inits, body=body)
        b.add(new, *names)
        return new.results if even else self.rest(outer, new.results, (lo, hi, step, several))

    def rest(self, outer: Copier, carries: tuple[Value, ...], bounds: tuple[Value, ...]) -> tuple[Value, ...]:
        """The loop over the rounds that are left, whose body is as it was."""
        old, b = self.products.loop, outer.b
        lo, hi, step, several = bounds
        b.loc = old.loc
        length = b.map("max", b.map("sub", hi, lo), b.full(0, (), lo.dtype))
        one = b.full(1, (), lo.dtype)
        whole = b.map("div", b.map("sub", b.map("add", length, step), one), step)  # rounds
        pairs = b.map("div", whole, b.full(ROUNDS, (), lo.dtype))
        done = b.map("add", lo, b.map("mul", pairs, several))
        body = outer.within().block(old.body)
        b.loc = old.loc
        new = dataclasses.replace(old, lo=done, hi=hi, step=step, inits=carries, body=body)
        return b.add(new, *(r.name for r in old.results)).results

    def pair(self, outer: Copier, params: tuple[Value, ...], step: Value) -> tuple[Value, ...]:
        """The rounds that one body of the new loop has; returns its yields."""
        old, b = self.products.body, outer.b
        rounds: list[Copier] = []
        k, carries = params[0], list(params[1:])
        for n in range(ROUNDS):
            copy = outer.within()
            copy.replace(old.params, (k, *carries))
            for op in self.head:
                copy.put(op)
            carries = [c if i in self.sums else copy.look(old.yields[i]) for i, c in enumerate(carries)]
            rounds.append(copy)
            if n:
                carries = self.finish(rounds[n - 1], carries, len(self.products.waits))
            if n + 1 < ROUNDS:
                b.loc = self.products.loop.loc
                k = b.map("add", k, step)
        return tuple(self.finish(rounds[-1], carries, 0))

    def finish(self, copy: Copier, carries: list[Value], pending: int) -> list[Value]:
        """The tail of a round while `pending` products of the next one run; gives the carries after it."""
        old = self.products.body
        copy.env.update((old.params[1 + i], carries[i]) for i in self.sums)
        waits = [op for op in self.tail if isinstance(op, DotWait)]
        for op in self.tail:
            new = copy.put(op)
            if isinstance(new, DotWait) and isinstance(op, DotWait):
                new.pending = pending + len(waits) - 1 - waits.index(op)
        return [copy.look(old.yields[i]) if i in self.sums else c for i, c in enumerate(carries)]


def _needed(body: Block, late: set[Op], sums: set[int]) -> set[Op]:
    """Ops of a body that its products, its effects and its other carries need."""
    needed = {y for i, y in enumerate(body.yields) if i not in sums}
    out: set[Op] = set()
    for op in reversed(body.ops):
        if op not in late and (op.effect != "none" or any(r in needed for r in op.results)):
            out.add(op)
            needed.update(free_values(op))
    return out


def _last(ops: list[Op]) -> int:
    """The place of the last product."""
    return max(n for n, op in enumerate(ops) if isinstance(op, DotAsync))


pairs = Pass("pairs", "No product of a loop waits until arithmetic has added the one before to its sums.", run)
