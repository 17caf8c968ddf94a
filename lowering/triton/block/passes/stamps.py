"""The timeline of a block-level kernel: each role notes the time when it starts and ends to wait, when it starts copies
and products, and when it arrives at a barrier, in a further output of the kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jtile.ir import (
    Arrive,
    AsyncLoad,
    AsyncStore,
    At,
    Block,
    Builder,
    Clock,
    DotAsync,
    DotWait,
    Expect,
    For,
    If,
    Kernel,
    Loc,
    NumPrograms,
    Op,
    ProgramId,
    RefType,
    Roles,
    Store,
    StoreWait,
    Value,
    Wait,
    While,
)
from jtile.ir.block import nbytes
from jtile.ir.types import INDEX

INSTANT, BEGIN, END = 0, 1, 2
PHASES = 4  # a stamp is `slot * SLOT + site * PHASES + phase`
SLOT = 1 << 32
_SPANS: dict[type[Op], str] = {Wait: "wait", DotWait: "wait for products", StoreWait: "wait for stores"}
_INSTANTS: dict[type[Op], str] = {
    AsyncLoad: "load",
    AsyncStore: "store",
    DotAsync: "product",
    Arrive: "arrive",
    Expect: "expect",
}


@dataclasses.dataclass(frozen=True)
class Site:
    """A place in a kernel that is stamped.

    Attributes:
      role: number of the role, and `name` its name.
      kind: `role` (all of it), `wait`, `wait for products`, `wait for stores`, `load`, `store`, `product`, `arrive`,
        `expect`.
      about: the barrier, array or shape of the product that the place concerns.
      amount: bytes of a copy, multiply-adds of a product, else 0.
      loc: the user's source line.
      count: slots of the barrier; for a wait for products or stores, how many it leaves running.
    """

    role: int
    name: str
    kind: str
    about: str
    amount: int
    loc: Loc
    count: int = 0


def stamped(kernel: Kernel, blocks: int, capacity: int) -> tuple[Kernel, tuple[Site, ...]]:
    """The kernel with one more output `stamps`, int64 [blocks, roles, capacity, 2]: for each of the first `blocks`
    programs and each role, pairs of (nanoseconds, stamp) in the order of time, up to a time of 0.

    Args:
      kernel: at block level.
      capacity: stamps of a role of a program; later ones are dropped.
    """
    (roles,) = [op for op in kernel.body.ops if isinstance(op, Roles)]
    stamps = Value(RefType((blocks, len(roles.bodies), capacity, 2), "int64", "out"), "stamps")
    b = Builder(Block(kernel.body.params))
    env: dict[Value, Value] = {}
    for op in kernel.body.ops:
        if op is not roles:
            new = op.clone(lambda v: env.get(v, v))
            env.update(zip(op.results, new.results, strict=True))
            b.block.ops.append(new)
    program = _linear_program(b, len(kernel.grid))
    into = _Into(stamps, program, [])
    bodies = []
    for number, name in enumerate(roles.names):
        with b.region() as body:
            _Stamper(b, into, number, name, env).role(roles.bodies[number])
        bodies.append(body)
    with b.at(roles.loc):
        b.add(dataclasses.replace(roles, bodies=tuple(bodies)))
    params = (*kernel.inputs, *kernel.outputs, stamps, *kernel.scratch)
    inits = (*kernel.inits, None) if kernel.inits else ()
    return dataclasses.replace(kernel, params=params, body=b.block, inits=inits), tuple(into.sites)


def _linear_program(b: Builder, axes: int) -> Value:
    linear = b.index(0)
    for axis in range(axes):
        linear = b.map("add", b.map("mul", linear, b.value(NumPrograms(axis))), b.value(ProgramId(axis)))
    return linear


@dataclasses.dataclass
class _Into:
    """Where stamps go: the output, the number of the program, and the sites so far."""

    stamps: Value
    program: Value
    sites: list[Site]


class _Stamper:
    """Copies the body of one role with stamps, into the open region of `b`; the number of stamps so far is carried
    through its loops."""

    def __init__(self, b: Builder, into: _Into, number: int, name: str, env: dict[Value, Value]):
        self.b, self.into, self.number, self.name, self.env = b, into, number, name, dict(env)
        self.count, self.one = b.index(0), b.index(1)

    def role(self, body: Block) -> None:
        site = self._site(Site(self.number, self.name, "role", self.name, 0, Loc()))
        self._stamp(site, BEGIN)
        self._ops(body.ops)
        self._stamp(site, END)
        self._store(0, self.b.full(0, (), "int64"))

    def _look(self, v: Value) -> Value:
        return self.env.get(v, v)

    def _ops(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self.b.loc = op.loc
            if op.blocks():
                self._region(op)
                continue
            span, instant = _SPANS.get(type(op)), _INSTANTS.get(type(op))
            site = self._site(self._describe(op, span or instant or "")) if span or instant else 0
            if span:
                self._stamp(site, BEGIN, op)
            new = op.clone(self._look)
            self.b.block.ops.append(new)
            self.env.update(zip(op.results, new.results, strict=True))
            if span or instant:
                self._stamp(site, END if span else INSTANT, op)

    def _site(self, site: Site) -> int:
        self.into.sites.append(site)
        return len(self.into.sites) - 1

    def _describe(self, op: Op, kind: str) -> Site:
        about, amount, count = "", 0, 0
        if isinstance(op, Wait | Arrive | Expect):
            about, count = op.barrier.name, op.barrier.type.count  # type: ignore[union-attr]
        elif isinstance(op, DotWait | StoreWait):
            count = op.pending
        elif isinstance(op, AsyncLoad | AsyncStore):
            about, amount = op.ref.name, nbytes(op.buffer.type)
        elif isinstance(op, DotAsync):
            (m, k), n = op.a.shape, op.b.shape[1]
            about, amount = f"{m}x{n}x{k}", m * n * k
        return Site(self.number, self.name, kind, about, amount, op.loc, count)

    def _stamp(self, site: int, phase: int, op: Op | None = None) -> None:
        """Note the time; where the op has a `when` that is false, no time is noted."""
        b = self.b
        code = b.full(site * PHASES + phase, (), "int64")
        if isinstance(op, Wait | Arrive | Expect):
            slot = b.cast(self._look(op.at), "int64")
            code = b.map("add", b.map("mul", slot, b.full(SLOT, (), "int64")), code)
        when = getattr(op, "when", None)
        when = None if when is None else self._look(when)
        self._store(0, b.value(Clock()), when)
        self._store(1, code, when)
        self.count = b.map("add", self.count, self.one if when is None else b.cast(when, INDEX.dtype))

    def _store(self, part: int, value: Value, when: Value | None = None) -> None:
        b, into = self.b, self.into
        programs, _, capacity, _ = into.stamps.shape
        room = b.map("lt", self.count, b.index(capacity))
        watched = b.map("and", b.map("lt", into.program, b.index(programs)), room)
        watched = watched if when is None else b.map("and", watched, when)
        at = (into.program, b.index(self.number), self.count, b.index(part))
        b.add(Store(into.stamps, tuple(map(At, at)), value, watched))

    # -- control flow -------------------------------------------------------------------------------------------------

    def _region(self, op: Op) -> None:
        form = {For: self._for, While: self._while, If: self._if}.get(type(op))
        if form is None:  # the op has a combiner, which waits for nothing
            new = op.clone(self._look)
            self.b.block.ops.append(new)
        else:
            new = form(op)
            self.count = new.results[-1]
        self.env.update(zip(op.results, new.results, strict=False))

    def _block(self, old: Block, *, counted: bool = True) -> Block:
        """A copy of a region that takes (where it takes parameters) and yields the count besides."""
        types = [p.type for p in old.params] + [self.count.type] * counted
        names = (*(p.name for p in old.params), *["stamp"] * counted)
        with self.b.region(types, names) as new:
            self.env.update(zip(old.params, new.params, strict=False))
            if counted:
                self.count = new.params[-1]
            self._ops(old.ops)
            new.yields = (*map(self._look, old.yields), self.count)
        return new

    def _for(self, op: For) -> Op:
        lo, hi, step = map(self._look, (op.lo, op.hi, op.step))
        inits = (*map(self._look, op.inits), self.count)
        body = self._block(op.body)
        with self.b.at(op.loc):
            return self.b.add(dataclasses.replace(op, lo=lo, hi=hi, step=step, inits=inits, body=body))

    def _while(self, op: While) -> Op:
        inits = (*map(self._look, op.inits), self.count)
        cond = self._block(op.cond)
        cond.yields = cond.yields[:1]
        body = self._block(op.body)
        with self.b.at(op.loc):
            return self.b.add(While(inits, cond, body))

    def _if(self, op: If) -> Op:
        before = self.count
        then = self._block(op.then, counted=False)
        self.count = before
        orelse = self._block(op.orelse, counted=False)
        with self.b.at(op.loc):
            return self.b.add(If(self._look(op.cond), then, orelse))
