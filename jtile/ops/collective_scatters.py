"""Sums over devices of which each device gets its own rows, with the RMS norm behind them, as one kernel: what stands
behind a mixture whose experts are shared out, where every device adds something to the rows of all."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelValueError
from jtile.ops._shapes import check_float, check_shape
from jtile.ops.collective_parts import programs_at_most, varying_together
from jtile.ops.norms import rms_norm, rms_norm_reference


def reduce_scatter_rms_norm(
    x: jax.Array, weight: jax.Array, axis: str, *, residual: jax.Array, eps: float = 1e-6
) -> tuple[jax.Array, jax.Array]:
    """`rms_norm(reduce_scatter(x), weight, residual=residual)`: the norm of this device's rows of the sum over devices
    and of a residual, and that sum, which is in float32 and rounded once. Differentiable in x, weight and residual.

    Args:
      x: floats [devices * rows, n], this device's term for the rows of all devices, one device's behind the other's.
      weight: [n].
      axis: an axis of the mesh.
      residual: floats [rows, n], of this device.
      eps: added to the mean of squares.
    Returns:
      The norm and the sum, like `residual`.
    Raises:
      KernelTypeError, KernelValueError: dtypes or shapes that do not fit, no such axis, or outside of `shard_map`.
    """
    x, weight, residual = map(jnp.asarray, (x, weight, residual))
    check_float("reduce_scatter_rms_norm", x=x, weight=weight, residual=residual)
    if residual.ndim != 2:
        raise KernelValueError(
            f"reduce_scatter_rms_norm: residual has the shape {tuple(residual.shape)}; expected [rows, n], the rows of "
            "this device"
        )
    n, (rows, width) = jt.axis_size(axis), residual.shape
    check_shape("reduce_scatter_rms_norm", "x", x, (n * rows, width))
    check_shape("reduce_scatter_rms_norm", "weight", weight, (width,))
    if n == 1 or x.size == 0:
        return rms_norm(x.astype(residual.dtype), weight, residual=residual, eps=eps)
    return _normed(axis, float(eps), *varying_together(axis, x, residual, weight))


def reduce_scatter_rms_norm_reference(x, weight, axis, *, residual, eps=1e-6):
    """`reduce_scatter_rms_norm` by XLA's collectives. Arguments and result are those of `reduce_scatter_rms_norm`."""
    total = jax.lax.psum_scatter(x, axis, tiled=True).astype(residual.dtype)
    return rms_norm_reference(total, weight, residual=residual, eps=eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normed(axis: str, eps: float, x, residual, weight):
    programs = min(programs_at_most(), residual.shape[0])
    return tuple(scattered_normed_sum(x, residual, weight, axis=axis, eps=eps, programs=programs))


def _forward(axis, eps, x, residual, weight):
    y, total = _normed(axis, eps, x, residual, weight)
    return (y, total), (total, weight, x)


def _backward(axis, eps, residuals, cts) -> tuple[Any, ...]:
    from jtile.ops.collectives import all_gather

    total, weight, x = residuals
    _, pull = jax.vjp(lambda s, w: rms_norm(s, w, eps=eps), total, weight)
    gradient, of_weight = pull(cts[0])
    gradient = gradient + cts[1]
    return all_gather(gradient, axis).astype(x.dtype), gradient, of_weight


_normed.defvjp(_forward, _backward)


@jt.kernel(
    out_type=lambda x, r, w, **_: (jt.like(r), jt.like(r)),
    grid=lambda x, r, w, *, programs, **_: programs,
    scratch=lambda x, r, w, *, axis, programs, **_: [
        jt.symmetric((jt.axis_size(axis), *r.shape), x.dtype),
        jt.signals((programs, jt.axis_size(axis))),
    ],
)
def scattered_normed_sum(x, r, w, y, s, box, came, *, axis: str, eps: float, programs: int):
    """x [devices * rows, n], r [rows, n], w [n]: y, s [rows, n]. Program p of P has rows p, p + P, ... of each
    device."""
    # s = r + sum over d of x_me of device d;  y = s / sqrt(mean(s^2) + eps) w
    n, me, p, own = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0), r.shape[0]
    rows = lambda: jt.range(p, own, programs)
    for k in jt.range(n - 1):
        d = (me + 1 + k) % n
        there = box.on(axis, d)
        for i in rows():
            there[me, i] = x[d * own + i]
        jt.signal(came.on(axis, d)[p, me])
    for i in rows():
        box[me, i] = x[me * own + i]
    weight = w[...].astype(jnp.float32)
    for k in jt.range(n - 1):
        jt.wait(came[p, (me + 1 + k) % n])
    for i in rows():
        total = r[i].astype(jnp.float32)
        for d in jt.range(n):
            total = total + box[d, i].astype(jnp.float32)
        s[i] = total.astype(s.dtype)
        scale = jax.lax.rsqrt((total * total).sum() * (1.0 / r.shape[1]) + eps)
        y[i] = (total * scale * weight).astype(y.dtype)
