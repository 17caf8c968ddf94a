"""The mixture of experts of a few tokens on GPUs, as a decoding step has them: the choice of their experts, and
products with the matrices of these experts, straight from the stacks and without a sort.

Such products are as fast as the matrices come from memory: a program has some rows of a matrix in registers at once.
On other devices, and for more tokens, `layers.linear`, `ops.top_k` and `experts.mixture` do the same.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile import ops
from jtile.ops import QuantizedTensor

from . import layers

MOST = 128  # up to so many tokens, programs of a few experts compute the scores; for more, tiles are as fast
TOGETHER = 4  # tokens for which such a program has all of the terms: one takes 2.3 us so, and 3.5 in parts
ROWS = 4  # rows of a matrix in a program
WIDEST = 4096  # columns of a matrix that a program holds at once
_EXPERTS, _TERMS = 16, 128  # experts and terms of a program of scores
_ROUNDS = 2  # rounds of terms of such a program at most, each of which takes a microsecond
_LANES = 256  # experts whose scores one warp holds


def _threads() -> bool:
    """Whether the target at hand runs programs by warps of threads."""
    return "warps" in jt.target().features


def _on_nvidia(kernel: jt.Kernel, warps: int) -> jt.Kernel:
    """The kernel with so many warps where their number was measured."""
    return kernel.with_options(num_warps=warps) if "measured warps" in jt.target().features else kernel


# -- which experts -----------------------------------------------------------------------------------------------------


@jt.kernel(
    out_type=lambda x, w, *, parts, **_: jax.ShapeDtypeStruct((parts, x.shape[0], w.shape[0]), jnp.float32),
    grid=lambda x, w, *, bt, bn, parts, **_: (jt.cdiv(x.shape[0], bt), jt.cdiv(w.shape[0], bn), parts),
)
def router_scores(x, w, y, *, bt: int, bn: int, bk: int, parts: int):
    """y [parts, tokens, experts], whose sum over the parts is x [tokens, hidden] times the transposed w [experts,
    hidden]; a part has an equal share of the terms, so that many programs read w at once."""
    # y_p = X_p W_p^T
    i, j, p = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    X, W = x.tiles(bt, bk), w.tiles(bn, bk)
    each = jt.cdiv(X.shape[1], parts)
    total = jnp.zeros((bt, bn), jnp.float32)
    for q in jt.range(p * each, jnp.minimum(p * each + each, X.shape[1])):
        total = jt.dot(X[i, q].astype(jnp.float32), W[j, q].astype(jnp.float32).T, total)
    y.tiles(None, bt, bn)[p, i, j] = total


def _scores_backward(residuals, dy, *, bk: int, parts: int, **_):
    x, w = residuals
    hidden = x.shape[1]
    size = jt.cdiv(jt.cdiv(hidden, bk), parts) * bk

    def by_part(a):
        a = jnp.pad(a.astype(jnp.float32), ((0, 0), (0, parts * size - hidden)))
        return a.reshape(a.shape[0], parts, size).swapaxes(0, 1)

    whole = lambda a: a.swapaxes(0, 1).reshape(-1, parts * size)[:, :hidden]
    dx, dw = ops.matmul(dy, by_part(w)), ops.matmul(dy, by_part(x), transpose_a=True)
    return whole(dx).astype(x.dtype), whole(dw).astype(w.dtype)


router_scores.defvjp(lambda x, w, **meta: (router_scores(x, w, **meta), (x, w)), _scores_backward)


@jt.kernel(
    out_type=lambda x, w, **_: jax.ShapeDtypeStruct((1, x.shape[0], w.shape[0]), jnp.float32),
    grid=lambda x, w, *, bn, **_: jt.cdiv(w.shape[0], bn),
)
def score_rows(x, w, y, *, bn: int):
    """`router_scores` in one part, for one to a few tokens: a program has `bn` experts, without tensor cores."""
    # y = x W^T
    j, hidden = jt.program_id(0), x.shape[1]
    W = w.tiles(bn, hidden)[j, 0].astype(jnp.float32)
    for t in range(x.shape[0]):
        y.tiles(None, None, bn)[0, t, j] = (W * x.tiles(None, hidden)[t, 0].astype(jnp.float32)[None, :]).sum(1)


score_rows.defvjp(
    lambda x, w, **meta: (score_rows(x, w, **meta), (x, w)),
    lambda residuals, dy, **_: _scores_backward(residuals, dy, bk=residuals[0].shape[1], parts=1),
)


def score_parts(x, w):
    """The scores [parts, tokens, experts], whose sum over the parts `scores` gives."""
    tokens = x.shape[0]
    few = isinstance(tokens, int) and 0 < tokens <= MOST
    if not few or not _threads() or isinstance(w, QuantizedTensor):
        return layers.linear(x.astype(jnp.float32), w)[None]
    if tokens <= TOGETHER and x.shape[1] <= WIDEST:
        return score_rows(x, w, bn=ROWS)
    bt = min(max(jt.next_power_of_2(tokens), 16), 64)
    steps, blocks = jt.cdiv(x.shape[1], _TERMS), jt.cdiv(tokens, bt) * jt.cdiv(w.shape[0], _EXPERTS)
    most = max(128 // blocks, 1)
    parts = max(min(jt.next_power_of_2(steps), 1 << most.bit_length() - 1), jt.next_power_of_2(jt.cdiv(steps, _ROUNDS)))
    return router_scores(x, w, bt=bt, bn=_EXPERTS, bk=_TERMS, parts=parts)


def scores(x, w):
    """The products of x float [tokens, hidden] with the router's rows w: float32 [tokens, experts]."""
    return summed(score_parts(x, w))


def summed(parts):
    """The sum of `score_parts`."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


@jt.kernel(
    out_type=lambda s, *, k, **_: tuple(jax.ShapeDtypeStruct((s.shape[1], k), d) for d in (jnp.int32, jnp.float32)),
    grid=lambda s, **_: s.shape[1],
)
def most_probable(s, experts, weights, *, k: int, normalised: bool):
    """The `k` experts of each token with the largest scores, the sums of s [parts, tokens, experts] over the parts, and
    their probabilities in the softmax of all experts, or of these k if `normalised`."""
    # p = e^(s - max s) / sum e^(s - max s)
    i, n = jt.program_id(0), s.shape[2]
    row, column = s[:, i, :].sum(0), jt.arange(n)
    top = row.max()
    shares = jnp.exp(row - top)
    left, total, found = jnp.ones((n,), jnp.bool_), jnp.float32(0), []
    for _ in range(k):
        best = jnp.where(left, row, -jnp.inf).max()
        at = jnp.where(left & (row == best), column, n - 1).min()
        left = left & (column != at)
        found.append((at, jnp.exp(best - top)))
        total = total + found[-1][1]
    whole = total if normalised else shares.sum()
    for t, (at, share) in enumerate(found):
        experts[i, t] = at.astype(jnp.int32)
        weights[i, t] = share / whole


def _shares(s, experts, normalised: bool):
    p = jax.nn.softmax(s.sum(0))
    w = jnp.take_along_axis(p, experts, axis=1)
    return w / w.sum(1, keepdims=True) if normalised else w


def _probable_forward(s, **meta):
    experts, weights = most_probable(s, **meta)
    return (experts, weights), (s, experts)


def _probable_backward(residuals, cts, *, normalised: bool, **_):
    s, experts = residuals
    return jax.vjp(lambda s: _shares(s, experts, normalised), s)[1](cts[1])


most_probable.defvjp(_probable_forward, _probable_backward)


def most_probable_of(parts, k: int, normalised: bool):
    """`most_probable` with as many warps as are quickest."""
    return _on_nvidia(most_probable, 1 if parts.shape[2] <= _LANES else 4)(parts, k=k, normalised=normalised)


def choose(x, w, k: int, normalised: bool):
    """The experts int32 [tokens, k] of the largest `scores` of x float [tokens, hidden] and w [experts, hidden], and
    their weights float32: probabilities, divided by their sum if `normalised`."""
    parts = score_parts(x, w)
    if _threads() and x.shape[0] and k <= 16:
        return most_probable_of(parts, k, normalised)
    weights, experts = ops.top_k(ops.softmax(summed(parts)), k)
    return experts, weights / weights.sum(1, keepdims=True) if normalised else weights


# -- their products ----------------------------------------------------------------------------------------------------


@jt.kernel(
    out_type=lambda x, w, index, **_: jt.like(x, shape=(index.shape[0], w.shape[1] // 2)),
    grid=lambda x, w, index, *, bn, **_: (w.shape[1] // 2 // bn, index.shape[0]),
)
def chosen_gated(x, w, index, y, *, bn: int, bk: int):
    """y [m, f] from x [m / k, hidden], w [experts, 2 f, hidden] and the numbers of experts, index int32 [m]; each token
    has k rows of y."""
    # y_i = silu(G_e x_(i / k)) * (U_e x_(i / k))     e = index_i
    r, i = jt.program_id(0), jt.program_id(1)
    token, e, tiles = i // (index.shape[0] // x.shape[0]), index[i], y.shape[1] // bn
    W, X = w.tiles(None, bn, bk), x.tiles(None, bk)
    gate, up = jnp.zeros((bn,), jnp.float32), jnp.zeros((bn,), jnp.float32)
    for p in range(X.shape[1]):
        G, U = W[e, r, p], W[e, tiles + r, p]
        row = X[token, p].astype(jnp.float32)[None, :]
        gate = gate + (G.astype(jnp.float32) * row).sum(1)
        up = up + (U.astype(jnp.float32) * row).sum(1)
    y.tiles(None, bn)[i, r] = (jax.nn.silu(gate) * up).astype(y.dtype)


@jt.kernel(
    out_type=lambda h, w, index, share, **_: jt.like(h, shape=(index.shape[0], w.shape[1])),
    grid=lambda h, w, index, share, *, bn, **_: (jt.cdiv(w.shape[1], bn), index.shape[0]),
)
def chosen_sum(h, w, index, share, y, *, bn: int):
    """y [tokens, hidden] from h [tokens, k, f], w [experts, hidden, f], index int32 and share float32 [tokens, k]."""
    # y_t = sum_j share_tj W_e h_tj     e = index_tj
    r, t, f = jt.program_id(0), jt.program_id(1), h.shape[2]
    W, H = w.tiles(None, bn, f), h.tiles(None, None, f)
    parts = [W[index[t, j], r, 0] for j in range(h.shape[1])]  # the loads of all k matrices are under way at once
    total = jnp.zeros((bn, f), jnp.float32)
    for j, part in enumerate(parts):
        total = total + part.astype(jnp.float32) * (H[t, j, 0].astype(jnp.float32) * share[t, j])[None, :]
    y.tiles(None, bn)[t, r] = total.sum(1).astype(y.dtype)


def _gated_backward(residuals, dy, **_):
    x, w, index = residuals
    tokens = x.shape[0]
    run = lambda x, w: ops.swiglu(ops.routed_matmul(x, w, index.reshape(tokens, -1))).reshape(dy.shape)
    return *jax.vjp(run, x, w)[1](dy), None


def _sum_backward(residuals, dy, **_):
    h, w, index, share = residuals

    def run(h, w, share):
        y = ops.routed_matmul(h, w, index).astype(jnp.float32)
        return (y * share[:, :, None]).sum(1).astype(h.dtype)

    dh, dw, ds = jax.vjp(run, h, w, share)[1](dy)
    return dh, dw, None, ds


chosen_gated.defvjp(lambda x, w, index, **meta: (chosen_gated(x, w, index, **meta), (x, w, index)), _gated_backward)
chosen_sum.defvjp(lambda *arrays, **meta: (chosen_sum(*arrays, **meta), arrays), _sum_backward)


def takes(tokens, k: int, gate_up, down) -> bool:
    """Whether `mixture` of this file is made for so many tokens, of `k` experts each: so few that most experts have one
    token. The weights of experts must be 16-bit floats."""
    if not _threads() or any(isinstance(w, QuantizedTensor | tuple) for w in (gate_up, down)):
        return False
    whole = down.shape[2] % ROWS == 0 and down.dtype == gate_up.dtype and down.dtype.itemsize == 2
    small = isinstance(tokens, int) and 0 < tokens * k <= down.shape[0] // 4 and k <= 16
    return whole and small and down.shape[2] * k <= 2 * WIDEST


@functools.partial(jax.jit, inline=True)
def mixture(x, experts, weights, gate_up, down):
    """The result of `experts.mixture`, which calls this function if `takes` is true of the arguments."""
    rows = x.astype(gate_up.dtype)
    bk = min(jt.next_power_of_2(x.shape[1]), WIDEST // 2)
    h = chosen_gated(rows, gate_up, experts.reshape(-1), bn=ROWS, bk=bk)
    # a program reads k matrices at once: it has fewer rows and threads, so that several share a multiprocessor
    last = _on_nvidia(chosen_sum, 4)
    return last(h.reshape(*experts.shape, -1), down, experts, weights, bn=ROWS // 2).astype(x.dtype)
