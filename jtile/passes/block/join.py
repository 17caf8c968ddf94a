"""Products of one left operand become one product, of right operands that lie side by side in one buffer.

The two products of a gated layer read the same rows: one instruction of twice the columns reads them once. The sums
are one tile, and what follows the loop takes its halves, which costs nothing in registers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from jtile.ir import (
    AllocShared,
    AsyncLoad,
    Block,
    Builder,
    DotWait,
    For,
    Kernel,
    Op,
    Roles,
    Slice,
    SliceShared,
    Slot,
    TransposeShared,
    Value,
    Wait,
)
from jtile.passes.fold import number
from jtile.passes.pipeline import Pass

from .chains import Chain, Copier, Products

COLUMNS = 256  # of a warpgroup's product at most
REGISTERS = 200  # that a thread needs for one


def run(kernel: Kernel) -> Kernel:
    pairs = [p for loop in _loops(kernel) if (p := _Pair.of(loop)) is not None]
    rings = {p.rings for p in pairs}
    single = len({r for both in rings for r in both}) == 2 * len(rings)
    if not pairs or not single or not _only(kernel, pairs):
        return kernel
    joining = _Joining({p.loop: p for p in pairs}, {})
    return kernel.with_body(joining.block(kernel.body, lambda v: v))


def _loops(kernel: Kernel) -> Iterator[For]:
    """The loops of roles that have the registers for a product of all columns."""
    for roles in kernel.body.walk():
        if isinstance(roles, Roles) and not any(0 < r < REGISTERS for r in roles.registers[: len(roles.warps) - 1]):
            yield from (op for body in roles.bodies for op in body.walk() if isinstance(op, For))


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Two accumulations of a loop, `chains`, whose right operands come from `rings`, which hold them `transposed`."""

    loop: For
    chains: tuple[Chain, Chain]
    rings: tuple[AllocShared, AllocShared]
    transposed: bool

    @staticmethod
    def of(loop: For) -> _Pair | None:
        """None where a loop has other products than these two, or starts them with more than zeros."""
        products = Products(loop)
        chains = [c for c in products.chains if not c.before and len(c.dots) == 1]
        if len(products.waits) != 2 or len(chains) != 2:
            return None
        chains = sorted(chains, key=lambda c: loop.body.ops.index(c.dots[0]))
        first, second = (c.dots[0] for c in chains)
        rights = [_right(d.b) for d in (first, second)]
        if first.a is not second.a or first.fast != second.fast or None in rights:
            return None
        (one, at, flipped), (two, at2, flipped2) = rights  # type: ignore[misc]
        same = (one.shape, one.dtype, one.slots) == (two.shape, two.dtype, two.slots) and one is not two
        wide = 2 * first.result.shape[1] <= COLUMNS and first.result.type == second.result.type
        ops = loop.body.ops
        between = ops[ops.index(first) : ops.index(second)]
        zeros = all(number(loop.inits[c.carry]) == 0 for c in chains)
        if not (same and wide and zeros and at is at2 and flipped == flipped2):
            return None
        if any(isinstance(op, Wait) for op in between) or any(d.keep is not None for d in (first, second)):
            return None
        return _Pair(loop, (chains[0], chains[1]), (one, two), flipped)


def _right(b: Value) -> tuple[AllocShared, Value, bool] | None:
    """(ring, number of the slot, whether transposed) of a right operand."""
    flipped = isinstance(b.op, TransposeShared)
    b = b.op.buffer if isinstance(b.op, TransposeShared) else b
    if not isinstance(b.op, Slot) or not isinstance(b.op.buffer.op, AllocShared):
        return None
    return b.op.buffer.op, b.op.at, flipped


def _only(kernel: Kernel, pairs: list[_Pair]) -> bool:
    """Whether nothing but copies into them, and these products, uses the rings."""
    joined = {d for p in pairs for c in p.chains for d in c.dots}
    views = {r.result for p in pairs for r in p.rings}
    for op in kernel.body.walk():
        if (isinstance(op, Slot) and op.buffer in views) or (isinstance(op, TransposeShared) and op.buffer in views):
            views.add(op.result)
        elif not isinstance(op, AsyncLoad) and op not in joined and not views.isdisjoint(op.operands()):
            return False
    return True


@dataclasses.dataclass
class _Joining:
    """Copies a kernel; `rings`: what an old ring is part of, and from which element on along which axis."""

    pairs: dict[For, _Pair]
    rings: dict[Value, tuple[Value, int, int]]

    def block(self, old: Block, env: Callable[[Value], Value]) -> Block:
        b = Builder(Block(tuple(Value(p.type, p.name) for p in old.params)))
        copy = Copier(b, env)
        copy.local.update(zip(old.params, b.block.params, strict=True))
        for op in old.ops:
            self.op(op, copy)
        b.block.yields = tuple(map(copy.look, old.yields))
        return b.block

    def op(self, op: Op, copy: Copier) -> None:
        b = copy.b
        b.loc = op.loc
        pair = self.pairs.get(op) if isinstance(op, For) else None
        if isinstance(op, AllocShared) and (found := self.of_ring(op)):
            self.allocate(b, found)
        elif isinstance(op, Slot) and op.buffer in self.rings:
            copy.local[op.result] = self.part(b, op, copy.look(op.at))
        elif isinstance(op, For) and pair is not None:
            self.loop(op, pair, copy)
        else:
            new = op.clone(copy.look, lambda inner: self.block(inner, copy.look))
            b.block.ops.append(new)
            copy.local.update(zip(op.results, new.results, strict=True))

    def of_ring(self, ring: AllocShared) -> _Pair | None:
        return next((p for p in self.pairs.values() if ring in p.rings), None)

    def allocate(self, b: Builder, pair: _Pair) -> None:
        """One ring for both, where the first of them stands."""
        if pair.rings[0].result in self.rings:
            return
        first = pair.rings[0]
        axis = 0 if pair.transposed else 1
        shape = tuple(2 * n if a == axis else n for a, n in enumerate(first.shape))
        names = [r.result.name for r in pair.rings]
        both = b.value(dataclasses.replace(first, shape=shape), "_".join(names) if all(names) else "")
        for k, ring in enumerate(pair.rings):
            self.rings[ring.result] = both, axis, k * first.shape[axis]

    def part(self, b: Builder, slot: Slot, at: Value) -> Value:
        both, axis, start = self.rings[slot.buffer]
        whole = b.value(Slot(both, at), slot.result.name)
        sizes = slot.result.shape
        return b.value(SliceShared(whole, tuple(start if a == axis else 0 for a in range(2)), sizes), slot.result.name)

    def loop(self, old: For, pair: _Pair, copy: Copier) -> None:
        """The loop with one accumulator for the two, and its halves."""
        b, body = copy.b, old.body
        gone = [c.carry for c in pair.chains]
        keep = [i for i in range(len(old.inits)) if i not in gone]
        first = pair.chains[0].dots[0]
        rows, columns = first.result.shape
        zeros = b.full(0.0, (rows, 2 * columns), first.result.dtype)
        inits = (*(copy.look(old.inits[i]) for i in keep), zeros)
        lo, hi, step = map(copy.look, (old.lo, old.hi, old.step))
        params = [body.params[0], *(body.params[1 + i] for i in keep)]
        names = (*(p.name for p in params), body.params[1 + gone[0]].name)
        with b.region([*(p.type for p in params), zeros.type], names) as new:
            inner = Copier(b, copy.look)
            inner.local.update(zip(params, new.params, strict=False))
            sums = self.products(pair, body, inner, new.params[-1])
            new.yields = (*(inner.look(body.yields[i]) for i in keep), sums)
        b.loc = old.loc
        loop = dataclasses.replace(old, lo=lo, hi=hi, step=step, inits=inits, body=new)
        results = b.add(loop, *(old.results[i].name for i in keep), "").results
        copy.local.update((old.results[i], r) for i, r in zip(keep, results, strict=False))
        for k, i in enumerate(gone):
            bounds = (0, k * columns), (rows, (k + 1) * columns), (1, 1)
            copy.local[old.results[i]] = b.value(Slice(results[-1], *bounds), old.results[i].name)

    def products(self, pair: _Pair, body: Block, inner: Copier, sums: Value) -> Value:
        """Copies a body with one product for the two; gives the sums after it."""
        first, second = (c.dots[0] for c in pair.chains)
        for op in body.ops:
            if op is first:
                inner.b.loc = op.loc
                view = first.b.op.buffer.op if pair.transposed else first.b.op  # type: ignore[union-attr]
                right = inner.b.value(Slot(self.rings[pair.rings[0].result][0], inner.look(view.at)))
                right = inner.b.value(TransposeShared(right)) if pair.transposed else right
                running = inner.b.value(dataclasses.replace(first, a=inner.look(first.a), b=right, acc=sums))
                (sums,) = inner.b.add(DotWait((running,), 0)).results
            elif op is second or (isinstance(op, DotWait) and op.values[0] in (first.result, second.result)):
                continue
            else:
                self.op(op, inner)
        return sums


join = Pass("join", "No loop has two products of one left operand whose right ones fit one instruction.", run)
