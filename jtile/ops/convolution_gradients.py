"""Gradients of convolutions: that of x is a convolution of the cotangents, that of the weight a sum over all points."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import convolution_boxes, dispatch
from jtile.ops._shapes import fit, known, machine, tuned
from jtile.ops.convolution_forms import convolution_op, cut, not_in_points, one_row, padded, turned
from jtile.ops.convolution_kernels import (
    Sides,
    convolution_patch_tiles,
    convolution_row_tiles,
    convolution_tiles,
    convolution_weight_tiles,
    depthwise_tiles,
    depthwise_weight_tiles,
    out_shape,
    points_of_tile,
)
from jtile.ops.convolution_points import (
    Pads,
    convolution_points,
    convolution_row_points,
    depthwise_rows,
    depthwise_transposed_rows,
    transposed_points,
)
from jtile.ops.convolution_sums import convolution_weight_points, convolution_weight_rows, depthwise_weight_rows

Phase = tuple[slice, int, int]


# -- of x --------------------------------------------------------------------------------------------------------------


def convolution_dx(g, w, shape, *, stride: Sides, dilation: Sides, groups: int, low: Sides | None = None):
    """dx of `shape` = [batch, ..., c], in front of which the convolution had `low` points of padding: a convolution of
    g for each remainder of the points by the stride, or one for all remainders of few channels."""
    low = low or (0,) * len(stride)
    return _dx(g, w, shape=tuple(shape), stride=stride, dilation=dilation, groups=groups, low=low)


def _dx_of_remainders(g, w, *, shape, stride: Sides, dilation: Sides, groups: int, low: Sides):
    # dx[s u + r - p] = sum_t g[u + (r - d a) / s] w[a]     a = a_0 + s t: d a = r modulo s
    *window, channels, outputs = w.shape
    rank = len(window)
    turned = w.reshape(*window, channels, groups, outputs // groups)
    turned = turned.transpose(*range(rank), rank + 2, rank + 1, rank)
    turned = turned.reshape(*window, outputs // groups, groups * channels)
    sides = [jt.cdiv(n, s) for n, s in zip(shape[1:-1], stride, strict=True)]
    phases = [[_phase(r + low[k], window[k], stride[k], dilation[k]) for r in range(stride[k])] for k in range(rank)]
    if groups == 1 and _together(g, shape[-1], stride, dilation):
        whole = _all_phases(g, turned, sides, phases)
    else:
        part = functools.partial(_of_phase, g, turned, sides, groups)
        whole = _stacked(part, phases, ()) if math.prod(stride) > 1 else part(*(of[0] for of in phases))
    whole = whole.reshape(shape[0], *(n * s for n, s in zip(sides, stride, strict=True)), shape[-1])
    return whole[(slice(None), *(slice(0, n) for n in shape[1:-1]))]


def _linear_dx(g, w, *, shape, stride: Sides, dilation: Sides, groups: int, low: Sides):
    """`convolution_dx` by a kernel of which the reverse is the convolution that it is the transpose of."""
    if groups > 1 or min(math.gcd(n, 64) for n in w.shape[-2:]) < 16:  # terms of a product
        return _dx_of_remainders(g, w, shape=shape, stride=stride, dilation=dilation, groups=groups, low=low)
    *window, channels, outputs = w.shape
    of = {"sides": tuple(shape[1:-1]), "points": g.shape[1:-1], "window": tuple(window), "channels": channels}
    steps = {"stride": stride, "dilation": dilation, "low": low}
    tile = {"bm": 128, "bc": math.gcd(channels, 64), "bo": math.gcd(outputs, 64)}
    run = tuned(transposed_points, num_warps=4, specialize=False)
    return run(g.reshape(-1, outputs), w.reshape(-1, outputs), **tile, **of, **steps).reshape(shape)


def _depthwise_dx(g, w, *, shape, stride: Sides, low: Sides, **_):
    _, height, width, channels = shape
    rows = jt.cdiv(height, jt.cdiv(height, 8))
    tile = {"bh": jt.cdiv(rows, stride[0]) * stride[0], "bn": fit(width * channels, 1024)}
    run = tuned(depthwise_transposed_rows, num_warps=4)
    y = run(g.reshape(*g.shape[:2], -1), w, **tile, sides=(height, width), low=low, stride=stride)
    return y.reshape(shape)


def _not_depthwise_dx(g, w, *, shape, stride: Sides, dilation: Sides, groups: int, low: Sides) -> str | None:
    return dispatch.first_unmet(
        (not machine().whole and not dispatch.vector_cores(), "rows of sums are of the registers of a GPU"),
        (groups == shape[-1] == g.shape[-1], "channels meet each other, or have several outputs"),
        (len(stride) == 2 and {*dilation} == {1}, "the window has gaps or another axis"),
        (1 < max(stride) <= 4, "there is one remainder, or they are many"),
        (math.prod(w.shape[:2]) <= 25, "the window has many points"),
        (all(isinstance(n, int) for n in (*shape[1:], *g.shape[1:])), "sides are not known"),
    )


_dx = dispatch.Op(
    "gradient of the points of a convolution",
    dispatch.Implementation(
        "boxes of points",
        convolution_boxes.dx,
        convolution_boxes.not_dx,
        dispatch.BLOCK_LEVEL,
        portable=False,
        differentiated=_linear_dx,
    ),
    dispatch.Implementation("channels for themselves, by rows", _depthwise_dx, _not_depthwise_dx),
    dispatch.Implementation("a convolution for each remainder", _dx_of_remainders),
)


def _phase(r: int, taps: int, stride: int, dilation: int) -> Phase:
    """Which taps reach the points s u + r, how far ahead of u in g the first of them reads, and their spacing in g."""
    every = stride // math.gcd(stride, dilation)
    first = next((a for a in range(min(every, taps)) if (dilation * a - r) % stride == 0), taps)
    return slice(first, None, every), (r - dilation * first) // stride, dilation * every // stride


def _of_phase(g, turned, sides, groups: int, *along: Phase):
    """The points of dx of one remainder along each axis."""
    taps = turned[tuple(of[0] for of in along)]
    if 0 in taps.shape:
        return jnp.zeros((g.shape[0], *sides, turned.shape[-1]), g.dtype)
    pads = []
    for k, (_, ahead, d) in enumerate(along):
        pads.append((d * (taps.shape[k] - 1) - ahead, sides[k] + ahead - g.shape[1 + k]))
    return _convolved(g, jnp.flip(taps, range(len(along))), tuple(pads), tuple(of[2] for of in along), groups)


def _convolved(g, w, pads: Pads, dilation: Sides, groups: int):
    rank = len(pads)
    if all(isinstance(n, int) for pair in pads for n in pair):
        g, pads = cut(g, pads)
    else:
        here = ((0, 0, 0), *((lo, hi, 0) for lo, hi in pads), (0, 0, 0))
        g, pads = jax.lax.pad(g, jnp.zeros((), g.dtype), here), ((0, 0),) * rank
    return convolution_op(g, w, stride=(1,) * rank, dilation=dilation, groups=groups, pads=pads)


def _stacked(part, phases: list[list[Phase]], along: tuple[Phase, ...]):
    """The parts of all remainders of the axes that are left, behind their axes."""
    k = len(along)
    if k == len(phases):
        return part(*along)
    return jnp.stack([_stacked(part, phases, (*along, of)) for of in phases[k]], 2 + k)


_FEW = 64  # channels of all remainders, which one product has as its columns


def _together(g, channels: int, stride: Sides, dilation: Sides) -> bool:
    """Whether one convolution gives the points of all remainders: g is read once for each point of the window of one
    remainder, and not for each point of the whole window; zeros that are multiplied cost less."""
    few = math.prod(stride) > 1 and math.prod(stride) * channels <= _FEW
    known = all(isinstance(n, int) for n in g.shape[1:])
    return few and known and not machine().whole and g.dtype.itemsize == 2 and set(dilation) == {1}


def _all_phases(g, turned, sides, phases: list[list[Phase]]):
    """The points of dx of all remainders, as outputs of one convolution: [batch, u, r, u', r', ..., c]."""
    rank, channels = len(phases), turned.shape[-1]
    taps = [[len(range(turned.shape[k])[s]) for s, _, _ in of] for k, of in enumerate(phases)]
    behind = [min(a - n + 1 for (_, a, _), n in zip(of, ns, strict=True)) for of, ns in zip(phases, taps, strict=True)]
    ahead = [max(a for _, a, _ in of) for of in phases]
    parts = []
    for at in itertools.product(*(range(len(of)) for of in phases)):
        along = [phases[k][r] for k, r in enumerate(at)]
        part = jnp.flip(turned[tuple(of[0] for of in along)], range(rank))
        around = [
            (a - taps[k][r] + 1 - behind[k], ahead[k] - a)
            for k, (r, (_, a, _)) in enumerate(zip(at, along, strict=True))
        ]
        parts.append(jnp.pad(part, (*around, (0, 0), (0, 0))))
    w = jnp.concatenate(parts, -1)
    extra = max(0, 16 - w.shape[-1])
    w = jnp.pad(w, (*((0, 0),) * (rank + 1), (0, extra)))
    pads = tuple((-behind[k], sides[k] + ahead[k] - g.shape[1 + k]) for k in range(rank))
    y = _convolved(g, w, pads, (1,) * rank, 1)[..., : len(parts) * channels]
    y = y.reshape(*y.shape[:-1], *(len(of) for of in phases), channels)
    order = itertools.chain(*((1 + k, 1 + rank + k) for k in range(rank)))
    return y.transpose(0, *order, 1 + 2 * rank)


# -- of the weight -----------------------------------------------------------------------------------------------------


def convolution_dw(x, g, window: Sides, dtype, *, stride: Sides, dilation: Sides, groups: int, pads: Pads):
    """dw [*window, channels / groups, outputs] of x without its padding and of g."""
    options = {"window": tuple(window), "stride": stride, "dilation": dilation, "groups": groups, "pads": pads}
    return _dw(x, g, **options).astype(dtype)


def _dw_in_shares(x, g, **options):
    return _dw_sums(x, g, **options).astype(x.dtype)


def _dw_sums(x, g, *, window: Sides, stride: Sides, dilation: Sides, groups: int, pads: Pads):
    options, dtype = {"stride": stride, "dilation": dilation}, x.dtype
    like = jax.ShapeDtypeStruct((*window, x.shape[-1] // groups, g.shape[-1]), dtype)
    if not_in_points(x, like, groups=groups) is None:
        return _dw_in_points(x, g, window, **options, pads=pads).reshape(like.shape)
    x, channels, outputs = padded(x, pads), x.shape[-1] // groups, g.shape[-1] // groups
    narrow = x.dtype.itemsize < 4
    bh, bw = points_of_tile(*g.shape[-3:-1], 64 if narrow else 32)
    side = 128 if machine().whole else 64 if narrow else 32
    bc, bo = fit(channels, side), fit(outputs, side)
    programs = math.prod(window) * groups * jt.cdiv(channels, bc) * jt.cdiv(outputs, bo)
    tiles = jt.cdiv(g.shape[-3], bh) * jt.cdiv(g.shape[-2], bw)
    splits = min(known(tiles), jt.cdiv(machine().programs, programs))
    more = {"groups": groups, "window": window, "splits": splits}
    dw = convolution_weight_tiles(x, g, bh=bh, bw=bw, bc=bc, bo=bo, **more, **options)
    return dw[0] if splits == 1 else dw.sum(0)


_dw = dispatch.Op(
    "gradient of the weight of a convolution",
    dispatch.Implementation(
        "boxes of points", convolution_boxes.dw, convolution_boxes.not_dw, dispatch.BLOCK_LEVEL, portable=False
    ),
    dispatch.Implementation("shares of the points", _dw_in_shares),
)


_SUMS = 4 * 64 * 64  # of the products of one program of 4 warps, at most
_NARROW = 3 * 64 * 32  # of one of 2 warps


def _dw_in_points(x, g, window: Sides, **options):
    """Sums [points of the window, channels, outputs] over points of x without its padding and of g."""
    channels, outputs = x.shape[-1], g.shape[-1]
    flat, cotangents = x.reshape(-1, channels), g.reshape(-1, outputs)
    bc, bo = math.gcd(channels, 128), min(128, max(16, jt.next_power_of_2(outputs)))
    narrow = bc < 64  # products of few numbers: small programs, many of a processor, hide each other's waits
    most = max(1, (_NARROW if narrow else _SUMS) // (bc * bo))
    taps = max(n for n in range(1, most + 1) if math.prod(window) % n == 0)
    warps = 8 if bc * bo * taps > _SUMS else 2 if narrow and bo < 64 else 4
    blocks = math.prod(window) // taps * jt.cdiv(channels, bc) * jt.cdiv(outputs, bo)
    stages, bm = (2, 128) if warps == 2 else (3, 64)  # longer rounds in little more memory: four programs a processor
    splits = _splits(cotangents.shape[0], bm, blocks, 4 if narrow else 2)
    run = tuned(convolution_weight_points, num_warps=warps, num_stages=stages, specialize=False)
    sums = {"bm": bm, "bc": bc, "bo": bo, "taps": taps, "splits": splits}
    dw = run(flat, cotangents, **sums, sides=x.shape[1:-1], points=g.shape[1:-1], window=tuple(window), **options)
    return dw[0] if splits == 1 else dw.sum(0)


def _dw_in_rows(x, g, of):
    """Sums [rows of the window, numbers, outputs] for the operands and sizes of `convolution_row_points`."""
    rows, bo = math.prod(of["window"]), min(64, max(16, jt.next_power_of_2(g.shape[1])))
    taps = max(n for n in range(1, max(1, _SUMS // (of["numbers"] * bo)) + 1) if rows % n == 0)
    splits = _splits(g.shape[0], 64, rows // taps * jt.cdiv(g.shape[1], bo))
    run = tuned(convolution_weight_rows, num_warps=4, num_stages=3, specialize=False)
    dw = run(x, g, bm=64, bo=bo, taps=taps, splits=splits, **of)
    return dw[0] if splits == 1 else dw.sum(0)


def _splits(points: int, bm: int, blocks: int, programs: int = 2) -> int:
    """In how many shares of points sums are made by so many blocks of programs each, for `programs` of a processor."""
    return max(1, min(jt.cdiv(known(points), bm), programs * machine().sums // (2 * blocks)))


def depthwise_dw(x, g, window: Sides, dtype, *, stride: Sides, dilation: Sides, pads: Pads):
    """dw [*window, 1, channels] of x without its padding and of g: no channel meets another."""
    channels = g.shape[-1]
    rows = not machine().whole and not dispatch.vector_cores() and len(window) == 2
    if rows and max(stride) <= 4 and {*dilation} == {1} and all(isinstance(n, int) for n in x.shape[1:]):
        if window[0] > 1:
            return _depthwise_dw_by_rows(x, g, window, stride, pads).astype(dtype)
        if one_row(x, window, pads):
            dw = _depthwise_dw_by_rows(turned(x), turned(g), window[::-1], stride[::-1], pads[::-1])
            return dw.swapaxes(0, 1).astype(dtype)
    x, bc = padded(x, pads), fit(channels, 64)
    bw = fit(g.shape[-2], max(1, machine().row // bc))
    programs = math.prod(window) * jt.cdiv(channels, bc)
    splits = max(1, min(known(math.prod(g.shape[:-2])), machine().programs // programs))
    options = {"stride": stride, "dilation": dilation}
    return depthwise_weight_tiles(x, g, window=window, bw=bw, bc=bc, splits=splits, **options).sum(0).astype(dtype)


def _depthwise_dw_by_rows(x, g, window: Sides, stride: Sides, pads: Pads):
    channels, (height, width) = g.shape[-1], g.shape[1:3]
    bn, bh = fit(width * channels, 1024), jt.cdiv(height, jt.cdiv(height, 14))
    blocks = window[1] * jt.cdiv(width * channels, bn)
    most = (2 if width > 1 and window[0] <= 4 else 1) * machine().sums // blocks  # of an H200
    splits = max(1, min(g.shape[0] * jt.cdiv(height, bh), most))
    flat = lambda z: z.reshape(*z.shape[:2], -1)
    run = tuned(depthwise_weight_rows, num_warps=4)
    given = {"window": tuple(window), "channels": channels, "pads": pads, "stride": stride}
    sums = run(flat(x), flat(g), bh=bh, bn=bn, splits=splits, **given)
    return sums.reshape(splits, *window, width, channels).sum((0, 3))[..., None, :]


# -- rules of the kernels ----------------------------------------------------------------------------------------------


def _rule(kernel):
    def put(backward):
        kernel.defvjp(lambda x, w, **meta: (kernel(x, w, **meta), (x, w)), backward)
        return backward

    return put


def _both(x, g, w, *, pads: Pads, groups: int = 1, **options):
    low = tuple(lo for lo, _ in pads)
    dx = convolution_dx(g, w, x.shape, groups=groups, low=low, **options)
    return dx, convolution_dw(x, g, w.shape[:-2], w.dtype, groups=groups, pads=pads, **options)


@_rule(convolution_row_tiles)
@_rule(convolution_tiles)
def _tiles_backward(residuals, g, *, stride: Sides, dilation: Sides, groups: int = 1, **_):
    x, w = residuals
    return _both(x, g, w, stride=stride, dilation=dilation, groups=groups, pads=((0, 0),) * len(stride))


@_rule(convolution_patch_tiles)
def _patch_backward(residuals, g, *, bw: int, **options):
    x, w = residuals
    dx, dw = _tiles_backward((x.reshape(*x.shape[:-1], -1, w.shape[-2]), w), g, **options)
    return dx.reshape(x.shape), dw


@_rule(convolution_points)
def _points_backward(residuals, g, *, sides, window, stride, dilation, pads, groups: int = 1, **_):
    x, w = residuals
    whole, kernel = x.reshape(-1, *sides, x.shape[1]), w.reshape(*window, x.shape[1] // groups, w.shape[1])
    axes = zip(sides, pads, strict=True)
    around = jax.ShapeDtypeStruct((whole.shape[0], *(n + lo + hi for n, (lo, hi) in axes), x.shape[1]), x.dtype)
    g = g.reshape(out_shape(around, kernel, stride, dilation))
    dx, dw = _both(whole, g, kernel, stride=stride, dilation=dilation, groups=groups, pads=pads)
    return dx.reshape(x.shape), dw.reshape(w.shape)


def _transposed_backward(residuals, ct, *, sides, points, window, channels, stride, dilation, low, **_):
    g, w = residuals
    cotangents, outputs = ct.reshape(-1, *sides, channels), g.shape[1]
    axes = zip(points, window, stride, dilation, sides, low, strict=True)
    # behind may be less padding than none, where the window does not reach the last points
    pads = tuple((lo, (m - 1) * s + (k - 1) * d + 1 - n - lo) for m, k, s, d, n, lo in axes)
    x, pads = cut(cotangents, pads)
    kernel, options = w.reshape(*window, channels, outputs), {"stride": stride, "dilation": dilation, "groups": 1}
    dg = convolution_op(x, kernel, **options, pads=pads)
    dw = convolution_dw(x, g.reshape(-1, *points, outputs), window, w.dtype, **options, pads=pads)
    return dg.reshape(g.shape), dw.reshape(w.shape)


def _transposed_rows_backward(residuals, ct, *, sides, low, stride, **_):
    g, w = residuals
    points, c = (g.shape[1], g.shape[2] // w.shape[3]), w.shape[3]
    axes = zip(points, w.shape, stride, sides, low, strict=False)
    pads = tuple((lo, (m - 1) * s + k - n - lo) for m, k, s, n, lo in axes)
    x, pads = cut(ct.reshape(-1, *sides, c), pads)
    options = {"stride": stride, "dilation": (1, 1), "pads": pads}
    dg = convolution_op(x, w, groups=c, **options)
    return dg.reshape(g.shape), depthwise_dw(x, g.reshape(-1, *points, c), w.shape[:2], w.dtype, **options)


depthwise_transposed_rows.defvjp(
    lambda g, w, **meta: (depthwise_transposed_rows(g, w, **meta), (g, w)), _transposed_rows_backward
)


transposed_points.defvjp(lambda g, w, **meta: (_transposed(g, w, **meta), (g, w)), _transposed_backward)


def _transposed(g, w, *, sides, points, window, channels, stride, dilation, low, **_):
    """`transposed_points` by the quickest kernel."""
    whole, kernel = g.reshape(-1, *points, g.shape[1]), w.reshape(*window, channels, w.shape[1])
    y = convolution_dx(
        whole, kernel, (whole.shape[0], *sides, channels), stride=stride, dilation=dilation, groups=1, low=low
    )
    return y.reshape(-1, channels)


@_rule(convolution_row_points)
def _row_points_backward(residuals, g, *, bm, bo, **of):
    x, w = residuals
    c, window, sides = of["channels"], of["window"], of["sides"]
    whole = x.reshape(-1, *sides, x.shape[1] // c, c)
    kernel = w.reshape(*window, of["numbers"] // c, c, w.shape[1])
    steps = {"stride": of["stride"], "dilation": (*of["dilation"], 1)}
    dx = convolution_dx(g.reshape(-1, *of["points"], g.shape[1]), kernel, whole.shape, groups=1, **steps)
    return dx.reshape(x.shape), _dw_in_rows(x, g, of).reshape(w.shape).astype(w.dtype)


def _channels_backward(x, g, w, *, pads: Pads, **options):
    low = tuple(lo for lo, _ in pads)
    dx = convolution_dx(g, w, x.shape, groups=g.shape[-1], low=low, **options)
    return dx, depthwise_dw(x, g, w.shape[:-2], w.dtype, pads=pads, **options)


@_rule(depthwise_tiles)
def _depthwise_backward(residuals, g, *, stride: Sides, dilation: Sides, **_):
    x, w = residuals
    return _channels_backward(x, g, w, stride=stride, dilation=dilation, pads=((0, 0),) * len(stride))


@_rule(depthwise_rows)
def _rows_backward(residuals, g, *, stride: Sides, pads: Pads, **_):
    x, w = residuals
    whole = x.reshape(*x.shape[:2], -1, w.shape[3])
    dx, dw = _channels_backward(
        whole, g.reshape(*g.shape[:2], -1, w.shape[3]), w, stride=stride, dilation=(1, 1), pads=pads
    )
    return dx.reshape(x.shape), dw
