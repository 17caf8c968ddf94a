"""The products of a decoder's layer from what attention gives to the next layer's projection.

For one row of quantised weights they are one kernel on Hopper. Elsewhere each is a kernel of its own.
"""

from __future__ import annotations

from jtile.ops import hopper_chain
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op
from jtile.ops.normed_products import rms_norm_gated_mlp, rms_norm_matmul
from jtile.ops.operands import Weight
from jtile.ops.quantized import quantized_matmul
from jtile.ops.quantized_tensor import QuantizedTensor

ON = False  # whether the one kernel is taken where it fits

Weights = tuple[tuple[QuantizedTensor, ...], ...]


def chained_products(x, residual, norms: tuple, weights: Weights, *, eps: float, activation: str = "silu"):
    """Products one behind the other, with what stands between them.

    y0 = x times the first weight; y1 the gated product of the norm of y0 + residual and the second two; y2 = y1 times
    the third; and, if there is a fourth, y3 the product of it and the norm of y2 + (y0 + residual).

    Args:
      x: float [rows, in].
      residual: float [rows, hidden].
      norms: the weights [hidden] of the norms, one or two.
      weights: (output,), (gate, up), (down,) and, with two norms, (projection,): `QuantizedTensor`s [out, in].
      eps: added to the mean square.
      activation: of the gate.
    Returns:
      The last product [rows, out] in the dtype of x, and the sum in front of the last norm in the residual's.
    """
    return _chained(x, residual, tuple(norms), tuple(weights), eps=float(eps), activation=activation)


def takes(x, residual, norms: tuple, weights: Weights, *, eps: float, activation: str) -> bool:
    """Whether one kernel computes `chained_products` of these."""
    choice = _chained.choice(x, residual, tuple(norms), tuple(weights), eps=float(eps), activation=activation)
    return choice.implementation == _ONE


def _one_by_one(x, residual, norms, weights: Weights, *, eps: float, activation: str):
    (output,), (gate, up), (down,), *behind = weights
    y = quantized_matmul(x, output, out_dtype=x.dtype)
    y, total = rms_norm_gated_mlp(y, norms[0], gate, up, residual=residual, eps=eps, activation=activation)
    y = quantized_matmul(y, down, out_dtype=x.dtype)
    if not behind:
        return y, total
    return rms_norm_matmul(y, norms[1], behind[0][0], residual=total, eps=eps)


def _in_one(x, residual, norms, weights: Weights, *, eps: float, activation: str):
    kind, stored = weights[0][0].kind, _stored(weights)
    return hopper_chain.chain(x, residual, norms, stored, kind=kind, activation=activation, eps=eps)


def _not_in_one(x, residual, norms, weights: Weights, **_) -> str | None:
    every = [w for of_product in weights for w in of_product]
    if not ON:
        return "it is switched off"
    if len({(w.kind, w.is_super, w.is_packed) for w in every}) > 1 or every[0].is_super or not every[0].is_packed:
        return "weights are of several kinds, or their codes are not in words"
    if residual.dtype != x.dtype:
        return f"the residual is {residual.dtype.name} beside {x.dtype.name}"
    return hopper_chain.misfit(x, norms, _stored(weights), every[0].kind)


def _stored(weights: Weights) -> tuple[tuple[Weight, ...], ...]:
    return tuple(tuple(Weight(w.codes, w.scale, w.minimum) for w in of_product) for of_product in weights)


_ONE = "one kernel for all"
_chained = Op(
    "products of a layer",
    Implementation(_ONE, _in_one, _not_in_one, BLOCK_LEVEL, portable=False),
    Implementation("one product behind the other", _one_by_one),
)
