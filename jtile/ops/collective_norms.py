"""The sum over devices that an RMS norm follows, as one kernel: what stands between two layers cut over devices."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops._shapes import check_float, check_shape
from jtile.ops.collective_parts import programs_at_most, signal_others, summed_cotangent
from jtile.ops.collective_posts import columns_of, not_in_rows, posted_to_all, row_boxes
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op
from jtile.ops.norms import rms_norm, rms_norm_reference


def all_reduce_rms_norm(
    x: jax.Array, weight: jax.Array, axis: str, *, residual: jax.Array, eps: float = 1e-6
) -> tuple[jax.Array, jax.Array]:
    """`rms_norm(all_reduce(x), weight, residual=residual)`: the norm of the sum over devices and a residual, and the
    sum, which is in float32 and rounded once. Differentiable in x, weight and residual.

    Args:
      x: floats [..., n], this device's term.
      weight: [n].
      axis: an axis of the mesh.
      residual: like x, the same on all devices.
      eps: added to the mean of squares.
    Returns:
      The norm and the sum, like x, the same on all devices along the axis.
    Raises:
      KernelTypeError, KernelValueError: dtypes or shapes that do not fit, no such axis, or outside of `shard_map`.
    """
    x, weight, residual = map(jnp.asarray, (x, weight, residual))
    check_float("all_reduce_rms_norm", x=x, weight=weight, residual=residual)
    check_shape("all_reduce_rms_norm", "weight", weight, x.shape[-1:])
    check_shape("all_reduce_rms_norm", "residual", residual, x.shape)
    n = jt.axis_size(axis)
    if n == 1 or x.size == 0:
        return rms_norm(jax.lax.psum(x, axis), weight, residual=residual, eps=eps)
    rows = (math.prod(x.shape[:-1]), x.shape[-1])
    y, total = _normed(axis, float(eps), x.reshape(rows), residual.astype(x.dtype).reshape(rows), weight)
    return y.reshape(x.shape), total.reshape(x.shape)


def all_reduce_rms_norm_reference(x, weight, axis, *, residual, eps=1e-6):
    """`all_reduce_rms_norm` by XLA's collectives. Arguments and result are those of `all_reduce_rms_norm`."""
    return rms_norm_reference(jax.lax.psum(x, axis), weight, residual=residual, eps=eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normed(axis: str, eps: float, x, residual, weight):
    outs = _normed_sums(x, residual, weight, axis=axis, eps=eps)
    return tuple(jt.same_along(y, axis) for y in outs)


def _by_signals(x, residual, weight, *, axis: str, eps: float):
    programs = min(programs_at_most(), x.shape[0])
    return normed_sum(x, residual, weight, axis=axis, eps=eps, programs=programs)


def _by_posts(x, residual, weight, *, axis: str, eps: float):
    ahead = gpu_tiles.overlaps()
    return posted_sum_of_row(x, residual, weight, axis=axis, eps=eps, ahead=ahead)


def _not_by_posts(x, residual, weight, *, axis: str, eps: float) -> str | None:
    return not_in_rows(x, axis)


def _forward(axis, eps, x, residual, weight):
    y, total = _normed(axis, eps, x, residual, weight)
    return (y, total), (total, x, residual, weight)


def _backward(axis, eps, residuals, cts):
    from jtile.ops.collectives import all_reduce

    total, x, residual, weight = residuals
    _, pull = jax.vjp(lambda s, w: rms_norm(s, w, eps=eps), total, weight)
    gradient, of_weight = pull(cts[0])
    gradient = gradient + cts[1]
    of_x = summed_cotangent(gradient, axis, lambda ct: all_reduce(ct, axis))
    return tuple(_varying_as(ct, of) for ct, of in ((of_x, x), (gradient, residual), (of_weight, weight)))


def _varying_as(ct: jax.Array, of: jax.Array) -> jax.Array:
    """A cotangent that varies over the same axes of the mesh as the value `of` that it belongs to."""
    axes: Any = jax.typeof(of).manual_axis_type.varying - jax.typeof(ct).manual_axis_type.varying
    return jax.lax.pcast(ct, tuple(sorted(axes)), to="varying") if axes else ct


_normed.defvjp(_forward, _backward)
_normed_sums = Op(
    "sum over devices and its norm",
    Implementation("rows that are posted", _by_posts, _not_by_posts, BLOCK_LEVEL, portable=False),
    Implementation("rows that are signalled", _by_signals),
)


@jt.kernel(
    out_type=lambda x, r, w, **_: (jt.like(x), jt.like(x)),
    grid=lambda x, r, w, *, programs, **_: programs,
    scratch=lambda x, r, w, *, axis, programs, **_: [
        jt.symmetric((jt.axis_size(axis), *x.shape), x.dtype),
        jt.signals((programs, jt.axis_size(axis))),
    ],
)
def normed_sum(x, r, w, y, s, box, came, *, axis: str, eps: float, programs: int):
    """x, r [rows, n], w [n]: y, s [rows, n]. Program p of P has rows p, p + P, ..."""
    # s = r + sum over d of x of device d;  y = s / sqrt(mean(s^2) + eps) w
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    rows = lambda: jt.range(p, x.shape[0], programs)
    for k in jt.range(n - 1):
        d = (me + 1 + k) % n
        there = box.on(axis, d)
        for i in rows():
            there[me, i] = x[i]
    signal_others(came, p, axis)
    for i in rows():
        box[me, i] = x[i]
    weight = w[...].astype(jnp.float32)
    for k in jt.range(n - 1):
        jt.wait(came[p, (me + 1 + k) % n])
    for i in rows():
        total = r[i].astype(jnp.float32)
        for d in jt.range(n):
            total = total + box[d, i].astype(jnp.float32)
        s[i] = total.astype(s.dtype)
        scale = jax.lax.rsqrt((total * total).sum() * (1.0 / x.shape[1]) + eps)
        y[i] = (total * scale * weight).astype(y.dtype)


@jt.kernel(
    out_type=lambda x, r, w, **_: (jt.like(x), jt.like(x)),
    grid=lambda x, r, w, **_: x.shape[0],
    scratch=row_boxes,
)
def posted_sum_of_row(x, r, w, y, s, box, *, axis: str, eps: float, ahead: bool = False):
    """`normed_sum` with a row in each program, which is posted: what this device has is in registers before it waits
    for others. ahead: the kernels in front do not make w."""
    # s = r + sum over d of x of device d;  y = s / sqrt(mean(s^2) + eps) w
    p, (columns, inside, load) = jt.program_id(0), columns_of(x, box)
    with jt.role("row", warps=8, early=True):
        weight = load(w).astype(jnp.float32) if ahead else None
        jt.wait_for_kernels()
        own, total = load(x, p), load(r, p)
        weight = load(w).astype(jnp.float32) if weight is None else weight
        terms = posted_to_all(box, (p, slice(None)), own, axis)
        total = functools.reduce(jnp.add, [term.astype(jnp.float32) for term in terms], total.astype(jnp.float32))
        scale = jax.lax.rsqrt((total * total).sum() * (1.0 / x.shape[1]) + eps)
        jt.store(s, (p, columns), total.astype(s.dtype), mask=inside)
        jt.store(y, (p, columns), (total * scale * weight).astype(y.dtype), mask=inside)
