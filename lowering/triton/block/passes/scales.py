"""Positive factors behind maxima and masks: fewer multiplications where scores are scaled, and one with the subtraction
of the maximum. Exact: rounding keeps the order of numbers."""

from __future__ import annotations

import math

from jtile.ir import Full, Kernel, Map, Reduce, Select, Value
from jtile.ir.types import DTYPES
from jtile.passes.pipeline import Pass
from jtile.passes.rewrite import Rewriter, Rules, rewrite

rules = Rules()


def _scaled(v: Value) -> tuple[Value, float] | None:
    """(x, c) of `x * c` with a finite positive number c; None of other values."""
    if not (isinstance(v.op, Map) and v.op.fn == "mul" and DTYPES[v.dtype].kind == "f"):
        return None
    x, c = v.op.args
    if not isinstance(c.op, Full) or not 0 < c.op.value < math.inf:
        return None
    return x, c.op.value


def _times(rw: Rewriter, x: Value, c: float) -> Value:
    return rw.new(Map("mul", (x, rw.new(Full(c, x.shape, x.dtype)))))


@rules(Reduce)
def _maximum(op: Reduce, rw: Rewriter):
    """Rewrites max(x c) to max(x) c."""
    found = _scaled(op.x) if op.fn in ("max", "min") else None
    if found is None:
        return None
    x, c = found
    return _times(rw, rw.new(Reduce(x, op.fn, op.axes)), c)


@rules(Select)
def _mask(op: Select, rw: Rewriter):
    """Rewrites select(m, x c, b) to select(m, x, b) c for b = 0, inf, -inf."""
    found = _scaled(op.a)
    fixed = isinstance(op.b.op, Full) and (op.b.op.value == 0 or math.isinf(op.b.op.value))
    if found is None or not fixed or rw.uses(op.a) > 1:
        return None
    x, c = found
    return _times(rw, rw.new(Select(op.cond, x, op.b)), c)


def run(kernel: Kernel) -> Kernel:
    return rewrite(kernel, rules)


scales = Pass("scales", "No maximum, and no mask of zeros or infinities, is taken of what has a positive factor.", run)
