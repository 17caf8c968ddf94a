"""The protocol of the roles of a block: who fills, who waits, who arrives; kernels that would hang are refused.

Some rules need no run: somebody arrives where somebody waits, somebody fills what somebody reads, copies bring as many
bytes as were announced. The rest is played through (`_Play`): the roles of the first and of the last program run side
by side on numbers alone, and a wait that nobody can end is an error. Where a role's way depends on what is not known (a
loaded number) it may do anything from there on, and nobody is accused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .block import Arrive, AsyncLoad, AsyncStore, DotAsync, Expect, LoadShared, Roles, StoreShared, Wait, nbytes
from .control import For, If, While
from .core import Block, Kernel, Op, Value
from .dynamic import used_symbols
from .extents import evaluate
from .in_flight import check_in_flight
from .placement import refuse, roles_of, root
from .scalars import Scalars
from .shapes import Full
from .types import SharedType

STEPS = 3_000  # ops of scalars and barriers that a role is followed for
SIZE = 1024  # what a symbol counts for while the roles are played through


def check_protocol(kernel: Kernel) -> None:
    """Refuse a block-level kernel whose roles would wait for ever or use what is not there.

    Raises:
      VerificationError: names role, barrier, source line, and what would help.
    """
    roles = roles_of(kernel)
    _check_waits(kernel, roles)
    _check_fills(kernel, roles)
    _check_bytes(kernel, roles)
    for name, body in zip(roles.names, roles.bodies, strict=True):
        check_in_flight(kernel, name, body)
    sizes = dict.fromkeys(used_symbols(kernel), SIZE)
    sides = [evaluate(n, sizes) for n in kernel.grid]
    if all(sides):
        for pid in dict.fromkeys([(0,) * len(sides), tuple(n - 1 for n in sides)]):
            _Play(kernel, roles, pid, sizes).run()


def _named(v: Value) -> str:
    return f"%{v.name}" if v.name else "this barrier"


def _each(roles: Roles) -> Iterator[tuple[str, Op]]:
    """Every op of every role, with the role's name, in program order."""
    for name, body in zip(roles.names, roles.bodies, strict=True):
        for op in body.walk():
            yield name, op


# -- rules that need no run -------------------------------------------------------------------------------------------


def _check_waits(kernel: Kernel, roles: Roles) -> None:
    """Somebody arrives at every barrier that somebody waits for, often enough for one phase, and not later only."""
    arrivals: dict[Value, list[tuple[str, Op]]] = {}
    for name, op in _each(roles):
        if isinstance(op, Arrive | Expect):
            arrivals.setdefault(op.barrier, []).append((name, op))
    loops = [op for _, op in _each(roles) if isinstance(op, For | While)]
    looped = {id(op) for x in loops for b in x.blocks() for op in b.walk()}
    for name, body in zip(roles.names, roles.bodies, strict=True):
        order = {id(op): k for k, op in enumerate(body.walk())}
        for op in body.walk():
            passes = isinstance(op, Wait) and isinstance(op.parity.op, Full) and op.parity.op.value == 1
            if not isinstance(op, Wait) or passes:
                continue
            brings, needs = arrivals.get(op.barrier, []), op.barrier.type.arrivals  # type: ignore[union-attr]
            count = sum(getattr(a, "count", 1) for _, a in brings)
            if not brings:
                why = "nobody ever arrives at it: an arrive or an expect of another role is missing"
                refuse(kernel, op, f"waits for {_named(op.barrier)}, but {why}", name)
            if count < needs and not any(id(a) in looped for _, a in brings):
                why = f"a phase takes {needs} arrivals, and all roles together arrive {count} times"
                way = f"allocate it with arrivals={count}, or let more roles arrive"
                refuse(kernel, op, f"waits for {_named(op.barrier)}, but {why}: {way}", name)
            if _first_parity(kernel, body, op) == 0 and all(order.get(id(a), -1) > order[id(op)] for _, a in brings):
                why = "only this role arrives there, and only later: it would wait for itself"
                refuse(kernel, op, f"waits for {_named(op.barrier)}, but {why}; arrive or expect first", name)


def _first_parity(kernel: Kernel, body: Block, op: Wait) -> int | None:
    """What the parity of a wait is when it first runs, for one that no branch leads around."""
    scalars = Scalars.in_roles(kernel)
    for x in _first_path(body):
        if x is op:
            return scalars.known(op.parity) if scalars.known(op.when) else None
        if isinstance(x, For):
            scalars.bind(x.body.params, [scalars.of(v) for v in (x.lo, *x.inits)])
        scalars.run(x)
    return None


def _reads(op: Op) -> list[Value]:
    """Buffers whose contents an op reads."""
    if isinstance(op, LoadShared | AsyncStore):
        return [op.buffer]
    return [v for v in (op.a, op.b) if isinstance(v.type, SharedType)] if isinstance(op, DotAsync) else []


def _check_fills(kernel: Kernel, roles: Roles) -> None:
    """What is read has been filled: by another role, or by the same one before."""
    fills: dict[Value, list[tuple[str, int]]] = {}
    for at, (name, op) in enumerate(_each(roles)):
        if isinstance(op, AsyncLoad | StoreShared):
            fills.setdefault(root(op.buffer), []).append((name, at))
    sure = {id(op) for b in roles.bodies for op in _first_path(b)}
    for at, (name, op) in enumerate(_each(roles)):
        for v in _reads(op):
            who = fills.get(root(v), [])
            text = f"%{root(v).name}" if root(v).name else "a buffer"
            if not who:
                message = f"reads {text}, which no role ever fills"
                refuse(kernel, op, f"{message}: async_load or store_shared to it is missing", name)
            if id(op) in sure and all(n == name and k > at for n, k in who):
                message = f"reads {text} before this role, the only one that fills it, has done so"
                refuse(kernel, op, f"{message}: move the read behind the fill", name)


def _first_path(b: Block) -> Iterator[Op]:
    """Ops that no branch leads around: when one first runs, all that stands before it in the text has run at most."""
    for op in b.ops:
        yield op
        if isinstance(op, For):
            yield from _first_path(op.body)


def _check_bytes(kernel: Kernel, roles: Roles) -> None:
    """Copies bring what was announced, where every copy onto a barrier stands behind its expect in one block."""
    blocks = [(name, b) for name, body in zip(roles.names, roles.bodies, strict=True) for b in _blocks(body)]
    brought: dict[int, int] = {}
    found: dict[Value, list[tuple[str, Expect]]] = {}
    unclear: set[Value] = set()
    for name, b in blocks:
        scalars, pending = Scalars.in_roles(kernel), {}
        for op in b.ops:
            scalars.run(op)
            if isinstance(op, Expect):
                found.setdefault(op.barrier, []).append((name, op))
                brought[id(op)] = 0
                pending[op.barrier, scalars.of(op.at)] = op
            elif isinstance(op, AsyncLoad):
                e = pending.get((op.barrier, scalars.of(op.at)))
                if e is None or e.when is not op.when:
                    unclear.add(op.barrier)
                else:
                    brought[id(e)] += nbytes(op.buffer.type)  # type: ignore[arg-type]
    for barrier, expects in found.items():
        for name, e in expects:
            if barrier not in unclear and brought[id(e)] != e.bytes:
                why = f"the copies onto {_named(barrier)} that follow bring {brought[id(e)]}"
                way = "the phase would never end" if brought[id(e)] < e.bytes else "the phase would end too early"
                refuse(kernel, e, f"announces {e.bytes} bytes, {why}: {way}", name)


def _blocks(b: Block) -> Iterator[Block]:
    yield b
    for op in b.ops:
        for inner in op.blocks():
            yield from _blocks(inner)


# -- playing the roles through ----------------------------------------------------------------------------------------


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

    def __init__(self, play: _Play, name: str, body: Block):
        self.play, self.name, self.steps = play, name, 0
        self.scalars = Scalars(play.kernel, play.pid, play.sizes)
        self.relevant = {id(b) for b in _blocks(body) if any(isinstance(op, _EVENTS) for op in b.walk())}
        arrivals = [op for op in body.walk() if isinstance(op, _EVENTS) and not isinstance(op, Wait)]
        self.arrives = {(op.barrier, _constant(op.at)) for op in arrivals}
        self.way = self.block(body)
        self.waits: Wait | None = None
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

    def block(self, b: Block) -> Iterator[Op]:
        self.step()
        for op in b.ops:
            self.step()
            if op.blocks():
                if any(id(x) in self.relevant for x in op.blocks()):
                    yield from self.region(op)
                else:
                    self.count(op)
            elif not isinstance(op, _EVENTS):
                self.scalars.run(op)
            elif self.number(op.when):
                yield op

    def count(self, op: Op) -> None:
        """A region without barriers: only the scalars that it gives may matter."""
        if isinstance(op, For | While | If) and any(not r.shape for r in op.results):
            try:
                list(self.region(op))
                return
            except _LostError:
                pass
        self.scalars.forget(op.results)

    def region(self, op: Op) -> Iterator[Op]:
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
        self.scalars.bind(to, [self.scalars.of(v) for v in values])

    def may_arrive(self, other: _Role) -> bool:
        """Whether any op of this role may arrive where the other waits."""
        op = other.waits
        return op is not None and not self.arrives.isdisjoint({(op.barrier, None), (op.barrier, other.number(op.at))})

    def advance(self) -> bool:
        """Go on until the role must wait; whether it did anything."""
        moved = False
        while not (self.lost or self.done):
            try:
                if self.waits is None:
                    op = next(self.way, None)
                    self.done = op is None
                    self.waits = op if isinstance(op, Wait) else None
                if self.waits is not None:
                    if not self.play.barrier(self, self.waits).passes(self.play.parity(self, self.waits)):
                        return moved
                    self.waits = None
                elif not self.done:
                    self.play.event(self, op)
                moved = True
            except _LostError:
                self.lost = True
        return moved


_EVENTS = (Wait, Arrive, Expect, AsyncLoad)


def _constant(v: Value) -> int | None:
    return int(v.op.value) if isinstance(v.op, Full) else None


class _Play:
    """All roles of one program, side by side."""

    def __init__(self, kernel: Kernel, roles: Roles, pid: tuple[int, ...], sizes: dict[str, int]):
        self.kernel, self.pid, self.sizes = kernel, pid, sizes
        self.barriers: dict[tuple[Value, int], _Barrier] = {}
        self.roles = [_Role(self, name, body) for name, body in zip(roles.names, roles.bodies, strict=True)]
        for op in kernel.body.ops[:-1]:
            for role in self.roles:
                role.scalars.run(op)

    def run(self) -> None:
        while any(list(map(_Role.advance, self.roles))):  # each of them, whatever the first did
            pass
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
            refuse(self.kernel, op, f"{_named(op.barrier)} has no slot {at}: it is {t}", role.name)
        return self.barriers.setdefault((op.barrier, at), _Barrier(t.arrivals))  # type: ignore[union-attr]

    def parity(self, role: _Role, op: Wait) -> int:
        parity = role.number(op.parity)
        if parity not in (0, 1):
            refuse(self.kernel, op, f"a parity is 0 or 1, got {parity}: (round // slots) & 1", role.name)
        return parity

    def event(self, role: _Role, op: Op) -> None:
        b = self.barrier(role, op)  # type: ignore[arg-type]
        if isinstance(op, AsyncLoad):
            b.bytes -= nbytes(op.buffer.type)  # type: ignore[arg-type]
        else:
            count = getattr(op, "count", 1)
            b.bytes += getattr(op, "bytes", 0)
            b.missing -= count
            if b.missing < 0:
                why = f"its phase {b.phase} takes {b.arrivals} arrivals and has had {b.arrivals - b.missing - count}"
                refuse(self.kernel, op, f"arrives {count} times at {_named(op.barrier)}, but {why}", role.name)  # type: ignore[attr-defined]
        if b.missing == 0 and b.bytes < 0:
            message = f"copies brought {-b.bytes} bytes more to {_named(op.barrier)} than were announced"  # type: ignore[attr-defined]
            refuse(self.kernel, op, f"{message}: expect the bytes of all copies of a phase", role.name)
        b.settle()

    def deadlock(self, stuck: list[_Role]) -> None:
        """Report the first of the roles that wait for ever."""
        first = stuck[0]
        op = first.waits
        assert op is not None
        b, at, parity = self.barrier(first, op), first.number(op.at), self.parity(first, op)
        has = f"{b.arrivals - b.missing} of {b.arrivals} arrivals"
        has += f" and lacks {b.bytes} of the bytes that were announced" if b.bytes else ""
        lines = [
            f"waits for ever at {_named(op.barrier)}[{at}] for a phase of parity {parity}: phase {b.phase} has {has}"
        ]
        for r in self.roles:
            if r is first:
                continue
            where = r.waits
            if r in stuck and where is not None:
                line = f" ({where.loc})" if where.loc.file else ""
                lines.append(f"role {r.name} waits at {_named(where.barrier)}[{r.number(where.at)}]{line}")
            else:
                lines.append(f"role {r.name} has ended" if r.done else f"role {r.name} does not arrive there")
        way = "check who arrives, the order of waits and arrivals, and the parities (it // slots) & 1"
        refuse(self.kernel, op, "; ".join(lines) + f": {way}", first.name)
