"""Linear attention without a delta rule on GPUs: what chunks have in common with each other are the states in front of
them and the cotangents of those behind them, two recurrences over chunks; all else is computed for every chunk at once
(as in Yang et al. 2024)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import fit, sums_in, tuned, wide
from jtile.ops.recurrences import fade, first_state, logarithms, pairs

_SIDE = 64  # rows and columns of a part of a state
_WARPS = 8  # of a program that has several tiles of all of a chunk


def chunks_of(x, c: int):
    return jt.cdiv(x.shape[1], c)


def per_chunk(v, c: int, *shape: int, dtype=None):
    """An array [batch, heads, chunks, *shape]."""
    return jt.like(v, shape=(v.shape[0], v.shape[2], chunks_of(v, c), *shape), dtype=dtype or v.dtype)


def scalars(g, c: int, b, n, h):
    """(G, whole) of a decay of one number a position: its sums from the chunk's first position [c, 1], and that of the
    chunk [1, 1]; None for no decay."""
    if g is None:
        return None, None
    steps = logarithms(g.tiles(None, c, None, 1)[b, n, h, 0])
    return jnp.cumsum(steps, axis=0), steps.sum(0, keepdims=True)


def at_the_end(k, G, total):
    """k as it is found behind the chunk."""
    return k if G is None else fade(k, total - G)


def fading(whole, total, b, n, h, i, width: int):
    """The factors of rows of a state over a chunk, [width, 1] or [1, 1], or None."""
    if whole is not None:
        return jnp.exp(whole.tiles(None, None, None, width)[b, n, h, i])[:, None]
    return None if total is None else jnp.exp(total)


def from_state(S, kept):
    return S if kept is None else S * kept


# -- decays of a number for each row of the state: what is computed from q, k and them for every chunk ----------------


@jt.kernel(
    out_type=lambda g, *, c: jt.like(g, shape=(g.shape[0], chunks_of(g, c) * c, *g.shape[2:]), dtype=sums_in(g)),
    grid=lambda g, *, c: (g.shape[0], chunks_of(g, c), g.shape[2]),
)
def decay_sums(g, sums, *, c: int):
    """G [batch, chunks c, v heads, dk]: the sums of g's logarithms from the first position of their chunk on."""
    b, n, h = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    sides = (None, c, None, g.shape[3])
    sums.tiles(*sides)[b, n, h, 0] = jnp.cumsum(logarithms(g.tiles(*sides)[b, n, h, 0]), axis=0)


def _met(sums, b, n, h, here, level, c: int):
    """Pairs of positions t > s of a chunk meet where they part: in the middle of the least block of 2, 4, ... positions
    that has both. For blocks of 2^(level + 1), e to the decay from the middle to the positions behind it, and from
    those in front of it to the middle, [c, width], 1 for the others; and which pairs meet there, [c, c].

    No exponent is positive, so nothing overflows. The middle's sums are read again: a GPU would move them from thread
    to thread."""
    at, half = jt.arange(c), 1 << level
    G = sums[b, jt.ds(n * c, c), h, here]
    middle = sums[b, n * c + (at & -2 * half) + (half - 1), h, here]
    second = (at & half != 0)[:, None]
    ahead, behind = (jnp.exp(jnp.where(second == of, d, 0.0)) for of, d in ((True, G - middle), (False, middle - G)))
    t, s = at[:, None], at[None, :]
    return ahead, behind, ((t ^ s) >> level == 1) & (t > s)


def _times(x, factor):
    return (wide(x) * factor).astype(x.dtype)


@jt.kernel(
    out_type=lambda q, k, sums, *, c, exact=False: (
        *[jt.like(k, shape=(*k.shape[:2], *sums.shape[2:]))] * 2,
        per_chunk(sums, c, c, c, dtype=sums.dtype if exact else k.dtype),
        jt.like(sums, shape=(sums.shape[0], chunks_of(sums, c), *sums.shape[2:])),
    ),
    grid=lambda q, k, sums, *, c, **_: (k.shape[0], chunks_of(k, c), sums.shape[2]),
)
def gated_chunks(q, k, sums, ins, outs, own, whole, *, c: int, exact: bool = False):
    """q, k [batch, t, heads, dk] and the results of `decay_sums`; ins, outs [batch, t, v heads, dk]: q e^G, and k
    e^(G_c - G); own [batch, v heads, chunks, c, c]: pairs(q, k), with `exact` as they were summed; whole [batch,
    chunks, v heads, dk]: G_c."""
    b, n, h = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    dk, kh = k.shape[3], h // (sums.shape[2] // k.shape[2])
    tile = lambda x, head: x.tiles(None, c, None, dk)[b, n, head, 0]
    q_n, k_n, G, total = tile(q, kh), tile(k, kh), tile(sums, h), sums[b, n * c + (c - 1), h, :]
    same = jt.arange(c)[:, None] == jt.arange(c)[None, :]
    met = jnp.where(same, (wide(q_n) * wide(k_n)).sum(1, keepdims=True), 0.0)
    for level in jt.range(c.bit_length() - 1):
        ahead, behind, here = _met(sums, b, n, h, jt.ds(0, dk), level, c)
        met = met + jnp.where(here, jt.dot(_times(q_n, ahead), _times(k_n, behind).T), 0.0)
    own[b, h, n, :, :] = met.astype(own.dtype)
    ins.tiles(None, c, None, dk)[b, n, h, 0] = fade(q_n, G)
    outs.tiles(None, c, None, dk)[b, n, h, 0] = fade(k_n, total[None, :] - G)
    whole[b, n, h, :] = total


@jt.kernel(
    out_type=lambda q, k, sums, *_, **__: (
        *[jax.ShapeDtypeStruct((*k.shape[:2], *sums.shape[2:]),
                               k.dtype if sums.shape[2] == k.shape[2] else sums.dtype)] * 2,
        jt.like(sums),
    ),
    grid=lambda q, k, sums, *_, c, bk: (k.shape[0], chunks_of(k, c), sums.shape[2], jt.cdiv(k.shape[3], bk)),
)  # fmt: skip
def gated_chunks_pulled(q, k, sums, dins, douts, down, dwhole, dq, dk, dsums, *, c: int, bk: int):
    """The cotangents of q and k, [batch, t, v heads, dk], and of `sums` for those of the results of `gated_chunks`."""
    # dG = q dq - k dk, since q stands beside e^G, and k beside e^-G; and G_c is the last of them
    b, n, h, i = (jt.program_id(axis) for axis in range(4))
    kh, here = h // (sums.shape[2] // k.shape[2]), jt.ds(i * bk, bk)
    tile = lambda x, head: x.tiles(None, c, None, bk)[b, n, head, i]
    q_n, k_n, G, total = tile(q, kh), tile(k, kh), tile(sums, h), sums[b, n * c + (c - 1), h, here]
    ct, same = down[b, h, n, :, :].astype(k.dtype), jt.arange(c)[:, None] == jt.arange(c)[None, :]
    alone = jnp.where(same, wide(ct), 0.0).sum(1, keepdims=True)
    of_q, of_k = alone * wide(k_n), alone * wide(q_n)
    for level in jt.range(c.bit_length() - 1):
        ahead, behind, met = _met(sums, b, n, h, here, level, c)
        part = jnp.where(met, ct, jnp.zeros((), ct.dtype))
        of_q = of_q + ahead * jt.dot(part, _times(k_n, behind))
        of_k = of_k + behind * jt.dot(part.T, _times(q_n, ahead))
    off = wide(tile(douts, h)) * jnp.exp(total[None, :] - G)
    of_q, of_k = of_q + wide(tile(dins, h)) * jnp.exp(G), of_k + off
    of_total = (wide(k_n) * off).sum(0) + dwhole[b, n, h, here]
    of_G = wide(q_n) * of_q - wide(k_n) * of_k + jnp.where(jt.arange(c)[:, None] == c - 1, of_total[None, :], 0.0)
    for x, y in ((dq, of_q), (dk, of_k), (dsums, of_G)):
        x.tiles(None, c, None, bk)[b, n, h, i] = y.astype(x.dtype)


def _gated_forward(q, k, sums, **meta):
    return gated_chunks(q, k, sums, **meta), (q, k, sums)


def _gated_backward(residuals, cts, *, c: int, **_):
    q, k, sums = residuals
    kernel = tuned(gated_chunks_pulled, num_warps=4)
    dq, dk, dsums = kernel(q, k, sums, *cts, c=c, bk=fit(k.shape[3], _SIDE // 2))
    return grouped(dq, q), grouped(dk, k), dsums


gated_chunks.defvjp(_gated_forward, _gated_backward)


def grouped(ct, x):
    """The cotangent of x [batch, t, heads, dk] for those of all heads of values that share its heads."""
    if ct.shape == x.shape:
        return ct.astype(x.dtype)
    return ct.reshape(*x.shape[:3], -1, x.shape[3]).sum(3).astype(x.dtype)


# -- outputs, and the two recurrences --------------------------------------------------------------------------------


def _outputs(q, k, v, g, own, whole, state, *, save: bool, **_):
    batch, _, heads, dv = v.shape
    return (jt.like(v), jax.ShapeDtypeStruct((batch, heads, k.shape[3], dv), sums_in(v))) if save else jt.like(v)


@jt.kernel(out_type=_outputs, grid=lambda q, k, v, *_, bv, **__: (v.shape[0], v.shape[2], jt.cdiv(v.shape[3], bv)))
def linear_attention_states(
    q, k, v, g, own, whole, state, o, last=None, *, c: int, bv: int, scale: float, save: bool
):  # fmt: skip
    """q, k [batch, t, heads, dk]; v, o [batch, t, v heads, dv]; g [batch, t, v heads, 1] or None; or q, k, own and
    whole as `gated_chunks` gives them; state, last [batch, v heads, dk, dv] or None."""
    # o = scale ((q e^G) S + pairs(q, k) v)     S' = e^(G_c) S + (k e^(G_c - G))^T v     for all positions of a chunk
    b, h, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    dk, kh = k.shape[3], h // (v.shape[2] // k.shape[2])
    Q, K, V, O = (x.tiles(None, c, None, width) for x, width in ((q, dk), (k, dk), (v, bv), (o, bv)))
    S = first_state(state, (b, h, 0, j), (dk, bv), v)
    for n in jt.range(K.shape[1]):
        q_n, k_n, v_n = Q[b, n, kh, 0], K[b, n, kh, 0], V[b, n, h, j]
        G, total = scalars(g, c, b, n, h)
        own_n = pairs(q_n, k_n, G).astype(v.dtype) if own is None else own[b, h, n, :, :]
        O[b, n, h, j] = (jt.dot(own_n, v_n, jt.dot(fade(q_n, G), S.astype(v.dtype))) * scale).astype(o.dtype)
        S = jt.dot(at_the_end(k_n, G, total).T, v_n, from_state(S, fading(whole, total, b, n, h, 0, dk)))
    if last is not None:
        last.tiles(None, None, dk, bv)[b, h, 0, j] = S


def _parts(k, v, *, bk: int, bv: int):
    """Parts of the states of all heads."""
    return v.shape[0], v.shape[2], jt.cdiv(k.shape[3], bk), jt.cdiv(v.shape[3], bv)


@jt.kernel(
    out_type=lambda k, v, *_, c, **__: per_chunk(v, c, k.shape[3], v.shape[3]),
    grid=lambda k, v, *_, c, **sides: _parts(k, v, **sides),
)
def chunk_states(k, v, g, whole, state, s, *, c: int, bk: int, bv: int):
    """s [batch, v heads, chunks, dk, dv], the states in front of all chunks; arguments as of
    `linear_attention_states`."""
    b, h, i, j = (jt.program_id(axis) for axis in range(4))
    kh = h // (v.shape[2] // k.shape[2])
    K, V, each = k.tiles(None, c, None, bk), v.tiles(None, c, None, bv), s.tiles(None, None, None, bk, bv)
    S = first_state(state, (b, h, i, j), (bk, bv), v)
    for n in jt.range(K.shape[1]):
        each[b, h, n, i, j] = S.astype(s.dtype)
        G, total = scalars(g, c, b, n, h)
        kept = fading(whole, total, b, n, h, i, bk)
        S = jt.dot(at_the_end(K[b, n, kh, i], G, total).T, V[b, n, h, j], from_state(S, kept))


@jt.kernel(
    out_type=lambda q, ct, *_, c, **__: (
        per_chunk(ct, c, q.shape[3], ct.shape[3]),
        jax.ShapeDtypeStruct((ct.shape[0], ct.shape[2], q.shape[3], ct.shape[3]), sums_in(ct)),
    ),
    grid=lambda q, ct, *_, c, scale, **sides: _parts(q, ct, **sides),
)
def chunk_state_cotangents(q, ct, g, whole, of_last, ds, of_first, *, c: int, bk: int, bv: int, scale: float):
    """ds [batch, v heads, chunks, dk, dv], the cotangents of the states behind all chunks, and that of the first state;
    ct [batch, t, v heads, dv], that of o; of_last, that of the last state, or None."""
    b, h, i, j = (jt.program_id(axis) for axis in range(4))
    kh, count = h // (ct.shape[2] // q.shape[2]), chunks_of(q, c)
    Q, CT, each = q.tiles(None, c, None, bk), ct.tiles(None, c, None, bv), ds.tiles(None, None, None, bk, bv)
    D = first_state(of_last, (b, h, i, j), (bk, bv), ct)
    # D: the cotangent of the state behind chunk n; G: sums of its decays
    for back in jt.range(count):
        n = count - 1 - back
        each[b, h, n, i, j] = D.astype(ds.dtype)
        G, total = scalars(g, c, b, n, h)
        kept = fading(whole, total, b, n, h, i, bk)
        D = from_state(D, kept) + scale * jt.dot(fade(Q[b, n, kh, i], G).T, CT[b, n, h, j])
    of_first.tiles(None, None, bk, bv)[b, h, i, j] = D


# -- what is left, for every chunk -----------------------------------------------------------------------------------


def _pulled_types(q, k, v, g, own, whole, *_, c: int, **__):
    batch, t, heads, _ = v.shape
    dtype = k.dtype if heads == k.shape[2] else sums_in(v)
    rows = jax.ShapeDtypeStruct((batch, t, heads, k.shape[3]), dtype)
    more = (jt.like(own), jt.like(whole)) if own is not None else () if g is None else (jt.like(g),)
    return (rows, rows, jt.like(v), *more)


@jt.kernel(
    out_type=_pulled_types,
    grid=lambda q, k, v, *_, c, **__: (v.shape[0], chunks_of(v, c), v.shape[2]),
)
def linear_attention_states_pulled(
    q, k, v, g, own, whole, ct, s, ds, dq, dk, dv, dg=None, dwhole=None, *, c: int, bv: int, scale: float
):  # fmt: skip
    """The cotangents of q, k [batch, t, v heads, dk] and v; and of g, or of own (which is `dg` then) and whole."""
    b, n, h = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    width, kh = k.shape[3], h // (v.shape[2] // k.shape[2])
    q_n, k_n = (x.tiles(None, c, None, width)[b, n, kh, 0] for x in (q, k))
    V, CT, DV = (x.tiles(None, c, None, bv) for x in (v, ct, dv))
    S, DS = (x.tiles(None, None, None, width, bv) for x in (s, ds))
    G, total = scalars(g, c, b, n, h)
    own_n = pairs(q_n, k_n, G).astype(v.dtype) if own is None else own[b, h, n, :, :]
    behind = at_the_end(k_n, G, total)
    zeros = jt.zeros((c, width), sums_in(v))
    of_q, of_k, of_own, kept = zeros, zeros, jt.zeros((c, c), zeros.dtype), jt.zeros((width,), zeros.dtype)
    for j in jt.range(V.shape[3]):
        v_j, ct_j, s_j, ds_j = V[b, n, h, j], CT[b, n, h, j], S[b, h, n, 0, j], DS[b, h, n, 0, j]
        of_q, of_k = jt.dot(ct_j, s_j.T, of_q), jt.dot(v_j, ds_j.T, of_k)
        of_own = jt.dot(ct_j, v_j.T, of_own)
        DV[b, n, h, j] = jt.dot(own_n.T, (ct_j * scale).astype(v.dtype), jt.dot(behind, ds_j)).astype(dv.dtype)
        if total is not None or whole is not None:
            kept = kept + (wide(s_j) * wide(ds_j)).sum(1)
    of_q, of_own = scale * of_q, scale * of_own
    if own is not None:
        dg[b, h, n, :, :] = of_own.astype(dg.dtype)
        dwhole[b, n, h, :] = kept * jnp.exp(whole[b, n, h, :])
    else:
        of_q, of_k, of_g = _with_pairs(q_n, k_n, G, total, of_q, of_k, of_own, kept)
        if dg is not None:
            raw = wide(g.tiles(None, c, None, 1)[b, n, h, 0])
            of_g = jnp.where(raw == logarithms(raw), of_g, 0.0)
            dg.tiles(None, c, None, 1)[b, n, h, 0] = of_g.astype(dg.dtype)
    for x, y in ((dq, of_q), (dk, of_k)):
        x.tiles(None, c, None, width)[b, n, h, 0] = y.astype(x.dtype)


def _with_pairs(q, k, G, total, of_q, of_k, of_own, kept):
    """The cotangents of q, k and the steps of a decay of one number, for those of q e^G, k e^(G_c - G) and pairs(q, k),
    and the sum of the state's with what they stand beside."""
    # dG = sum_d (q dq - k dk), since q stands beside e^G, and k beside e^-G
    seen = jt.arange(q.shape[0])[:, None] >= jt.arange(q.shape[0])[None, :]
    if G is None:
        part = jnp.where(seen, of_own, 0.0).astype(q.dtype)
        return jt.dot(part, k, of_q), jt.dot(part.T, q, of_k), None
    part = (of_own * jnp.exp(jnp.where(seen, G - G.T, -jnp.inf))).astype(q.dtype)
    off = of_k * jnp.exp(total - G)
    of_q, of_k = jt.dot(part, k, of_q * jnp.exp(G)), jt.dot(part.T, q, off)
    of_G = (wide(q) * of_q - wide(k) * of_k).sum(1, keepdims=True)
    of_total = (wide(k) * off).sum() + (kept * jnp.exp(total)[0]).sum()
    return of_q, of_k, jax.lax.cumsum(of_G, axis=0, reverse=True) + of_total


def _forward(q, k, v, g, own, whole, state, *, save: bool, **meta):
    operands = (q, k, v, g, own, whole, state)
    return linear_attention_states(*operands, save=save, **meta), operands


def _backward(residuals, cts, *, c: int, scale: float, save: bool, **_):
    q, k, v, g, own, whole, state = residuals
    ct, of_last = cts if save else (cts, None)
    sides = {"bk": fit(k.shape[3], _SIDE), "bv": fit(v.shape[3], _SIDE), "c": c}
    ct = ct.astype(v.dtype)
    s = chunk_states(k, v, g, whole, state, **sides)
    ds, of_first = chunk_state_cotangents(q, ct, g, whole, of_last, scale=scale, **sides)
    kernel = tuned(linear_attention_states_pulled, num_warps=4 if g is None and own is None else _WARPS)
    bv = fit(v.shape[3], _SIDE if own is None else _SIDE // 2)
    dq, dk, dv, *more = kernel(q, k, v, g, own, whole, ct, s, ds, c=c, bv=bv, scale=scale)
    down, dwhole = more if own is not None else (None, None)
    dg = None if g is None else more[0]
    dstate = None if state is None else of_first.astype(state.dtype)
    return grouped(dq, q), grouped(dk, k), dv, dg, down, dwhole, dstate


linear_attention_states.defvjp(_forward, _backward)


def in_states(q, k, v, g, state, *, c: int, bv: int, scale: float, save: bool) -> Any:
    """Linear attention without a delta rule: o, and with `save` the last state."""
    own = whole = None
    if g is not None and g.shape[3] > 1:
        q, k, own, whole = tuned(gated_chunks, num_warps=_WARPS)(q, k, decay_sums(g, c=c), c=c)
        g = None
    return linear_attention_states(q, k, v, g, own, whole, state, c=c, bv=bv, scale=scale, save=save)
