"""Linear attention: a matrix of state that fades, is corrected and added to at every position (Katharopoulos et al.
2020; RetNet, Sun et al. 2023; gated, Yang et al. 2024; delta rule in chunks, Yang et al. 2024; gated delta rule, Yang,
Kautz and Hatamizadeh 2025)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import delta_states, gated_delta
from jtile.ops._shapes import check_float, check_rank, check_shape, fit, known, machine, sums_in, wide
from jtile.ops.chunk_states import in_states
from jtile.ops.dispatch import Implementation, Op, first_unmet, small_tiles, vector_cores
from jtile.ops.recurrences import chunk_of, fade, first_state, held_chunk, inverse, logarithms, pairs

STEPS = 4  # the most positions that are taken one by one


def _types(q, k, v, g, beta, *rest, save: bool, **_):
    """The types of o and, with `save`, of the state behind the last position."""
    batch, _, heads, dv = v.shape
    return (jt.like(v), jax.ShapeDtypeStruct((batch, heads, k.shape[3], dv), sums_in(v))) if save else jt.like(v)


def _grid(q, k, v, *_, bv: int, **__):
    return v.shape[0], v.shape[2], jt.cdiv(v.shape[3], bv)


@jt.kernel(out_type=_types, grid=_grid)
def linear_attention_chunks(q, k, v, g, beta, mix, state, o, last=None, *, c: int, bv: int, scale: float, save: bool):
    """q, k [batch, t, heads, dk]; v, o [batch, t, v heads, dv]; g [batch, t, v heads, 1 or dk] or None; beta [batch, t,
    v heads] and mix [batch, v heads, chunks, c, c] (see `delta_rule_mix`) or None; state, last [batch, v heads, dk, dv]
    or None."""
    # S_t = e^(g_t) S_(t-1) + k_t u_t^T     o_t = scale S_t^T q_t     u_t = v_t, or beta_t (v_t - S_(t-1)^T e^(g_t) k_t)
    # G: sums of g from the chunk's first position; S: the state in front of it. Then, for all positions of the chunk,
    # o = scale ((q e^G) S + pairs(q, k) u)     u = mix beta (v - (k e^G) S)     S' = e^(G_c) S + (k e^(G_c - G))^T u
    b, h, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    dk, kh = k.shape[3], h // (v.shape[2] // k.shape[2])
    Q, K, V, O = (x.tiles(None, c, None, n) for x, n in ((q, dk), (k, dk), (v, bv), (o, bv)))
    S = first_state(state, (b, h, 0, j), (dk, bv), v)
    for n in jt.range(K.shape[1]):
        q_n, k_n, u = Q[b, n, kh, 0], K[b, n, kh, 0], V[b, n, h, j]
        steps = None if g is None else logarithms(g.tiles(None, c, None, g.shape[3])[b, n, h, 0])
        G = None if steps is None else jnp.cumsum(steps, axis=0)
        S_n = S.astype(v.dtype)
        if mix is not None:
            error = wide(u) - jt.dot(fade(k_n, G), S_n)
            error = wide(beta.tiles(None, c, None)[b, n, h])[:, None] * error
            u = jt.dot(mix[b, h, n, :, :], error.astype(v.dtype)).astype(v.dtype)
        own = pairs(q_n, k_n, G).astype(v.dtype)
        O[b, n, h, j] = (jt.dot(own, u, jt.dot(fade(q_n, G), S_n)) * scale).astype(o.dtype)
        if steps is None:
            S = jt.dot(k_n.T, u, S)
        else:
            whole = steps.sum(0, keepdims=True)
            S = jt.dot(fade(k_n, whole - G).T, u, S * jnp.exp(whole).T)
    if last is not None:
        last.tiles(None, None, dk, bv)[b, h, 0, j] = S


@jt.kernel(
    out_type=lambda k, g, beta, *, c: jt.like(
        k, shape=(k.shape[0], beta.shape[2], jt.cdiv(k.shape[1], c), c, c)
    ),
    grid=lambda k, g, beta, *, c: (k.shape[0], beta.shape[2], jt.cdiv(k.shape[1], c)),
)  # fmt: skip
def delta_rule_mix(k, g, beta, mix, *, c: int):
    """Arguments as of `linear_attention_chunks`; mix [batch, v heads, chunks, c, c]."""
    # u_t = beta_t (v_t - S_(t-1)^T e^(g_t) k_t) holds the u of earlier positions: (I + beta pairs(k, k)) u = ...
    b, h, n = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    k_n = k.tiles(None, c, None, k.shape[3])[b, n, h // (beta.shape[2] // k.shape[2]), 0]
    G = None if g is None else jnp.cumsum(logarithms(g.tiles(None, c, None, g.shape[3])[b, n, h, 0]), axis=0)
    low = wide(beta.tiles(None, c, None)[b, n, h])[:, None] * pairs(k_n, k_n, G, diagonal=False)
    mix[b, h, n, :, :] = inverse(low).astype(mix.dtype)


@jt.kernel(out_type=_types, grid=_grid)
def linear_attention_steps(q, k, v, g, beta, state, o, last=None, *, bv: int, scale: float, save: bool):
    """`linear_attention_chunks` one position after the other, for few positions, as in decoding."""
    b, h, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    dk, kh = k.shape[3], h // (v.shape[2] // k.shape[2])
    V, O = v.tiles(None, None, None, bv), o.tiles(None, None, None, bv)
    # S: the state; t: position; u: v, less what the state has of k (the delta rule)
    S = first_state(state, (b, h, 0, j), (dk, bv), v)
    for t in jt.range(k.shape[1]):
        q_t, k_t, u = wide(q[b, t, kh, :])[:, None], wide(k[b, t, kh, :])[:, None], wide(V[b, t, h, j])[None, :]
        if g is not None:
            S = S * jnp.exp(wide(g[b, t, h, :]))[:, None]
        if beta is not None:
            u = wide(beta[b, t, h]) * (u - (k_t * S).sum(0, keepdims=True))
        S = S + k_t * u
        O[b, t, h, j] = ((q_t * S).sum(0) * scale).astype(o.dtype)
    if last is not None:
        last.tiles(None, None, dk, bv)[b, h, 0, j] = S


_with_states = linear_attention_chunks.with_options()  # whose gradient is of kernels for states, and for all chunks
_with_states.defvjp(
    lambda *args, **meta: (linear_attention_chunks(*args, **meta), args),
    lambda residuals, cts, *, bv, **meta: delta_states.pulled(residuals, cts, **meta),
)


@functools.partial(jax.jit, static_argnames=("scale", "return_state", "chunk"), inline=True)
def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    log_decay: jax.Array | None = None,
    beta: jax.Array | None = None,
    state: jax.Array | None = None,
    return_state: bool = False,
    scale: float | None = None,
    chunk: int | None = None,
) -> Any:
    """`o_t = scale S_t^T q_t`, where `S_t = e^(g_t) S_(t-1) + k_t u_t^T` is a matrix [dk, dv] for each head.

    `u_t` is `v_t`; with `beta` (the delta rule) `beta_t (v_t - (e^(g_t) S_(t-1))^T k_t)`, so that the state then maps
    k_t closer to v_t. `g` is `log_decay`: None (plain linear attention, or the delta rule), one number for a head and
    position (RetNet, Mamba-2, the gated delta rule), or one for each of the dk rows of the state (gated linear
    attention, Kimi delta attention). Up to 4 positions are taken one by one; more in chunks, whose positions meet each
    other in products of tiles. Differentiable in q, k, v, log_decay, beta and state.

    Args:
      q, k: float arrays [batch, t, heads, dk].
      v: float array [batch, t, v_heads, dv] of their dtype; heads divides v_heads (grouped values).
      log_decay: float array [batch, t, v_heads] or [batch, t, v_heads, dk] of logarithms, 0 and less; -inf
        empties the state.
      beta: float array [batch, t, v_heads], from 0 to 1 (or 2); the keys then have lengths of at most 1.
      state: float array [batch, v_heads, dk, dv], the state before the first position; default zeros.
      return_state: give the state behind the last position as well.
      scale: default 1 / sqrt(dk).
      chunk: positions of a chunk, a power of two; default 64 on GPUs (16 in float32 with `beta`; fewer where
        a block holds no more), fewer on CPUs.
    Returns:
      o, an array like `v`; with `return_state` (o, last), last [batch, v_heads, dk, dv] in float32. The state is kept
      in float32 (float64 for float64); products of tiles take it in the dtype of v.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or a chunk that do not fit.
    """
    op = "linear_attention"
    check_projections(op, q, k, v, log_decay=log_decay, beta=beta, state=state)
    check_chunk(op, chunk)
    (batch, t, heads, dv), dk = v.shape, k.shape[3]
    if log_decay is not None:
        if log_decay.ndim != 4:
            check_shape(op, "log_decay", log_decay, (batch, t, heads))
            log_decay = log_decay[..., None]
        else:
            check_shape(op, "log_decay", log_decay, (batch, t, heads, dk))
    if beta is not None:
        check_shape(op, "beta", beta, (batch, t, heads))
    if 0 in (*v.shape, dk):
        last = jnp.zeros((batch, heads, dk, dv), sums_in(v)) if state is None else state.astype(sums_in(v))
        return (jnp.zeros_like(v), last) if return_state else jnp.zeros_like(v)
    scale = dk**-0.5 if scale is None else float(scale)
    return _op(q, k, v, log_decay, beta, state, scale=scale, save=return_state, chunk=chunk)


def check_projections(op: str, q, k, v, *, state, **others) -> None:
    """Typed errors for q, k [batch, t, heads, dk], v [batch, t, v heads, dv] and states that do not fit each other."""
    check_rank(op, "q", q, 4, "[batch, t, heads, dk]")
    check_rank(op, "v", v, 4, "[batch, t, v_heads, dv]")
    check_shape(op, "k", k, q.shape)
    check_float(op, q=q, k=k, v=v, state=state, **others)
    if not q.dtype == k.dtype == v.dtype:
        raise KernelTypeError(f"{op}: q, k and v have one dtype, got {q.dtype.name}, {k.dtype.name} and {v.dtype.name}")
    check_shape(op, "v", v, (*q.shape[:2], *v.shape[2:]))
    if k.shape[2] == 0 or v.shape[2] % k.shape[2]:
        raise KernelValueError(f"{op}: {v.shape[2]} heads of values do not divide into {k.shape[2]} of keys")
    if state is not None:
        check_shape(op, "state", state, (v.shape[0], v.shape[2], k.shape[3], v.shape[3]))


def check_chunk(op: str, chunk: int | None) -> None:
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int | np.integer)):
        raise KernelTypeError(f"{op}: chunk is an int, a power of two, or None, got {chunk!r}")
    if chunk is not None and (chunk < 1 or chunk & (chunk - 1)):
        raise KernelValueError(f"{op}: chunk is a power of two, got {chunk}")


def columns(dk: int, dv: int) -> int:
    """Columns of the state that a program keeps in its registers, or its first cache."""
    return fit(dv, max(16, (machine().tile * 2) // jt.next_power_of_2(dk)))


def _long(q, k, v, *_, **__) -> str | None:
    return f"{known(v.shape[1])} positions" if known(v.shape[1]) > STEPS else None


def _steps(q, k, v, g, beta, state, *, scale: float, save: bool, chunk: int | None):
    bv = columns(k.shape[3], v.shape[3])
    return linear_attention_steps(q, k, v, g, beta, state, bv=bv, scale=scale, save=save)


def _chunk(v, g, beta, chunk: int | None) -> int:
    """The positions of a chunk."""
    # Work that grows with the length of chunks costs tensor cores little; a CPU has it besides the states' products.
    # (In float32 it has other units: 2 x 16 heads with the delta rule take an H200 1.1 ms in chunks of 16, 2.4 of 64;
    # with a decay for each row 1.18 ms, 1.36 of 32.)
    simple = beta is None and (g is None or g.shape[3] == 1)
    usual = (32 if simple else 16) if machine().whole else 16 if vector_cores() and beta is not None else 64
    if small_tiles():
        usual = min(usual, 16) if beta is not None and v.dtype.itemsize > 2 else usual
        usual = held_chunk(usual, g.shape[3], v.dtype.itemsize) if g is not None and g.shape[3] > 1 else usual
    return chunk_of(known(v.shape[1]), chunk or usual)


def _with_beta(q, k, v, g, beta, *_, **__) -> str | None:
    return None if beta is None else "the delta rule makes states one after the other"


def _in_states(q, k, v, g, beta, state, *, scale: float, save: bool, chunk: int | None):
    sides = {"c": _chunk(v, g, beta, chunk), "bv": columns(k.shape[3], v.shape[3])}
    return in_states(q, k, v, g, state, scale=scale, save=save, **sides)


def _chunks(q, k, v, g, beta, state, *, scale: float, save: bool, chunk: int | None):
    c, bv = _chunk(v, g, beta, chunk), columns(k.shape[3], v.shape[3])
    mix = None if beta is None else delta_rule_mix(k, g, beta, c=c)
    one_decay = g is None or g.shape[3] == 1
    bv = bv if mix is None else _of_products(bv, v)
    run = linear_attention_chunks if mix is None or not one_decay or machine().whole or vector_cores() else _with_states
    return run(q, k, v, g, beta, mix, state, c=c, bv=bv, scale=scale, save=save)


def _of_products(bv: int, v) -> int:
    """Columns of the state of a program whose products are instructions for each number: few, in float32 on a GPU."""
    return min(bv, 32) if v.dtype.itemsize > 2 and small_tiles() else bv


def _with_decays(q, k, v, g, beta, state, *, scale: float, save: bool, chunk: int | None):
    sides = {"c": _chunk(v, g, beta, chunk), "bv": _of_products(columns(k.shape[3], v.shape[3]), v)}
    return gated_delta.in_parts(q, k, v, g, beta, state, scale=scale, save=save, **sides)


def _not_with_decays(q, k, v, g, beta, *_, **__) -> str | None:
    return first_unmet(
        (beta is not None, "there is no delta rule"),
        (g is not None and g.shape[3] > 1, "all rows of a state decay alike"),
        (not vector_cores(), "NPUs take shorter chunks"),
    )


_op = Op(
    "linear_attention",
    Implementation("steps", _steps, _long),
    Implementation("decays of chunks, then the delta rule", _with_decays, _not_with_decays, needs=("warps",)),
    Implementation("states of chunks", _in_states, _with_beta, needs=("warps",)),
    Implementation("chunks", _chunks),
)


def linear_attention_reference(
    q, k, v, *, log_decay=None, beta=None, state=None, return_state=False, scale=None, chunk=None
):
    """`linear_attention` in jnp, one position after the other."""
    f = sums_in(v)
    (batch, t, heads, dv), (kh, dk) = v.shape, k.shape[2:]
    q_, k_ = (jnp.repeat(x.astype(f), heads // kh, axis=2) for x in (q, k))
    g = jnp.zeros((batch, t, heads, 1), f) if log_decay is None else log_decay.astype(f).reshape(batch, t, heads, -1)
    start = jnp.zeros((batch, heads, dk, dv), f) if state is None else state.astype(f)
    dot = functools.partial(jnp.einsum, precision="highest")

    def step(S, now):
        q_t, k_t, v_t, g_t, b_t = now
        S = S * jnp.exp(g_t)[..., None]
        u = v_t if beta is None else b_t[..., None] * (v_t - dot("bhkv,bhk->bhv", S, k_t))
        S = S + k_t[..., None] * u[..., None, :]
        return S, dot("bhkv,bhk->bhv", S, q_t)

    ones = jnp.ones((batch, t, heads), f) if beta is None else beta.astype(f)
    times = [x.swapaxes(0, 1) for x in (q_, k_, v.astype(f), g, ones)]
    last, o = jax.lax.scan(step, start, times)
    o = (o.swapaxes(0, 1) * (dk**-0.5 if scale is None else scale)).astype(v.dtype)
    return (o, last) if return_state else o
