"""Sliding windows: `reduce_window` and what its derivatives are made of. All loop over the elements of a window, each
of which is a strided slice of the operand."""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile import ir
from jtile.trace.lower import RULES, Lowering, rule
from jtile.trace.rules.shapes import slice_

_LIMIT = 256


def _check(c: Lowering, window_dimensions) -> None:
    if math.prod(window_dimensions) > _LIMIT:
        raise c.unsupported(f"a window of more than {_LIMIT} elements; use a cumulative sum, or a loop over the window")


def _elements(window, out, strides, dilation):
    """Starts and stops of the slices, one for each element of a window; `out` windows per axis."""
    for at in itertools.product(*map(range, window)):
        starts = [k * d for k, d in zip(at, dilation, strict=True)]
        yield starts, [lo + (n - 1) * s + 1 if n else lo for lo, n, s in zip(starts, out, strides, strict=True)]


def _reduce(fn: str):
    def run(c: Lowering, x, *, window_dimensions, window_strides, padding, base_dilation, window_dilation, **_):
        _check(c, window_dimensions)
        edges = [(lo, hi, d - 1) for (lo, hi), d in zip(padding, base_dilation, strict=True)]
        x = RULES["pad"](c, x, c.b.full(ir.identity(fn, x.type.dtype), (), x.type.dtype), padding_config=edges)
        out = None
        for starts, stops in _elements(window_dimensions, c.out.shape, window_strides, window_dilation):
            part = slice_(c, x, starts, stops, window_strides)
            out = part if out is None else c.map(ir.REDUCERS[fn], out, part)
        return out

    return run


for _ours in ("sum", "max", "min"):
    rule(f"reduce_window_{_ours}")(_reduce(_ours))


def _worst(select_prim, dtype):
    """The number from which an extreme of `select_prim` (`ge` or `le`) starts."""
    return jnp.asarray(-np.inf if select_prim.name == "ge" else np.inf, dtype)


@rule("select_and_gather_add")
def _(c: Lowering, tangents, operand, *, select_prim, window_dimensions, window_strides, padding, base_dilation,
      window_dilation, **_):  # fmt: skip
    """The tangent of the element that is the extreme of each window, the first of equals."""
    _check(c, window_dimensions)
    shape = c.out.shape
    edges = [(lo, hi, d - 1) for (lo, hi), d in zip(padding, base_dilation, strict=True)]

    def run(t, x):
        start = _worst(select_prim, x.dtype)
        x, t = lax.pad(x, start, edges), lax.pad(t, jnp.zeros((), t.dtype), edges)
        best, out = jnp.full(shape, start), jnp.zeros(shape, t.dtype)
        for starts, stops in _elements(window_dimensions, shape, window_strides, window_dilation):
            part = lax.slice(x, starts, stops, window_strides)
            stays = select_prim.bind(best, part)
            best = jnp.where(stays, best, part)
            out = jnp.where(stays, out, lax.slice(t, starts, stops, window_strides))
        return out

    return c.call(run, tangents, operand)


@rule("select_and_scatter_add")
def _(c: Lowering, source, operand, *, select_prim, window_dimensions, window_strides, padding, **_):
    """Every element of `source` added to the extreme of its window, the first of equals."""
    _check(c, window_dimensions)
    out = source.type.shape
    apart = [1] * len(out)

    def run(source, x):
        start = _worst(select_prim, x.dtype)
        shape, x = x.shape, lax.pad(x, start, [(lo, hi, 0) for lo, hi in padding])
        slices = list(_elements(window_dimensions, out, window_strides, apart))
        best, chosen = jnp.full(out, start), jnp.full(out, -1, np.dtype(np.int32))
        for k, (starts, stops) in enumerate(slices):
            part = lax.slice(x, starts, stops, window_strides)
            stays = select_prim.bind(best, part) & (chosen >= np.int32(0))
            best, chosen = jnp.where(stays, best, part), jnp.where(stays, chosen, np.int32(k))
        zero, total = jnp.zeros((), source.dtype), jnp.zeros(x.shape, source.dtype)
        for k, (starts, stops) in enumerate(slices):
            gaps = [(lo, n - hi, s - 1) for lo, hi, n, s in zip(starts, stops, x.shape, window_strides, strict=True)]
            total = total + lax.pad(jnp.where(chosen == np.int32(k), source, zero), zero, gaps)
        low = [lo for lo, _ in padding]
        return lax.slice(total, low, [lo + n for lo, n in zip(low, shape, strict=True)])

    return c.call(run, source, operand)
