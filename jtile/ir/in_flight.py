"""What still runs: products, asynchronous stores and unfenced writes of a role, followed along its paths.

Every loop is followed for its first two rounds, a branch both ways. What is not known for sure (slots, branches) is
nobody's error here: the interpreter sees it.
"""

from __future__ import annotations

import dataclasses

from .block import (
    AsyncLoad,
    AsyncStore,
    FenceShared,
    StoreShared,
    StoreWait,
)
from .block_products import DotAsync, DotWait
from .control import For, If, While
from .core import Block, Kernel, Op, Value
from .placement import refuse
from .places import Place, place, reads
from .scalars import Scalars


@dataclasses.dataclass(frozen=True)
class Use:
    """An op that still reads or holds places."""

    op: Op
    places: tuple[Place, ...]


@dataclasses.dataclass
class State:
    """What runs at one point of a path.

    products, stores: in the order of their start. raw: values that a product writes and no dot_wait has given finished.
    spent: values in flight that were given to a further product, which writes into them. dirty: writes that no fence
    has followed. open: stores that may still read at this point, on some path.
    """

    products: list[Use]
    raw: dict[Value, Use]
    spent: dict[Value, Op]
    stores: list[Use]
    dirty: list[Use]
    open: list[Op]

    def copy(self) -> State:
        return State(*(x.copy() for x in vars(self).values()))


def check_in_flight(kernel: Kernel, role: str, body: Block, pid: tuple[int, ...]) -> None:
    """Refuse a role that, in program `pid`, uses a product before it has ended, or memory that a product or a copy
    still reads.

    Raises:
      VerificationError: with the op that comes too early, and what to put before it.
    """
    flow = _Flow(kernel, role, pid)
    flow.block(body)
    if flow.state.open:
        why = "the memory of the block is gone when its roles have ended: put store_wait 0 at the end of the role"
        refuse(kernel, flow.state.open[-1], f"nobody waits until this store has read its buffer; {why}", role)


class _Flow:
    def __init__(self, kernel: Kernel, role: str, pid: tuple[int, ...]):
        self.kernel, self.role = kernel, role
        self.scalars = Scalars.in_roles(kernel, pid)
        self.state = State([], {}, {}, [], [], [])

    def refuse(self, op: Op, message: str) -> None:
        refuse(self.kernel, op, message, self.role)

    # -- control ------------------------------------------------------------------------------------------------
    def block(self, b: Block) -> None:
        for op in b.ops:
            match op:
                case For():
                    self.loop(op)
                case While():
                    self.while_(op)
                case If():
                    self.branch(op)
                case _:
                    self.op(op)

    def pass_on(self, values, to) -> None:
        """Let parameters and results stand for the values that they are given, in flight or not."""
        self.check_spent(values)
        runs = [self.state.raw.get(v) for v in values]
        numbers = [self.scalars.of(v) for v in values]
        for p, use in zip(to, runs, strict=True):
            self.state.raw.pop(p, None)
            self.state.spent.pop(p, None)
            if use is not None:
                self.state.raw[p] = use
        self.scalars.bind(to, numbers)

    def loop(self, op: For) -> None:
        lo, hi, step = (self.scalars.known(v) for v in (op.lo, op.hi, op.step))
        known = lo is not None and hi is not None and bool(step)
        trips = len(range(lo, hi, step)) if known else None  # type: ignore[arg-type]
        k, *carry = op.body.params
        self.pass_on(op.inits, carry)
        for r in range(2 if trips is None else min(trips, 2)):
            number = None if lo is None or step is None else lo + r * step
            self.scalars.env[k] = self.scalars.fresh() if number is None else number
            self.block(op.body)
            self.pass_on(op.body.yields, carry)
        self.pass_on(carry, op.results)
        if trips is None or trips > 2:
            self.leave([op.body], op.results)

    def while_(self, op: While) -> None:
        self.pass_on(op.inits, op.cond.params)
        for _ in range(2):
            self.block(op.cond)
            if self.scalars.known(op.cond.yields[0]) in (False, 0):
                return self.pass_on(op.cond.params, op.results)
            self.pass_on(op.cond.params, op.body.params)
            self.block(op.body)
            self.pass_on(op.body.yields, op.cond.params)
        self.block(op.cond)
        self.pass_on(op.cond.params, op.results)
        self.leave([op.cond, op.body], op.results)

    def leave(self, blocks: list[Block], results: tuple[Value, ...]) -> None:
        """Go on behind a loop that may have run further rounds: its counters, and the slots they name, are unknown."""
        inside = {v for b in blocks for v in b.params}
        inside.update(v for b in blocks for op in b.walk() for v in op.results)
        inside.update(v for b in blocks for op in b.walk() for inner in op.blocks() for v in inner.params)

        def blur(use: Use) -> Use:
            fresh = self.scalars.fresh
            places = (dataclasses.replace(p, slot=fresh()) if p.at in inside else p for p in use.places)
            return Use(use.op, tuple(places))

        renamed = {id(u): blur(u) for u in (*self.state.products, *self.state.raw.values())}
        self.state.products = [renamed[id(u)] for u in self.state.products]
        self.state.raw = {v: renamed[id(u)] for v, u in self.state.raw.items()}
        self.state.stores = [blur(u) for u in self.state.stores]
        self.state.dirty = [blur(u) for u in self.state.dirty]
        self.scalars.forget(results)

    def branch(self, op: If) -> None:
        cond = self.scalars.known(op.cond)
        if cond is not None:
            taken = op.then if cond else op.orelse
            self.block(taken)
            return self.pass_on(taken.yields, op.results)
        before = self.state
        ends = []
        for b in op.blocks():
            self.state = before.copy()
            self.block(b)
            self.pass_on(b.yields, op.results)
            ends.append(self.state)
        self.state = merge(before, *ends)
        self.scalars.forget(op.results)

    # -- ops ----------------------------------------------------------------------------------------------------
    def op(self, op: Op) -> None:
        self.check_operands(op)
        self.scalars.run(op)
        match op:
            case DotAsync():
                self.product(op)
            case DotWait():
                self.wait(op)
            case StoreShared():
                self.write(op, "store")
                self.state.dirty.append(Use(op, (place(op.buffer, self.scalars),)))
            case AsyncLoad():
                if self.scalars.known(op.when):
                    self.write(op, "copy")
            case FenceShared():
                self.state.dirty = []
            case AsyncStore():
                use = Use(op, (place(op.buffer, self.scalars),))
                self.check_fence(use)
                self.state.stores.append(use)
                self.state.open.append(op)
            case StoreWait():
                self.state.stores = last(self.state.stores, op.pending)
                self.state.open = last(self.state.open, op.pending)

    def check_spent(self, values) -> None:
        for v in values:
            if v in self.state.spent:
                message = f"{v!r} was still running when a further product took it as accumulator and wrote into it"
                self.refuse(self.state.spent[v], f"{message}: use that product's result, or dot_wait before it")

    def check_operands(self, op: Op) -> None:
        operands = op.operands()
        self.check_spent(operands)
        allowed = op.values if isinstance(op, DotWait) else (op.acc,) if isinstance(op, DotAsync) else ()
        for v in operands:
            if v not in self.state.raw or (v in allowed and not (isinstance(op, DotAsync) and v is op.a)):
                continue
            what = f"{v!r} is the result of a product that may still run"
            if isinstance(v.op, DotWait):
                what += f" after dot_wait pending={v.op.pending}: wait for it with a lower number"
            else:
                what += ": take what dot_wait gives for it"
            self.refuse(op, f"{what}; the result itself is an accumulator or a carried value and nothing else")

    def product(self, op: DotAsync) -> None:
        use = Use(op, tuple(place(v, self.scalars) for v in reads(op)))
        self.check_fence(use)
        if op.acc is not None and self.runs(op.acc):
            self.state.spent[op.acc] = op
        self.state.products.append(use)
        self.state.raw[op.result] = use
        self.state.spent.pop(op.result, None)

    def wait(self, op: DotWait) -> None:
        self.state.products = last(self.state.products, op.pending)
        for v, r in zip(op.values, op.results, strict=True):
            self.state.raw.pop(r, None)
            self.state.spent.pop(r, None)
            if self.runs(v):
                self.state.raw[r] = self.state.raw[v]

    def runs(self, v: Value) -> bool:
        """Whether a product that is in flight writes this value."""
        use = self.state.raw.get(v)
        return use is not None and any(u is use for u in self.state.products)

    def check_fence(self, use: Use) -> None:
        for write in self.state.dirty:
            if any(a.overlaps(b) for a in write.places for b in use.places):
                where = f" (the store at {write.op.loc})" if write.op.loc.file else ""
                what = f"{use.op.mnemonic} may not see what this role stored to its buffer before{where}"
                self.refuse(use.op, f"{what}: put fence_shared between them")

    def write(self, op: StoreShared | AsyncLoad, what: str) -> None:
        here = place(op.buffer, self.scalars)
        for uses, who, way in (
            (self.state.products, "a product of this role still reads", "dot_wait for it first"),
            (self.state.stores, "an asynchronous store of this role still reads", "store_wait for it first"),
        ):
            for use in uses:
                if any(here.overlaps(p) for p in use.places):
                    where = f" (started at {use.op.loc})" if use.op.loc.file else ""
                    self.refuse(op, f"this {what} writes a buffer that {who}{where}: {way}")


def last(items: list, n: int) -> list:
    """The last n items of a list."""
    return items[-n:] if n else []


def merge(before: State, a: State, b: State) -> State:
    """The state behind a branch: what holds on both paths. Where other ops run on each, nothing is known any more."""
    same = [u.op for u in a.products] == [u.op for u in b.products]
    products = a.products if same else []
    stores = a.stores if [u.op for u in a.stores] == [u.op for u in b.stores] else []
    raw = {v: u for v, u in a.raw.items() if v in b.raw} if same else {}
    here = {id(u) for u in b.dirty}
    spent = {v: op for v, op in a.spent.items() if v in b.spent}
    # Where one of the branches waited, the other path is taken for one on which nothing was there to wait for.
    kept = [op for op in before.open if op in a.open and op in b.open]
    new = [op for s in (a, b) for op in s.open if op not in before.open]
    return State(products, raw, spent, stores, [u for u in a.dirty if id(u) in here], kept + new)
