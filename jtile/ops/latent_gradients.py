"""Reverse mode of `mla_attention`: one kernel for what belongs to keys, one for the queries, as in
`attention_gradients`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops._shapes import fit, known, machine
from jtile.ops.attention_gradients import attention_delta_tiles
from jtile.ops.attention_windows import LOG2_E, blocks, query_blocks, visible


def beside(x, rows: int, d: int):
    """Views of x [batch, t, heads, d + r]: of [..., :d], number 0 of the last axis, and of [..., d:], number 1."""
    behind = x.shape[3] - d
    return x.tiles(None, rows, None, d), x.tiles(None, rows, None, behind, step=(None, rows, None, d))


@jt.kernel(
    out_type=lambda q, k, rope, v, g, lse, *_, **__: (
        jt.like(k), jax.ShapeDtypeStruct((*lse.shape[:2], *rope.shape[1:]), lse.dtype), jt.like(v),
    ),
    grid=lambda q, k, *_, bk, **__: (k.shape[0], k.shape[2], jt.cdiv(k.shape[1], bk)),
)  # fmt: skip
def latent_gradient_of_keys(
    q, k, rope, v, g, lse, delta, lengths, offsets, dk, dr, dv,
    *, bq: int, bk: int, scale: float, causal: bool,
):  # fmt: skip
    """dk, dv and what one head gives dr, [batch, heads, s, r], of one block of keys in a program."""
    # p_ij = 2^(s_ij - lse_i)   dv_j = sum_i p_ij g_i   ds_ij = p_ij (g_i . v_j - delta_i)
    # dk_j = scale sum_i ds_ij q_i[:d]   dr_j = scale sum_i ds_ij q_i[d:]     tiles of p and ds are [bk, bq]
    b, h, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    # b: row of the batch; h: head; j, i: blocks of keys and of queries; tiles of rotary parts end in R and r,
    # those of lse and delta are L and D
    t, keys, d, dim_v, dim_r = q.shape[1], *k.shape[1::2], v.shape[3], rope.shape[2]
    (Q, QR), G = beside(q, bq, d), g.tiles(None, bq, None, dim_v)
    L, D = (x.tiles(None, None, bq) for x in (lse, delta))
    length = keys if lengths is None else jnp.minimum(lengths[b], keys)
    offset, window = 0 if offsets is None else offsets[b], (None, 0 if causal else None)
    columns = j * bk + jt.arange(bk)[:, None]
    of_keys = (
        k.tiles(None, bk, None, d)[b, j, h, 0],
        rope.tiles(None, bk, dim_r)[b, j, 0],
        v.tiles(None, bk, None, dim_v)[b, j, h, 0],
    )
    if lengths is not None:  # keys and values behind the length may hold anything, NaN too
        of_keys = tuple(jnp.where(columns < length, x, jnp.zeros((), x.dtype)) for x in of_keys)
    k_j, r_j, v_j = of_keys

    def step(i, dk_j, dr_j, dv_j, edge: bool):
        q_i, qr_i, g_i = Q[b, i, h, 0], QR[b, i, h, 1], G[b, i, h, 0]
        s = jt.dot(r_j, qr_i.T, jt.dot(k_j, q_i.T))
        p = jnp.exp2(s * (scale * LOG2_E) - L[b, h, i][None, :])
        ds = p * (jt.dot(v_j, g_i.T) - D[b, h, i][None, :])
        if edge:
            seen = visible(offset + i * bq + jt.arange(bq)[None, :], columns, length, window)
            p, ds = jnp.where(seen, p, 0.0), jnp.where(seen, ds, 0.0)
        ds = ds.astype(q.dtype)
        return jt.dot(ds, q_i, dk_j), jt.dot(ds, qr_i, dr_j), jt.dot(p.astype(q.dtype), g_i, dv_j)

    lo, inner_lo, inner_hi, hi = query_blocks(j * bk, bk, bq, t, offset, length, window)
    dk_j, dr_j, dv_j = (jnp.zeros((bk, n), lse.dtype) for n in (d, dim_r, dim_v))
    for i in jt.range(inner_lo, inner_hi, stages=2):
        dk_j, dr_j, dv_j = step(i, dk_j, dr_j, dv_j, edge=False)
    for n in jt.range(inner_lo - lo + hi - inner_hi):  # the blocks at the edges on both sides
        i = jnp.where(n < inner_lo - lo, lo + n, n - inner_lo + lo + inner_hi)
        dk_j, dr_j, dv_j = step(i, dk_j, dr_j, dv_j, edge=True)
    dk.tiles(None, bk, None, d)[b, j, h, 0] = (dk_j * scale).astype(dk.dtype)
    dr.tiles(None, None, bk, dim_r)[b, h, j, 0] = dr_j * scale
    dv.tiles(None, bk, None, dim_v)[b, j, h, 0] = dv_j.astype(dv.dtype)


@jt.kernel(
    out_type=lambda q, *_, **__: jt.like(q),
    grid=lambda q, *_, bq, **__: (q.shape[0], q.shape[2], jt.cdiv(q.shape[1], bq)),
)
def latent_gradient_of_queries(
    q, k, rope, v, g, lse, delta, lengths, offsets, dq,
    *, bq: int, bk: int, scale: float, causal: bool,
):  # fmt: skip
    """dq of one block of queries in a program, from all keys that it sees."""
    # dq_i = scale sum_j ds_ij k_j, and behind it scale sum_j ds_ij r_j
    b, h, i = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    keys, d, dim_v, dim_r = *k.shape[1::2], v.shape[3], rope.shape[2]
    Q, QR = beside(q, bq, d)
    q_i, qr_i, g_i = Q[b, i, h, 0], QR[b, i, h, 1], g.tiles(None, bq, None, dim_v)[b, i, h, 0]
    K, R, V = k.tiles(None, bk, None, d), rope.tiles(None, bk, dim_r), v.tiles(None, bk, None, dim_v)
    lse_i, delta_i = (x.tiles(None, None, bq)[b, h, i][:, None] for x in (lse, delta))
    length = keys if lengths is None else jnp.minimum(lengths[b], keys)
    first, window = i * bq + (0 if offsets is None else offsets[b]), (None, 0 if causal else None)
    rows = first + jt.arange(bq)[:, None]

    def step(j, dq_i, dqr_i, edge: bool):
        k_j, r_j, v_j = K[b, j, h, 0], R[b, j, 0], V[b, j, h, 0]
        s = jt.dot(qr_i, r_j.T, jt.dot(q_i, k_j.T))
        ds = jnp.exp2(s * (scale * LOG2_E) - lse_i) * (jt.dot(g_i, v_j.T) - delta_i)
        if edge:
            columns = j * bk + jt.arange(bk)[None, :]
            ds = jnp.where(visible(rows, columns, length, window), ds, 0.0)
            if lengths is not None:
                k_j, r_j = (jnp.where(length > columns.T, x, jnp.zeros((), x.dtype)) for x in (k_j, r_j))
        ds = ds.astype(q.dtype)
        return jt.dot(ds, k_j, dq_i), jt.dot(ds, r_j, dqr_i)

    _, _, inner_hi, hi = blocks(first, bq, bk, length, window)
    dq_i, dqr_i = (jnp.zeros((bq, n), lse.dtype) for n in (d, dim_r))
    for j in jt.range(0, inner_hi, stages=2):
        dq_i, dqr_i = step(j, dq_i, dqr_i, edge=False)
    for j in jt.range(inner_hi, hi):
        dq_i, dqr_i = step(j, dq_i, dqr_i, edge=True)
    DQ, DQR = beside(dq, bq, d)
    DQ[b, i, h, 0] = (dq_i * scale).astype(dq.dtype)
    DQR[b, i, h, 1] = (dqr_i * scale).astype(dq.dtype)


def gradients(q, k, rope, v, o, lse, g, ct, lengths, offsets, *, scale: float, causal: bool):
    """(dq, dk, drope, dv) for the cotangents g of o and ct of lse, or None."""
    t, s, d, bytes_ = known(q.shape[1]), known(k.shape[1]), q.shape[3], q.dtype.itemsize
    if machine().whole:
        keys = queries = {"bq": fit(t, 128), "bk": fit(s, 128)}
    else:
        own = max(k.shape[3], v.shape[3]) if gpu_tiles.warpgroups() else d
        keys, queries = (x.tiles for x in gpu_tiles.attention_gradients(t, s, own, bytes_, gpu_tiles.little_memory()))
    n = fit(t, max(1, machine().tile // o.shape[3]))
    delta = attention_delta_tiles(o, g, ct, n=n, dtype=lse.dtype.name)
    args, options = (q, k, rope, v, g, lse, delta, lengths, offsets), {"scale": scale, "causal": causal}
    dk, dr, dv = latent_gradient_of_keys(*args, **keys, **options)
    return latent_gradient_of_queries(*args, **queries, **options), dk, dr.sum(1).astype(rope.dtype), dv
