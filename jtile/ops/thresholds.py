"""The places of the largest elements of rows, found by counting, not by sorting."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import as_rows, known, tuned
from jtile.ops.dispatch import WARPS, Implementation, Op, first_unmet
from jtile.ops.sorting import order_of, top_k, top_k_reference

LONG = 16384  # elements of a row that a program holds on a GPU: 16 in each of 1024 threads
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

    A threshold is found by counting, two of its bits in a pass over the row, which a program holds.

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


def _counted(rows, *, k: int):
    warps = min(max(jt.next_power_of_2(known(rows.shape[1])) // 512, 4), 32)
    return tuned(largest_places, num_warps=warps)(rows, k=k)


def _uncounted(rows, **_) -> str | None:
    keyed = rows.dtype.itemsize < 4 or rows.dtype in (jnp.float32, jnp.int32)
    return first_unmet((keyed, f"{rows.dtype.name} has no key of 32 bits"))


def _not_in_pieces(rows, *, k: int) -> str | None:
    n = rows.shape[1]
    return first_unmet(
        (isinstance(n, int), "sizes are not known"),
        (_uncounted(rows) is None, f"{rows.dtype.name} has no key of 32 bits"),
        (n > LONG, f"a program holds rows of {n}"),
        (2 * k <= LONG, f"the {k} largest of two pieces are more than a program holds"),
    )


def _in_pieces(rows, *, k: int):
    """The `k` largest of the `k` largest of each piece of a row."""
    n = rows.shape[1]
    pieces = jt.cdiv(n, LONG)
    each = jt.cdiv(n, pieces)
    floating = jnp.issubdtype(rows.dtype, jnp.floating)
    least = -jnp.inf if floating else False if rows.dtype == jnp.bool_ else jnp.iinfo(rows.dtype).min
    padded = jnp.pad(rows, ((0, 0), (0, pieces * each - n)), constant_values=least)
    some = min(k, each)
    places = largest(padded.reshape(-1, each), some).reshape(-1, pieces, some)
    places = (places + (jnp.arange(pieces, dtype=jnp.int32) * each)[None, :, None]).reshape(-1, pieces * some)
    at = largest(jnp.take_along_axis(padded, places, axis=1), k)
    return jnp.take_along_axis(places, at, axis=1)


def _sorted(rows, *, k: int):
    return jnp.sort(top_k(rows, k)[1], axis=-1)


_largest = Op(
    "largest",
    Implementation("pieces of long rows", _in_pieces, _not_in_pieces, WARPS),
    Implementation("thresholds", _counted, _uncounted),
    Implementation("a sort", _sorted),
)


def largest_reference(x, k: int):
    """`largest` in jnp, by a sort."""
    return jnp.sort(top_k_reference(x, k)[1], axis=-1)
