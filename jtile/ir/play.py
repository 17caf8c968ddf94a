"""The roles of one program played through on numbers alone: a wait that nobody can end is an error.

A role is followed along its scalars; what tiles and buffers hold does not matter. Where its way depends on what is not
known (a loaded number) it may do anything from there on, and nobody is accused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from .block import Arrive, AsyncLoad, AsyncStore, Expect, StoreWait, Wait, nbytes
from .block_products import DotAsync, DotWait
from .core import Kernel, Op, Value
from .placement import named, refuse
from .places import Place, fills, root
from .skeleton import Event, Touch
from .way import Step, Way


@dataclasses.dataclass(frozen=True)
class Order:
    """Who comes first where no barrier says so, on which the effect of a fault depends.

    Attributes:
      turn: 1: roles go on in their order; -1: the other way round.
      copies: `now`: they end at once; `oldest`, `newest`: that one ends when nothing else can go on.
      pauses: a role lets the others go on after each arrival, else only where it must wait.
    """

    turn: int
    copies: str
    pauses: bool = False


ORDERS = (Order(1, "now"), Order(-1, "now"), Order(1, "oldest", pauses=True), Order(-1, "newest", pauses=True))


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

    def __init__(self, play: Play, way: Way):
        self.play, self.way, self.name = play, way, way.skeleton.name
        self.at = 0  # the next step
        self.waits: Step | None = None
        # The places that products and asynchronous stores still read until somebody waits for them, in order of start.
        self.products: list[tuple[Place, ...]] = []
        self.stores: list[tuple[Place, ...]] = []
        self.lost = self.done = False

    def following(self) -> Step | None:
        """The next op of a barrier; what stands before it has been done."""
        while (step := self.way.step(self.at)) is not None:
            self.at += 1
            if isinstance(step.op, Event):
                return step
            self.play.touch(self, step)
        self.lost, self.done = self.way.lost, not self.way.lost
        return None

    def may_arrive(self, other: _Role) -> bool:
        """Whether any op of this role may arrive where the other waits."""
        if other.waits is None:
            return False
        barrier = other.waits.op.barrier  # type: ignore[attr-defined]
        return not self.way.skeleton.arrives.isdisjoint({(barrier, None), (barrier, other.waits.at)})

    def advance(self) -> bool:
        """Go on until the role must wait; whether it did anything."""
        moved = False
        while not (self.lost or self.done):
            step = self.waits or self.following()
            if step is None:
                return moved or self.done
            barrier = self.play.barrier(self, step)
            if isinstance(step.op, Wait):
                self.waits, parity = step, self.play.parity(self, step)
                if barrier is not None and parity is not None and not barrier.passes(parity):
                    return moved
                self.lost = barrier is None or parity is None
                self.waits = step if self.lost else None
            elif barrier is not None:
                self.play.event(self, step, barrier)
            else:
                self.lost = True
            moved = moved or not self.lost
            if self.play.order.pauses and isinstance(step.op, Arrive):
                return moved
        return moved


class Play:
    """All roles of one program, side by side, along their ways: each goes on as far as it can."""

    def __init__(self, kernel: Kernel, ways: Sequence[Way], order: Order):
        self.kernel, self.order = kernel, order
        self.under_way: list[tuple[_Role, AsyncLoad, _Barrier, Place]] = []
        self.filled: set[tuple[Value, Hashable]] = set()
        self.unsure: set[Value] = set()  # allocations of which nobody knows what is filled
        self.barriers: dict[tuple[Value, int], _Barrier] = {}
        self.roles = [_Role(self, way) for way in ways]

    def run(self) -> None:
        roles = self.roles[:: self.order.turn]
        while True:
            if any(list(map(_Role.advance, roles))):  # the list makes all of them advance, whatever the first did
                continue
            if not self.under_way:
                break
            self.landed(*self.under_way.pop(0 if self.order.copies == "oldest" else -1))
        stuck = [r for r in self.roles if r.waits is not None and not r.lost]
        free = [r for r in self.roles if r.lost]
        while stuck:  # leave out those at whose barrier somebody of whom nothing is known can still arrive
            helped = [r for r in stuck if any(f.may_arrive(r) for f in free)]
            if not helped:
                return self.deadlock(stuck)
            free += helped
            stuck = [r for r in stuck if r not in helped]

    def barrier(self, role: _Role, step: Step) -> _Barrier | None:
        """The barrier that a step is about, None where nobody knows which."""
        op, at = step.op, step.at
        if at is None:
            return None
        found = self.barriers.get((op.barrier, at))  # type: ignore[attr-defined]
        if found is None:
            t = op.barrier.type  # type: ignore[attr-defined]
            if not 0 <= at < t.count:
                refuse(self.kernel, op, f"{named(op.barrier)} has no slot {at}: it is {t}", role.name)  # type: ignore[attr-defined]
            found = self.barriers[op.barrier, at] = _Barrier(t.arrivals)  # type: ignore[attr-defined]
        return found

    def parity(self, role: _Role, step: Step) -> int | None:
        parity = step.parity
        if parity not in (0, 1, None):
            refuse(self.kernel, step.op, f"a parity is 0 or 1, got {parity}: (round // slots) & 1", role.name)
        return parity

    def touch(self, role: _Role, step: Step) -> None:
        """Check what an op does to the memory of the block, which could happen in this order of the roles."""
        op = step.op
        if not isinstance(op, Touch):
            self.unsure |= {root(v) for b in op.blocks() for x in b.walk() for v in fills(x)}
            role.products, role.stores = [], []
            return
        if isinstance(op, DotWait):
            role.products = role.products[-op.pending :] if op.pending else []
        elif isinstance(op, StoreWait):
            role.stores = role.stores[-op.pending :] if op.pending else []
        for p in step.fills:
            self.write(role, op, p)
            self.fill(p)
        for p in step.reads:
            self.read(role, op, p)
        if isinstance(op, DotAsync):
            role.products.append(step.reads)
        elif isinstance(op, AsyncStore):
            role.stores.append(step.reads)

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

    def write(self, role: _Role, op: Op, p: Place) -> None:
        """Check that no other role still reads a place that an op writes."""
        for other in self.roles:
            for what, uses in (("a product", other.products), ("an asynchronous store", other.stores)):
                if other is not role and p.known and any(q.known and p.overlaps(q) for use in uses for q in use):
                    why = f"{what} of role {other.name} may still read it"
                    way = "that role arrives before it has waited, or this one does not wait for it"
                    refuse(self.kernel, op, f"writes {p} while {why}: {way}", role.name)

    def fill(self, p: Place) -> None:
        if p.known:
            self.filled.add((p.root, p.slot))
        else:
            self.unsure.add(p.root)

    def event(self, role: _Role, step: Step, b: _Barrier) -> None:
        op = step.op
        if isinstance(op, AsyncLoad):
            (p,) = step.fills
            self.write(role, op, p)
            start = (role, op, b, p)
            return self.landed(*start) if self.order.copies == "now" else self.under_way.append(start)
        assert isinstance(op, Arrive | Expect)
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
        step = first.waits
        assert step is not None
        assert isinstance(step.op, Wait)
        b, at, parity = self.barrier(first, step), step.at, step.parity
        assert b is not None
        has = f"{b.arrivals - b.missing} of {b.arrivals} arrivals"
        has += f" and lacks {b.bytes} of the bytes that were announced" if b.bytes > 0 else ""
        has += f" and has got {-b.bytes} bytes that nobody announced" if b.bytes < 0 else ""
        where = f"{named(step.op.barrier)}[{at}]"
        lines = [f"waits for ever at {where} for a phase of parity {parity}: phase {b.phase} has {has}"]
        for r in self.roles:
            if r is first:
                continue
            if r in stuck and r.waits is not None:
                other = r.waits.op
                line = f" ({other.loc})" if other.loc.file else ""
                lines.append(f"role {r.name} waits at {named(other.barrier)}[{r.waits.at}]{line}")  # type: ignore[attr-defined]
            else:
                lines.append(f"role {r.name} has ended" if r.done else f"role {r.name} does not arrive there")
        way = "check who arrives, the order of waits and arrivals, and the parities (it // slots) & 1"
        refuse(self.kernel, step.op, "; ".join(lines) + f": {way}", first.name)
