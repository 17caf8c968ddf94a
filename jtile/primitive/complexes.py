"""Operands and results of custom calls that are complex for XLA: the bytes of the pairs that a kernel sees.

Around a call stand conversions between complex arrays and arrays of pairs. Those that the call itself makes undo them,
and XLA drops both, so that a complex array is neither copied on its way into a kernel nor on its way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.core import ShapedArray
from jax.interpreters import mlir

from jtile._parts import COMPLEX, PARTS, parts, whole


def joined(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], ins: Iterable[int], outs: Iterable[int]
) -> tuple[mlir.LoweringRuleContext, list[Any]]:
    """The context and the operands of a call that takes operands `ins` and gives results `outs` as complex arrays."""
    avals_in, operands = list(ctx.avals_in), list(operands)
    for k in ins:
        (operands[k],) = _lowered(ctx, whole, avals_in[k], _complex(avals_in[k]), operands[k])
        avals_in[k] = _complex(avals_in[k])
    avals_out = [_complex(a) if k in outs else a for k, a in enumerate(ctx.avals_out)]
    return ctx.replace(avals_in=tuple(avals_in), avals_out=tuple(avals_out)), operands


def apart(ctx: mlir.LoweringRuleContext, results: Sequence[Any], outs: Iterable[int]) -> list[Any]:
    """The results of a call with complex arrays as the pairs that `ctx` says they are."""
    return [
        _lowered(ctx, parts, _complex(a), a, x)[0] if k in outs else x
        for k, (a, x) in enumerate(zip(ctx.avals_out, results, strict=True))
    ]


def _complex(aval: ShapedArray) -> ShapedArray:
    assert aval.shape[-1] == PARTS, aval
    return ShapedArray(aval.shape[:-1], COMPLEX)


def _lowered(ctx: mlir.LoweringRuleContext, fn: Any, source: Any, result: Any, x: Any) -> Any:
    inner = ctx.replace(avals_in=(source,), avals_out=(result,))
    return mlir.lower_fun(fn, multiple_results=False)(inner, x)
