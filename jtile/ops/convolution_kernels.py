"""The kernels of convolutions: sums of products of matrices, one for each point of the window (implicit im2col), or one
for each of its rows where there are few channels; of channels that do not meet, sums of tiles."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
from jax import core

import jtile as jt
from jtile.ops import dispatch
from jtile.ops._shapes import fit, known, machine, sums_in, wide

Sides = tuple[int, ...]  # a number for each axis that a window moves along


def out_shape(x, w, stride: Sides, dilation: Sides):
    axes = range(w.ndim - 2)
    sides = (jt.cdiv(x.shape[1 + k] - (w.shape[k] - 1) * dilation[k], stride[k]) for k in axes)
    return x.shape[0], *(core.max_dim(n, 0) for n in sides), w.shape[-1]


def _grid(x, w, *, bh, bw, bo, stride, dilation, groups, **_):
    *planes, height, width, outputs = out_shape(x, w, stride, dilation)
    return *planes, jt.cdiv(height, bh) * jt.cdiv(width, bw), groups * jt.cdiv(outputs // groups, bo)


def _places(y):
    """The batch row of a program, its plane where there are planes, and the further numbers of the program."""
    rank = y.ndim - 2
    ids = [jt.program_id(k) for k in range(rank + 1)]
    return ids[0], tuple(ids[1 : rank - 1]), *ids[rank - 1 :]


def _div(u, v: int):
    return jax.lax.div(u, jnp.int32(v))


def _rem(u, v: int):
    return jax.lax.rem(u, jnp.int32(v))


def _type(x, w, *, stride, dilation, **_):
    return jt.like(x, shape=out_shape(x, w, stride, dilation))


@jt.kernel(out_type=_type, grid=_grid)
def convolution_tiles(x, w, y, *, bh: int, bw: int, bo: int, stride: Sides, dilation: Sides, groups: int, bc: int = 0):
    """x [batch, (d,) h, w, c] with its padding, w [(r,) p, q, c / groups, o]; a program: bh x bw points of a plane, bo
    outputs of one. `bc` channels at a time, a divisor of c / groups; 0 for all.
    """
    # y[n, i, j, o] = sum_ab sum_c x[n, s i + d a, s j + d b, c] w[a, b, c, o]; of planes z with a sum over these, too
    # u: point of the window and part of the channels c; t: point (a, b), with planes `tap`; X, W: operands there
    (*depth, _, width, outputs), (*deep, p, q, channels) = y.shape[1:], w.shape[:-1]
    n, plane, at, out = _places(y)
    across, per_group = jt.cdiv(width, bw), outputs // groups
    i, j = _div(at, across) * bh, _rem(at, across) * bw
    blocks = jt.cdiv(per_group, bo)
    group, o = _div(out, blocks), _rem(out, blocks) * bo
    acc = jt.zeros((bh * bw, bo), sums_in(x))
    bc = bc or channels
    parts = channels // bc if bc else 1
    for u in jt.range(math.prod(deep) * p * q * parts):
        t, c = (_div(u, parts), _rem(u, parts) * bc) if parts > 1 else (u, 0)
        a, b = _div(t, q), _rem(t, q)
        tap = (a, b)
        if depth:
            tap = (_div(a, p), _rem(a, p), b)
        rows = jt.ds(i * stride[-2] + tap[-2] * dilation[-2], bh, stride[-2])
        columns = jt.ds(j * stride[-1] + b * dilation[-1], bw, stride[-1])
        here = (n, *(z * stride[0] + tap[0] * dilation[0] for z in plane), rows, columns)
        X = x[(*here, jt.ds(group * channels + c, bc))].reshape(bh * bw, bc)
        W = w[(*tap, jt.ds(c, bc) if parts > 1 else slice(None), jt.ds(group * per_group + o, bo))]
        acc = jt.dot(X, W, acc)
    lanes = jt.arange(bo) + o < per_group
    here = (n, *plane, jt.ds(i, bh), jt.ds(j, bw), jt.ds(group * per_group + o, bo))
    value = acc.reshape(bh, bw, bo).astype(y.dtype)
    if per_group % bo:
        jt.store(y, here, value, mask=jnp.broadcast_to(lanes, value.shape))
    else:
        y[here] = value


def points_of_tile(height: int, width: int, most: int = 128) -> tuple[int, int]:
    """Sides of a tile of output points: long rows of about 256 points; on a GPU `most` points that cover the width."""
    if machine().whole:
        bw = fit(width, 128)
        return fit(height, max(1, 256 // bw)), bw
    if dispatch.vector_cores():  # their compiler does not bring tiles of several rows to products
        return 1, min((b for b in (128, 64, 32, 16) if b <= most), key=lambda b: (jt.cdiv(known(width), b) * b, -b))
    bw = min((32, 16, 8), key=lambda b: (jt.cdiv(known(width), b) * b, -b))
    return fit(height, most // bw), bw


def forward_tiles(height: int, width: int, channels: int, outputs: int, itemsize: int) -> dict[str, int]:
    """The tiles of `convolution_tiles` for outputs of these sides, and for channels and outputs of one group."""
    if machine().whole:
        bh, bw = points_of_tile(height, width)
        return {"bh": bh, "bw": bw, "bo": fit(outputs, 256), "bc": 0}
    most, part = (128, 64) if itemsize < 4 else (64, 16)
    bc = max((d for d in range(1, part + 1) if channels % d == 0), default=1)
    if bc < min(16, channels):  # products of few channels are slow: all are taken at once, for as many points as fit
        bc = 0
        while most > 16 and not _hold(channels, 2 * most, itemsize):
            most //= 2
    bh, bw = points_of_tile(height, width, most)
    return {"bh": bh, "bw": bw, "bo": fit(outputs, most), "bc": bc}


def _hold(channels: int, rows: int, itemsize: int) -> bool:
    """Whether the memory of a block holds `rows` rows of channels, as operands of a product."""
    memory = jt.target().memory("block")
    return memory is None or memory.size is None or (1 << (channels - 1).bit_length()) * rows * itemsize <= memory.size


def _weight_grid(x, g, *, window, bc, bo, groups, splits, **_):
    blocks = jt.cdiv(x.shape[-1] // groups, bc) * jt.cdiv(g.shape[-1] // groups, bo)
    return math.prod(window), groups * blocks, splits


@jt.kernel(
    out_type=lambda x, g, *, window, groups, splits, **_: jax.ShapeDtypeStruct(
        (splits, *window, x.shape[-1] // groups, g.shape[-1]), sums_in(x)
    ),
    grid=_weight_grid,
)
def convolution_weight_tiles(
    x, g, dw, *, window: Sides, bh: int, bw: int, bc: int, bo: int, splits: int, stride: Sides, dilation: Sides,
    groups: int,
):  # fmt: skip
    """dw [splits, *window, c / groups, o] of x as in `convolution_tiles` and the cotangents g [batch, ..., o].

    A program: one point of the window, `bc` channels, `bo` outputs, and of each plane every `splits`-th tile of
    bh x bw points.
    """
    # dw[a, b, c, o] = sum_nij x[n, s i + d a, s j + d b, c] g[n, i, j, o]
    *planes, height, width, outputs = g.shape
    channels, per_group = x.shape[-1] // groups, outputs // groups
    at, block, split = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    *deep, p, q = window
    tap = (_div(at, q), _rem(at, q))
    if deep:
        tap = (_div(tap[0], p), _rem(tap[0], p), tap[1])
    o_blocks = jt.cdiv(per_group, bo)
    c_blocks = jt.cdiv(channels, bc)
    o, rest = _rem(block, o_blocks) * bo, _div(block, o_blocks)
    c, group = _rem(rest, c_blocks) * bc, _div(rest, c_blocks)
    down, across = jt.cdiv(height, bh), jt.cdiv(width, bw)
    acc = jnp.zeros((bc, bo), dw.dtype)
    for n in jt.range(math.prod(planes)):
        image, plane = (_div(n, planes[1]), (_rem(n, planes[1]),)) if deep else (n, ())
        for t in jt.range(jt.cdiv(down * across - split, splits)):
            place = split + t * splits
            i, j = _div(place, across) * bh, _rem(place, across) * bw
            rows = jt.ds(i * stride[-2] + tap[-2] * dilation[-2], bh, stride[-2])
            columns = jt.ds(j * stride[-1] + tap[-1] * dilation[-1], bw, stride[-1])
            there = (image, *(z * stride[0] + tap[0] * dilation[0] for z in plane), rows, columns)
            X = x[(*there, jt.ds(group * channels + c, bc))].reshape(bh * bw, bc)
            here = (image, *plane, jt.ds(i, bh), jt.ds(j, bw), jt.ds(group * per_group + o, bo))
            acc = jt.dot(X.T, g[here].reshape(bh * bw, bo), acc)
    here = (split, *tap, jt.ds(c, bc), jt.ds(group * per_group + o, bo))
    if per_group % bo:
        jt.store(dw, here, acc, mask=jnp.broadcast_to(jt.arange(bo)[None, :] + o < per_group, acc.shape))
    else:
        dw[here] = acc


# -- few channels: a row of the window at a time, whose numbers lie side by side in memory -----------------------------


@jt.kernel(
    out_type=_type,
    grid=lambda x, w, *, bh, bw, bo, stride, dilation: _grid(
        x, w, bh=bh, bw=bw, bo=bo, stride=stride, dilation=dilation, groups=1
    ),
)
def convolution_row_tiles(x, w, y, *, bh: int, bw: int, bo: int, stride: Sides, dilation: Sides):
    """The sums of `convolution_tiles` for one group: a product takes all points of a row of the window, and all
    channels, which lie side by side in memory."""
    # y[n, i, j, o] = sum_a sum_bc x[n, s i + d a, s j + b, c] w[a, (b, c), o]
    (*depth, _, width, _), (*deep, p, q, channels) = y.shape[1:], w.shape[:-1]
    n, plane, at, o = _places(y)
    o = o * bo
    across, many = jt.cdiv(width, bw), q * channels
    i, j = _div(at, across) * bh, _rem(at, across) * bw
    k = jt.arange(many if machine().whole else jt.next_power_of_2(many))
    points = jt.arange(bh * bw)
    row, column = i + _div(points, bw), (j + _rem(points, bw)) * stride[-1]
    inside = (row < y.shape[-3])[:, None] & (k < many)[None, :]
    columns, channel = column[:, None] + _div(k, channels)[None, :], _rem(k, channels)[None, :]
    acc = jt.zeros((bh * bw, bo), sums_in(x))
    for u in jt.range(math.prod(deep) * p):
        tap = (_div(u, p), _rem(u, p)) if depth else (u,)
        here = (n, *(z * stride[0] + tap[0] * dilation[0] for z in plane))
        rows = (row * stride[-2] + tap[-1] * dilation[-2])[:, None]
        X = jt.load(x, (*here, rows, columns, channel), mask=inside & (columns < x.shape[-2]))
        W = jt.load(
            w, (*tap, _div(k, channels)[:, None], _rem(k, channels)[:, None], (o + jt.arange(bo))[None, :]),
            mask=(k < many)[:, None] & (o + jt.arange(bo) < y.shape[-1])[None, :],
        )  # fmt: skip
        acc = jt.dot(X, W, acc)
    y[(n, *plane, jt.ds(i, bh), jt.ds(j, bw), jt.ds(o, bo))] = acc.reshape(bh, bw, bo).astype(y.dtype)


def _patch_shape(x, w, stride, dilation):
    """The result for x [batch, ..., h, w c]."""
    apart = jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] // w.shape[-2], w.shape[-2]), x.dtype)
    return out_shape(apart, w, stride, dilation)


@jt.kernel(
    out_type=lambda x, w, *, stride, dilation, **_: jt.like(x, shape=_patch_shape(x, w, stride, dilation)),
    grid=lambda x, w, *, bw, stride, dilation: (
        *_patch_shape(x, w, stride, dilation)[:-2],
        jt.cdiv(_patch_shape(x, w, stride, dilation)[-2], bw),
    ),
)
def convolution_patch_tiles(x, w, y, *, bw: int, stride: Sides, dilation: Sides):
    """The sums of `convolution_row_tiles` on CPUs, x [batch, (d,) h, w c]: a program writes the windows of `bw` points
    of a row one below the other, and multiplies once."""
    (width, outputs), (*rows, q, channels, _) = y.shape[-2:], w.shape
    n, plane, i, j = _places(y)
    j, many = j * bw, q * channels
    patches = jt.alloc((bw, math.prod(rows) * many), x.dtype)
    for k in jt.range(jnp.minimum(bw, width - j)):
        columns = jt.ds((j + k) * (stride[-1] * channels), many)
        for u, tap in enumerate(itertools.product(*map(range, rows))):
            here = (n, *(z * stride[0] + tap[0] * dilation[0] for z in plane), i * stride[-2] + tap[-1] * dilation[-2])
            patches[k, jt.ds(u * many, many)] = x[(*here, columns)]
    acc = jt.dot(patches[:, :], w[...].reshape(-1, outputs))
    y[(n, *plane, i, jt.ds(j, bw), slice(None))] = acc.astype(y.dtype)


# -- depthwise: no products of matrices --------------------------------------------------------------------------------


def _depthwise_grid(x, w, *, bh, bw, bc, stride, dilation):
    *planes, height, width, outputs = out_shape(x, w, stride, dilation)
    return *planes, jt.cdiv(height, bh) * jt.cdiv(width, bw), jt.cdiv(outputs, bc)


@jt.kernel(out_type=_type, grid=_depthwise_grid)
def depthwise_tiles(x, w, y, *, bh: int, bw: int, bc: int, stride: Sides, dilation: Sides):
    """x as in `convolution_tiles`, w [(r,) p, q, 1, c]: every channel for itself."""
    # y[n, i, j, c] = sum_ab x[n, s i + d a, s j + d b, c] w[a, b, c]
    n, plane, at, channel = _places(y)
    channel = jt.ds(channel * bc, bc)
    across = jt.cdiv(y.shape[-2], bw)
    i, j = _div(at, across) * bh, _rem(at, across) * bw
    acc = jnp.zeros((bh, bw, bc), sums_in(x))
    for tap in itertools.product(*map(range, w.shape[:-2])):
        rows = jt.ds(i * stride[-2] + tap[-2] * dilation[-2], bh, stride[-2])
        columns = jt.ds(j * stride[-1] + tap[-1] * dilation[-1], bw, stride[-1])
        here = (n, *(z * stride[0] + tap[0] * dilation[0] for z in plane), rows, columns, channel)
        acc = acc + wide(x[here]) * wide(w[(*tap, 0, channel)])[None, None]
    y[(n, *plane, jt.ds(i, bh), jt.ds(j, bw), channel)] = acc.astype(y.dtype)


@jt.kernel(
    out_type=lambda x, g, *, window, splits, **_: jax.ShapeDtypeStruct((splits, *window, 1, g.shape[-1]), sums_in(x)),
    grid=lambda x, g, *, window, bc, splits, **_: (math.prod(window), jt.cdiv(g.shape[-1], bc), splits),
)
def depthwise_weight_tiles(x, g, dw, *, window: Sides, bw: int, bc: int, splits: int, stride: Sides, dilation: Sides):
    """dw [splits, *window, 1, c] of x and g [batch, ..., c]: a program has a point of the window, `bc` channels, and
    every `splits`-th row of g."""
    # dw[a, b, c] = sum_nij x[n, s i + d a, s j + d b, c] g[n, i, j, c]
    at, channel, split = jt.program_id(0), jt.ds(jt.program_id(1) * bc, bc), jt.program_id(2)
    (*planes, height, width), (*deep, p, q) = g.shape[:-1], window
    tap = (_div(at, q), _rem(at, q))
    if deep:
        tap = (_div(tap[0], p), _rem(tap[0], p), tap[1])
    acc = jnp.zeros((bw, bc), dw.dtype)
    for row in jt.range(split, math.prod(planes) * height, splits):
        n, i = _div(row, height), _rem(row, height)
        image, plane = (_div(n, planes[1]), (_rem(n, planes[1]),)) if deep else (n, ())
        there = (image, *(z * stride[0] + tap[0] * dilation[0] for z in plane), i * stride[-2] + tap[-2] * dilation[-2])
        for j in jt.range(0, width, bw):
            columns = jt.ds(j * stride[-1] + tap[-1] * dilation[-1], bw, stride[-1])
            G = g[(image, *plane, i, jt.ds(j, bw), channel)].astype(dw.dtype)
            acc = acc + x[(*there, columns, channel)].astype(dw.dtype) * G
    dw[(split, *tap, 0, channel)] = acc.sum(0)
