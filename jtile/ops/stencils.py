"""Two-dimensional stencils: every point becomes a weighted sum of its neighbours."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops._shapes import check_float, check_rank, fit, known, machine, sums_in, wide

_BOUNDARIES = {
    "zero": {"mode": "constant"},
    "edge": {"mode": "edge"},
    "wrap": {"mode": "wrap"},
    "reflect": {"mode": "reflect"},
}


def _valid(x, w):
    return x.shape[0], x.shape[1] - w.shape[0] + 1, x.shape[2] - w.shape[1] + 1


def _grid(x, w, *, bm, bn):
    b, m, n = _valid(x, w)
    return b, jt.cdiv(m, bm), jt.cdiv(n, bn)


@jt.kernel(out_type=lambda x, w, **_: jt.like(x, shape=_valid(x, w)), grid=_grid)
def stencil_tiles(x, w, y, *, bm: int, bn: int):
    """x [batch, m + p - 1, n + q - 1], w [p, q], y [batch, m, n]."""
    # y_ij = sum_ab w_ab x_{i + a, j + b}
    # c: b of the formula; b: row of the batch
    b, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    total = None
    for a in range(w.shape[0]):
        for c in range(w.shape[1]):
            part = wide(x[b, jt.ds(i * bm + a, bm), jt.ds(j * bn + c, bn)])
            part = part * w[a, c].astype(part.dtype)
            total = part if total is None else total + part
    y.tiles(None, bm, bn)[b, i, j] = total.astype(y.dtype)


@jt.kernel(
    out_type=lambda x, g, *, p, q, chunks, **_: jax.ShapeDtypeStruct((chunks, p, q), sums_in(x)),
    grid=lambda x, g, *, chunks, **_: chunks,
)
def stencil_weight_tiles(x, g, dw, *, p: int, q: int, bm: int, bn: int, chunks: int):
    """dw [chunks, p, q] for x as in `stencil_tiles` and the cotangents g [batch, m, n]; a program
    sums every `chunks`-th tile of g."""
    # dw_ab = sum_ij g_ij x_{i + a, j + b}
    c = jt.program_id(0)
    _, down, across = (g.shape[0], jt.cdiv(g.shape[1], bm), jt.cdiv(g.shape[2], bn))
    div, rem = (lambda u, v, f=f: f(u, jnp.int32(v)) for f in (jax.lax.div, jax.lax.rem))
    sums = [jnp.zeros((), dw.dtype)] * (p * q)
    for k in jt.range(jt.cdiv(g.shape[0] * down * across - c, chunks)):
        tile = c + k * chunks
        b, at = div(tile, down * across), rem(tile, down * across)
        i, j = div(at, across), rem(at, across)
        G = wide(g.tiles(None, bm, bn)[b, i, j]).astype(dw.dtype)
        shifts = [(a, e) for a in range(p) for e in range(q)]
        parts = [x[b, jt.ds(i * bm + a, bm), jt.ds(j * bn + e, bn)].astype(dw.dtype) * G for a, e in shifts]
        sums = [s + part.sum() for s, part in zip(sums, parts)]
    for k, s in enumerate(sums):
        dw[c, k // q, k % q] = s


def _forward(x, w, **meta):
    return stencil_tiles(x, w, **meta), (x, w)


def _backward(residuals, g, **_):
    x, w = residuals
    p, q = w.shape
    dx = _tiled(jnp.pad(g, ((0, 0), (p - 1, p - 1), (q - 1, q - 1))), w[::-1, ::-1])
    return dx, stencil_weight_sums(x, g, (p, q)).astype(w.dtype)


def stencil_weight_sums(x, g, size: tuple[int, ...]):
    """The cotangent of the weights, of two axes or three, for x [batch, ...] with the points around it and g."""
    if len(size) == 3:  # each plane of weights is summed with the planes of x that it meets
        depth = g.shape[1]
        planes = lambda t: t.reshape(-1, *t.shape[2:])
        return jnp.stack(
            [stencil_weight_sums(planes(x[:, a : a + depth]), planes(g), size[1:]) for a in range(size[0])]
        )
    p, q = size
    bn = fit(g.shape[2], 1024)
    bm = fit(g.shape[1], max(1, machine().tile // bn))
    chunks = min(machine().sums, known(g.shape[0] * jt.cdiv(g.shape[1], bm) * jt.cdiv(g.shape[2], bn)))
    return stencil_weight_tiles(x, g, p=p, q=q, bm=bm, bn=bn, chunks=chunks).sum(0)


stencil_tiles.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames="boundary", inline=True)
def stencil_2d(x: jax.Array, weights: jax.Array, *, boundary: str = "zero") -> jax.Array:
    """`y_ij = sum_ab weights_ab x_{i + a - p // 2, j + b - q // 2}` over the last two axes, computed in float32.

    Differentiable in x and weights.

    Args:
      x: float array [..., m, n].
      weights: float array [p, q], both odd unless `boundary` is "valid".
      boundary: what stands outside: "zero", "edge", "wrap", "reflect"; or "valid": only the points with all neighbours.
    Returns:
      An array like `x`; for "valid" [..., m - p + 1, n - q + 1].
    Raises:
      KernelTypeError: wrong dtypes. KernelValueError: shapes or a boundary that do not fit.
    """
    check_float("stencil_2d", x=x, weights=weights)
    check_rank("stencil_2d", "weights", weights, 2, "[p, q]")
    p, q = weights.shape
    if x.ndim < 2:
        check_rank("stencil_2d", "x", x, 2, "[..., m, n]")
    if boundary != "valid" and boundary not in _BOUNDARIES:
        raise KernelValueError(f"stencil_2d: boundary is one of {', '.join((*_BOUNDARIES, 'valid'))}, got {boundary!r}")
    if p * q == 0 or (boundary != "valid" and not p % 2 * q % 2):
        raise KernelValueError(
            f"stencil_2d: weights have odd sides, got {p} x {q}; an even one only with boundary='valid'"
        )
    return _bounded(_tiled, x, weights, boundary)


def _tiled(x, weights):
    n = _valid(x, weights)[2]
    bn = fit(n, 1024)
    return stencil_tiles(x, weights, bm=fit(_valid(x, weights)[1], max(1, machine().tile // bn)), bn=bn)


def _bounded(run, x, weights, boundary: str):
    """`run` on x [batch, m, n] with what stands outside around it."""
    (p, q), lead, (m, n) = weights.shape, x.shape[:-2], x.shape[-2:]
    shape = (*lead, max(m - p + 1, 0), max(n - q + 1, 0)) if boundary == "valid" else x.shape
    if 0 in shape:
        return jnp.zeros(shape, x.dtype)
    batches = x.reshape(math.prod(lead), m, n)
    if boundary != "valid":
        batches = jnp.pad(batches, ((0, 0), (p // 2, p // 2), (q // 2, q // 2)), **_BOUNDARIES[boundary])
    return run(batches, weights).reshape(shape)


def _shifted_sum(x, weights):
    _, m, n = _valid(x, weights)
    t, w = wide(x), wide(weights).astype(wide(x).dtype)
    parts = [w[a, c] * t[:, a : a + m, c : c + n] for a in range(w.shape[0]) for c in range(w.shape[1])]
    return functools.reduce(jnp.add, parts).astype(x.dtype)


def stencil_2d_reference(x, weights, *, boundary: str = "zero"):
    """`stencil_2d` in jnp."""
    return _bounded(_shifted_sum, x, weights, boundary)
