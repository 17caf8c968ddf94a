"""Scores by which a sparse attention chooses the keys of a query (the "lightning indexer": DeepSeek-V3.2, 2025)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import check_float, check_int, check_rank, check_shape, fit, machine, sums_in
from jtile.ops.cache_checks import check_vectors
from jtile.ops.split_attention import in_one_piece, place, slots_of


def _types(q, keys, weights, lengths, table, *_, **__):
    return jax.ShapeDtypeStruct((*q.shape[:2], slots_of(keys, table)), sums_in(q))


def _grid(q, keys, weights, lengths, table, *_, bq: int, bk: int, **__):
    return q.shape[0], jt.cdiv(q.shape[1], bq), jt.cdiv(slots_of(keys, table), bk)


@jt.kernel(out_type=_types, grid=_grid)
def index_tiles(q, keys, weights, lengths, table, scales, y, *, bq: int, bk: int):
    """q [batch, t, heads, d]; keys [batch, slots, d], or [pages, slots of a page, d] and table [batch, pages of a row],
    else None; weights float32 [batch, t, heads]; lengths int32 [batch]; scales float32 [batch or pages, slots], of keys
    of 8 bits, else None; y [batch, t, slots]. A program keeps `bk` keys for the `bq` queries of its tile."""
    # y_ij = sum_h w_ih max(q_ih . k_j, 0) for the keys j that query i sees
    b, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    t, Y = q.shape[1], y.tiles(None, None, bk)
    length = jnp.clip(lengths[b], 0, y.shape[2])
    columns = j * bk + jt.arange(bk)
    queries = bq if t % bq == 0 else jnp.minimum(bq, t - i * bq)
    if j * bk < length - t + jnp.minimum((i + 1) * bq, t):
        row, at = place(b, j, bk, keys, table)
        K = keys.tiles(None, bk, keys.shape[2])[row, at, 0].astype(q.dtype)
        unit = None if scales is None else scales.tiles(None, bk)[row, at]
        for x in jt.range(queries):
            n = i * bq + x
            s = jt.dot(K, q[b, n, :, :].T)
            of_keys = (jnp.maximum(s, 0) * weights[b, n, :].astype(s.dtype)[None, :]).sum(1)
            of_keys = of_keys if unit is None else of_keys * unit
            Y[b, n, j] = jnp.where(columns <= length - t + n, of_keys, -jnp.inf)
    else:
        for x in jt.range(queries):
            Y[b, i * bq + x, j] = jt.full((bk,), -jnp.inf, y.dtype)


@functools.partial(jax.jit, inline=True)
def index_scores(
    q: jax.Array,
    keys: jax.Array,
    weights: jax.Array,
    lengths: jax.Array,
    *,
    pages: jax.Array | None = None,
    scales: jax.Array | None = None,
) -> jax.Array:
    """For each of the newest tokens the scores of the keys up to its own: `sum_h weights_h max(q_h . key, 0)`.

    The scores of the heads are added up in registers; what is written is one number a query and key. Differentiable in
    q, weights, scales, and keys that have none; backwards with the scores of all heads.

    Args:
      q: float array [batch, t, heads, d], the last t tokens of each row.
      keys: float array of q's dtype [batch, slots, d], one key a token for all heads; with `pages` [pages, slots of a
        page, d]. With `scales` int8 or float8_e4m3fn.
      weights: float array [batch, t, heads].
      lengths: int [batch], slots in use, the new tokens included; token i of t stands in slot lengths - t + i.
      pages: int [batch, n], the pages of each row in order; those behind the length may be anything.
      scales: float32 [batch, slots], with `pages` [pages, slots of a page]: what a key of 8 bits is multiplied with.
    Returns:
      float32 [batch, t, slots] (float64 for float64); -inf for the keys behind a token's own.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit.
    """
    _check(q, keys, weights, lengths, pages, scales)
    slots = slots_of(keys, pages)
    if q.size == 0 or keys.size == 0 or slots == 0:
        seen = _seen(lengths, q.shape[1], slots)
        return jnp.where(seen, jnp.zeros(seen.shape, sums_in(q)), -jnp.inf)
    table = None if pages is None else pages.astype(jnp.int32)
    return _scores(q, keys, weights, lengths.astype(jnp.int32), table, scales)


def _check(q, keys, weights, lengths, pages, scales) -> None:
    op = "index_scores"
    check_float(op, q=q, weights=weights)
    check_int(op, lengths=lengths, pages=pages)
    check_rank(op, "q", q, 4, "[batch, t, heads, d]")
    check_shape(op, "weights", weights, q.shape[:3])
    check_shape(op, "lengths", lengths, q.shape[:1])
    check_vectors(op, "keys", "d", keys, scales, pages, q)


def _tiles(t: int, slots: int, paged: bool) -> dict[str, int]:
    """Queries and keys of a tile; a block of keys lies in one page."""
    bk = fit(slots, 128)
    if paged:
        bk = max(x for x in range(1, min(bk, slots) + 1) if slots % x == 0)
    return {"bq": fit(t, 32 if machine().whole else 16), "bk": bk}


@jax.custom_jvp
def _scores(q, keys, weights, lengths, table, scales):
    tiles = _tiles(q.shape[1], keys.shape[1], table is not None)
    return index_tiles(q, keys, weights, lengths, table, scales, **tiles)


@_scores.defjvp
def _scores_jvp(primals, tangents):
    """The derivative of the form that has the scores of all heads in memory."""
    q, keys, weights, lengths, table, scales = primals
    if scales is not None:
        scaled = lambda q, weights, scales: index_scores_reference(
            q, keys, weights, lengths, pages=table, scales=scales
        )
        return jax.jvp(scaled, (q, weights, scales), (tangents[0], tangents[2], tangents[5]))
    run = lambda q, keys, weights: index_scores_reference(q, keys, weights, lengths, pages=table)
    return jax.jvp(run, (q, keys, weights), tangents[:3])


def index_scores_reference(q, keys, weights, lengths, *, pages=None, scales=None):
    """`index_scores` in jnp, with the scores of all heads."""
    wide = sums_in(q)
    if scales is not None:
        keys = keys.astype(jnp.float32) * scales[..., None]
    keys = in_one_piece(jnp.asarray(keys, wide), pages)
    t, slots = q.shape[1], keys.shape[1]
    used = jnp.arange(slots, dtype=jnp.int32)[None, :] < jnp.asarray(lengths, jnp.int32)[:, None]
    keys = jnp.where(used[..., None], keys, 0)
    s = jnp.einsum("bthd,bsd->bths", q.astype(wide), keys, precision="highest")
    y = jnp.einsum("bths,bth->bts", jnp.maximum(s, 0), weights.astype(wide), precision="highest")
    return jnp.where(_seen(lengths, t, slots), y, -jnp.inf)


def _seen(lengths, t: int, slots: int):
    """Whether each of the newest t tokens of a row sees a slot: bool [batch, t, slots]."""
    last = jnp.clip(jnp.asarray(lengths), 0, slots).astype(jnp.int32)[:, None, None] - t
    tokens, columns = (jnp.arange(n, dtype=jnp.int32) for n in (t, slots))
    return columns[None, None, :] <= last + tokens[None, :, None]
