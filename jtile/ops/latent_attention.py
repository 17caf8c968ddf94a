"""Decode attention over a cache of latent vectors, which are keys and values at once (MLA: DeepSeek-V2, 2024)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_mla
from jtile.ops._shapes import check_float, check_int, check_rank, check_shape, fit, known, machine, sums_in, tuned
from jtile.ops.attention_windows import LOG2_E, floordiv, scores
from jtile.ops.cache_checks import check_values, check_vectors
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op
from jtile.ops.online_softmax import NOTHING, normalised, online
from jtile.ops.split_attention import combined, in_one_piece, place, slots_of, splits_of


def _types(q, cache, lengths, table, scales, *, splits: int, rank: int, **_):
    """Types of acc, m and l of every split, [batch, splits, rows(, rank)]; with one split that of the output alone."""
    batch, rows, _ = q.shape
    if splits == 1:
        return jt.like(q, shape=(batch, rows, rank))
    part = (batch, splits, rows)
    return tuple(jax.ShapeDtypeStruct(s, sums_in(q)) for s in ((*part, rank), part, part))


def _grid(q, cache, lengths, table, scales, *, splits: int, bm: int, **_):
    return q.shape[0], jt.cdiv(q.shape[1], bm), splits


@jt.kernel(out_type=_types, grid=_grid)
def mla_splits(
    q, cache, lengths, table, scales, o, m_part=None, l_part=None,
    *, heads: int, rank: int, splits: int, bm: int, bk: int, scale: float, stages: int = 2,
):  # fmt: skip
    """q [batch, t * heads, rank + rope]; cache [batch, slots, rank + rope], or [pages, slots of a page, rank + rope]
    and table [batch, pages of a row], else None; lengths int32 [batch]; scales float32 [batch or pages, slots], of
    entries of 8 bits, else None. Of several splits o is the part of each, unnormalised."""
    # s_ij = q_i . c_j     o_i = sum_j p_ij c_j[:rank] / l_i     as in flash_attention, for keys [lo, hi) of this split
    # C, R: tiles of the latent and the rotary part of the cache, QR: that of q; n: split; j: block of keys
    b, i, n = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    rows, rope = q.shape[1], cache.shape[2] - rank
    parts = lambda x, side: (x.tiles(None, side, rank), x.tiles(None, side, rope, step=(None, side, rank)))
    (C, R), (Q, QR) = parts(cache, bk), parts(q, bm)
    q_i, qr_i = Q[b, i, 0], QR[b, i, 1]
    length = jnp.clip(lengths[b], 0, slots_of(cache, table))
    t = rows // heads
    position = length - t + (i * bm + jt.arange(bm)[:, None]) // heads
    blocks = jt.cdiv(length, bk)
    share = jt.cdiv(blocks, splits)
    lo = jnp.minimum(n * share, blocks)
    hi = jnp.minimum(lo + share, blocks)
    plain = jnp.clip(floordiv(jnp.maximum(length - t + 1, 0), bk), lo, hi)  # blocks that every query sees whole

    def step(j, m, l, acc, edge: bool):
        row, at = place(b, j, bk, cache, table)
        c_j, r_j = C[row, at, 0].astype(q.dtype), R[row, at, 1].astype(q.dtype)
        unit = None if scales is None else scales.tiles(None, bk)[row, at]
        s = jt.dot(qr_i, r_j.T, jt.dot(q_i, c_j.T))
        s = scores(s if unit is None else s * unit[None, :], scale * LOG2_E, None)
        if edge:
            columns = j * bk + jt.arange(bk)[None, :]
            s = jnp.where(columns <= position, s, -math.inf)
            c_j = jnp.where(length > columns.T, c_j, jnp.zeros((), c_j.dtype))
            unit = None if unit is None else jnp.where(length > columns[0], unit, 0.0)
        return online(s, c_j, m, l, acc, unit)

    wide = sums_in(q)
    m, l, acc = jt.full((bm,), NOTHING, wide), jt.zeros((bm,), wide), jt.zeros((bm, rank), wide)
    for j in jt.range(lo, plain, stages=stages):
        m, l, acc = step(j, m, l, acc, edge=False)
    for j in jt.range(plain, hi):
        m, l, acc = step(j, m, l, acc, edge=True)
    if m_part is None or l_part is None:
        o.tiles(None, bm, rank)[b, i, 0] = normalised(acc, l).astype(q.dtype)
    else:
        o.tiles(None, None, bm, rank)[b, n, i, 0] = acc
        m_part.tiles(None, None, bm)[b, n, i] = m
        l_part.tiles(None, None, bm)[b, n, i] = l


@functools.partial(jax.jit, static_argnames=("rank", "scale", "splits"), inline=True)
def mla_decode(
    q: jax.Array,
    cache: jax.Array,
    lengths: jax.Array,
    *,
    rank: int = 512,
    pages: jax.Array | None = None,
    scales: jax.Array | None = None,
    scale: float | None = None,
    splits: int | None = None,
) -> jax.Array:
    """Causal attention of the newest tokens over a cache of latent vectors that holds them already (DeepSeek's MLA,
    the projections from and to the latent space absorbed into those around it).

    Differentiable in q, scales, and a cache that has none, not in lengths and pages; backwards with the whole matrix of
    scores.

    Args:
      q: float array [batch, heads, rank + rope], one token a row, or [batch, t, heads, rank + rope], the last t.
      cache: float array of q's dtype [batch, slots, rank + rope]: latent vectors, and behind them the keys' part with
        the rotary embedding, which all heads share; with `pages` [pages, slots of a page, rank + rope]. With `scales`
        int8 or float8_e4m3fn.
      lengths: int [batch], slots in use, the new tokens included; token i of t stands in slot lengths - t + i.
      rank: how many elements in front of a cache entry are values.
      pages: int [batch, n], the pages of each row in order; those behind the length may be anything.
      scales: float32 [batch, slots], with `pages` [pages, slots of a page]: what an entry of 8 bits is multiplied with.
      scale: of the scores; default 1 / sqrt(rank + rope). A model scales by the size of its heads before absorption.
      splits: programs that share the keys of one row; default by shape.
    Returns:
      [batch, (t,) heads, rank] of q's dtype, computed in float32 (float64 for float64); zeros where a token sees no
      key.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or options that do not fit.
    """
    if q.ndim == 3:
        options = {"rank": rank, "pages": pages, "scales": scales, "scale": scale, "splits": splits}
        return mla_decode(q[:, None], cache, lengths, **options)[:, 0]
    check_decode(q, cache, lengths, pages, scales, rank, splits)
    batch, t, heads, width = q.shape
    if q.size == 0 or cache.size == 0 or (pages is not None and pages.size == 0):
        return jnp.zeros((batch, t, heads, rank), q.dtype)
    scale = width**-0.5 if scale is None else float(scale)
    table = None if pages is None else pages.astype(jnp.int32)
    return _decode(q, cache, lengths.astype(jnp.int32), table, scales, rank, scale, splits)


def check_decode(q, cache, lengths, pages, scales, rank: int, splits: int | None) -> None:
    """Typed errors for operands of `mla_decode`, of q [batch, t, heads, rank + rope]."""
    check_float("mla_decode", q=q)
    check_int("mla_decode", lengths=lengths, pages=pages)
    check_rank("mla_decode", "q", q, 4, "[batch, heads, rank + rope] or [batch, t, heads, rank + rope]")
    check_shape("mla_decode", "lengths", lengths, q.shape[:1])
    check_vectors("mla_decode", "cache", "rank + rope", cache, scales, pages, q)
    check_values("mla_decode", q.shape[3], rank, splits)


def tiles_of(rows: int, slots: int, rank: int, itemsize: int, paged: bool) -> dict[str, int]:
    """Rows and keys of a tile; a block of keys lies in one page."""
    if machine().whole:
        sides = {"bm": fit(rows, 64), "bk": fit(slots, 64)}
    else:  # the sums of a tile of rows fill the registers of 8 warps
        held = (32768 if gpu_tiles.little_memory() else 65536) // max(rank * itemsize, 1)
        sides = {"bm": max(16, min(fit(rows, 64), held)), "bk": max(16, min(32, held // 2))}
    if paged:
        sides["bk"] = max(x for x in range(1, min(sides["bk"], slots) + 1) if slots % x == 0)
    return sides


@functools.partial(jax.custom_jvp, nondiff_argnums=(5, 6, 7))
def _decode(q, cache, lengths, table, scales, rank: int, scale: float, splits: int | None):
    return _op(q, cache, lengths, table, scales, rank=rank, scale=scale, splits=splits)


def _of_all_rows(q, cache, lengths, table, scales, *, rank: int, scale: float, **_):
    """The result of the kernel whose programs share out the keys of all rows; each device shares out its own."""
    entries, pages = ("b _ _", "") if table is None else ("_ _ _", ", b _")
    rule = f"b _ h _, {entries}, b{pages} -> b _ h _"
    return jt.partitioned(_of_a_device(rank, scale), rule)(q, cache, lengths, table)


@functools.lru_cache(maxsize=128)
def _of_a_device(rank: int, scale: float):
    def mla_of_keys(q, cache, lengths, table):
        return _op_of_a_device(q, cache, lengths, table, None, rank=rank, scale=scale)

    return mla_of_keys


def _in_splits(q, cache, lengths, table, scales, *, rank: int, scale: float, splits: int | None = None):
    batch, t, heads, _ = q.shape
    splits = _splits(q, cache, table, rank) if splits is None else splits
    parts = _parts(q, cache, lengths, table, scales, rank=rank, scale=scale, splits=splits)
    return parts.reshape(batch, t, heads, rank) if splits == 1 else combined(*parts, dtype=q.dtype.name)


def _sides(q, cache, table, rank: int) -> dict[str, int]:
    return tiles_of(known(q.shape[1] * q.shape[2]), cache.shape[1], rank, q.dtype.itemsize, table is not None)


def _splits(q, cache, table, rank: int) -> int:
    blocks = jt.cdiv(q.shape[1] * q.shape[2], _sides(q, cache, table, rank)["bm"])
    return splits_of(q.shape[0] * blocks, slots_of(cache, table))


def parts_of_entries(q, cache, lengths, table, scales, *, rank: int, scale: float, splits: int | None = None):
    """acc [batch, 1, splits, t, heads, rank], m and l of several splits, for callers that add further parts."""
    splits = max(_splits(q, cache, table, rank) if splits is None else splits, 2)
    return _parts(q, cache, lengths, table, scales, rank=rank, scale=scale, splits=splits)


def _parts(q, cache, lengths, table, scales, *, rank: int, scale: float, splits: int):
    """What `mla_splits` gives; where there are several splits, in the shapes that `combined` takes."""
    (batch, t, heads, width), tiles = q.shape, _sides(q, cache, table, rank)
    kernel = mla_splits if tiles["bm"] < 64 else tuned(mla_splits, num_warps=8)
    options = {"heads": heads, "rank": rank, "scale": scale, "splits": splits}
    parts = kernel(q.reshape(batch, t * heads, width), cache, lengths, table, scales, **options, **tiles)
    return parts if splits == 1 else [x.reshape(batch, 1, splits, t, heads, *x.shape[3:]) for x in parts]


_IN_SPLITS = Implementation("splits of each row's keys", _in_splits)
_op = Op("mla_decode", Implementation("shares of all keys", _of_all_rows, hopper_mla.misfit, BLOCK_LEVEL), _IN_SPLITS)
_op_of_a_device = Op(
    "mla_decode on a device",
    Implementation("shares of all keys", hopper_mla.decode, hopper_mla.misfit, BLOCK_LEVEL, portable=False),
    _IN_SPLITS,
)


@_decode.defjvp
def _decode_jvp(rank, scale, splits, primals, tangents):
    """The derivative of the form that has all scores in memory: the new tokens are few."""
    del splits
    q, cache, lengths, table, scales = primals
    options = {"rank": rank, "pages": table, "scale": scale}
    if scales is not None:
        scaled = lambda q, scales: mla_decode_reference(q, cache, lengths, scales=scales, **options)
        return jax.jvp(scaled, (q, scales), (tangents[0], tangents[4]))
    return jax.jvp(lambda q, cache: mla_decode_reference(q, cache, lengths, **options), (q, cache), tangents[:2])


def mla_decode_reference(q, cache, lengths, *, rank=512, pages=None, scales=None, scale=None, splits=None):
    """`mla_decode` in jnp, with the whole matrix of scores."""
    del splits
    if scales is not None:
        cache = (cache.astype(jnp.float32) * scales[..., None]).astype(q.dtype)
    if q.ndim == 3:
        return mla_decode_reference(q[:, None], cache, lengths, rank=rank, pages=pages, scale=scale)[:, 0]
    batch, t, _, width = q.shape
    dtype, wide = q.dtype, sums_in(q)
    cache = in_one_piece(cache, pages)
    slots = cache.shape[1]
    lengths = jnp.clip(lengths, 0, slots).astype(jnp.int32)[:, None, None]
    column = jnp.arange(slots, dtype=jnp.int32)[None, None, :]
    seen = column <= lengths - t + jnp.arange(t, dtype=jnp.int32)[None, :, None]
    cache = jnp.where((column < lengths).reshape(batch, slots, 1), cache, jnp.zeros((), dtype)).astype(wide)
    s = jnp.einsum("bthd,bsd->bhts", q.astype(wide), cache, precision="highest")
    s = s * (width**-0.5 if scale is None else scale)
    s = jnp.where(seen[:, None], s, -jnp.inf)
    p = jnp.nan_to_num(jax.nn.softmax(s, -1))  # the row of a token without keys is NaN
    return jnp.einsum("bhts,bsr->bthr", p, cache[..., :rank], precision="highest").astype(dtype)
