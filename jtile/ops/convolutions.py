"""Two-dimensional convolution as a sum of matrix products, one for each point of the window (implicit im2col)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import dispatch
from jtile.ops._shapes import check_float, check_rank, check_shape, fit, known, machine, sums_in, wide

Pair = tuple[int, int]


def _out_shape(x, w, stride: Pair, dilation: Pair):
    sides = (jt.cdiv(x.shape[1 + k] - (w.shape[k] - 1) * dilation[k], stride[k]) for k in (0, 1))
    return x.shape[0], *(max(n, 0) for n in sides), w.shape[3]


def _grid(x, w, *, bh, bw, bo, stride, dilation, groups):
    n, height, width, outputs = _out_shape(x, w, stride, dilation)
    return n, jt.cdiv(height, bh) * jt.cdiv(width, bw), groups * jt.cdiv(outputs // groups, bo)


def _type(x, w, *, stride, dilation, **_):
    return jt.like(x, shape=_out_shape(x, w, stride, dilation))


@jt.kernel(out_type=_type, grid=_grid)
def convolution_tiles(x, w, y, *, bh: int, bw: int, bo: int, stride: Pair, dilation: Pair, groups: int, bc: int = 0):
    """x [batch, h, w, c] with its padding, w [p, q, c / groups, o]; a program: bh x bw points, bo outputs of one.

    `bc` channels at a time, a divisor of c / groups; 0 for all.
    """
    # y[n, i, j, o] = sum_ab sum_c x[n, s i + d a, s j + d b, c] w[a, b, c, o]
    (_, width, outputs), (p, q, channels) = y.shape[1:], w.shape[:3]
    n, at, out = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    across, per_group = jt.cdiv(width, bw), outputs // groups
    i, j = jax.lax.div(at, jnp.int32(across)) * bh, jax.lax.rem(at, jnp.int32(across)) * bw
    blocks = jt.cdiv(per_group, bo)
    group, o = jax.lax.div(out, jnp.int32(blocks)), jax.lax.rem(out, jnp.int32(blocks)) * bo
    acc = jt.zeros((bh * bw, bo), sums_in(x))
    bc = bc or channels
    parts = channels // bc if bc else 1
    for u in jt.range(p * q * parts):
        t, c = (jax.lax.div(u, jnp.int32(parts)), jax.lax.rem(u, jnp.int32(parts)) * bc) if parts > 1 else (u, 0)
        a, b = jax.lax.div(t, jnp.int32(q)), jax.lax.rem(t, jnp.int32(q))
        rows = jt.ds(i * stride[0] + a * dilation[0], bh, stride[0])
        columns = jt.ds(j * stride[1] + b * dilation[1], bw, stride[1])
        X = x[n, rows, columns, jt.ds(group * channels + c, bc)].reshape(bh * bw, bc)
        W = w[a, b, jt.ds(c, bc) if parts > 1 else slice(None), jt.ds(group * per_group + o, bo)]
        acc = jt.dot(X, W, acc)
    lanes = jt.arange(bo) + o < per_group
    here = (n, jt.ds(i, bh), jt.ds(j, bw), jt.ds(group * per_group + o, bo))
    value = acc.reshape(bh, bw, bo).astype(y.dtype)
    if per_group % bo:
        jt.store(y, here, value, mask=jnp.broadcast_to(lanes, value.shape))
    else:
        y[here] = value


def _points(height: int, width: int, most: int = 128) -> Pair:
    """Sides of a tile of output points: long rows of about 256 points; on a GPU `most` points that cover the width."""
    if machine().whole:
        bw = fit(width, 128)
        return fit(height, max(1, 256 // bw)), bw
    if dispatch.vector_cores():  # their compiler does not bring tiles of several rows to products
        return 1, min((b for b in (128, 64, 32, 16) if b <= most), key=lambda b: (jt.cdiv(known(width), b) * b, -b))
    bw = min((32, 16, 8), key=lambda b: (jt.cdiv(known(width), b) * b, -b))
    return fit(height, most // bw), bw


def _forward_tiles(height: int, width: int, channels: int, outputs: int, itemsize: int) -> dict[str, int]:
    """Of `convolution_tiles` for outputs of these sides, and for channels and outputs of one group."""
    if machine().whole:
        bh, bw = _points(height, width)
        return {"bh": bh, "bw": bw, "bo": fit(outputs, 256), "bc": 0}
    most, part = (128, 64) if itemsize < 4 else (64, 16)
    bc = max((d for d in range(1, part + 1) if channels % d == 0), default=1)
    if bc < min(16, channels):  # products of fewer are slow: all at once, for as many points and outputs as fit
        bc = 0
        while most > 16 and not _hold(channels, 2 * most, itemsize):
            most //= 2
    bh, bw = _points(height, width, most)
    return {"bh": bh, "bw": bw, "bo": fit(outputs, most), "bc": bc}


def _hold(channels: int, rows: int, itemsize: int) -> bool:
    """Whether the memory of a block holds so many rows of channels, as operands of a product."""
    memory = jt.target().memory("block")
    return memory is None or memory.size is None or (1 << (channels - 1).bit_length()) * rows * itemsize <= memory.size


def _weight_grid(x, g, *, p, q, bc, bo, groups, splits, **_):
    return p * q, groups * jt.cdiv(x.shape[3] // groups, bc) * jt.cdiv(g.shape[3] // groups, bo), splits


@jt.kernel(
    out_type=lambda x, g, *, p, q, groups, splits, **_: jax.ShapeDtypeStruct(
        (splits, p, q, x.shape[3] // groups, g.shape[3]), sums_in(x)
    ),
    grid=_weight_grid,
)
def convolution_weight_tiles(
    x, g, dw, *, p: int, q: int, bh: int, bw: int, bc: int, bo: int, splits: int, stride: Pair, dilation: Pair,
    groups: int,
):  # fmt: skip
    """dw [splits, p, q, c / groups, o] of x as in `convolution_tiles` and the cotangents g [batch, i, j, o].

    A program: one point of the window, `bc` channels, `bo` outputs, and of each image every `splits`-th tile of
    bh x bw points.
    """
    # dw[a, b, c, o] = sum_nij x[n, s i + d a, s j + d b, c] g[n, i, j, o]
    batch, height, width, outputs = g.shape
    channels, per_group = x.shape[3] // groups, outputs // groups
    at, block, split = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    div, rem = (lambda u, v, f=f: f(u, jnp.int32(v)) for f in (jax.lax.div, jax.lax.rem))
    a, b = div(at, q), rem(at, q)
    o_blocks = jt.cdiv(per_group, bo)
    c_blocks = jt.cdiv(channels, bc)
    o, rest = rem(block, o_blocks) * bo, div(block, o_blocks)
    c, group = rem(rest, c_blocks) * bc, div(rest, c_blocks)
    down, across = jt.cdiv(height, bh), jt.cdiv(width, bw)
    acc = jnp.zeros((bc, bo), dw.dtype)
    for n in jt.range(batch):
        for t in jt.range(jt.cdiv(down * across - split, splits)):
            place = split + t * splits
            i, j = div(place, across) * bh, rem(place, across) * bw
            rows = jt.ds(i * stride[0] + a * dilation[0], bh, stride[0])
            columns = jt.ds(j * stride[1] + b * dilation[1], bw, stride[1])
            X = x[n, rows, columns, jt.ds(group * channels + c, bc)].reshape(bh * bw, bc)
            G = g[n, jt.ds(i, bh), jt.ds(j, bw), jt.ds(group * per_group + o, bo)].reshape(bh * bw, bo)
            acc = jt.dot(X.T, G, acc)
    here = (split, a, b, jt.ds(c, bc), jt.ds(group * per_group + o, bo))
    if per_group % bo:
        jt.store(dw, here, acc, mask=jnp.broadcast_to(jt.arange(bo)[None, :] + o < per_group, acc.shape))
    else:
        dw[here] = acc


def convolution_dx(g, w, shape, *, stride: Pair, dilation: Pair, groups: int):
    """dx of `shape` = [batch, h, w, c]: a convolution of g for each remainder of the points by the stride."""
    # dx[s u + r] = sum_t g[u + (r - d a) / s] w[a]     a = a_0 + s t, the points of the window with d a = r modulo s
    p, q, channels, outputs = w.shape
    turned = w.reshape(p, q, channels, groups, outputs // groups).transpose(0, 1, 4, 3, 2)
    turned = turned.reshape(p, q, outputs // groups, groups * channels)
    sides = [jt.cdiv(n, s) for n, s in zip(shape[1:3], stride)]
    phases = [[_phase(r, w.shape[k], stride[k], dilation[k]) for r in range(stride[k])] for k in (0, 1)]

    def part(down, across):
        taps = turned[down[0], across[0]]
        if 0 in taps.shape:
            return jnp.zeros((shape[0], *sides, shape[3]), g.dtype)
        pads, dilations = [], (down[2], across[2])
        for k, (_, ahead, d) in enumerate((down, across)):
            low = d * (taps.shape[k] - 1) - ahead
            pads.append((low, sides[k] + ahead - g.shape[1 + k], 0))
        here = jax.lax.pad(g, jnp.zeros((), g.dtype), ((0, 0, 0), *pads, (0, 0, 0)))
        tiles = _forward_tiles(*sides, outputs // groups, channels, g.dtype.itemsize)
        options = {"stride": (1, 1), "dilation": dilations, "groups": groups}
        return convolution_tiles(here, taps[::-1, ::-1], **tiles, **options)

    parts = jnp.stack([jnp.stack([part(down, across) for across in phases[1]], 3) for down in phases[0]], 2)
    whole = parts.reshape(shape[0], sides[0] * stride[0], sides[1] * stride[1], shape[3])
    return whole[:, : shape[1], : shape[2]]


def _phase(r: int, taps: int, stride: int, dilation: int) -> tuple[slice, int, int]:
    """Which taps reach the points s u + r, how far ahead of u in g the first of them reads, and their spacing in g."""
    every = stride // math.gcd(stride, dilation)
    first = next((a for a in range(min(every, taps)) if (dilation * a - r) % stride == 0), taps)
    return slice(first, None, every), (r - dilation * first) // stride, dilation * every // stride


def convolution_dw(x, g, p: int, q: int, dtype, *, stride: Pair, dilation: Pair, groups: int):
    """dw [p, q, channels / groups, outputs] of x with its padding and of g."""
    channels, outputs = x.shape[3] // groups, g.shape[3] // groups
    narrow = x.dtype.itemsize < 4
    bh, bw = _points(*g.shape[1:3], 64 if narrow else 32)
    side = 128 if machine().whole else 64 if narrow else 32
    bc, bo = fit(channels, side), fit(outputs, side)
    programs = p * q * groups * jt.cdiv(channels, bc) * jt.cdiv(outputs, bo)
    tiles = jt.cdiv(g.shape[1], bh) * jt.cdiv(g.shape[2], bw)
    options = {"stride": stride, "dilation": dilation, "groups": groups}
    splits = min(tiles, jt.cdiv(machine().programs, programs))
    dw = convolution_weight_tiles(x, g, p=p, q=q, bh=bh, bw=bw, bc=bc, bo=bo, splits=splits, **options)
    return (dw[0] if splits == 1 else dw.sum(0)).astype(dtype)


def _forward(x, w, **meta):
    return convolution_tiles(x, w, **meta), (x, w)


def _backward(residuals, g, *, stride: Pair, dilation: Pair, groups: int, **_):
    x, w = residuals
    options = {"stride": stride, "dilation": dilation, "groups": groups}
    return convolution_dx(g, w, x.shape, **options), convolution_dw(x, g, *w.shape[:2], w.dtype, **options)


convolution_tiles.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("stride", "padding", "dilation", "groups"), inline=True)
def convolution(
    x: jax.Array,
    weight: jax.Array,
    *,
    stride: int | Pair = 1,
    padding: str | int | tuple[Pair, Pair] = "SAME",
    dilation: int | Pair = 1,
    groups: int = 1,
) -> jax.Array:
    """Cross-correlation, what neural networks call convolution, computed in float32 (float64 for float64).

    Differentiable in x and weight.

    Args:
      x: float array [batch, height, width, channels].
      weight: float array [p, q, channels / groups, outputs] of x's dtype.
      stride, dilation: one int for both axes or a pair.
      padding: "SAME" (the output has ceil(side / stride) points), "VALID", one int, or ((top, bottom), (left, right)).
      groups: outputs and channels fall into this many groups that do not mix; it divides both.
    Returns:
      [batch, height', width', outputs] of x's dtype.
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes or options that do not fit.
    """
    stride, dilation = _pair("stride", stride), _pair("dilation", dilation)
    pads = _check(x, weight, stride, padding, dilation, groups)
    if any(lo or hi for lo, hi in pads):
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    shape = _out_shape(x, weight, stride, dilation)
    if 0 in shape or 0 in weight.shape:
        return jnp.zeros(shape, x.dtype)
    tiles = _forward_tiles(*shape[1:3], weight.shape[2], shape[3] // groups, x.dtype.itemsize)
    return convolution_tiles(x, weight, **tiles, stride=stride, dilation=dilation, groups=groups)


def _check(x, weight, stride: Pair, padding, dilation: Pair, groups: int) -> tuple[Pair, Pair]:
    """The padding of both axes, after checks."""
    check_float("convolution", x=x, weight=weight)
    if x.dtype != weight.dtype:
        raise KernelTypeError(f"convolution: x and weight have one dtype, got {x.dtype.name} and {weight.dtype.name}")
    check_rank("convolution", "x", x, 4, "[batch, height, width, channels]")
    check_rank("convolution", "weight", weight, 4, "[p, q, channels / groups, outputs]")
    p, q, _, outputs = weight.shape
    if groups < 1 or x.shape[3] % groups or outputs % groups:
        raise KernelValueError(
            f"convolution: {groups} groups do not divide {x.shape[3]} channels and {outputs} outputs"
        )
    check_shape("convolution", "weight", weight, (p, q, x.shape[3] // groups, outputs))
    if isinstance(padding, int):
        padding = ((padding, padding), (padding, padding))
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            raise KernelValueError(f"convolution: padding is 'SAME', 'VALID', an int or two pairs, got {padding!r}")
        window = tuple((n - 1) * d + 1 for n, d in zip((p, q), dilation, strict=True))
        padding = jax.lax.padtype_to_pads(x.shape[1:3], window, stride, padding)
    return tuple(tuple(int(v) for v in pair) for pair in padding)


def _pair(name: str, v) -> Pair:
    pair = (v, v) if isinstance(v, int) else tuple(v)
    if len(pair) != 2 or min(pair) < 1:
        raise KernelValueError(f"convolution: {name} is a positive int or a pair of them, got {v!r}")
    return pair


def convolution_reference(x, weight, *, stride=1, padding="SAME", dilation=1, groups=1):
    """`convolution` in lax."""
    stride, dilation = _pair("stride", stride), _pair("dilation", dilation)
    pads = _check(x, weight, stride, padding, dilation, groups)
    out = jax.lax.conv_general_dilated(
        wide(x), wide(weight), stride, pads, rhs_dilation=dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups, precision="highest",
    )  # fmt: skip
    return out.astype(x.dtype)
