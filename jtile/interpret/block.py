"""How the interpreter runs the roles of a block: in turns that a seed decides, with the asynchronous copies and
products as agents of their own. Roles are generators that stop before each op which another role or agent could
notice."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np

from jtile._errors import DeadlockError, OutOfBoundsError, ProtocolError, SharedRaceError, UninitializedReadError
from jtile.ir import (
    AllocBarriers,
    Arrive,
    AsyncLoad,
    AsyncStore,
    Atomic,
    Clock,
    DotAsync,
    DotWait,
    Expect,
    FenceShared,
    LastArrival,
    Load,
    LoadShared,
    Op,
    RoleBarrier,
    Roles,
    Store,
    StoreShared,
    StoreWait,
    Value,
    Wait,
)

from .block_agents import CopyIn, CopyOut, Product
from .block_memory import Access, Barrier, Elements, View, place
from .machine import Machine, rule
from .turns import Standing, Steps, Turns, Voice, Walker

# A role stops before these; other roles and agents may come in between.
_SWITCHES = frozenset(
    {LoadShared, StoreShared, FenceShared, RoleBarrier, Expect, Arrive, Wait, Clock, LastArrival}
    | {AsyncLoad, AsyncStore, StoreWait, DotAsync, DotWait}
)
# For each card, what ends its access for those who come after.
_ENDS = {
    DotAsync: "dot_wait ends it",
    AsyncStore: "store_wait ends it",
    AsyncLoad: "a wait on its barrier ends it",
    LoadShared: "a wait on a barrier at which that role arrives afterwards orders them",
    StoreShared: "a wait on a barrier at which that role arrives afterwards orders them",
}


class Role:
    """One role while it runs.

    Attributes:
      clock: what it knows to have happened (see block_memory).
      started, ended: number of its products, and of those that it has waited for; `products`: not yet in effect.
      sent: number of its asynchronous stores; `stores`: those that have not read their buffers yet.
      waits: the wait at which it stands, if it cannot pass now; `stands`: likewise, at a signal of another device.
      voice: on a mesh, it among the roles of all programs: the end of `clock` is what it knows of them.
    """

    def __init__(self, number: int, name: str, lines: int):
        self.number, self.name = number, name
        self.clock = np.zeros(lines, np.int64)
        self.clock[number] = 1
        self.started = self.ended = self.sent = 0
        self.products: deque[Product] = deque()
        self.stores: list[CopyOut] = []
        self.waits: tuple[Wait, Barrier, int] | None = None
        self.stands: Standing | None = None
        self.voice: Voice | None = None

    def ready(self) -> bool:
        if self.stands is not None:
            return self.stands.passes()
        return self.waits is None or self.waits[1].passes(self.waits[2])

    def advance(self) -> np.ndarray:
        """The clock of this role as it is now; what the role does afterwards is not in it."""
        known = self.clock.copy()
        self.clock[self.number] += 1
        if self.voice is not None:
            self.voice.clock[self.voice.line] += 1
        return known


class Crew(Walker):
    """The roles and agents of one program.

    Attributes:
      role: who acts now; None between.
      agents: copies under way. Products wait in the queues of their roles.
      actor: line, epoch and clock of the agent that acts now; None where a role does.
    """

    stops = _SWITCHES

    def __init__(self, m: Machine, op: Roles):
        self.machine, self.op = m, op
        n = len(op.names)
        barriers = [m.env[o.result] for o in m.kernel.body.ops if isinstance(o, AllocBarriers)]
        self.never, lines = 4 * n, 4 * n + 1
        total = lines + sum(b.count for b in barriers) + (0 if m.part is None else len(m.part.clock))
        for b in barriers:
            b.start(lines, total)
            lines += b.count
        self.barriers = barriers
        self.roles = [Role(k, name, total) for k, name in enumerate(op.names)]
        self.role: Role | None = None
        self.actor: tuple[int, int, np.ndarray] | None = None
        self.agents: list[CopyIn | CopyOut] = []
        self.elements = _contended(m, op) if m.check and m.part is None else {}
        self.ticks = 0
        self.uses: dict[Op, list[Value]] = {}
        # These numbers say how soon, how late and how often agents act.
        self.rng = rng = random.Random(int(m.seed) * 1_000_003 + m.linear)
        self.eager = rng.choice((0.0, 1.0, 0.05, 0.4))
        self.turns = Turns(rng, self.roles)

    # -- turns --------------------------------------------------------------------------------------------------
    def run(self) -> Steps:
        """Run all roles. Stops after each step on a mesh, where others act in between."""
        steps = {r: self.steps(b.ops) for r, b in zip(self.roles, self.op.bodies, strict=True)}
        while steps:
            self.let_agents_act()
            ready = [r for r in steps if r.ready()]
            if not ready:
                if self.agents:
                    self.act(self.rng.choice(self.agents))
                elif not any(r.stands for r in steps):
                    raise self.deadlock()
                else:
                    yield from self.stand_all(list(steps))
                continue
            self.role = role = self.turns.next(ready, self.role)
            self.speak(role)
            self.ticks += 1
            try:
                next(steps[role])
            except StopIteration:
                del steps[role]
                self.leave(role)
            if self.machine.part is not None:
                yield
        self.end()

    def let_agents_act(self) -> None:
        while self.eager and (self.eager == 1 or self.rng.random() < self.eager):
            pool = [*self.agents, *(r.products[0] for r in self.roles if r.products)]
            if not pool:
                break
            self.act(self.rng.choice(pool))

    def act(self, agent: CopyIn | CopyOut | Product) -> None:
        self.role = agent.role
        self.speak(agent.role, agent)
        agent.act(self)
        self.actor = None

    def speak(self, role: Role, agent: CopyIn | CopyOut | Product | None = None) -> None:
        """Overridden on a mesh (`block_devices.py`): whoever acts now is a voice of its own."""

    def landed(self, agent: CopyIn) -> None:
        """Overridden on a mesh: a copy has read its array, of which those learn who wait for its barrier."""

    def stand_all(self, roles: list[Role]) -> Steps:
        """Overridden on a mesh: stand until a role can go on."""
        yield from ()

    # -- one role -----------------------------------------------------------------------------------------------
    def stand(self, op: Op) -> Steps:
        if type(op) is Wait:
            yield from self.wait(op)

    def prepare(self, op: Op) -> None:
        if type(op) is not DotAsync and type(op) is not DotWait:
            self.finished(op)

    def wait(self, op: Wait) -> Steps:
        """Stand until the wait passes; the op itself then takes over what is known."""
        if not self.holds(op):
            return
        role, barrier = self.role, self.barrier(op)
        parity = int(self.machine.env[op.parity])
        if parity not in (0, 1):
            raise self.error(ProtocolError, op, f"a parity is 0 or 1, got {parity}")
        if not barrier.passes(parity):
            role.waits = (op, barrier, parity)
            yield
            role.waits = None

    def finished(self, op: Op) -> None:
        """Refuse an ordinary op whose operand is a product in flight: it takes finished tiles only."""
        env, uses = self.machine.env, self.uses.get(op)
        if uses is None:
            uses = self.uses[op] = op.operands()
        for v in uses:
            x = env[v]
            if type(x) is Product:
                why = f"{getattr(op, 'fn', op.mnemonic)} reads the result of dot_async ({place(x.op)}), which may "
                why += f"still run: take what a dot_wait gives, with `pending` at most {x.role.started - x.number}"
                raise self.error(ProtocolError, op, why)

    # -- for the rules ------------------------------------------------------------------------------------------
    def error(self, kind: type, op: Op, message: str):
        return self.machine.error(kind, op, message)

    def holds(self, op: Any) -> bool:
        return op.when is None or bool(self.machine.env[op.when])

    def barrier(self, op: Any) -> Barrier:
        barriers, at = self.machine.env[op.barrier], int(self.machine.env[op.at])
        if not 0 <= at < barriers.count:
            name = barriers.value.name or "barrier"
            why = f"there is no barrier {name}[{at}]: {name} has {barriers.count}"
            raise self.error(OutOfBoundsError, op, why)
        return barriers.one(at)

    def arrive(self, op: Op, barrier: Barrier, count: int) -> None:
        if count > barrier.pending:
            why = f"too many arrivals: {count} at {barrier.name}, whose phase {barrier.phase} waits for "
            why += f"{barrier.pending} of {barrier.owner.arrivals}"
            raise self.error(ProtocolError, op, why)
        barrier.arrive(count, self.role.advance())
        self.account(op, barrier)

    def account(self, op: Op, barrier: Barrier) -> None:
        """Refuse a phase that can never end: all arrivals have come, and more bytes than were announced."""
        if barrier.pending == 0 and barrier.bytes < 0:
            why = f"phase {barrier.phase} of {barrier.name} got {-barrier.bytes} bytes more than it was told to expect"
            raise self.error(ProtocolError, op, why)

    def use(self, op: Op, view: View, access: Access, writes: bool, asynchronous: bool = False) -> None:
        """Record an access; raises SharedRaceError where nothing orders it after those that it must come after."""
        if not self.machine.check:
            return
        slot, clock = view.slot, self.role.clock
        for a in slot.against(view.box, writes):
            known = a.known(clock)
            if known and (not asynchronous or a.fenced(clock)):
                continue
            did = "write" if a in slot.writes else "read"
            why = f"race on shared memory: {op.mnemonic} {'writes' if writes else 'reads'} {view.name}, "
            if known:
                why += f"to which role {a.role} stored ({place(a.op)}) without a fence_shared afterwards"
            else:
                why += f"which {a.op.mnemonic} of role {a.role} ({place(a.op)}) may still {did}: {_ENDS[type(a.op)]}"
            raise self.error(SharedRaceError, op, why)
        slot.add(access, writes)

    def filled(self, op: Op, view: View) -> None:
        element = view.undefined() if self.machine.check else None
        if element is not None:
            why = f"{op.mnemonic} reads element {element} of {view.name}, which nobody filled"
            raise self.error(UninitializedReadError, op, why)

    def touch(self, op: Any, at: np.ndarray, kind: str) -> None:
        """Record an access to elements of an array, as `use` does for buffers."""
        elements = self.elements.get(id(self.machine.env[op.ref]))
        if elements is None:
            return
        role = self.role
        line, epoch, clock = self.actor or (role.number, int(role.clock[role.number]), role.clock)
        found = elements.touch(at, kind, line, epoch, clock, self.actor is not None)
        if found is None:
            return
        element, by, did = found
        n = len(self.roles)
        who = f"role {self.roles[by].name}" if by < n else f"an asynchronous {'store' if by == self.never else 'load'}"
        where = self.machine.env[op.ref].unravel(element)
        why = f"race: {op.mnemonic} {kind}s element {where} of {op.ref.name or 'a Ref'}, which {who} {did} in the same "
        raise self.error(SharedRaceError, op, why + "program with nothing that orders them")

    # -- ends ---------------------------------------------------------------------------------------------------
    def leave(self, role: Role) -> None:
        """Check a role that ends: its copies must have read their buffers, and its products must have ended."""
        n = len(self.roles)
        if role.clock[3 * n + role.number] < role.sent:
            why = f"role {role.name} ends while its asynchronous stores may still read their buffers: add store_wait(0)"
            raise self.error(ProtocolError, self.op, why)
        if role.ended < role.started:
            why = f"role {role.name} ends while {role.started - role.ended} of its products may still run: add dot_wait"
            raise self.error(ProtocolError, self.op, why)

    def end(self) -> None:
        while self.agents:
            self.act(self.rng.choice(self.agents))
        self.role = None
        for b in (one for group in self.barriers for one in group.used.values()):
            if b.last is not None and all(not b.last.known(r.clock) for r in self.roles):
                why = f"the block ends while this copy to {b.name} may be under way: nobody waits for it"
                raise self.error(ProtocolError, b.last.op, why)
            if b.bytes:
                why = f"phase {b.phase} of {b.name} still waits for {b.bytes} bytes when the block ends"
                raise self.error(ProtocolError, self.op, why)

    def deadlock(self) -> DeadlockError:
        self.role, text, stuck = None, [], []
        for r in self.roles:
            if r.waits is None:
                text.append(f"\n  role {r.name} has ended")
                continue
            op, b, parity = r.waits
            text.append(
                f"\n  role {r.name} waits at {place(op)} for {b.name}, parity {parity}: phase {b.phase} of it misses "
                f"{b.pending} of {b.owner.arrivals} arrivals and {b.bytes} bytes"
            )
            where = (op.loc.file, op.loc.line) if op.loc.file else None
            stuck.append((r.name, b.owner.value.name or "barrier", b.at, parity, where))
        first = next(r.waits[0] for r in self.roles if r.waits)
        message = "deadlock: every role waits, and no copy is under way" + "".join(text)
        error = self.error(DeadlockError, first, message)
        error.stuck = tuple(stuck)
        return error


def _contended(m: Machine, op: Roles) -> dict[int, Elements]:
    """For each array that some role writes and that another role, or a copy, touches: who touched which element."""
    parties: dict[int, set[tuple[int, type]]] = {}
    written: set[int] = set()
    sizes: dict[int, int] = {}
    for k, body in enumerate(op.bodies):
        for o in body.walk():
            if isinstance(o, Load | Store | Atomic | AsyncLoad | AsyncStore):
                buffer = m.env[o.ref]
                sizes[id(buffer)] = buffer.data.size
                card = type(o) if isinstance(o, AsyncLoad | AsyncStore) else Op
                parties.setdefault(id(buffer), set()).add((k, card))
                if isinstance(o, AsyncStore):
                    parties[id(buffer)].add((k, Op))  # two stores of one role have no order either
                if not isinstance(o, Load | AsyncLoad):
                    written.add(id(buffer))
    return {b: Elements(sizes[b]) for b in written if len(parties[b]) > 1}


@rule(Roles)
def _roles(m: Machine, op: Roles):
    m.crew = Crew(m, op)
    try:
        for _ in m.crew.run():
            pass
    finally:
        m.crew = None
    return ()
