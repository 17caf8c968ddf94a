"""Sorting and selection along the last axis."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import as_rows, of_rows, rows_per_tile
from jtile.ops.dispatch import WARPS, Implementation, Op, first_unmet


def _grid(x, *, br, **_):
    return jt.cdiv(x.shape[0], br)


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=_grid)
def sort_rows(x, y, *, br: int, descending: bool):
    """Rows of x [rows, n], `br` of them in a program."""
    i, n = jt.program_id(0), x.shape[1]
    X, Y = x.tiles(br, n), y.tiles(br, n)
    Y[i, 0] = jnp.sort(X[i, 0], axis=1, descending=descending)


@jt.kernel(out_type=lambda x, **_: jt.like(x, dtype=jnp.int32), grid=_grid)
def argsort_rows(x, y, *, br: int, descending: bool):
    """y: the places of the elements of x [rows, n] in sorted order; see `sort_rows`."""
    i, n = jt.program_id(0), x.shape[1]
    y.tiles(br, n)[i, 0] = jnp.argsort(x.tiles(br, n)[i, 0], axis=1, descending=descending).astype(jnp.int32)


@jt.kernel(
    out_type=lambda x, *, k, **_: tuple(jt.like(x, shape=(x.shape[0], k), dtype=d) for d in (x.dtype, jnp.int32)),
    grid=_grid,
)
def top_k_rows(x, values, places, *, br: int, k: int):
    """The `k` largest of each row, largest first, and where they stand."""
    i, n = jt.program_id(0), x.shape[1]
    best, where = jax.lax.top_k(x.tiles(br, n)[i, 0], k)
    values.tiles(br, k)[i, 0] = best
    places.tiles(br, k)[i, 0] = where


_FEW = 16  # up to so many elements are picked one after the other
_LONG = 8192  # elements of a row that a GPU holds at a time


def order_of(x):
    """Integers, int32, in the order of the elements x: -0 is 0, and every NaN is the largest."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32)
    x = x.astype(jnp.float32) + 0.0
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(jnp.isnan(x), jnp.int32(2**31 - 1), bits ^ ((bits >> 31) & jnp.int32(2**31 - 1)))


@jt.kernel(
    out_type=lambda x, *, k, **_: tuple(jt.like(x, shape=(x.shape[0], k), dtype=d) for d in (x.dtype, jnp.int32)),
    grid=_grid,
)
def top_k_picks(x, values, places, *, br: int, k: int):
    """`top_k_rows` for few elements: `k` times the largest key behind the last pick, then its first place."""
    # key_t = max { key_j : (key_j, -j) < (key_{t-1}, -j_{t-1}) }     j_t = the least such j with key_j = key_t
    i, n = jt.program_id(0), x.shape[1]
    row = x.tiles(br, n)[i, 0]
    key, column, least = order_of(row), jt.arange(n)[None, :], jnp.int32(-(2**31))
    last, at = jt.full((br, 1), 2**31 - 1, jnp.int32), jt.full((br, 1), -1, jnp.int32)
    for t in jt.range(k):
        left = (key < last) | ((key == last) & (column > at))
        last = jnp.where(left, key, least).max(1, keepdims=True)
        at = jnp.where(left & (key == last), column, n - 1).min(1, keepdims=True)
        places.tiles(br, None)[i, t] = at[:, 0]
        values.tiles(br, None)[i, t] = jnp.take_along_axis(row, at, axis=1)[:, 0]


_EACH_ROW = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1,),
    operand_batching_dims=(0,), scatter_indices_batching_dims=(0,),
)  # fmt: skip


@jt.kernel(out_type=lambda places, g, *, n, **_: jt.like(g, shape=(g.shape[0], n)), grid=_grid)
def scatter_rows(places, g, dx, *, br: int, n: int):
    """dx [rows, n] with g [rows, k] at the columns `places` (different ones in each row) and zeros elsewhere."""
    i, k = jt.program_id(0), g.shape[1]
    at, gradient = places.tiles(br, k)[i, 0], g.tiles(br, k)[i, 0]
    empty = jnp.zeros((br, n), dx.dtype)
    dx.tiles(br, n)[i, 0] = jax.lax.scatter(
        empty, at[..., None], gradient, _EACH_ROW, unique_indices=True, mode="promise_in_bounds"
    )


def _sort_forward(x, *, br: int, descending: bool):
    return sort_rows(x, br=br, descending=descending), argsort_rows(x, br=br, descending=descending)


def _sort_backward(places, g, *, br: int, descending: bool):
    del descending
    return (scatter_rows(places, g, br=br, n=places.shape[1]),)


def _top_k_forward(kernel, x, **meta):
    values, places = kernel(x, **meta)
    return (values, places), (places, x)


def _top_k_backward(residuals, cts, *, br: int, k: int):
    del k
    places, x = residuals
    return (scatter_rows(places, cts[0], br=br, n=x.shape[1]),)


sort_rows.defvjp(_sort_forward, _sort_backward)
top_k_rows.defvjp(functools.partial(_top_k_forward, top_k_rows), _top_k_backward)
top_k_picks.defvjp(functools.partial(_top_k_forward, top_k_picks), _top_k_backward)


def _rows(op: str, x):
    if x.ndim == 0:
        raise KernelValueError(f"{op}: x has rank 0 and nothing to sort")
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise KernelTypeError(f"{op}: {x.dtype.name} has no order")
    rows = as_rows(x)
    return rows, rows_per_tile(*rows.shape)


@functools.partial(jax.jit, static_argnames="descending", inline=True)
def sort(x: jax.Array, *, descending: bool = False) -> jax.Array:
    """Sort along the last axis.

    Args:
      x: array [..., n]; NaN counts as the largest number.
      descending: largest first.

    Returns:
      The sorted array. Differentiable in x, if it has a float dtype.

    Raises:
      KernelValueError: `x` has rank 0.
    """
    rows, br = _rows("sort", x)
    return x if x.size == 0 else sort_rows(rows, br=br, descending=descending).reshape(x.shape)


@functools.partial(jax.jit, static_argnames="descending", inline=True)
def argsort(x: jax.Array, *, descending: bool = False) -> jax.Array:
    """The indices that sort an array along its last axis; equal elements stay in their order (a stable sort).

    Args:
      x: array [..., n].
      descending: largest first.

    Returns:
      int32 [..., n].
    """
    rows, br = _rows("argsort", x)
    if x.size == 0:
        return jnp.zeros(x.shape, jnp.int32)
    return argsort_rows(rows, br=br, descending=descending).reshape(x.shape)


@functools.partial(jax.jit, static_argnames="k", inline=True)
def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The `k` largest elements along the last axis, largest first.

    Args:
      x: array [..., n].
      k: how many elements, from 0 to n.

    Returns:
      The values [..., k] in the dtype of x, and their indices, int32 [..., k]; of equal elements the first comes first.
      The values are differentiable in x, if it has a float dtype.

    Raises:
      KernelValueError: `k` is not in [0, n], or `x` has rank 0.
    """
    rows, br = _rows("top_k", x)
    if not 0 <= k <= x.shape[-1]:
        raise KernelValueError(f"top_k: k is between 0 and the row length {x.shape[-1]}, got {k}")
    shape = (*x.shape[:-1], k)
    if rows.shape[0] == 0 or k == 0:
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, jnp.int32)
    values, places = _top_k(rows, k=k, br=br)
    return values.reshape(shape), places.reshape(shape)


def _picks(rows, *, k: int, br: int):
    return of_rows(top_k_picks, rows, br, 4)(rows, br=br, k=k)


def _no_picks(rows, *, k: int, **_) -> str | None:
    keyed = rows.dtype.itemsize < 4 or rows.dtype in (jnp.float32, jnp.int32)
    return first_unmet(
        (k <= _FEW, f"{k} elements are more than {_FEW}"),
        (keyed, f"{rows.dtype.name} has no key of 32 bits"),
    )


def _sorted(rows, *, k: int, br: int):
    return top_k_rows(rows, br=br, k=k)


def _not_in_pieces(rows, **_) -> str | None:
    return first_unmet((rows.shape[1] > _LONG, f"a program holds rows of {rows.shape[1]}"))


def _in_pieces(rows, *, k: int, br: int):
    """The `k` largest of the `k` largest of each piece of a row: of equal elements, those of the first piece stand
    first."""
    n = rows.shape[1]
    pieces = jt.cdiv(n, _LONG)
    each = jt.cdiv(n, pieces)
    floating = jnp.issubdtype(rows.dtype, jnp.floating)
    least = -jnp.inf if floating else False if rows.dtype == jnp.bool_ else jnp.iinfo(rows.dtype).min
    padded = jnp.pad(rows, ((0, 0), (0, pieces * each - n)), constant_values=least)
    some = min(k, each)
    values, places = top_k(padded.reshape(-1, each), some)
    places = places.reshape(-1, pieces, some) + (jnp.arange(pieces, dtype=jnp.int32) * each)[None, :, None]
    best, at = top_k(values.reshape(-1, pieces * some), k)
    return best, jnp.take_along_axis(places.reshape(-1, pieces * some), at, axis=1)


_top_k = Op(
    "top_k",
    Implementation("pieces of long rows", _in_pieces, _not_in_pieces, WARPS),
    Implementation("picks", _picks, _no_picks),
    Implementation("sorted rows", _sorted),
)


def sort_reference(x, *, descending: bool = False):
    """`sort` in jnp."""
    return jnp.sort(x, axis=-1, descending=descending)


def argsort_reference(x, *, descending: bool = False):
    """`argsort` in jnp."""
    return jnp.argsort(x, axis=-1, descending=descending).astype(jnp.int32)


def top_k_reference(x, k: int):
    """`top_k` in jnp (jax.lax.top_k is not stable under XLA's CPU compiler)."""
    places = argsort_reference(x, descending=True)[..., :k]
    return jnp.take_along_axis(x, places, axis=-1), places
