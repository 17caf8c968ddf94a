"""A chain of elementwise steps as one kernel: the epilogue of a transformer's MLP, one pass over memory."""

from __future__ import annotations

import functools

import jax

import jtile as jt
from jtile.ops import dispatch
from jtile.ops._shapes import as_rows, check_float, check_shape, fit, machine, rows_per_tile, wide


def _grid(x, b, r, *, br, bn=0, **_):
    rows = jt.cdiv(x.shape[0], br)
    return (rows, jt.cdiv(x.shape[1], bn)) if bn else rows


@jt.kernel(out_type=lambda x, b, r, **_: jt.like(x), grid=_grid)
def bias_gelu_residual_rows(x, b, r, y, *, br: int, approximate: bool, bn: int = 0):
    """Rows of x, r [rows, n], `br` of them in a program, or (`bn`) as many columns of them; b [n]."""
    # y = gelu(x + b) + r
    i, j = jt.program_id(0), jt.program_id(1) if bn else 0
    bn = bn or x.shape[1]
    X, R, Y = x.tiles(br, bn), r.tiles(br, bn), y.tiles(br, bn)
    t = wide(X[i, j])
    bias = b[...] if bn == x.shape[1] else b.tiles(bn)[j]
    t = jax.nn.gelu(t + bias.astype(t.dtype)[None, :], approximate=approximate)
    Y[i, j] = (t + R[i, j].astype(t.dtype)).astype(y.dtype)


@functools.partial(jax.jit, static_argnames="approximate", inline=True)
def bias_gelu_residual(x: jax.Array, bias: jax.Array, residual: jax.Array, *, approximate: bool = True) -> jax.Array:
    """`gelu(x + bias) + residual`, computed in float32 (Hendrycks and Gimpel 2016).

    Differentiable in x, bias and residual.

    Args:
      x: float array [..., n].
      bias: float array [n].
      residual: float array of x's shape.
      approximate: use the tanh form of gelu instead of the one with erf.
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
    tiles = {"br": rows_per_tile(*rows.shape)}
    if dispatch.vector_cores():  # their memory holds fewer of the many values of a derivative
        bn = fit(rows.shape[1], machine().tile)
        tiles = {"br": rows_per_tile(rows.shape[0], bn), "bn": bn}
    return bias_gelu_residual_rows(rows, bias, as_rows(residual), approximate=bool(approximate), **tiles).reshape(
        x.shape
    )


def bias_gelu_residual_reference(x, bias, residual, *, approximate: bool = True):
    """`bias_gelu_residual` in jnp."""
    lead = (1,) * (x.ndim - 1) + (-1,)
    return (jax.nn.gelu(wide(x) + wide(bias).reshape(lead), approximate=approximate) + wide(residual)).astype(x.dtype)
