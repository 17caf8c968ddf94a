"""Which kernel computes a convolution."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import convolution_boxes, dispatch
from jtile.ops._shapes import fit, machine, tuned
from jtile.ops.convolution_kernels import (
    Sides,
    convolution_patch_tiles,
    convolution_row_tiles,
    convolution_tiles,
    depthwise_tiles,
    forward_tiles,
    out_shape,
    points_of_tile,
)
from jtile.ops.convolution_points import Pads, convolution_points, convolution_row_points, depthwise_rows
from jtile.ops.matmul import matmul


def padded(x, pads: Pads):
    return jnp.pad(x, ((0, 0), *pads, (0, 0))) if any(lo or hi for lo, hi in pads) else x


def cut(x, pads: Pads):
    """x without the points that negative padding takes away, and the padding that is left."""
    if min(map(min, pads)) >= 0:
        return x, pads
    kept = (slice(max(-lo, 0), n - max(-hi, 0)) for n, (lo, hi) in zip(x.shape[1:-1], pads, strict=True))
    return x[(slice(None), *kept)], tuple((max(lo, 0), max(hi, 0)) for lo, hi in pads)


def _in_points(x, w, *, stride: Sides, dilation: Sides, groups: int, pads: Pads):
    *window, channels, outputs = w.shape
    if 0 < outputs < 16:  # fewer columns than a product has
        more = {"stride": stride, "dilation": dilation, "groups": groups, "pads": pads}
        return _in_points(x, jnp.pad(w, (*((0, 0),) * (w.ndim - 1), (0, 16 - outputs))), **more)[..., :outputs]
    flat, matrix = x.reshape(-1, channels), w.reshape(-1, outputs)
    if math.prod(window) == 1 and set(stride) == {1} and not any(lo or hi for lo, hi in pads):
        return matmul(flat, matrix).reshape(*x.shape[:-1], outputs)
    bc = math.gcd(channels, 64)
    bo = min(128, max(16, jt.next_power_of_2(outputs)))
    of = {"window": tuple(window), "stride": stride, "dilation": dilation, "pads": pads}
    wide = bo > 64
    stages = 3 if bc == 64 and not wide else 4  # three stages of 24 KiB leave room for a third block
    run = tuned(convolution_points, num_warps=8 if wide else 4, num_stages=stages, specialize=False)
    y = run(flat, matrix, bm=128, bo=bo, bc=bc, sides=x.shape[1:-1], **of)
    return y.reshape(x.shape[0], *out_shape(shaped(x, pads), w, stride, dilation)[1:])


def _linear_points(x, w, *, stride: Sides, dilation: Sides, groups: int, pads: Pads):
    """What boxes of points compute, by a kernel whose reverse is of x as it is, without its padding."""
    options = {"stride": stride, "dilation": dilation, "pads": pads}
    if not_in_points(x, w, groups=groups) is None:
        return _in_points(x, w, groups=groups, **options)
    *window, channels, outputs = w.shape
    bc, bo = math.gcd(channels, 64), math.gcd(outputs // groups, 64)
    run = tuned(convolution_points, num_warps=4, specialize=False)
    tile = {"bm": 64 if min(bc, bo) >= 16 else 16, "bc": bc, "bo": bo, "groups": groups}
    y = run(
        x.reshape(-1, x.shape[-1]), w.reshape(-1, outputs), **tile, sides=x.shape[1:-1], window=tuple(window), **options
    )
    return y.reshape(x.shape[0], *out_shape(shaped(x, pads), w, stride, dilation)[1:])


def shaped(x, pads: Pads) -> jax.ShapeDtypeStruct:
    sides = (n + lo + hi for n, (lo, hi) in zip(x.shape[1:-1], pads, strict=True))
    return jax.ShapeDtypeStruct((x.shape[0], *sides, x.shape[-1]), x.dtype)


def not_in_points(x, w, *, groups: int, **_) -> str | None:
    return dispatch.first_unmet(
        (not machine().whole and not dispatch.vector_cores(), "tiles of points are of the registers of a GPU"),
        (groups == 1, "channels fall into groups"),
        (x.dtype.itemsize == 2, f"products of {x.dtype.name} are as quick in other tiles"),
        (math.gcd(w.shape[-2], 64) >= 16, "there are few channels"),
        (all(isinstance(n, int) for n in x.shape[1:]), "sides are not known"),
    )


def _in_row_points(x, w, *, stride: Sides, dilation: Sides, groups: int, pads: Pads):
    """Channels and columns of the window are extended to powers of two, with zeros, so that the numbers of a row begin
    where copies may begin."""
    *window, q, channels, outputs = w.shape
    shape = out_shape(shaped(x, pads), w, stride, dilation)
    c = max(4, jt.next_power_of_2(channels))
    wide = max(jt.next_power_of_2(q), 16 // c)
    w = jnp.pad(w, ((0, 0),) * len(window) + ((0, wide - q), (0, c - channels), (0, 0)))
    width = (shape[-2] - 1) * stride[-1] + wide  # what windows reach into; a multiple of 16 bytes
    width += width * c % 8 // c
    *around, (lo, hi) = pads
    x = jnp.pad(x, ((0, 0), *around, (lo, max(hi, width - lo - x.shape[-2])), (0, c - channels)))[..., :width, :]
    of = {"window": tuple(window), "sides": x.shape[1:-2], "points": shape[1:-1], "numbers": wide * c, "channels": c}
    steps = {"stride": stride, "dilation": dilation[:-1]}
    bo = min(128, max(16, jt.next_power_of_2(outputs)))
    run = tuned(convolution_row_points, num_warps=8 if bo > 64 else 4, num_stages=4, specialize=False)
    y = run(x.reshape(-1, width * c), w.reshape(-1, outputs), bm=128, bo=bo, **of, **steps)
    return y.reshape(shape)


def _not_in_row_points(x, w, *, dilation: Sides, groups: int, **_) -> str | None:
    q, channels, outputs = w.shape[-3:]
    return dispatch.first_unmet(
        (not machine().whole and not dispatch.vector_cores(), "tiles of points are of the registers of a GPU"),
        (groups == 1 and channels < 16 and q > 1, "a row of the window has more channels than one, or 16 of them"),
        (dilation[-1] == 1, "the points of a row lie apart"),
        (x.dtype.itemsize == 2 and outputs >= 16, "there are few outputs, or numbers of another size"),
        (all(isinstance(n, int) for n in x.shape[1:]), "sides are not known"),
    )


def _in_depthwise_rows(x, w, *, stride: Sides, pads: Pads, **_):
    if one_row(x, w.shape, pads):
        x, w, pads = turned(x), w.swapaxes(0, 1), pads[::-1]
        return turned(_in_depthwise_rows(x, w, stride=stride[::-1], pads=pads))
    # Programs that have more rows of the result read those of x less often; rows in equal parts leave none empty. With
    # strides, rows have less in common. (µs on an H200: 3x3 43 with 8 rows of 1024 numbers, 41 of 512, with stride 2 24
    # with 7 of 1024, 20 with 4; 7x7 106 with 7 of 1024, 88 with 14 of 512.)
    batch, _, width, channels = x.shape
    rows, columns = out_shape(shaped(x, pads), w, stride, (1, 1))[1:3]
    most, bn = (4, 1024) if max(stride) > 1 else (14 if w.shape[0] > 4 else 8, 512)
    tile = {"bh": jt.cdiv(rows, jt.cdiv(rows, most)), "bn": fit(columns * channels, bn)}
    run = tuned(depthwise_rows, num_warps=4)
    y = run(x.reshape(batch, -1, width * channels), w, **tile, pads=pads, stride=stride)
    return y.reshape(batch, rows, columns, channels)


def one_row(x, window: Sides, pads: Pads) -> bool:
    """Whether a convolution of two axes is one along the last alone, whose points programs take for rows."""
    return x.shape[1] == window[0] == 1 and not any(pads[0])


def turned(x):
    """Images of one row as images of one column."""
    return x.reshape(x.shape[0], x.shape[2], x.shape[1], x.shape[3])


def _not_in_depthwise_rows(
    x, w, *, stride: Sides, dilation: Sides, groups: int, pads: Pads
) -> str | None:  # fmt: skip
    return _not_depthwise(x, w, groups=groups) or dispatch.first_unmet(
        (not machine().whole and not dispatch.vector_cores(), "rows of sums are of the registers of a GPU"),
        (len(stride) == 2 and {*dilation} == {1}, "the window has gaps or another axis"),
        (max(stride) <= 4, "the points are far apart"),
        (all(isinstance(n, int) for n in x.shape[1:]), "sides are not known"),
        (w.shape[0] > 1 or one_row(x, w.shape, pads), "there is no row that two rows of the result need"),
    )


def _in_tiles(x, w, *, stride: Sides, dilation: Sides, groups: int):
    shape = out_shape(x, w, stride, dilation)
    tiles = forward_tiles(*shape[-3:-1], w.shape[-2], shape[-1] // groups, x.dtype.itemsize)
    return convolution_tiles(x, w, **tiles, stride=stride, dilation=dilation, groups=groups)


def _in_rows(x, w, *, stride: Sides, dilation: Sides, groups: int):
    shape = out_shape(x, w, stride, dilation)
    bh, bw = points_of_tile(*shape[-3:-1], 128)
    bo = fit(shape[-1], 256 if machine().whole else 64)
    return convolution_row_tiles(x, w, bh=bh, bw=bw, bo=bo, stride=stride, dilation=dilation)


def _not_in_rows(x, w, *, stride: Sides, dilation: Sides, groups: int) -> str | None:
    q, channels = w.shape[-3:-1]
    return dispatch.first_unmet(
        (groups == 1 and channels < 16 and q > 1, "a row of the window has more channels than one, or 16 of them"),
        (dilation[-1] == 1, "the points of a row lie apart"),
        (not dispatch.vector_cores(), "loads by computed indices are slow"),
    )


def _in_patches(x, w, *, stride: Sides, dilation: Sides, groups: int):
    bw = fit(out_shape(x, w, stride, dilation)[-2], 128)
    return convolution_patch_tiles(x.reshape(*x.shape[:-2], -1), w, bw=bw, stride=stride, dilation=dilation)


def _not_in_patches(x, w, **options) -> str | None:
    short = math.prod(w.shape[:-1]) <= _PATCH
    return dispatch.first_unmet((machine().whole, "programs have no memory of their own that is as quick")) or (
        _not_in_rows(x, w, **options) or dispatch.first_unmet((short, f"a window has more than {_PATCH} numbers"))
    )


_PATCH = 1024  # numbers of a window, at most: 128 windows of them are half of a second cache


def _depthwise(x, w, *, stride: Sides, dilation: Sides, groups: int):
    shape = out_shape(x, w, stride, dilation)
    bc = fit(shape[-1], 128 if machine().whole else 64)
    bw = fit(shape[-2], max(1, min(32, machine().tile // bc)))
    bh = fit(shape[-3], max(1, machine().tile // 2 // (bc * bw)))
    return depthwise_tiles(x, w, bh=bh, bw=bw, bc=bc, stride=stride, dilation=dilation)


def _not_depthwise(x, w, *, groups: int, **_) -> str | None:
    return None if groups == x.shape[-1] == w.shape[-1] else "channels meet each other, or have several outputs"


def _of_padded(run):
    """An implementation for x with its padding."""
    return lambda x, w, *, pads, **options: run(padded(x, pads), w, **options)


def _whatever_pads(misfit):
    return lambda x, w, *, pads, **options: misfit(x, w, **options)


convolution_op = dispatch.Op(
    "convolution",
    dispatch.Implementation("channels for themselves, by rows", _in_depthwise_rows, _not_in_depthwise_rows),
    dispatch.Implementation("channels for themselves", _of_padded(_depthwise), _whatever_pads(_not_depthwise)),
    dispatch.Implementation("windows below each other", _of_padded(_in_patches), _whatever_pads(_not_in_patches)),
    dispatch.Implementation("rows of the window, points of the result", _in_row_points, _not_in_row_points),
    dispatch.Implementation("rows of the window", _of_padded(_in_rows), _whatever_pads(_not_in_rows)),
    dispatch.Implementation(
        "boxes of points", convolution_boxes.convolved, convolution_boxes.not_convolved, dispatch.BLOCK_LEVEL,
        portable=False, differentiated=_linear_points,
    ),
    dispatch.Implementation("points of the result", _in_points, not_in_points),
    dispatch.Implementation("points of the window", _of_padded(_in_tiles)),
)  # fmt: skip
