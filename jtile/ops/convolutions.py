"""Convolution of one to three axes, its transpose, and which kernel computes it."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, check_shape, sums_in, wide
from jtile.ops.convolution_forms import cut, shaped
from jtile.ops.convolution_gradients import convolution_dx, convolution_op
from jtile.ops.convolution_kernels import Sides, out_shape

Pair = tuple[int, int]


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
    x, pads = cut(x, _check(x, weight, stride, padding, dilation, groups))
    if rank == 1:
        more = {"stride": (1, *stride), "dilation": (1, *dilation), "padding": ((0, 0), *pads), "groups": groups}
        return convolution(x[:, None], weight[None], **more)[:, 0]
    shape = out_shape(shaped(x, pads), weight, stride, dilation)
    if 0 in shape or 0 in weight.shape:
        return jnp.zeros(shape, x.dtype)
    return convolution_op(x, weight, stride=stride, dilation=dilation, groups=groups, pads=pads)


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
    low = tuple(max(lo, 0) for lo, _ in pads)
    shape = (x.shape[0], *(n - max(lo, 0) - max(hi, 0) for n, (lo, hi) in zip(sides, pads, strict=True)), outputs)
    y = convolution_dx(x, weight, shape, stride=stride, dilation=dilation, groups=groups, low=low)
    more = [(max(-lo, 0), max(-hi, 0)) for lo, hi in pads]
    return jnp.pad(y, ((0, 0), *more, (0, 0)))


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
