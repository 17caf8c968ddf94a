"""Roles of programs that talk to other devices: the crew of a block as one of the programs of a world.

The clock of a role ends in what it knows of all programs, so that whatever hands on knowledge inside of a block (a
barrier, a copy) hands on that, too. Each role is a voice in the world, and so is what it copies to arrays, of which
others learn by the signals that the role raises afterwards: these wait until its copies have been made. Copies from
arrays are one more voice, of which those learn who wait for their barriers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jtile.ir import Atomic, AxisBarrier, LastArrival, Load, Op, Post, Receive, Roles, Signal, Store, WaitSignal

from . import posts
from .block import Crew, Role
from .block_agents import CopyIn, CopyOut, Product
from .turns import Standing, Steps, Voice

if TYPE_CHECKING:
    from .machine import Machine
    from .world import Part

# What other programs notice.
STOPS = frozenset({Load, Store, Atomic, LastArrival, Signal, WaitSignal, Post, Receive, AxisBarrier})


class CrewOfDevice(Crew):
    """The roles and agents of one program of one device."""

    stops = Crew.stops | STOPS

    def __init__(self, m: Machine, op: Roles, part: Part):
        super().__init__(m, op)
        self.part, count = part, len(self.roles)
        self.world = slice(len(self.roles[0].clock) - len(part.clock), None)  # of a role's clock
        for k, role in enumerate(self.roles):
            role.clock[self.world] = part.clock
            role.voice = Voice(part.first + 1 + k, lambda role=role: role.clock[self.world])
            role.voice.clock[role.voice.line] += 1
        self.copies = [part.first + 1 + count + k for k in range(count)]
        self.before = [int(part.clock[line]) for line in self.copies]
        self.loads = part.first + 1 + 2 * count
        self.loaded = int(part.clock[self.loads])

    def speak(self, role: Role, agent: CopyIn | CopyOut | Product | None = None) -> None:
        voice = role.voice
        if isinstance(agent, CopyOut | CopyIn):
            known = agent.before[self.world].copy()
            if isinstance(agent, CopyIn):
                line, self.loaded = self.loads, self.loaded + 1
                known[line] = self.loaded
            else:
                line = self.copies[role.number]
                known[line] = self.before[role.number] + agent.number
            voice = Voice(line, lambda: known)
        assert voice is not None
        self.part.voice = voice
        if agent is not None:
            self.part.op = agent.op

    def landed(self, agent: CopyIn) -> None:
        agent.barrier.arriving[self.world][self.loads] = self.loaded

    def stand(self, op: Op) -> Steps:
        if isinstance(op, WaitSignal | Receive):
            role, world = self.role, self.part.world
            assert role is not None
            standing = world.wait(self.part, op) if isinstance(op, WaitSignal) else posts.receive(self.part, op)
            if not standing.passes():
                role.stands = standing
                yield
                role.stands = None
            return
        yield from super().stand(op)

    def prepare(self, op: Op) -> None:
        super().prepare(op)
        self.part.op = op
        if isinstance(op, Signal):
            self._made()

    def _made(self) -> None:
        """What the role that acts has copied to arrays has come there."""
        role = self.role
        assert role is not None
        for agent in [a for a in self.agents if isinstance(a, CopyOut) and a.role is role]:
            while agent in self.agents:
                self.act(agent)
        self.role = role
        self.speak(role)
        role.clock[self.world][self.copies[role.number]] = self.before[role.number] + role.sent

    def stand_all(self, roles: list[Role]) -> Steps:
        stuck = [r for r in roles if r.stands is not None]
        first = stuck[0].stands
        assert first is not None
        what = lambda: "; ".join(f"{r.stands.what()} (role {r.name})" for r in stuck if r.stands is not None)
        self.part.waits = Standing(first.op, what, lambda: any(r.ready() for r in roles))
        yield
        self.part.waits = None

    def end(self) -> None:
        super().end()
        part = self.part
        part.voice = part.alone
        for role in self.roles:
            np.maximum(part.clock, role.clock[self.world], out=part.clock)
            part.clock[self.copies[role.number]] = self.before[role.number] + role.sent
        part.clock[self.loads] = self.loaded


def crew_of(part: Part, op: Roles) -> Steps:
    """Run the roles of a program."""
    m = part.machine
    m.crew = crew = CrewOfDevice(m, op, part)
    try:
        yield from crew.run()
    finally:
        m.crew = None
