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
    grid=lambda x, *, bm, bn, **_: (x.shape[0], jt.cdiv(x.shape[1], bm), jt.cdiv(x.shape[2], bn)),
)
def transpose_tiles(x, y, *, bm: int, bn: int, staged: bool = True):
    """x [batch, m, n] to y [batch, n, m].

    `staged`: each tile is first copied to rows of its own, longer by a cache line: a column of an array whose rows are
    a power of two long falls into one set of the cache.
    """
    b, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    tile = x.tiles(None, bm, bn)[b, i, j]
    if staged:
        rows = jt.alloc((bm, bn + 16), x.dtype)
        rows[:, :bn] = tile
        tile = rows[:, :bn]
    y.tiles(None, bn, bm)[b, j, i] = tile.T


def _forward(x, **meta):
    return transpose_tiles(x, **meta), None


def _backward(_, g, *, bm: int, bn: int, staged: bool):
    return (transpose_tiles(g, bm=bn, bn=bm, staged=staged),)


transpose_tiles.defvjp(_forward, _backward)


@functools.partial(jax.jit, inline=True)
def transpose(x: jax.Array) -> jax.Array:
    """Swaps the last two axes.

    Differentiable in x, if it is of floats.

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
    return transpose_tiles(batches, bm=fit(m, 32), bn=fit(n, 64)).reshape(shape)


def transpose_reference(x):
    """`transpose` in jnp."""
    return jnp.swapaxes(x, -1, -2)
