"""What stands in front of the mixture of experts of very few tokens on GPUs, in one kernel: the sum with the residual,
its RMS norm, the scores of the router, and the choice of experts.

Each of the three kernels that do the same apart takes about as long as its launch. Every program computes the norm by
itself, while its rows of the router are on their way, and the program that comes last has all scores.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile import ops
from jtile.ops.sorting import order_of

from . import few_tokens
from .few_tokens import ROWS, TOGETHER, WIDEST

EXPERTS = 128  # experts whose scores one program compares with each other at once
ON = False  # whether models take this kernel: no device has measured it yet


def _types(x, delta, norm, w, *, k: int, **_):
    tokens, n = x.shape[0], w.shape[0]
    of = lambda width, dtype: jax.ShapeDtypeStruct((tokens, width), dtype)
    return jt.like(x), jt.like(delta), of(n, jnp.float32), of(k, jnp.int32), of(k, jnp.float32)


@jt.kernel(out_type=_types, grid=lambda x, delta, norm, w, **_: jt.cdiv(w.shape[0], ROWS))
def norm_and_choice(
    x, delta, norm, w, total, normed, scores, experts, weights, *, eps: float, k: int, normalised: bool
):
    """total = x + delta [tokens, hidden], normed its RMS norm with the weight norm [hidden]; scores [tokens, experts]
    of normed and the router w [experts, hidden]; the `k` experts of each token with the largest ones, and their
    probabilities: see `few_tokens.most_probable`."""
    # t = x + d     y = t / sqrt(mean(t^2) + eps) * norm     s = W y
    j, (tokens, hidden) = jt.program_id(0), x.shape
    W, weight = w.tiles(ROWS, hidden)[j, 0].astype(jnp.float32), norm.tiles(hidden)[0].astype(jnp.float32)
    X, D, T, Y = (ref.tiles(None, hidden) for ref in (x, delta, total, normed))
    for t in range(tokens):
        both = D[t, 0].astype(jnp.float32) + X[t, 0].astype(jnp.float32)
        row = both * jax.lax.rsqrt((both * both).sum() * (1.0 / hidden) + eps) * weight
        row = row.astype(normed.dtype)
        if j == 0:
            T[t, 0], Y[t, 0] = both.astype(total.dtype), row
        scores.tiles(None, ROWS)[t, j] = (W * row.astype(jnp.float32)[None, :]).sum(1)
    if jt.arrive(jt.counters("scores", 1), 0, jt.num_programs(0)):
        for t in range(tokens):
            _choose(t, scores, experts, weights, k, normalised)


def _choose(t: int, scores, experts, weights, k: int, normalised: bool) -> None:
    """The choice of token t: an expert's place is the number of those with larger scores, or the same one and in front
    of it."""
    row, column = scores[t, :], jt.arange(scores.shape[1])
    key = order_of(row)
    larger, alike = key[None, :] > key[:, None], key[None, :] == key[:, None]
    place = (larger | (alike & (column[None, :] < column[:, None]))).astype(jnp.int32).sum(1)
    chosen, shares = place < k, jnp.exp(row - row.max())
    whole = (jnp.where(chosen, shares, 0.0) if normalised else shares).sum()
    jt.store(experts, (t, place), column.astype(jnp.int32), mask=chosen)
    jt.store(weights, (t, place), shares / whole, mask=chosen)


def _forward(*arrays, **meta):
    found = norm_and_choice(*arrays, **meta)
    return found, (*arrays, found[3])


def _backward(residuals, cts, *, eps: float, normalised: bool, **_):
    *arrays, experts = residuals

    def apart(x, delta, norm, w):
        normed, total = ops.rms_norm(delta, norm, eps=eps, residual=x)
        s = few_tokens.score_rows(normed, w, bn=ROWS)
        return total, normed, s[0], few_tokens.shares_of(s, experts, normalised)

    return jax.vjp(apart, *arrays)[1]((*cts[:3], cts[4]))


norm_and_choice.defvjp(_forward, _backward)


def takes(x, delta, w, k: int) -> bool:
    """Whether `choose` is made for x and delta [tokens, hidden], and a router w [experts, hidden] that chooses k."""
    if not ON or not few_tokens.threads() or x.ndim != 2 or x.shape != delta.shape:
        return False
    (tokens, hidden), experts = x.shape, w.shape[0]
    few = isinstance(tokens, int) and 0 < tokens <= TOGETHER
    return few and hidden <= WIDEST and k <= experts <= EXPERTS


@functools.partial(jax.jit, static_argnames=("eps", "k", "normalised"), inline=True)
def choose(x, delta, norm, w, *, eps: float, k: int, normalised: bool):
    """(x + delta, its RMS norm, the experts and weights that `few_tokens.choose` gives for that norm), where `takes` is
    true of the arguments."""
    total, normed, _, experts, weights = norm_and_choice(x, delta, norm, w, eps=eps, k=k, normalised=normalised)
    return total, normed, experts, weights
