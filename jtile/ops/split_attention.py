"""Attention of the newest tokens over a long key-value cache, its keys split among programs (flash decoding, 2023)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops import gpu_tiles, spaces
from jtile.ops._shapes import check_rank, fit, known, machine, sums_in, tuned
from jtile.ops.attention_windows import LOG2_E, floordiv, scores
from jtile.ops.flash_attention import NOTHING, attention, attention_reference, check_operands, normalised, online

_SHORTEST_SPLIT = 256  # keys of a program


def splits_of(parts: int, slots: int) -> int:
    """Programs that share the keys of one of `parts`: enough for the machine; on a GPU no more than run at a time."""
    m = machine()
    if m.whole:
        return min(jt.cdiv(m.programs, parts), jt.cdiv(slots, _SHORTEST_SPLIT))
    return min(max(m.programs // 4 // parts, 1), jt.cdiv(slots, 2 * _SHORTEST_SPLIT))


def _types(q, k, v, lengths, *, splits, **_):
    """acc, m and l of every split, [batch, kv heads, splits, t, group(, d)]; with one split just the output."""
    batch, t, heads, d = q.shape
    if splits == 1:
        return jt.like(q)
    part = (batch, k.shape[2], splits, t, heads // k.shape[2])
    return tuple(jax.ShapeDtypeStruct(s, sums_in(q)) for s in ((*part, d), part, part))


def _grid(q, k, v, lengths, *, splits, **_):
    return q.shape[0], k.shape[2], splits


@jt.autotune(space=spaces.splits, data=spaces.full_cache, override=True)
@jt.kernel(out_type=_types, grid=_grid)
def decode_splits(
    q, k, v, lengths, *out,
    splits: int, bk: int, scale: float, softcap: float | None, window: int | None, stages: int = 3,
):  # fmt: skip
    """q [batch, t, heads, d]; k, v [batch, slots, kv heads, d]; lengths int32 [batch]."""
    # as in flash_attention, for keys [lo, hi) of this split; the query of token i stands at position length - t + i
    b, g, n = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    t, d, group = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    K, V = k.tiles(None, bk, None, d), v.tiles(None, bk, None, d)
    Q = q.tiles(None, t, group, d)[b, 0, g, 0].reshape(t * group, d)
    length = jnp.clip(lengths[b], 0, k.shape[1])
    position = length - t + jt.arange(t * group)[:, None] // group
    begin = 0 if window is None else floordiv(jnp.maximum(length - t + 1 - window, 0), bk)
    end = jt.cdiv(length, bk)
    share = jt.cdiv(end - begin, splits)
    lo = jnp.minimum(begin + n * share, end)
    hi = jnp.minimum(lo + share, end)
    plain = (
        jnp.clip(floordiv(jnp.maximum(length - t + 1, 0), bk), lo, hi) if window is None else lo
    )  # blocks that every query sees whole

    def step(j, m, l, acc, edge: bool):
        s = scores(jt.dot(Q, K[b, j, g, 0].T), scale if softcap is not None else scale * LOG2_E, softcap)
        v_j = V[b, j, g, 0]
        if edge:
            columns = j * bk + jt.arange(bk)[None, :]
            seen = columns <= position
            seen = seen if window is None else seen & (columns > position - window)
            s = jnp.where(seen, s, -math.inf)
            v_j = jnp.where(length > columns.T, v_j, jnp.zeros((), v_j.dtype))
        return online(s, v_j, m, l, acc)

    rows, wide = t * group, sums_in(q)
    m, l, acc = jt.full((rows,), NOTHING, wide), jt.zeros((rows,), wide), jt.zeros((rows, d), wide)
    for j in jt.range(lo, plain, stages=stages):
        m, l, acc = step(j, m, l, acc, edge=False)
    for j in jt.range(plain, hi):
        m, l, acc = step(j, m, l, acc, edge=True)
    if splits == 1:
        out[0].tiles(None, t, group, d)[b, 0, g, 0] = normalised(acc, l).reshape(t, group, d).astype(q.dtype)
    else:
        out[0][b, g, n] = acc.reshape(t, group, d)
        out[1][b, g, n] = m.reshape(t, group)
        out[2][b, g, n] = l.reshape(t, group)


@jt.kernel(
    out_type=lambda acc, m, l, *, dtype: jax.ShapeDtypeStruct(
        (acc.shape[0], acc.shape[3], acc.shape[1] * acc.shape[4], acc.shape[5]), dtype
    ),
    grid=lambda acc, m, l, **_: acc.shape[:2],
)
def combine_splits(acc, m, l, o, *, dtype: str):
    """o [batch, t, heads, d] from the parts that `decode_splits` gives."""
    # o = sum_n 2^(m_n - M) acc_n / sum_n 2^(m_n - M) l_n     M = max_n m_n
    b, g = jt.program_id(0), jt.program_id(1)
    t, group, d = acc.shape[3:]
    m_n = m[b, g]
    w = jnp.exp2(m_n - m_n.max(0)[None])
    total = (w * l[b, g]).sum(0)
    y = (w[..., None] * acc[b, g]).sum(0) * jnp.where(total == 0, 0.0, 1.0 / total)[..., None]
    o.tiles(None, t, group, d)[b, 0, g, 0] = y.astype(o.dtype)


@jt.kernel(
    out_type=lambda acc, m, l, *, dtype: jax.ShapeDtypeStruct((*acc.shape[:2], *acc.shape[3:]), dtype),
    grid=lambda acc, m, l, **_: (*acc.shape[:2], acc.shape[3] * acc.shape[4]),
)
def combine_splits_of_rows(acc, m, l, o, *, dtype: str):
    """As `combine_splits` with a program for each query: o [batch, kv heads, t, group, d]."""
    b, g, row = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    group = jnp.int32(acc.shape[4])
    i, h = jax.lax.div(row, group), jax.lax.rem(row, group)
    m_n = m[b, g, :, i, h]
    w = jnp.exp2(m_n - m_n.max())
    total = (w * l[b, g, :, i, h]).sum()
    y = (w[:, None] * acc[b, g, :, i, h]).sum(0) * jnp.where(total == 0, 0.0, 1.0 / total)
    o[b, g, i, h] = y.astype(o.dtype)


def combined(parts, dtype: str):
    """o [batch, t, heads, d] of the parts of the splits."""
    if machine().whole:
        return combine_splits(*parts, dtype=dtype)
    o = tuned(combine_splits_of_rows, num_warps=4)(*parts, dtype=dtype)
    return o.transpose(0, 2, 1, 3, 4).reshape(o.shape[0], o.shape[2], -1, o.shape[4])


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "window", "splits"), inline=True)
def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    splits: int | None = None,
) -> jax.Array:
    """Causal attention of the newest tokens over a key-value cache that holds them already.

    Differentiable in q, k and v, not in lengths; as `attention` over the slots in use.

    Args:
      q: float array [batch, heads, d], one token a row, or [batch, t, heads, d], the last t tokens.
      k, v: the cache, float arrays [batch, slots, kv_heads, d]; kv_heads divides heads.
      lengths: int [batch], slots in use, the new tokens included; token i of t stands in slot lengths - t + i.
      scale: default 1 / sqrt(d).
      softcap: scores become `softcap * tanh(score / softcap)`.
      window: a token sees its `window` newest keys, itself included.
      splits: programs that share the keys of one row and head group; default by shape.
    Returns:
      An array like `q`, computed in float32 (float64 for float64); a token that sees no key gives zeros.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or options that do not fit.
    """
    if q.ndim == 3:
        options = {"scale": scale, "softcap": softcap, "window": window, "splits": splits}
        return decode_attention(q[:, None], k, v, lengths, **options)[:, 0]
    check_rank("decode_attention", "q", q, 4, "[batch, heads, d] or [batch, t, heads, d]")
    check_operands("decode_attention", q, k, v, lengths=lengths)
    if window is not None and window < 1:
        raise KernelValueError(f"decode_attention: a window is at least 1, got {window}")
    if q.size == 0 or k.size == 0:
        return jnp.zeros(q.shape, q.dtype)
    batch, slots, groups = k.shape[:3]
    splits = splits_of(batch * groups, slots) if splits is None else splits
    if splits < 1:
        raise KernelValueError(f"decode_attention: splits is at least 1, got {splits}")
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    return _decode(q, k, v, lengths.astype(jnp.int32), scale, softcap, window, splits)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5, 6, 7))
def _decode(q, k, v, lengths, scale: float, softcap: float | None, window: int | None, splits: int):
    keys = 128 if machine().whole else gpu_tiles.keys_of_cache(q.shape[3], q.dtype.itemsize)
    kernel, bk = decode_splits, fit(k.shape[1], keys)
    if not machine().whole and q.dtype.itemsize == 2 and splits > 1:
        bk = fit(k.shape[1], 32) if known(k.shape[1]) // splits > 2048 else bk
        kernel = tuned(decode_splits, num_warps=2)
    parts = kernel(q, k, v, lengths, splits=splits, bk=bk, softcap=softcap, window=window, scale=scale)
    return parts if splits == 1 else combined(parts, q.dtype.name)


@_decode.defjvp
def _decode_jvp(scale, softcap, window, splits, primals, tangents):
    """Of the same result as `attention` over the slots in use, which has a reverse mode for any number of keys."""
    del splits
    q, k, v, lengths = primals
    lengths = jnp.clip(lengths, 0, k.shape[1])
    options = {"scale": scale, "softcap": softcap, "window": window, "causal": True}
    same = lambda q, k, v: attention(q, k, v, lengths=lengths, offsets=lengths - q.shape[1], **options)
    return jax.jvp(same, (q, k, v), tangents[:3])


def decode_attention_reference(q, k, v, lengths, *, scale=None, softcap=None, window=None, splits=None):
    """`decode_attention` in jnp."""
    del splits
    if q.ndim == 3:
        return decode_attention_reference(q[:, None], k, v, lengths, scale=scale, softcap=softcap, window=window)[:, 0]
    lengths = jnp.clip(lengths, 0, k.shape[1]).astype(jnp.int32)
    options = {"scale": scale, "softcap": softcap, "window": window, "lengths": lengths}
    return attention_reference(q, k, v, causal=True, offsets=lengths - q.shape[1], **options)
