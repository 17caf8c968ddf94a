"""A step of Adam in one pass over memory (Kingma and Ba 2015; with decay of weights, Loshchilov and Hutter 2019), and
the orthogonal matrices of Muon (Jordan et al. 2024)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, check_shape, fit, float_dtype, known, machine, sums_in, tuned, wide
from jtile.ops.dispatch import small_tiles
from jtile.ops.gpu_tiles import product_options
from jtile.ops.matmul import cotangents, product, tiles
from jtile.ops.parts import summed


class AdamState(NamedTuple):
    """What Adam keeps between steps.

    Attributes:
      count: int32 [], how many steps there were.
      m, v: running means of the gradients and of their squares, pytrees like the parameters.
    """

    count: jax.Array
    m: Any
    v: Any


@jt.kernel(
    out_type=lambda p, g, m, v, *_, **__: (jt.like(p), jt.like(m), jt.like(v)),
    grid=lambda p, *_, br, bn, **__: (jt.cdiv(p.shape[0], br), jt.cdiv(p.shape[1], bn)),
    alias={"p": "new_p", "m": "new_m", "v": "new_v"},
)
def adam_tiles(
    p, g, m, v, rates, new_p, new_m, new_v, *, br: int, bn: int, b1: float, b2: float, eps: float, decay: float
):
    """One step for arrays [rows, n]; rates [4]: the learning rate, the corrections of both means, the factor of g."""
    # m' = b1 m + (1 - b1) g     v' = b2 v + (1 - b2) g^2     p' = p - r (c1 m' / (sqrt(c2 v') + eps) + decay p)
    i, j = jt.program_id(0), jt.program_id(1)
    P, G, M, V = (wide(x.tiles(br, bn)[i, j]) for x in (new_p, g, new_m, new_v))
    rate, c1, c2, scale = (rates[k].astype(P.dtype) for k in range(4))
    G = G.astype(P.dtype) * scale
    M = b1 * M.astype(P.dtype) + (1.0 - b1) * G
    V = b2 * V.astype(P.dtype) + (1.0 - b2) * G * G
    step = M * c1 / (jnp.sqrt(V * c2) + eps)
    step = step + decay * P if decay else step
    for out, value in ((new_p, P - rate * step), (new_m, M), (new_v, V)):
        out.tiles(br, bn)[i, j] = value.astype(out.dtype)


def adam_init(params: Any, *, dtype: Any = None) -> AdamState:
    """The state before the first step.

    Args:
      params: a pytree of float arrays.
      dtype: dtype of both means; default float32 (float64 for float64 parameters).
    Returns:
      An `AdamState` of zeros.
    Raises:
      KernelTypeError: no float arrays, or no float dtype.
    """
    for p in jax.tree.leaves(params):
        check_float("adam_init", params=p)
    zeros = lambda p: jnp.zeros(p.shape, float_dtype("adam_init", dtype, sums_in(p)))
    return AdamState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params), jax.tree.map(zeros, params))


def adamw(
    params: Any,
    grads: Any,
    state: AdamState,
    *,
    learning_rate: Any,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: Any = 1e-4,
    grad_scale: Any = 1.0,
) -> tuple[Any, AdamState]:
    """One step of AdamW: every array is read once and written in place, where `jax.jit` donates `params` and `state`.

    The numbers are those of `optax.adamw`, computed in float32 (float64 for float64 parameters).

    Args:
      params: a pytree of float arrays.
      grads: the gradients, float arrays of the same structure and shapes.
      state: what `adam_init` gave, or the step before.
      learning_rate: a number, or a scalar array, such as a schedule gives.
      b1, b2: how much of the running means a step keeps. eps: added to the square root.
      weight_decay: a number, or a pytree of numbers like `params`: 0 for arrays that do not decay.
      grad_scale: what gradients are multiplied with first, such as a factor that clips their global norm.
    Returns:
      (params, state) after the step.
    Raises:
      KernelTypeError: arrays that are no floats. KernelValueError: structures or shapes that do not fit, b1 or b2
      outside of [0, 1).
    """
    op = "adamw"
    leaves, tree = jax.tree.flatten(params)
    if not (0 <= b1 < 1 and 0 <= b2 < 1):
        raise KernelValueError(f"{op}: b1 and b2 are in [0, 1), got {b1} and {b2}")
    if isinstance(weight_decay, int | float):
        weight_decay = tree.unflatten([weight_decay] * len(leaves))
    others = {"grads": grads, "state.m": state.m, "state.v": state.v, "weight_decay": weight_decay}
    for name, given in others.items():
        if jax.tree.structure(given) != tree:
            raise KernelValueError(f"{op}: {name} has the structure {jax.tree.structure(given)}, params {tree}")
    count = state.count + 1
    rates = _rates(leaves, learning_rate, grad_scale, count, b1, b2)
    step = functools.partial(_adam_leaf, rates=rates, b1=float(b1), b2=float(b2), eps=float(eps))
    found = [step(*args) for args in zip(leaves, *map(jax.tree.leaves, others.values()), strict=True)]
    new = [tree.unflatten(column) for column in zip(*found, strict=True)] if found else [params, state.m, state.v]
    return new[0], AdamState(count, *new[1:])


def adam(params: Any, grads: Any, state: AdamState, *, learning_rate: Any, **options: Any) -> tuple[Any, AdamState]:
    """A step of Adam: `adamw` without weight decay, with the results of `optax.adam`.

    Args:
      params, grads, state, learning_rate, options: as in `adamw`.

    Returns:
      The new parameters and the new state.
    """
    return adamw(params, grads, state, learning_rate=learning_rate, weight_decay=0.0, **options)


def _rates(leaves, learning_rate, grad_scale, count, b1: float, b2: float):
    """The learning rate, what corrects both means, and the factor of the gradients."""
    f = jnp.float64 if any(p.dtype == jnp.float64 for p in leaves) else jnp.float32
    t = count.astype(f)
    c1, c2 = (1 / (1 - jnp.asarray(b, f) ** t) for b in (b1, b2))
    return jnp.stack([jnp.asarray(learning_rate, f), c1, c2, jnp.asarray(grad_scale, f)])


def _adam_leaf(p, g, m, v, decay, *, rates, **options):
    check_float("adamw", params=p, grads=g, m=m, v=v)
    for name, x in (("a gradient", g), ("state.m", m), ("state.v", v)):
        check_shape("adamw", name, x, p.shape)
    if p.size == 0:
        return p, m, v
    n = p.shape[-1] if p.ndim else 1
    bn = fit(n, machine().tile // 4)
    br = fit(known(p.size) // max(known(n), 1), max(1, machine().tile // 4 // bn))
    rows = (x.reshape(-1, n) for x in (p, g, m, v))
    found = adam_tiles(*rows, rates, br=br, bn=bn, decay=float(decay), **options)
    return tuple(x.reshape(p.shape) for x in found)


def adamw_reference(
    params, grads, state, *, learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay: Any = 1e-4, grad_scale=1.0
):
    """`adamw` in jnp."""
    count = state.count + 1
    rate, c1, c2, scale = _rates(jax.tree.leaves(params), learning_rate, grad_scale, count, b1, b2)
    if isinstance(weight_decay, int | float):
        weight_decay = jax.tree.map(lambda _: weight_decay, params)

    def one(p, g, m, v, decay):
        g = wide(g) * scale
        new_m, new_v = b1 * wide(m) + (1 - b1) * g, b2 * wide(v) + (1 - b2) * g * g
        step = new_m * c1 / (jnp.sqrt(new_v * c2) + eps) + decay * wide(p)
        return (wide(p) - rate * step).astype(p.dtype), new_m.astype(m.dtype), new_v.astype(v.dtype)

    found = jax.tree.map(one, params, grads, state.m, state.v, weight_decay)
    new = (jax.tree.map(lambda _, t, k=k: t[k], params, found) for k in range(3))
    return next(new), AdamState(count, *new)


# -- Muon --------------------------------------------------------------------------------------------------------------

QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: singular values come to 0.7 to 1.2 in five steps


def _below(at):
    """The tile on or below the diagonal with number `at`, row by row: at = i (i + 1) / 2 + j."""
    i = ((jnp.sqrt(8.0 * at.astype(jnp.float32) + 1.0) - 1.0) * 0.5).astype(jnp.int32)
    i = jnp.where(i * (i + 1) // 2 > at, i - 1, i)  # the square root may be rounded up
    i = jnp.where((i + 1) * (i + 2) // 2 <= at, i + 1, i)
    return i, at - i * (i + 1) // 2


def _gram_grid(a, *_, bm: int, **__):
    n = jt.cdiv(a.shape[1], bm)
    return a.shape[0], n * (n + 1) // 2


@jt.kernel(out_type=lambda a, *_, **__: jt.like(a, shape=(*a.shape[:2], a.shape[1])), grid=_gram_grid)
def gram_tiles(a, c, y, *, bm: int, bk: int, alpha: float, beta: float):
    """y = alpha a a^T + beta c of a [e, m, k] and c [e, m, m], symmetric, or None: the tiles on and below the diagonal,
    each of which is written to both places."""
    e = jt.program_id(0)
    i, j = _below(jt.program_id(1))
    A, Y = a.tiles(None, bm, bk or a.shape[2]), y.tiles(None, bm, bm)
    total = summed(lambda p: A[e, i, p], lambda p: A[e, j, p].T, a.shape[2], (bm, bm), sums_in(a), bk)
    total = total * alpha if alpha != 1 else total
    if c is not None:
        total = total + beta * wide(c.tiles(None, bm, bm)[e, i, j])
    Y[e, i, j] = total.astype(y.dtype)
    if i != j:
        Y[e, j, i] = total.T.astype(y.dtype)


@jt.kernel(
    out_type=lambda b, x, **_: jt.like(x),
    grid=lambda b, x, *, bm, bn, **_: (x.shape[0], jt.cdiv(x.shape[1], bm), jt.cdiv(x.shape[2], bn)),
)
def added_product_tiles(b, x, y, *, bm: int, bn: int, bk: int, beta: float):
    """y = b x + beta x of b [e, m, m] and x [e, m, n]."""
    e, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    step = bk or x.shape[1]
    B, X = b.tiles(None, bm, step), x.tiles(None, step, bn)
    total = summed(lambda p: B[e, i, p], lambda p: X[e, p, j], x.shape[1], (bm, bn), sums_in(x), bk)
    y.tiles(None, bm, bn)[e, i, j] = (total + beta * wide(x.tiles(None, bm, bn)[e, i, j])).astype(y.dtype)


def _gram_backward(residuals, g, *, alpha: float, beta: float, **_):
    a, c = residuals
    both = (wide(g) + wide(g).swapaxes(1, 2)) * alpha
    da = product(both.astype(a.dtype), a, a.dtype)
    return da, None if c is None else (beta * wide(g)).astype(c.dtype)


def _added_backward(residuals, g, *, beta: float, **_):
    b, x = residuals
    db, dx = cotangents(b, x, g, ta=False, tb=False)
    return db, (wide(dx) + beta * wide(g)).astype(x.dtype)


gram_tiles.defvjp(lambda a, c, **meta: (gram_tiles(a, c, **meta), (a, c)), _gram_backward)
added_product_tiles.defvjp(lambda b, x, **meta: (added_product_tiles(b, x, **meta), (b, x)), _added_backward)


def _gram(a, c=None, alpha: float = 1.0, beta: float = 0.0):
    m, k, itemsize = known(a.shape[1]), known(a.shape[2]), a.dtype.itemsize
    if small_tiles():
        sides = tiles(m, m, k, itemsize, transposed=True, batch=known(a.shape[0]))
        bm = min(sides["bm"], sides["bn"])
        kernel = tuned(gram_tiles, **product_options(bm, bm, itemsize))
        return kernel(a, c, bm=bm, bk=sides["bk"], alpha=alpha, beta=beta)
    return gram_tiles(a, c, bm=fit(m, 128), bk=0, alpha=alpha, beta=beta)


def _added(b, x, beta: float):
    m, n, itemsize = known(x.shape[1]), known(x.shape[2]), x.dtype.itemsize
    sides = tiles(m, n, m, itemsize, **({"batch": known(x.shape[0])} if small_tiles() else {}))
    kernel = added_product_tiles
    kernel = tuned(kernel, **product_options(sides["bm"], sides["bn"], itemsize)) if small_tiles() else kernel
    return kernel(b, x, beta=beta, **sides)


@functools.partial(jax.jit, static_argnames=("steps", "coefficients", "eps", "dtype"), inline=True)
def newton_schulz(
    x: jax.Array,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
    dtype: Any = None,
) -> jax.Array:
    """The orthogonal factor of each matrix, roughly: Muon's update of a momentum.

    X / (|X| + eps), |X| the Frobenius norm, goes through `steps` steps of `X <- a X + (b A + c A^2) X` with
    `A = X X^T`, of the transposed matrix where that is the wide one. Products of a matrix with its transpose compute
    one half of the result. Differentiable in x.

    Args:
      x: float array [..., m, n].
      steps: how many steps to make.
      coefficients: a, b and c.
      eps: added to the norm.
      dtype: dtype of the operands of products, which are summed in float32; default x's. Muon takes bfloat16.
    Returns:
      An array like `x`.
    Raises:
      KernelTypeError: no floats. KernelValueError: no matrices, or no number of steps.
    """
    op = "newton_schulz"
    check_float(op, x=x)
    if x.ndim < 2:
        raise KernelValueError(f"{op}: x is [..., m, n], got shape {tuple(x.shape)}")
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise KernelTypeError(f"{op}: steps is an int, got {steps!r}")
    if steps < 0 or len(coefficients) != 3:
        raise KernelValueError(f"{op}: steps is 0 or more and coefficients are three, got {steps} and {coefficients}")
    if x.size == 0:
        return x
    a, b, c = map(float, coefficients)
    narrow = float_dtype(op, dtype, x.dtype)
    tall = known(x.shape[-2]) > known(x.shape[-1])
    X = (x.swapaxes(-1, -2) if tall else x).reshape(-1, *((x.shape[:-3:-1]) if tall else x.shape[-2:]))
    X = wide(X)
    X = (X / (jnp.sqrt((X * X).sum((1, 2), keepdims=True)) + eps)).astype(narrow)
    for _ in range(steps):
        A = _gram(X)
        X = _added(_gram(A, A, c, b), X, a)
    X = X.astype(x.dtype).reshape(*x.shape[:-2], *X.shape[1:])
    return X.swapaxes(-1, -2) if tall else X


def newton_schulz_reference(x, *, steps=5, coefficients=QUINTIC, eps=1e-7, dtype=None):
    """`newton_schulz` in jnp."""
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    X = wide(x.swapaxes(-1, -2) if tall else x)
    X = X / (jnp.sqrt((X * X).sum((-1, -2), keepdims=True)) + eps)
    dot = functools.partial(jnp.matmul, precision="highest")
    for _ in range(steps):
        A = dot(X, X.swapaxes(-1, -2))
        X = a * X + dot(b * A + c * dot(A, A), X)
    return (X.swapaxes(-1, -2) if tall else X).astype(x.dtype)
