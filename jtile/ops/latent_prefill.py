"""Attention of DeepSeek's MLA over whole sequences (prefill and training): the latent vectors are expanded to keys and
values of every head, and behind its own part a head's key has a rotary part that all heads share."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError
from jtile.ops import gpu_tiles
from jtile.ops._shapes import check_float, check_int, check_rank, check_shape, fit, known, machine, sums_in
from jtile.ops.attention_windows import LOG2_E, at_edge, blocks
from jtile.ops.flash_attention import attention_reference
from jtile.ops.latent_gradients import beside, gradients
from jtile.ops.online_softmax import NOTHING, log_sums, normalised, online


def _types(q, k, rope, v, *_, save: bool = False, **__):
    """Types of o and, with `save`, of the log-sum-exp of every query's scores, which the backward pass starts from."""
    (batch, t, heads), o = q.shape[:3], jt.like(q, shape=(*q.shape[:3], v.shape[3]))
    return (o, jax.ShapeDtypeStruct((batch, heads, t), sums_in(q))) if save else o


@jt.kernel(out_type=_types, grid=lambda q, *_, bq, **__: (q.shape[0], q.shape[2], jt.cdiv(q.shape[1], bq)))
def latent_prefill(
    q, k, rope, v, lengths, offsets, o, lse=None,
    *, bq: int, bk: int, scale: float, causal: bool, save: bool = False, stages: int = 2,
):  # fmt: skip
    """q [batch, t, heads, d + r]; k [batch, s, heads, d]; rope [batch, s, r]; v [batch, s, heads, d_v]; the rest as in
    `flash_attention`."""
    # s_ij = q_i[:d] . k_j + q_i[d:] . r_j     else as in flash_attention
    # R, QR: tiles of the rotary parts; r: their features; x: block of keys, counted from the last one
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    keys, d, dv, r = *k.shape[1::2], v.shape[3], rope.shape[2]
    Q, QR = beside(q, bq, d)
    q_i, qr_i = Q[b, i, h, 0], QR[b, i, h, 1]
    K, R, V = k.tiles(None, bk, None, d), rope.tiles(None, bk, r), v.tiles(None, bk, None, dv)
    length = keys if lengths is None else jnp.minimum(lengths[b], keys)
    first = i * bq + (0 if offsets is None else offsets[b])
    window = (None, 0 if causal else None)
    _, _, inner_hi, hi = blocks(first, bq, bk, length, window)
    rows = first + jt.arange(bq)[:, None]

    def step(j, m, l, acc, edge: bool):
        s = jt.dot(qr_i, R[b, j, 0].T, jt.dot(q_i, K[b, j, h, 0].T)) * (scale * LOG2_E)
        v_j = V[b, j, h, 0]
        if edge:
            s, v_j = at_edge(s, v_j, j * bk, rows, length, window, cut=lengths is not None)
        return online(s, v_j, m, l, acc)

    wide = sums_in(q)
    m, l, acc = jt.full((bq,), NOTHING, wide), jt.zeros((bq,), wide), jt.zeros((bq, dv), wide)
    # From the last block of keys to the first, as in flash_attention.
    one = causal and lengths is None and offsets is None and bk % bq == 0
    edges = jnp.clip(hi - inner_hi, 0, 1 if one else keys)
    block = lambda x: jnp.maximum(hi - 1 - x, 0)
    for x in jt.range(edges):
        m, l, acc = step(block(x), m, l, acc, edge=True)
    for x in jt.range(edges, hi, stages=stages):
        m, l, acc = step(block(x), m, l, acc, edge=False)
    o.tiles(None, bq, None, dv)[b, i, h, 0] = normalised(acc, l).astype(o.dtype)
    if lse is not None:
        lse.tiles(None, None, bq)[b, h, i] = log_sums(m, l)


def _forward(q, k, rope, v, lengths, offsets, *, save: bool, **meta):
    o, lse = latent_prefill(q, k, rope, v, lengths, offsets, save=True, **meta)
    return (o, lse) if save else o, (q, k, rope, v, lengths, offsets, o, lse)


def _backward(residuals, ct, *, save: bool, scale: float, causal: bool, **_):
    q, k, rope, v, lengths, offsets, o, lse = residuals
    g, ct_lse = ct if save else (ct, None)
    return *gradients(q, k, rope, v, o, lse, g, ct_lse, lengths, offsets, scale=scale, causal=causal), None, None


latent_prefill.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("causal", "scale"), inline=True)
def mla_attention(
    q: jax.Array,
    k: jax.Array,
    rope: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    lengths: jax.Array | None = None,
    offsets: jax.Array | None = None,
) -> jax.Array:
    """Attention of heads whose keys have a part of their own and a rotary part that all heads share (DeepSeek's MLA
    over a prompt, or in training, with keys and values expanded from the latent vectors).

    The result is that of `attention` for q and for k with `rope` behind each head's part, but no such keys are made.
    Differentiable in q, k, rope and v, not in lengths and offsets; memory grows with the sequence, not with its square.

    Args:
      q: float array [batch, t, heads, d + r], the rotary part behind the other.
      k: float array [batch, s, heads, d]. rope: [batch, s, r]. v: [batch, s, heads, d_v]; all of q's dtype.
      causal: query i sees the keys j <= i (plus `offsets`, if given).
      scale: default 1 / sqrt(d + r).
      lengths: int [batch], keys of each batch row that count; default all.
      offsets: int [batch], the position of query 0 among the keys (chunked prefill); default 0.
    Returns:
      [batch, t, heads, d_v] of q's dtype, computed in float32 (float64 for float64); a query that sees no key gives
      zeros.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit.
    """
    _check(q, k, rope, v, lengths, offsets)
    if q.size == 0 or v.size == 0:
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    t, s, d = known(q.shape[1]), known(k.shape[1]), q.shape[3]
    tiles = _tiles(t, s, d, max(k.shape[3], v.shape[3]), q.dtype.itemsize, causal, lengths is not None)
    lengths, offsets = (None if x is None else x.astype(jnp.int32) for x in (lengths, offsets))
    return latent_prefill(q, k, rope, v, lengths, offsets, scale=scale, causal=causal, **tiles)


def _tiles(t: int, s: int, d: int, own: int, itemsize: int, causal: bool, lengths: bool) -> dict[str, int]:
    """Queries and keys of a tile, on the platform at hand; d: features of a whole key, own: features of
    its own part or of a value."""
    if machine().whole:
        return {"bq": fit(t, 128), "bk": fit(s, 256)}
    if gpu_tiles.warpgroups() and (tiles := gpu_tiles.attention(t, s, own, itemsize, causal, False, lengths)):
        return tiles
    return gpu_tiles.attention(t, s, d, itemsize, causal, gpu_tiles.little_memory(), lengths)


def _check(q, k, rope, v, lengths, offsets) -> None:
    op, like = "mla_attention", {"q": q, "k": k, "rope": rope, "v": v}
    check_float(op, **like)
    check_int(op, lengths=lengths, offsets=offsets)
    check_rank(op, "q", q, 4, "[batch, t, heads, d + r]")
    check_rank(op, "k", k, 4, "[batch, s, heads, d]")
    check_rank(op, "rope", rope, 3, "[batch, s, r]")
    check_rank(op, "v", v, 4, "[batch, s, heads, d_v]")
    if len({x.dtype for x in like.values()}) > 1:
        got = ", ".join(f"{name} {x.dtype.name}" for name, x in like.items())
        raise KernelTypeError(f"{op}: q, k, rope and v have one dtype, got {got}")
    (batch, t, heads), s = q.shape[:3], k.shape[1]
    check_shape(op, "k", k, (batch, s, heads, k.shape[3]))
    check_shape(op, "rope", rope, (batch, s, rope.shape[2]))
    check_shape(op, "v", v, (batch, s, heads, v.shape[3]))
    check_shape(op, "q", q, (batch, t, heads, k.shape[3] + rope.shape[2]))
    for name, x in (("lengths", lengths), ("offsets", offsets)):
        if x is not None:
            check_shape(op, name, x, (batch,))


def mla_attention_reference(q, k, rope, v, *, causal=True, scale=None, lengths=None, offsets=None):
    """`mla_attention` in jnp, with the whole matrix of scores."""
    shared = jnp.broadcast_to(rope[:, :, None], (*k.shape[:3], rope.shape[2]))
    pad = lambda x, n: jnp.pad(x, ((0, 0),) * 3 + ((0, n - x.shape[3]),))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    n = max(q.shape[3], v.shape[3])
    args = pad(q, n), pad(jnp.concatenate([k, shared], 3), n), pad(v, n)
    options = {"causal": causal, "scale": scale, "lengths": lengths, "offsets": offsets}
    return attention_reference(*args, **options)[..., : v.shape[3]]
