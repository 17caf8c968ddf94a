"""Gather and scatter on values: every form of `lax.gather` and `lax.scatter*` becomes index arithmetic and the 1-D
cards."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile import ir
from jtile.language._primitives import put_p, take_p
from jtile.trace.lower import Lowering, rule


@rule("jtile_take")
def _(c: Lowering, x, indices):
    return c.add(ir.Gather(x, indices, 0))


@rule("jtile_put")
def _(c: Lowering, x, indices, updates, *, fn):
    return c.add(ir.Scatter(x, indices, updates, fn))


@rule("gather")
def _(c: Lowering, x, indices, *, dimension_numbers, slice_sizes, mode, fill_value, **_):
    shape, out = x.type.shape, tuple(c.eqn.outvars[0].aval.shape)
    if math.prod(out) == 0:
        return c.b.full(0, out, x.type.dtype)
    fill = mode in (None, lax.GatherScatterMode.FILL_OR_DROP)
    if math.prod(shape) == 0:
        return c.b.full(_fill(x.type.dtype, fill_value), out, x.type.dtype)
    axis = _along(dimension_numbers, slice_sizes, shape, indices.type.shape, out) if not fill else None
    if axis is not None and mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        return c.add(ir.Gather(x, c.b.reshape(indices, out), axis))

    def run(x, indices):
        linear, inside = _window_elements(shape, indices, dimension_numbers, slice_sizes, out, clip=True)
        got = take_p.bind(x.reshape(-1), linear.reshape(-1)).reshape(out)
        if not fill:
            return got
        return jnp.where(inside, got, jnp.full(out, _fill(x.dtype.name, fill_value), x.dtype))

    return c.call(run, x, indices)


def _fill(dtype: str, value):
    """JAX's number for elements that are not there: NaN, the lowest int, the highest unsigned, True."""
    if value is not None:
        return value
    d = ir.DTYPES[dtype]
    return (
        math.nan
        if d.kind == "f"
        else True
        if d.kind == "b"
        else (1 << d.bits) - 1
        if d.kind == "u"
        else -(1 << (d.bits - 1))
    )


def _along(dn, sizes, shape, index_shape, out) -> int | None:
    """The axis of a gather that is `take_along_axis`: one element of one axis, every other axis a batch axis in
    place."""
    if len(dn.start_index_map) != 1 or dn.offset_dims or math.prod(sizes) != 1 or len(shape) != len(out):
        return None
    (axis,) = dn.start_index_map
    rest = tuple(k for k in range(len(shape)) if k != axis)
    if (
        tuple(dn.operand_batching_dims) != rest
        or tuple(dn.start_indices_batching_dims) != rest
        or index_shape[:-1] != out
    ):
        return None
    return axis


def _window_elements(shape, indices, dn, sizes, out, clip: bool):
    """Row-major element numbers of `shape` for every element of a gather's result `out`, and whether its window is
    inside.

    `dn` has the fields of `GatherDimensionNumbers`; `clip` moves a window that hangs over back into the array.
    """
    int32 = np.dtype(np.int32) if math.prod(shape) < 2**31 else np.dtype(np.int64)
    indices = _to_signed(indices, int32)
    batch_axes = [k for k in range(len(out)) if k not in dn.offset_dims]
    lift = lambda v: lax.broadcast_in_dim(v, out, batch_axes)  # a tile over the index axes, seen from the result
    windowed = [d for d in range(len(shape)) if d not in dn.collapsed_slice_dims and d not in dn.operand_batching_dims]
    linear, inside = jnp.zeros(out, int32), jnp.ones(out, bool)
    for d, n in enumerate(shape):
        if d in dn.start_index_map:
            start = indices[..., dn.start_index_map.index(d)]
            last = int32.type(n - sizes[d])
            inside = inside & lift((start >= int32.type(0)) & (start <= last))
            at = lift(jnp.clip(start, int32.type(0), last) if clip else start)
        elif d in dn.operand_batching_dims:
            k = dn.start_indices_batching_dims[dn.operand_batching_dims.index(d)]
            at = lax.broadcasted_iota(int32, out, batch_axes[k])
        else:
            at = jnp.zeros(out, int32)
        if d in windowed:
            at = at + lax.broadcasted_iota(int32, out, dn.offset_dims[windowed.index(d)])
        linear = linear * int32.type(n) + at
    return linear, inside


def _to_signed(indices, dtype):
    """Indices as signed ints; an unsigned one too large to represent stays out of every array."""
    if jnp.issubdtype(indices.dtype, np.unsignedinteger) and indices.dtype.itemsize >= dtype.itemsize:
        indices = lax.min(indices, jnp.asarray(np.iinfo(dtype).max, indices.dtype))
    elif indices.dtype.itemsize > dtype.itemsize:
        info = np.iinfo(dtype)
        indices = jnp.clip(indices, jnp.asarray(info.min, indices.dtype), jnp.asarray(info.max, indices.dtype))
    return indices.astype(dtype)


_FUNCTIONS = {"": "set", "add": "add", "mul": "mul", "min": "min", "max": "max", "sub": "sub"}
# JAX spells them scatter-add in one version and scatter_add in another.
SCATTERS = {f"scatter{sep}{n}" if n else "scatter": fn for n, fn in _FUNCTIONS.items() for sep in "-_"}


class _AsGather:
    """The dimension numbers of a scatter, read as those of the gather of the same windows."""

    def __init__(self, dn, operand_rank: int):
        self.offset_dims = tuple(dn.update_window_dims)
        self.collapsed_slice_dims = tuple(dn.inserted_window_dims)
        self.start_index_map = tuple(dn.scatter_dims_to_operand_dims)
        self.operand_batching_dims = tuple(dn.operand_batching_dims)
        self.start_indices_batching_dims = tuple(dn.scatter_indices_batching_dims)
        gone = {*self.collapsed_slice_dims, *self.operand_batching_dims}
        self.windowed = [d for d in range(operand_rank) if d not in gone]

    def sizes(self, updates_shape, rank: int) -> list[int]:
        """Window length per operand dimension."""
        out = [1] * rank
        for d, k in zip(self.windowed, self.offset_dims, strict=True):
            out[d] = updates_shape[k]
        return out


@rule(*SCATTERS)
def _(c: Lowering, x, indices, updates, *, dimension_numbers, mode, update_jaxpr=None, **_):
    fn = SCATTERS[c.eqn.primitive.name]
    if fn == "set" and update_jaxpr is not None and getattr(update_jaxpr, "eqns", ()):
        raise c.unsupported(
            "a scatter with a function of its own (.at[].apply); gather, compute, and scatter with .at[].set"
        )
    shape = x.type.shape
    if math.prod(updates.type.shape) == 0 or math.prod(shape) == 0:
        return x
    dn = _AsGather(dimension_numbers, len(shape))
    sizes = dn.sizes(updates.type.shape, len(shape))
    clip = mode == lax.GatherScatterMode.CLIP

    def run(x, indices, updates):
        linear, inside = _window_elements(shape, indices, dn, sizes, updates.shape, clip)
        linear = linear if clip else jnp.where(inside, linear, jnp.full_like(linear, -1))
        updates = -updates if fn == "sub" else updates
        flat = put_p.bind(x.reshape(-1), linear.reshape(-1), updates.reshape(-1), fn="add" if fn == "sub" else fn)
        return flat.reshape(shape)

    return c.call(run, x, indices, updates)
