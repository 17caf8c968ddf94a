"""Scans along an axis. Lanes beyond the tile come last, where they disturb nobody, unless the scan runs backwards."""

from __future__ import annotations

import math

from jtile import ir

from . import combine
from .emit_elementwise import emit_function
from .emit_reduce import arith, narrow, wide
from .emitter import Emitter, emits
from .math_expr import X
from .ttir import Val


@emits(ir.Cumulative)
def _cumulative(em: Emitter, op: ir.Cumulative) -> Val:
    dtype, v = op.x.dtype, em.val(op.x)
    if v.shape[op.axis] == 1:
        return v
    x = wide(em, v, dtype)
    if op.reverse:
        number = -math.inf if op.fn == "logsumexp" else ir.identity(op.fn, dtype)
        x = combine.filled(em, x, op.x.shape, (op.axis,), number)
    body = combine.binary(em, arith(op.fn, dtype)) if op.fn != "logsumexp" else _log_add_exp(em)
    (y,) = combine.scan(em, [x], op.axis, body, reverse=op.reverse)
    return narrow(em, y, dtype)


def _log_add_exp(em: Emitter) -> combine.Combiner:
    """max + log1p(exp(-|a - b|)); of equal numbers, infinities among them, a + log 2."""

    def run(a: list[Val], b: list[Val]) -> list[Val]:
        x, y = X(em.code, a[0]), X(em.code, b[0])
        dtype = {"f32": "float32", "f64": "float64"}[x.elem]
        function = lambda name, v: emit_function(em.features, name, [v], dtype)
        tail = function("log1p", function("exp", -(x - y).abs()))
        return [x.eq(y).where(x + math.log(2), x.binary("arith.maximumf", y) + tail).v]

    return run


@emits(ir.UserScan)
def _user_scan(em: Emitter, op: ir.UserScan) -> list[Val]:
    body = combine.checked(em, op, "associative_scan")
    xs = [em.val(x) for x in op.xs]
    if xs[0].shape[op.axis] == 1:
        return xs
    guard = combine.with_guard(em, xs, op.xs[0].shape, (op.axis,)) if op.reverse else None
    rule = body if guard is None else combine.guarded(em, body)
    combine.check_number(em, op, guard or xs)
    return combine.scan(em, guard or xs, op.axis, rule, reverse=op.reverse)[: len(xs)]
