"""Masks that most rounds of a loop do not need: they stand in a branch then, so that only the others pay for them.

A mask is a `select` by comparisons of integers. In a loop of products it is needed in the rounds in which some
comparison may fail, which the smallest and largest elements of both sides tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from jtile.ir import (
    Block,
    Broadcast,
    Builder,
    Dot,
    Full,
    If,
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
from jtile.passes.rewrite import is_pure

from .merge_loops import merge_loops

# Builds the condition under which a mask is needed, from the builder and the values that stand for those of the loop.
Needed = Callable[[Builder, Callable[[Value], Value]], Value]


def run(kernel: Kernel) -> Kernel:
    kernel = merge_loops(cse(kernel), guarded)  # equal values outside of loops are one
    known = ranges(kernel)
    return dce(kernel.with_body(_Guards(known).block(kernel.body, lambda v: v)))


@dataclasses.dataclass
class _Guards:
    """Copies a kernel; masks in loops of products go into branches."""

    known: Intervals

    def block(self, old: Block, env: Callable[[Value], Value]) -> Block:
        sites = {}
        if any(isinstance(op, Dot) for op in old.ops) and old.params:  # of a loop
            found = ((op, self.needed(op, old)) for op in old.ops if isinstance(op, Select))
            sites = {op: needed for op, needed in found if needed is not None}
        return guarded(old, sites, env, self.block)

    def needed(self, mask: Select, body: Block) -> Needed | None:
        """None where the comparisons are no arithmetic of places, or the same in all rounds."""
        parts = _conjuncts(mask.cond)
        pairs = [_sides(p) for p in parts]
        bounds = [
            (fn, _Extreme(self.known, small, True), _Extreme(self.known, large, False))
            for pair in pairs
            if pair is not None
            for fn, small, large in [pair]
        ]
        if len(bounds) < len(parts) or not mask.result.shape or not all(a.exists and b.exists for _, a, b in bounds):
            return None
        inside = {body.params[0], *(r for op in body.ops for r in op.results)}
        if not any(inside & side.scalars for _, *sides in bounds for side in sides):
            return None

        def build(b: Builder, look: Callable[[Value], Value]) -> Value:
            fails = [b.map({"lt": "ge", "le": "gt"}[fn], x.build(b, look), y.build(b, look)) for fn, x, y in bounds]
            out = fails[0]
            for f in fails[1:]:
                out = b.map("or", out, f)
            return out

        return build


def _conjuncts(cond: Value) -> list[Value]:
    """The comparisons that all must hold."""
    match cond.op:
        case Map("and", (a, b)):
            return _conjuncts(a) + _conjuncts(b)
        case Broadcast(x) | Reshape(x) | Transpose(x):
            return _conjuncts(x)
    return [cond]


def _sides(cond: Value) -> tuple[str, Value, Value] | None:
    """`small < large` or `small <= large`: ("lt" or "le", small, large)."""
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
        raise AssertionError(f"{v} has no extreme")  # `exists` is asked first


# -- masks in branches ------------------------------------------------------------------------------------------------


def guarded(
    old: Block,
    sites: Mapping[Select, Needed],
    env: Callable[[Value], Value],
    inner: Callable[[Block, Callable[[Value], Value]], Block] | None = None,
) -> Block:
    """A copy of a region in which each mask of `sites` stands in a branch, with all that only masks need; what they
    leave behind unused is for `dce`.

    Args:
      env: the values that stand for those defined outside.
      inner: copies the regions of other ops; default: as they are.
    """
    local: dict[Value, Value] = {}
    look = lambda v: local[v] if v in local else env(v)
    b = Builder()
    with b.region([p.type for p in old.params], tuple(p.name for p in old.params)) as new:
        local.update(zip(old.params, new.params, strict=True))
        for op in old.ops:
            b.loc = op.loc
            if isinstance(op, Select) and op in sites:
                out = _branch(b, op, sites[op], look, _own(op, old, sites))
            else:
                out = op.clone(look, lambda r: inner(r, look) if inner else guarded(r, {}, look))
                b.block.ops.append(out)
            local.update(zip(op.results, out.results, strict=True))
        new.yields = tuple(map(look, old.yields))
    return new


def _branch(b: Builder, mask: Select, needed: Needed, look: Callable[[Value], Value], own: Iterable[Op]) -> Op:
    cond = needed(b, look)
    local: dict[Value, Value] = {}
    inside = lambda v: local[v] if v in local else look(v)
    with b.region() as then:
        for op in (*own, mask):
            new = op.clone(inside)
            b.block.ops.append(new)
            local.update(zip(op.results, new.results, strict=True))
        then.yields = (local[mask.result],)
    with b.region() as orelse:
        orelse.yields = (look(mask.a),)
    return b.add(If(cond, then, orelse), mask.result.name)


def _own(mask: Select, body: Block, sites: Mapping[Select, Needed]) -> list[Op]:
    """Ops of the body that make the mask, in order, and are needed for masks alone; scalars cost nothing."""
    users: dict[Value, list[Op | None]] = {}
    for op in body.ops:
        for v in _uses(op):
            users.setdefault(v, []).append(op)
    for y in body.yields:
        users.setdefault(y, []).append(None)
    masking: set[Op] = set()
    for op in reversed(body.ops):
        pure = is_pure(op) and not op.blocks() and not isinstance(op, Dot) and any(r.shape for r in op.results)
        only = all(
            u in masking or (isinstance(u, Select) and u in sites and r is not u.a)
            for r in op.results
            for u in users.get(r, ())
            if op not in sites
        )
        if pure and only and op not in sites and any(users.get(r) for r in op.results):
            masking.add(op)
    needed: set[Value] = {mask.cond, mask.b}
    out: list[Op] = []
    for op in reversed(body.ops):
        if op in masking and any(r in needed for r in op.results):
            needed.update(op.operands())
            out.append(op)
    return out[::-1]


def _uses(op: Op) -> list[Value]:
    return op.operands() + [v for b in op.blocks() for x in b.walk() for v in x.operands()]


masks = Pass("masks", "In loops of products, masks that whole rounds do not need stand in branches.", run)
