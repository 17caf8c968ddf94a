"""Attention to chosen entries of a cache of latent vectors, a list for each query (DeepSeek-V3.2, 2025)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import dispatch, gpu_tiles
from jtile.ops._shapes import check_float, check_int, check_rank, check_shape, known, sums_in, tuned
from jtile.ops.attention_windows import LOG2_E
from jtile.ops.cache_checks import check_values, check_vectors
from jtile.ops.latent_attention import tiles_of
from jtile.ops.online_softmax import NOTHING, normalised, online
from jtile.ops.split_attention import combined, in_one_piece, splits_of


def _types(q, cache, places, counts, table, scales, *, splits: int, rank: int, **_):
    """Types of acc, m and l of every split, [batch, splits, t, heads(, rank)]; with one split that of the output."""
    batch, t, heads, _ = q.shape
    if splits == 1:
        return jt.like(q, shape=(batch, t, heads, rank))
    part = (batch, splits, t, heads)
    return tuple(jax.ShapeDtypeStruct(s, sums_in(q)) for s in ((*part, rank), part, part))


def _grid(q, *_, splits: int, bm: int, **__):
    return q.shape[0], q.shape[1] * jt.cdiv(q.shape[2], bm), splits


@jt.kernel(out_type=_types, grid=_grid)
def selected_latents(
    q, cache, places, counts, table, scales, o, m_part=None, l_part=None,
    *, rank: int, splits: int, bm: int, bk: int, scale: float, stages: int = 2,
):  # fmt: skip
    """q [batch, t, heads, rank + rope]; places int32 [batch, t, n], of which the first counts [batch, t] are slots;
    cache, table and scales as in `mla_splits`. Of several splits o is the part of each, unnormalised."""
    # s_ij = q_i . c_j     o_i = sum_j p_ij c_j[:rank] / l_i     for the keys j of the list of query i
    # P: tiles of places; n: split; r_j, qr_i: rotary parts
    b, i, n = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    of_token, rope = jnp.int32(jt.cdiv(q.shape[2], bm)), cache.shape[2] - rank
    token, h = jax.lax.div(i, of_token), jax.lax.rem(i, of_token)
    q_i = q.tiles(None, None, bm, rank)[b, token, h, 0]
    qr_i = q.tiles(None, None, bm, rope, step=(None, None, bm, rank))[b, token, h, 1]
    P, slots = places.tiles(None, None, bk), jnp.int32(cache.shape[1])
    front, behind = jt.arange(rank)[None, :], rank + jt.arange(rope)[None, :]
    count = jnp.clip(counts[b, token], 0, places.shape[2])
    blocks = jt.cdiv(count, bk)
    lo = jnp.minimum(n * jt.cdiv(blocks, splits), blocks)
    hi = jnp.minimum(lo + jt.cdiv(blocks, splits), blocks)
    whole = jnp.clip(jax.lax.div(count, jnp.int32(bk)), lo, hi)  # blocks without places behind the count

    def step(j, m, l, acc, edge: bool):
        at, listed = P[b, token, j], j * bk + jt.arange(bk) < count
        at = jnp.where(listed, at, 0) if edge else at
        row = b if table is None else table[b, jax.lax.div(at, slots)]
        at = at if table is None else jax.lax.rem(at, slots)
        here = (row, at[:, None]) if table is None else (row[:, None], at[:, None])
        mask = listed[:, None] if edge else None
        c_j = jt.load(cache, (*here, front), mask=mask).astype(q.dtype)
        r_j = jt.load(cache, (*here, behind), mask=mask).astype(q.dtype)
        unit = None if scales is None else jt.load(scales, (row, at), mask=listed if edge else None)
        s = jt.dot(qr_i, r_j.T, jt.dot(q_i, c_j.T))
        s = (s if unit is None else s * unit[None, :]) * (scale * LOG2_E)
        return online(jnp.where(listed[None, :], s, -math.inf) if edge else s, c_j, m, l, acc, unit)

    wide = sums_in(q)
    m, l, acc = jt.full((bm,), NOTHING, wide), jt.zeros((bm,), wide), jt.zeros((bm, rank), wide)
    for j in jt.range(lo, whole, stages=stages):
        m, l, acc = step(j, m, l, acc, edge=False)
    for j in jt.range(whole, hi):
        m, l, acc = step(j, m, l, acc, edge=True)
    if m_part is None or l_part is None:
        o.tiles(None, None, bm, rank)[b, token, h, 0] = normalised(acc, l).astype(q.dtype)
    else:
        o.tiles(None, None, None, bm, rank)[b, n, token, h, 0] = acc
        m_part.tiles(None, None, None, bm)[b, n, token, h] = m
        l_part.tiles(None, None, None, bm)[b, n, token, h] = l


@functools.partial(jax.jit, static_argnames=("rank", "scale", "splits"), inline=True)
def mla_selected(
    q: jax.Array,
    cache: jax.Array,
    places: jax.Array,
    counts: jax.Array,
    *,
    rank: int = 512,
    pages: jax.Array | None = None,
    scales: jax.Array | None = None,
    scale: float | None = None,
    splits: int | None = None,
) -> jax.Array:
    """Attention of tokens to the entries of a cache of latent vectors that a list names for each of them: `mla_decode`
    that reads no other entries (the sparse attention of DeepSeek-V3.2, over a prompt and in decoding).

    Differentiable in q, scales, and a cache that has none; backwards with the entries of all lists in memory.

    Args:
      q: float array [batch, t, heads, rank + rope].
      cache: float array of q's dtype [batch, slots, rank + rope]: latent vectors, and behind them the keys' part with
        the rotary embedding, which all heads share; with `pages` [pages, slots of a page, rank + rope]. With `scales`
        int8 or float8_e4m3fn.
      places: int [batch, t, n], slots of a row in any order, each at most once.
      counts: int [batch, t], how many places of a list count, from its front; the others may be anything.
      rank: how many elements in front of a cache entry are values.
      pages: int [batch, m], the pages of each row in order.
      scales: float32 [batch, slots], with `pages` [pages, slots of a page]: what an entry of 8 bits is multiplied with.
      scale: of the scores; default 1 / sqrt(rank + rope). A model scales by the size of its heads before absorption.
      splits: programs that share the list of one token; default by shape.
    Returns:
      [batch, t, heads, rank] of q's dtype, computed in float32 (float64 for float64); zeros for an empty list.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or options that do not fit.
    """
    _check(q, cache, places, counts, pages, scales, rank, splits)
    if 0 in (q.size, cache.size, places.size) or (pages is not None and pages.size == 0):
        return jnp.zeros((*q.shape[:3], rank), q.dtype)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    places, counts = places.astype(jnp.int32), counts.astype(jnp.int32)
    table = None if pages is None else pages.astype(jnp.int32)
    return _selected(q, cache, places, counts, table, scales, rank, scale, splits)


def _check(q, cache, places, counts, pages, scales, rank: int, splits: int | None) -> None:
    op = "mla_selected"
    check_float(op, q=q)
    check_int(op, places=places, counts=counts, pages=pages)
    check_rank(op, "q", q, 4, "[batch, t, heads, rank + rope]")
    check_rank(op, "places", places, 3, "[batch, t, n]")
    check_shape(op, "places", places, (*q.shape[:2], places.shape[2]))
    check_shape(op, "counts", counts, q.shape[:2])
    check_vectors(op, "cache", "rank + rope", cache, scales, pages, q)
    check_values(op, q.shape[3], rank, splits)


def _splits(parts: int, places: int) -> int:
    """The programs that share a list of one of `parts`. On a GPU there is one for each multiprocessor, if 64 places are
    left for it: one token of 128 heads takes 14 us so for 2048 places, and 47 in four splits; 16 tokens take 66 us in
    four splits, and 76 in eight (H200)."""
    if not dispatch.has(jt.target(), "warps"):
        return splits_of(parts, places)
    return min(max(gpu_tiles.processors() // parts, 1), jt.cdiv(places, 64))


@functools.partial(jax.custom_jvp, nondiff_argnums=(6, 7, 8))
def _selected(q, cache, places, counts, table, scales, rank: int, scale: float, splits: int | None):
    (batch, t, heads, _), n = q.shape, places.shape[2]
    sides = tiles_of(known(heads), known(n), rank, q.dtype.itemsize, paged=False)
    if splits is None:
        splits = _splits(known(batch) * known(t) * jt.cdiv(known(heads), sides["bm"]), known(n))
    kernel = selected_latents if sides["bm"] < 64 else tuned(selected_latents, num_warps=8)
    parts = kernel(q, cache, places, counts, table, scales, rank=rank, scale=scale, splits=splits, **sides)
    return parts if splits == 1 else combined(*(x[:, None] for x in parts), dtype=q.dtype.name)


@_selected.defjvp
def _selected_jvp(rank, scale, splits, primals, tangents):
    """The derivative of the form that has the entries of all lists in memory."""
    del splits
    q, cache, places, counts, table, scales = primals
    options = {"rank": rank, "pages": table, "scale": scale}
    if scales is not None:
        scaled = lambda q, scales: mla_selected_reference(q, cache, places, counts, scales=scales, **options)
        return jax.jvp(scaled, (q, scales), (tangents[0], tangents[5]))
    return jax.jvp(
        lambda q, cache: mla_selected_reference(q, cache, places, counts, **options), (q, cache), tangents[:2]
    )


def mla_selected_reference(q, cache, places, counts, *, rank=512, pages=None, scales=None, scale=None, splits=None):
    """`mla_selected` in jnp, with the entries of all lists."""
    del splits
    dtype, wide = q.dtype, sums_in(q)
    if scales is not None:
        cache = (cache.astype(jnp.float32) * scales[..., None]).astype(dtype)
    cache = in_one_piece(jnp.asarray(cache), pages)
    batch, t, n = places.shape
    listed = jnp.arange(n, dtype=jnp.int32)[None, None, :] < counts[..., None]
    at = jnp.where(listed, places, 0).reshape(batch, t * n, 1)
    entries = jnp.take_along_axis(cache, at, axis=1).reshape(batch, t, n, cache.shape[2])
    entries = jnp.where(listed[..., None], entries, jnp.zeros((), dtype)).astype(wide)
    s = jnp.einsum("bthd,btnd->bthn", q.astype(wide), entries, precision="highest")
    s = jnp.where(listed[:, :, None], s * (q.shape[3] ** -0.5 if scale is None else scale), -jnp.inf)
    p = jnp.nan_to_num(jax.nn.softmax(s, -1))  # the row of an empty list is NaN
    return jnp.einsum("bthn,btnr->bthr", p, entries[..., :rank], precision="highest").astype(dtype)
