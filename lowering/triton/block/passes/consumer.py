"""A consumer: its share of the work on operands that wait in shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jtile.ir import (
    Arrive,
    Block,
    Dot,
    DotAsync,
    DotWait,
    FenceShared,
    If,
    Kernel,
    Load,
    LoadShared,
    Op,
    Reduce,
    Store,
    StoreShared,
    StoreWait,
    Transpose,
    TransposeShared,
    Value,
    Wait,
)
from jtile.passes.products import promoted, untransposed
from jtile.passes.rewrite import buffers, written

from .epilogue import Leaving, store
from .feeds import choices, scratch, users
from .maps import unspread
from .rings import Held, Place, Role, Site

Scratch = Mapping[object, Value]  # (shape, dtype, number) of a computed right operand -> its buffer


@dataclasses.dataclass(eq=False)
class _Use:
    """The ops of a block that use the loads of a site: numbers of the first and of the last; the slot between them."""

    held: Held
    site: Site
    loads: dict[int, Load]
    first: int
    last: int
    at: Value | None = None


def consumer(
    kernel: Kernel,
    body: Block,
    place: dict[Load, Place],
    w: int,
    leaving: Mapping[Value, Leaving],
    scratch: Scratch,
) -> Block:
    """The body of consumer `w` of a kernel: its share `body`, whose operand loads have a `place`.

    Every product is waited for at once, and a slot is given back right behind its last use.
    """
    return _Consumer(kernel, place, w, leaving, scratch).run(body)


class _Consumer(Role):
    def __init__(
        self,
        kernel: Kernel,
        place: dict[Load, Place],
        w: int,
        leaving: Mapping[Value, Leaving],
        scratch: Scratch,
    ):
        super().__init__(place)
        self.w, self.leaving, self.scratch = w, leaving, scratch
        self.roots = buffers(kernel)
        self.written = set(written(kernel.body, self.roots))
        self.choices: dict[Op, tuple[Load, int]] = {}
        self.slots: dict[Load, Value] = {}
        self.numbers: dict[Load, Value] = {}  # the number of the slot of each load
        self.chosen: dict[Value, Value] = {}  # the result of a choice -> its buffer
        self.tiles: dict[Value, Value] = {}  # operands that were loaded to registers
        self.rights: dict[Op, int] = {}  # the numbers of the buffers of computed right operands

    def run(self, body: Block) -> Block:
        self.choices = {op: c for op, c in choices(body).items() if c[0] in self.place}
        return super().run(body)

    def finish(self) -> None:
        if self.leaving:
            self.b.add(StoreWait(0))

    def look(self, v: Value) -> Value:
        """The value of this role; of an operand, its tile in registers."""
        view = self.view(v)
        if view is None:
            return super().look(v)
        if v not in self.tiles:
            tile = self.b.value(LoadShared(view[0]))
            self.tiles[v] = self.b.value(Transpose(tile, (1, 0))) if view[1] else tile
        return self.tiles[v]

    def view(self, v: Value) -> tuple[Value, bool] | None:
        """(buffer, whether transposed) of an operand or of its transpose; None of other values."""
        base, flipped = untransposed(v)
        if base in self.chosen:
            return self.chosen[base], flipped
        return (self.slots[base.op], flipped) if isinstance(base.op, Load) and base.op in self.slots else None

    def _inside(self, old: Block, keep: list[int], rounds: dict[int, Value]) -> tuple[Value, ...]:
        outer, self.tiles = self.tiles, dict(self.tiles)
        out = super()._inside(old, keep, rounds)
        self.tiles = outer
        return out

    def ops(self, b: Block) -> None:
        sites = self.sites(b)
        self.rights |= scratch(b, self.choices)
        uses = [_use(b, held, site, self._loads(b, site), self.choices) for site, held in sites.items()]
        for i, op in enumerate(b.ops):
            self.b.loc = op.loc
            for use in uses:
                if use.first == i:
                    self.open(use, b)
            self.b.loc = op.loc
            self.op(op)
            for use in uses:
                if use.last == i and use.at is not None:
                    self.b.add(Arrive(use.held.empty, use.at, 1, None))
        self.next_round(sites)

    def _loads(self, b: Block, site: Site) -> dict[int, Load]:
        return {self.place[op][2]: op for op in b.ops if isinstance(op, Load) and op in self.place
                and self.place[op][1] is site}  # fmt: skip

    def open(self, use: _Use, b: Block) -> None:
        """Wait until the operands of a site are there."""
        use.at, parity = self.slot(use.held)
        self.b.add(Wait(use.held.full, use.at, parity, None))
        self.advance(use.held)
        for k, op in use.loads.items():
            self.slots[op] = self.buffer(use.held, k, self.w, use.at)
            self.numbers[op] = use.at
        for v in b.yields:
            self.look(v)  # an operand that goes on to the next round leaves its slot

    def op(self, op: Op) -> None:
        if (isinstance(op, Load) and op in self.place) or (isinstance(op, Transpose) and self.view(op.result)):
            return
        if isinstance(op, Dot):
            self.env[op.result] = self.dot(op)
        elif isinstance(op, Store) and op.ref in self.leaving:
            self.store(op)
        elif op in self.choices:
            self.choice(op, *self.choices[op])  # type: ignore[arg-type]
        elif op.blocks():
            self.region(op)
        else:
            self.append(op.clone(self.look), op)

    def choice(self, op: If, load: Load, plain: int) -> None:
        """A branch that gives the number of a slot: that of the load, or of a spare one with what is computed."""
        held, _, k = self.place[load]
        spare = held.slots + (self.w if len(held.buffers[k]) == 1 else 0)
        cond, new = self.look(op.cond), []
        for number, old in enumerate(op.blocks()):
            with self.b.region() as block:
                if number == plain:
                    block.yields = (self.numbers[load],)
                else:
                    tiles = dict(self.tiles)
                    self.ops(old)
                    at = self.b.index(spare)
                    self.b.add(StoreShared(self.buffer(held, k, self.w, at), self.look(old.yields[0])))
                    self.b.add(FenceShared())
                    block.yields, self.tiles = (at,), tiles
            new.append(block)
        self.b.loc = op.loc
        at = self.b.value(If(cond, *new), "slot")
        self.chosen[op.result] = self.buffer(held, k, self.w, at)

    def store(self, op: Store) -> None:
        """Store a tile through shared memory, or, where its mask does not hold for all lanes, through pointers."""
        leaving, own = self.leaving[op.ref], op.clone(self.look)
        assert isinstance(own, Store)
        if op.mask is None:
            store(self.b, own, leaving, self.read_only)
            return
        mask = unspread(op.mask)
        whole = self.b.value(Reduce(self.look(mask), "and", tuple(range(len(mask.shape)))))
        with self.b.region() as then:
            store(self.b, own, leaving, self.read_only)
        with self.b.region() as orelse:
            self.b.block.ops.append(own)
        self.b.add(If(whole, then, orelse))

    def read_only(self, op: Load) -> bool:
        return self.roots.get(op.ref, op.ref) not in self.written

    # -- products -----------------------------------------------------------------------------------------------------
    def dot(self, op: Dot) -> Value:
        a = self.left(op.a, op.trans_a)
        b = self.right(op)
        acc = None if op.acc is None else self.look(op.acc)
        few = op.sizes()[-1] <= 128  # terms, which have one accumulator in any case
        apart = acc is not None and few and promoted(op)  # so that the addition overlaps with the next product
        fast = op.precision == "fast" or (few and (acc is None or apart))
        running = self.b.value(DotAsync(a, b, None if apart else acc, None, fast), op.result.name)
        (done,) = self.b.add(DotWait((running,), 0)).results
        if apart:
            done = self.b.map("add", acc, done)
        done.name = op.result.name
        return done

    def left(self, v: Value, across: bool) -> Value:
        view = self.view(v)
        if view is None:
            x = self.look(v)
            return self.b.value(Transpose(x, (1, 0))) if across else x
        return self.turned(view[0], view[1] != across)

    def right(self, op: Dot) -> Value:
        view = self.view(op.b)
        if view is None:  # products take their right operand from shared memory
            v, flipped = untransposed(op.b)
            buffer = self.scratch[v.shape, v.dtype, self.rights[op]]
            self.b.add(StoreShared(buffer, self.look(v)))
            self.b.add(FenceShared())
            view = buffer, flipped
        return self.turned(view[0], view[1] != op.trans_b)

    def turned(self, buffer: Value, across: bool) -> Value:
        return self.b.value(TransposeShared(buffer)) if across else buffer


def _use(b: Block, held: Held, site: Site, loads: dict[int, Load], choices: Mapping[Op, tuple[Load, int]]) -> _Use:
    """The places at which a block uses its own loads."""
    values = {op.result for op in loads.values()}
    values |= {op.results[0] for op, (load, _) in choices.items() if load.result in values}
    found = users(b, values) or [len(b.ops) - 1]
    return _Use(held, site, loads, min(found), max(found))
