"""Products of rows with the matrices that an index names: a mixture of experts, token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import grouped_quantized
from jtile.ops._shapes import check_float, check_int, check_rank
from jtile.ops.epilogues import ACTIVATIONS, check_activation
from jtile.ops.grouped_matmul import grouped_matmul
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.ops.row_groups import within


def routes_unsorted(rows: int, w: jax.Array | QuantizedTensor) -> bool:
    """Whether `routed_matmul` multiplies rows one by one, without sorting them, so that callers need no sort.

    Args:
      rows: the number of rows in all.
      w: the matrices.

    Returns:
      A Python bool.
    """
    return isinstance(w, QuantizedTensor) and grouped_quantized.few(rows, w.shape[0])


def routed_matmul(
    x: jax.Array, w: jax.Array | QuantizedTensor, index: jax.Array, *, activation: str | None = None, out_dtype=None
) -> jax.Array:
    """`y[t, j] = x[t] @ w[index[t, j]].T`, or `x[t, j] @ ...` where x has a row for each j.

    Few rows go through quantised matrices straight from their codes, as in a decoding step of a mixture of experts: on
    GPUs half as many as there are matrices at most, on CPUs twice as many. Elsewhere rows are sorted for
    `grouped_matmul`. Differentiable in x, and in w where it is float.

    Args:
      x: float [tokens, in] or [tokens, k, in].
      w: [groups, out, in] of x's dtype, or a `QuantizedTensor` of that shape.
      index: int [tokens, k]; what is outside of [0, groups) gives zeros.
      activation: of a gated layer, "silu", "gelu" (erf), "gelu_tanh" or "relu": the first half of the rows of a matrix
        are gates G, the others U, and the result is `activation(x Gᵀ) * (x Uᵀ)`. None: the product as it is.
      out_dtype: dtype of the result; default that of x.

    Returns:
      [tokens, k, out], with an activation [tokens, k, out / 2]; sums are in float32.

    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit, or an unknown activation.
    """
    x, index = jnp.asarray(x), jnp.asarray(index)
    w = w if isinstance(w, QuantizedTensor) else jnp.asarray(w)
    _check(x, w, index, activation)
    (tokens, k), groups, m = index.shape, w.shape[0], index.size
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    of = index.reshape(m).astype(jnp.int32)
    rows = x.reshape(-1, x.shape[-1])
    out = w.shape[1] // (1 if activation is None else 2)
    if 0 in (m, groups, out, x.shape[-1]):
        return jnp.zeros((tokens, k, out), out_dtype)
    if isinstance(w, QuantizedTensor) and routes_unsorted(m, w):
        y = grouped_quantized.routed(rows, w, of, activation=activation, out_dtype=out_dtype.name)
        return y.reshape(tokens, k, out)
    of = within(of, groups)
    order = jnp.argsort(of, stable=True)
    sizes = jnp.zeros((groups,), jnp.int32).at[of].add(1, mode="drop")
    inner = out_dtype if activation is None else jnp.float32
    y = grouped_matmul(rows[order // (m // rows.shape[0])], w, sizes, transpose_w=True, out_dtype=inner)
    y = jnp.zeros_like(y).at[order].set(y, unique_indices=True)
    return _joined(y, activation).reshape(tokens, k, out).astype(out_dtype)


def _joined(y, activation: str | None):
    if activation is None:
        return y
    gate, up = jnp.split(y, 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up


def _check(x, w, index, activation: str | None) -> None:
    quantised = isinstance(w, QuantizedTensor)
    check_float("routed_matmul", x=x, w=None if quantised else w)
    check_int("routed_matmul", index=index)
    check_rank("routed_matmul", "index", index, 2, "[tokens, k]")
    check_rank("routed_matmul", "w", w, 3, "[groups, out, in]")
    if activation is not None:
        check_activation("routed_matmul", activation)
    if not quantised and x.dtype != w.dtype:
        raise KernelTypeError(f"routed_matmul: x and w have one dtype, got {x.dtype.name} and {w.dtype.name}; cast one")
    if x.shape[-1:] != w.shape[2:] or x.shape[:-1] not in (index.shape[:1], index.shape):
        raise KernelValueError(
            f"routed_matmul: x {x.shape} does not fit index {index.shape} and matrices {list(w.shape)}: x is "
            f"[{index.shape[0]}, {w.shape[2]}] or [{index.shape[0]}, {index.shape[1]}, {w.shape[2]}]"
        )
    if activation is not None and w.shape[1] % 2:
        raise KernelValueError(f"routed_matmul: {w.shape[1]} rows of a matrix are no gates and as many gated ones")


def routed_matmul_reference(x, w, index, *, activation: str | None = None, out_dtype=None) -> jax.Array:
    """`routed_matmul` in `jnp`: every row is multiplied with every matrix, and the right products chosen."""
    dense = w.dequantize() if isinstance(w, QuantizedTensor) else w.astype(jnp.float32)
    wide = x.astype(jnp.float32)
    wide = jnp.broadcast_to(wide[:, None], (*index.shape, x.shape[-1])) if x.ndim == 2 else wide
    mine = jnp.arange(dense.shape[0], dtype=index.dtype)[None, None, :] == index[..., None]
    y = jnp.einsum("tki,goi,tkg->tko", wide, dense, mine.astype(jnp.float32), precision="highest")
    return _joined(y, activation).astype(out_dtype or x.dtype)
