"""Products of an RMS norm's result, with the sum in front of the norm: what stands between two blocks of a decoder.

For one or two rows each is one kernel on Hopper, whose blocks compute the norm while the weights are on their way.
Elsewhere, and for more rows, the norm and the product have a kernel each.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import digit_rows, float8_rows, hopper_gemv, hopper_held, rounded_rows
from jtile.ops._shapes import check_float, check_shape, float_dtype
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op
from jtile.ops.epilogues import check_activation
from jtile.ops.gated_mlp import gated_mlp, gated_mlp_reference
from jtile.ops.matmul import matmul, matmul_reference
from jtile.ops.norms import rms_norm, rms_norm_reference
from jtile.ops.operands import NO_EPILOGUE, Epilogue, Norm, Weight
from jtile.ops.quantized import not_in_bytes, quantized_matmul, quantized_matmul_reference
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.ops.weight_codes import in_rows

FEW = 4  # rows whose norm each thread of a CPU computes for itself; eight take as long in a kernel of their own


def rms_norm_matmul(x, weight, b, *, residual=None, eps: float = 1e-6, out_dtype=None) -> tuple[jax.Array, jax.Array]:
    """`(rms_norm(x + residual) @ b.T, x + residual)`, with statistics and sums in float32.

    Where both are one kernel, the norm is not rounded before the product. Differentiable in x, weight, residual, and in
    b where it is float: quantised weights are frozen.

    Args:
      x: float [..., k].
      weight: float [k], the weight of the norm.
      b: float [n, k], or a `QuantizedTensor` [n, k].
      residual: float [..., k], or None: then it is the norm of x.
      eps: added to the mean square.
      out_dtype: dtype of the product; by default that of x.

    Returns:
      The product [..., n], and the sum [..., k] in the residual's dtype; without a residual x.

    Raises:
      KernelTypeError: x, weight or residual is no float array.
      KernelValueError: shapes that do not fit.
    """
    return _call("rms_norm_matmul", x, weight, residual, (b,), eps, None, out_dtype)


def rms_norm_gated_mlp(
    x, weight, gate, up, *, residual=None, eps: float = 1e-6, activation: str = "silu", out_dtype=None
) -> tuple[jax.Array, jax.Array]:
    """`(gated_mlp(rms_norm(x + residual), gate, up, transpose=True), x + residual)`; see `rms_norm_matmul`.

    Args:
      x: float [..., k].
      weight: float [k], the weight of the norm.
      gate, up: two weights [n, k] of one kind: float, or `QuantizedTensor`.
      residual: float [..., k], or None: then it is the norm of x.
      eps: added to the mean square.
      activation: "silu", "gelu" (erf), "gelu_tanh", "relu".
      out_dtype: dtype of the product; by default that of x.

    Returns:
      The product [..., n], and the sum [..., k] in the residual's dtype; without a residual x.

    Raises:
      KernelTypeError: an array is not of a float dtype, or the two weights are of different kinds.
      KernelValueError: shapes that do not fit, or an unknown activation.
    """
    check_activation("rms_norm_gated_mlp", activation)
    if len({w.kind if isinstance(w, QuantizedTensor) else "float" for w in (gate, up)}) == 2:
        raise jt.errors.KernelTypeError("rms_norm_gated_mlp takes two float weights, or two quantised ones of one kind")
    return _call("rms_norm_gated_mlp", x, weight, residual, (gate, up), eps, activation, out_dtype)


def product_and_residual(x, b, residual) -> jax.Array | None:
    """`x @ b.T + residual` where a kernel for few rows and a small matrix adds what a norm behind it is of, so that the
    norm has one array to read.

    Args:
      x: float [rows, k].
      b: float [n, k], or a `QuantizedTensor` [n, k].
      residual: float [rows, n].
    Returns:
      The sum in the residual's dtype; None where there is no such kernel for the call.
    """
    if x.ndim != 2 or _added.choice(x, b, residual).implementation != HELD:
        return None
    return _added(x, b, residual)


def rms_norm_matmul_reference(x, weight, b, *, residual=None, eps: float = 1e-6, out_dtype=None):
    """The same function in `jnp`, at the highest precision, with a norm that is not rounded."""
    y, total = _norm_and_sum(rms_norm_reference(x.astype(jnp.float32), weight, eps=eps, residual=residual), x)
    options = {"out_dtype": out_dtype or x.dtype}
    if isinstance(b, QuantizedTensor):
        return quantized_matmul_reference(y, b, **options), total
    return matmul_reference(y, b.astype(jnp.float32), transpose_b=True, **options), total


def rms_norm_gated_mlp_reference(
    x, weight, gate, up, *, residual=None, eps: float = 1e-6, activation: str = "silu", out_dtype=None
):
    """The same function in `jnp`, at the highest precision, with a norm that is not rounded."""
    y, total = _norm_and_sum(rms_norm_reference(x.astype(jnp.float32), weight, eps=eps, residual=residual), x)
    y = gated_mlp_reference(y, gate, up, activation=activation, transpose=True)
    return y.astype(out_dtype or x.dtype), total


def _call(
    name: str, x, weight, residual, weights: tuple, eps: float, activation: str | None, out_dtype
) -> tuple[jax.Array, jax.Array]:
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    residual = None if residual is None else jnp.asarray(residual)
    weights = tuple(w if isinstance(w, QuantizedTensor) else jnp.asarray(w) for w in weights)
    check_float(name, x=x, weight=weight, residual=residual)
    k, n = x.shape[-1:], weights[0].shape[0]
    check_shape(name, "weight", weight, k)
    if residual is not None:
        check_shape(name, "residual", residual, x.shape)
    for w in weights:
        if tuple(w.shape) != (n, *k):
            raise jt.errors.KernelValueError(
                f"{name}: x {tuple(x.shape)} does not fit a weight of {list(w.shape)}; expected {[n, *k]}"
            )
    rows = (math.prod(x.shape[:-1]), *k)
    options = dict(eps=float(eps), activation=activation, out_dtype=float_dtype(name, out_dtype, x.dtype).name)
    added = None if residual is None else residual.reshape(rows)
    y, total = _product(x.reshape(rows), added, weight, weights, **options)
    return y.reshape(*x.shape[:-1], n), total.reshape(x.shape)


def _one_by_one(x, residual, weight, weights, *, eps: float, activation: str | None, out_dtype: str):
    normed, total = _norm_and_sum(rms_norm(x, weight, eps=eps, residual=residual), x)
    if activation is not None:
        options = dict(activation=activation, transpose=True, out_dtype=out_dtype)
        return gated_mlp(normed, *weights, **options), total
    if isinstance(weights[0], QuantizedTensor):
        return quantized_matmul(normed, weights[0], out_dtype=out_dtype), total
    return matmul(normed, weights[0], transpose_b=True, out_dtype=out_dtype), total


def _norm_and_sum(found, x) -> tuple:
    """What a norm of x gave, beside the sum that it is of: x itself, unless it had a residual."""
    return found if isinstance(found, tuple) else (found, x)


def _streamed(x, residual, weight, weights, **options):
    kind, stored = _stored(x, weights)
    return hopper_gemv.normed_product(x, stored, Norm(weight, residual), kind=kind, **options)


def _not_streamed(x, residual, weight, weights, **_) -> str | None:
    if isinstance(weights[0], QuantizedTensor) and weights[0].is_super:
        return f"the codes of {weights[0].kind} are in several arrays"
    kind, stored = _stored(x, weights)
    return next((why for w in stored if (why := hopper_gemv.misfit(x, w, kind, gated=len(weights) > 1))), None)


def _stored(x, weights) -> tuple[str, tuple[Weight, ...]]:
    """The kind of the weights, and their arrays, which nothing differentiates by where they are quantised."""
    if not isinstance(weights[0], QuantizedTensor):
        return x.dtype.name, tuple(map(Weight, weights))
    return weights[0].kind, tuple(in_rows(Weight(w.codes, w.scale, w.minimum), w.kind) for w in weights)


def _rounded(x, residual, weight, weights, **options):
    return float8_rows.normed_product(x, Norm(weight, residual), _stored(x, weights)[1], **options)


def _not_rounded(x, residual, weight, weights, **_) -> str | None:
    if residual is None:
        return "nothing is added in front of the norm"
    kinds = {(w.activations, w.is_packed) for w in weights if isinstance(w, QuantizedTensor)}
    if len(kinds) != 1 or next(iter(kinds))[0] != "rows":
        return "the rows of the norm are not to be rounded by one scale each"
    return float8_rows.misfit(x, _stored(x, weights)[1][0], activations="rows")


def _in_bytes(x, residual, weight, weights, **options):
    arrays = jax.lax.stop_gradient(tuple(Weight(w.codes, w.scale, w.minimum) for w in weights))
    return digit_rows.normed_product(x, Norm(weight, residual), arrays, kind=weights[0].kind, **options)


def _not_in_bytes(x, residual, weight, weights, **_) -> str | None:
    if (why := _not_alike(x, residual, weights)) is not None:
        return why
    arrays = tuple(Weight(w.codes, w.scale, w.minimum) for w in weights)
    options = dict(kind=weights[0].kind, activation=None, activations=weights[0].activations)
    return not_in_bytes(x, arrays, NO_EPILOGUE, **options)


def _in_integers(x, residual, weight, weights, **options):
    arrays = jax.lax.stop_gradient(tuple(Weight(w.codes, w.scale, w.minimum) for w in weights))
    return rounded_rows.normed_product(x, Norm(weight, residual), arrays, kind=weights[0].kind, **options)


def _not_in_integers(x, residual, weight, weights, **_) -> str | None:
    if not isinstance(x.shape[0], int) or x.shape[0] > FEW:
        return "so many rows that one thread is not to compute the norm of all"
    if (why := _not_alike(x, residual, weights)) is not None:
        return why
    arrays = tuple(Weight(w.codes, w.scale, w.minimum) for w in weights)
    return rounded_rows.misfit(x, arrays, NO_EPILOGUE, kind=weights[0].kind, activations=weights[0].activations)


def _not_alike(x, residual, weights) -> str | None:
    ways = {(w.activations, w.kind, w.is_super) if isinstance(w, QuantizedTensor) else None for w in weights}
    if len(ways) != 1 or None in ways or x.dtype != jnp.float32 or getattr(residual, "dtype", x.dtype) != x.dtype:
        return "the weights are not of one kind of quantised ones, or an array is not float32"
    return None


# The product of rms_norm(x + residual) [m, k] with a matrix [n, k], or the gated one with two; and the sum.
_product = Op(
    "product of an RMS norm",
    Implementation("rows against a stream of weights", _streamed, _not_streamed, BLOCK_LEVEL, portable=False),
    Implementation("norm that rounds its rows, then product", _rounded, _not_rounded, BLOCK_LEVEL, portable=False),
    Implementation("norm in bytes, then product", _in_bytes, _not_in_bytes, ("byte tiles",), portable=False),
    Implementation(
        "norm in a product of integers", _in_integers, _not_in_integers, ("int16 products",), portable=False
    ),
    Implementation("norm, then product", _one_by_one),
)


def _held(x, b, residual):
    kind, stored = _stored(x, (b,))
    return hopper_gemv.product(x, stored, Epilogue(residual=residual), kind=kind, out_dtype=residual.dtype)


def _not_held(x, b, residual) -> str | None:
    plain = not isinstance(b, QuantizedTensor)
    if b.dtype != x.dtype if plain else b.is_super or b.activations is not None:
        return "the matrix has another dtype than the rows, several arrays of codes, or wants rounded rows"
    kind, stored = _stored(x, (b,))
    if (why := hopper_gemv.misfit(x, stored[0], kind)) is not None:
        return why
    return None if hopper_held.choice(x, stored, kind) is not None else "registers do not hold a program's rows of it"


def _product_then_sum(x, b, residual):
    if isinstance(b, QuantizedTensor):
        return quantized_matmul(x, b, residual=residual, out_dtype=residual.dtype)
    y = matmul(x, b, transpose_b=True, out_dtype=jnp.float32)
    return (y + residual.astype(jnp.float32)).astype(residual.dtype)


HELD = "rows of the matrix held in registers"
# x [m, k] times a matrix [n, k], plus a residual [m, n], of which a norm is taken next.
_added = Op(
    "product and residual",
    Implementation(HELD, _held, _not_held, BLOCK_LEVEL, portable=False),
    Implementation("product, then sum", _product_then_sum),
)
