"""The producer: the part of a kernel that computes where its operands are, and the copies that bring them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from jtile.ir import (
    AsyncLoad,
    At,
    Block,
    Dim,
    Dot,
    DotScaled,
    Expect,
    For,
    If,
    Index,
    Kernel,
    Load,
    Op,
    SliceShared,
    Value,
    Wait,
    dim_value,
)
from jtile.passes.rewrite import buffers, free_values, written

from .hanging import boxes, hanging, row_dimension
from .narrow import part
from .plan import refuse
from .rings import Held, Place, Role, Site


def producer(kernel: Kernel, place: dict[Load, Place], consumers: int, evict: Mapping[Value, str]) -> Block:
    """The body of the producer for a kernel whose operand loads have a `place`; `evict`: for each Ref
    how soon the cache forgets what copies read of it, see `AsyncLoad`."""
    made = _Producer(place, wanted(kernel, place), consumers, evict, hanging(kernel, consumers))
    return made.run(kernel.body)


def wanted(kernel: Kernel, place: dict[Load, Place]) -> set[Value]:
    """The values that the places of the operands and the rounds of their loops depend on.

    Raises:
      Refusal: one of them is computed from operands, or from what the kernel writes.
    """
    return _Wanted(kernel, place).values


class _Wanted:
    def __init__(self, kernel: Kernel, place: dict[Load, Place]):
        self.place, self.roots = place, buffers(kernel)
        self.written = set(written(kernel.body, self.roots))
        self.values: set[Value] = set()
        self.loops: dict[Value, tuple[For, int]] = {}
        self.todo: list[Value] = [dim_value(d) for op in place for d in op.index]
        for op in kernel.body.walk():
            if isinstance(op, For):
                self.loops |= {p: (op, k - 1) for k, p in enumerate(op.body.params)}
            if isinstance(op, For | If) and any(x in place for b in op.blocks() for x in b.walk()):
                self.todo += [op.cond] if isinstance(op, If) else [op.lo, op.hi, op.step]
        while self.todo:
            v = self.todo.pop()
            if v not in self.values:
                self.values.add(v)
                self.visit(v)

    def visit(self, v: Value) -> None:
        if v in self.loops:
            self.carried(*self.loops[v])
        elif isinstance(v.op, For):
            self.carried(v.op, v.op.results.index(v))
        elif isinstance(v.op, If):
            i = v.op.results.index(v)
            self.todo += [v.op.cond, v.op.then.yields[i], v.op.orelse.yields[i]]
        elif v.op is not None:
            for op in (v.op, *(x for b in v.op.blocks() for x in b.walk())):
                self.check(op)
            self.todo += free_values(v.op)

    def carried(self, loop: For, i: int) -> None:
        """Carry number `i` of a loop, or (-1) its index."""
        self.todo += [loop.lo, loop.hi, loop.step]
        if i >= 0:
            self.todo += [loop.inits[i], loop.body.yields[i], loop.body.params[1 + i], loop.results[i]]

    def check(self, op: Op) -> None:
        if isinstance(op, Dot | DotScaled) or op in self.place:
            refuse("where its operands lie depends on its products", op)
        if op.effect in ("write", "io"):
            refuse("where its operands lie depends on what it writes", op)
        if isinstance(op, Load) and self.roots.get(op.ref, op.ref) in self.written:
            refuse(f"where its operands lie depends on {op.ref.name}, which it writes", op)


class _Producer(Role):
    def __init__(
        self, place: dict[Load, Place], values: set[Value], consumers: int, evict: Mapping[Value, str],
        hanging: Mapping[Load, int],
    ):  # fmt: skip
        super().__init__(place)
        self.values, self.consumers, self.evict, self.hanging = values, consumers, evict, hanging

    def kept(self, op: Op) -> list[int]:
        return [i for i, r in enumerate(op.results) if r in self.values]

    def ops(self, b: Block) -> None:
        sites = self.sites(b)
        left = {site: set(site.loads) for site in sites}
        for op in b.ops:
            self.b.loc = op.loc
            if isinstance(op, Load) and op in self.place:
                site = self.place[op][1]
                left[site].discard(op)
                if not left[site]:  # the places of all loads of the site are known
                    self.fill(sites[site], site)
            elif op.blocks() and (self.clocks(op) or self.kept(op)):
                self.region(op)
            elif not op.blocks() and any(r in self.values for r in op.results):
                self.append(op.clone(self.look), op)
        self.next_round(sites)

    def fill(self, held: Held, site: Site) -> None:
        """Wait until a slot is empty, and start the copies that fill it."""
        b = self.b
        at, parity = self.slot(held)
        b.add(Wait(held.empty, at, b.map("xor", parity, b.index(1)), None))
        b.add(Expect(held.full, at, held.ring.bytes, None))
        for k, op in enumerate(site.loads):
            b.loc = op.loc
            axis = held.axes[k]
            for w in range(1 if axis is None else self.consumers):
                index = [self.dim(d) for d in op.index]
                if axis is not None:
                    place = [i for i, d in enumerate(index) if not isinstance(d, At)][axis]
                    index[place] = part(b, index[place], w, self.consumers)
                pad = op.pad if math.isnan(op.pad) else 0
                for buffer, where in self.boxes(op, self.buffer(held, k, w, at), index):
                    hint = self.evict.get(op.ref)
                    b.add(AsyncLoad(op.ref, where, buffer, held.full, at, pad, op.checked, None, hint))
        self.advance(held)

    def boxes(self, op: Load, buffer: Value, index: list[Dim]) -> Iterator[tuple[Value, Index]]:
        """The boxes that a copy to a buffer comes in: parts of the buffer, and where they lie in the array."""
        if op not in self.hanging:
            yield buffer, tuple(index)
            return
        rows = self.hanging[op]
        place, sizes = row_dimension(op.index), (rows, *op.result.shape[1:])
        for first, d in boxes(self.b, index[place], op.ref.type.shape[place], rows):
            whole = rows == index[place].size
            inner = buffer if whole else self.b.value(SliceShared(buffer, (first, 0), sizes), buffer.name)
            yield inner, (*index[:place], d, *index[place + 1 :])
