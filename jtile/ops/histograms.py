"""Counts of values in bins of equal width: a private histogram per program, added to the result at the end."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import fit, machine

_BLOCKS = 16  # tiles that one program counts


def _place(x, bins: int, low: float, high: float):
    """floor((x - low) / width), the bin of each value; `high` is in the last bin, `bins` stands for outside and NaN."""
    x = x.astype(jnp.float32)
    at = jnp.floor((x - low) * (bins / (high - low)))
    at = jnp.where(x == high, bins - 1.0, jnp.minimum(at, bins - 1.0))
    return jnp.where((x >= low) & (x <= high), at, float(bins)).astype(jnp.int32)


@jt.kernel(
    out_type=lambda x, *, bins, **_: jax.ShapeDtypeStruct((bins,), jnp.int32),
    grid=lambda x, *, bn, **_: jt.cdiv(x.shape[0], bn * _BLOCKS),
    scratch=lambda x, *, bins, **_: jax.ShapeDtypeStruct((bins,), jnp.int32),
    init=0,
)
def count(x, total, mine, *, bn: int, bins: int, low: float, high: float):
    """x [n]; programs count `_BLOCKS` tiles of `bn` into `mine`, then add that to `total`."""
    # total_b = |{ j : bin(x_j) = b }|
    mine[...] = jnp.zeros((bins,), jnp.int32)
    X, first = (
        x.tiles(bn, pad=float("nan")) if jnp.issubdtype(x.dtype, jnp.floating) else x.tiles(bn),
        jt.program_id(0) * _BLOCKS,
    )
    for k in jt.range(jnp.minimum(X.shape[0] - first, _BLOCKS)):
        at = _place(X[first + k], bins, low, high)
        at = jnp.where((first + k) * bn + jt.arange(bn) < x.shape[0], at, bins)
        jt.atomic_add(mine, at, jnp.ones((bn,), jnp.int32))
    jt.atomic_add(total, slice(None), mine[...])


@functools.partial(jax.jit, static_argnames=("bins", "range"), inline=True)
def histogram(x: jax.Array, *, bins: int, range: tuple[float, float]) -> jax.Array:
    """How many elements of `x` lie in each of `bins` bins of equal width.

    Not differentiable: the result holds integers.

    Args:
      x: real array of any shape, compared as float32.
      bins: number of bins.
      range: (low, high); the last bin holds `high` too, values outside and NaN are not counted.
    Returns:
      int32 [bins].
    Raises:
      KernelTypeError: no real array. KernelValueError: no bins, or low >= high.
    """
    low, high = (float(v) for v in range)
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise KernelTypeError(f"histogram: x is a real array, got {x.dtype.name}")
    if bins < 1 or not low < high:
        raise KernelValueError(f"histogram: needs at least one bin and low < high, got {bins} bins over {range}")
    if x.size == 0:
        return jnp.zeros((bins,), jnp.int32)
    return count(x.reshape(-1), bn=fit(x.size, machine().tile // 4), bins=bins, low=low, high=high)


def histogram_reference(x, *, bins: int, range: tuple[float, float]):
    """`histogram` in jnp."""
    at = _place(x.reshape(-1), bins, *map(float, range))
    return jnp.zeros((bins,), jnp.int32).at[at].add(1, mode="drop")
