"""For each op, the axes along which its operands are cut where one axis of its result is cut into shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jtile.ir import (
    ArgReduce,
    Atomic,
    Bitcast,
    Broadcast,
    Cast,
    Concat,
    Cumulative,
    Dot,
    DotScaled,
    DynamicSlice,
    Full,
    Gather,
    Index,
    Iota,
    Load,
    Map,
    Op,
    Pad,
    Reduce,
    Reshape,
    Reverse,
    Select,
    Slice,
    Sort,
    Span,
    Store,
    Take,
    Tile,
    Transpose,
    UserReduce,
    UserScan,
    Value,
)

Axis = int | None  # the axis along which a tile is cut; None for a tile that every share has whole
Rule = Callable[[Any, int], "Sequence[Axis] | None"]
RULES: dict[type[Op], Rule] = {}


def operand_axes(op: Op, axis: int) -> Sequence[Axis] | None:
    """The axis to cut of every operand, in the order of `op.operands()`, for shares along `axis` of its result (for a
    store, of the value that it stores); None where the shares would need more than their own part."""
    rule = RULES.get(type(op))
    return None if rule is None else rule(op, axis)


def index_axes(index: Index) -> list[tuple[int, Axis]]:
    """For every axis of the tile that an index gives: the dimension of the Ref, and for gathers the axis of the
    indices."""
    out: list[tuple[int, Axis]] = []
    taken = False
    for k, d in enumerate(index):
        if isinstance(d, Take):
            out += [] if taken else [(k, a) for a in range(len(d.indices.shape))]
            taken = True
        elif isinstance(d, Span | Tile):
            out.append((k, None))
    return out


def _rule(*cards: type[Op]):
    def register(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(cards, fn))
        return fn

    return register


@_rule(Map, Cast, Bitcast, Select)
def _elementwise(op: Op, axis: int):
    return [axis] * len(op.operands())


@_rule(Full, Iota)
def _made(op: Op, axis: int):
    return []


@_rule(Broadcast)
def _broadcast(op: Broadcast, axis: int):
    k = op.dims.index(axis) if axis in op.dims else None
    return [None if k is None or op.x.shape[k] == 1 else k]


@_rule(Reshape)
def _reshape(op: Reshape, axis: int):
    """The axis of the same length with as many elements before it."""
    old, new = op.x.shape, op.shape
    before = math.prod(new[:axis])
    return next(([k] for k, n in enumerate(old) if n == new[axis] and math.prod(old[:k]) == before), None)


@_rule(Transpose)
def _transpose(op: Transpose, axis: int):
    return [op.perm[axis]]


@_rule(Reduce, UserReduce)
def _reduce(op: Reduce | UserReduce, axis: int):
    x, *rest = op.operands()
    k = [a for a in range(len(x.shape)) if a not in op.axes][axis]
    return [k] + [k if v.shape else None for v in rest]


@_rule(ArgReduce)
def _arg_reduce(op: ArgReduce, axis: int):
    return [axis + (axis >= op.axis)]


@_rule(Cumulative, Sort, UserScan, Gather, Concat)
def _along(op: Cumulative | Sort | UserScan | Gather | Concat, axis: int):
    return None if op.axis == axis else [axis] * len(op.operands())


@_rule(Reverse)
def _reverse(op: Reverse, axis: int):
    return None if axis in op.axes else [axis]


@_rule(Slice)
def _slice(op: Slice, axis: int):
    return [axis] if op.result.shape[axis] == op.x.shape[axis] else None


@_rule(Pad)
def _pad(op: Pad, axis: int):
    return [axis, None] if op.result.shape[axis] == op.x.shape[axis] else None


@_rule(DynamicSlice)
def _dynamic_slice(op: DynamicSlice, axis: int):
    return [axis, *[None] * len(op.starts)] if op.sizes[axis] == op.x.shape[axis] else None


@_rule(Dot)
def _dot(op: Dot, axis: int):
    """The rows of the result are the rows of `a`."""
    rank = len(op.result.shape)
    if axis == rank - 1:
        return None
    if axis < rank - 2:  # the axis is one of a batch of products
        return [axis] * len(op.operands())
    return [rank - 1 if op.trans_a else rank - 2, None, *([axis] if op.acc is not None else [])]


@_rule(DotScaled)
def _dot_scaled(op: DotScaled, axis: int):
    given: list[tuple[Value | None, Axis]] = [(op.a, 0), (op.sa, 0), (op.b, None), (op.sb, None), (op.acc, 0)]
    return [a for v, a in given if v is not None] if axis == 0 else None


@_rule(Load)
def _load(op: Load, axis: int):
    return [None, *_index(op.index, axis), *([axis] if op.mask is not None else [])]


@_rule(Store)
def _store(op: Store, axis: int):
    return [None, *_index(op.index, axis), axis, *([axis] if op.mask is not None else [])]


@_rule(Atomic)
def _atomic(op: Atomic, axis: int):
    rest = [v for v in (op.value, op.compare, op.mask) if v is not None]
    return [None, *_index(op.index, axis), *[axis] * len(rest)]


def _index(index: Index, axis: int) -> Sequence[Axis]:
    _, inside = index_axes(index)[axis]
    return [inside if isinstance(d, Take) else None for d in index]
