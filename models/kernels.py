"""Kernels of the decoder beside those of `jtile.ops`: rotary positions fused with the operations around them.

Queries, keys and values leave the projection in one pass; in a decoding step they go straight into the cache.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.cache_appends import heads_of, put, rotated, slot_of, turned
from jtile.ops.cache_appends import rope_append as rope_append

from .host import on_host


def tiles_of_split(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    """How many positions and heads a program of `rope_split` takes: on GPUs as much as keeps its threads busy with two
    loads of 16 bytes each."""
    shared = math.gcd(heads, kv_heads)
    if on_host():
        return dict(bt=16, bh=shared)
    bh = math.gcd(shared, 8)
    return dict(bt=max(1, min(64, 2048 // (bh * jt.next_power_of_2(head_dim)))), bh=bh)


def _split_types(qkv, cos, sin, *, heads, kv_heads, slots=None, **_):
    batch, length, _, head_dim = qkv.shape
    sides = (length, heads), (slots or length, kv_heads), (slots or length, kv_heads)
    return tuple(jt.like(qkv, shape=(batch, *side, head_dim)) for side in sides)


def _split_grid(qkv, *_, bt, bh, slots=None, **__):
    return qkv.shape[0], jt.cdiv(slots or qkv.shape[1], bt), qkv.shape[2] // bh


@jt.kernel(out_type=_split_types, grid=_split_grid)
def rope_split(
    qkv, cos, sin, norms, q, k, v,
    *, heads: int, kv_heads: int, eps: float = 0.0, bt: int, bh: int, slots: int | None = None,
):  # fmt: skip
    """qkv [batch, length, heads + 2 kv_heads, head_dim], cos and sin float32 [length, head_dim / 2] -> rotated q
    and k, and v, in qkv's dtype. k and v have `slots` positions, by default `length`: zeros stand behind.

    norms: () or the weights [head_dim] of the RMS norms of queries and keys, which come before the rotation. A program
    has `bt` positions of `bh` heads, all of one kind; both halves of a head are tiles of their own."""
    # q_low = x_low cos - x_high sin     q_high = x_high cos + x_low sin
    b, t, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    half, queries, keys = cos.shape[-1], heads // bh, kv_heads // bh
    X, Q, K, V = (ref.tiles(None, bt, bh, half) for ref in (qkv, q, k, v))
    x = X[b, t, j, 0], X[b, t, j, 1]
    angles = cos.tiles(bt, half)[t, 0][:, None], sin.tiles(bt, half)[t, 0][:, None]
    if j < queries:
        y = _turned(x, angles, norms[0] if norms else None, eps)
        Q[b, t, j, 0], Q[b, t, j, 1] = (part.astype(q.dtype) for part in y)
    elif j < queries + keys:
        y, at = _turned(x, angles, norms[1] if norms else None, eps), j - queries
        K[b, t, at, 0], K[b, t, at, 1] = (part.astype(k.dtype) for part in y)
    else:
        at = j - queries - keys
        V[b, t, at, 0], V[b, t, at, 1] = x


def _turned(x, angles, weight, eps: float):
    """Both halves [..., half] of heads, float32, after their RMS norm, if there is a weight, and the rotation."""
    low, high = (y.astype(jnp.float32) for y in x)
    if weight is not None:
        half = low.shape[-1]
        squares = (low * low).sum(-1, keepdims=True) + (high * high).sum(-1, keepdims=True)
        unit, parts = jax.lax.rsqrt(squares * (0.5 / half) + eps), weight.tiles(half)
        low, high = (y * unit * parts[i].reshape((1,) * (low.ndim - 1) + (-1,)) for i, y in enumerate((low, high)))
    cos, sin = angles
    return low * cos - high * sin, high * cos + low * sin


def scales_of(largest, dtype):
    """(float32 scales that make `largest`, float32, the largest number of a dtype of 8 bits, what to multiply with)."""
    whole = jnp.issubdtype(dtype, jnp.integer)
    scales = largest * (1 / float(jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max))
    return scales, jnp.where(scales > 0, 1 / jnp.where(scales > 0, scales, 1.0), 0.0)


def rounded(x, dtype):
    """x, float32, rounded to a dtype of 8 bits."""
    return (jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x).astype(dtype)


def quantized(x, dtype):
    """(x [..., n] in int8 or float8_e4m3fn, the float32 scales [...] that give it back): the largest number of each n
    becomes the largest of the dtype."""
    (y,), scales = quantized_parts((x,), dtype)
    return y, scales


def quantized_parts(parts, dtype):
    """`quantized` for an array that is given in parts along its last axis: the parts of 8 bits, and the scales."""
    parts = [x.astype(jnp.float32) for x in parts]
    largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x), axis=-1) for x in parts))
    scales, unit = scales_of(largest, dtype)
    return [rounded(x * unit[..., None], dtype) for x in parts], scales


def _scaled_step_types(qkv, cos, sin, lengths, keys, values, key_scales, value_scales, *_, heads, **__):
    caches = (jt.like(x) for x in (keys, values, key_scales, value_scales))
    return jt.like(qkv, shape=(qkv.shape[0], heads, qkv.shape[2])), *caches


@jt.kernel(
    out_type=_scaled_step_types,
    grid=lambda qkv, *_, **__: (qkv.shape[0],),
    alias={name: f"new_{name}" for name in ("keys", "values", "key_scales", "value_scales")},
)
def rope_append_scaled(
    qkv, cos, sin, lengths, keys, values, key_scales, value_scales, norms, table,
    q, new_keys, new_values, new_key_scales, new_value_scales,
    *, heads: int, kv_heads: int, eps: float = 0.0, ring: bool = False,
):  # fmt: skip
    """Does what `rope_append` does for caches of 8 bits, which have scales float32 [batch or pages, kv_heads, slots]:
    see `quantized`."""
    p = jt.program_id(0)
    place, half = slot_of(p, qkv.shape[0], lengths, table, keys, ring), qkv.shape[2] // 2
    turn, row, at, there = (cos[p, :][None], sin[p, :][None]), *place
    whole, low, high = (slice(None),), slice(0, half), slice(half, 2 * half)
    if norms:
        R = rotated(heads_of(qkv[p, : heads + kv_heads, :], norms, heads, kv_heads, eps), *turn)
        q[p, :, :] = R[:heads].astype(q.dtype)
        sides, rows = whole, (R[heads:],)
    else:  # by halves, see `rope_append`
        of = lambda some: turned(*(qkv[p, some, side].astype(jnp.float32) for side in (low, high)), *turn)
        for side, value in zip((low, high), of(slice(0, heads)), strict=True):
            q[p, :, side] = value.astype(q.dtype)
        sides, rows = (low, high), of(slice(heads, heads + kv_heads))
    for cache, scales, parts, of_parts in (
        (new_keys, new_key_scales, rows, sides),
        (new_values, new_value_scales, (qkv[p, heads + kv_heads :, :],), whole),
    ):
        kept, scale = quantized_parts(parts, cache.dtype)
        for side, value in zip(of_parts, kept, strict=True):
            put(cache, place, value, slice(0, kv_heads), side)
        jt.store(scales, (row, slice(None), at), scale, mask=there)


HEADS = 8  # heads in one program of `latent_append` and `rotate_tail`


def _tail_type(x, cos, sin, *, dtype, **_):
    return jax.ShapeDtypeStruct(x.shape, dtype)


def _tail_grid(x, *_, bt, **__):
    return x.shape[0], jt.cdiv(x.shape[1], bt), jt.cdiv(x.shape[2], HEADS)


@jt.kernel(out_type=_tail_type, grid=_tail_grid)
def rotate_tail(x, cos, sin, y, *, dtype: str, bt: int = 8):
    """y: x [batch, length, heads, d + r] with the last r features of each head rotated by cos, sin [length, r / 2]."""
    b, t, h = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    half, d = cos.shape[1], x.shape[3] - 2 * cos.shape[1]
    C, S = cos.tiles(bt, half)[t, 0][:, None], sin.tiles(bt, half)[t, 0][:, None]
    tokens, heads = jt.ds(t * bt, bt), jt.ds(h * HEADS, HEADS)
    if d:
        y[b, tokens, heads, :d] = x[b, tokens, heads, :d].astype(dtype)
    y[b, tokens, heads, d:] = rotated(x[b, tokens, heads, d:].astype(jnp.float32), C, S).astype(dtype)


def _append_types(q, absorbed, entry, weight, cos, sin, lengths, cache, table, **_):
    return jax.ShapeDtypeStruct((*q.shape[:2], cache.shape[2]), cache.dtype), jt.like(cache)


@jt.kernel(
    out_type=_append_types,
    grid=lambda q, *_, **__: (q.shape[0], jt.cdiv(q.shape[1], HEADS)),
    alias={"cache": "new_cache"},
)
def latent_append(q, absorbed, entry, weight, cos, sin, lengths, cache, table, query, new_cache, *, eps: float):
    """Appends the next t tokens of each row. query [batch * t, heads, rank + r]: `absorbed` [batch * t, heads, rank],
    and behind it the last r features of q [batch * t, heads, d + r], turned by cos, sin [batch * t, r / 2]. The cache
    [batch, slots, rank + r], or that of pages, gets entry [batch * t, rank + r], normalised in front and turned behind,
    in place; lengths, table: see `slot_of`."""
    p, h = jt.program_id(0), jt.program_id(1)
    rank = absorbed.shape[2]
    C, S = cos[p, :][None], sin[p, :][None]
    _latent_query(p, h, q, absorbed, C, S, query)
    if h == 0:
        place = slot_of(p, q.shape[0], lengths, table, cache, ring=False)
        put(new_cache, place, _latent(p, entry, weight, eps), slice(rank))
        put(new_cache, place, _turned_keys(p, rank, entry, C, S), slice(rank, None))


def _latent_query(p, h, q, absorbed, C, S, query) -> None:
    rank, heads = absorbed.shape[2], jt.ds(h * HEADS, HEADS)
    d = q.shape[2] - (query.shape[2] - rank)
    query[p, heads, :rank] = absorbed[p, heads, :].astype(query.dtype)
    query[p, heads, rank:] = rotated(q[p, heads, d:].astype(jnp.float32), C, S).astype(query.dtype)


def _latent(p, entry, weight, eps: float):
    """The latent vector of token p after its norm, float32 [rank]."""
    rank = weight.shape[0]
    c = entry[p, :rank].astype(jnp.float32)
    return c * jax.lax.rsqrt((c * c).sum() * (1.0 / rank) + eps) * weight[:]


def _turned_keys(p, rank: int, entry, C, S):
    """The rotated part of the keys of token p, float32 [r]."""
    return rotated(entry[p, rank:][None].astype(jnp.float32), C, S)[0]


def _scaled_append_types(q, absorbed, entry, weight, cos, sin, lengths, cache, scales, table, **_):
    return jax.ShapeDtypeStruct((*q.shape[:2], cache.shape[2]), q.dtype), jt.like(cache), jt.like(scales)


@jt.kernel(
    out_type=_scaled_append_types,
    grid=lambda q, *_, **__: (q.shape[0], jt.cdiv(q.shape[1], HEADS)),
    alias={"cache": "new_cache", "scales": "new_scales"},
)
def latent_append_scaled(
    q, absorbed, entry, weight, cos, sin, lengths, cache, scales, table, query, new_cache, new_scales, *, eps: float
):
    """Does what `latent_append` does for a cache of 8 bits, with scales float32 [batch or pages, slots], one for a
    whole
    entry: see `quantized`; the query keeps the dtype of q."""
    p, h = jt.program_id(0), jt.program_id(1)
    rank = absorbed.shape[2]
    C, S = cos[p, :][None], sin[p, :][None]
    _latent_query(p, h, q, absorbed, C, S, query)
    if h == 0:
        row, at, there = slot_of(p, q.shape[0], lengths, table, cache, ring=False)
        c, r = _latent(p, entry, weight, eps), _turned_keys(p, rank, entry, C, S)
        largest = jnp.maximum(jnp.max(jnp.abs(c)), jnp.max(jnp.abs(r)))
        scale, unit = scales_of(largest, cache.dtype)
        put(new_cache, (row, at, there), rounded(c * unit, cache.dtype), slice(rank))
        put(new_cache, (row, at, there), rounded(r * unit, cache.dtype), slice(rank, None))
        jt.store(new_scales, (row, at), scale, mask=there)


def _index_key(p, projected, norm, bias, cos, sin, eps: float):
    """The key of token p for an indexer, float32: its features in front [d - r], and the turned ones behind [r]."""
    d, front = projected.shape[1], projected.shape[1] - 2 * cos.shape[1]
    parts = slice(front), slice(front, None)
    x = [projected[p, part].astype(jnp.float32) for part in parts]
    mean = (x[0].sum() + x[1].sum()) * (1.0 / d)
    x = [part - mean for part in x]
    unit = jax.lax.rsqrt(((x[0] * x[0]).sum() + (x[1] * x[1]).sum()) * (1.0 / d) + eps)
    plain, behind = (y * unit * norm[part] + bias[part] for y, part in zip(x, parts))
    return plain, rotated(behind[None], cos[p, :][None], sin[p, :][None])[0]


@jt.kernel(
    out_type=lambda projected, norm, bias, cos, sin, lengths, keys, table, **_: jt.like(keys),
    grid=lambda projected, *_, **__: projected.shape[0],
    alias={"keys": "new_keys"},
)
def index_append(projected, norm, bias, cos, sin, lengths, keys, table, new_keys, *, eps: float):
    """Appends the keys for an indexer of the next t tokens of each row, projected [batch * t, d], to keys [batch,
    slots, d], or those of pages, in place: their layer norm by `norm` and `bias`, float32 [d], and the last r features
    of that turned by cos, sin [batch * t, r / 2]. lengths, table: see `slot_of`."""
    p = jt.program_id(0)
    place = slot_of(p, projected.shape[0], lengths, table, keys, ring=False)
    plain, turned = _index_key(p, projected, norm, bias, cos, sin, eps)
    put(new_keys, place, plain, slice(plain.shape[0]))
    put(new_keys, place, turned, slice(plain.shape[0], None))


@jt.kernel(
    out_type=lambda projected, norm, bias, cos, sin, lengths, keys, scales, table, **_: (
        jt.like(keys),
        jt.like(scales),
    ),
    grid=lambda projected, *_, **__: projected.shape[0],
    alias={"keys": "new_keys", "scales": "new_scales"},
)
def index_append_scaled(
    projected, norm, bias, cos, sin, lengths, keys, scales, table, new_keys, new_scales, *, eps: float
):
    """Does what `index_append` does for keys of 8 bits, whose scales are float32 [batch or pages, slots]."""
    p = jt.program_id(0)
    row, at, there = slot_of(p, projected.shape[0], lengths, table, keys, ring=False)
    plain, turned = _index_key(p, projected, norm, bias, cos, sin, eps)
    scale, unit = scales_of(jnp.maximum(jnp.max(jnp.abs(plain)), jnp.max(jnp.abs(turned))), keys.dtype)
    put(new_keys, (row, at, there), rounded(plain * unit, keys.dtype), slice(plain.shape[0]))
    put(new_keys, (row, at, there), rounded(turned * unit, keys.dtype), slice(plain.shape[0], None))
    jt.store(new_scales, (row, at), scale, mask=there)
