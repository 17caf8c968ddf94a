"""Canonical forms: chains of reshape, transpose, broadcast, slice; transposes folded into dots."""

from __future__ import annotations

from jtile.ir import (
    Broadcast,
    Concat,
    Dot,
    DynamicSlice,
    Full,
    Iota,
    Pad,
    Reduce,
    Reshape,
    Reverse,
    Slice,
    Transpose,
    Value,
)
from jtile.ir.shapes import clamped
from jtile.ir.types import DTYPES

from .fold import number
from .rewrite import Rewriter, Rules

rules = Rules()


def _long(shape) -> list[int]:
    """The axes that are longer than one."""
    return [k for k, n in enumerate(shape) if n != 1]


@rules(Reshape)
def _reshape(op: Reshape, rw: Rewriter):
    if op.shape == op.x.shape:
        return op.x
    return rw.new(Reshape(op.x.op.x, op.shape)) if isinstance(op.x.op, Reshape) else None


@rules(Transpose)
def _transpose(op: Transpose, rw: Rewriter):
    if op.perm == tuple(range(len(op.perm))):
        return op.x
    if isinstance(op.x.op, Transpose):
        return rw.new(Transpose(op.x.op.x, tuple(op.x.op.perm[p] for p in op.perm)))
    if isinstance(op.x.op, Iota):
        return rw.new(Iota(op.result.shape, op.perm.index(op.x.op.axis), op.x.dtype))
    order = [p for p in op.perm if op.x.shape[p] != 1]
    return rw.new(Reshape(op.x, op.result.shape)) if order == sorted(order) else None


@rules(Broadcast)
def _broadcast(op: Broadcast, rw: Rewriter):
    inner = op.x.op
    if op.shape == op.x.shape:
        return op.x
    if isinstance(inner, Broadcast):
        return rw.new(Broadcast(inner.x, op.shape, tuple(op.dims[d] for d in inner.dims)))
    if isinstance(inner, Iota) and op.shape[op.dims[inner.axis]] == inner.shape[inner.axis]:
        return rw.new(Iota(op.shape, op.dims[inner.axis], op.x.dtype))
    if isinstance(inner, Reshape) and 1 not in inner.x.shape and _lengths(inner.x) == _lengths(op.x):
        return rw.new(Broadcast(inner.x, op.shape, tuple(op.dims[k] for k in _long(op.x.shape))))
    return None


def _lengths(v: Value) -> list[int]:
    return [v.shape[k] for k in _long(v.shape)]


@rules(Slice)
def _slice(op: Slice, rw: Rewriter):
    if op.result.shape == op.x.shape:
        return op.x
    if not isinstance(op.x.op, Slice):
        return None
    o, rank = op.x.op, range(len(op.starts))
    starts = tuple(o.starts[k] + op.starts[k] * o.strides[k] for k in rank)
    strides = tuple(o.strides[k] * op.strides[k] for k in rank)
    stops = tuple(
        a + max((n - 1) * s + 1, 0) if n else a for a, n, s in zip(starts, op.result.shape, strides, strict=True)
    )
    return rw.new(Slice(o.x, starts, stops, strides))


@rules(DynamicSlice)
def _static_slice(op: DynamicSlice, rw: Rewriter):
    if op.sizes == op.x.shape:
        return op.x
    starts = [number(s) for s in op.starts]
    if any(s is None for s in starts):
        return None
    at = clamped(starts, op.sizes, op.x.shape)
    return rw.new(Slice(op.x, tuple(s.start for s in at), tuple(s.stop for s in at), (1,) * len(at)))


@rules(Pad)
def _pad(op: Pad, rw: Rewriter):
    return op.x if op.result.shape == op.x.shape else None


@rules(Concat)
def _concat(op: Concat, rw: Rewriter):
    if len(op.xs) == 1:
        return op.xs[0]
    some = tuple(x for x in op.xs if x.shape[op.axis])
    return rw.new(Concat(some or op.xs[:1], op.axis)) if len(some) < len(op.xs) else None


@rules(Reverse)
def _reverse(op: Reverse, rw: Rewriter):
    axes = tuple(sorted(a for a in op.axes if op.x.shape[a] != 1))
    if not axes:
        return op.x
    if isinstance(op.x.op, Reverse):
        both = set(axes) ^ set(op.x.op.axes)
        return rw.new(Reverse(op.x.op.x, tuple(sorted(both))))
    return rw.new(Reverse(op.x, axes)) if axes != op.axes else None


@rules(Reduce)
def _reduce(op: Reduce, rw: Rewriter):
    """Drop a reduction over no axis, or over axes of one element where it neither rounds nor sums zeros."""
    if not op.axes:
        return op.x
    ones = all(op.x.shape[a] == 1 for a in op.axes)
    picks = op.fn in ("max", "min", "and", "or") or DTYPES[op.x.dtype].kind in "iu"
    return rw.new(Reshape(op.x, op.result.shape)) if ones and picks else None


@rules(Dot)
def _dot(op: Dot, rw: Rewriter):
    """Let a product read an operand transposed instead of taking a transpose."""
    for name, flag in (("a", "trans_a"), ("b", "trans_b")):
        v: Value = getattr(op, name)
        rank = len(v.shape)
        swap = (*range(rank - 2), rank - 1, rank - 2)
        if isinstance(v.op, Transpose) and v.op.perm == swap:
            kw = {n: getattr(op, n) for n in op.fields} | {name: v.op.x, flag: not getattr(op, flag)}
            return rw.new(Dot(**kw))
    return None


@rules(Dot)
def _no_accumulator(op: Dot, rw: Rewriter):
    """Drop an accumulator of zeros, for whole numbers only: a float sum of -0 would turn into +0."""
    zero = (
        op.acc is not None and isinstance(op.acc.op, Full) and number(op.acc) == 0 and DTYPES[op.acc.dtype].kind in "iu"
    )
    return rw.new(Dot(op.a, op.b, None, op.trans_a, op.trans_b, op.precision)) if zero else None
