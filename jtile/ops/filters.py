"""Chains of stencils in one pass over memory: several steps of one stencil, separable filters, morphology.

A program loads a tile with the points around it that all steps together reach, and keeps the results between two steps
in memory of its own, which stays in a cache. On GPUs it finds the points outside of the array by their indices, if they
all have one value. Elsewhere a copy of the array has these points around it.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops._shapes import check_float, fit, known, machine, sums_in, tuned
from jtile.ops.dispatch import vector_cores
from jtile.ops.stencils import stencil_weight_sums

Sides = tuple[int, ...]
_MODES = {"zero": "constant", "edge": "edge", "wrap": "wrap", "reflect": "reflect"}


def _reaches(sizes: tuple[Sides, ...]) -> Sides:
    """How many points the windows of these sides take from an axis, together."""
    return tuple(sum(n - 1 for n in along) for along in zip(*sizes, strict=True))


def _half(sizes: tuple[Sides, ...]) -> Sides:
    """How far all steps together reach on one side."""
    return tuple(r // 2 for r in _reaches(sizes))


def _valid(x, sizes, fill: float | None = None) -> Sides:
    reaches = _reaches(sizes) if fill is None else (0,) * (x.ndim - 1)
    return tuple(n - r for n, r in zip(x.shape[1:], reaches, strict=True))


def _along(values, k: int, rank: int):
    """Values along axis k of `rank` axes, of which the others have length 1."""
    return values.reshape(*(-1 if d == k else 1 for d in range(rank)))


def _point(x, b, at, shift: Sides, tile: Sides, inside: bool, fill: float):
    """The tile of x[b] that begins at `at`, moved by `shift`, with `fill` for points outside of x. `inside` is false
    where the tile has points around x itself."""
    rank, places, here = len(tile), [], None
    for k, (first, n, moved) in enumerate(zip(at, tile, shift, strict=True)):
        i = first + moved + jt.arange(n)
        if moved or not inside:  # without a mask, loads of whole lines stay what they are
            own = _along((i >= 0) & (i < x.shape[1 + k]), k, rank)
            here = own if here is None else here & own
        places.append(_along(i, k, rank))
    return jt.load(x, (b, *places), mask=None if here is None else jnp.broadcast_to(here, tile), other=fill)


@jt.kernel(
    out_type=lambda x, windows, *, sizes, fill=None, **_: jt.like(x, shape=(x.shape[0], *_valid(x, sizes, fill))),
    grid=lambda x, windows, *, sizes, inner, fill=None, **_: (
        x.shape[0], *map(jt.cdiv, _valid(x, sizes, fill), inner)
    ),
)  # fmt: skip
def chain_tiles(
    x, windows, y, *, sizes: tuple[Sides, ...], inner: Sides, sides: Sides, how: str, outside: Any,
    fill: float | None = None, once: bool = False,
):  # fmt: skip
    """x [batch, ...] with the points around it, y [batch, ...]; windows: one for each step, of `sizes`, None for "max"
    and "min". A tile of a step has `inner` points of the last step and those that later ones take, or `sides`, where
    they have to be powers of two. `outside`: the value of the points around y between steps; None: as computed.
    `fill`: x is given without the points around it, which have this value. `once`, with a `fill`: a tile and the points
    around it are loaded as one tile, of which the first step takes parts."""
    # t_0 = x     t_(s+1)[i] = sum_a w_s[a] t_s[i + a], or the maximum, or minimum
    b, rank = jt.program_id(0), len(inner)
    at = [jt.program_id(1 + k) * inner[k] for k in range(rank)]
    dtype = sums_in(x) if how == "sum" else x.dtype
    reach = _half(sizes)
    t, buffer, around = None, None, None
    if once:
        whole = tuple(n + m for n, m in zip(inner, _reaches(sizes), strict=True))
        around = _point(x, b, at, tuple(-r for r in reach), whole, False, fill)
    for s, size in enumerate(sizes):
        later = _reaches(((1,) * rank, *sizes[s + 1 :]))
        tile = sides or tuple(n + r for n, r in zip(inner, later, strict=True))
        if s:
            buffer = jt.alloc(t.shape, dtype) if buffer is None else buffer
            buffer[tuple(jt.ds(0, n) for n in t.shape)] = t
        parts = []
        for a in itertools.product(*map(range, size)):
            first = [o if s else at[k] + o for k, o in enumerate(a)]
            here = tuple(jt.ds(f, n) for f, n in zip(first, tile, strict=True))
            if around is not None and not s:
                part = around[tuple(slice(o, o + n) for o, n in zip(a, tile, strict=True))]
            elif fill is not None and not s:
                shift = tuple(o - r for o, r in zip(a, reach, strict=True))
                part = _point(x, b, at, shift, tile, len(sizes) == 1, fill)
            else:
                part = buffer[here] if s else x[(b, *here)]
            part = part.astype(dtype)
            parts.append(part * windows[s][a].astype(dtype) if how == "sum" else part)
        t = functools.reduce({"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[how], parts)
        if outside is not None and s + 1 < len(sizes):
            for k in range(rank):
                place = at[k] - later[k] // 2 + jt.arange(tile[k])
                inside = (place >= 0) & (place < y.shape[1 + k])
                t = jnp.where(_along(inside, k, rank), t, outside)
    if t.shape == tuple(inner):
        y[(b, *(jt.ds(f, n) for f, n in zip(at, inner, strict=True)))] = t.astype(y.dtype)
        return
    mask = jnp.ones(t.shape, bool)
    for k in range(rank):
        mask = mask & _along(jt.arange(t.shape[k]) < inner[k], k, rank)
    jt.store(y, (b, *(jt.ds(f, n) for f, n in zip(at, t.shape, strict=True))), t.astype(y.dtype), mask=mask)


def _tiles(shape: Sides, sizes: tuple[Sides, ...], lines: bool) -> dict[str, Sides]:
    """Tiles of the last step, and the sides that all steps have on GPUs: long rows, and what later steps reach.
    `lines`: the tiles of a single step that finds points outside by itself."""
    rank, later = len(shape), _reaches(((1,) * len(shape), *sizes[1:]))
    most = (16, 512) if rank == 2 else (2, 8, 128)
    if machine().whole:
        return {"inner": tuple(fit(n, m) for n, m in zip(shape, most, strict=True)), "sides": ()}
    wanted = (32, 128) if rank == 2 else (8, 16, 32)
    if lines:
        wanted = (4, 512) if rank == 2 else (1, 1, 512)
    if vector_cores():  # a vector core's memory has to hold the points of all steps
        wanted = (16, 128) if rank == 2 else (4, 8, 32)
    sides = [max(min(w, jt.next_power_of_2(known(n) + r)), jt.next_power_of_2(2 * r))
             for n, w, r in zip(shape, wanted, later, strict=True)]  # fmt: skip
    inner = tuple(s - r for s, r in zip(sides, later, strict=True))
    return {"inner": inner, "sides": tuple(sides) if any(later) else ()}


def chained(x, windows, sizes: tuple[Sides, ...], how: str, outside: Any = None, fill: float | None = None):
    """The chain over x [batch, ...], which has the points around it unless there is a `fill` for them: [batch, ...]
    without them."""
    once = fill is not None and machine().whole
    lines = fill is not None and not once and len(sizes) == 1
    sides = _tiles(_valid(x, sizes, fill), sizes, lines)
    kernel = tuned(chain_tiles, num_warps=4) if lines else chain_tiles
    return kernel(x, windows, sizes=sizes, how=how, outside=outside, fill=fill, once=once, **sides)


def _bounded(x, windows, sizes: tuple[Sides, ...], how: str, boundary: str, outside: Any = None, fill: float = 0.0):
    """The chain over x [..., ...] with what stands outside, as an array like x."""
    rank, reach = len(sizes[0]), _half(sizes)
    if boundary == "zero" and _indexed(sizes, how):
        flat = x.reshape(-1, *x.shape[-rank:])
        return chained(flat, windows, sizes, how, outside, fill).reshape(x.shape)
    return chained(_around(x, rank, reach, boundary, fill), windows, sizes, how, outside).reshape(x.shape)


def _indexed(sizes: tuple[Sides, ...], how: str) -> bool:
    """Whether points outside, which have one value, need no copy of the array. GPUs find them by their indices, which
    was measured to be quicker; indices that lead back inside, as at an edge, take five times as long. CPUs read a tile
    in place, and copy the tiles that hang over an edge alone. NPUs take the copy of the array, with which several steps
    are one pass over memory: nothing was measured there."""
    if machine().whole:
        return True
    return "warps" in jt.target().features and (how != "sum" or len(sizes) == 1)


def _forward(x, windows, **meta):
    return chain_tiles(x, windows, **meta), (x, windows)


def _backward(residuals, g, *, sizes: tuple[Sides, ...], how: str, outside: Any, fill=None, once=False, **_):
    x, windows = residuals
    if once and how == "sum" and len(sizes) == 1 and fill == 0:
        (w,), (size,) = windows, sizes
        dx = chained(g, (jnp.flip(w),), sizes, how, fill=fill)
        return dx, (stencil_weight_sums(_around(x, len(size), _half(sizes), "zero"), g, size).astype(w.dtype),)
    if fill is not None:  # as the gradient of a chain over a copy of x with the points around it
        reach = _half(sizes)
        copied = lambda x, windows: chained(_around(x, len(reach), reach, "zero", fill), windows, sizes, how, outside)
        return jax.vjp(copied, x, windows)[1](g)
    if how != "sum":
        return jax.vjp(lambda x: _reduced(x, sizes, how), x)[1](g)[0], None
    if len(sizes) > 1:  # reverse mode goes step by step: results between two steps are computed again

        def run(x, windows):
            for s, size in enumerate(sizes):
                x = chained(x, windows[s : s + 1], (size,), how)
                around = _half((*sizes[s + 1 :], (1,) * len(size)))
                if outside is not None and any(around):
                    middle = x[(slice(None), *(slice(r, n - r) for r, n in zip(around, x.shape[1:], strict=True)))]
                    x = jnp.pad(middle, ((0, 0), *((r, r) for r in around)), constant_values=outside)
            return x

        return jax.vjp(run, x, windows)[1](g)
    (w,), (size,) = windows, sizes
    around = jnp.pad(g, ((0, 0), *((n - 1, n - 1) for n in size)))
    dx = chained(around, (jnp.flip(w),), sizes, how)
    return dx, (stencil_weight_sums(x, g, size).astype(w.dtype),)


chain_tiles.defvjp(_forward, _backward)


def _reduced(x, sizes, how: str):
    join, start = (jax.lax.max, -math.inf) if how == "max" else (jax.lax.min, math.inf)
    size = tuple(r + 1 for r in _reaches(sizes))
    return jax.lax.reduce_window(x, np.asarray(start, x.dtype), join, (1, *size), (1,) * x.ndim, "VALID")


def _around(x, rank: int, reach: Sides, boundary: str, fill: Any = 0):
    """x [..., ...] as [batch, ...] with `reach` points around its last axes."""
    flat = x.reshape(-1, *x.shape[-rank:])
    fixed = {"constant_values": fill} if boundary == "zero" else {}
    return jnp.pad(flat, ((0, 0), *((r, r) for r in reach)), mode=_MODES[boundary], **fixed)


def _check(op: str, x, rank: int, boundary: str, sizes: tuple[Sides, ...]) -> None:
    check_float(op, x=x)
    if x.ndim < rank:
        raise KernelValueError(f"{op}: x has at least {rank} axes, got shape {tuple(x.shape)}")
    if boundary not in _MODES:
        raise KernelValueError(f"{op}: boundary is one of {', '.join(_MODES)}, got {boundary!r}")
    if any(n % 2 == 0 for size in sizes for n in size):
        raise KernelValueError(f"{op}: windows have odd sides, got {', '.join(map(str, sizes))}")


@functools.partial(jax.jit, static_argnames=("boundary", "steps"), inline=True)
def stencil(x: jax.Array, weights: jax.Array, *, boundary: str = "zero", steps: int = 1) -> jax.Array:
    """`steps` times `y_i = sum_a weights_a x_(i + a - sides // 2)` over the last axes, computed in float32.

    Several steps are one pass over memory, where points outside are zeros or wrap around. Differentiable in x and
    weights, whose reverse mode goes step by step.

    Args:
      x: float array [..., n], [..., m, n] or [..., l, m, n]: with as many axes at the end as `weights` has.
      weights: float array of one to three axes, with odd sides.
      boundary: what stands outside, in every step: "zero", "edge", "wrap" or "reflect".
      steps: how many times the stencil is applied.
    Returns:
      An array like `x`.
    Raises:
      KernelTypeError: wrong dtypes. KernelValueError: shapes, a boundary or a number of steps that do not fit.
    """
    check_float("stencil", weights=weights)
    rank, sizes = weights.ndim, (tuple(weights.shape),)
    if rank not in (1, 2, 3):
        raise KernelValueError(f"stencil: weights have one to three axes, got shape {tuple(weights.shape)}")
    _check("stencil", x, rank, boundary, sizes)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise KernelValueError(f"stencil: steps is an int, 0 or more, got {steps!r}")
    if x.size == 0 or steps == 0:
        return x
    if rank == 1:
        return stencil(x[..., None, :], weights[None], boundary=boundary, steps=steps)[..., 0, :]
    by_indices = boundary == "zero" and _indexed(sizes, "sum") and not machine().whole
    alone = boundary in ("edge", "reflect") or by_indices
    once = 1 if alone else _STEPS
    shape = x.shape
    for first in range(0, steps, once):
        now = sizes * min(once, steps - first)
        if boundary == "wrap" and any(r > n for r, n in zip(_half(now), shape[-rank:], strict=True)):
            for _ in range(min(once, steps - first)):
                x = _bounded(x, (weights,), sizes, "sum", boundary)
            continue
        outside = 0.0 if boundary == "zero" and len(now) > 1 else None
        x = _bounded(x, (weights,) * len(now), now, "sum", boundary, outside)
    return x


# Steps of one pass: with more, the points around a tile cost more than a further pass. GPUs take one, in long rows:
# four passes over 8192 x 8192 took 672 us on an H200, and one of four steps 1344.
_STEPS = 4


def separable_filter(x: jax.Array, windows: tuple[jax.Array, ...], *, boundary: str = "edge") -> jax.Array:
    """A filter that is a product of one-dimensional ones, such as a Gauss filter, in one pass over memory.

    Differentiable in x and the windows.

    Args:
      x: float array [..., m, n], or [..., l, m, n].
      windows: one float vector of odd length for each of the last two or three axes.
      boundary: what stands outside: "zero", "edge", "wrap" or "reflect".
    Returns:
      An array like `x`, computed in float32 (float64 for float64).
    Raises:
      KernelTypeError: wrong dtypes. KernelValueError: windows or a boundary that do not fit.
    """
    op, rank = "separable_filter", len(windows)
    for w in windows:
        check_float(op, window=w)
    if rank not in (2, 3) or any(w.ndim != 1 for w in windows):
        raise KernelValueError(
            f"{op}: windows are two or three vectors, got {', '.join(str(w.shape) for w in windows)}"
        )
    along = lambda k, n: (*(1,) * k, n, *(1,) * (rank - 1 - k))
    order = range(rank)[::-1]  # the filter along rows comes first: their points lie side by side in memory
    sizes = tuple(along(k, windows[k].shape[0]) for k in order)
    _check(op, x, rank, boundary, sizes)
    if x.size == 0:
        return x
    taken = tuple(windows[k].reshape(size) for k, size in zip(order, sizes, strict=True))
    return _bounded(x, taken, sizes, "sum", boundary)


def dilate(x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """The maximum over a window around each point (grey dilation); points outside do not count.

    Differentiable in x.

    Args:
      x: float array [..., m, n].
      size: the sides of the window, odd.
    Returns:
      An array like `x`.
    Raises:
      KernelTypeError: wrong dtypes. KernelValueError: sides that do not fit.
    """
    return _morphology("dilate", x, size, "max")


def erode(x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """The minimum over a window around each point (grey erosion); points outside do not count.

    Differentiable in x.

    Args:
      x: float array [..., m, n].
      size: the sides of the window, odd.
    Returns:
      An array like `x`.
    Raises:
      KernelTypeError: wrong dtypes. KernelValueError: sides that do not fit.
    """
    return _morphology("erode", x, size, "min")


def _morphology(op: str, x, size, how: str):
    if not isinstance(size, tuple) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise KernelTypeError(f"{op}: size is a pair of positive ints, got {size!r}")
    sizes = ((1, size[1]), (size[0], 1))
    _check(op, x, 2, "zero", sizes)
    if x.size == 0:
        return x
    return _bounded(x, None, sizes, how, "zero", fill=-math.inf if how == "max" else math.inf)


def stencil_reference(x, weights, *, boundary: str = "zero", steps: int = 1):
    """`stencil` in jnp."""
    rank, t = weights.ndim, x
    for _ in range(steps):
        around = _around(t, rank, tuple(n // 2 for n in weights.shape), boundary).astype(sums_in(x))
        total = jnp.zeros((around.shape[0], *x.shape[-rank:]), sums_in(x))
        for a in itertools.product(*map(range, weights.shape)):
            here = (slice(None), *(slice(o, o + n) for o, n in zip(a, x.shape[-rank:], strict=True)))
            total = total + weights[a].astype(total.dtype) * around[here]
        t = total.reshape(x.shape)
    return t.astype(x.dtype)


def separable_filter_reference(x, windows, *, boundary: str = "edge"):
    """`separable_filter` in jnp."""
    whole = functools.reduce(jnp.multiply.outer, windows)
    return stencil_reference(x, whole, boundary=boundary)


def dilate_reference(x, size):
    """`dilate` in lax."""
    return _reduced(_around(x, 2, tuple(n // 2 for n in size), "zero", -math.inf), (size,), "max").reshape(x.shape)


def erode_reference(x, size):
    """`erode` in lax."""
    return -dilate_reference(-x, size)
