"""The sum over devices that an RMS norm follows, as one kernel: what stands between two layers cut over devices."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import check_float, check_shape
from jtile.ops.collective_parts import programs_at_most, signal_others, summed_cotangent
from jtile.ops.norms import rms_norm, rms_norm_reference

# Of larger sums over more than two devices each row is added up on one of them. An experiment, off.
ONE_TURN, MOST_IN_TURNS = 1 << 20, 0
# An experiment, off: how many programs ask for columns of the matrices of the next kernel, and how many bytes of them;
# from how many rows on.
FETCHERS, LEAST = (0, 0), 8


def all_reduce_rms_norm(
    x: jax.Array, weight: jax.Array, axis: str, *, residual: jax.Array, eps: float = 1e-6,
    ahead: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`rms_norm(all_reduce(x), weight, residual=residual)`: the norm of the sum over devices and a residual, and the
    sum, which is in float32 and rounded once. Differentiable in x, weight and residual.

    Args:
      x: floats [..., n], this device's term.
      weight: [n].
      axis: an axis of the mesh.
      residual: like x, the same on all devices.
      eps: added to the mean of squares.
      ahead: matrices [rows, columns] that the next kernel reads. Their first columns may be brought to the device's
        cache meanwhile, since memory is idle while devices wait for each other.
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
    ahead, fetch = _fetched(rows[0], ahead)
    y, total = _normed(axis, float(eps), fetch, x.reshape(rows), residual.astype(x.dtype).reshape(rows), weight, ahead)
    return y.reshape(x.shape), total.reshape(x.shape)


def in_turns(nbytes: int, devices: int) -> bool:
    """Whether a sum of so many bytes is made where each row belongs to one device, which sends it to the others."""
    return devices > 2 and (devices - 2) * nbytes > ONE_TURN and nbytes <= MOST_IN_TURNS


def _fetched(rows: int, ahead) -> tuple[tuple, tuple[int, int] | None]:
    """The matrices of `ahead` that are fetched, and how: by how many programs, and how many bytes of them."""
    fits = all(a.ndim == 2 and a.dtype.itemsize >= 1 and a.size for a in ahead)
    if not ahead or not fits or rows < LEAST or FETCHERS[0] == 0:
        return (), None
    return tuple(ahead), FETCHERS


def all_reduce_rms_norm_reference(x, weight, axis, *, residual, eps=1e-6, ahead=()):
    """`all_reduce_rms_norm` by XLA's collectives. Arguments and result are those of `all_reduce_rms_norm`."""
    del ahead
    return rms_norm_reference(jax.lax.psum(x, axis), weight, residual=residual, eps=eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _normed(axis: str, eps: float, fetch: tuple[int, int] | None, x, residual, weight, ahead):
    n, most = jt.axis_size(axis), programs_at_most()
    if in_turns(x.size * x.dtype.itemsize, n) and x.shape[0] >= n:
        programs = min(most, x.shape[0]) // n * n
        outs = normed_sum_in_turns(x, residual, weight, axis=axis, eps=eps, programs=programs)
        return tuple(jt.same_along(y, axis) for y in outs)
    if fetch is not None:
        fetch = min(fetch[0], most // 2), fetch[1]
    programs = min(most - (fetch[0] if fetch else 0), x.shape[0])
    outs = normed_sum(x, residual, weight, ahead, axis=axis, eps=eps, programs=programs, fetch=fetch)
    return tuple(jt.same_along(y, axis) for y in outs)


def _forward(axis, eps, fetch, x, residual, weight, ahead):
    y, total = _normed(axis, eps, fetch, x, residual, weight, ahead)
    return (y, total), (total, x, residual, weight, ahead)


def _backward(axis, eps, fetch, residuals, cts):
    from jtile.ops.collectives import all_reduce

    total, x, residual, weight, ahead = residuals
    _, pull = jax.vjp(lambda s, w: rms_norm(s, w, eps=eps), total, weight)
    gradient, of_weight = pull(cts[0])
    gradient = gradient + cts[1]
    of_x = summed_cotangent(gradient, axis, lambda ct: all_reduce(ct, axis))
    found = tuple(_varying_as(ct, of) for ct, of in ((of_x, x), (gradient, residual), (of_weight, weight)))
    return *found, tuple(map(jnp.zeros_like, ahead))


def _varying_as(ct: jax.Array, of: jax.Array) -> jax.Array:
    """A cotangent that varies over the same axes of the mesh as the value `of` that it belongs to."""
    axes: Any = jax.typeof(of).manual_axis_type.varying - jax.typeof(ct).manual_axis_type.varying
    return jax.lax.pcast(ct, tuple(sorted(axes)), to="varying") if axes else ct


_normed.defvjp(_forward, _backward)


@jt.kernel(
    out_type=lambda x, *_, **__: (jt.like(x), jt.like(x)),
    grid=lambda *_, programs, fetch=None, **__: programs + (fetch[0] if fetch else 0),
    scratch=lambda x, *_, axis, programs, **__: [
        jt.symmetric((jt.axis_size(axis), *x.shape), x.dtype),
        jt.signals((programs, jt.axis_size(axis))),
    ],
)
def normed_sum(x, r, w, ahead, y, s, box, came, *, axis: str, eps: float, programs: int, fetch=None):
    """x, r [rows, n], w [n]: y, s [rows, n]. Program p of P has rows p, p + P, ...; fetch: (programs behind these that
    ask for columns of the matrices `ahead`, bytes that they ask for)."""
    if fetch is None:
        _sum(x, r, w, y, s, box, came, axis, eps, programs)
    else:
        if jt.program_id(0) < programs:
            _sum(x, r, w, y, s, box, came, axis, eps, programs)
        else:
            _ask(ahead, jt.program_id(0) - programs, *fetch)


@jt.function
def _ask(ahead, first, programs: int, nbytes: int):
    """Program `first` of `programs` asks for its share of the first columns of all matrices."""
    of_column = sum(a.shape[0] * a.dtype.itemsize for a in ahead)
    for a in ahead:
        columns = min(nbytes // of_column // 64 * 64, a.shape[1])
        if columns:
            for k in jt.range(first, a.shape[0] // 64, programs):
                jt.prefetch(a, (jt.ds(k * 64, 64), jt.ds(0, columns)))


@jt.function
def _sum(x, r, w, y, s, box, came, axis: str, eps: float, programs: int):
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
    out_type=lambda x, *_, **__: (jt.like(x), jt.like(x)),
    grid=lambda *_, programs, **__: programs,
    scratch=lambda x, *_, axis, programs, **__: [
        jt.symmetric((jt.axis_size(axis), jt.cdiv(x.shape[0], jt.axis_size(axis)), x.shape[1]), x.dtype),
        jt.symmetric(x.shape, x.dtype),
        jt.signals((programs, jt.axis_size(axis))),
        jt.signals((programs,)),
    ],
)
def normed_sum_in_turns(x, r, w, y, s, box, sums, came, made, *, axis: str, eps: float, programs: int):
    """x, r [rows, n], w [n]: y, s [rows, n]. Program p of P has rows p, p + P, ..., which device p % d of d adds up; P
    is a multiple of d."""
    # s = r + sum over d of x of device d;  y = s / sqrt(mean(s^2) + eps) w
    n, me, p = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    owner, weight = p % n, w[...].astype(jnp.float32)
    rows = lambda: jt.range(p, x.shape[0], programs)
    if owner != me:
        there = box.on(axis, owner)
        for i in rows():
            there[me, i // n] = x[i]
        jt.signal(came.on(axis, owner)[p, me])
        jt.wait(made[p])
        for i in rows():
            total = sums[i]
            s[i] = total
            y[i] = _unit(total, weight, eps).astype(y.dtype)
    else:
        for i in rows():
            box[me, i // n] = x[i]
        for k in jt.range(n - 1):
            jt.wait(came[p, (me + 1 + k) % n])
        for i in rows():
            total = r[i].astype(jnp.float32)
            for d in jt.range(n):
                total = total + box[d, i // n].astype(jnp.float32)
            total = total.astype(s.dtype)
            for k in jt.range(n - 1):
                sums.on(axis, (me + 1 + k) % n)[i] = total
            s[i] = total
            y[i] = _unit(total, weight, eps).astype(y.dtype)
        for k in jt.range(n - 1):
            jt.signal(made.on(axis, (me + 1 + k) % n)[p])


@jt.function
def _unit(total, weight, eps: float):
    """The norm of a rounded sum, so that all devices have the same."""
    total = total.astype(jnp.float32)
    scale = jax.lax.rsqrt((total * total).sum() * (1.0 / total.shape[0]) + eps)
    return total * scale * weight
