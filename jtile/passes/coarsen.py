"""Coarsening: programs that lie side by side along a grid axis run as one, whose tiles are theirs together.

A kernel of tiles of 8 x 8 spends its time on what a program costs, not on its elements. Where all that tells the
programs of an axis apart is which part of their arrays they take, some of them are one program with a larger tile: of
`o.tiles(8)[i] = 2 * x.tiles(8)[i]` eight are `o.tiles(64)[i] = 2 * x.tiles(64)[i]`. Programs run in step: each op is
that of all of them, before the next one. Nothing in the language says that one program's store comes before another's
load, so that this is one of the orders they may have. No element is computed otherwise than it was.

A value is the same in all of these programs, or it has `lanes`: they are a new axis of its tile, or one axis of it is
as many times longer (`Wide`). Loads and stores decide that: tile number i of size n becomes tile number i of the
programs' sizes together, element i a tile of as many elements as there are programs. Operations take it on. Integers
that are computed from program ids, such as those of masks, are computed anew in the lanes where they are used.

What is refused: programs that wait, count, print or have memory of their own; loops and branches that are not the same
in all of the programs; atomic operations whose old values somebody reads; accesses that overlap, or lie apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jtile import ir
from jtile.ir import Kernel, Op, TileType, Value

from .axes import contraction
from .fold import number
from .lanes import ANY, Growth, Kind, Lanes, New, Refused, Slopes, Wide, before, first_axis, place
from .rewrite import free_values, is_pure, reads_only, use_counts

Accesses = ir.Load | ir.Store | ir.Atomic
COMMUTE = ("add", "max", "min", "and", "or", "xor")
ELEMENTWISE = (ir.Map, ir.Select, ir.Cast, ir.Bitcast)
MOVED = (ir.Broadcast, ir.Reshape, ir.Transpose)  # made where they are needed, in the lanes that are asked for


def coarsen(
    kernel: Kernel, over: int | ir.For, count: int, keeps: Callable[[Op, Op], bool] = lambda old, new: True
) -> Kernel | None:
    """The kernel, in which as many programs that follow each other along a grid axis are one, or rounds of a loop; None
    where they cannot be. What it was is not changed.

    Args:
      kernel: at tile level, after the passes, with a grid of numbers.
      over: the axis, or a loop of `rounds` rounds, which `count` must divide.
      keeps: whether a reduction, a scan or a product may be what it has become; None is the result where one may not.
    """
    from .coarse import build

    size = rounds(over) if isinstance(over, ir.For) else kernel.grid[over] if over < len(kernel.grid) else 0
    if not isinstance(size, int) or not 1 < count <= size:
        return None
    try:
        return build(Plan(kernel, over, count), keeps)
    except (Refused, RecursionError):  # integers of program ids that hundreds of operations make
        return None


def rounds(loop: ir.For) -> int:
    """How many rounds a loop has that counts from 0 by 1 and only reads and computes; 0 of any other loop."""
    lo, hi, step = map(number, (loop.lo, loop.hi, loop.step))
    plain = lo == 0 and step == 1 and hi is not None and all(map(reads_only, loop.body.ops))
    return max(int(hi or 0), 0) if plain else 0


class Plan:
    """What every value of a kernel becomes.

    Attributes:
      over, count, size: how many of how many programs are one, along which grid axis; or rounds of which loop.
      kinds: of each value.
      access: the lanes of the accesses whose place differs between the programs.
      ragged: whether the last of the new programs stands for programs that do not exist.
      totals: what is summed over the rounds, as far as it may be summed in one step: products that add to a carry, and
        reductions by functions whose order nobody sees.
    """

    def __init__(self, kernel: Kernel, over: int | ir.For, count: int):
        if kernel.devices or kernel.scratch or kernel.shared:
            raise Refused("programs with memory of their own, or other devices")
        self.kernel, self.over, self.count = kernel, over, count
        self.size = rounds(over) if isinstance(over, ir.For) else int(kernel.grid[over])
        self.ragged = self.size % count != 0
        self.kinds: dict[Value, Kind] = {}
        self.growth = Growth(self.counts, self.kinds, self.size)
        self.access: dict[Op, Lanes] = {}
        self.uses = use_counts(kernel.body)
        self.totals = _totals(over, self.uses) if isinstance(over, ir.For) else set()
        if isinstance(over, ir.For) and (self.ragged or not self.size):
            raise Refused("rounds that are left")
        self.block(kernel.body)

    def block(self, b: ir.Block) -> None:
        for op in b.ops:
            kind = self.op(op)
            if isinstance(kind, tuple):
                self.kinds.update(zip(op.results, kind, strict=True))
            else:
                self.kinds.update(dict.fromkeys(op.results, kind))

    def kind(self, v: Value) -> Kind:
        return self.kinds.get(v)

    def op(self, op: Op) -> Kind | tuple[Kind, ...]:
        """The kind of an op's results, or the kinds of all of them."""
        match op:
            case ir.ProgramId():
                return ANY if self.counts(op.result) else None
            case ir.For():
                return self.loop(op)
            case ir.If():
                return self.branch(op)
            case ir.Load() | ir.Store() | ir.Atomic():
                return self.memory(op)
        if isinstance(self.over, ir.For) and not any(map(self.kind, free_values(op))):
            return None  # outside of the loop, or the same in all rounds
        if not is_pure(op) or not all(isinstance(v.type, TileType) for v in free_values(op)):
            raise Refused(op.mnemonic)
        if all(self.kind(v) is None for v in free_values(op)) and not _has_ids(op):
            return None
        rule = next((_KINDS[card] for card in type(op).__mro__ if card in _KINDS), None)
        if rule is None:
            raise Refused(op.mnemonic)
        return rule(self, op)

    def counts(self, v: Value) -> bool:
        """Whether a value is the number of the program, or the round."""
        if isinstance(self.over, ir.For):
            return v is self.over.body.params[0]
        return isinstance(v.op, ir.ProgramId) and v.op.axis == self.over

    def slopes(self, v: Value) -> Slopes | None:
        return self.growth.of(v)

    # -- control ------------------------------------------------------------------------------------------------------
    def loop(self, op: ir.For) -> tuple[Kind, ...]:
        if any(self.kind(v) is not None for v in (op.lo, op.hi, op.step)):
            raise Refused("rounds that differ")
        carry = tuple(self.settled(self.kind(v)) for v in op.inits)
        index = ANY if op is self.over else None
        while True:
            self.growth.known.clear()
            self.kinds.update(zip(op.body.params, (index, *carry), strict=True))
            self.block(op.body)
            after = tuple(k or self.settled(self.kind(y)) for k, y in zip(carry, op.body.yields, strict=True))
            if after == carry and index:
                self.check_totals(op)
            if after == carry:
                return carry
            if index:
                raise Refused("rounds that differ in what they make")
            carry = after

    def check_totals(self, op: ir.For) -> None:
        """All that a round hands on is what it was handed, or a total to which every round adds its own."""
        for carry, y in zip(op.body.params[1:], op.body.yields, strict=True):
            own = {y.op, *(a.op for a in y.op.args)} if isinstance(y.op, ir.Map) else {y.op}
            added = [x for x in own & self.totals if any(self.kind(v) is not None for v in x.operands())]
            if y is not carry and not added:
                raise Refused("rounds that need what those before them made")

    def branch(self, op: ir.If) -> tuple[Kind, ...]:
        if self.kind(op.cond) is not None:
            raise Refused("branches that differ")
        self.block(op.then)
        self.block(op.orelse)
        pairs = zip(op.then.yields, op.orelse.yields, strict=True)
        return tuple(self.settled(self.kind(a)) or self.settled(self.kind(b)) for a, b in pairs)

    def settled(self, kind: Kind) -> Kind:
        """The kind, with lanes for what may have any."""
        return New(0) if isinstance(kind, str) else kind

    # -- memory -------------------------------------------------------------------------------------------------------
    def memory(self, op: Accesses) -> Kind:
        lanes = self.place_of(op)
        values = [v for v in (op.mask, getattr(op, "value", None), getattr(op, "compare", None)) if v is not None]
        if isinstance(self.over, ir.For) and lanes is None and not any(map(self.kind, values)):
            return None
        if isinstance(op, ir.Atomic) and (op.fn not in COMMUTE or op.result in self.uses):
            raise Refused("old values")
        if lanes is None:
            if not isinstance(op, ir.Load) or any(self.kind(v) is not None for v in values):
                raise Refused("one place for all")
            return None
        self.access[op] = lanes
        return lanes

    def place_of(self, op: Accesses) -> Lanes | None:
        """The lanes of an access, by its index; None where all programs access the same."""
        varied = [k for k, d in enumerate(op.index) if self.kind(ir.dim_value(d)) is not None]
        if not varied:
            return None
        takes = [k for k, d in enumerate(op.index) if isinstance(d, ir.Take)]
        k = varied[0]
        if k in takes:
            if not set(varied) <= set(takes):
                raise Refused("a gather beside what differs")
            inner = self.of_takes([op.index[t].indices for t in takes])
            return dataclasses.replace(inner, at=inner.at + first_axis(op.index, k))
        if len(varied) > 1:
            raise Refused("two dimensions of an index")
        return self.of_dim(op.index[k], first_axis(op.index, k), bool(takes))

    def of_dim(self, d: Any, at: int, gathers: bool) -> Lanes:
        grows = self.slopes(ir.dim_value(d))
        by = 0 if grows is None else grows.program
        match d:
            case ir.At():
                if by < 1 and gathers:
                    raise Refused("two gathers")
                return New(at)
            case ir.Tile(_, size, step) if by == 1 and size == step:
                return Wide(at)
            case ir.Span(_, size, stride) if by > 0 and (size == 1 or by == size * stride):
                return Wide(at)
        raise Refused("tiles that do not lie side by side")

    def of_takes(self, tiles: Sequence[Value]) -> Lanes:
        """The lanes of the indices of a gather."""
        given = [k for k in map(self.kind, tiles) if isinstance(k, New | Wide)]
        if given:
            return given[0]
        for v in tiles:
            grows = self.slopes(v)
            for a, by in grows.axes.items() if grows else ():
                if by and grows and grows.program == by * v.shape[a]:
                    return Wide(a)
        return New(0)

    def joined(self, op: Op) -> Kind:
        """The lanes in which an elementwise op is computed: an axis of their own where an operand has one."""
        given = [k for k in map(self.kind, op.operands()) if isinstance(k, New | Wide)]
        if not given:
            return ANY
        shape = op.operands()[0].shape
        if len({before(k, shape) for k in given}) > 1:
            raise Refused("lanes in two places")
        return next((k for k in given if isinstance(k, New)), given[0])


def _has_ids(op: Op) -> bool:
    return any(isinstance(x, ir.ProgramId | ir.NumPrograms) for b in op.blocks() for x in b.walk())


def _totals(loop: ir.For, uses: Mapping[Value, int]) -> set[Op]:
    """The ops of a loop whose results are summed over its rounds, each into a carry that nobody else reads."""
    out: set[Op] = set()
    for carry, y in zip(loop.body.params[1:], loop.body.yields, strict=True):
        if uses.get(carry) != 1 or uses[y] != 1:
            continue
        if isinstance(y.op, ir.Dot) and y.op.acc is carry:
            out.add(y.op)
        elif isinstance(y.op, ir.Map) and carry in y.op.args and len(y.op.args) == 2:
            (x,) = [a for a in y.op.args if a is not carry] or [carry]
            if isinstance(x.op, ir.Reduce) and uses[x] == 1 and _one_order(x.op) and y.op.fn == ir.REDUCERS[x.op.fn]:
                out.add(x.op)
    return out


def _one_order(op: ir.Reduce) -> bool:
    return op.fn in ("max", "min") or ir.DTYPES[op.x.dtype].kind in "iu"


# -- kinds of what ops compute --------------------------------------------------------------------------------------


def _broadcast(p: Plan, op: ir.Broadcast) -> Kind:
    kind, rank = p.kind(op.x), len(op.dims)
    if isinstance(kind, New):
        return New(op.dims[kind.at] if kind.at < rank else op.dims[-1] + 1 if rank else 0)
    if isinstance(kind, Wide):
        d = op.dims[kind.at]
        return Wide(d) if op.x.shape[kind.at] == op.shape[d] else New(d)
    return kind


def _reshape(p: Plan, op: ir.Reshape) -> Kind:
    kind = p.kind(op.x)
    return kind if isinstance(kind, str | None) else reshaped(kind, op.x.shape, op.shape)


def reshaped(kind: Lanes, old: Sequence[int], new: Sequence[int]) -> Lanes:
    """The lanes of a tile of another shape."""
    if isinstance(kind, Wide) and (axis := same_axis(kind.at, old, new)) is not None:
        return Wide(axis)
    found = place(new, before(kind, old))
    if found is None:
        raise Refused("a reshape through the lanes")
    return found


def same_axis(axis: int, old: Sequence[int], new: Sequence[int]) -> int | None:
    """The axis of another shape that an axis is, of more than one element."""
    if old[axis] == 1:
        return None
    front, n = math.prod(old[:axis]), old[axis]
    return next((k for k, m in enumerate(new) if m == n and math.prod(new[:k]) == front), None)


def _transpose(p: Plan, op: ir.Transpose) -> Kind:
    kind = p.kind(op.x)
    if isinstance(kind, Wide):
        return Wide(op.perm.index(kind.at))
    if isinstance(kind, New):
        return New(op.perm.index(kind.at) if 0 < kind.at < len(op.perm) else kind.at)
    return kind


def touched(op: ir.Concat | ir.Slice | ir.Pad | ir.Reverse | ir.Cumulative) -> set[int]:
    """The axes along which an op moves elements."""
    match op:
        case ir.Concat() | ir.Cumulative():
            return {op.axis}
        case ir.Reverse():
            return set(op.axes)
    return {k for k, (n, m) in enumerate(zip(op.x.shape, op.result.shape, strict=True)) if n != m}


def _moved(p: Plan, op: Any) -> Kind:
    xs = op.xs if isinstance(op, ir.Concat) else (op.x,)
    if isinstance(op, ir.Pad) and p.kind(op.value) is not None:
        raise Refused("padding that differs")
    given = [k for k in map(p.kind, xs) if isinstance(k, New | Wide)]
    kind = given[0] if given else New(0)
    return New(kind.at) if kind.at in touched(op) and isinstance(kind, Wide) else kind


def operand_lanes(p: Plan, op: ir.Reduce | ir.ArgReduce) -> Lanes:
    """The lanes of the operand of a reduction."""
    kind = p.kind(op.x)
    kind = New(0) if isinstance(kind, str | None) else kind
    return New(kind.at) if isinstance(kind, Wide) and kind.at in reduced(op) else kind


def reduced(op: ir.Reduce | ir.ArgReduce) -> tuple[int, ...]:
    return op.axes if isinstance(op, ir.Reduce) else (op.axis,)


def _reduce(p: Plan, op: ir.Reduce | ir.ArgReduce) -> Kind:
    if op in p.totals and (kind := p.kind(op.x)) is not None:
        if not isinstance(kind, Wide) or kind.at not in reduced(op):
            raise Refused("rounds beside what is reduced")
        return None
    kind = operand_lanes(p, op)
    return dataclasses.replace(kind, at=kind.at - sum(a < kind.at for a in reduced(op)))


def _dot(p: Plan, op: ir.Dot) -> Kind:
    if op in p.totals:
        (_, of_a), (of_b, _) = contraction(op)
        if p.kind(op.a) != Wide(of_a) or p.kind(op.b) != Wide(of_b):
            raise Refused("rounds beside the terms of a product")
        return None
    if len(op.a.shape) != 2 or (p.kind(op.a) is None) == (p.kind(op.b) is None):
        raise Refused("a product of two tiles that differ")
    return Wide(0) if p.kind(op.a) is not None else Wide(1)


_KINDS: dict[type[Op], Callable[[Plan, Any], Kind]] = {
    **dict.fromkeys(ELEMENTWISE, Plan.joined),
    ir.Broadcast: _broadcast,
    ir.Reshape: _reshape,
    ir.Transpose: _transpose,
    **dict.fromkeys((ir.Concat, ir.Slice, ir.Pad, ir.Reverse, ir.Cumulative), _moved),
    **dict.fromkeys((ir.Reduce, ir.ArgReduce), _reduce),
    ir.Dot: _dot,
}
