"""Attention of a server's step over caches of 8 bits on GPUs, whose keys are in no parts: tokens that stand alone, and
tiles of prompts behind them, which two kernels write into one array."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import fit, machine, tuned
from jtile.ops.attention_windows import LOG2_E, floordiv, scores
from jtile.ops.dispatch import first_unmet, vector_cores
from jtile.ops.flash_attention import NOTHING, normalised, online

_FEW = 16  # queries of a program that fill no tile of a warpgroup's product


@jt.function
def _attended(q, k, v, lengths, table, scales, o, first, *, bk: int, scale: float, softcap, window, stages: int):
    """The body of both kernels: the attention of tile `first + program` of q [tiles, t, heads, d]."""
    # The formulas of flash_attention; token i's query is at position length - t + i.
    # u: scales of a block's values
    b, g = jt.program_id(0), jt.program_id(1)
    t, d, group = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    K, V = k.tiles(None, bk, None, d), v.tiles(None, bk, None, d)
    of_keys, of_values = (x.tiles(None, None, bk) for x in scales)
    Q = q.tiles(None, t, group, d)[first + b, 0, g, 0].reshape(t * group, d)
    length = jnp.clip(lengths[b], 0, k.shape[1] * table.shape[1])
    position = length - t + jt.arange(t * group)[:, None] // group
    begin = 0 if window is None else floordiv(jnp.maximum(length - t + 1 - window, 0), bk)
    end = jt.cdiv(length, bk)
    # blocks that every query sees whole
    plain = jnp.clip(floordiv(jnp.maximum(length - t + 1, 0), bk), begin, end) if window is None else begin

    def step(j, m, l, acc, edge: bool):
        of_page = jnp.int32(k.shape[1] // bk)
        row, at = table[b, jax.lax.div(j, of_page)], jax.lax.rem(j, of_page)
        s = jt.dot(Q, K[row, at, g, 0].astype(q.dtype).T) * of_keys[row, g, at][None, :]
        s = scores(s, scale if softcap is not None else scale * LOG2_E, softcap)
        V_j, u = V[row, at, g, 0].astype(q.dtype), of_values[row, g, at]
        if edge:
            columns = j * bk + jt.arange(bk)[None, :]
            seen = columns <= position
            seen = seen if window is None else seen & (columns > position - window)
            s = jnp.where(seen, s, -math.inf)
            V_j = jnp.where(length > columns.T, V_j, jnp.zeros((), V_j.dtype))
            u = jnp.where(length > columns[0], u, 0.0)
        return online(s, V_j, m, l, acc, u)

    rows = t * group
    m, l, acc = jt.full((rows,), NOTHING, jnp.float32), jt.zeros((rows,), jnp.float32), jt.zeros((rows, d), jnp.float32)
    for j in jt.range(begin, plain, stages=stages):
        m, l, acc = step(j, m, l, acc, edge=False)
    for j in jt.range(plain, end):
        m, l, acc = step(j, m, l, acc, edge=True)
    o.tiles(None, t, group, d)[first + b, 0, g, 0] = normalised(acc, l).reshape(t, group, d).astype(o.dtype)


def _grid(q, k, v, lengths, *_, **__):
    return lengths.shape[0], k.shape[2]


@jt.kernel(out_type=lambda q, *_, **__: jt.like(q), grid=_grid)
def narrow_rows(
    q, k, v, lengths, table, scales, o, *, bk: int, scale: float, softcap: float | None, window: int | None, stages: int
):  # fmt: skip
    """Attention of the first n tiles of q [tiles, t, heads, d], those of lengths int32 [n]; the others of the output
    are not written. k, v, table, scales: see `decode_splits`."""
    options = {"bk": bk, "scale": scale, "softcap": softcap, "window": window, "stages": stages}
    _attended(q, k, v, lengths, table, scales, o, jnp.int32(0), **options)


@jt.kernel(out_type=lambda q, *_, **__: jt.like(q), grid=_grid, alias={"into": "o"})
def narrow_tiles(
    q, k, v, lengths, table, scales, into, o,
    *, bk: int, scale: float, softcap: float | None, window: int | None, stages: int,
):  # fmt: skip
    """Attention of the last n tiles of q, those of lengths int32 [n]; those in front keep what `into` has."""
    options = {"bk": bk, "scale": scale, "softcap": softcap, "window": window, "stages": stages}
    _attended(q, k, v, lengths, table, scales, o, jnp.int32(q.shape[0] - lengths.shape[0]), **options)


def misfit(q, k, scales) -> str | None:
    """Why `attention` cannot run this call, None where it can."""
    return first_unmet(
        (not machine().whole and not vector_cores(), "the target is no GPU"),
        (bool(scales), f"the cache is {k.dtype.name}, without scales"),
        (q.dtype in (jnp.bfloat16, jnp.float16), f"queries are {q.dtype.name}, not 16-bit floats"),
    )


def attention(q, k, v, lengths, table, scales, into=None, *, scale: float, softcap: float | None, window: int | None):
    """`decode_attention` in pages of the first tiles of q [tiles, t, heads, d] that have lengths, or, with `into`, an
    array like q, of the last ones, in its place.

    An H200 takes for 256 rows of 1152 keys and one token 153 to 164 us with a warp and 5 tiles of 32 keys under way;
    for 8192 tokens of prompts of 1024 in tiles of 32 tokens, and so 128 queries, 305; see docs/notes/attention.md.
    """
    few, page = q.shape[1] * q.shape[2] // k.shape[2] <= _FEW, k.shape[1]
    most = min(fit(page, 32 if few else 64), page)
    bk = max(x for x in range(1, most + 1) if page % x == 0)
    options = {"bk": bk, "scale": scale, "softcap": softcap, "window": window, "stages": 5 if few else 2}
    how = {"num_warps": 1} if few else {"num_warps": 4, "specialize": False}
    if into is None:
        return tuned(narrow_rows, **how)(q, k, v, lengths, table, scales, **options)
    return tuned(narrow_tiles, **how)(q, k, v, lengths, table, scales, into, **options)
