"""The asynchronous products of a loop and how they hang together through its accumulators."""

from __future__ import annotations

import dataclasses

from jtile.ir import (
    AllocShared,
    Arrive,
    AsyncLoad,
    BarrierType,
    Block,
    DotAsync,
    DotWait,
    For,
    Kernel,
    Op,
    SliceShared,
    Slot,
    StoreShared,
    TransposeShared,
    Value,
)
from jtile.passes.rewrite import is_pure, users_of

VIEWS = (Slot, TransposeShared, SliceShared)  # ops that give views of shared memory


@dataclasses.dataclass(frozen=True)
class Chain:
    """Products that add to one carry of a loop, in order.

    Attributes:
      carry: the number of the carry.
      before: what is done to the accumulator before the first product, in order.
      dots: the products; each but the first adds to what the one before gives.
    """

    carry: int
    before: tuple[Op, ...]
    dots: tuple[DotAsync, ...]


class Products:
    """The products that stand in the body of a loop itself, each waited for at once.

    Attributes:
      waits: the wait for each product; empty where the body has another form.
      chains: the accumulators whose values nobody else in the loop sees.
    """

    def __init__(self, loop: For):
        self.loop, self.body = loop, loop.body
        self.users = users_of(loop.body)
        self.waits: dict[DotAsync, DotWait] = {}
        self.chains: list[Chain] = []
        dots = [op for op in self.body.ops if isinstance(op, DotAsync)]
        waits = [op for op in self.body.ops if isinstance(op, DotWait)]
        inner = sum(isinstance(op, DotAsync | DotWait) for op in self.body.walk())
        if inner != len(dots) + len(waits) or len(dots) != len(waits):
            return
        for d in dots:
            found = [w for w in waits if w.values == (d.result,) and w.pending == 0]
            if len(found) != 1 or len(self.users[d.result]) != 1:
                self.waits = {}
                return
            self.waits[d] = found[0]
        carries = range(len(loop.inits))
        self.chains = [c for i in carries if (c := self._chain(i)) is not None]

    def _chain(self, carry: int) -> Chain | None:
        """The chain from a carry to its next value."""
        at = self.body.params[1 + carry]
        before: list[Op] = []
        dots: list[DotAsync] = []
        while True:
            users = self.users.get(at, [])
            if users == [None] and dots:
                return Chain(carry, tuple(before), tuple(dots)) if self.body.yields[carry] is at else None
            if len(users) != 1 or users[0] is None:
                return None
            (op,) = users
            if isinstance(op, DotAsync):
                if op.acc is not at or at in (op.a, op.b):
                    return None
                dots.append(op)
                at = self.waits[op].results[0]
            elif not dots and op in self.body.ops and is_pure(op) and len(op.results) == 1 and not op.blocks():
                before.append(op)
                at = op.results[0]
            else:
                return None

    def reached(self, start: list[Value]) -> set[Value]:
        """All values of the body that depend on one of `start`."""
        out = set(start)
        for op in self.body.ops:
            inner = [v for b in op.blocks() for v in [*b.yields, *(x for o in b.walk() for x in o.operands())]]
            if any(v in out for v in [*op.operands(), *inner]):
                out.update(op.results)
        return out

    def stored(self) -> set[Op]:
        """The allocations that the loop stores to."""
        return {root for op in self.body.walk() if isinstance(op, StoreShared) and (root := root_of(op.buffer))}


def in_flight(started: list[DotAsync], op: Op, new: Op | None) -> list[DotAsync]:
    """The products in flight after one more op of a round that is copied, given those before it. Products end in the
    order of their start, so the copy `new` of a wait leaves all in flight that started after the one it is for."""
    if isinstance(op, DotAsync):
        return [*started, op]
    if isinstance(op, DotWait) and isinstance(new, DotWait):
        waited = next(k for k, d in enumerate(started) if d.result is op.values[0])
        new.pending = len(started) - 1 - waited
        return started[waited + 1 :]
    return started


def root_of(buffer: Value) -> AllocShared | None:
    """The allocation that a buffer is (part of)."""
    op = buffer.op
    while isinstance(op, VIEWS):
        op = op.buffer.op
    return op if isinstance(op, AllocShared) else None


def rounds_held(op: Arrive, body: Block) -> int:
    """The number of rounds of a loop whose copies a ring holds at a time, where `op` gives the ring's buffers back in
    the loop's body: a round may take several slots."""
    t = op.barrier.type
    taken = sum(isinstance(x, Arrive) and x.barrier is op.barrier for x in body.walk())
    return t.count // taken if isinstance(t, BarrierType) else 0


def filled_by(kernel: Kernel) -> dict[Op, set[Value]]:
    """For each allocation the barriers on which copies into it count."""
    out: dict[Op, set[Value]] = {}
    for op in kernel.body.walk():
        if isinstance(op, AsyncLoad) and (root := root_of(op.buffer)):
            out.setdefault(root, set()).add(op.barrier)
    return out
