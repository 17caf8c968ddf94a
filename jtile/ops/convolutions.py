"""Convolution of one to three axes, its transpose, and which kernel computes it."""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import dispatch
from jtile.ops._shapes import check_float, check_shape, fit, machine, sums_in, tuned, wide
from jtile.ops.convolution_kernels import (
    Sides,
    convolution_patch_tiles,
    convolution_row_tiles,
    convolution_tiles,
    convolution_weight_tiles,
    depthwise_tiles,
    depthwise_weight_tiles,
    forward_tiles,
    out_shape,
    points_of_tile,
)
from jtile.ops.convolution_points import convolution_points, depthwise_rows
from jtile.ops.matmul import matmul

Pair = tuple[int, int]


def convolution_dx(g, w, shape, *, stride: Sides, dilation: Sides, groups: int):
    """dx of `shape` = [batch, ..., c]: a convolution of g for each remainder of the points by the stride."""
    # dx[s u + r] = sum_t g[u + (r - d a) / s] w[a]     a = a_0 + s t, the points of the window with d a = r modulo s
    *window, channels, outputs = w.shape
    rank = len(window)
    turned = w.reshape(*window, channels, groups, outputs // groups)
    turned = turned.transpose(*range(rank), rank + 2, rank + 1, rank)
    turned = turned.reshape(*window, outputs // groups, groups * channels)
    sides = [jt.cdiv(n, s) for n, s in zip(shape[1:-1], stride, strict=True)]
    phases = [[_phase(r, window[k], stride[k], dilation[k]) for r in range(stride[k])] for k in range(rank)]

    def part(*along):
        taps = turned[tuple(of[0] for of in along)]
        if 0 in taps.shape:
            return jnp.zeros((shape[0], *sides, shape[-1]), g.dtype)
        pads, dilations = [], tuple(of[2] for of in along)
        for k, (_, ahead, d) in enumerate(along):
            low = d * (taps.shape[k] - 1) - ahead
            pads.append((low, sides[k] + ahead - g.shape[1 + k], 0))
        here = jax.lax.pad(g, jnp.zeros((), g.dtype), ((0, 0, 0), *pads, (0, 0, 0)))
        options = {"stride": (1,) * rank, "dilation": dilations, "pads": ((0, 0),) * rank}
        return _convolution(here, jnp.flip(taps, range(rank)), groups=groups, **options)

    def stacked(*along):
        """The parts of all remainders of the axes that are left, behind their axes."""
        k = len(along)
        if k == rank:
            return part(*along)
        return jnp.stack([stacked(*along, of) for of in phases[k]], 2 + k)

    whole = stacked().reshape(shape[0], *(n * s for n, s in zip(sides, stride, strict=True)), shape[-1])
    return whole[(slice(None), *(slice(0, n) for n in shape[1:-1]))]


def _phase(r: int, taps: int, stride: int, dilation: int) -> tuple[slice, int, int]:
    """Which taps reach the points s u + r, how far ahead of u in g the first of them reads, and their spacing in g."""
    every = stride // math.gcd(stride, dilation)
    first = next((a for a in range(min(every, taps)) if (dilation * a - r) % stride == 0), taps)
    return slice(first, None, every), (r - dilation * first) // stride, dilation * every // stride


def convolution_dw(x, g, window: Sides, dtype, *, stride: Sides, dilation: Sides, groups: int):
    """dw [*window, channels / groups, outputs] of x with its padding and of g."""
    channels, outputs = x.shape[-1] // groups, g.shape[-1] // groups
    narrow = x.dtype.itemsize < 4
    bh, bw = points_of_tile(*g.shape[-3:-1], 64 if narrow else 32)
    side = 128 if machine().whole else 64 if narrow else 32
    bc, bo = fit(channels, side), fit(outputs, side)
    programs = math.prod(window) * groups * jt.cdiv(channels, bc) * jt.cdiv(outputs, bo)
    tiles = jt.cdiv(g.shape[-3], bh) * jt.cdiv(g.shape[-2], bw)
    options = {"stride": stride, "dilation": dilation, "groups": groups, "window": window}
    splits = min(tiles, jt.cdiv(machine().programs, programs))
    dw = convolution_weight_tiles(x, g, bh=bh, bw=bw, bc=bc, bo=bo, splits=splits, **options)
    return (dw[0] if splits == 1 else dw.sum(0)).astype(dtype)


def _forward(kernel, x, w, **meta):
    return kernel(x, w, **meta), (x, w)


def _backward(residuals, g, *, stride: Sides, dilation: Sides, groups: int = 1, **_):
    x, w = residuals
    options = {"stride": stride, "dilation": dilation, "groups": groups}
    return convolution_dx(g, w, x.shape, **options), convolution_dw(x, g, w.shape[:-2], w.dtype, **options)


convolution_tiles.defvjp(functools.partial(_forward, convolution_tiles), _backward)


convolution_row_tiles.defvjp(functools.partial(_forward, convolution_row_tiles), _backward)


def _patch_backward(residuals, g, *, bw: int, **options):
    x, w = residuals
    dx, dw = _backward((x.reshape(*x.shape[:-1], -1, w.shape[-2]), w), g, **options)
    return dx.reshape(x.shape), dw


convolution_patch_tiles.defvjp(functools.partial(_forward, convolution_patch_tiles), _patch_backward)


def _depthwise_backward(residuals, g, *, stride: Sides, dilation: Sides, **_):
    x, w = residuals
    options = {"stride": stride, "dilation": dilation}
    window, channels = w.shape[:-2], g.shape[-1]
    bc = fit(channels, 64)
    bw = fit(g.shape[-2], max(1, machine().row // bc))
    splits = max(1, min(math.prod(g.shape[:-2]), machine().programs // (math.prod(window) * jt.cdiv(channels, bc))))
    dw = depthwise_weight_tiles(x, g, window=window, bw=bw, bc=bc, splits=splits, **options)
    return convolution_dx(g, w, x.shape, groups=channels, **options), dw.sum(0).astype(w.dtype)


depthwise_tiles.defvjp(functools.partial(_forward, depthwise_tiles), _depthwise_backward)


def _padded(x, pads: tuple[Pair, ...]):
    return jnp.pad(x, ((0, 0), *pads, (0, 0))) if any(lo or hi for lo, hi in pads) else x


def _points_backward(residuals, g, *, sides, window, stride, dilation, pads, **_):
    x, w = residuals
    padded = _padded(x.reshape(-1, *sides, x.shape[1]), pads)
    whole = w.reshape(*window, x.shape[1], w.shape[1])
    options = {"stride": stride, "dilation": dilation, "groups": 1}
    shape = out_shape(padded, whole, stride, dilation)
    dx, dw = _backward((padded, whole), g.reshape(shape), **options)
    own = tuple(slice(lo, lo + n) for n, (lo, _) in zip(sides, pads, strict=True))
    return dx[(slice(None), *own)].reshape(x.shape), dw.reshape(w.shape)


convolution_points.defvjp(functools.partial(_forward, convolution_points), _points_backward)


def _in_points(x, w, *, stride: Sides, dilation: Sides, groups: int, pads: tuple[Pair, ...]):
    *window, channels, outputs = w.shape
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
    return y.reshape(x.shape[0], *out_shape(_shaped(x, pads), w, stride, dilation)[1:])


def _shaped(x, pads: tuple[Pair, ...]) -> jax.ShapeDtypeStruct:
    sides = (n + lo + hi for n, (lo, hi) in zip(x.shape[1:-1], pads, strict=True))
    return jax.ShapeDtypeStruct((x.shape[0], *sides, x.shape[-1]), x.dtype)


def _not_in_points(x, w, *, groups: int, **_) -> str | None:
    return dispatch.first_unmet(
        (not machine().whole and not dispatch.vector_cores(), "tiles of points are of the registers of a GPU"),
        (groups == 1, "channels fall into groups"),
        (x.dtype.itemsize == 2, f"products of {x.dtype.name} are as quick in other tiles"),
        (math.gcd(w.shape[-2], 64) >= 16 and w.shape[-1] >= 16, "there are few channels or outputs"),
        (all(isinstance(n, int) for n in x.shape[1:]), "sides are not known"),
    )


def _rows_backward(residuals, g, *, pads, **_):
    x, w = residuals
    dx, dw = _depthwise_backward((_padded(x, pads), w), g, stride=(1, 1), dilation=(1, 1))
    own = tuple(slice(lo, lo + n) for n, (lo, _) in zip(x.shape[1:3], pads, strict=True))
    return dx[(slice(None), *own)], dw


depthwise_rows.defvjp(functools.partial(_forward, depthwise_rows), _rows_backward)


def _in_depthwise_rows(x, w, *, pads: tuple[Pair, ...], **_):
    # Programs that have more rows of the result read those of x less often; rows in equal parts leave none empty.
    bc, rows = fit(x.shape[-1], 64), x.shape[1] + sum(pads[0]) - w.shape[0] + 1
    most = min(4 if dispatch.vector_cores() else 7, w.shape[0])
    bh = most if dispatch.vector_cores() else jt.cdiv(rows, jt.cdiv(rows, most))
    return tuned(depthwise_rows, num_warps=4)(x, w, bh=bh, bw=max(1, 1024 // bc), bc=bc, pads=pads)


def _not_in_depthwise_rows(
    x, w, *, stride: Sides, dilation: Sides, groups: int, **_
) -> str | None:  # fmt: skip
    return _not_depthwise(x, w, groups=groups) or dispatch.first_unmet(
        (not machine().whole and not dispatch.vector_cores(), "rows of sums are of the registers of a GPU"),
        (len(stride) == 2 and set(stride) == set(dilation) == {1}, "the window has strides, gaps or another axis"),
        (w.shape[0] > 1, "there is no row that two rows of the result need"),
        (all(isinstance(n, int) for n in x.shape[1:]), "sides are not known"),
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
    return lambda x, w, *, pads, **options: run(_padded(x, pads), w, **options)


def _whatever_pads(misfit):
    return lambda x, w, *, pads, **options: misfit(x, w, **options)


_convolution = dispatch.Op(
    "convolution",
    dispatch.Implementation("channels for themselves, by rows", _in_depthwise_rows, _not_in_depthwise_rows),
    dispatch.Implementation("channels for themselves", _of_padded(_depthwise), _whatever_pads(_not_depthwise)),
    dispatch.Implementation("windows below each other", _of_padded(_in_patches), _whatever_pads(_not_in_patches)),
    dispatch.Implementation("rows of the window", _of_padded(_in_rows), _whatever_pads(_not_in_rows)),
    dispatch.Implementation("points of the result", _in_points, _not_in_points),
    dispatch.Implementation("points of the window", _of_padded(_in_tiles)),
)


@functools.partial(jax.jit, static_argnames=("stride", "padding", "dilation", "groups"), inline=True)
def convolution(
    x: jax.Array,
    weight: jax.Array,
    *,
    stride: int | Sides = 1,
    padding: str | int | tuple[Pair, ...] = "SAME",
    dilation: int | Sides = 1,
    groups: int = 1,
) -> jax.Array:
    """Cross-correlation, what neural networks call convolution, computed in float32 (float64 for float64).

    The window moves along one to three axes; channels stand last. Differentiable in x and weight.

    Args:
      x: float array [batch, (depth, height,) width, channels].
      weight: float array [(r, p,) q, channels / groups, outputs] of x's dtype.
      stride, dilation: one int for all axes, or one for each.
      padding: "SAME" (the output has ceil(side / stride) points), "VALID", one int, or a pair for each axis, as
        ((top, bottom), (left, right)). Negative numbers take so many points of x away.
      groups: outputs and channels fall into this many groups that do not mix; it divides both.
    Returns:
      [batch, (depth', height',) width', outputs] of x's dtype.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or options that do not fit.
    """
    rank = _rank("convolution", x, weight)
    stride, dilation = _each("stride", stride, rank), _each("dilation", dilation, rank)
    x, pads = _cut(x, _check(x, weight, stride, padding, dilation, groups))
    if rank == 1:
        more = {"stride": (1, *stride), "dilation": (1, *dilation), "padding": ((0, 0), *pads), "groups": groups}
        return convolution(x[:, None], weight[None], **more)[:, 0]
    shape = out_shape(_shaped(x, pads), weight, stride, dilation)
    if 0 in shape or 0 in weight.shape:
        return jnp.zeros(shape, x.dtype)
    return _convolution(x, weight, stride=stride, dilation=dilation, groups=groups, pads=pads)


@functools.partial(jax.jit, static_argnames=("stride", "padding", "dilation", "groups"), inline=True)
def convolution_transpose(
    x: jax.Array,
    weight: jax.Array,
    *,
    stride: int | Sides = 1,
    padding: str | int | tuple[Pair, ...] = "SAME",
    dilation: int | Sides = 1,
    groups: int = 1,
) -> jax.Array:
    """The transpose of `convolution` with these options: every point of x adds the window, times it, to the result.

    One convolution for each remainder of the points by the stride: no zeros are multiplied. Differentiable in x and
    weight.

    Args:
      x: float array [batch, (depth, height,) width, channels].
      weight: float array [(r, p,) q, outputs / groups, channels] of x's dtype: that of the convolution from the
        outputs to the channels.
      stride, dilation: one int for all axes, or one for each.
      padding: of that convolution. "SAME" gives sides of `stride` times those of x; "VALID", an int or pairs give
        `(side - 1) stride + (window - 1) dilation + 1` points, less the padding.
      groups: as for `convolution`.
    Returns:
      [batch, (depth', height',) width', outputs] of x's dtype.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or options that do not fit.
    """
    rank = _rank("convolution_transpose", x, weight)
    stride, dilation = _each("stride", stride, rank), _each("dilation", dilation, rank)
    pads = _check_transpose(x, weight, stride, padding, dilation, groups)
    if rank == 1:
        more = {"stride": (1, *stride), "dilation": (1, *dilation), "padding": ((0, 0), *pads), "groups": groups}
        return convolution_transpose(x[:, None], weight[None], **more)[:, 0]
    window = zip(x.shape[1:-1], weight.shape[:-2], stride, dilation, strict=True)
    sides = [(n - 1) * s + (k - 1) * d + 1 for n, k, s, d in window]
    outputs = weight.shape[-2] * groups
    kept = [n - lo - hi for n, (lo, hi) in zip(sides, pads, strict=True)]
    if 0 in (*x.shape, *weight.shape) or min(kept) <= 0:
        return jnp.zeros((x.shape[0], *(max(n, 0) for n in kept), outputs), x.dtype)
    options = {"stride": stride, "dilation": dilation, "groups": groups}
    y = convolution_dx(x, weight, (x.shape[0], *sides, outputs), **options)
    more = [(max(-lo, 0), max(-hi, 0)) for lo, hi in pads]
    y = jnp.pad(y, ((0, 0), *more, (0, 0)))
    return y[(slice(None), *(slice(max(lo, 0), max(lo, 0) + n) for n, (lo, _) in zip(kept, pads, strict=True)))]


def _rank(op: str, x, weight) -> int:
    """The number of axes along which the window moves."""
    check_float(op, x=x, weight=weight)
    if x.dtype != weight.dtype:
        raise KernelTypeError(f"{op}: x and weight have one dtype, got {x.dtype.name} and {weight.dtype.name}")
    if x.ndim not in (3, 4, 5):
        raise KernelValueError(f"{op}: x is [batch, (depth, height,) width, channels], got shape {tuple(x.shape)}")
    if weight.ndim != x.ndim:
        raise KernelValueError(
            f"{op}: weight has as many axes as x, which is {tuple(x.shape)}; got shape {tuple(weight.shape)}"
        )
    return x.ndim - 2


def _check(x, weight, stride: Sides, padding, dilation: Sides, groups: int) -> tuple[Pair, ...]:
    """The padding of all axes; raises typed errors."""
    *window, _, outputs = weight.shape
    if groups < 1 or x.shape[-1] % groups or outputs % groups:
        raise KernelValueError(
            f"convolution: {groups} groups do not divide {x.shape[-1]} channels and {outputs} outputs"
        )
    check_shape("convolution", "weight", weight, (*window, x.shape[-1] // groups, outputs))
    sides = tuple((n - 1) * d + 1 for n, d in zip(window, dilation, strict=True))
    named = lambda: jax.lax.padtype_to_pads(x.shape[1:-1], sides, stride, padding)
    pads = _pads("convolution", padding, named, window)
    for axis, (n, (lo, hi)) in enumerate(zip(x.shape[1:-1], pads, strict=True), 1):
        if isinstance(n, int) and max(-lo, 0) + max(-hi, 0) > n:
            raise KernelValueError(
                f"convolution: padding {(lo, hi)} takes away more than the {n} points of axis {axis} of x, which is "
                f"{tuple(x.shape)}: give at least {-n} for both together"
            )
    return pads


def _cut(x, pads: tuple[Pair, ...]):
    """x without the points that negative padding takes away, and the padding that is left."""
    if min(map(min, pads)) >= 0:
        return x, pads
    kept = (slice(max(-lo, 0), n - max(-hi, 0)) for n, (lo, hi) in zip(x.shape[1:-1], pads, strict=True))
    return x[(slice(None), *kept)], tuple((max(lo, 0), max(hi, 0)) for lo, hi in pads)


def _check_transpose(x, weight, stride: Sides, padding, dilation: Sides, groups: int) -> tuple[Pair, ...]:
    """The padding of the convolution that is transposed; raises typed errors."""
    op, (*window, _, channels) = "convolution_transpose", weight.shape
    check_shape(op, "weight", weight, (*weight.shape[:-1], x.shape[-1]))
    if groups < 1 or channels % groups:
        raise KernelValueError(f"{op}: {groups} groups do not divide {channels} channels")

    def named():
        if padding == "VALID":
            return [(0, 0)] * len(window)
        over = [max((k - 1) * d + 1 - s, 0) for k, d, s in zip(window, dilation, stride, strict=True)]
        short = [max(s - (k - 1) * d - 1, 0) for k, d, s in zip(window, dilation, stride, strict=True)]
        return [(n // 2, n - n // 2 - more) for n, more in zip(over, short, strict=True)]

    return _pads(op, padding, named, window)


def _pads(op: str, padding, named, window) -> tuple[Pair, ...]:
    """The padding as pairs for all axes; `named` gives the pairs that a name such as "SAME" stands for."""
    if isinstance(padding, int):
        padding = ((padding, padding),) * len(window)
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            raise KernelValueError(f"{op}: padding is 'SAME', 'VALID', an int or pairs, got {padding!r}")
        padding = named()
    try:
        pairs = tuple((operator.index(lo), operator.index(hi)) for lo, hi in padding)
    except (TypeError, ValueError) as e:
        raise KernelValueError(f"{op}: padding has a pair of ints for each axis, got {padding!r}") from e
    if len(pairs) != len(window):
        raise KernelValueError(f"{op}: padding has a pair for each of {len(window)} axes, got {padding!r}")
    return pairs


def _each(name: str, v, rank: int) -> Sides:
    sides = (v,) * rank if isinstance(v, int) else tuple(v)
    if len(sides) != rank or min(sides) < 1:
        raise KernelValueError(f"convolution: {name} is a positive int or {rank} of them, got {v!r}")
    return sides


def _names(rank: int) -> tuple[str, str, str]:
    axes = "DHW"[3 - rank :]
    return f"N{axes}C", f"{axes}IO", f"N{axes}C"


def convolution_reference(x, weight, *, stride=1, padding="SAME", dilation=1, groups=1):
    """`convolution` in lax."""
    rank = _rank("convolution", x, weight)
    stride, dilation = _each("stride", stride, rank), _each("dilation", dilation, rank)
    pads = _check(x, weight, stride, padding, dilation, groups)
    out = jax.lax.conv_general_dilated(
        wide(x), wide(weight), stride, pads, rhs_dilation=dilation, dimension_numbers=_names(rank),
        feature_group_count=groups, precision="highest",
    )  # fmt: skip
    return out.astype(x.dtype)


def convolution_transpose_reference(x, weight, *, stride=1, padding="SAME", dilation=1, groups=1):
    """`convolution_transpose` as the transpose of `convolution_reference`."""
    rank = _rank("convolution_transpose", x, weight)
    stride, dilation = _each("stride", stride, rank), _each("dilation", dilation, rank)
    pads = _check_transpose(x, weight, stride, padding, dilation, groups)
    window = zip(x.shape[1:-1], weight.shape[:-2], stride, dilation, pads, strict=True)
    sides = [(n - 1) * s + (k - 1) * d + 1 - lo - hi for n, k, s, d, (lo, hi) in window]
    of = functools.partial(convolution_reference, stride=stride, padding=pads, dilation=dilation, groups=groups)
    shape = jax.ShapeDtypeStruct((x.shape[0], *sides, weight.shape[-2] * groups), sums_in(x))
    y = jax.linear_transpose(lambda y: of(y, wide(weight)), shape)(wide(x))[0]
    return y.astype(x.dtype)
