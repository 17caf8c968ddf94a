"""Transposition of matrices."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import check_rank, fit


@jt.kernel(
    out_type=lambda x, **_: jt.like(x, shape=(x.shape[0], x.shape[2], x.shape[1])),
    grid=lambda x, *, bm, bn: (x.shape[0], jt.cdiv(x.shape[1], bm), jt.cdiv(x.shape[2], bn)),
)
def transpose_tiles(x, y, *, bm: int, bn: int):
    """x [batch, m, n] to y [batch, n, m]."""
    b, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    y.tiles(None, bn, bm)[b, j, i] = x.tiles(None, bm, bn)[b, i, j].T


@functools.partial(jax.jit, inline=True)
def transpose(x: jax.Array) -> jax.Array:
    """Swaps the last two axes.

    Args:
      x: array [..., m, n] of any dtype.
    Returns:
      [..., n, m].
    Raises:
      KernelValueError: `x` has rank 0 or 1.
    """
    if x.ndim < 2:
        check_rank("transpose", "x", x, 2, "[..., m, n]")
    m, n = x.shape[-2:]
    shape = (*x.shape[:-2], n, m)
    if x.size == 0 or m == 1 or n == 1:
        return x.reshape(shape)
    batches = x.reshape(math.prod(x.shape[:-2]), m, n)
    return transpose_tiles(batches, bm=fit(m, 64), bn=fit(n, 64)).reshape(shape)


def transpose_reference(x):
    """`transpose` in jnp."""
    return jnp.swapaxes(x, -1, -2)
