"""A chain of elementwise steps as one kernel: the epilogue of a transformer's MLP, one pass over memory."""

from __future__ import annotations

import functools

import jax

import jtile as jt
from jtile.ops._shapes import as_rows, check_float, check_shape, rows_per_tile, wide


@jt.kernel(out_type=lambda x, b, r, **_: jt.like(x), grid=lambda x, b, r, *, br, **_: jt.cdiv(x.shape[0], br))
def bias_gelu_residual_rows(x, b, r, y, *, br: int, approximate: bool):
    """Rows of x, r [rows, n], `br` of them in a program; b [n]."""
    # y = gelu(x + b) + r
    i, n = jt.program_id(0), x.shape[1]
    X, R, Y = x.tiles(br, n), r.tiles(br, n), y.tiles(br, n)
    t = wide(X[i, 0])
    t = jax.nn.gelu(t + b[...].astype(t.dtype)[None, :], approximate=approximate)
    Y[i, 0] = (t + R[i, 0].astype(t.dtype)).astype(y.dtype)


@functools.partial(jax.jit, static_argnames="approximate", inline=True)
def bias_gelu_residual(x: jax.Array, bias: jax.Array, residual: jax.Array, *, approximate: bool = True) -> jax.Array:
    """`gelu(x + bias) + residual`, computed in float32 (Hendrycks and Gimpel 2016).

    Differentiable in x, bias and residual.

    Args:
      x: float array [..., n].
      bias: float array [n].
      residual: float array of x's shape.
      approximate: the tanh form of gelu, or else the one with erf.
    Returns:
      An array like `x`.
    Raises:
      KernelTypeError: an array is not of a float dtype. KernelValueError: bias or residual does not fit.
    """
    check_float("bias_gelu_residual", x=x, bias=bias, residual=residual)
    check_shape("bias_gelu_residual", "bias", bias, x.shape[-1:])
    check_shape("bias_gelu_residual", "residual", residual, x.shape)
    if x.size == 0:
        return x
    rows = as_rows(x)
    br = rows_per_tile(*rows.shape)
    return bias_gelu_residual_rows(rows, bias, as_rows(residual), br=br, approximate=bool(approximate)).reshape(x.shape)


def bias_gelu_residual_reference(x, bias, residual, *, approximate: bool = True):
    """`bias_gelu_residual` in jnp."""
    lead = (1,) * (x.ndim - 1) + (-1,)
    return (jax.nn.gelu(wide(x) + wide(bias).reshape(lead), approximate=approximate) + wide(residual)).astype(x.dtype)
