"""The places of the largest elements of rows, which CPUs find by counting, without a sort."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import as_rows, machine
from jtile.ops.dispatch import WARPS, Implementation, Op, first_unmet
from jtile.ops.sorting import order_of, top_k, top_k_reference

BITS = 2  # bits of the threshold that a pass over the row finds


@jt.kernel(
    out_type=lambda x, *, k, **_: jax.ShapeDtypeStruct((x.shape[0], k), jnp.int32), grid=lambda x, **_: x.shape[0]
)
def largest_places(x, places, *, k: int):
    """places [rows, k], ascending, of the k largest elements of each row of x [rows, n]; of equal elements the first
    ones."""
    # T = max { t : #{ j : key_j >= t } >= k }, from its highest bits on
    i, n = jt.program_id(0), x.shape[1]
    key = jax.lax.bitcast_convert_type(order_of(x.tiles(None, n)[i, 0]), jnp.uint32) ^ jnp.uint32(1 << 31)
    threshold = jnp.uint32(0)
    for p in jt.range(32 // BITS):
        shift = (32 - BITS - BITS * p).astype(jnp.uint32)
        digit = jnp.uint32(0)
        for d in range(1, 1 << BITS):
            many = (key >= threshold + (jnp.uint32(d) << shift)).astype(jnp.int32).sum() >= k
            digit = digit + many.astype(jnp.uint32)
        threshold = threshold + (digit << shift)
    above, equal = key > threshold, key == threshold
    needed = k - above.astype(jnp.int32).sum()
    chosen = above | (equal & (jnp.cumsum(equal.astype(jnp.int32)) <= needed))
    jt.store(places, (i, jnp.cumsum(chosen.astype(jnp.int32)) - 1), jt.arange(n), mask=chosen)


@functools.partial(jax.jit, static_argnames="k", inline=True)
def largest(x: jax.Array, k: int) -> jax.Array:
    """The places of the `k` largest elements along the last axis, in ascending order: those of `top_k`, whose order
    takes a sort.

    On CPUs a threshold is found by counting, two of its bits in a pass over the row; GPUs sort.

    Args:
      x: array [..., n]; NaN counts as the largest number.
      k: how many elements, from 0 to n.

    Returns:
      int32 [..., k]; of equal elements the first ones.

    Raises:
      KernelTypeError: a complex dtype. KernelValueError: `k` is not in [0, n], or `x` has rank 0.
    """
    if x.ndim == 0:
        raise KernelValueError("largest: x has rank 0 and no elements to choose from")
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise KernelTypeError(f"largest: {x.dtype.name} has no order")
    if not 0 <= k <= x.shape[-1]:
        raise KernelValueError(f"largest: k is between 0 and the row length {x.shape[-1]}, got {k}")
    rows = as_rows(x)
    if rows.shape[0] == 0 or k == 0:
        return jnp.zeros((*x.shape[:-1], k), jnp.int32)
    return _largest(rows, k=k).reshape(*x.shape[:-1], k)


def _uncounted(rows, **_) -> str | None:
    keyed = rows.dtype.itemsize < 4 or rows.dtype in (jnp.float32, jnp.int32)
    return first_unmet(
        (machine().whole, "programs of a GPU share no sums of a row, and one needs 18 ms for 65,536 numbers"),
        (keyed, f"{rows.dtype.name} has no key of 32 bits"),
    )


def _no_numbers(rows, **_) -> str | None:
    return first_unmet((rows.dtype != jnp.bool_, "XLA's top_k takes numbers"))


def _by_xla(rows, *, k: int):
    if jnp.issubdtype(rows.dtype, jnp.floating):  # XLA's order has two zeros, and NaNs at both ends
        rows = jnp.where(rows == 0, jnp.zeros((), rows.dtype), rows)
        rows = jnp.where(jnp.isnan(rows), jnp.full((), jnp.nan, rows.dtype), rows)
    return jnp.sort(jax.lax.top_k(rows, k)[1], axis=-1)


def _sorted(rows, *, k: int):
    return jnp.sort(top_k(rows, k)[1], axis=-1)


_largest = Op(
    "largest",
    Implementation("thresholds", largest_places, _uncounted),
    Implementation("XLA's top_k", _by_xla, _no_numbers, WARPS),
    Implementation("a sort", _sorted),
)


def largest_reference(x, k: int):
    """`largest` in jnp, by a sort."""
    return jnp.sort(top_k_reference(x, k)[1], axis=-1)
