"""Waits for the sums of a round at its end, where `rotate` would need more registers than there are: nothing goes from
round to round but the sums.

    s_j  dp_j   wait for s_j   p_j   dv += p_j g_j   wait for dp_j   ds_j   dk += ds_j q_j   wait for both sums

A role whose products wait for what is computed leaves the tensor cores to the other one.
"""

from __future__ import annotations

import dataclasses

from jtile.ir import Arrive, DotAsync, DotWait, Op, TileType, Value
from jtile.ir.types import DTYPES
from jtile.passes.rewrite import Copier

from .chains import Products, in_flight, root_of
from .rotate import Rotation


@dataclasses.dataclass
class Deferral:
    """The products of a loop whose sums are waited for at the end; `late`: the arrivals that stand behind one of these
    waits."""

    products: Products
    late: list[Op]

    @staticmethod
    def of(rotation: Rotation) -> Deferral | None:
        """The deferral of a loop that could be rotated; None where its sums are scaled, where there is but one product
        to wait for besides, or where the loop stores what its sums read."""
        products = rotation.products
        chains = products.chains
        sums = {d for c in chains for d in c.dots}
        if len(rotation.chains) != len(chains) or any(c.before for c in chains) or len(products.waits) < len(sums) + 2:
            return None
        stored, buffers = products.stored(), [v for d in sums for v in (d.a, d.b) if not isinstance(v.type, TileType)]
        if any((r := root_of(v)) is None or r in stored for v in buffers):
            return None
        ops = products.body.ops
        first = min(ops.index(products.waits[d]) for d in sums)
        return Deferral(products, [op for op in ops[first:] if isinstance(op, Arrive)])

    def build(self, outer: Copier) -> tuple[Value, ...]:
        loop, b = self.products.loop, outer.b
        lo, hi, step = map(outer.look, (loop.lo, loop.hi, loop.step))
        with b.region([p.type for p in loop.body.params], tuple(p.name for p in loop.body.params)) as body:
            copy = outer.within()
            copy.replace(loop.body.params, body.params)
            self.body(copy)
            body.yields = tuple(map(copy.look, loop.body.yields))
        b.loc = loop.loc
        new = dataclasses.replace(loop, lo=lo, hi=hi, step=step, inits=tuple(map(outer.look, loop.inits)), body=body)
        return b.add(new, *(r.name for r in loop.results)).results

    def body(self, copy: Copier) -> None:
        """Copy the ops of one round, with the waits for sums at its end."""
        b, products = copy.b, self.products
        sums = {products.waits[d]: d for c in products.chains for d in c.dots}
        started: list[DotAsync] = []
        for op in products.body.ops:
            if op in self.late:
                continue
            if op in sums:
                copy.env[op.results[0]] = copy.look(sums[op].result)
                continue
            started = in_flight(started, op, copy.put(op))
        ends = [products.waits[c.dots[-1]].results[0] for c in products.chains]
        b.loc = products.loop.loc
        done = b.add(DotWait(tuple(map(copy.look, ends))), *(v.name for v in ends))
        copy.replace(ends, done.results)
        for op in self.late:
            copy.put(op)


def words(rotation: Rotation) -> int:
    """Words of the tiles that a rotated loop has in registers: its sums, what its products have made, and what the last
    products of two rounds read."""
    products = rotation.products
    sums = {d for c in products.chains for d in c.dots}
    made = [d.result for d in products.waits if d not in sums]
    made += [c.dots[-1].result for c in products.chains]
    return sum(map(_words, made)) + 2 * sum(map(_words, rotation.kept))


def _words(v: Value) -> int:
    return v.type.size * DTYPES[v.dtype].bits // 32 if isinstance(v.type, TileType) else 0
