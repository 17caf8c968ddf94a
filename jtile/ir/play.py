"""The roles of one program played through on numbers alone: a wait that nobody can end is an error.

A role is followed along its scalars; what tiles and buffers hold does not matter. Where its way depends on what is not
known (a loaded number) it may do anything from there on, and nobody is accused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

from .block import Arrive, AsyncLoad, AsyncStore, DotAsync, DotWait, Expect, StoreWait, Wait, nbytes
from .control import For, If, While
from .core import Block, Kernel, Op, Value
from .placement import named, refuse
from .places import Place, fills, place, reads, root
from .scalars import Scalars
from .skeleton import Event, Skeleton, Touch

STEPS = 1_000  # ops of scalars and barriers that a role is followed for: some hundred rounds of a ring


@dataclasses.dataclass(frozen=True)
class Order:
    """Who comes first where no barrier says so; what a fault does depends on it.

    Attributes:
      turn: 1: roles go on in their order; -1: the other way round.
      copies: `now`: they end at once; `oldest`, `newest`: that one ends when nothing else can go on.
      pauses: a role lets the others go on after each arrival, else only where it must wait.
    """

    turn: int
    copies: str
    pauses: bool = False


ORDERS = (Order(1, "now"), Order(-1, "now"), Order(1, "oldest", pauses=True), Order(-1, "newest", pauses=True))


class _LostError(Exception):
    """The way of a role depends on what is not known, or is too long to follow."""


@dataclasses.dataclass
class _Barrier:
    """One barrier: phases that have ended, and what the phase that runs still lacks."""

    arrivals: int
    phase: int = 0
    missing: int = 0
    bytes: int = 0

    def __post_init__(self):
        self.missing = self.arrivals

    def settle(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.arrivals

    def passes(self, parity: int) -> bool:
        return self.phase & 1 != parity


class _Role:
    """A role on its way: the ops of barriers that it does, one after the other."""

    def __init__(self, play: Play, skeleton: Skeleton):
        self.play, self.skeleton, self.name, self.steps = play, skeleton, skeleton.name, 0
        self.scalars = Scalars(play.kernel, play.pid, play.sizes, play.loaded)
        self.way = self.block(skeleton.body)
        self.waits: Wait | None = None
        # What products and asynchronous stores that are not waited for yet read, in the order of their start.
        self.products: list[list[Place]] = []
        self.stores: list[list[Place]] = []
        self.lost = self.done = False

    def number(self, v: Value | None) -> int:
        n = self.scalars.known(v)
        if n is None:
            raise _LostError
        return int(n)

    def step(self) -> None:
        self.steps += 1
        if self.steps > STEPS:
            raise _LostError

    def block(self, b: Block) -> Iterator[Event]:
        self.step()
        for op in self.skeleton.ops[id(b)]:
            self.step()
            if isinstance(op, Event):
                if self.number(op.when):
                    yield op
            elif isinstance(op, Touch):
                self.play.touch(self, op)
            elif op in self.skeleton.acts:
                yield from self.region(op)
            elif op.blocks():
                self.count(op)
            else:
                self.scalars.run(op)

    def count(self, op: Op) -> None:
        """A region without barriers: what it gives, and what it does to the memory of the block."""
        try:
            list(self.region(op))
        except _LostError:
            self.scalars.forget(op.results)
            self.play.unsure |= {root(v) for b in op.blocks() for x in b.walk() for v in fills(x)}
            self.products, self.stores = [], []

    def region(self, op: Op) -> Iterator[Event]:
        if isinstance(op, If):
            taken = op.then if self.number(op.cond) else op.orelse
            yield from self.block(taken)
            return self.give(taken.yields, op.results)
        if isinstance(op, While):
            self.give(op.inits, op.cond.params)
            while True:
                yield from self.block(op.cond)
                if not self.number(op.cond.yields[0]):
                    return self.give(op.cond.params, op.results)
                self.give(op.cond.params, op.body.params)
                yield from self.block(op.body)
                self.give(op.body.yields, op.cond.params)
        if not isinstance(op, For):
            raise _LostError
        k, *carry = op.body.params
        self.give(op.inits, carry)
        lo, hi, step = (self.number(v) for v in (op.lo, op.hi, op.step))
        if not step:
            raise _LostError
        for i in range(lo, hi, step):
            self.scalars.env[k] = i
            yield from self.block(op.body)
            self.give(op.body.yields, carry)
        self.give(carry, op.results)

    def give(self, values, to) -> None:
        pairs = [(v, t) for v, t in zip(values, to, strict=True) if t in self.skeleton.needed]
        self.scalars.bind([t for _, t in pairs], [self.scalars.of(v) for v, _ in pairs])

    def may_arrive(self, other: _Role) -> bool:
        """Whether any op of this role may arrive where the other waits."""
        op = other.waits
        return op is not None and not self.skeleton.arrives.isdisjoint(
            {(op.barrier, None), (op.barrier, other.number(op.at))}
        )

    def advance(self) -> bool:
        """Go on until the role must wait; whether it did anything."""
        moved = False
        while not (self.lost or self.done):
            try:
                op = None
                if self.waits is None:
                    op = next(self.way, None)
                    self.done = op is None
                    self.waits = op if isinstance(op, Wait) else None
                if self.waits is not None:
                    if not self.play.barrier(self, self.waits).passes(self.play.parity(self, self.waits)):
                        return moved
                    self.waits = None
                elif not self.done:
                    self.play.event(self, op)  # type: ignore[arg-type]
                moved = True
                if self.play.order.pauses and isinstance(op, Arrive):
                    return moved
            except _LostError:
                self.lost = True
        return moved


class Play:
    """All roles of one program, side by side: each goes on as far as it can. `sizes`, `loaded`: see `Scalars`."""

    def __init__(
        self,
        kernel: Kernel,
        roles: list[Skeleton],
        pid: tuple[int, ...],
        sizes: dict[str, int],
        order: Order,
        loaded: int | None = None,
    ):
        self.kernel, self.pid, self.sizes, self.loaded = kernel, pid, sizes, loaded
        self.order = order
        self.under_way: list[tuple[_Role, AsyncLoad, _Barrier, Place]] = []
        self.filled: set[tuple[Value, Hashable]] = set()
        self.unsure: set[Value] = set()  # allocations of which nobody knows what is filled
        self.barriers: dict[tuple[Value, int], _Barrier] = {}
        self.roles = [_Role(self, skeleton) for skeleton in roles]
        for op in kernel.body.ops[:-1]:
            for role in self.roles:
                role.scalars.run(op)

    def run(self) -> None:
        roles = self.roles[:: self.order.turn]
        while True:
            if any(list(map(_Role.advance, roles))):  # all of them, whatever the first did
                continue
            if not self.under_way:
                break
            self.landed(*self.under_way.pop(0 if self.order.copies == "oldest" else -1))
        stuck = [r for r in self.roles if r.waits is not None and not r.lost]
        free = [r for r in self.roles if r.lost]
        while stuck:  # those for whom somebody that may do anything can still arrive
            helped = [r for r in stuck if any(f.may_arrive(r) for f in free)]
            if not helped:
                return self.deadlock(stuck)
            free += helped
            stuck = [r for r in stuck if r not in helped]

    def barrier(self, role: _Role, op: Wait | Arrive | Expect | AsyncLoad) -> _Barrier:
        at, t = role.number(op.at), op.barrier.type
        if not 0 <= at < t.count:  # type: ignore[union-attr]
            refuse(self.kernel, op, f"{named(op.barrier)} has no slot {at}: it is {t}", role.name)
        return self.barriers.setdefault((op.barrier, at), _Barrier(t.arrivals))  # type: ignore[union-attr]

    def parity(self, role: _Role, op: Wait) -> int:
        parity = role.number(op.parity)
        if parity not in (0, 1):
            refuse(self.kernel, op, f"a parity is 0 or 1, got {parity}: (round // slots) & 1", role.name)
        return parity

    def touch(self, role: _Role, op: Touch) -> None:
        """What an op does to the memory of the block: in this order of the roles it could happen."""
        if isinstance(op, DotWait):
            role.products = role.products[-op.pending :] if op.pending else []
        elif isinstance(op, StoreWait):
            role.stores = role.stores[-op.pending :] if op.pending else []
        for v in fills(op):
            self.fill(self.write(role, op, v))
        here = [place(v, role.scalars) for v in reads(op)]
        for p in here:
            self.read(role, op, p)
        if isinstance(op, DotAsync):
            role.products.append(here)
        elif isinstance(op, AsyncStore):
            role.stores.append(here)

    def read(self, role: _Role, op: Op, p: Place) -> None:
        if not p.known:
            return
        if p.root not in self.unsure and (p.root, p.slot) not in self.filled:
            why = "nothing makes sure that it has been filled: wait for its copies, or for who stores to it"
            refuse(self.kernel, op, f"reads {p} where {why}", role.name)
        for other, _, _, target in self.under_way:
            if p.overlaps(target):
                why = f"a copy that role {other.name} has started may still write it: wait for the copy's barrier"
                refuse(self.kernel, op, f"reads {p} while {why}", role.name)

    def write(self, role: _Role, op: Op, v: Value) -> Place:
        """The place of a write; other roles must have ended what reads it."""
        p = place(v, role.scalars)
        for other in self.roles:
            for what, uses in (("a product", other.products), ("an asynchronous store", other.stores)):
                if other is not role and p.known and any(q.known and p.overlaps(q) for use in uses for q in use):
                    why = f"{what} of role {other.name} may still read it"
                    way = "that role arrives before it has waited, or this one does not wait for it"
                    refuse(self.kernel, op, f"writes {p} while {why}: {way}", role.name)
        return p

    def fill(self, p: Place) -> None:
        if p.known:
            self.filled.add((p.root, p.slot))
        else:
            self.unsure.add(p.root)

    def event(self, role: _Role, op: Arrive | Expect | AsyncLoad) -> None:
        b = self.barrier(role, op)
        if isinstance(op, AsyncLoad):
            start = (role, op, b, self.write(role, op, op.buffer))
            return self.landed(*start) if self.order.copies == "now" else self.under_way.append(start)
        count = op.count if isinstance(op, Arrive) else 1
        b.bytes += op.bytes if isinstance(op, Expect) else 0
        b.missing -= count
        if b.missing < 0:
            why = f"its phase {b.phase} takes {b.arrivals} arrivals and has had {b.arrivals - b.missing - count}"
            refuse(self.kernel, op, f"arrives {count} times at {named(op.barrier)}, but {why}", role.name)
        self.settle(role, op, b)

    def landed(self, role: _Role, op: AsyncLoad, b: _Barrier, p: Place) -> None:
        self.fill(p)
        b.bytes -= nbytes(op.buffer.type)  # type: ignore[arg-type]
        self.settle(role, op, b)

    def settle(self, role: _Role, op: Arrive | Expect | AsyncLoad, b: _Barrier) -> None:
        if b.missing == 0 and b.bytes < 0:
            message = f"copies brought {-b.bytes} bytes more to {named(op.barrier)} than were announced"
            refuse(self.kernel, op, f"{message}: expect the bytes of all copies of a phase", role.name)
        b.settle()

    def deadlock(self, stuck: list[_Role]) -> None:
        """Report the first of the roles that wait for ever."""
        first = stuck[0]
        op = first.waits
        assert op is not None
        b, at, parity = self.barrier(first, op), first.number(op.at), self.parity(first, op)
        has = f"{b.arrivals - b.missing} of {b.arrivals} arrivals"
        has += f" and lacks {b.bytes} of the bytes that were announced" if b.bytes > 0 else ""
        has += f" and has got {-b.bytes} bytes that nobody announced" if b.bytes < 0 else ""
        lines = [
            f"waits for ever at {named(op.barrier)}[{at}] for a phase of parity {parity}: phase {b.phase} has {has}"
        ]
        for r in self.roles:
            if r is first:
                continue
            where = r.waits
            if r in stuck and where is not None:
                line = f" ({where.loc})" if where.loc.file else ""
                lines.append(f"role {r.name} waits at {named(where.barrier)}[{r.number(where.at)}]{line}")
            else:
                lines.append(f"role {r.name} has ended" if r.done else f"role {r.name} does not arrive there")
        way = "check who arrives, the order of waits and arrivals, and the parities (it // slots) & 1"
        refuse(self.kernel, op, "; ".join(lines) + f": {way}", first.name)
