"""Reverse mode of attention for GPUs: one kernel for dk and dv, one for dq, so that no program waits for another."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import dropouts, gpu_tiles
from jtile.ops._shapes import fit, known, machine, tuned
from jtile.ops.attention_windows import LOG2_E, Window, blocks, query_blocks, visible, weights


@jt.kernel(
    out_type=lambda o, *_, dtype, **__: jax.ShapeDtypeStruct((o.shape[0], o.shape[2], o.shape[1]), jnp.dtype(dtype)),
    grid=lambda o, g, ct, *, n, **_: (o.shape[0], o.shape[2], jt.cdiv(o.shape[1], n)),
)
def attention_delta_tiles(o, g, ct, delta, *, n: int, dtype: str):
    """delta [batch, heads, t] of o, g [batch, t, heads, d], `n` queries in a program.

    ct: the cotangent of the log-sum-exp, or None.
    """
    # delta_i = sum_d g_id o_id - log2(e) ct_i, so that ds_ij = p_ij (dp_ij - delta_i)
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    O, G = (x.tiles(None, n, None, o.shape[3])[b, i, h, 0].astype(dtype) for x in (o, g))
    row = (O * G).sum(1)
    row = row if ct is None else row - LOG2_E * ct.tiles(None, None, n)[b, h, i].astype(dtype)
    delta.tiles(None, None, n)[b, h, i] = row


@jt.kernel(
    out_type=lambda q, k, v, *_, **__: (jt.like(k), jt.like(v)),
    grid=lambda q, k, *_, bk, **__: (k.shape[0], k.shape[2], jt.cdiv(k.shape[1], bk)),
)
def attention_gradient_of_keys(
    q, k, v, g, lse, delta, lengths, offsets, seeds, dk, dv,
    *, bq: int, bk: int, scale: float, softcap: float | None, window: Window, dropout: float,
):  # fmt: skip
    """dk and dv of one block of keys in a program, from all queries that see it.

    q, g [batch, t, heads, d]; k, v [batch, s, kv heads, d]; lse (in powers of two), delta [batch, heads, t]; lengths,
    offsets and seeds as in `flash_attention`.
    """
    # p_ij = 2^(s_ij - lse_i)   dv_j = sum_i p_ij g_i   ds_ij = p_ij (g_i . v_j - delta_i) s'_ij
    # dk_j = scale sum_i ds_ij q_i      tiles of p and ds are kept transposed, [bk, bq]
    # b: row of the batch; kv, h: heads of keys and of queries; j, i: blocks of keys and of queries
    # L, D: tiles of lse and delta
    b, kv, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    (t, heads, d), keys = q.shape[1:], k.shape[1]
    group = heads // k.shape[2]
    K, V, DK, DV = (x.tiles(None, bk, None, d) for x in (k, v, dk, dv))
    Q, G = (x.tiles(None, bq, None, d) for x in (q, g))
    L, D = (x.tiles(None, None, bq) for x in (lse, delta))
    length = keys if lengths is None else jnp.minimum(lengths[b], keys)
    offset = 0 if offsets is None else offsets[b]
    columns = j * bk + jt.arange(bk)[:, None]
    k_j, v_j = K[b, j, kv, 0], V[b, j, kv, 0]
    if lengths is not None:  # keys and values behind the length may hold anything, NaN too
        k_j, v_j = (jnp.where(columns < length, x, jnp.zeros((), x.dtype)) for x in (k_j, v_j))

    def step(i, h, dk_j, dv_j, edge: bool):
        q_i, g_i = Q[b, i, h, 0], G[b, i, h, 0]
        p, gradient = weights(jt.dot(k_j, q_i.T), L[b, h, i][None, :], scale, softcap, q.dtype.itemsize == 2)
        sides = dropouts.places(i * bq, bq, 1), dropouts.places(j * bk, bk, 0)
        kept, dp = dropouts.dropped(seeds, b, h, *sides, dropout, p, jt.dot(v_j, g_i.T))
        dp = dp - D[b, h, i][None, :]
        ds = p * (dp if gradient is None else dp * gradient)
        if edge:
            seen = visible(offset + i * bq + jt.arange(bq)[None, :], columns, length, window)
            kept, ds = jnp.where(seen, kept, 0.0), jnp.where(seen, ds, 0.0)
        return jt.dot(ds.astype(q.dtype), q_i, dk_j), jt.dot(kept.astype(q.dtype), g_i, dv_j)

    lo, inner_lo, inner_hi, hi = query_blocks(j * bk, bk, bq, t, offset, length, window)
    dk_j, dv_j = (jnp.zeros((bk, d), lse.dtype) for _ in range(2))
    for member in jt.range(group):
        h = kv * group + member
        for i in jt.range(inner_lo, inner_hi, stages=2):
            dk_j, dv_j = step(i, h, dk_j, dv_j, edge=False)
        for n in jt.range(inner_lo - lo + hi - inner_hi):  # the blocks at the edges on both sides
            i = jnp.where(n < inner_lo - lo, lo + n, n - inner_lo + lo + inner_hi)
            dk_j, dv_j = step(i, h, dk_j, dv_j, edge=True)
    DK[b, j, kv, 0] = (dk_j * scale).astype(dk.dtype)
    DV[b, j, kv, 0] = dv_j.astype(dv.dtype)


@jt.kernel(
    out_type=lambda q, *_, **__: jt.like(q),
    grid=lambda q, *_, bq, **__: (q.shape[0], q.shape[2], jt.cdiv(q.shape[1], bq)),
)
def attention_gradient_of_queries(
    q, k, v, g, lse, delta, lengths, offsets, seeds, dq,
    *, bq: int, bk: int, scale: float, softcap: float | None, window: Window, dropout: float,
):  # fmt: skip
    """dq of one block of queries in a program, from all keys that it sees; its arguments are those of
    `attention_gradient_of_keys`."""
    # dq_i = scale sum_j ds_ij k_j
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    d, keys, kv = q.shape[3], k.shape[1], h // (q.shape[2] // k.shape[2])
    K, V = k.tiles(None, bk, None, d), v.tiles(None, bk, None, d)
    q_i, g_i = (x.tiles(None, bq, None, d)[b, i, h, 0] for x in (q, g))
    lse_i, delta_i = (x.tiles(None, None, bq)[b, h, i][:, None] for x in (lse, delta))
    length = keys if lengths is None else jnp.minimum(lengths[b], keys)
    first = i * bq + (0 if offsets is None else offsets[b])
    rows = first + jt.arange(bq)[:, None]

    def step(j, acc, edge: bool):
        k_j, v_j = K[b, j, kv, 0], V[b, j, kv, 0]
        p, gradient = weights(jt.dot(q_i, k_j.T), lse_i, scale, softcap, q.dtype.itemsize == 2)
        sides = dropouts.places(i * bq, bq, 0), dropouts.places(j * bk, bk, 1)
        (dp,) = dropouts.dropped(seeds, b, h, *sides, dropout, jt.dot(g_i, v_j.T))
        dp = dp - delta_i
        ds = p * (dp if gradient is None else dp * gradient)
        if edge:
            columns = j * bk + jt.arange(bk)[None, :]
            ds = jnp.where(visible(rows, columns, length, window), ds, 0.0)
            k_j = jnp.where(length > columns.T, k_j, jnp.zeros((), k_j.dtype)) if lengths is not None else k_j
        return jt.dot(ds.astype(q.dtype), k_j, acc)

    lo, inner_lo, inner_hi, hi = blocks(first, bq, bk, length, window)
    acc = jnp.zeros((bq, d), lse.dtype)
    if window[0] is not None:
        for j in jt.range(lo, inner_lo):
            acc = step(j, acc, edge=True)
    for j in jt.range(inner_lo, inner_hi, stages=2):
        acc = step(j, acc, edge=False)
    for j in jt.range(inner_hi, hi):
        acc = step(j, acc, edge=True)
    dq.tiles(None, bq, None, d)[b, i, h, 0] = (acc * scale).astype(dq.dtype)


def gradients(
    q, k, v, o, lse, g, ct, lengths, offsets, seeds=None,
    *, scale: float, softcap: float | None, window: Window, dropout: float = 0.0,
):  # fmt: skip
    """(dq, dk, dv) for the cotangents g of o and ct of lse (or None); arguments as those of `attention_backward`."""
    t, s, d, bytes_ = known(q.shape[1]), known(k.shape[1]), q.shape[3], q.dtype.itemsize
    keys, queries = gpu_tiles.attention_gradients(t, s, d, bytes_, gpu_tiles.little_memory())
    n = fit(t, max(1, machine().tile // d))
    delta = tuned(attention_delta_tiles, num_warps=4)(o, g, ct, n=n, dtype=lse.dtype.name)
    args = q, k, v, g, lse, delta, lengths, offsets, seeds
    options = {"scale": scale, "softcap": softcap, "window": window, "dropout": dropout}
    dk, dv = tuned(attention_gradient_of_keys, **keys.options)(*args, **keys.tiles, **options)
    return tuned(attention_gradient_of_queries, **queries.options)(*args, **queries.tiles, **options), dk, dv
