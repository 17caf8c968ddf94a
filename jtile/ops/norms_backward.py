"""Reverse mode of the norms: one pass over the rows, the sums over rows kept a program and added up at the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import fit, machine, rows_per_tile, sums_in, wide

_TILES = 32  # tiles a program where the number of rows is not known


def _chunks(xs, weight, cts, *, br, per, **_):
    return jt.cdiv(jt.cdiv(xs[0].shape[0], br), per)


def _types(xs, weight, cts, *, br, per, sums, **_):
    part = jax.ShapeDtypeStruct((_chunks(xs, weight, cts, br=br, per=per), xs[0].shape[1]), sums_in(xs[0]))
    return *(jt.like(x) for x in xs), *(part for _ in range(sums))


@jt.kernel(out_type=_types, grid=_chunks)
def norm_backward_rows(
    xs, weight, cts, *out, br: int, per: int, sums: int, centre: bool, eps: float, offset: float
):  # fmt: skip
    """Rows [n] of y = norm(x_1 + ...) w + b and s = x_1 + ...; `per` tiles of `br` rows in a program.

    Args:
      xs, weight, cts: tuples of Refs: the terms of the sum [rows, n]; w [n] or none; the cotangents of y and perhaps s.
      out: a cotangent for each of `xs`, then `sums` arrays [chunks, n]: shares of those of w, and of b.
      centre: layer norm, else RMS norm.
    """
    # u = t / sqrt(mean(t^2) + eps)     t = x - mean(x) for the layer norm     h = g w
    # dx = (h - mean(h) - u mean(h u)) / sqrt(...)     without mean(h) for the RMS norm     dw = sum g u     db = sum g
    c, n = jt.program_id(0), xs[0].shape[1]
    X, CT, DX = ([ref.tiles(br, n) for ref in refs] for refs in (xs, cts, out[: len(xs)]))
    w = wide(weight[0][...])[None, :] + offset if weight else None
    dw, db = (jnp.zeros((n,), sums_in(xs[0])) for _ in range(2))
    for k in jt.range(jnp.minimum(X[0].shape[0] - c * per, per)):
        i = c * per + k
        t, g = wide(X[0][i, 0]), wide(CT[0][i, 0])
        for other in X[1:]:
            t = t + other[i, 0].astype(t.dtype)
        t = t - t.sum(1, keepdims=True) * (1.0 / n) if centre else t
        r = jax.lax.rsqrt((t * t).sum(1, keepdims=True) * (1.0 / n) + eps)
        u = t * r
        h = g * w.astype(g.dtype) if w is not None else g
        slope = h - u * ((h * u).sum(1, keepdims=True) * (1.0 / n))
        slope = slope - h.sum(1, keepdims=True) * (1.0 / n) if centre else slope
        slope = slope * r
        for ct in CT[1:]:
            slope = slope + ct[i, 0].astype(slope.dtype)
        for ref, view in zip(out, DX):
            view[i, 0] = slope.astype(ref.dtype)
        dw = dw + (g * u).sum(0) if sums else dw
        db = db + g.sum(0) if sums > 1 else db
    for ref, total in zip(out[len(xs) :], (dw, db)):
        ref[c, :] = total


def norm_backward(xs, weight, cts, *, sums: int, centre: bool, eps: float, offset: float = 0.0):
    """The cotangents of xs (a tuple), and `sums` of those of weight and bias (float32 [n], float64 for float64)."""
    rows, n = xs[0].shape
    br = rows_per_tile(rows, n)
    tiles = jt.cdiv(rows, br)
    per = fit(tiles, jt.cdiv(tiles, machine().sums)) if isinstance(tiles, int) else _TILES
    out = norm_backward_rows(xs, weight, cts, br=br, per=per, sums=sums, centre=centre, eps=eps, offset=offset)
    return out[: len(xs)], [part.sum(0) for part in out[len(xs) :]]
