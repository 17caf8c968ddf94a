"""Products of one left operand become one product, of right operands that lie side by side in one buffer.

The two products of a gated layer read the same rows: one instruction of twice the columns reads them once. The sums
are one tile, and what follows the loop takes its halves, which costs nothing in registers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from jtile.ir import (
    AllocShared,
    AsyncLoad,
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
from jtile.ir.types import DTYPES
from jtile.passes.fold import number
from jtile.passes.pipeline import Pass
from jtile.passes.rewrite import Copier, Form

from .chains import Chain, Products

LINE = 128  # bytes: buffers are cut side by side where their swizzle begins anew
COLUMNS = 256  # columns of a warpgroup's product, at most
REGISTERS = 200  # registers that a thread needs for such a product


def run(kernel: Kernel) -> Kernel:
    pairs = [p for loop in _loops(kernel) if (p := _Pair.of(loop)) is not None]
    joined = {(p.rings, p.transposed) for p in pairs}
    single = len({r for rings, _ in joined for r in rings}) == 2 * len(joined)
    if not pairs or not single or not _only(kernel, pairs):
        return kernel
    forms: dict[Op, Form] = {p.loop: functools.partial(_loop, p) for p in pairs}
    for rings, transposed in joined:
        forms |= _Both(rings, 0 if transposed else 1).forms(kernel)
    return Copier(forms).whole(kernel)


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
        """The pair of a loop; None where it has other products than two, or starts them with more than zeros."""
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
        line = flipped or one.shape[1] * DTYPES[one.dtype].bits // 8 % LINE == 0
        same = (one.shape, one.dtype, one.slots) == (two.shape, two.dtype, two.slots) and one is not two
        wide = 2 * first.result.shape[1] <= COLUMNS and first.result.type == second.result.type
        ops = loop.body.ops
        between = ops[ops.index(first) : ops.index(second)]
        zeros = all(number(loop.inits[c.carry]) == 0 for c in chains)
        if not (same and line and wide and zeros and at is at2 and flipped == flipped2):
            return None
        if any(isinstance(op, Wait) for op in between) or any(d.keep is not None for d in (first, second)):
            return None
        return _Pair(loop, (chains[0], chains[1]), (one, two), flipped)


def _right(b: Value) -> tuple[AllocShared, Value, bool] | None:
    """(ring, number of the slot, whether transposed) of a right operand; None where it is no slot of a ring."""
    flipped = isinstance(b.op, TransposeShared)
    b = b.op.buffer if isinstance(b.op, TransposeShared) else b
    if not isinstance(b.op, Slot) or not isinstance(b.op.buffer.op, AllocShared):
        return None
    return b.op.buffer.op, b.op.at, flipped


def _only(kernel: Kernel, pairs: list[_Pair]) -> bool:
    """Whether the rings of the pairs are used only by the copies that fill them and by the pairs' products."""
    joined = {d for p in pairs for c in p.chains for d in c.dots}
    views = {r.result for p in pairs for r in p.rings}
    for op in kernel.body.walk():
        if (isinstance(op, Slot) and op.buffer in views) or (isinstance(op, TransposeShared) and op.buffer in views):
            views.add(op.result)
        elif not isinstance(op, AsyncLoad) and op not in joined and not views.isdisjoint(op.operands()):
            return False
    return True


@dataclasses.dataclass
class _Both:
    """One ring in the place of two, whose buffers lie side by side along `axis`."""

    rings: tuple[AllocShared, AllocShared]
    axis: int
    made: Value | None = None

    def forms(self, kernel: Kernel) -> dict[Op, Form]:
        out: dict[Op, Form] = dict.fromkeys(self.rings, self.allocate)
        for half, ring in enumerate(self.rings):
            slots = (op for op in kernel.body.walk() if isinstance(op, Slot) and op.buffer is ring.result)
            out |= {op: functools.partial(self.part, op, half) for op in slots}
        return out

    def allocate(self, copier: Copier) -> tuple[Value]:
        """Allocate the ring, at the place of the first of the two."""
        if self.made is None:
            first = self.rings[0]
            shape = tuple(2 * n if a == self.axis else n for a, n in enumerate(first.shape))
            names = [r.result.name for r in self.rings]
            self.made = copier.b.value(dataclasses.replace(first, shape=shape), "_".join(names) if all(names) else "")
        return (self.made,)

    def part(self, slot: Slot, half: int, copier: Copier) -> tuple[Value]:
        """The buffer of one of the two rings: half of a buffer of this ring."""
        b, sizes = copier.b, slot.result.shape
        whole = b.value(Slot(copier.look(slot.buffer), copier.look(slot.at)), slot.result.name)
        starts = tuple(half * n if a == self.axis else 0 for a, n in enumerate(sizes))
        return (b.value(SliceShared(whole, starts, sizes), slot.result.name),)


def _loop(pair: _Pair, copier: Copier) -> tuple[Value, ...]:
    """Builds the loop with one accumulator for the two; returns its results, with the halves of the sums."""
    old, b = pair.loop, copier.b
    gone = [c.carry for c in pair.chains]
    keep = [i for i in range(len(old.inits)) if i not in gone]
    first = pair.chains[0].dots[0]
    rows, columns = first.result.shape
    zeros = b.full(0.0, (rows, 2 * columns), first.result.dtype)
    inits = (*(copier.look(old.inits[i]) for i in keep), zeros)
    lo, hi, step = map(copier.look, (old.lo, old.hi, old.step))
    params = [old.body.params[0], *(old.body.params[1 + i] for i in keep)]
    names = (*(p.name for p in params), old.body.params[1 + gone[0]].name)
    with b.region([*(p.type for p in params), zeros.type], names) as new:
        copier.replace(params, new.params[:-1])
        sums = _product(pair, copier, new.params[-1])
        new.yields = (*(copier.look(old.body.yields[i]) for i in keep), sums)
    b.loc = old.loc
    loop = dataclasses.replace(old, lo=lo, hi=hi, step=step, inits=inits, body=new)
    *kept, sums = b.add(loop, *(old.results[i].name for i in keep), "").results
    results = dict(zip(keep, kept, strict=True))
    for half, i in enumerate(gone):
        bounds = (0, half * columns), (rows, (half + 1) * columns), (1, 1)
        results[i] = b.value(Slice(sums, *bounds), old.results[i].name)
    return tuple(results[i] for i in range(len(old.inits)))


def _product(pair: _Pair, copier: Copier, sums: Value) -> Value:
    """Builds the body with one product for the two; returns the sums after it."""
    b, (first, second) = copier.b, (c.dots[0] for c in pair.chains)
    for op in pair.loop.body.ops:
        if op is first:
            b.loc = op.loc
            view = first.b.op.buffer.op if pair.transposed else first.b.op  # type: ignore[union-attr]
            right = b.value(Slot(copier.look(view.buffer), copier.look(view.at)))
            right = b.value(TransposeShared(right)) if pair.transposed else right
            running = b.value(dataclasses.replace(first, a=copier.look(first.a), b=right, acc=sums))
            (sums,) = b.add(DotWait((running,), 0)).results
        elif op is not second and not (isinstance(op, DotWait) and op.values[0] in (first.result, second.result)):
            copier.op(op)
    return sums


join = Pass("join", "No loop has two products of one left operand whose right ones fit one instruction.", run)
