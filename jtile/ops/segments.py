"""Sums, means, maxima and minima of the rows of each segment: without atomic additions, the same bits on every run."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, check_int, check_shape, fit, known, machine, programs_at_once, sums_in, tuned
from jtile.ops.dispatch import VECTOR_CORES, Implementation, Op, first_unmet
from jtile.ops.row_groups import as_int32

_FEW = 64  # the fewest rows of a part of a segment
_WIDE = 64  # columns of a row that a CPU adds up alone
_VECTORS = 1 << 17  # vectors of 16 elements that keep a core busy for as long as it takes to share work with another
_JOIN = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}
_OVER = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}


def _sums(dtype: Any) -> Any:
    return sums_in(jax.ShapeDtypeStruct((), dtype)) if jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(dtype)


def _neutral(dtype: Any, how: str) -> Any:
    """The number that changes no result: 0 for sums, the least (largest) of all for maxima (minima)."""
    if how == "sum":
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -math.inf if how == "max" else math.inf
    return jnp.iinfo(dtype).min if how == "max" else jnp.iinfo(dtype).max


def _type(data, *_, segments: int, parts: int, **__):
    return jax.ShapeDtypeStruct((parts, segments, data.shape[1]), _sums(data.dtype))


@jt.kernel(
    out_type=lambda ids, *, segments, **_: jt.like(ids, shape=(segments + 1,)),
    grid=lambda ids, *, segments, bs: jt.cdiv(segments + 1, bs),
)
def segment_starts(ids, starts, *, segments: int, bs: int):
    """starts [segments + 1] of ascending ids: how many ids are below s. A program searches for `bs` of them at once."""
    i, n = jt.program_id(0), ids.shape[0]
    s, low, high = i * bs + jt.arange(bs), jnp.zeros((bs,), jnp.int32), jnp.full((bs,), n, jnp.int32)
    for _ in jt.range(n.bit_length() if isinstance(n, int) else 31):
        middle = (low + high) // 2  # is n when low is
        below = (low < high) & (ids[middle] < s)
        low, high = jnp.where(below, middle + 1, low), jnp.where(below, high, middle)
    starts.tiles(bs)[i] = low


@jt.kernel(
    out_type=_type,
    grid=lambda data, *_, segments, parts, bf, **__: (segments, parts, jt.cdiv(data.shape[1], bf)),
)
def segment_runs(data, ids, order, starts, y, *, segments: int, parts: int, br: int, bf: int, how: str):
    """y [parts, segments, f] of data [n, f]: segment s has the rows `order[starts[s] : starts[s + 1]]`, or for None
    those of data itself. A program takes `br` rows at a time of one of the parts of a segment. Reverse mode
    reads cotangents by `ids` [n]."""
    # y_s = sum_{i : id_i = s} x_i, or their maximum or minimum
    del ids
    s, part, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    columns, join, nothing = jt.ds(j * bf, bf), _JOIN[how], _neutral(y.dtype, how)
    first, end = starts[s], starts[s + 1]
    if parts > 1:
        per = jax.lax.div(end - first + (parts - 1), jnp.int32(parts))
        first = first + part * per
        end = jnp.minimum(first + per, end)
    if br == 1:
        X, total = data.tiles(None, bf), jnp.full((bf,), nothing, y.dtype)
        for k in jt.range(first, end):
            total = join(total, X[k if order is None else order[k], j].astype(y.dtype))
    else:
        rows = jnp.full((br, bf), nothing, y.dtype)
        for k in jt.range(first, end, br):
            here = jt.ds(k, br)
            x = data[here if order is None else order[here], columns].astype(y.dtype)
            rows = join(rows, jnp.where((k + jt.arange(br) < end)[:, None], x, nothing))
        total = _OVER[how](rows, 0)
    y.tiles(None, None, bf)[part, s, j] = total


@functools.cache
def segment_columns(init: float, how: str) -> jt.Kernel:
    """The kernel that joins rows in the order in which they come, starting from `init`."""

    def segment_columns(data, ids, y, *, segments: int, parts: int, bf: int):
        """`segment_runs` for rows in any order: a program has `bf` columns of `y` for its part of the rows."""
        part, j = jt.program_id(0), jt.program_id(1)
        X, Y, n = data.tiles(None, bf), y.tiles(None, None, bf), data.shape[0]
        per = jt.cdiv(n, parts)
        for i in jt.range(part * per, jnp.minimum((part + 1) * per, n)):
            # the last row is that of ids which are in no segment; without a sign, those below 0 are the largest
            s = jnp.minimum(ids[i].astype(jnp.uint32), jnp.uint32(segments - 1)).astype(jnp.int32)
            Y[part, s, j] = _JOIN[how](Y[part, s, j], X[i, j].astype(y.dtype))

    grid = lambda data, *_, parts, bf, **__: (parts, jt.cdiv(data.shape[1], bf))
    kernel = jt.kernel(out_type=_type, grid=grid, init=init)(segment_columns)

    def forward(data, ids, **meta):
        y = kernel(data, ids, **meta)
        return y, (data, ids, None if how == "sum" else y[0])

    def backward(residuals, g, **_):
        data, ids, y = residuals
        return _backward(data, ids, y, g[0], how), None

    kernel.defvjp(forward, backward)
    return kernel


def _backward(data, ids, y, g, how: str):
    """The cotangent of data for that of one part of y; sums of parts have one cotangent for all of them."""
    from jtile.ops.embeddings import embedding  # imported here: its reverse mode calls this module

    if how == "sum":
        return embedding(g, ids).astype(data.dtype)
    shared = lambda rows: embedding(rows, ids)
    chosen = data.astype(y.dtype) == shared(y)
    ties = segment_sum(chosen.astype(g.dtype), ids, y.shape[0])
    return jnp.where(chosen, shared(g / jnp.maximum(ties, 1)), 0).astype(data.dtype)


def _runs_forward(data, ids, order, starts, *, how: str, **meta):
    y = segment_runs(data, ids, order, starts, how=how, **meta)
    return y, (data, ids, None if how == "sum" else y[0])


def _runs_backward(residuals, g, *, how: str, **_):
    data, ids, y = residuals
    return _backward(data, ids, y, g[0], how), None, None, None


segment_runs.defvjp(_runs_forward, _runs_backward)


def _starts_by_kernel(ids, *, segments: int):
    return segment_starts(ids, segments=segments, bs=fit(segments + 1, 256))


def _starts_by_xla(ids, *, segments: int):
    return jnp.searchsorted(ids, jnp.arange(segments + 1, dtype=jnp.int32)).astype(jnp.int32)


# Where the ids of each segment begin among sorted ids, int32 [segments + 1].
_starts = Op(
    "first ids of segments",
    Implementation("XLA's search", _starts_by_xla, None, VECTOR_CORES),  # the kernel has not been measured there
    Implementation("a search for each segment", _starts_by_kernel),
)


def _in_runs(data, ids, *, segments: int, how: str, in_order: bool):
    """The joined rows by runs of sorted ids."""
    order = None
    ordered = ids
    if not in_order:
        order = jnp.argsort(ids, stable=True).astype(jnp.int32)
        ordered = ids[order]
    starts = _starts(ordered, segments=segments)
    n, f = map(known, data.shape)
    rows = jt.cdiv(n, segments)
    bf = fit(f, 1024)
    # the sums of several vectors of one row stay in a CPU's registers, and do not wait for each other
    br = 1 if machine().whole and bf >= _WIDE else fit(rows, max(1, machine().row // bf))
    parts = jt.cdiv(machine().programs, segments * jt.cdiv(f, bf)) if how == "sum" else 1
    parts = max(1, min(parts, rows // max(_FEW, br)))
    kernel = tuned(segment_runs, num_warps=1) if br * bf <= 1024 else segment_runs
    return kernel(data, ids, order, starts, segments=segments, parts=parts, br=br, bf=bf, how=how)


def _in_columns(data, ids, *, segments: int, how: str, in_order: bool):
    n, f = map(known, data.shape)
    bf = min(f, 128)
    # Every part has a table of its own, which should stay in a cache: there are no more parts than cores.
    parts = programs_at_once() // jt.cdiv(f, bf) if how == "sum" else 1
    # The results of all parts are a fourth of the rows at most; and to begin a thread, and to add up, takes a while.
    parts = max(1, min(parts, n // (4 * segments), n * jt.cdiv(bf, 16) // _VECTORS))
    kernel = segment_columns(_neutral(_sums(data.dtype), how), how)
    y = kernel(data, ids, segments=segments + 1, parts=parts, bf=bf)  # one segment more for rows that are in none
    return functools.reduce(jnp.add, [part[:segments] for part in y])[None]


def _no_columns(data, ids, *, in_order: bool, **_) -> str | None:
    return first_unmet((machine().whole, "many programs would wait for few"), (not in_order, "the ids are in order"))


# The rows of each segment joined, [parts, segments, f]; ids are int32.
_joined = Op(
    "segments",
    Implementation("columns of rows in any order", _in_columns, _no_columns),
    Implementation("runs of sorted ids", _in_runs),
)


def _reduced(op: str, data, ids, num_segments: int, in_order: bool, how: str):
    """The rows of each segment joined, [num_segments, ...], in the dtype of sums."""
    _check(op, data, ids, num_segments)
    shape = (num_segments, *data.shape[1:])
    f = math.prod(data.shape[1:])
    if 0 in (*shape, data.shape[0]):
        return jnp.full(shape, _neutral(data.dtype, how), _sums(data.dtype))
    ids = as_int32(ids, num_segments)
    y = _joined(data.reshape(-1, f), ids, segments=num_segments, how=how, in_order=bool(in_order))
    return (y[0] if y.shape[0] == 1 else y.sum(0, dtype=y.dtype)).reshape(shape)


def sums_of_rows(data, ids, num_segments: int):
    """`segment_sum` in the dtype of the sums."""
    return _reduced("segment_sum", data, ids, num_segments, False, "sum")


def _check(op: str, data, ids, num_segments) -> None:
    check_int(op, ids=ids)
    if not hasattr(data, "dtype") or not (
        jnp.issubdtype(data.dtype, jnp.floating) or jnp.issubdtype(data.dtype, jnp.integer)
    ):
        got = data.dtype.name if hasattr(data, "dtype") else type(data).__name__
        raise KernelTypeError(f"{op}: data is a float or integer array, got {got}")
    if data.ndim == 0 or ids.ndim != 1:
        raise KernelValueError(
            f"{op}: data is [n, ...] and ids [n], got shapes {tuple(data.shape)} and {tuple(ids.shape)}"
        )
    check_shape(op, "ids", ids, data.shape[:1])
    if isinstance(num_segments, bool) or not isinstance(num_segments, int | np.integer) or num_segments < 0:
        raise KernelValueError(f"{op}: num_segments is an int, 0 or more, known when traced; got {num_segments!r}")


_STATIC = ("num_segments", "sorted")


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)
def segment_sum(data: jax.Array, ids: jax.Array, num_segments: int, *, sorted: bool = False) -> jax.Array:
    """The sum of the rows of each segment; `jax.ops.segment_sum` with an order of the terms that is always the same.

    Differentiable in data, whose gradient is a gather. GPUs sort ids that are not sorted; CPUs take the rows as they
    come.

    Args:
      data: float or integer array [n, ...].
      ids: int array [n], the segment of each row; rows whose id is not in [0, num_segments) count nowhere.
      num_segments: the number of segments.
      sorted: whether ids ascend; where they then do not, the result is undefined.
    Returns:
      [num_segments, ...] of data's dtype, added up in float32 (float64 for float64, integers in their dtype).
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit, no number of segments.
    """
    return _reduced("segment_sum", data, ids, num_segments, sorted, "sum").astype(data.dtype)


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)
def segment_mean(data: jax.Array, ids: jax.Array, num_segments: int, *, sorted: bool = False) -> jax.Array:
    """The mean of the rows of each segment, 0 for a segment without rows.

    Differentiable in data.

    Args:
      data: float array [n, ...].
      ids: int array [n], the segment of each row; rows whose id is not in [0, num_segments) count nowhere.
      num_segments: the number of segments.
      sorted: whether ids ascend; where they then do not, the result is undefined.
    Returns:
      [num_segments, ...] of data's dtype.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit, no number of segments.
    """
    check_float("segment_mean", data=data)
    total = _reduced("segment_mean", data, ids, num_segments, sorted, "sum")
    ones = jnp.ones(data.shape[:1], total.dtype)
    count = jnp.maximum(_reduced("segment_mean", ones, ids, num_segments, sorted, "sum"), 1)
    return (total / count.reshape(-1, *(1,) * (data.ndim - 1))).astype(data.dtype)


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)
def segment_max(data: jax.Array, ids: jax.Array, num_segments: int, *, sorted: bool = False) -> jax.Array:
    """The largest element of each segment and column, -inf (or the least integer) for a segment without rows.

    Differentiable in data: elements that are equally large share a cotangent.

    Args:
      data: float or integer array [n, ...].
      ids: int array [n], the segment of each row; rows whose id is not in [0, num_segments) count nowhere.
      num_segments: the number of segments.
      sorted: whether ids ascend; where they then do not, the result is undefined.
    Returns:
      [num_segments, ...] of data's dtype.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit, no number of segments.
    """
    return _reduced("segment_max", data, ids, num_segments, sorted, "max").astype(data.dtype)


@functools.partial(jax.jit, static_argnames=_STATIC, inline=True)
def segment_min(data: jax.Array, ids: jax.Array, num_segments: int, *, sorted: bool = False) -> jax.Array:
    """The smallest element of each segment and column, inf (or the largest integer) for a segment without rows.

    Differentiable in data: elements that are equally small share a cotangent.

    Args:
      data: float or integer array [n, ...].
      ids: int array [n], the segment of each row; rows whose id is not in [0, num_segments) count nowhere.
      num_segments: the number of segments.
      sorted: whether ids ascend; where they then do not, the result is undefined.
    Returns:
      [num_segments, ...] of data's dtype.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit, no number of segments.
    """
    return _reduced("segment_min", data, ids, num_segments, sorted, "min").astype(data.dtype)


def _by_masks(data, ids, num_segments: int, how: str):
    dtype = _sums(data.dtype)
    mine = ids[None, :] == jnp.arange(num_segments, dtype=ids.dtype)[:, None]
    mine = mine.reshape(*mine.shape, *(1,) * (data.ndim - 1))
    return _OVER[how](jnp.where(mine, data.astype(dtype)[None], jnp.asarray(_neutral(data.dtype, how), dtype)), 1)


def segment_sum_reference(data, ids, num_segments: int, *, sorted: bool = False):
    """`segment_sum` in jnp."""
    return _by_masks(data, ids, num_segments, "sum").astype(data.dtype)


def segment_mean_reference(data, ids, num_segments: int, *, sorted: bool = False):
    """`segment_mean` in jnp."""
    count = jnp.maximum(_by_masks(jnp.ones(data.shape, _sums(data.dtype)), ids, num_segments, "sum"), 1)
    return (_by_masks(data, ids, num_segments, "sum") / count).astype(data.dtype)


def segment_max_reference(data, ids, num_segments: int, *, sorted: bool = False):
    """`segment_max` in jnp."""
    return _by_masks(data, ids, num_segments, "max").astype(data.dtype)


def segment_min_reference(data, ids, num_segments: int, *, sorted: bool = False):
    """`segment_min` in jnp."""
    return _by_masks(data, ids, num_segments, "min").astype(data.dtype)
