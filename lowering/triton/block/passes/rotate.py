"""Rotates loops in which one product needs the result of another: `s = q k^T; p = softmax(s); o += p v` (attention).

The last product of a round is delayed by one round: the loop carries its operands, so that the first product of the
next round is started before it, and both run while the vector units work on the results of the first.

    round j before:   s_j  wait  p_j = f(s_j)   o = scale_j(o) + p_j v_j  wait
    round j after:    s_j  o += p_(j-1) v_(j-1)  wait for s_j   p_j = f(s_j)   wait for o   o = scale_j(o)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from jtile.ir import (
    Arrive,
    Block,
    DotAsync,
    DotWait,
    FenceShared,
    If,
    LoadShared,
    Map,
    Op,
    SharedType,
    StoreShared,
    Value,
    Wait,
)
from jtile.passes.fold import number
from jtile.passes.rewrite import Copier, free_values, is_pure

from .chains import VIEWS, Chain, Products, in_flight, root_of, rounds_held


@dataclasses.dataclass(frozen=True)
class Turn:
    """Consumers that start their products one after the other.

    Attributes:
      barriers: one for each consumer; a phase of one ends when its turn comes.
      own, next: the numbers of this consumer and of the one whose turn comes after.
      round: the value of the loop's body that counts rounds from 0.
    """

    barriers: Value
    own: int
    next: int
    round: Value


@dataclasses.dataclass
class Rotation:
    """How the body of a loop is taken apart.

    Attributes:
      chains: the accumulators of the delayed products; dots: these products, in order.
      head: what stays in its round, in order.
      before: ops that are delayed with the products: waits for their buffers, views of the buffers, ops that fill them.
      arrivals: the arrivals that give their buffers back.
      scales: what is done to the accumulators before the delayed products.
      kept: values of the round that the delayed ops need.
      links: waits of the head for sums that the next product goes on with at once: the wait for that product is enough.
      turn: this consumer's turns; None where consumers take none.
    """

    products: Products
    chains: list[Chain]
    dots: list[DotAsync]
    head: list[Op]
    before: list[Op]
    arrivals: list[Arrive]
    scales: list[Op]
    kept: list[Value]
    links: set[Op]
    turn: Turn | None = None

    @staticmethod
    def of(products: Products, filled: dict[Op, set[Value]]) -> Rotation | None:
        """The rotation of a loop; None where no accumulated product needs the result of another one, or where its
        buffers would be filled again too early."""
        accumulated = {d for c in products.chains for d in c.dots}
        heads = [d for d in products.waits if d not in accumulated]
        reached = products.reached([products.waits[d].results[0] for d in heads])
        chains = [c for c in products.chains if any(v in reached for d in c.dots for v in (d.a, d.b))]
        if not chains or not heads:
            return None
        parts = _Parts(products, chains, filled)
        arrivals = parts.arrivals()
        if parts.written_early() or any(op.when is not None or rounds_held(op, products.body) < 2 for op in arrivals):
            return None
        scales = [op for c in chains for op in c.before]
        ends = (products.waits[d] for d in parts.dots)
        gone = {*parts.waits, *parts.own, *arrivals, *scales, *parts.dots, *ends}
        head = [op for op in products.body.ops if op not in gone]
        before = [op for op in products.body.ops if op in parts.waits | parts.late]
        kept = parts.kept([*before, *parts.dots, *arrivals])
        links = _links(head, products)
        return Rotation(products, chains, parts.dots, _linked(head, links), before, arrivals, scales, kept, links)

    @property
    def counter(self) -> Value | None:
        """The carry that counts the rounds of the ring that the first product reads, through all loops around it; None
        where that is not seen."""
        body = self.products.body
        waits = [op for op in self.head[: self.head.index(self.first_dot)] if isinstance(op, Wait)]
        match waits[-1].at.op if waits else None:
            case Map("rem", (it, _)) if it in body.params[1:]:
                match body.yields[body.params.index(it) - 1].op:
                    case Map("add", (x, one)) if x is it and number(one) == 1:
                        return it
        return None

    @property
    def first_dot(self) -> Op:
        return next(op for op in self.head if isinstance(op, DotAsync))

    @property
    def first_wait(self) -> Op:
        return next(op for op in self.head if isinstance(op, DotWait) and op not in self.links)

    def build(self, outer: Copier, runs: bool, turn: Turn | None) -> tuple[Value, ...]:
        """Builds the rotated loop; returns the values in place of its results. `runs`: it makes a round at least."""
        self.turn, loop, b = turn, self.products.loop, outer.b
        if runs:
            return self.rounds(outer)
        cond = b.map("lt", outer.look(loop.lo), outer.look(loop.hi))
        with b.region() as then:
            then.yields = self.rounds(outer)
        with b.region() as orelse:
            orelse.yields = tuple(map(outer.look, loop.inits))
        b.loc = loop.loc
        return b.add(If(cond, then, orelse), *(r.name for r in loop.results)).results

    def rounds(self, outer: Copier) -> tuple[Value, ...]:
        """The first round, the loop from the second round on, and the last delayed products."""
        loop, body, b = self.products.loop, self.products.body, outer.b
        first, (lo, hi, step) = outer.within(), map(outer.look, (loop.lo, loop.hi, loop.step))
        first.replace(body.params, (lo, *map(outer.look, loop.inits)))
        for op in [*self.head, *self.scales]:
            self.turns(first, op, lambda: None)
            self.copy(first, op)
        inits = (*self.next_carries(first), *map(first.look, self.kept))
        b.loc = loop.loc
        second = b.map("add", lo, step)
        names = (*(p.name for p in body.params), *(f"{v.name or 'kept'}_before" for v in self.kept))
        with b.region([body.params[0].type, *(v.type for v in inits)], names) as new:
            copy, late = outer.within(), self.late(outer, new.params)
            copy.replace(body.params, new.params[: len(body.params)])
            self.round(copy, late)
            new.yields = (*self.next_carries(copy), *map(copy.look, self.kept))
        b.loc = loop.loc
        new_loop = dataclasses.replace(loop, lo=second, hi=hi, step=step, inits=inits, body=new)
        b.add(new_loop, *(r.name for r in loop.results), *(v.name for v in self.kept))
        last = self.late(outer, (new.params[0], *new_loop.results))
        self.issue(last)
        self.finish(last)
        results = list(new_loop.results[: len(loop.inits)])
        for c in self.chains:
            results[c.carry] = last.look(self.products.waits[c.dots[-1]].results[0])
        return tuple(results)

    def next_carries(self, copy: Copier) -> list[Value]:
        """The yields of a round; for the accumulator of a delayed product, the one that the product is to add to."""
        out = list(map(copy.look, self.products.body.yields))
        for c in self.chains:
            acc = c.dots[0].acc
            assert acc is not None  # a chain goes through its accumulator
            out[c.carry] = copy.look(acc)
        return out

    def late(self, outer: Copier, values: tuple[Value, ...]) -> Copier:
        """A copier for the delayed ops, from the round index, the carries and the kept values in `values`."""
        params = self.products.body.params
        late = outer.within()
        late.replace(self.kept, values[len(params) :])
        for c in self.chains:
            acc = c.dots[0].acc
            assert acc is not None
            late.env[acc] = values[1 + c.carry]
        return late

    def issue(self, late: Copier) -> None:
        """Start the delayed products."""
        for op in self.before:
            late.put(op)
        for d in self.dots:
            late.put(d)
            late.env[self.products.waits[d].results[0]] = late.look(d.result)

    def finish(self, late: Copier) -> None:
        """Wait for the delayed products and give their buffers back."""
        ends = [self.products.waits[c.dots[-1]].results[0] for c in self.chains]
        late.b.loc = self.dots[-1].loc
        done = late.b.add(DotWait(tuple(map(late.look, ends))), *(v.name for v in ends))
        late.replace(ends, done.results)
        for op in self.arrivals:
            late.put(op)

    def copy(self, copy: Copier, op: Op) -> Op | None:
        """Copy an op of the head; a link, whose sums stay in flight, is left out."""
        if op not in self.links:
            return copy.put(op)
        copy.env[op.results[0]] = copy.look(op.operands()[0])
        return None

    def turns(self, copy: Copier, op: Op, issue: Callable[[], None]) -> None:
        """Build what stands in front of an op of the head: before the first product the wait for this consumer's turn,
        before the first wait the delayed products (`issue`) and the end of the turn."""
        turn, b = self.turn, copy.b
        b.loc = op.loc
        if op is self.first_dot and turn is not None:
            odd = b.map("and", copy.look(turn.round), b.index(1))
            # The first turn of the first consumer needs no signal.
            b.add(Wait(turn.barriers, b.index(turn.own), odd if turn.own else b.map("xor", odd, b.index(1))))
        if op is self.first_wait:
            issue()
            if turn is not None:
                b.add(Arrive(turn.barriers, b.index(turn.next)))

    def round(self, copy: Copier, late: Copier) -> None:
        """One round of the rotated loop."""
        started: list[DotAsync] = []
        for op in self.head:
            self.turns(copy, op, lambda: self.issue(late))
            started += self.dots if op is self.first_wait else []
            new = self.copy(copy, op)
            started = in_flight(started, op, new)
        self.finish(late)
        body = self.products.body
        for c in self.chains:
            copy.env[body.params[1 + c.carry]] = late.look(self.products.waits[c.dots[-1]].results[0])
        for op in self.scales:
            copy.put(op)


def _links(head: list[Op], products: Products) -> set[Op]:
    """The waits for sums that nobody needs but the next product of the head."""
    dots = [op for op in head if isinstance(op, DotAsync)]
    ends = ((products.waits[d], after) for d, after in itertools.pairwise(dots))
    return {w for w, after in ends if w.results[0] is after.acc and len(products.users[w.results[0]]) == 1}


def _linked(head: list[Op], links: set[Op]) -> list[Op]:
    """The head with the arrivals behind a link moved behind the next wait that is no link."""
    out: list[Op] = []
    moved: list[Op] | None = None
    for op in head:
        if moved is not None and isinstance(op, Arrive):
            moved.append(op)
            continue
        out.append(op)
        if op in links:
            moved = moved or []
        elif isinstance(op, DotWait):
            out += moved or []
            moved = None
    return out


class _Parts:
    """The ops that belong to the delayed products.

    Attributes:
      dots: the products.
      late: views of their buffers, ops that fill the buffers in the loop itself, and ops that only these need.
      own: ops of `late` that nobody else needs; a view that others use too is made twice, for it cannot be carried.
      waits: waits on barriers of buffers that only the products and `own` read.
    """

    def __init__(self, products: Products, chains: list[Chain], filled: dict[Op, set[Value]]):
        self.body, self.chains, self.users = products.body, chains, products.users
        delayed = {d for c in chains for d in c.dots}
        self.dots = [op for op in self.body.ops if op in delayed]  # in order, since their operands are carried in it
        self.ends = {products.waits[d] for d in self.dots}
        self.roots = {r for d in self.dots for v in (d.a, d.b) if (r := root_of(v))}
        self.late: set[Op] = set()
        self.own: set[Op] = set()
        needed = {v for d in self.dots for v in (d.a, d.b) if isinstance(v.type, SharedType)}
        for op in reversed(self.body.ops):
            self._visit(op, needed)
        self.waits = self._waits(filled)

    def _visit(self, op: Op, needed: set[Value]) -> None:
        """Note whether an op is late; the last op is visited first. `needed`: the values that late ops take."""
        users = [(r, u) for r in op.results for u in self.users.get(r, ())]
        alone = all(u in self.own or (u in self.dots and r in needed) for r, u in users)
        made = any(r in needed for r in op.results)
        plain = is_pure(op) or isinstance(op, LoadShared)
        if not (made and isinstance(op, VIEWS)) and not (alone and (self.fills(op) or (made and plain))):
            return
        self.late.add(op)
        needed.update(free_values(op))
        if alone:
            self.own.add(op)

    def fills(self, op: Op) -> bool:
        """Whether an op writes buffers of the products, itself or inside, or is the fence behind such stores."""
        inner = list(Block((), [op]).walk())
        if isinstance(op, FenceShared):
            inner = self._fenced(op)
            return bool(inner) and all(root_of(x.buffer) in self.roots for x in inner)
        return any(isinstance(x, StoreShared) and root_of(x.buffer) in self.roots for x in inner)

    def _fenced(self, fence: FenceShared) -> list[StoreShared]:
        """The stores of the body that stand between a fence and the one before it."""
        found: list[StoreShared] = []
        for op in self.body.ops[: self.body.ops.index(fence)]:
            found = [] if isinstance(op, FenceShared) else [*found, op] if isinstance(op, StoreShared) else found
        return found

    def _waits(self, filled: dict[Op, set[Value]]) -> set[Op]:
        others = [op for op in self.body.ops if op not in self.dots and op not in self.own]
        shared = {r for op in others for x in Block((), [op]).walk() for v in x.operands() if (r := root_of(v))}
        read = {r for op in self.own if isinstance(op, LoadShared) and (r := root_of(op.buffer))}
        barriers = set().union(*(filled.get(r, set()) for r in (self.roots | read) - shared))
        barriers -= set().union(*(filled.get(r, set()) for r in shared))
        return {op for op in self.body.ops if isinstance(op, Wait) and op.barrier in barriers}

    def written_early(self) -> bool:
        """Whether the loop writes a buffer of the products in their own round, or they read one of unknown origin."""
        rest = Block((), [op for op in self.body.ops if op not in self.late])
        written = {root_of(op.buffer) for op in rest.walk() if isinstance(op, StoreShared)}
        buffers = [v for d in self.dots for v in (d.a, d.b) if isinstance(v.type, SharedType)]
        return any(root_of(v) in written | {None} for v in buffers)

    def arrivals(self) -> list[Arrive]:
        """The arrivals behind the end of the first delayed product, or behind the first delayed load: what is loaded
        late is given back late."""
        loads = (op for op in self.own if isinstance(op, LoadShared))
        first = min(self.body.ops.index(op) for op in (*self.ends, *loads))
        return [op for op in self.body.ops[first:] if isinstance(op, Arrive)]

    def kept(self, ops: Iterable[Op]) -> list[Value]:
        """Values that ops take from the rest of the body; accumulators do not count."""
        ops = list(ops)
        own = {r for op in ops for r in op.results} | {w.results[0] for w in self.ends}
        own |= {acc for c in self.chains if (acc := c.dots[0].acc) is not None}
        inside = {*self.body.params, *(r for op in self.body.ops for r in op.results)}
        return [v for v in dict.fromkeys(v for op in ops for v in free_values(op)) if v in inside and v not in own]
