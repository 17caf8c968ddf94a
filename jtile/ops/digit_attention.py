"""Attention of prompts whose operands are rounded to integers of 16 bits, on CPUs whose tile registers multiply bytes.

Rows of queries, keys and values stand as two bytes a number and a scale (`digit_rows`), those of keys and values once
for all that see them. The weights of a block of keys become such when they are known: they are at most one, times the
scales of the values. The queries of all heads that share keys and values are the rows of one tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import digit_rows
from jtile.ops._shapes import known
from jtile.ops.attention_windows import LOG2_E, Window, at_edge, blocks
from jtile.ops.dispatch import first_unmet

NOTHING = -1e30  # as in `flash_attention`
_TILES = {0: (48, 64), 1024: (96, 128)}  # by keys: rows of a tile of queries, about, and keys of a block
LEAST = 64  # queries and keys: with fewer, tiles are not worth while


def _grid(q, high, *_, bq, **__):
    return q.shape[0], high.shape[2], jt.cdiv(q.shape[1], bq)


@jt.kernel(out_type=lambda q, *_, **__: jt.like(q), grid=_grid)
def digit_attention(
    q, k_high, k_low, k_scale, v_high, v_low, v_scale, o, *, bq: int, bk: int, scale: float, window: Window
):
    """q, o float32 [batch, t, heads, d]; digits of keys and values int8 [batch, s, kv heads, d], and their scales
    [batch, s, kv heads]."""
    b, kv, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    d, keys, group = q.shape[3], k_high.shape[1], q.shape[2] // k_high.shape[2]
    keys = keys if window[1] is None else min(keys, q.shape[1] + window[1])  # that a query sees
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
        p = jnp.exp2(s - top[:, None])
        fade = jnp.exp2(m - top)
        unit = of_key(v_scale, j)
        most = jnp.max(unit)
        high, low = digit_rows.bytes_of(p * (unit * (digit_rows.TOP / most))[None, :])
        P = digit_rows.numbers(high, low) * jnp.broadcast_to(most * (1 / digit_rows.TOP), (rows, 1))
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
    group, keys = q.shape[2] // k.shape[2], k.shape[1]
    rows, bk = next(_TILES[least] for least in sorted(_TILES, reverse=True) if keys >= least)
    bq = max(rows // group // 16, 1) * 16
    return digit_attention(q, *_digits(k), *_digits(v), bq=bq, bk=bk, scale=scale, window=window)


def _digits(x):
    """Both digits of x [batch, s, kv heads, d], and their scales [batch, s, kv heads]."""
    high, low, scale = digit_rows.of_rows(x.reshape(-1, x.shape[-1]))
    return high.reshape(x.shape), low.reshape(x.shape), scale.reshape(x.shape[:-1])


def misfit(q, k, v, lengths, offsets, *, softcap, **_) -> str | None:
    """Why `attention` does not take a call; None if it does."""
    with jt.config() as now:
        steady = now.steady
    return first_unmet(
        (lengths is None and offsets is None and softcap is None, "there are lengths, offsets or a softcap"),
        (q.dtype == jnp.float32 and q.shape[3] % 64 == 0, "heads are no whole tiles of float32"),
        (min(known(q.shape[1]), known(k.shape[1])) >= LEAST, "there are few queries or keys"),
        (not steady, "a row is to have the same bits in any company"),
    )
