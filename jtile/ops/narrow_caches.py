"""Attention over caches of e4m3 on GPUs: keys and values become float16, which one instruction makes of two of them,
where bfloat16 takes five. Of one token, or of tiles of tokens, a row; its keys have one order."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import fit, machine, tuned
from jtile.ops.attention_windows import LOG2_E, floordiv, scores
from jtile.ops.dispatch import first_unmet
from jtile.ops.flash_attention import NOTHING, normalised, online

CACHE, OPERANDS = jnp.dtype(jnp.float8_e4m3fn), "float16"
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100
_EXPONENT = 0x7F800000
_FEW = 16  # queries of a program that fill no tile of a warpgroup's product
USED = False  # an experiment: measured on no GPU yet
HALF_OF_FEW, HALF_OF_MANY = "both", "keys"


def _beyond(x):
    """Powers of two, each larger than x, and at most twice as large, for 0 <= x float32 (`_SMALLEST` for less)."""
    bits = jax.lax.bitcast_convert_type(jnp.clip(x, _SMALLEST, _LARGEST), jnp.int32) & jnp.int32(_EXPONENT)
    return 2.0 * jax.lax.bitcast_convert_type(bits, jnp.float32)


@jt.function
def _attended(q, k, v, lengths, table, scales, o, first, *, half: str, bk: int, scale: float, softcap, window, stages):
    """The body of both kernels: the attention of tile `first + program` of q [tiles, t, heads, d]. half: what becomes
    float16: "both", "keys" or "none"; the others become numbers of q's dtype."""
    # The formulas of flash_attention. Queries and weights are multiplied with powers of two, so that they are numbers
    # of float16 whatever their range is:     x = 2^e y     sum_j p_j u_j v_j = U sum_j (p_j u_j / U) v_j
    # u: scales of a block's values; U: a power of two beyond those of all blocks so far
    b, g = jt.program_id(0), jt.program_id(1)
    t, d, group = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    at_tile, slots = first + b, k.shape[1] * (1 if table is None else table.shape[1])
    K, V = k.tiles(None, bk, None, d), v.tiles(None, bk, None, d)
    of_keys, of_values = (x.tiles(None, None, bk) for x in scales)
    Q = q.tiles(None, t, group, d)[at_tile, 0, g, 0].reshape(t * group, d).astype(jnp.float32)
    keys, values = (OPERANDS if half in kinds else q.dtype for kinds in (("both", "keys"), ("both",)))
    factor = scale * (LOG2_E if softcap is None else 1.0)
    unit = None
    if half != "none":
        size = _beyond(abs(Q).max(1))
        Q, unit = Q * (1.0 / size)[:, None], size * factor
    Q = Q.astype(keys)
    length = jnp.clip(lengths[b], 0, slots)
    position = length - t + jt.arange(t * group)[:, None] // group
    begin = 0 if window is None else floordiv(jnp.maximum(length - t + 1 - window, 0), bk)
    end = jt.cdiv(length, bk)
    # blocks that every query sees whole
    plain = jnp.clip(floordiv(jnp.maximum(length - t + 1, 0), bk), begin, end) if window is None else begin

    def step(j, m, l, acc, U, edge: bool):
        of_page = jnp.int32(k.shape[1] // bk)
        row, at = (b, j) if table is None else (table[b, jax.lax.div(j, of_page)], jax.lax.rem(j, of_page))
        s = jt.dot(Q, K[row, at, g, 0].astype(keys).T) * of_keys[row, g, at][None, :]
        s = scores(s * (factor if unit is None else unit[:, None]), 1.0, softcap)
        V_j, u = V[row, at, g, 0].astype(values), of_values[row, g, at]
        if edge:
            columns = j * bk + jt.arange(bk)[None, :]
            seen = columns <= position
            seen = seen if window is None else seen & (columns > position - window)
            s = jnp.where(seen, s, -math.inf)
            V_j = jnp.where(length > columns.T, V_j, jnp.zeros((), V_j.dtype))
            u = jnp.where(length > columns[0], u, 0.0)
        if half != "both":
            return *online(s, V_j, m, l, acc, u), U
        top, now = jnp.maximum(m, s.max(1)), jnp.maximum(U, _beyond(u.max()))
        p, fade, over = jnp.exp2(s - top[:, None]), jnp.exp2(m - top), 1.0 / now
        weights = (p * (u * over)[None, :]).astype(values)
        return top, l * fade + p.sum(1), jt.dot(weights, V_j, acc * (fade * (U * over))[:, None]), now

    rows = t * group
    m, l, acc = jt.full((rows,), NOTHING, jnp.float32), jt.zeros((rows,), jnp.float32), jt.zeros((rows, d), jnp.float32)
    U = jnp.float32(_SMALLEST if half == "both" else 1.0)
    for j in jt.range(begin, plain, stages=stages):
        m, l, acc, U = step(j, m, l, acc, U, edge=False)
    for j in jt.range(plain, end):
        m, l, acc, U = step(j, m, l, acc, U, edge=True)
    y = normalised(acc, l) * U
    o.tiles(None, t, group, d)[at_tile, 0, g, 0] = y.reshape(t, group, d).astype(o.dtype)


def _grid(q, k, v, lengths, *_, **__):
    return lengths.shape[0], k.shape[2]


@jt.kernel(out_type=lambda q, *_, **__: jt.like(q), grid=_grid)
def narrow_rows(
    q, k, v, lengths, table, scales, o,
    *, half: str, bk: int, scale: float, softcap: float | None, window: int | None, stages: int,
):  # fmt: skip
    """Attention of the first n tiles of q [tiles, t, heads, d], those of lengths int32 [n]; the others of the output
    are not written. k, v, table, scales: see `decode_splits`."""
    options = {"half": half, "bk": bk, "scale": scale, "softcap": softcap, "window": window, "stages": stages}
    _attended(q, k, v, lengths, table, scales, o, jnp.int32(0), **options)


@jt.kernel(out_type=lambda q, *_, **__: jt.like(q), grid=_grid, alias={"into": "o"})
def narrow_tiles(
    q, k, v, lengths, table, scales, into, o,
    *, half: str, bk: int, scale: float, softcap: float | None, window: int | None, stages: int,
):  # fmt: skip
    """Attention of the last n tiles of q, those of lengths int32 [n]; those in front keep what `into` has."""
    options = {"half": half, "bk": bk, "scale": scale, "softcap": softcap, "window": window, "stages": stages}
    _attended(q, k, v, lengths, table, scales, o, jnp.int32(q.shape[0] - lengths.shape[0]), **options)


def misfit(q, k, scales) -> str | None:
    """Why `attention` cannot run this call, None where it can."""
    return first_unmet(
        (USED, "it is not used"),
        (not machine().whole, "the target is no GPU"),
        (bool(scales) and k.dtype == CACHE, f"the cache is {k.dtype.name}, not e4m3 with scales"),
        (q.dtype in (jnp.bfloat16, jnp.float16), f"queries are {q.dtype.name}, not 16-bit floats"),
    )


def attention(q, k, v, lengths, table, scales, into=None, *, scale: float, softcap: float | None, window: int | None):
    """`decode_attention` of the first tiles of q [tiles, t, heads, d] that have lengths, or, with `into`, an array like
    q, of the last ones, in its place.

    An H200 takes for 256 rows of 1152 keys and one token 153 us with a warp and 5 tiles of 32 keys under way in
    bfloat16; see docs/notes/attention.md.
    """
    few = q.shape[1] * q.shape[2] // k.shape[2] <= _FEW
    bk = fit(k.shape[1], 32 if few else 64)
    if table is not None:
        bk = max(x for x in range(1, min(bk, k.shape[1]) + 1) if k.shape[1] % x == 0)
    options = {"half": HALF_OF_FEW if few else HALF_OF_MANY, "bk": bk, "stages": 5 if few else 2}
    options |= {"scale": scale, "softcap": softcap, "window": window}
    how = {"num_warps": 1} if few else {"num_warps": 4, "specialize": False}
    if into is None:
        return tuned(narrow_rows, **how)(q, k, v, lengths, table, scales, **options)
    return tuned(narrow_tiles, **how)(q, k, v, lengths, table, scales, into, **options)
