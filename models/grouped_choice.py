"""The choice of experts that stand in groups (DeepSeek-V3), as one kernel: which groups are best, and which of their
experts. XLA sorts three times for it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt

MOST = 16  # experts of a token, and groups that are chosen: each is a round


@jt.kernel(
    out_type=lambda s, b, *, k, **_: tuple(jax.ShapeDtypeStruct((s.shape[1], k), d) for d in (jnp.int32, jnp.float32)),
    grid=lambda s, b, **_: s.shape[1],
)
def best_of_groups(s, b, experts, weights, *, groups: int, best: int, k: int, normalised: bool, scale: float):
    """The `k` experts of each token that `choose` gives, and their weights; s float32 [parts, tokens, experts], whose
    sum over the parts are the scores, b float32 [experts]. A token is a program."""
    # p = sigmoid(s)     a group is as good as the sum of its two largest p + b
    i, n = jt.program_id(0), s.shape[2]
    shape = groups, n // groups
    # one part after the other: all of them are more than a warp holds
    p = jax.nn.sigmoid(functools.reduce(jnp.add, [s[q, i, :] for q in range(s.shape[0])])).reshape(shape)
    rank, number = p + b[...].reshape(shape), jt.arange(n).reshape(shape)
    first = rank.max(1)
    at = jnp.where(rank == first[:, None], number, n).min(1)
    of_group = first + jnp.where(number == at[:, None], -jnp.inf, rank).max(1)
    left, group = jnp.ones((groups,), jnp.bool_), jt.arange(groups)
    for _ in range(best):
        top = jnp.where(left, of_group, -jnp.inf).max()
        left = left & (group != jnp.where(left & (of_group == top), group, groups - 1).min())
    left = jnp.broadcast_to(~left[:, None], shape)
    found, total = [], jnp.float32(0)
    for _ in range(k):
        top = jnp.where(left, rank, -jnp.inf).max()
        at = jnp.where(left & (rank == top), number, n - 1).min()
        found.append((at, jnp.where(number == at, p, 0).sum()))
        left, total = left & (number != at), total + found[-1][1]
    factor = jnp.float32(scale) / (total + jnp.float32(1e-20)) if normalised else jnp.float32(scale)
    for t, (at, share) in enumerate(found):
        experts[i, t] = at.astype(jnp.int32)
        weights[i, t] = share * factor


def shares(scores, experts, *, normalised: bool, scale: float):
    """The weights float32 [tokens, k] of chosen experts, from their scores float32 [tokens, experts]."""
    found = jnp.take_along_axis(jax.nn.sigmoid(scores), experts, axis=1)
    return scale * (found / (found.sum(1, keepdims=True) + 1e-20) if normalised else found)


def _forward(s, b, **meta):
    experts, weights = best_of_groups(s, b, **meta)
    return (experts, weights), (s, experts)


def _backward(residuals, cts, *, normalised: bool, scale: float, **_):
    s, experts = residuals
    run = lambda s: shares(s.sum(0), experts, normalised=normalised, scale=scale)
    return *jax.vjp(run, s)[1](cts[1]), None


best_of_groups.defvjp(_forward, _backward)


def best(parts, bias, **options):
    """`best_of_groups` in one warp, where the number of warps was measured: rounds of a warp need no barriers."""
    measured = "measured warps" in jt.target().features
    return (best_of_groups.with_options(num_warps=1) if measured else best_of_groups)(parts, bias, **options)


def fits(experts: int, groups: int, best: int, k: int) -> bool:
    """Whether `best_of_groups` chooses `k` of so many experts, in the `best` of `groups`: those of a tile of a GPU."""
    whole = all(n == jt.next_power_of_2(n) for n in (groups, experts // groups))
    return "warps" in jt.target().features and whole and max(best, k) <= MOST


def choose(scores, bias, *, groups: int, best: int, k: int, normalised: bool, scale: float):
    """What `best_of_groups` gives, in jnp, for the sums of the scores, float32 [tokens, experts]."""
    tokens, n = scores.shape
    ranking = (jax.nn.sigmoid(scores) + bias[None, :]).reshape(tokens, groups, -1)
    of_group = jax.lax.top_k(ranking, 2)[0].sum(-1)  # a group is as good as its two best experts
    chosen = jax.lax.top_k(of_group, best)[1]
    allowed = (chosen[:, :, None] == jnp.arange(groups, dtype=chosen.dtype)[None, None, :]).any(1)
    ranking = jnp.where(allowed[:, :, None], ranking, -jnp.inf).reshape(tokens, n)
    experts = jax.lax.top_k(ranking, k)[1]
    return experts, shares(scores, experts, normalised=normalised, scale=scale)
