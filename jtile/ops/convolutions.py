"""Two-dimensional convolution as a sum of matrix products, one for each point of the window (implicit im2col)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, check_rank, check_shape, fit

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
def convolution_tiles(x, w, y, *, bh: int, bw: int, bo: int, stride: Pair, dilation: Pair, groups: int):
    """x [batch, h, w, c] with its padding, w [p, q, c / groups, o]; a program: bh x bw points, bo outputs of one."""
    # y[n, i, j, o] = sum_ab sum_c x[n, s i + d a, s j + d b, c] w[a, b, c, o]
    (_, width, outputs), (p, q, channels) = y.shape[1:], w.shape[:3]
    n, at, out = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    across, per_group = jt.cdiv(width, bw), outputs // groups
    i, j = jax.lax.div(at, jnp.int32(across)) * bh, jax.lax.rem(at, jnp.int32(across)) * bw
    blocks = jt.cdiv(per_group, bo)
    group, o = jax.lax.div(out, jnp.int32(blocks)), jax.lax.rem(out, jnp.int32(blocks)) * bo
    acc = jt.zeros((bh * bw, bo))
    for t in jt.range(p * q):
        a, b = jax.lax.div(t, jnp.int32(q)), jax.lax.rem(t, jnp.int32(q))
        rows = jt.ds(i * stride[0] + a * dilation[0], bh, stride[0])
        columns = jt.ds(j * stride[1] + b * dilation[1], bw, stride[1])
        X = x[n, rows, columns, jt.ds(group * channels, channels)].reshape(bh * bw, channels)
        acc = jt.dot(X, w[a, b, :, jt.ds(group * per_group + o, bo)], acc)
    lanes = jt.arange(bo) + o < per_group
    here = (n, jt.ds(i, bh), jt.ds(j, bw), jt.ds(group * per_group + o, bo))
    value = acc.reshape(bh, bw, bo).astype(y.dtype)
    if per_group % bo:
        jt.store(y, here, value, mask=jnp.broadcast_to(lanes, value.shape))
    else:
        y[here] = value


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
    """Cross-correlation, what neural networks call convolution, computed in float32.

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
    bw = fit(shape[2], 128)
    bh, bo = fit(shape[1], max(1, 256 // bw)), fit(shape[3] // groups, 256)
    return convolution_tiles(x, weight, bh=bh, bw=bw, bo=bo, stride=stride, dilation=dilation, groups=groups)


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
        x.astype(jnp.float32), weight.astype(jnp.float32), stride, pads, rhs_dilation=dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups, precision="highest",
    )  # fmt: skip
    return out.astype(x.dtype)
