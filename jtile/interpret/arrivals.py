"""Arrivals at counters, and what they order: the last program to come knows what the others did before they came.

Programs and their roles write and read in *spans*, between whose ends others may learn of them. The buffers of a kernel
with arrivals note spans, not programs. A program knows all spans of its own; its roles keep order among themselves by
their own clocks (`block_memory`), and so a role that arrives tells of those spans that its clock has counted.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jtile._errors import OutOfBoundsError, ProtocolError
from jtile.ir import LastArrival

from .order import Order

if TYPE_CHECKING:
    from .machine import Machine

Span = tuple[int, int, int]  # program, role, and how much of it the role's clock had counted


@dataclasses.dataclass
class _Counter:
    """A counter that some program has come to: who, of how many, and what they told."""

    count: int
    came: list[int] = dataclasses.field(default_factory=list)
    told: set[int] = dataclasses.field(default_factory=set)


class Arrivals(Order[Span]):
    """The counters of one call, and who knows of whom."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine
        self.counters: dict[tuple[str, int], _Counter] = {}
        self.learned: dict[
            int, list[tuple[int, int, set[int]]]
        ] = {}  # program -> role, its clock then, what it learned
        self.epoch: dict[int, int] = {}  # program without roles -> how often it has arrived

    # -- spans ------------------------------------------------------------------------------------------------------
    def span(self) -> Span:
        m = self.machine
        if m.crew is None:
            return m.linear, 0, self.epoch.get(m.linear, 0)
        if m.crew.actor is not None:  # a copy: nobody ever knows when its store has ended
            return m.linear, -1, 0
        role = m.crew.role
        return m.linear, role.number, int(role.clock[role.number])

    def known(self) -> set[int]:
        """The spans of other programs that who acts now has learned of."""
        m, out = self.machine, set[int]()
        for role, clock, spans in self.learned.get(m.linear, ()):
            mine = m.crew is None or m.crew.role is None or role == m.crew.role.number
            if mine or m.crew.role.clock[role] > clock:
                out |= spans
        return out

    def _told(self) -> set[int]:
        """The spans of this program that whoever hears of its arrival may rely on."""
        m = self.machine
        own = {k: s for k, s in enumerate(self.spans) if s[0] == m.linear}
        if m.crew is None:
            return set(own)
        return {k for k, (_, role, epoch) in own.items() if role >= 0 and epoch <= m.crew.role.clock[role]}

    def before(self, span: int, known: set[int]) -> bool:
        return span in known or self.spans[span][0] == self.machine.linear

    def name(self, span: int) -> str:
        return f"program {self.machine.named(self.spans[span][0])}"

    # -- counters -----------------------------------------------------------------------------------------------------
    def arrive(self, op: LastArrival) -> bool:
        m = self.machine
        at, count = int(m.env[op.index]), int(m.env[op.count])
        if not 0 <= at < op.size:
            raise m.error(OutOfBoundsError, op, f"there is no counter {op.counters}[{at}]: there are {op.size}")
        if count < 1:
            raise m.error(ProtocolError, op, f"a count of programs is at least 1, got {count}")
        counter = self.counters.setdefault((op.counters, at), _Counter(count))
        if count != counter.count:
            why = f"it arrives at {op.counters}[{at}] as one of {count} programs, and program "
            why += f"{m.named(counter.came[0])} as one of {counter.count}"
            raise m.error(ProtocolError, op, why)
        counter.came.append(m.linear)
        counter.told |= self._told() | self.known()
        role = m.crew.role if m.crew is not None else None
        last = len(counter.came) == count
        if last:
            entry = (role.number, int(role.clock[role.number])) if role is not None else (0, 0)
            self.learned.setdefault(m.linear, []).append((*entry, counter.told))
            del self.counters[op.counters, at]
        if role is None:
            self.epoch[m.linear] = self.epoch.get(m.linear, 0) + 1
        else:
            role.advance()
        return last

    def end(self) -> None:
        """Check, when all programs have ended, that no counter still waits for arrivals."""
        for (name, at), counter in self.counters.items():
            came = ", ".join(map(self.machine.named, counter.came[:4])) + ", ..." * (len(counter.came) > 4)
            why = f"{len(counter.came)} of {counter.count} programs arrived at {name}[{at}] when all had ended ({came})"
            kernel = self.machine.kernel
            where = (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None
            raise ProtocolError(f"kernel {kernel.name}: {why}: none of them was the last", where)


def arrivals(machine: Machine) -> Arrivals | None:
    """The arrivals of a kernel; None for one whose programs never arrive at a counter."""
    ops = machine.kernel.body.walk()
    return Arrivals(machine) if any(isinstance(op, LastArrival) for op in ops) else None
