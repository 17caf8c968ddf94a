"""Functions of NumPy for XLA, where another form is quicker than that of `jax.numpy`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def roll(a: jax.Array, shift: int | tuple[int, ...], axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """`numpy.roll` by a choice between two padded parts: XLA's loops over that are vectorised, those over joined parts
    are not (ten steps of a reaction with diffusion on 1000 x 1000 elements: 57 ms, and 14 ms so)."""
    if axis is None:
        return roll(a.reshape(-1), shift, 0).reshape(a.shape)
    shifts = shift if isinstance(shift, tuple) else (shift,)
    axes = axis if isinstance(axis, tuple) else (axis,)
    if len(shifts) != len(axes) and 1 not in (len(shifts), len(axes)):
        return jnp.roll(a, shift, axis)
    count = max(len(shifts), len(axes))
    for by, along in zip(shifts * (count // len(shifts)), axes * (count // len(axes))):
        a = _rolled(a, by, range(a.ndim)[along])
    return a


def _rolled(a: jax.Array, by: int, axis: int) -> jax.Array:
    n = a.shape[axis]
    by = by % n if n else 0
    if by == 0:
        return a
    zero = jnp.zeros((), a.dtype)
    edges = lambda low, high: [(low, high, 0) if k == axis else (0, 0, 0) for k in range(a.ndim)]
    later = lax.pad(lax.slice_in_dim(a, 0, n - by, axis=axis), zero, edges(by, 0))
    first = lax.pad(lax.slice_in_dim(a, n - by, n, axis=axis), zero, edges(0, n - by))
    kind = "int16" if n < 2**15 else "int32" if n < 2**31 else "int64"
    return jnp.where(lax.broadcasted_iota(kind, a.shape, axis) >= jnp.asarray(by, kind), later, first)


def argmin(a: jax.Array, axis: int | None = None, *, keepdims: bool = False) -> jax.Array:
    """`numpy.argmin` by two reductions, which XLA vectorises: a million float64 take 0.3 ms, and 4.4 ms by its own."""
    return _first(a, jnp.min, axis, keepdims)


def argmax(a: jax.Array, axis: int | None = None, *, keepdims: bool = False) -> jax.Array:
    """`numpy.argmax` by two reductions."""
    return _first(a, jnp.max, axis, keepdims)


def _first(a: jax.Array, extreme: Callable, axis: int | None, keepdims: bool) -> jax.Array:
    """The index of the extreme, or of the first NaN."""
    if jnp.iscomplexobj(a) or not a.size:
        # The error makes the caller ask NumPy itself, which computes this or raises an error of its own.
        raise TypeError("NumPy orders complex numbers, and refuses to choose from none")
    flat = a.reshape(-1) if axis is None else a
    along = 0 if axis is None else range(a.ndim)[axis]
    best = extreme(flat, along, keepdims=True)
    hit = flat == best
    if jnp.issubdtype(a.dtype, jnp.inexact):
        hit = jnp.where(jnp.isnan(best), jnp.isnan(flat), hit)
    n = flat.shape[along]
    kind = "int32" if n < 2**31 - 1 else "int64"
    place = jnp.where(hit, lax.broadcasted_iota(kind, flat.shape, along), jnp.asarray(n, kind)).min(along)
    if not keepdims:
        return place
    return place.reshape((1,) * a.ndim) if axis is None else jnp.expand_dims(place, along)
