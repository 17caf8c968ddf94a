"""Reverse mode of attention: scores again from the saved log-sum-exp (Dao et al. 2022, algorithm 4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import attention_gradients, dropouts, hopper_attention_backward, hopper_wide_backward
from jtile.ops._shapes import fit, known, machine
from jtile.ops.attention_windows import LOG2_E, Window, query_blocks, visible, weights
from jtile.ops.dispatch import BLOCK_LEVEL, WARPS, Implementation, Op


@jt.kernel(
    out_type=lambda o, *_, dtype, **__: jax.ShapeDtypeStruct((o.shape[0], o.shape[2], o.shape[1]), jnp.dtype(dtype)),
    grid=lambda o, g, ct, **_: (o.shape[0], o.shape[2]),
)
def attention_delta(o, g, ct, delta, *, n: int, dtype: str):
    """delta [batch, heads, t] of o, g [batch, t, heads, d], `n` queries at a time.

    ct: the cotangent of the log-sum-exp, or None.
    """
    # delta_i = sum_d g_id o_id - log2(e) ct_i, so that ds_ij = p_ij (dp_ij - delta_i)
    # O, G, D: tiles of o, g and delta
    b, h = jt.program_id(0), jt.program_id(1)
    t, d = o.shape[1], o.shape[3]
    O, G, D = o.tiles(None, n, None, d), g.tiles(None, n, None, d), delta.tiles(None, None, n)
    for i in jt.range(jt.cdiv(t, n)):
        row = (O[b, i, h, 0].astype(dtype) * G[b, i, h, 0].astype(dtype)).sum(1)
        D[b, h, i] = row if ct is None else row - LOG2_E * ct.tiles(None, None, n)[b, h, i].astype(dtype)


def _types(q, k, v, g, lse, delta, lengths, offsets, *, splits, **_):
    """The types of dq of every split, in the dtype of the sums, and of dk and dv."""
    single = splits == 1 and q.dtype == lse.dtype
    part = q.shape if single else (splits, *q.shape)
    return jax.ShapeDtypeStruct(part, lse.dtype), jt.like(k), jt.like(v)


@jt.kernel(out_type=_types, grid=lambda q, k, *_, splits, **__: (k.shape[0], k.shape[2], splits))
def flash_attention_backward(
    q, k, v, g, lse, delta, lengths, offsets, seeds, dq, dk, dv,
    *, bq: int, bk: int, splits: int, scale: float, softcap: float | None, window: Window, dropout: float,
):  # fmt: skip
    """A program: every `splits`-th block of keys of one row and kv head, against all queries that see it.

    q, g [batch, t, heads, d]; k, v [batch, s, kv heads, d]; lse (in powers of two), delta [batch, heads, t]; lengths,
    offsets and seeds as in `flash_attention`. dq [(splits,) batch, t, heads, d] is only this program's share.
    """
    # p_ij = 2^(s_ij - lse_i)   dv_j = sum_i p_ij g_i   ds_ij = p_ij (g_i . v_j - delta_i) s'_ij
    # dq_i = scale sum_j ds_ij k_j   dk_j = scale sum_i ds_ij q_i      tiles of p and ds are kept transposed, [bk, bq]
    # b: row of the batch; kv, h: heads of keys and of queries; j, i: blocks of keys and of queries
    b, kv, share = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    (t, heads, d), keys = q.shape[1:], k.shape[1]
    group = heads // k.shape[2]
    K, V, DK, DV = (x.tiles(None, bk, None, d) for x in (k, v, dk, dv))
    Q, G = (x.tiles(None, bq, None, d) for x in (q, g))
    L, D = (x.tiles(None, None, bq) for x in (lse, delta))
    DQ = dq.tiles(*(None,) * (len(dq.shape) - 3), bq, None, d)
    split = (share,) if len(dq.shape) == 5 else ()
    length = keys if lengths is None else jnp.minimum(lengths[b], keys)
    offset = 0 if offsets is None else offsets[b]
    rows = jt.cdiv(t, bq)

    def step(i, h, j, k_j, v_j, dk_j, dv_j, edge: bool):
        q_i, g_i = Q[b, i, h, 0], G[b, i, h, 0]
        s = jt.dot(k_j, q_i.T)
        p, gradient = weights(s, L[b, h, i][None, :], scale, softcap)
        sides = dropouts.places(i * bq, bq, 1), dropouts.places(j * bk, bk, 0)
        kept, dp = dropouts.dropped(seeds, b, h, *sides, dropout, p, jt.dot(v_j, g_i.T))
        dp = dp - D[b, h, i][None, :]
        ds = p * (dp if gradient is None else dp * gradient)
        if edge:
            seen = visible(offset + i * bq + jt.arange(bq)[None, :], j * bk + jt.arange(bk)[:, None], length, window)
            kept, ds = jnp.where(seen, kept, 0.0), jnp.where(seen, ds, 0.0)
        ds = ds.astype(q.dtype)
        here = (*split, b, i, h, 0)
        DQ[here] = jt.dot(ds.T, k_j, DQ[here])
        return jt.dot(ds, q_i, dk_j), jt.dot(kept.astype(q.dtype), g_i, dv_j)

    for h in jt.range(group):
        for i in jt.range(rows):
            DQ[(*split, b, i, kv * group + h, 0)] = jnp.zeros((bq, d), dq.dtype)
    for turn in jt.range(jt.cdiv(jt.cdiv(keys, bk) - share, splits)):
        j = share + turn * splits
        k_j, v_j = K[b, j, kv, 0], V[b, j, kv, 0]
        if lengths is not None:  # keys and values behind the length may hold anything, NaN too
            columns = j * bk + jt.arange(bk)[:, None]
            k_j, v_j = (jnp.where(columns < length, x, jnp.zeros((), x.dtype)) for x in (k_j, v_j))
        lo, inner_lo, inner_hi, hi = query_blocks(j * bk, bk, bq, t, offset, length, window)
        dk_j, dv_j = (jnp.zeros((bk, d), lse.dtype) for _ in range(2))
        for member in jt.range(group):
            h = kv * group + member
            for i in jt.range(inner_lo, inner_hi):
                dk_j, dv_j = step(i, h, j, k_j, v_j, dk_j, dv_j, edge=False)
            for n in jt.range(inner_lo - lo + hi - inner_hi):  # the blocks at the edges on both sides
                i = jnp.where(n < inner_lo - lo, lo + n, n - inner_lo + lo + inner_hi)
                dk_j, dv_j = step(i, h, j, k_j, v_j, dk_j, dv_j, edge=True)
        DK[b, j, kv, 0] = (dk_j * scale).astype(dk.dtype)
        DV[b, j, kv, 0] = dv_j.astype(dv.dtype)
    for h in jt.range(group):
        for i in jt.range(rows):
            here = (*split, b, i, kv * group + h, 0)
            DQ[here] = DQ[here] * scale


def in_one_kernel(
    q, k, v, o, lse, g, ct, lengths, offsets, seeds=None, *, scale: float, softcap: float | None, window: Window,
    dropout: float = 0.0, bq: int = 128, bk: int = 128,
):  # fmt: skip
    """(dq, dk, dv) on a CPU: a program has some of the blocks of keys, and a share of dq of its own."""
    batch, s, groups = k.shape[:3]
    n = fit(q.shape[1], max(1, machine().tile // q.shape[3]))
    delta = attention_delta(o, g, ct, n=n, dtype=lse.dtype.name)
    bq, bk = fit(q.shape[1], bq), fit(s, bk)
    splits = min(jt.cdiv(machine().programs, max(1, known(batch * groups))), jt.cdiv(known(s), bk))
    dq, dk, dv = flash_attention_backward(
        q, k, v, g, lse, delta, lengths, offsets, seeds,
        bq=bq, bk=bk, splits=splits, scale=scale, softcap=softcap, window=window, dropout=dropout,
    )  # fmt: skip
    dq = dq if dq.ndim == 4 else dq[0] if splits == 1 else dq.sum(0)
    return dq.astype(q.dtype), dk, dv


# (dq, dk, dv) for the cotangents g [batch, t, heads, d] of o and ct [batch, heads, t] (or None) of lse; `seeds` as for
# `flash_attention`.
attention_backward = Op(
    "attention backward",
    Implementation("roles", hopper_attention_backward.gradients, hopper_attention_backward.misfit, BLOCK_LEVEL,
                   portable=False),
    Implementation("roles of long heads", hopper_wide_backward.gradients, hopper_wide_backward.misfit, BLOCK_LEVEL,
                   portable=False),
    Implementation("a kernel of keys, a kernel of queries", attention_gradients.gradients, needs=WARPS),
    Implementation("one kernel", in_one_kernel),
)  # fmt: skip
