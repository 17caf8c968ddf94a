"""Cumulative sum along one axis."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import check_axis, fit, known, machine, rows_per_tile
from jtile.ops.dispatch import WARPS, Implementation, Op, first_unmet

_PIECE = 2048  # elements that a program of a GPU adds up, where a program for each whole axis would be too few


def _wide(x):
    """A tile in the dtype that it is added up in: 16-bit floats in float32, integers as they are."""
    small = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if small else x


@jt.kernel(
    out_type=lambda x, **_: jt.like(x),
    grid=lambda x, *, br, bc, **_: (x.shape[0], jt.cdiv(x.shape[2], bc)) if br is None else jt.cdiv(x.shape[0], br),
)
def cumsum_blocks(x, y, *, br: int | None, bn: int, bc: int, reverse: bool):
    """Sums along the middle axis of x [outer, n, inner], in blocks `bn` of `br` rows (inner 1) or `bc` columns each."""
    # y_j = c + sum_{k <= j} x_k, where c is the sum of the blocks before
    view = (br, bn, bc) if br is not None else (None, bn, bc)
    i, c = jt.program_id(0), 0 if br is not None else jt.program_id(1)
    X, Y = x.tiles(*view), y.tiles(*view)
    axis, blocks = len(X.tile_shape) - 2, X.shape[1]
    carry = jnp.zeros(
        tuple(1 if k == axis else n for k, n in enumerate(X.tile_shape)), _wide(jnp.zeros((), x.dtype)).dtype
    )
    for k in jt.range(blocks):
        j = blocks - 1 - k if reverse else k
        t = _wide(X[i, j, c])
        sums = jax.lax.cumsum(t, axis=axis, reverse=reverse) + carry
        Y[i, j, c] = sums.astype(y.dtype)
        carry = carry + t.sum(axis, keepdims=True, dtype=t.dtype)


def _forward(x, **meta):
    return cumsum_blocks(x, **meta), None


def _backward(_, g, *, reverse: bool, **meta):
    return (cumsum_blocks(g, reverse=not reverse, **meta),)  # dx_k = sum_{j >= k} g_j


cumsum_blocks.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("axis", "reverse"), inline=True)
def cumsum(x: jax.Array, axis: int = -1, *, reverse: bool = False) -> jax.Array:
    """`y_j = x_0 + ... + x_j` along an axis.

    Differentiable in x, if it is of floats.

    Args:
      x: array of any shape and a float or integer dtype; floats of less than 32 bits are added up in float32.
      axis: where to sum along.
      reverse: sum from the end, so that `y_j` is the sum of `x_j` and all that come after it.
    Returns:
      An array like `x`.
    Raises:
      KernelTypeError, KernelValueError: no such axis.
    """
    axis = check_axis(axis, x.ndim, "cumsum")
    if x.size == 0:
        return x
    n, inner = x.shape[axis], math.prod(x.shape[axis + 1 :])
    return _op(x.reshape(-1, n, inner), reverse=bool(reverse)).reshape(x.shape)


def _not_in_pieces(x3, **_) -> str | None:
    outer, n, inner = map(known, x3.shape)
    programs = outer * jt.cdiv(inner, 64)
    return first_unmet(
        (n > _PIECE, f"a program adds up {n}"),
        (programs < machine().programs, f"{programs} programs fill the target"),
    )


def _whole(x3, *, reverse: bool):
    """Sums along the middle axis of x3 [outer, n, inner]; a program goes from one end to the other."""
    n, inner = x3.shape[1:]
    if inner == 1:
        bn = fit(n, machine().tile // 8)
        br, bc = rows_per_tile(x3.shape[0], bn), 1
    else:
        bc = fit(inner, 256 if machine().whole else 64)
        br, bn = None, fit(n, max(1, machine().tile // bc))
    return cumsum_blocks(x3, br=br, bn=bn, bc=bc, reverse=reverse)


def _in_pieces(x3, *, reverse: bool):
    """The sums of `_whole` by more programs: sums inside of pieces, and what all pieces before one add up to."""
    outer, n, inner = x3.shape
    pieces = jt.cdiv(n, _PIECE)
    t = jnp.pad(_wide(x3), ((0, 0), (0, pieces * _PIECE - n), (0, 0)))
    local = _whole(t.reshape(outer * pieces, _PIECE, inner), reverse=reverse).reshape(outer, pieces, _PIECE, inner)
    sums = local[:, :, 0 if reverse else -1]
    before = cumsum(sums, 1, reverse=reverse) - sums
    return (local + before[:, :, None]).reshape(outer, -1, inner)[:, :n].astype(x3.dtype)


_op = Op(
    "cumsum",
    Implementation("pieces", _in_pieces, _not_in_pieces, WARPS),
    Implementation("whole axes", _whole),
)


def cumsum_reference(x, axis: int = -1, *, reverse: bool = False):
    """`cumsum` in jnp."""
    return jax.lax.cumsum(_wide(x), axis=axis % x.ndim, reverse=reverse).astype(x.dtype)
