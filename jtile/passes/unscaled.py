"""Products of what is loaded: a factor for each row or column of an operand is taken out of the product, so that the
operand is what lies in memory, and copies bring it without a way through registers.

`(g / l) vT`, one `l` a row, is `(g vT) / l`; and `pT (g / l)`, where the product sums over the rows, is `(p / l)T g`.
"""

from __future__ import annotations

import dataclasses

from jtile.ir import Broadcast, Cast, Dot, Kernel, Load, Map, Value
from jtile.ir.types import DTYPES

from .rewrite import Rewriter, Rules

rules = Rules()


def unscaled(kernel: Kernel) -> Kernel:
    """The kernel, where factors of rows and columns are taken out of products of what is loaded."""
    return Rewriter(kernel, rules).run()


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """`fn(load, s)` with one number of `s` for each index along `axis`, rounded to the dtype of the load."""

    load: Value
    fn: str
    s: Value
    axis: int


def _scaled(v: Value) -> _Scaled | None:
    if len(v.shape) != 2 or not isinstance(v.op, Cast) or not isinstance(v.op.x.op, Map):
        return None
    scale = v.op.x.op
    if scale.fn not in ("mul", "div") or scale.args[0].dtype != "float32":
        return None
    pairs = [scale.args] if scale.fn == "div" else [scale.args, scale.args[::-1]]
    for x, s in pairs:
        load = x.op.x if isinstance(x.op, Cast) else x
        if not isinstance(load.op, Load) or load.dtype != v.dtype or not isinstance(s.op, Broadcast):
            continue
        long = [d for n, d in zip(s.op.x.shape, s.op.dims, strict=True) if n > 1]
        if len(long) == 1:
            return _Scaled(load, scale.fn, s.op.x, long[0])
    return None


@rules(Dot)
def _dot(op: Dot, rw: Rewriter):
    if len(op.a.shape) != 2 or op.result.dtype != "float32":
        return None
    for right, v, turned in ((False, op.a, op.trans_a), (True, op.b, op.trans_b)):
        found = _scaled(v)
        if found is None:
            continue
        along = found.axis != int(turned)  # the second axis of the operand as it is multiplied
        if along != right:
            return _into_the_other(op, found, right, rw)
        return _behind(op, found, right, rw)
    return None


def _column(s: Value, n: int, shape: tuple[int, ...], axis: int, rw: Rewriter) -> Value:
    """One number for each index along an axis, as a tile."""
    flat = s if len(s.shape) == 1 else rw.b.reshape(s, (n,))
    return rw.new(Broadcast(flat, shape, (axis,)))


def _behind(op: Dot, found: _Scaled, right: bool, rw: Rewriter):
    """Multiply the result of a product with a factor for each of its rows, or columns."""
    a, b = (op.a, found.load) if right else (found.load, op.b)
    product = rw.new(Dot(a, b, None, op.trans_a, op.trans_b, op.precision))
    axis = int(right)
    factor = _column(found.s, product.shape[axis], product.shape, axis, rw)
    out = rw.new(Map(found.fn, (product, factor)))
    return out if op.acc is None else rw.new(Map("add", (out, op.acc)))


def _into_the_other(op: Dot, found: _Scaled, right: bool, rw: Rewriter):
    """Multiply the other operand of a product with a factor for each term, if that operand is computed."""
    other, turned = (op.a, op.trans_a) if right else (op.b, op.trans_b)
    if not isinstance(other.op, Cast) or other.op.x.dtype != "float32" or isinstance(other.op.x.op, Load):
        return None
    if DTYPES[other.dtype].kind != "f":
        return None
    axis = int(right) if not turned else int(not right)  # the axis of the terms that are summed
    factor = _column(found.s, other.shape[axis], other.shape, axis, rw)
    scaled = rw.new(Cast(rw.new(Map(found.fn, (other.op.x, factor))), other.dtype))
    a, b = (scaled, found.load) if right else (found.load, scaled)
    return rw.new(Dot(a, b, op.acc, op.trans_a, op.trans_b, op.precision))
