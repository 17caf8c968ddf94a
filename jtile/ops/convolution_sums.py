"""Gradients of the weights of convolutions on GPUs: sums over all points of the result, a share of them in each
program, of what several points of the window read there times the cotangents, which are read once for all of these."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import sums_in, wide
from jtile.ops.convolution_points import Pads, Sides, apart, met, row_places


def _weight_grid(x, g, *, window, taps, bc, bo, splits, **_):
    blocks = math.prod(window) // taps * jt.cdiv(x.shape[1], bc) * jt.cdiv(g.shape[1], bo)
    return blocks, splits


@jt.kernel(
    out_type=lambda x, g, *, window, splits, **_: jax.ShapeDtypeStruct(
        (splits, math.prod(window), x.shape[1], g.shape[1]), sums_in(x)
    ),
    grid=_weight_grid,
)
def convolution_weight_points(
    x, g, dw, *, bm: int, bc: int, bo: int, taps: int, splits: int, sides: Sides, points: Sides, window: Sides,
    stride: Sides, dilation: Sides, pads: Pads,
):  # fmt: skip
    """x [batch * points of `sides`, c], g [batch * `points` of the result, o]; dw [splits, points of the window, c, o].
    A program: `taps` neighbouring points of the window, `bc` channels, a divisor of c, `bo` outputs, and every
    `splits`-th tile of `bm` points."""
    # dw[a, b, c, o] = sum_nij x[n, s i + d a - p, s j + d b - q, c] g[n, i, j, o]
    block, split = jt.program_id(0), jt.program_id(1)
    block, o = apart(block, (jt.cdiv(g.shape[1], bo),))
    first, c = apart(block, (x.shape[1] // bc,))
    lanes = (c * bc + jt.arange(bc))[None, :]
    turned = bc < 64 <= bo  # the first side of a product of a warpgroup has 64 numbers
    sums = (jt.zeros((bo, bc) if turned else (bc, bo), dw.dtype),) * taps
    for t in jt.range(jt.cdiv(jt.cdiv(g.shape[0], bm) - split, splits)):
        at = split + t * splits
        G = g.tiles(bm, bo)[at, o]
        image, *own = apart(at * bm + jt.arange(bm), points)
        corner = [n * s - lo for n, s, (lo, _) in zip(own, stride, pads, strict=True)]
        added = []
        for k, acc in enumerate(sums):
            _, *tap = apart(first * taps + k, window)
            place, inside = image, image < x.shape[0] // math.prod(sides)
            for here, step, d, n in zip(corner, tap, dilation, sides, strict=True):
                one = here + step * d
                place, inside = place * n + one, inside & (one >= 0) & (one < n)
            there = jnp.broadcast_to(inside[:, None], (bm, bc))
            X = jt.load(x, (jnp.where(inside, place, 0)[:, None], lanes), mask=there)
            added.append(jt.dot(G.T, X, acc) if turned else jt.dot(X.T, G, acc))
        sums = tuple(added)
    for k, acc in enumerate(sums):
        dw[split, first * taps + k, jt.ds(c * bc, bc), jt.ds(o * bo, bo)] = acc.T if turned else acc


@jt.kernel(
    out_type=lambda x, g, *, window, numbers, splits, **_: jax.ShapeDtypeStruct(
        (splits, math.prod(window), numbers, g.shape[1]), sums_in(x)
    ),
    grid=lambda x, g, *, window, taps, bo, splits, **_: (math.prod(window) // taps * jt.cdiv(g.shape[1], bo), splits),
)
def convolution_weight_rows(
    x, g, dw, *, bm: int, bo: int, taps: int, splits: int, numbers: int, channels: int, sides: Sides, points: Sides,
    window: Sides, stride: Sides, dilation: Sides,
):  # fmt: skip
    """The gradient of `convolution_row_points`: x and the sizes as there, g [batch * `points`, o]; dw [splits, rows of
    the window, numbers, o]. A program: `taps` rows of the window, `bo` outputs, and every `splits`-th tile of `bm`
    points."""
    # dw[a, k, o] = sum_nij x[n, s i + d a, s' c j + k] g[n, i, j, o]
    block, split = jt.program_id(0), jt.program_id(1)
    first, o = apart(block, (jt.cdiv(g.shape[1], bo),))
    planes = x.shape[0] // math.prod(sides)
    sums = (jt.zeros((bo, numbers), dw.dtype),) * taps
    for t in jt.range(jt.cdiv(jt.cdiv(g.shape[0], bm) - split, splits)):
        at = split + t * splits
        G = g.tiles(bm, bo)[at, o]
        image, *own = apart(at * bm + jt.arange(bm), points)
        inside, image = jnp.broadcast_to((image < planes)[:, None], (bm, numbers)), jnp.minimum(image, planes - 1)
        corner = [n * s for n, s in zip(own, stride, strict=True)]
        columns = (corner.pop() * channels)[:, None] + jt.arange(numbers)[None, :]
        added = []
        for k, acc in enumerate(sums):
            _, *tap = apart(first * taps + k, window)
            rows = row_places(image, corner, tap, sides, dilation)
            added.append(jt.dot(G.T, jt.load(x, (rows[:, None], columns), mask=inside), acc))
        sums = tuple(added)
    for k, acc in enumerate(sums):
        dw[split, first * taps + k, :, jt.ds(o * bo, bo)] = acc.T


@jt.kernel(
    out_type=lambda x, g, *, window, splits, **_: jax.ShapeDtypeStruct((splits, *window, g.shape[2]), sums_in(x)),
    grid=lambda x, g, *, window, bn, splits, **_: (window[1], jt.cdiv(g.shape[2], bn), splits),
)
def depthwise_weight_rows(
    x, g, dw, *, window: Sides, channels: int, bh: int, bn: int, splits: int, pads: Pads, stride: Sides
):  # fmt: skip
    """x [batch, h, w * c] without padding, g [batch, h', w' * c]; dw [splits, p, q, w' * c]: sums over images and rows.
    A program: a column of the window, `bn` neighbouring numbers of a row, and every `splits`-th tile of bh rows; a row
    of x meets all rows of g of the tile."""
    # dw[a, b, j, c] = sum_ni x[n, s i + a - p, s' j + b - q, c] g[n, i, j, c]
    b, at, split = jt.program_id(0), jt.program_id(1) * bn + jt.arange(bn), jt.program_id(2)
    (batch, height, _), down = g.shape, jt.cdiv(g.shape[1], bh)
    column, channel = jax.lax.div(at, jnp.int32(channels)), jax.lax.rem(at, jnp.int32(channels))
    there = (column * stride[1] + (b - pads[1][0])) * channels + channel
    sums = (jt.zeros((bn,), dw.dtype),) * window[0]
    for t in jt.range(jt.cdiv(batch * down - split, splits)):
        n, i = apart(split + t * splits, (down,))
        i = i * bh
        rows = [_row(g, n, i + k, at, height % bh == 0) for k in range(bh)]
        added = list(sums)
        for r in range((bh - 1) * stride[0] + window[0]):
            X = _row(x, n, i * stride[0] + (r - pads[0][0]), there, False)
            for k, a in met(r, bh, window[0], stride[0]):
                added[a] = added[a] + X * rows[k]
        sums = tuple(added)
    for a, acc in enumerate(sums):
        dw[split, a, b, jt.ds(jt.program_id(1) * bn, bn)] = acc


def _row(x, n, row, places, inside: bool):
    """Numbers of a row of plane n, zeros where there are none; `inside`: the plane has this row."""
    seen = (places >= 0) & (places < x.shape[2])
    if not inside:
        seen = seen & (row >= 0) & (row < x.shape[1])
        row = jnp.clip(row, 0, x.shape[1] - 1)
    return wide(jt.load(x, (n, row, places), mask=seen))
