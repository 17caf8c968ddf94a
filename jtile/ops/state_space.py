"""State space models: Mamba's selective scan (Gu and Dao 2023), and Mamba-2's as linear attention (Dao and Gu 2024)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, check_rank, check_shape, fit, known, machine, sums_in, wide
from jtile.ops.dispatch import Implementation, Op, vector_cores
from jtile.ops.linear_attention import linear_attention, linear_attention_reference
from jtile.ops.recurrences import chunk_of


def _types(x, dt, a, *_, save: bool, **__):
    """The types of y and, with `save`, of the state behind the last position."""
    return (jt.like(x), jax.ShapeDtypeStruct((x.shape[0], *a.shape), sums_in(x))) if save else jt.like(x)


def _behind(first, second):
    """The map `h -> a h + b` that two such maps make, one behind the other."""
    (a, b), (c, d) = first, second
    return c * a, c * b + d


@jt.kernel(out_type=_types, grid=lambda x, *_, bd, **__: (x.shape[0], jt.cdiv(x.shape[2], bd)))
def selective_scan_chunks(x, dt, a, b, c, skip, state, y, last=None, *, bt: int, bd: int, save: bool):
    """x, dt, y [batch, t, d]; a [d, n]; b, c [batch, t, n]; skip [d] or None; state, last [batch, d, n] or None."""
    # h_t = e^(dt_t a) h_(t-1) + dt_t x_t b_t     y_t = c_t . h_t + skip x_t, with an h [n] for each of the d channels
    i, j = jt.program_id(0), jt.program_id(1)
    n = a.shape[1]
    X, DT, Y = (v.tiles(None, bt, bd) for v in (x, dt, y))
    A = wide(a.tiles(bd, n)[j, 0])
    h = jt.zeros((bd, n), sums_in(x)) if state is None else state.tiles(None, bd, n)[i, j, 0].astype(sums_in(x))
    for k in jt.range(X.shape[1]):
        x_k, dt_k = wide(X[i, k, j]), wide(DT[i, k, j])
        b_k, c_k = (wide(v.tiles(None, bt, n)[i, k, 0])[:, None, :] for v in (b, c))
        steps = jnp.exp(dt_k[:, :, None] * A[None]), (dt_k * x_k)[:, :, None] * b_k
        fades, sums = jt.associative_scan(_behind, steps, 0)
        states = sums + fades * h[None]
        out = (states * c_k).sum(2)
        if skip is not None:
            out = out + wide(skip.tiles(bd)[j])[None, :] * x_k
        Y[i, k, j] = out.astype(y.dtype)
        h = states[bt - 1]
    if last is not None:
        last.tiles(None, bd, n)[i, j, 0] = h


@jt.kernel(out_type=_types, grid=lambda x, *_, bd, **__: (x.shape[0], jt.cdiv(x.shape[2], bd)))
def selective_scan_steps(x, dt, a, b, c, skip, state, y, last=None, *, bd: int, save: bool):
    """`selective_scan_chunks` one position after the other."""
    i, j = jt.program_id(0), jt.program_id(1)
    n = a.shape[1]
    X, DT, Y = (v.tiles(None, None, bd) for v in (x, dt, y))
    B, C = (v.tiles(None, None, n) for v in (b, c))
    A = wide(a.tiles(bd, n)[j, 0])
    h = jt.zeros((bd, n), sums_in(x)) if state is None else state.tiles(None, bd, n)[i, j, 0].astype(sums_in(x))
    for t in jt.range(x.shape[1]):
        x_t, dt_t, b_t, c_t = wide(X[i, t, j]), wide(DT[i, t, j]), wide(B[i, t, 0]), wide(C[i, t, 0])
        h = jnp.exp(dt_t[:, None] * A) * h + (dt_t * x_t)[:, None] * b_t[None, :]
        out = (h * c_t[None, :]).sum(1)
        Y[i, t, j] = (out if skip is None else out + wide(skip.tiles(bd)[j]) * x_t).astype(y.dtype)
    if last is not None:
        last.tiles(None, bd, n)[i, j, 0] = h


def _chunks(x, dt, a, *rest, save: bool):
    bt = chunk_of(known(x.shape[1]), 16)
    bd = fit(x.shape[2], max(1, 2 * machine().tile // (bt * jt.next_power_of_2(a.shape[1]))))
    return selective_scan_chunks(x, dt, a, *rest, bt=bt, bd=bd, save=save)


def _steps(x, dt, a, *rest, save: bool):
    bd = fit(x.shape[2], max(1, machine().tile // jt.next_power_of_2(a.shape[1])))
    return selective_scan_steps(x, dt, a, *rest, bd=bd, save=save)


def _one_value(*_, **__) -> str | None:
    return "its compiler scans one value at a time" if vector_cores() else None


_scan = Op("selective_scan", Implementation("chunks", _chunks, _one_value), Implementation("steps", _steps))


@functools.partial(jax.jit, static_argnames="return_state", inline=True)
def selective_scan(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, *,
    skip: jax.Array | None = None, state: jax.Array | None = None, return_state: bool = False,
) -> Any:  # fmt: skip
    """Mamba's scan: `h_t = e^(dt_t a) h_(t-1) + dt_t x_t b_t`, `y_t = c_t . h_t + skip x_t` for each channel.

    Differentiable in all arrays; one state in 16 is saved for reverse mode, and the others are computed again.

    Args:
      x: float array [batch, t, d]. dt: likewise, steps of time, 0 and more (behind the softplus).
      a: float array [d, n], 0 and less.
      b, c: float arrays [batch, t, n], which all channels share.
      skip: float array [d] or None.
      state: float array [batch, d, n], the state before the first position; default zeros.
      return_state: give the state behind the last position as well.
    Returns:
      y, an array like `x`; with `return_state` (y, last), last [batch, d, n] in float32 (float64 for float64).
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit.
    """
    op = "selective_scan"
    check_float(op, x=x, dt=dt, a=a, b=b, c=c, skip=skip, state=state)
    check_rank(op, "x", x, 3, "[batch, t, d]")
    check_rank(op, "a", a, 2, "[d, n]")
    (batch, t, d), n = x.shape, a.shape[1]
    shapes = {"dt": x.shape, "a": (d, n), "b": (batch, t, n), "c": (batch, t, n), "skip": (d,), "state": (batch, d, n)}
    for (name, shape), array in zip(shapes.items(), (dt, a, b, c, skip, state), strict=True):
        if array is not None or name not in ("skip", "state"):
            check_shape(op, name, array, shape)
    if 0 in (batch, t, d, n):
        last = jnp.zeros((batch, d, n), sums_in(x)) if state is None else state.astype(sums_in(x))
        y = jnp.zeros_like(x) if skip is None else x * skip.astype(x.dtype)[None, None]
        return (y, last) if return_state else y
    return _scan(x, dt, a, b, c, skip, state, save=return_state)


def selective_scan_reference(x, dt, a, b, c, *, skip=None, state=None, return_state=False):
    """`selective_scan` in jnp, one position after the other."""
    f = sums_in(x)
    start = jnp.zeros((x.shape[0], *a.shape), f) if state is None else state.astype(f)

    def step(h, now):
        x_t, dt_t, b_t, c_t = now
        h = jnp.exp(dt_t[..., None] * a.astype(f)[None]) * h + (dt_t * x_t)[..., None] * b_t[:, None, :]
        return h, (h * c_t[:, None, :]).sum(2)

    last, y = jax.lax.scan(step, start, tuple(v.astype(f).swapaxes(0, 1) for v in (x, dt, b, c)))
    y = y.swapaxes(0, 1) if skip is None else y.swapaxes(0, 1) + x.astype(f) * skip.astype(f)[None, None]
    return (y.astype(x.dtype), last) if return_state else y.astype(x.dtype)


@functools.partial(jax.jit, static_argnames="return_state", inline=True)
def ssd(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, *,
    skip: jax.Array | None = None, state: jax.Array | None = None, return_state: bool = False,
) -> Any:  # fmt: skip
    """Mamba-2's scan, `S_t = e^(dt_t a) S_(t-1) + dt_t b_t x_t^T`, `y_t = S_t^T c_t + skip x_t` for each head.

    Differentiable in all arrays. It is `linear_attention` with decays `dt a`.

    Args:
      x: float array [batch, t, heads, p]. dt: float array [batch, t, heads], 0 and more (behind the softplus).
      a: float array [heads], 0 and less.
      b, c: float arrays [batch, t, groups, n] of x's dtype; groups divides heads.
      skip: float array [heads] or None.
      state: float array [batch, heads, n, p], the state before the first position; default zeros.
      return_state: give the state behind the last position as well.
    Returns:
      y, an array like `x`; with `return_state` (y, last), last [batch, heads, n, p] in float32 (float64 for float64).
    Raises:
      KernelTypeError: dtypes that do not fit. KernelValueError: shapes that do not fit.
    """
    return _ssd(linear_attention, x, dt, a, b, c, skip, state, return_state)


def _ssd(run, x, dt, a, b, c, skip, state, return_state: bool):
    check_float("ssd", x=x, dt=dt, a=a, b=b, c=c, skip=skip, state=state)
    check_rank("ssd", "x", x, 4, "[batch, t, heads, p]")
    check_shape("ssd", "dt", dt, x.shape[:3])
    check_shape("ssd", "a", a, x.shape[2:3])
    check_rank("ssd", "b", b, 4, "[batch, t, groups, n]")
    check_shape("ssd", "b", b, (*x.shape[:2], *b.shape[2:]))
    check_shape("ssd", "c", c, b.shape)
    if not x.dtype == b.dtype == c.dtype:
        raise KernelTypeError(f"ssd: x, b and c have one dtype, got {x.dtype.name}, {b.dtype.name} and {c.dtype.name}")
    if b.shape[2] == 0 or x.shape[2] % b.shape[2]:
        raise KernelValueError(f"ssd: {x.shape[2]} heads do not divide into {b.shape[2]} groups of b and c")
    if skip is not None:
        check_shape("ssd", "skip", skip, x.shape[2:3])
    f = sums_in(x)
    values = (x.astype(f) * dt.astype(f)[..., None]).astype(x.dtype)
    g = dt.astype(f) * a.astype(f)[None, None]
    y, last = run(c, b, values, log_decay=g, state=state, return_state=True, scale=1.0)
    if skip is not None:
        y = (y.astype(f) + x.astype(f) * skip.astype(f)[None, None, :, None]).astype(x.dtype)
    return (y, last) if return_state else y


def ssd_reference(x, dt, a, b, c, *, skip=None, state=None, return_state=False):
    """`ssd` in jnp, one position after the other."""
    return _ssd(linear_attention_reference, x, dt, a, b, c, skip, state, return_state)
