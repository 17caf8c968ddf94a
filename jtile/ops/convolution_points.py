"""Convolutions on GPUs whose tiles are neighbouring points of the result, whichever rows of whichever planes they are
in: each finds the points of x that the window has there, and nothing is padded."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import sums_in, wide

Sides = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]


def points_of(sides: Sides, window: Sides, stride: Sides, dilation: Sides, pads: Pads) -> Sides:
    """The sides of the result."""
    axes = zip(sides, window, stride, dilation, pads, strict=True)
    return tuple((n + lo + hi - (k - 1) * d - 1) // s + 1 for n, k, s, d, (lo, hi) in axes)


def _rows(x, *, sides, window, stride, dilation, pads, **_) -> int:
    return x.shape[0] // math.prod(sides) * math.prod(points_of(sides, window, stride, dilation, pads))


def apart(n, sides: Sides) -> list:
    """The indices of point number n, an int or traced, of an array whose last sides are these, the first index for all
    others."""
    found = []
    for side in reversed(sides):
        part, n = (
            (n % side, n // side)
            if isinstance(n, int)
            else (jax.lax.rem(n, jnp.int32(side)), jax.lax.div(n, jnp.int32(side)))
        )
        found.insert(0, part)
    return [n, *found]


@jt.kernel(
    out_type=lambda x, w, **of: jt.like(x, shape=(_rows(x, **of), w.shape[1])),
    grid=lambda x, w, *, bm, bo, **of: (jt.cdiv(_rows(x, **of), bm), jt.cdiv(w.shape[1], bo)),
)
def convolution_points(
    x, w, y, *, bm: int, bo: int, bc: int, sides: Sides, window: Sides, stride: Sides, dilation: Sides, pads: Pads,
    groups: int = 1,
):  # fmt: skip
    """x [batch * points of `sides`, c], w [points of the window * c / groups, o], y [batch * points of the result, o].
    `bc` channels at a time, a divisor of those of a group; with groups, `bo` is one of the outputs of a group."""
    # y[n, i, j, o] = sum_ab sum_c x[n, s i + d a - p, s j + d b - q, c] w[a, b, c, o]
    # u: point of the window and part of the channels c; X: what the points of the tile read there
    at, o = jt.program_id(0), jt.program_id(1)
    parts, points = x.shape[1] // groups // bc, points_of(sides, window, stride, dilation, pads)
    group = jax.lax.div(o, jnp.int32(jt.cdiv(w.shape[1], groups * bo))) if groups > 1 else 0
    image, *own = apart(at * bm + jt.arange(bm), points)
    first = [at * s - lo for at, s, (lo, _) in zip(own, stride, pads, strict=True)]
    acc = jt.zeros((bm, bo), sums_in(x))
    for u in jt.range(math.prod(window) * parts):
        c, (_, *taps) = jax.lax.rem(u, jnp.int32(parts)) * bc, apart(jax.lax.div(u, jnp.int32(parts)), window)
        place, inside = image, image < x.shape[0] // math.prod(sides)
        for here, step, d, n in zip(first, taps, dilation, sides, strict=True):
            one = here + step * d
            place, inside = place * n + one, inside & (one >= 0) & (one < n)
        place = jnp.where(inside, place, 0)
        channels = group * (parts * bc) + c + jt.arange(bc)
        X = jt.load(x, (place[:, None], channels[None, :]), mask=jnp.broadcast_to(inside[:, None], (bm, bc)))
        W = w.tiles(bc, bo)[u, o]
        acc = jt.dot(X, W, acc) if min(bc, bo) >= 16 else acc + (wide(X)[:, :, None] * wide(W)[None]).sum(1)
    y.tiles(bm, bo)[at, o] = acc.astype(y.dtype)


@jt.kernel(
    out_type=lambda g, w, *, sides, points, channels, **_: jt.like(
        g, shape=(g.shape[0] // math.prod(points) * math.prod(sides), channels)
    ),
    grid=lambda g, w, *, bm, bc, sides, points, channels, **_: (
        jt.cdiv(g.shape[0] // math.prod(points) * math.prod(sides), bm), jt.cdiv(channels, bc)
    ),
)  # fmt: skip
def transposed_points(
    g, w, y, *, bm: int, bc: int, bo: int, channels: int, sides: Sides, points: Sides, window: Sides, stride: Sides,
    dilation: Sides, low: Sides,
):  # fmt: skip
    """g [batch * `points`, o], w [points of the window * channels, o], y [batch * `sides`, channels]: the transpose of
    a convolution with `low` points of padding in front. `bo` outputs at a time, a divisor of o, as `bc` is of the
    channels. Zeros between the points of g are multiplied, too: only derivatives forwards run this."""
    # y[n, i, c] = sum_a sum_o g[n, (i + p - d a) / s, o] w[a, c, o], where s divides
    at, c = jt.program_id(0), jt.program_id(1)
    parts, blocks = g.shape[1] // bo, channels // bc
    image, *own = apart(at * bm + jt.arange(bm), sides)
    acc = jt.zeros((bm, bc), sums_in(g))
    for u in jt.range(math.prod(window) * parts):
        part, tap = jax.lax.rem(u, jnp.int32(parts)), jax.lax.div(u, jnp.int32(parts))
        place, inside = image, image < g.shape[0] // math.prod(points)
        for here, step, s, d, lo, n in zip(own, apart(tap, window)[1:], stride, dilation, low, points, strict=True):
            ahead = here + lo - step * d
            one = jax.lax.div(ahead, jnp.full_like(ahead, s))
            place, inside = place * n + one, inside & (ahead >= 0) & (one * s == ahead) & (one < n)
        place = jnp.where(inside, place, 0)
        index = place[:, None], (part * bo + jt.arange(bo))[None, :]
        G = jt.load(g, index, mask=jnp.broadcast_to(inside[:, None], (bm, bo)))
        acc = jt.dot(G, w.tiles(bc, bo)[tap * blocks + c, part].T, acc)
    y.tiles(bm, bc)[at, c] = acc.astype(y.dtype)


# -- few channels: a row of the window at a time, whose numbers lie side by side in memory -----------------------------


def row_places(n, corner, tap, sides: Sides, dilation: Sides):
    """The rows of x [batch * `sides`, columns] that points with these corners read for a point of the window."""
    place = n
    for here, step, d, side in zip(corner, tap, dilation, sides, strict=True):
        place = place * side + here + step * d
    return place


@jt.kernel(
    out_type=lambda x, w, *, points, sides, **_: jt.like(
        x, shape=(x.shape[0] // math.prod(sides) * math.prod(points), w.shape[1])
    ),
    grid=lambda x, w, *, bm, bo, points, sides, **_: (
        jt.cdiv(x.shape[0] // math.prod(sides) * math.prod(points), bm), jt.cdiv(w.shape[1], bo)
    ),
)  # fmt: skip
def convolution_row_points(
    x, w, y, *, bm: int, bo: int, numbers: int, channels: int, sides: Sides, points: Sides, window: Sides,
    stride: Sides, dilation: Sides,
):  # fmt: skip
    """x [batch * planes and rows, columns * c] with its padding; `sides` without the last, likewise `window`;
    w [rows of the window * `numbers`, o] for so many neighbouring numbers of a row; y [batch * `points`, o]."""
    # y[n, i, j, o] = sum_a sum_k x[n, s i + d a, s' c j + k] w[a, k, o]
    at, o = jt.program_id(0), jt.program_id(1)
    image, *own = apart(at * bm + jt.arange(bm), points)
    inside = jnp.broadcast_to((image < x.shape[0] // math.prod(sides))[:, None], (bm, numbers))
    image = jnp.minimum(image, x.shape[0] // math.prod(sides) - 1)
    corner = [n * s for n, s in zip(own, stride, strict=True)]
    columns = (corner.pop() * channels)[:, None] + jt.arange(numbers)[None, :]
    acc = jt.zeros((bm, bo), sums_in(x))
    for u in jt.range(math.prod(window)):
        _, *tap = apart(u, window)
        rows = row_places(image, corner, tap, sides, dilation)
        acc = jt.dot(jt.load(x, (rows[:, None], columns), mask=inside), w.tiles(numbers, bo)[u, o], acc)
    y.tiles(bm, bo)[at, o] = acc.astype(y.dtype)


# -- depthwise ---------------------------------------------------------------------------------------------------------


def _plane(x, w, pads: Pads, stride: Sides) -> Sides:
    sides = x.shape[1], x.shape[2] // w.shape[3]
    return tuple((n + lo + hi - k) // s + 1 for n, k, (lo, hi), s in zip(sides, w.shape, pads, stride, strict=False))


def _rows_type(x, w, *, pads: Pads, stride: Sides, **_):
    height, width = _plane(x, w, pads, stride)
    return jt.like(x, shape=(x.shape[0], height, width * w.shape[3]))


def met(r: int, rows: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Which of so many rows of the result the r-th row that they read belongs to, and at which row of the window."""
    return [(k, r - k * stride) for k in range(rows) if 0 <= r - k * stride < window]


@jt.kernel(
    out_type=_rows_type,
    grid=lambda x, w, *, bh, bn, **of: (*map(jt.cdiv, _rows_type(x, w, **of).shape[:0:-1], (bn, bh)), x.shape[0]),
)
def depthwise_rows(x, w, y, *, bh: int, bn: int, pads: Pads, stride: Sides):
    """x [batch, h, w * c] without padding, w [p, q, 1, c]: every channel for itself; y [batch, h', w' * c]. A program
    has `bn` neighbouring numbers of `bh` rows of the result, and reads each number that they need once for each column
    of the window."""
    # y[n, i, j, c] = sum_ab x[n, s i + a - p, s' j + b - q, c] w[a, b, c]
    at, i, n = jt.program_id(0) * bn, jt.program_id(1) * bh, jt.program_id(2)
    (p, q, _, c), numbers = w.shape, at + jt.arange(bn)
    column, channel = jax.lax.div(numbers, jnp.int32(c)), jax.lax.rem(numbers, jnp.int32(c))
    rows = [i * stride[0] + (r - pads[0][0]) for r in range((bh - 1) * stride[0] + p)]

    def with_column(b, sums):
        places, sums = (column * stride[1] + (b - pads[1][0])) * c + channel, list(sums)
        weights = [wide(jt.load(w, (a, b, 0, channel))) for a in range(p)]
        seen = (places >= 0) & (places < x.shape[2])
        for r, row in enumerate(rows):
            inside = seen & (row >= 0) & (row < x.shape[1])
            points = wide(jt.load(x, (n, jnp.clip(row, 0, x.shape[1] - 1), places), mask=inside))
            for k, a in met(r, bh, p, stride[0]):
                sums[k] = sums[k] + points * weights[a]
        return tuple(sums)

    sums = (jt.zeros((bn,), sums_in(x)),) * bh
    for b in range(q) if q <= _COLUMNS else jt.range(q):
        sums = with_column(b, sums)
    for k in range(bh):  # a row behind the end would be the next plane's first
        row, there = i + k, None
        if y.shape[1] % bh:
            row, there = jnp.minimum(row, y.shape[1] - 1), jnp.broadcast_to(row < y.shape[1], (bn,))
        jt.store(y, (n, row, jt.ds(at, bn)), sums[k].astype(y.dtype), mask=there)


_COLUMNS = 4  # of a window that one program has in a row, without a loop


@jt.kernel(
    out_type=lambda g, w, *, sides, **_: jt.like(g, shape=(g.shape[0], sides[0], sides[1] * w.shape[3])),
    grid=lambda g, w, *, bh, bn, sides, **_: (jt.cdiv(sides[1] * w.shape[3], bn), jt.cdiv(sides[0], bh), g.shape[0]),
)
def depthwise_transposed_rows(g, w, y, *, bh: int, bn: int, sides: Sides, low: Sides, stride: Sides):
    """g [batch, h', w' * c], w [p, q, 1, c], y [batch, h, w * c] with these sides: the transpose of a convolution of
    each channel for itself with `low` points of padding in front. `bh` rows, a multiple of the stride, are a program's,
    so that it is known which rows of g and of the window meet in which of them."""
    # y[n, i, j, c] = sum_ab g[n, (i + p - a) / s, (j + q - b) / s', c] w[a, b, c], where s and s' divide
    at, first, n = jt.program_id(0) * bn, jt.program_id(1) * (bh // stride[0]), jt.program_id(2)
    (p, q, _, c), numbers = w.shape, at + jt.arange(bn)
    column, channel = jax.lax.div(numbers, jnp.int32(c)), jax.lax.rem(numbers, jnp.int32(c))
    ahead = [(k, a, k + low[0] - a) for k in range(bh) for a in range(p)]
    pairs = [(k, a, there // stride[0]) for k, a, there in ahead if there % stride[0] == 0]
    sums = [jt.zeros((bn,), sums_in(g)) for _ in range(bh)]
    for b in range(q):
        there = column + (low[1] - b)
        place = jax.lax.div(there, jnp.int32(stride[1]))
        seen = (there >= 0) & (place * stride[1] == there) & (place < g.shape[2] // c)
        weights = [wide(jt.load(w, (a, b, 0, channel))) for a in range(p)]
        for r in sorted({r for *_, r in pairs}):
            row = first + r
            inside = seen & (row >= 0) & (row < g.shape[1])
            index = n, jnp.clip(row, 0, g.shape[1] - 1), place * c + channel
            points = wide(jt.load(g, index, mask=inside))
            for k, a in ((k, a) for k, a, of in pairs if of == r):
                sums[k] = sums[k] + points * weights[a]
    for k, total in enumerate(sums):
        row, inside = first * stride[0] + k, None
        if sides[0] % bh:
            row, inside = jnp.minimum(row, sides[0] - 1), jnp.broadcast_to(row < sides[0], (bn,))
        jt.store(y, (n, row, jt.ds(at, bn)), total.astype(y.dtype), mask=inside)
