"""Rotates loops in which one product needs the result of another: `s = q k^T; p = softmax(s); o += p v` (attention).

The last product of a round is delayed by one round: the loop carries its operands, so that the first product of the
next round is started before it, and both run while the vector units work on the results of the first.

    round j before:   s_j  wait  p_j = f(s_j)   o = scale_j(o) + p_j v_j  wait
    round j after:    s_j  o += p_(j-1) v_(j-1)  wait for s_j   p_j = f(s_j)   wait for o   o = scale_j(o)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jtile.ir import Arrive, BarrierType, Builder, DotAsync, DotWait, If, Op, TileType, Value, Wait

from .chains import VIEWS, Chain, Copier, Products, root_of


@dataclasses.dataclass
class Rotation:
    """How the body of a loop is taken apart.

    Attributes:
      chains: the delayed products.
      head: what stays in its round, in order.
      waits, views, arrivals: what the delayed products take with them: waits for their buffers, the buffers, and the
        arrivals that give them back.
      scales: what is done to the accumulators before the delayed products.
      kept: values of the round that the delayed ops need.
    """

    products: Products
    chains: list[Chain]
    head: list[Op]
    waits: list[Op]
    views: list[Op]
    arrivals: list[Op]
    scales: list[Op]
    kept: list[Value]

    @staticmethod
    def of(products: Products, filled: dict[Op, set[Value]]) -> Rotation | None:
        """None where no accumulated product needs the result of another one, or where its buffers would be filled again
        too early."""
        accumulated = {d for c in products.chains for d in c.dots}
        heads = [d for d in products.waits if d not in accumulated]
        reached = products.reached([products.waits[d].results[0] for d in heads])
        chains = [c for c in products.chains if any(v in reached for d in c.dots for v in (d.a, d.b))]
        delayed = [d for c in chains for d in c.dots]
        if not chains or not heads or any(_too_early(d, products.stored()) for d in delayed):
            return None
        parts = _Parts(products, chains, delayed)
        waits = parts.waits(filled)
        arrivals = parts.arrivals()
        if any(op.when is not None or _count(op) < 2 for op in arrivals):
            return None
        views, scales = parts.views(), [op for c in chains for op in c.before]
        gone: set[Op] = {
            *waits,
            *arrivals,
            *parts.own_views(),
            *scales,
            *delayed,
            *(products.waits[d] for d in delayed),
        }
        head = [op for op in products.body.ops if op not in gone]
        kept = parts.kept([*waits, *views, *arrivals, *delayed])
        return Rotation(products, chains, head, waits, views, arrivals, scales, kept)

    @property
    def dots(self) -> list[DotAsync]:
        """The delayed products, in the order of the body."""
        delayed = {d for c in self.chains for d in c.dots}
        return [op for op in self.products.body.ops if isinstance(op, DotAsync) and op in delayed]

    def build(self, b: Builder, env: Callable[[Value], Value], runs: bool) -> tuple[Value, ...]:
        """Builds the rotated loop; gives what stands for its results. `runs`: it makes a round at least."""
        loop = self.products.loop
        b.loc = loop.loc
        if runs:
            return self.rounds(b, env)
        cond = b.map("lt", env(loop.lo), env(loop.hi))
        with b.region() as then:
            then.yields = self.rounds(b, env)
        with b.region() as orelse:
            orelse.yields = tuple(map(env, loop.inits))
        b.loc = loop.loc
        return b.add(If(cond, then, orelse), *(r.name for r in loop.results)).results

    def rounds(self, b: Builder, env: Callable[[Value], Value]) -> tuple[Value, ...]:
        """The first round, the loop from the second round on, and the last delayed products."""
        loop, body = self.products.loop, self.products.body
        first = Copier(b, env)
        first.local.update(zip(body.params, (env(loop.lo), *map(env, loop.inits)), strict=True))
        for op in [*self.head, *self.scales]:
            first.op(op)
        inits = (*self.next_carries(first), *map(first.look, self.kept))
        b.loc = loop.loc
        lo = b.map("add", env(loop.lo), env(loop.step))
        names = (*(p.name for p in body.params), *(f"{v.name or 'kept'}_before" for v in self.kept))
        with b.region([body.params[0].type, *(v.type for v in inits)], names) as new:
            copy = Copier(b, env)
            copy.local.update(zip(body.params, new.params, strict=False))
            late = self.late(b, env, new.params)
            self.round(copy, late)
            new.yields = (*self.next_carries(copy), *map(copy.look, self.kept))
        b.loc = loop.loc
        new_loop = dataclasses.replace(loop, lo=lo, hi=env(loop.hi), step=env(loop.step), inits=inits, body=new)
        b.add(new_loop, *(r.name for r in loop.results), *(v.name for v in self.kept))
        last = self.late(b, env, (new.params[0], *new_loop.results))
        self.issue(last)
        self.finish(last)
        results = list(new_loop.results[: len(loop.inits)])
        for c in self.chains:
            results[c.carry] = last.look(self.products.waits[c.dots[-1]].results[0])
        return tuple(results)

    def next_carries(self, copy: Copier) -> list[Value]:
        """What a round yields: of a delayed accumulator the operand of the delayed product."""
        out = list(map(copy.look, self.products.body.yields))
        for c in self.chains:
            acc = c.dots[0].acc
            assert acc is not None  # a chain goes through its accumulator
            out[c.carry] = copy.look(acc)
        return out

    def late(self, b: Builder, env: Callable[[Value], Value], values: tuple[Value, ...]) -> Copier:
        """A copier for the delayed ops, from the round index, the carries and the kept values in `values`."""
        params = self.products.body.params
        late = Copier(b, env)
        late.local.update(zip(self.kept, values[len(params) :], strict=True))
        for c in self.chains:
            acc = c.dots[0].acc
            assert acc is not None
            late.local[acc] = values[1 + c.carry]
        return late

    def issue(self, late: Copier) -> None:
        """Start the delayed products."""
        for op in (*self.waits, *self.views):
            late.op(op)
        for d in self.dots:
            late.op(d)
            late.local[self.products.waits[d].results[0]] = late.look(d.result)

    def finish(self, late: Copier) -> None:
        """Wait for them and give their buffers back."""
        ends = [self.products.waits[c.dots[-1]].results[0] for c in self.chains]
        late.b.loc = self.dots[-1].loc
        done = late.b.add(DotWait(tuple(map(late.look, ends))), *(v.name for v in ends))
        late.local.update(zip(ends, done.results, strict=True))
        for op in self.arrivals:
            late.op(op)

    def round(self, copy: Copier, late: Copier) -> None:
        """One round of the rotated loop. Products end in the order of their start, so a wait leaves all in flight that
        started after the one it is for."""
        started: list[DotAsync] = []
        issued = False
        for op in self.head:
            if isinstance(op, DotWait) and not issued:
                self.issue(late)
                started += self.dots
                issued = True
            new = copy.op(op)
            if isinstance(op, DotAsync):
                started.append(op)
            elif isinstance(op, DotWait) and isinstance(new, DotWait):
                of = next(k for k, d in enumerate(started) if d.result is op.values[0])
                new.pending = len(started) - 1 - of
                started = started[of + 1 :]
        self.finish(late)
        body = self.products.body
        for c in self.chains:
            copy.local[body.params[1 + c.carry]] = late.look(self.products.waits[c.dots[-1]].results[0])
        for op in self.scales:
            copy.op(op)


class _Parts:
    """What belongs to the delayed products."""

    def __init__(self, products: Products, chains: list[Chain], delayed: list[DotAsync]):
        self.body, self.users = products.body, products.users
        self.delayed = set(delayed)
        self.ends = {products.waits[d] for d in delayed}
        self.chains = chains

    def views(self) -> list[Op]:
        """Views of shared memory that the delayed products use, in order: they are made again, for a buffer cannot be
        carried."""
        needed = {v for d in self.delayed for v in (d.a, d.b)}
        out: list[Op] = []
        for op in reversed(self.body.ops):
            if isinstance(op, VIEWS) and op.results[0] in needed:
                needed.add(op.buffer)
                out.append(op)
        return out[::-1]

    def own_views(self) -> set[Op]:
        """Those of them that nobody else uses."""
        out: set[Op] = set()
        for op in reversed(self.views()):
            if all(u in self.delayed or u in out for u in self.users.get(op.results[0], ())):
                out.add(op)
        return out

    def waits(self, filled: dict[Op, set[Value]]) -> list[Op]:
        """Waits on barriers of buffers that only the delayed products read."""
        views = self.own_views()
        own = {r for d in self.delayed for v in (d.a, d.b) if (r := root_of(v))}
        others = {
            r
            for op in self.body.walk()
            if op not in self.delayed and op not in views
            for v in op.operands()
            if (r := root_of(v))
        }
        barriers = set().union(*(filled.get(r, set()) for r in own - others))
        barriers -= set().union(*(filled.get(r, set()) for r in others))
        return [op for op in self.body.ops if isinstance(op, Wait) and op.barrier in barriers]

    def arrivals(self) -> list[Arrive]:
        """Arrivals after the first delayed product has ended."""
        first = min(self.body.ops.index(w) for w in self.ends)
        return [op for op in self.body.ops[first:] if isinstance(op, Arrive)]

    def kept(self, ops: Iterable[Op]) -> list[Value]:
        """Values of the body that these ops take from the rest of it; not the accumulators."""
        ops = list(ops)
        own = {r for op in ops for r in op.results} | {w.results[0] for w in self.ends}
        own |= {acc for c in self.chains if (acc := c.dots[0].acc) is not None}
        inside = {*self.body.params, *(r for op in self.body.ops for r in op.results)}
        return [v for v in dict.fromkeys(v for op in ops for v in op.operands()) if v in inside and v not in own]


def _too_early(d: DotAsync, stored: set[Op]) -> bool:
    """Whether the loop writes a buffer that the product reads."""
    return any(not isinstance(v.type, TileType) and root_of(v) in stored | {None} for v in (d.a, d.b))


def _count(op: Arrive) -> int:
    t = op.barrier.type
    return t.count if isinstance(t, BarrierType) else 0
