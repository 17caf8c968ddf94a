"""Canonical forms: constants. An op on constants is a constant."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jtile.ir import (
    ArgReduce,
    Bitcast,
    Broadcast,
    Cast,
    Concat,
    Cumulative,
    Dense,
    DynamicSlice,
    DynamicUpdate,
    Extent,
    Full,
    Iota,
    Map,
    NumPrograms,
    Op,
    Pad,
    ProgramId,
    Reduce,
    Reshape,
    Reverse,
    Scatter,
    Select,
    SizeOf,
    Slice,
    Sort,
    Transpose,
    Value,
)
from jtile.ir.shapes import full_array
from jtile.ir.types import DTYPES

from .rewrite import Rewriter, Rules

rules = Rules()
PYTHON = {"f": float, "b": bool, "i": int, "u": int}
SMALL = 64  # elements of a literal tile that folding may make


def scalar(v: Value) -> np.ndarray | None:
    """The number of a value that is one number everywhere, as a 0-d array; else None."""
    return full_array(v.op.value, (), v.op.dtype) if isinstance(v.op, Full) else None


def number(v: Value) -> Any:
    """The number of a value that is one number everywhere, as the constant spells it in Python; else None."""
    return PYTHON[DTYPES[v.dtype].kind](v.op.value) if isinstance(v.op, Full) else None


def python_number(x: np.ndarray) -> int | float | bool:
    """The shortest Python number that gives this element back in its dtype."""
    kind = DTYPES[x.dtype.name].kind
    if kind == "b":
        return bool(x)
    if kind != "f":
        return int(x)
    return float(str(x)) if x.dtype == np.float32 else float(x)


def constant(v: Value) -> np.ndarray | None:
    """The elements of a small constant."""
    if isinstance(v.op, Full | Dense | Iota) and v.type.size <= SMALL:  # type: ignore[union-attr]
        return np.asarray(v.op.reference())
    return None


def literal_op(x: np.ndarray) -> Full | Dense | None:
    """A constant op that gives exactly these bits; None for NaNs with a payload, which no number spells."""
    flat = np.ascontiguousarray(x).reshape(-1)
    dtype = x.dtype.name
    numbers = [python_number(flat[i]) for i in range(flat.size)]
    same = flat.size > 0 and all(flat[i : i + 1].tobytes() == flat[:1].tobytes() for i in range(flat.size))
    op = Full(numbers[0], x.shape, dtype) if same else Dense(tuple(numbers), x.shape, dtype)
    return op if np.asarray(op.reference()).tobytes() == np.ascontiguousarray(x).tobytes() else None


@rules(Full)
def _typed_number(op: Full, rw: Rewriter):
    """A number has the Python type of its dtype, so that equal constants are written alike."""
    kind = PYTHON[DTYPES[op.dtype].kind]
    return None if type(op.value) is kind else rw.new(Full(kind(op.value), op.shape, op.dtype))


@rules(Iota)
def _iota_of_one(op: Iota, rw: Rewriter):
    return rw.new(Full(0, op.shape, op.dtype)) if op.shape[op.axis] == 1 else None


@rules(ProgramId)
def _only_program(op: ProgramId, rw: Rewriter):
    grid = rw.kernel.grid
    return rw.new(Full(0, (), "int32")) if op.axis >= len(grid) or grid[op.axis] == 1 else None


@rules(NumPrograms)
def _num_programs(op: NumPrograms, rw: Rewriter):
    grid = rw.kernel.grid
    side = grid[op.axis] if op.axis < len(grid) else 1
    return rw.new(SizeOf(side) if isinstance(side, Extent) else Full(side, (), "int32"))


@rules(Map, Select, Cast, Bitcast)
def _lanewise(op: Op, rw: Rewriter):
    """Fold elementwise ops on tiles of one number each."""
    operands = op.operands()
    for v in operands:  # nearly all ops leave here, and a generator would be most of the time
        if not isinstance(v.op, Full):
            return None
    numbers = [scalar(v) for v in operands]
    with np.errstate(all="ignore"):
        out = literal_op(np.asarray(op.reference(*numbers)))
    return rw.new(Full(out.value, op.result.shape, out.dtype)) if isinstance(out, Full) else None


@rules(Broadcast, Reshape, Transpose, Slice, Reverse, DynamicSlice)
def _moved(op: Any, rw: Rewriter):
    """Fold ops that only move the elements of a tile of one number."""
    return rw.new(Full(op.x.op.value, op.result.shape, op.x.dtype)) if isinstance(op.x.op, Full) else None


@rules(Concat)
def _joined(op: Concat, rw: Rewriter):
    numbers = [scalar(x) for x in op.xs]
    if any(x is None or x.tobytes() != numbers[0].tobytes() for x in numbers):
        return None
    return rw.new(Full(number(op.xs[0]), op.result.shape, op.result.dtype))


@rules(Pad)
def _padded(op: Pad, rw: Rewriter):
    x, value = scalar(op.x), scalar(op.value)
    same = x is not None and value is not None and x.tobytes() == value.tobytes()
    return rw.new(Full(number(op.x), op.result.shape, op.result.dtype)) if same else None


LITERALS = (Full, Dense, Iota)


@rules(
    Map, Select, Cast, Bitcast, Broadcast, Reshape, Transpose, Slice, Reverse, DynamicSlice, DynamicUpdate, Concat, Pad,
    Reduce, ArgReduce, Cumulative, Sort, Scatter,
)  # fmt: skip
def _small(op: Op, rw: Rewriter):
    """Fold any op on small literal tiles. What an iota gives stays arithmetic, but for comparisons: targets
    make indices cheaper than tables. A broadcast of a literal is shorter than its result."""
    for v in op.operands():
        if not isinstance(v.op, LITERALS):
            return None
    if max((math.prod(r.shape) for r in op.results), default=0) > SMALL or (isinstance(op, Broadcast) and op.x.shape):
        return None
    indices = any(isinstance(v.op, Iota) for v in op.operands())
    if indices and not (isinstance(op, Map) and op.result.dtype == "bool"):
        return None
    values = [constant(v) for v in op.operands()]
    if any(x is None for x in values):
        return None
    with np.errstate(all="ignore"):
        out = op.reference(*values)
    literals = [literal_op(np.asarray(x)) for x in (out if isinstance(out, tuple) else (out,))]
    if any(x is None or (indices and isinstance(x, Dense)) for x in literals):
        return None
    return tuple(rw.new(x) for x in literals if x is not None)
