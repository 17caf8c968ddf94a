"""The delta rule with a decay for each row of the state (Kimi delta attention) on GPUs: what decays and the positions of
a chunk have to do with each other is computed for every chunk at once, by the kernels of linear attention without a
delta rule; one recurrence over chunks is left, of products alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import sums_in, tuned, wide
from jtile.ops.chunk_states import decay_sums, gated_chunks
from jtile.ops.recurrences import first_state, inverse

CHOSEN = False  # whether it is taken: a GPU has not timed it yet
_WARPS = 8


@jt.kernel(
    out_type=lambda low, beta, *, dtype: jt.like(low, dtype=dtype),
    grid=lambda low, beta, *, dtype: low.shape[:3],
)
def gated_delta_mix(low, beta, mix, *, dtype: str):
    """mix [batch, v heads, chunks, c, c] of low, which is pairs(k, k) there, and beta [batch, t, v heads]."""
    # u_t = beta_t (v_t - S_(t-1)^T e^(g_t) k_t) holds the u of earlier positions: (I + beta pairs(k, k)) u = ...
    b, h, n = (jt.program_id(axis) for axis in range(3))
    c = low.shape[3]
    earlier = jt.arange(c)[:, None] > jt.arange(c)[None, :]
    of_u = wide(beta.tiles(None, c, None)[b, n, h])[:, None] * wide(low[b, h, n, :, :])
    mix[b, h, n, :, :] = inverse(jnp.where(earlier, of_u, 0.0)).astype(mix.dtype)


def _types(q, ahead, behind, v, *_, save: bool, **__):
    last = jax.ShapeDtypeStruct((v.shape[0], v.shape[2], q.shape[3], v.shape[3]), sums_in(v))
    return (jt.like(v), last) if save else jt.like(v)


@jt.kernel(out_type=_types, grid=lambda q, ahead, behind, v, *_, bv, **__: (
    v.shape[0], v.shape[2], jt.cdiv(v.shape[3], bv)
))  # fmt: skip
def gated_delta_chunks(
    q, ahead, behind, v, beta, own, mix, whole, state, o, last=None, *, c: int, bv: int, scale: float, save: bool
):  # fmt: skip
    """q, ahead, behind [batch, t, v heads, dk]: q e^G, k e^G and k e^(G_c - G); v, o [batch, t, v heads, dv]; beta
    [batch, t, v heads]; own, mix [batch, v heads, chunks, c, c]: pairs(q, k), and see `gated_delta_mix`; whole [batch,
    chunks, v heads, dk]: G_c; state, last [batch, v heads, dk, dv] or None."""
    # u = mix beta (v - (k e^G) S)     o = scale ((q e^G) S + pairs(q, k) u)     S' = e^(G_c) S + (k e^(G_c - G))^T u
    b, h, j = (jt.program_id(axis) for axis in range(3))
    dk = q.shape[3]
    Q, A, B, V, O = (
        x.tiles(None, c, None, width) for x, width in ((q, dk), (ahead, dk), (behind, dk), (v, bv), (o, bv))
    )
    S = first_state(state, (b, h, 0, j), (dk, bv), v)
    for n in jt.range(V.shape[1]):
        S_n = S.astype(v.dtype)
        error = wide(V[b, n, h, j]) - jt.dot(A[b, n, h, 0], S_n)
        error = wide(beta.tiles(None, c, None)[b, n, h])[:, None] * error
        u = jt.dot(mix[b, h, n, :, :], error.astype(v.dtype)).astype(v.dtype)
        O[b, n, h, j] = (jt.dot(own[b, h, n, :, :], u, jt.dot(Q[b, n, h, 0], S_n)) * scale).astype(o.dtype)
        S = jt.dot(B[b, n, h, 0].T, u, S * jnp.exp(whole[b, n, h, :])[:, None])
    if last is not None:
        last.tiles(None, None, dk, bv)[b, h, 0, j] = S


def in_parts(q, k, v, g, beta, state, *, c: int, bv: int, scale: float, save: bool) -> Any:
    """The delta rule with g [batch, t, v heads, dk]: o, and with `save` the last state."""
    sums = decay_sums(g, c=c)
    met = tuned(gated_chunks, num_warps=_WARPS)
    ins, behind, own, whole = met(q, k, sums, c=c)
    ahead, _, low, _ = met(k, k, sums, c=c, exact=True)
    mix = tuned(gated_delta_mix, num_warps=_WARPS)(low, beta, dtype=v.dtype.name)
    run = tuned(gated_delta_chunks, num_warps=_WARPS)
    return run(ins, ahead, behind, v, beta, own, mix, whole, state, c=c, bv=bv, scale=scale, save=save)
