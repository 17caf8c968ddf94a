"""Gradients of the delta rule on GPUs: as `chunk_states` does without one, two recurrences over chunks, and all else
for every chunk at once (as in Yang et al. 2024)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import fit, sums_in, tuned, wide
from jtile.ops.chunk_states import at_the_end, chunks_of, fading, from_state, grouped, per_chunk, scalars
from jtile.ops.recurrences import fade, first_state, logarithms, pairs

_SIDE = 64  # columns of a state that a program has at a time
_WARPS = 8  # an H200 took 2.9 ms with 8 for each of the three kernels, 4.9 ms with 4, 4 and 16


def _columns(k, v, *_, bv: int, **__):
    return v.shape[0], v.shape[2], jt.cdiv(v.shape[3], bv)


def _beta(beta, c: int, b, n, h):
    return wide(beta.tiles(None, c, None)[b, n, h])[:, None]


@jt.kernel(
    out_type=lambda k, v, *_, c, **__: (per_chunk(v, c, k.shape[3], v.shape[3]), jt.like(v)), grid=_columns
)  # fmt: skip
def delta_states(k, v, g, beta, mix, state, s, u, *, c: int, bv: int):
    """s [batch, v heads, chunks, dk, dv], the states in front of all chunks, and u [batch, t, v heads, dv], what is
    added to them; arguments as of `linear_attention_chunks`, g of one number a position or None."""
    # u = mix beta (v - (k e^G) S)     S' = e^(G_c) S + (k e^(G_c - G))^T u
    b, h, j = (jt.program_id(axis) for axis in range(3))
    dk, kh = k.shape[3], h // (v.shape[2] // k.shape[2])
    K, V, U = k.tiles(None, c, None, dk), v.tiles(None, c, None, bv), u.tiles(None, c, None, bv)
    each = s.tiles(None, None, None, dk, bv)
    S = first_state(state, (b, h, 0, j), (dk, bv), v)
    for n in jt.range(K.shape[1]):
        S_n, k_n = S.astype(v.dtype), K[b, n, kh, 0]
        each[b, h, n, 0, j] = S_n
        G, total = scalars(g, c, b, n, h)
        error = _beta(beta, c, b, n, h) * (wide(V[b, n, h, j]) - jt.dot(fade(k_n, G), S_n))
        u_n = jt.dot(mix[b, h, n, :, :], error.astype(v.dtype)).astype(v.dtype)
        U[b, n, h, j] = u_n
        S = jt.dot(at_the_end(k_n, G, total).T, u_n, from_state(S, fading(None, total, b, n, h, 0, dk)))


@jt.kernel(
    out_type=lambda k, ct, *_, c, **__: (
        per_chunk(ct, c, k.shape[3], ct.shape[3]), jt.like(ct), jt.like(ct),
        jax.ShapeDtypeStruct((ct.shape[0], ct.shape[2], k.shape[3], ct.shape[3]), sums_in(ct)),
    ),
    grid=_columns,
)  # fmt: skip
def delta_state_cotangents(
    k, ct, q, g, beta, mix, of_last, ds, du, dv, of_first, *, c: int, bv: int, scale: float
):  # fmt: skip
    """ds [batch, v heads, chunks, dk, dv], the cotangents of the states behind all chunks, du and dv [batch, t, v
    heads, dv] those of u and v, and that of the first state; ct, that of o; of_last, that of the last one, or None."""
    # du = scale pairs(q, k)^T do + (k e^(G_c - G)) dS'     dv = beta mix^T du
    # dS = e^(G_c) dS' + scale (q e^G)^T do - (k e^G)^T dv     D: dS, the cotangent behind chunk n
    b, h, j = (jt.program_id(axis) for axis in range(3))
    dk, kh, count = k.shape[3], h // (ct.shape[2] // k.shape[2]), chunks_of(k, c)
    Q, K, CT, DU, DV = (
        x.tiles(None, c, None, width) for x, width in ((q, dk), (k, dk), (ct, bv), (du, bv), (dv, bv))
    )  # fmt: skip
    D = first_state(of_last, (b, h, 0, j), (dk, bv), ct)
    for back in jt.range(count):
        n = count - 1 - back
        D_n, q_n, k_n = D.astype(ct.dtype), Q[b, n, kh, 0], K[b, n, kh, 0]
        ds.tiles(None, None, None, dk, bv)[b, h, n, 0, j] = D_n
        G, total = scalars(g, c, b, n, h)
        do = (wide(CT[b, n, h, j]) * scale).astype(ct.dtype)
        own = pairs(q_n, k_n, G).astype(ct.dtype)
        of_u = jt.dot(own.T, do, jt.dot(at_the_end(k_n, G, total), D_n)).astype(ct.dtype)
        of_v = (_beta(beta, c, b, n, h) * jt.dot(mix[b, h, n, :, :].T, of_u)).astype(ct.dtype)
        DU[b, n, h, j], DV[b, n, h, j] = of_u, of_v
        D = jt.dot(fade(q_n, G).T, do, from_state(D, fading(None, total, b, n, h, 0, dk)))
        D = D - jt.dot(fade(k_n, G).T, of_v)
    of_first.tiles(None, None, dk, bv)[b, h, 0, j] = D


def _pulled_types(q, k, v, g, beta, mix, *_, c: int, **__):
    batch, t, heads, _ = v.shape
    rows = jax.ShapeDtypeStruct((batch, t, heads, k.shape[3]), k.dtype if heads == k.shape[2] else sums_in(v))
    return (rows, rows, jt.like(beta), jt.like(mix), *(() if g is None else (jt.like(g),)))


@jt.kernel(out_type=_pulled_types, grid=lambda q, k, v, *_, c, **__: (v.shape[0], chunks_of(v, c), v.shape[2]))
def delta_rule_pulled(
    q, k, v, g, beta, mix, ct, s, u, ds, du, dq, dk, dbeta, dmix, dg=None, *, c: int, bv: int, scale: float
):  # fmt: skip
    """The cotangents of q, k [batch, t, v heads, dk], beta, mix and g."""
    b, n, h = (jt.program_id(axis) for axis in range(3))
    width, kh = k.shape[3], h // (v.shape[2] // k.shape[2])
    q_n, k_n = (x.tiles(None, c, None, width)[b, n, kh, 0] for x in (q, k))
    V, CT, U, DU = (x.tiles(None, c, None, bv) for x in (v, ct, u, du))
    S, DS = (x.tiles(None, None, None, width, bv) for x in (s, ds))
    G, total = scalars(g, c, b, n, h)
    ahead, mix_n, beta_n = fade(k_n, G), mix[b, h, n, :, :], _beta(beta, c, b, n, h)
    zeros, square = jt.zeros((c, width), sums_in(v)), jt.zeros((c, c), sums_in(v))
    of_q, of_ahead, of_behind, of_own, of_mix = zeros, zeros, zeros, square, square
    of_beta, of_kept = jt.zeros((c, 1), zeros.dtype), jt.zeros((width,), zeros.dtype)
    for j in jt.range(V.shape[3]):
        ct_j, u_j, du_j, s_j, ds_j = CT[b, n, h, j], U[b, n, h, j], DU[b, n, h, j], S[b, h, n, 0, j], DS[b, h, n, 0, j]
        error, of_error = wide(V[b, n, h, j]) - jt.dot(ahead, s_j), jt.dot(mix_n.T, du_j)
        of_beta = of_beta + (error * of_error).sum(1, keepdims=True)
        of_mix = jt.dot(du_j, (beta_n * error).astype(v.dtype).T, of_mix)
        of_q, of_own = jt.dot(ct_j, s_j.T, of_q), jt.dot(ct_j, u_j.T, of_own)
        of_ahead = jt.dot((beta_n * of_error).astype(v.dtype), s_j.T, of_ahead)
        of_behind = jt.dot(u_j, ds_j.T, of_behind)
        of_kept = of_kept if total is None else of_kept + (wide(s_j) * wide(ds_j)).sum(1)
    dmix[b, h, n, :, :] = of_mix.astype(dmix.dtype)
    dbeta.tiles(None, c, None)[b, n, h] = of_beta[:, 0].astype(dbeta.dtype)
    met = _met(q_n, k_n, G, total, scale * of_q, -of_ahead, of_behind, scale * of_own, of_kept)
    for x, y in ((dq, met[0]), (dk, met[1])):
        x.tiles(None, c, None, width)[b, n, h, 0] = y.astype(x.dtype)
    if dg is not None:
        raw = wide(g.tiles(None, c, None, 1)[b, n, h, 0])
        dg.tiles(None, c, None, 1)[b, n, h, 0] = jnp.where(raw == logarithms(raw), met[2], 0.0).astype(dg.dtype)


def _met(q, k, G, total, of_q, of_ahead, of_behind, of_own, of_kept):
    """The cotangents of q, k and the steps of the decay, for those of q e^G, k e^G, k e^(G_c - G) and pairs(q, k), and
    the sums of the state's with what they stand beside, for each of its rows."""
    seen = jt.arange(q.shape[0])[:, None] >= jt.arange(q.shape[0])[None, :]
    if G is None:
        part = jnp.where(seen, of_own, 0.0).astype(q.dtype)
        return jt.dot(part, k, of_q), jt.dot(part.T, q, of_ahead + of_behind), None
    part = (of_own * jnp.exp(jnp.where(seen, G - G.T, -jnp.inf))).astype(q.dtype)
    of_ahead, off = of_ahead * jnp.exp(G), of_behind * jnp.exp(total - G)
    of_q, low = jt.dot(part, k, of_q * jnp.exp(G)), jt.dot(part.T, q, off)
    # q, and k in front of the state, stand beside e^G; k behind it and in pairs beside e^-G
    of_G = (wide(q) * of_q + wide(k) * (of_ahead - low)).sum(1, keepdims=True)
    of_total = (wide(k) * off).sum() + (of_kept * jnp.exp(total)[0]).sum()
    return of_q, of_ahead + low, jax.lax.cumsum(of_G, axis=0, reverse=True) + of_total


def pulled(residuals, cts, *, c: int, scale: float, save: bool):
    """The cotangents of the arguments of `linear_attention_chunks` for those of its results."""
    q, k, v, g, beta, mix, state = residuals
    ct, of_last = cts if save else (cts, None)
    sides = {"c": c, "bv": fit(v.shape[3], _SIDE)}
    ct = ct.astype(v.dtype)
    s, u = tuned(delta_states, num_warps=_WARPS)(k, v, g, beta, mix, state, **sides)
    ds, du, dv, of_first = tuned(delta_state_cotangents, num_warps=_WARPS)(
        k, ct, q, g, beta, mix, of_last, scale=scale, **sides
    )
    sides["bv"] = fit(v.shape[3], _SIDE // 2)
    run = tuned(delta_rule_pulled, num_warps=_WARPS)
    dq, dk, dbeta, dmix, *dg = run(q, k, v, g, beta, mix, ct, s, u, ds, du, scale=scale, **sides)
    dstate = None if state is None else of_first.astype(state.dtype)
    return grouped(dq, q), grouped(dk, k), dv, dg[0] if dg else None, dbeta, dmix, dstate
