"""The time mixing of RWKV-7 (Peng et al. 2025): a state that fades by rows and is corrected along one direction."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gated_delta
from jtile.ops._shapes import check_shape, known, machine, sums_in, wide
from jtile.ops.dispatch import Implementation, Op, first_unmet, vector_cores
from jtile.ops.linear_attention import STEPS, check_chunk, check_projections, columns
from jtile.ops.recurrences import chunk_of, fade, first_state, held_chunk, inverse, logarithms, pairs

PARTS_CHUNK = 32  # where pairs have kernels of their own: an H200 took 2.1 ms forwards, with 64 positions 3.3
CHUNK = 16  # positions; there are four kinds of pairs, most of whose work grows with the length of chunks


def _types(r, g, k, v, *_, save: bool, **__):
    """The types of o and, with `save`, of the state behind the last position."""
    batch, _, heads, dv = v.shape
    return (jt.like(v), jax.ShapeDtypeStruct((batch, heads, k.shape[3], dv), sums_in(v))) if save else jt.like(v)


def _grid(r, g, k, v, *_, bv: int, **__):
    return v.shape[0], v.shape[2], jt.cdiv(v.shape[3], bv)


@jt.kernel(
    out_type=lambda a, b, g, *, c: jt.like(a, shape=(a.shape[0], a.shape[2], jt.cdiv(a.shape[1], c), c, c)),
    grid=lambda a, b, g, *, c: (a.shape[0], a.shape[2], jt.cdiv(a.shape[1], c)),
)
def rwkv7_mix(a, b, g, mix, *, c: int):
    """a, b, g [batch, t, heads, dk]; mix [batch, heads, chunks, c, c]."""
    # y_t = S_(t-1)^T a_t holds the y of earlier positions: (I - pairs(a, b)) y = ...
    i, h, n = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    a_n, b_n, g_n = (x.tiles(None, c, None, x.shape[3])[i, n, h, 0] for x in (a, b, g))
    g_n = logarithms(g_n)
    G = jnp.cumsum(g_n, axis=0)
    mix[i, h, n, :, :] = inverse(-pairs(a_n, b_n, G, at=G - g_n, diagonal=False)).astype(mix.dtype)


@jt.kernel(out_type=_types, grid=_grid)
def rwkv7_chunks(r, g, k, v, a, b, mix, state, o, last=None, *, c: int, bv: int, scale: float, save: bool):
    """r, g, k, a, b [batch, t, heads, dk]; v, o [batch, t, heads, dv]; mix: see `rwkv7_mix`; state, last [batch, heads,
    dk, dv] or None."""
    # S_t = e^(g_t) S_(t-1) + b_t y_t^T + k_t v_t^T     y_t = S_(t-1)^T a_t     o_t = scale S_t^T r_t
    # G: sums of g from the chunk's first position; H = G - g; S: the state in front of it. Then, for the whole chunk,
    # y = mix ((a e^H) S + pairs(a, k) v)     o = scale ((r e^G) S + pairs(r, b) y + pairs(r, k) v)
    i, h, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    dk = k.shape[3]
    V, O = v.tiles(None, c, None, bv), o.tiles(None, c, None, bv)
    S = first_state(state, (i, h, 0, j), (dk, bv), v)
    for n in jt.range(V.shape[1]):
        r_n, g_n, k_n, a_n, b_n = (x.tiles(None, c, None, dk)[i, n, h, 0] for x in (r, g, k, a, b))
        v_n, g_n, S_n = V[i, n, h, j], logarithms(g_n), S.astype(v.dtype)
        G = jnp.cumsum(g_n, axis=0)
        H, whole = G - g_n, g_n.sum(0, keepdims=True)
        own = pairs(a_n, k_n, G, at=H, diagonal=False).astype(v.dtype)
        y = jt.dot(own, v_n, jt.dot(fade(a_n, H), S_n)).astype(v.dtype)
        y = jt.dot(mix[i, h, n, :, :], y).astype(v.dtype)
        out = jt.dot(pairs(r_n, b_n, G).astype(v.dtype), y, jt.dot(fade(r_n, G), S_n))
        O[i, n, h, j] = (jt.dot(pairs(r_n, k_n, G).astype(v.dtype), v_n, out) * scale).astype(o.dtype)
        S = jt.dot(fade(b_n, whole - G).T, y, S * jnp.exp(whole).T)
        S = jt.dot(fade(k_n, whole - G).T, v_n, S)
    if last is not None:
        last.tiles(None, None, dk, bv)[i, h, 0, j] = S


@jt.kernel(out_type=_types, grid=_grid)
def rwkv7_steps(r, g, k, v, a, b, state, o, last=None, *, bv: int, scale: float, save: bool):
    """`rwkv7_chunks` one position after the other, for few positions, as in decoding."""
    i, h, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    dk = k.shape[3]
    V, O = v.tiles(None, None, None, bv), o.tiles(None, None, None, bv)
    S = first_state(state, (i, h, 0, j), (dk, bv), v)
    for t in jt.range(k.shape[1]):
        r_t, g_t, k_t, a_t, b_t = (wide(x[i, t, h, :])[:, None] for x in (r, g, k, a, b))
        y = (a_t * S).sum(0, keepdims=True)
        S = S * jnp.exp(g_t) + b_t * y + k_t * wide(V[i, t, h, j])[None, :]
        O[i, t, h, j] = ((r_t * S).sum(0) * scale).astype(o.dtype)
    if last is not None:
        last.tiles(None, None, dk, bv)[i, h, 0, j] = S


@jt.kernel(out_type=_types, grid=_grid)
def rwkv7_positions(r, g, k, v, a, b, state, o, last=None, *, bv: int, scale: float, save: bool):
    """`rwkv7_steps` for many positions on a CPU, where the state stays in a cache, and is read once for both sums."""
    # S_t^T r_t = S_(t-1)^T (e^(g_t) r_t) + y_t (b_t . r_t) + v_t (k_t . r_t)
    i, h, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    dk = k.shape[3]
    V, O = v.tiles(None, None, None, bv), o.tiles(None, None, None, bv)
    S = first_state(state, (i, h, 0, j), (dk, bv), v)
    for t in jt.range(k.shape[1]):
        r_t, g_t, k_t, a_t, b_t = (wide(x[i, t, h, :])[:, None] for x in (r, g, k, a, b))
        v_t, fades = wide(V[i, t, h, j])[None, :], jnp.exp(g_t)
        y, before = (a_t * S).sum(0, keepdims=True), (r_t * fades * S).sum(0, keepdims=True)
        S = S * fades + b_t * y + k_t * v_t
        O[i, t, h, j] = ((before + (r_t * b_t).sum() * y + (r_t * k_t).sum() * v_t)[0] * scale).astype(o.dtype)
    if last is not None:
        last.tiles(None, None, dk, bv)[i, h, 0, j] = S


def _positions_backward(residuals, ct, *, scale: float, save: bool, **_):
    """The rule of reverse mode of chunks, which save a state for each chunk, not for each position."""
    run = functools.partial(_chunks, scale=scale, save=save, chunk=None)
    return jax.vjp(run, *residuals)[1](ct)


rwkv7_positions.defvjp(lambda *args, **meta: (rwkv7_positions(*args, **meta), args), _positions_backward)


@functools.partial(jax.jit, static_argnames=("scale", "return_state", "chunk"), inline=True)
def rwkv7(
    r: jax.Array, log_decay: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array, b: jax.Array, *,
    state: jax.Array | None = None, return_state: bool = False, scale: float = 1.0, chunk: int | None = None,
) -> Any:  # fmt: skip
    """`o_t = scale S_t^T r_t`, where `S_t = diag(e^(g_t)) S_(t-1) + b_t (a_t^T S_(t-1)) + k_t v_t^T`; g: `log_decay`.

    Differentiable in all arrays. In RWKV-7 `a_t` is minus the normalised key, and `b_t` the normalised key times the
    rate of learning in the context.

    Args:
      r, log_decay, k, a, b: float arrays [batch, t, heads, dk]; log_decay holds logarithms, 0 and less.
      v: float array [batch, t, heads, dv]; r, k, v, a and b have one dtype.
      state: float array [batch, heads, dk, dv], the state before the first position; default zeros.
      return_state: give the state behind the last position as well.
      chunk: positions of a chunk, a power of two; default 16, on GPUs 32. Where it is not given, CPUs take positions
        one by one forwards, and NPUs, whose memory does not hold the pairs of a chunk, forwards and backwards.
    Returns:
      o, an array like `v`; with `return_state` (o, last), last [batch, heads, dk, dv] in float32 (float64 for float64).
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or a chunk that do not fit.
    """
    check_projections("rwkv7", r, k, v, state=state, log_decay=log_decay, a=a, b=b)
    check_shape("rwkv7", "v", v, (*r.shape[:3], v.shape[3]))
    for name, x in (("log_decay", log_decay), ("a", a), ("b", b)):
        check_shape("rwkv7", name, x, r.shape)
    check_chunk("rwkv7", chunk)
    a, b = a.astype(v.dtype), b.astype(v.dtype)
    if 0 in (*v.shape, k.shape[3]):
        last = jnp.zeros((v.shape[0], *v.shape[2:3], k.shape[3], v.shape[3]), sums_in(v)) if state is None else state
        return (jnp.zeros_like(v), last.astype(sums_in(v))) if return_state else jnp.zeros_like(v)
    return _op(r, log_decay, k, v, a, b, state, scale=float(scale), save=return_state, chunk=chunk)


def _long(r, g, k, v, *_, **__) -> str | None:
    return f"{known(v.shape[1])} positions" if known(v.shape[1]) > STEPS and not vector_cores() else None


def _steps(r, g, k, v, a, b, state, *, scale: float, save: bool, chunk: int | None):
    return rwkv7_steps(r, g, k, v, a, b, state, bv=columns(k.shape[3], v.shape[3]), scale=scale, save=save)


def _positions(r, g, k, v, a, b, state, *, scale: float, save: bool, chunk: int | None):
    return rwkv7_positions(r, g, k, v, a, b, state, bv=min(v.shape[3], 64), scale=scale, save=save)


def _no_positions(*_, chunk: int | None, **__) -> str | None:
    return first_unmet((machine().whole, "few programs would wait for memory"), (chunk is None, f"chunks of {chunk}"))


def _chunks(r, g, k, v, a, b, state, *, scale: float, save: bool, chunk: int | None):
    c, bv = chunk_of(known(v.shape[1]), chunk or CHUNK), columns(k.shape[3], v.shape[3])
    return rwkv7_chunks(r, g, k, v, a, b, rwkv7_mix(a, b, g, c=c), state, c=c, bv=bv, scale=scale, save=save)


def _parts(r, g, k, v, a, b, state, *, scale: float, save: bool, chunk: int | None):
    usual = held_chunk(PARTS_CHUNK, k.shape[3], v.dtype.itemsize)
    sides = {"c": chunk_of(known(v.shape[1]), chunk or usual), "bv": columns(k.shape[3], v.shape[3])}
    return gated_delta.rwkv7_in_parts(r, g, k, v, a, b, state, scale=scale, save=save, **sides)


def _not_parts(*_, **__) -> str | None:
    return "NPUs take single positions" if vector_cores() else None


_op = Op(
    "rwkv7",
    Implementation("steps", _steps, _long),
    Implementation("decays of chunks, then the recurrence", _parts, _not_parts, needs=("warps",)),
    Implementation("positions", _positions, _no_positions),
    Implementation("chunks", _chunks),
)


def rwkv7_reference(r, log_decay, k, v, a, b, *, state=None, return_state=False, scale=1.0, chunk=None):
    """`rwkv7` in jnp, one position after the other."""
    f = sums_in(v)
    shape = (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    start = jnp.zeros(shape, f) if state is None else state.astype(f)
    dot = functools.partial(jnp.einsum, "bhkv,bhk->bhv", precision="highest")

    def step(S, now):
        r_t, g_t, k_t, v_t, a_t, b_t = now
        y = dot(S, a_t)
        S = S * jnp.exp(g_t)[..., None] + b_t[..., None] * y[..., None, :] + k_t[..., None] * v_t[..., None, :]
        return S, dot(S, r_t)

    last, o = jax.lax.scan(step, start, tuple(x.astype(f).swapaxes(0, 1) for x in (r, log_decay, k, v, a, b)))
    o = (o.swapaxes(0, 1) * scale).astype(v.dtype)
    return (o, last) if return_state else o
