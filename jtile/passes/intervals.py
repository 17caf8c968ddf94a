"""Interval analysis of integers and bools: what every element of a value lies between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jtile.ir import (
    MAX_SIZE,
    AxisIndex,
    Bitcast,
    Block,
    Broadcast,
    Cast,
    Concat,
    Dense,
    DynamicSlice,
    DynamicUpdate,
    Extent,
    For,
    Full,
    Gather,
    If,
    Iota,
    Kernel,
    Map,
    NumPrograms,
    Op,
    Pad,
    ProgramId,
    Reduce,
    Reshape,
    Reverse,
    Select,
    SizeOf,
    Slice,
    Transpose,
    Value,
    at_least,
)
from jtile.ir.shapes import full_array
from jtile.ir.types import DTYPES

from .extents import UpperBounds


@dataclasses.dataclass(frozen=True)
class Interval:
    """All whole numbers from `lo` to `hi`, both included. `lo > hi` does not occur: an empty tile has any interval."""

    lo: int
    hi: int

    @property
    def single(self) -> bool:
        return self.lo == self.hi

    def union(self, other: Interval) -> Interval:
        return Interval(min(self.lo, other.lo), max(self.hi, other.hi))

    def inside(self, other: Interval) -> bool:
        return other.lo <= self.lo and self.hi <= other.hi


TRUE, FALSE, UNKNOWN = Interval(1, 1), Interval(0, 0), Interval(0, 1)


def dtype_range(dtype: str) -> Interval | None:
    """All values of an integer or bool dtype; None for floats."""
    d = DTYPES[dtype]
    if d.kind == "f":
        return None
    if d.kind == "b":
        return UNKNOWN
    lo = -(1 << (d.bits - 1)) if d.kind == "i" else 0
    return Interval(lo, lo + (1 << d.bits) - 1)


class Intervals:
    """Computes the interval of each value from those of its operands, op by op, in program order."""

    def __init__(self, kernel: Kernel):
        self.grid = kernel.grid
        self.devices = dict(kernel.devices)
        self.upper = UpperBounds(kernel, self)
        self.known: dict[Value, Interval] = {}

    def __call__(self, v: Value) -> Interval | None:
        """The interval of an integer or bool value; None for floats."""
        return self.known.get(v) or dtype_range(v.dtype)

    def set(self, v: Value, i: Interval | None) -> None:
        limits = dtype_range(v.dtype)
        # A result that may leave its dtype wraps, and then it may be anything.
        if i is None or limits is None:
            return
        if i.inside(limits):
            self.known[v] = i
        elif self.upper.sides and i.lo >= limits.lo and self.upper(v) is not None:
            self.known[v] = Interval(i.lo, limits.hi)  # it is at most a dimension, so it does not wrap

    def visit(self, op: Op) -> None:
        """Learn about the results of an op without regions, or of a region op whose regions were visited."""
        fn = TRANSFER.get(type(op))
        if fn is not None and op.results and DTYPES[op.results[0].dtype].kind != "f":
            self.set(op.results[0], fn(self, op))
        if isinstance(op, If):
            for r, a, b in zip(op.results, op.then.yields, op.orelse.yields, strict=True):
                x, y = self(a), self(b)
                self.set(r, x.union(y) if x and y else None)

    def enter_loop(self, op: For) -> None:
        """Note that the index of a loop lies between its bounds."""
        lo, hi, step = self(op.lo), self(op.hi), self(op.step)
        if lo and hi and step and step.lo > 0 and lo.lo <= hi.hi - 1:
            self.set(op.body.params[0], Interval(lo.lo, hi.hi - 1))

    def assume(self, cond: Value, holds: bool) -> list[tuple[Value, Interval | None]]:
        """Narrow what a scalar condition says about its operands; gives what to undo after the region."""
        undo: list[tuple[Value, Interval | None]] = []
        op = cond.op
        if isinstance(op, Map) and op.fn == "and" and holds:
            return self.assume(op.args[0], True) + self.assume(op.args[1], True)
        fn = op.fn if isinstance(op, Map) else ""
        fn = fn if holds else {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}.get(fn, "")
        if not isinstance(op, Map) or fn not in ("lt", "le", "gt", "ge", "eq") or op.args[0].shape:
            return undo
        a, b = op.args if fn in ("lt", "le", "eq") else op.args[::-1]
        x, y = self(a), self(b)
        if x is None or y is None:
            return undo
        gap = int(fn in ("lt", "gt"))
        new_a, new_b = Interval(x.lo, min(x.hi, y.hi - gap)), Interval(max(y.lo, x.lo + gap), y.hi)
        if fn == "eq":
            new_a = new_b = Interval(max(x.lo, y.lo), min(x.hi, y.hi))
        for v, new in ((a, new_a), (b, new_b)):
            if new.lo <= new.hi:
                undo.append((v, self.known.get(v)))
                self.known[v] = new
        return undo

    def restore(self, undo: list[tuple[Value, Interval | None]]) -> None:
        for v, old in reversed(undo):
            if old is None:
                self.known.pop(v, None)
            else:
                self.known[v] = old


# -- transfer functions -----------------------------------------------------------------------------------------------

TRANSFER: dict[type[Op], Callable[[Intervals, Any], Interval | None]] = {}


def _transfer(*cards):
    def register(fn):
        TRANSFER.update(dict.fromkeys(cards, fn))
        return fn

    return register


@_transfer(Full)
def _full(k: Intervals, op: Full):
    return _point(int(full_array(op.value, (), op.dtype)))


@_transfer(Dense)
def _dense(k: Intervals, op: Dense):
    return Interval(int(min(op.data)), int(max(op.data))) if op.data else None


@_transfer(Iota)
def _iota(k: Intervals, op: Iota):
    return Interval(0, max(op.shape[op.axis] - 1, 0))


@_transfer(ProgramId)
def _program_id(k: Intervals, op: ProgramId):
    side = k.grid[op.axis] if op.axis < len(k.grid) else 1
    return Interval(0, MAX_SIZE - 1 if isinstance(side, Extent) else max(side - 1, 0))


@_transfer(AxisIndex)
def _axis_index(k: Intervals, op: AxisIndex):
    return Interval(0, k.devices[op.axis] - 1)


@_transfer(NumPrograms)
def _num_programs(k: Intervals, op: NumPrograms):
    side = k.grid[op.axis] if op.axis < len(k.grid) else 1
    return _size(k, side) if isinstance(side, Extent) else _point(side)


@_transfer(SizeOf)
def _size_of(k: Intervals, op: SizeOf):
    return _size(k, op.size)


def _size(k: Intervals, n: Extent) -> Interval | None:
    """The symbols of a size are at least 1; what is more than every dimension might leave its dtype."""
    fits = at_least(n, 0) and any(at_least(side, n) for side in k.upper.sides)
    return Interval(1 if at_least(n, 1) else 0, MAX_SIZE) if fits else None


@_transfer(Broadcast, Reshape, Transpose, Slice, Reverse, DynamicSlice, Gather)
def _same(k: Intervals, op):
    return k(op.x)


@_transfer(Pad)
def _pad(k: Intervals, op: Pad):
    return _join(k, (op.x, op.value))


@_transfer(Concat)
def _concat(k: Intervals, op: Concat):
    return _join(k, op.xs)


@_transfer(DynamicUpdate)
def _update(k: Intervals, op: DynamicUpdate):
    return _join(k, (op.x, op.update))


@_transfer(Select)
def _select(k: Intervals, op: Select):
    c = k(op.cond)
    return k(op.a) if c == TRUE else k(op.b) if c == FALSE else _join(k, (op.a, op.b))


@_transfer(Cast)
def _cast(k: Intervals, op: Cast):
    i = k(op.x)
    if op.dtype == "bool":
        return None if i is None else FALSE if i == _point(0) else TRUE if i.lo > 0 or i.hi < 0 else UNKNOWN
    return i


@_transfer(Bitcast)
def _bitcast(k: Intervals, op: Bitcast):
    i = k(op.x)
    return i if i is not None and i.lo >= 0 else None


@_transfer(Reduce)
def _reduce(k: Intervals, op: Reduce):
    i = k(op.x)
    if i is None or 0 in op.x.shape:
        return None
    if op.fn in ("max", "min") or (op.x.dtype == "bool" and op.fn in ("and", "or")):
        return i
    if op.fn == "sum" and op.x.dtype != "bool":
        n = op.x.type.size // max(op.result.type.size, 1)  # type: ignore[union-attr]
        return Interval(i.lo * n, i.hi * n)
    return None


def _point(n: int) -> Interval:
    return Interval(n, n)


def _join(k: Intervals, values: Sequence[Value]) -> Interval | None:
    out = k(values[0])
    for v in values[1:]:
        i = k(v)
        out = out.union(i) if out is not None and i is not None else None
    return out


@_transfer(Map)
def _map(k: Intervals, op: Map):
    given = [k(a) for a in op.args]
    if any(i is None for i in given):
        return None
    if op.fn == "not" and op.result.dtype != "bool":
        return None
    fn = ARITHMETIC.get(op.fn)
    return fn(*given) if fn else None


def _corners(fn, a: Interval, b: Interval) -> Interval:
    values = [fn(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return Interval(min(values), max(values))


def _truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _rem(a: Interval, b: Interval) -> Interval | None:
    if b.lo <= 0:
        return None
    if a.lo >= 0 and a.hi < b.lo:
        return a
    return Interval(0 if a.lo >= 0 else max(-(b.hi - 1), a.lo), 0 if a.hi <= 0 else min(b.hi - 1, a.hi))


def _and(a: Interval, b: Interval) -> Interval | None:
    if a.inside(UNKNOWN) and b.inside(UNKNOWN):
        return Interval(min(a.lo, b.lo), min(a.hi, b.hi))
    positive = [i.hi for i in (a, b) if i.lo >= 0]
    return Interval(0, min(positive)) if positive else None


def _or(a: Interval, b: Interval) -> Interval | None:
    if a.inside(UNKNOWN) and b.inside(UNKNOWN):
        return Interval(max(a.lo, b.lo), max(a.hi, b.hi))
    return Interval(max(a.lo, b.lo), (1 << max(a.hi, b.hi).bit_length()) - 1) if min(a.lo, b.lo) >= 0 else None


def _less(gap: int):
    """The comparison of intervals a < b (gap 1) or a <= b (gap 0)."""
    return lambda a, b: TRUE if a.hi + gap <= b.lo else FALSE if a.lo > b.hi - gap else UNKNOWN


def _equal(a: Interval, b: Interval) -> Interval:
    return TRUE if a.single and a == b else FALSE if a.hi < b.lo or b.hi < a.lo else UNKNOWN


def _negated(i: Interval) -> Interval:
    return Interval(1 - i.hi, 1 - i.lo)


ARITHMETIC: dict[str, Callable[..., Interval | None]] = {
    "add": lambda a, b: Interval(a.lo + b.lo, a.hi + b.hi),
    "sub": lambda a, b: Interval(a.lo - b.hi, a.hi - b.lo),
    "mul": lambda a, b: _corners(lambda x, y: x * y, a, b),
    "div": lambda a, b: _corners(_truncated, a, b) if b.lo > 0 else None,
    "rem": _rem,
    "max": lambda a, b: Interval(max(a.lo, b.lo), max(a.hi, b.hi)),
    "min": lambda a, b: Interval(min(a.lo, b.lo), min(a.hi, b.hi)),
    "clamp": lambda lo, x, hi: Interval(min(max(x.lo, lo.lo), hi.lo), min(max(x.hi, lo.hi), hi.hi)),
    "neg": lambda a: Interval(-a.hi, -a.lo),
    "abs": lambda a: Interval(max(a.lo, -a.hi, 0), max(abs(a.lo), abs(a.hi))),
    "and": _and,
    "or": _or,
    "shl": lambda a, b: _corners(lambda x, y: x << y, a, b) if b.lo >= 0 and b.hi < 64 else None,
    "shr": lambda a, b: _corners(lambda x, y: x >> y, a, b) if b.lo >= 0 and b.hi < 64 else None,
    "not": lambda a: _negated(a),
    "lt": _less(1),
    "le": _less(0),
    "gt": lambda a, b: _less(1)(b, a),
    "ge": lambda a, b: _less(0)(b, a),
    "eq": _equal,
    "ne": lambda a, b: _negated(_equal(a, b)),
}


def walk(kernel: Kernel, at: Callable[[Op, Intervals], None]) -> None:
    """Visit every op in program order, with what is known of the values at that place."""
    known = Intervals(kernel)

    def block(b: Block) -> None:
        for op in b.ops:
            if isinstance(op, For):
                known.enter_loop(op)
            for branch, inner in enumerate(op.blocks()):
                undo = known.assume(op.cond, branch == 0) if isinstance(op, If) else []
                block(inner)
                known.restore(undo)
            known.visit(op)
            at(op, known)

    block(kernel.body)
