"""Masks that most rounds of a loop do not need: they stand in a branch then, so that only the others pay for them.

A mask is a `select` by comparisons of integers. In a loop of products it is needed in the rounds in which some
comparison may fail, which the smallest and largest elements of both sides tell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from jtile.ir import (
    Block,
    Broadcast,
    Builder,
    Dot,
    Full,
    Iota,
    Kernel,
    Map,
    Op,
    Reshape,
    Select,
    Transpose,
    Value,
)
from jtile.passes.affine import ranges
from jtile.passes.cse import cse
from jtile.passes.dce import dce
from jtile.passes.intervals import Intervals
from jtile.passes.pipeline import Pass
from jtile.passes.rewrite import Copier, Form

from .branches import Needed, branches
from .merge_loops import merge_loops


def run(kernel: Kernel) -> Kernel:
    kernel = merge_loops(cse(kernel))  # `cse` makes equal values outside of loops one value
    known = ranges(kernel)
    forms: dict[Op, Form] = {}
    for body in (b for op in kernel.body.walk() for b in op.blocks()):
        if any(isinstance(op, Dot) for op in body.ops) and body.params:  # only the body of a loop has parameters
            found = ((op, _needed(op, body, known)) for op in body.ops if isinstance(op, Select))
            forms |= branches(body, {op: needed for op, needed in found if needed is not None})
    return dce(Copier(forms).whole(kernel))


def _needed(mask: Select, body: Block, known: Intervals) -> Needed | None:
    """The condition under which a round needs a mask; None where the mask's comparisons are no arithmetic of places, or
    the same in all rounds."""
    parts = _conjuncts(mask.cond)
    pairs = [_sides(p) for p in parts]
    bounds = [
        (fn, _Extreme(known, small, True), _Extreme(known, large, False))
        for pair in pairs
        if pair is not None
        for fn, small, large in [pair]
    ]
    if len(bounds) < len(parts) or not mask.result.shape or not all(a.exists and b.exists for _, a, b in bounds):
        return None
    inside = {body.params[0], *(r for op in body.ops for r in op.results)}
    if not any(inside & side.scalars for _, *sides in bounds for side in sides):
        return None

    def build(copier: Copier) -> Value:
        b, look = copier.b, copier.look
        fails = [b.map({"lt": "ge", "le": "gt"}[fn], x.build(b, look), y.build(b, look)) for fn, x, y in bounds]
        return functools.reduce(lambda x, y: b.map("or", x, y), fails)

    return build


def _conjuncts(cond: Value) -> list[Value]:
    """The comparisons that must all hold for a condition to hold."""
    match cond.op:
        case Map("and", (a, b)):
            return _conjuncts(a) + _conjuncts(b)
        case Broadcast(x) | Reshape(x) | Transpose(x):
            return _conjuncts(x)
    return [cond]


def _sides(cond: Value) -> tuple[str, Value, Value] | None:
    """A comparison `small < large` or `small <= large` as ("lt" or "le", small, large); None of other values."""
    match cond.op:
        case Map("lt" | "le" as fn, (a, b)) if a.type.info.kind in "iu":
            return fn, a, b
        case Map("gt" | "ge" as fn, (a, b)) if a.type.info.kind in "iu":
            return {"gt": "lt", "ge": "le"}[fn], b, a
    return None


class _Extreme:
    """The largest (or smallest) element of a tile of integers as scalar arithmetic.

    Attributes:
      exists: whether there is such arithmetic, none of which can leave its dtype.
      scalars: the scalars that it starts from.
    """

    def __init__(self, known: Intervals, v: Value, largest: bool):
        self.known, self.v, self.largest = known, v, largest
        self.scalars: set[Value] = set()
        self.exists = self._check(v)

    def _check(self, v: Value) -> bool:
        if not v.shape:
            self.scalars.add(v)
            return True
        match v.op:
            case Full() | Iota():
                return True
            case Broadcast(x) | Reshape(x) | Transpose(x):
                return self._check(x)
            case Map("add" | "sub" | "min" | "max", args) if v in self.known.known:
                return all(map(self._check, args))
            case Map("neg", (x,)) if v in self.known.known:
                return self._check(x)
        return False

    def build(self, b: Builder, look: Callable[[Value], Value]) -> Value:
        return self._build(self.v, self.largest, b, look)

    def _build(self, v: Value, largest: bool, b: Builder, look: Callable[[Value], Value]) -> Value:
        if not v.shape:
            return look(v)
        match v.op:
            case Full(value):
                return b.full(value, (), v.dtype)
            case Iota(shape, axis):
                return b.full(shape[axis] - 1 if largest else 0, (), v.dtype)
            case Map("sub", (x, y)):
                return b.map("sub", self._build(x, largest, b, look), self._build(y, not largest, b, look))
            case Map("neg", (x,)):
                return b.map("neg", self._build(x, not largest, b, look))
            case Map(fn, args):
                return b.map(fn, *(self._build(x, largest, b, look) for x in args))
            case Broadcast(x) | Reshape(x) | Transpose(x):
                return self._build(x, largest, b, look)
        raise AssertionError(f"{v} has no extreme")  # callers ask `exists` first


masks = Pass("masks", "In loops of products, masks that whole rounds do not need stand in branches.", run)
