"""Attention of prompts whose operands are rounded to integers of 16 bits, on CPUs whose tile registers multiply bytes.

Queries, keys and values stand as two bytes a number (`digit_rows`), those of keys and values once for all that see
them: keys with a scale each, and values with one for a block, so that weights become digits as they are: a weight is at
most 1, which is taken as the largest integer. The queries of all heads that share keys and values are the rows of one
tile.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import digit_rows
from jtile.ops._shapes import known, programs_at_once
from jtile.ops.attention_windows import LOG2_E, Window, at_edge, blocks
from jtile.ops.dispatch import first_unmet
from jtile.ops.online_softmax import NOTHING

_LOG2_TOP = math.log2(digit_rows.TOP)
_KEYS = {0: 64, 1024: 128}  # of a block, by how many there are
_ROWS = (192, 96)  # of a tile of queries, about: each tile brings keys and values to the order of tiles for itself
_PROGRAMS = 8  # for each core at least, if tiles are to be large: the later ones see more keys
LEAST = 64  # queries and keys: with fewer, tiles are not worth while


def _grid(q, high, *_, bq, **__):
    return q.shape[0], high.shape[2], jt.cdiv(q.shape[1], bq)


@jt.kernel(out_type=lambda q, *_, **__: jt.like(q), grid=_grid)
def digit_attention(
    q, k_high, k_low, k_scale, v_high, v_low, v_scale, o, *, bq: int, bk: int, scale: float, window: Window
):
    """q, o float32 [batch, t, heads, d]; digits of keys and values int8 [batch, s, kv heads, d], and the scales of keys
    [batch, s, kv heads] and of blocks of values [batch, s / bk, kv heads]."""
    b, kv, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    d, keys, group = q.shape[3], k_high.shape[1], q.shape[2] // k_high.shape[2]
    rows = bq * group
    Q = q.tiles(None, bq, group, d)[b, i, kv, 0].reshape(rows, d) * (scale * LOG2_E)
    q_high, q_low, q_scale = digit_rows.digits(Q)
    of = lambda x, j: x.tiles(None, bk, None, d)[b, j, kv, 0]
    of_key = lambda x, j: x.tiles(None, bk, None)[b, j, kv]
    first = i * bq
    lo, inner_lo, inner_hi, hi = blocks(first, bq, bk, keys, window)
    places = first + (jt.arange(rows) // group)[:, None]

    def step(j, m, l, acc, edge: bool):
        X = digit_rows.numbers(q_high, q_low) * q_scale
        K = digit_rows.numbers(of(k_high, j), of(k_low, j)) * of_key(k_scale, j)[:, None]
        s = jt.dot(X, K.T, precision="fast")
        if edge:
            s, _ = at_edge(s, None, j * bk, places, keys, window, cut=False)
        top = jnp.maximum(m, s.max(1))
        p = jnp.exp2(s - (top - _LOG2_TOP)[:, None])  # `TOP` times the weights
        fade = jnp.exp2(m - top)
        P = digit_rows.numbers(*digit_rows.bytes_of(p)) * v_scale[b, j, kv]
        V = digit_rows.numbers(of(v_high, j), of(v_low, j))
        return top, l * fade + p.sum(1), jt.dot(P, V, acc * fade[:, None], precision="fast")

    m, l, acc = jt.full((rows,), NOTHING), jt.zeros((rows,)), jt.zeros((rows, d))
    # From the last block of keys to the first, as in `flash_attention`.
    edges = jnp.clip(hi - inner_hi, 0, keys)
    inner = hi if window[0] is None else jnp.maximum(edges, hi - inner_lo)
    block = lambda r: jnp.maximum(hi - 1 - r, 0)
    for r in jt.range(edges):
        m, l, acc = step(block(r), m, l, acc, edge=True)
    for r in jt.range(edges, inner):
        m, l, acc = step(block(r), m, l, acc, edge=False)
    if window[0] is not None:
        for r in jt.range(inner, hi - lo):
            m, l, acc = step(block(r), m, l, acc, edge=True)
    y = acc * jnp.where(l == 0, 0.0, 1.0 / l)[:, None]
    o.tiles(None, bq, group, d)[b, i, kv, 0] = y.reshape(bq, group, d)


def attention(q, k, v, lengths, offsets, *, scale: float, softcap, window: Window, **_) -> jax.Array:
    """`ops.attention` of float32 q [batch, t, heads, d] and k, v [batch, s, kv heads, d], if `misfit` is None."""
    keys, bq = k.shape[1], _queries(q.shape, k.shape[2])
    bk = next(_KEYS[least] for least in sorted(_KEYS, reverse=True) if keys >= least)
    seen = keys if window[1] is None else min(keys, q.shape[1] + window[1])  # by queries: others may be zeros to come
    return digit_attention(q, *_digits(k, v, bk=bk, keys=seen), bq=bq, bk=bk, scale=scale, window=window)


def _queries(shape: tuple[int, ...], kv_heads: int) -> int:
    """The queries of a tile, for q of a shape."""
    batch, queries, heads, _ = shape
    large, small = (max(rows * kv_heads // heads // 16, 1) * 16 for rows in _ROWS)
    programs = batch * kv_heads * -(-queries // large)
    return large if programs >= _PROGRAMS * programs_at_once() else small


def _digit_types(k, v, *, keys: int, bk: int):
    def of(x, scales: int):
        bytes_of = jax.ShapeDtypeStruct((x.shape[0], keys, *x.shape[2:]), jnp.int8)
        return bytes_of, bytes_of, jax.ShapeDtypeStruct((x.shape[0], scales, x.shape[2]), jnp.float32)

    return *of(k, keys), *of(v, jt.cdiv(keys, bk))


def _blocks(k, v, *, keys: int, bk: int):
    return k.shape[0], jt.cdiv(keys, bk), k.shape[2]


@jt.kernel(out_type=_digit_types, grid=_blocks, name="key_value_digits")
def _digits(k, v, k_high, k_low, k_scale, v_high, v_low, v_scale, *, keys: int, bk: int):
    """Both digits of the first `keys` of k and v [batch, s, kv heads, d], and a scale for each key [batch, keys, kv
    heads] and for `bk` of the values [batch, keys / bk, kv heads]."""
    b, j, h = (jt.program_id(axis) for axis in range(3))
    tile = lambda ref: ref.tiles(None, bk, None, ref.shape[3])
    tile(k_high)[b, j, h, 0], tile(k_low)[b, j, h, 0], scales = digit_rows.digits(tile(k)[b, j, h, 0])
    k_scale.tiles(None, bk, None)[b, j, h] = scales[:, 0]
    V = tile(v)[b, j, h, 0]
    top = digit_rows.largest(V, (0, 1))
    tile(v_high)[b, j, h, 0], tile(v_low)[b, j, h, 0] = digit_rows.bytes_of(V * (digit_rows.TOP / top))
    v_scale[b, j, h] = top * (1 / digit_rows.TOP)


def misfit(q, k, v, lengths, offsets, *, softcap, **_) -> str | None:
    """Why `attention` does not take a call; None if it does."""
    with jt.config() as now:
        steady = now.steady
    return first_unmet(
        (lengths is None and offsets is None and softcap is None, "there are lengths, offsets or a softcap"),
        (all(isinstance(size, int) for size in q.shape + k.shape), "sizes are not known"),
        (q.dtype == jnp.float32 and q.shape[3] % 64 == 0, "heads are no whole tiles of float32"),
        (min(known(q.shape[1]), known(k.shape[1])) >= LEAST, "there are few queries or keys"),
        (not steady, "a row is to have the same bits in any company"),
    )
