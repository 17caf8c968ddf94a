"""The delta rule with a decay for each row of the state (Kimi delta attention) and RWKV-7 on GPUs: what decays and the
positions of a chunk have to do with each other is computed for every chunk at once, by the kernels of linear attention
without a delta rule; one recurrence over chunks is left, of products alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import sums_in, tuned, wide
from jtile.ops.chunk_states import decay_sums, gated_chunks
from jtile.ops.recurrences import first_state, inverse

_WARPS = 8


@jt.kernel(
    out_type=lambda low, beta, *, dtype: jt.like(low, dtype=dtype),
    grid=lambda low, beta, *, dtype: low.shape[:3],
)
def gated_delta_mix(low, beta, mix, *, dtype: str):
    """mix [batch, v heads, chunks, c, c] of low, which is pairs(k, k) there, and beta [batch, t, v heads]; None: -1."""
    # u_t = beta_t (v_t - S_(t-1)^T e^(g_t) k_t) holds the u of earlier positions: (I + beta pairs(k, k)) u = ...
    b, h, n = (jt.program_id(axis) for axis in range(3))
    c = low.shape[3]
    earlier = jt.arange(c)[:, None] > jt.arange(c)[None, :]
    of_u = wide(low[b, h, n, :, :])
    of_u = -of_u if beta is None else wide(beta.tiles(None, c, None)[b, n, h])[:, None] * of_u
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
    # A, B: tiles of ahead and behind
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


# -- RWKV-7 ----------------------------------------------------------------------------------------------------------


@jt.kernel(
    out_type=lambda r, a, b, k, v, *_, **meta: _types(r, a, b, v, **meta),
    grid=lambda r, a, b, k, v, *_, bv, **__: (v.shape[0], v.shape[2], jt.cdiv(v.shape[3], bv)),
)
def rwkv7_recurrence(
    r, a, b, k, v, of_ak, of_rb, of_rk, mix, whole, state, o, last=None, *, c: int, bv: int, scale: float, save: bool
):  # fmt: skip
    """r, a, b, k [batch, t, heads, dk]: r e^G, a e^H, b e^(G_c - G) and k e^(G_c - G), H the decay in front of a
    position; v, o [batch, t, heads, dv]; of_ak, of_rb, of_rk, mix [batch, heads, chunks, c, c]: pairs, and see
    `rwkv7_mix`; whole [batch, chunks, heads, dk]: G_c; state, last [batch, heads, dk, dv] or None."""
    # y = mix ((a e^H) S + pairs(a, k) v)     o = scale ((r e^G) S + pairs(r, b) y + pairs(r, k) v)
    # S' = e^(G_c) S + (b e^(G_c - G))^T y + (k e^(G_c - G))^T v
    i, h, j = (jt.program_id(axis) for axis in range(3))
    dk = r.shape[3]
    R, A, B, K = (x.tiles(None, c, None, dk) for x in (r, a, b, k))
    V, O = (x.tiles(None, c, None, bv) for x in (v, o))
    S = first_state(state, (i, h, 0, j), (dk, bv), v)
    for n in jt.range(V.shape[1]):
        v_n, S_n = V[i, n, h, j], S.astype(v.dtype)
        y = jt.dot(of_ak[i, h, n, :, :], v_n, jt.dot(A[i, n, h, 0], S_n)).astype(v.dtype)
        y = jt.dot(mix[i, h, n, :, :], y).astype(v.dtype)
        out = jt.dot(of_rb[i, h, n, :, :], y, jt.dot(R[i, n, h, 0], S_n))
        O[i, n, h, j] = (jt.dot(of_rk[i, h, n, :, :], v_n, out) * scale).astype(o.dtype)
        S = jt.dot(B[i, n, h, 0].T, y, S * jnp.exp(whole[i, n, h, :])[:, None])
        S = jt.dot(K[i, n, h, 0].T, v_n, S)
    if last is not None:
        last.tiles(None, None, dk, bv)[i, h, 0, j] = S


def _by_chunks(x, c: int):
    """x [batch, t, heads, dk] with zeros behind it, as [batch, chunks, c, heads, dk]."""
    batch, t, *rest = x.shape
    chunks = jt.cdiv(t, c)
    return jnp.pad(x, ((0, 0), (0, chunks * c - t), (0, 0), (0, 0))).reshape(batch, chunks, c, *rest)


def _earlier(x, c: int, by: int):
    """x [batch, t, heads, dk] moved by one position towards the end of its chunk (`by` 1) or its beginning (-1)."""
    parts = _by_chunks(x, c)
    gap = jnp.zeros_like(parts[:, :, :1])
    moved = [gap, parts[:, :, :-1]] if by > 0 else [parts[:, :, 1:], gap]
    return jnp.concatenate(moved, 2).reshape(x.shape[0], -1, *x.shape[2:])[:, : x.shape[1]]


def rwkv7_in_parts(r, g, k, v, a, b, state, *, c: int, bv: int, scale: float, save: bool) -> Any:
    """RWKV-7 of arrays as `ops.rwkv7` takes them: o, and with `save` the last state."""
    sums, t = decay_sums(g, c=c), k.shape[1]
    met = tuned(gated_chunks, num_warps=_WARPS)
    # a meets the state in front of its position: it is where the position before it is, a row further up in pairs
    early = _earlier(a, c, -1)
    down = lambda x: jnp.pad(x[..., :-1, :], ((0, 0),) * 3 + ((1, 0), (0, 0)))
    _, k_end, of_ak, whole = met(early, k, sums, c=c)
    _, b_end, of_ab, _ = met(early, b, sums, c=c, exact=True)
    r_in, _, of_rk, _ = met(r, k, sums, c=c)
    _, _, of_rb, _ = met(r, b, sums, c=c)
    a_in = (wide(a) * jnp.exp(_earlier(sums, c, 1)[:, :t])).astype(a.dtype)
    mix = tuned(gated_delta_mix, num_warps=_WARPS)(down(of_ab), None, dtype=v.dtype.name)
    run = tuned(rwkv7_recurrence, num_warps=_WARPS)
    sides = {"c": c, "bv": bv, "scale": scale, "save": save}
    return run(r_in, a_in, b_end, k_end, v, down(of_ak), of_rb, of_rk, mix, whole, state, **sides)
