"""`jax.vmap` inside of a kernel, of functions that load, store, print or assert: the batch becomes an axis of the
tile, so that a batched place in memory becomes a gather or a scatter."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching

from jtile._errors import TransformError
from jtile.language import _primitives as prims
from jtile.language._index import At, Span, Take, Tile, dims_shape
from jtile.language._place import user_place


def register() -> None:
    for p, batch in _BATCHERS.items():
        batching.fancy_primitive_batchers[p] = functools.partial(_with_own_dims, p, batch)


def _with_own_dims(p, batch, axis_data, args, batched, /, **params):
    """JAX's usual table cannot hold rules of primitives that have a parameter `dims` of their own."""
    del axis_data
    if any(d is not None for d in batched):
        return batch(args, batched, **params)
    out = p.bind(*args, **params)
    return (out, [None] * len(out)) if p.multiple_results else (out, None)


def batch_size(args, dims) -> int:
    return next(v.shape[d] for v, d in zip(args, dims, strict=True) if d is not None)


def front(x, d, size: int):
    """`x` with its batch axis in front, repeated where it has none."""
    return jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)


def _gathered(dims, values, batched, size: int):
    """An access over a batch: `(dims, values, at)`; `at` is where its tile has the batch axis.

    Rows by number (`At`) become a gather along that dimension; any other batched entry makes all entries gathers by
    whole index tiles.
    """
    rows_only = not any(isinstance(d, Take) for d in dims)
    rows_only &= all(isinstance(d, At) for d, b in zip(dims, batched, strict=True) if b is not None)
    if rows_only:
        new = tuple(Take() if b is not None else d for d, b in zip(dims, batched, strict=True))
        at = sum(not isinstance(d, At) for d in new[: next(k for k, d in enumerate(new) if isinstance(d, Take))])
        return new, values, at
    inner = [v.shape if b is None else v.shape[:b] + v.shape[b + 1 :] for v, b in zip(values, batched, strict=True)]
    shape = dims_shape(dims, inner)
    first = next((k for k, d in enumerate(dims) if isinstance(d, Take)), None)
    rank = len(inner[first]) if first is not None else 0
    out, axis, taken = [], 0, -1  # `taken`: the first axis of all gathers
    for d, v, b in zip(dims, values, batched, strict=True):
        v = front(v, b, size)
        if isinstance(d, Take) and taken < 0:
            taken, axis = axis, axis + rank
        start = taken if isinstance(d, Take) else axis
        lanes = _elements(d, v)
        width = lanes.ndim - 1
        axis += width if isinstance(d, Span | Tile) else 0
        out.append(lax.broadcast_in_dim(lanes, (size, *shape), (0, *range(1 + start, 1 + start + width))))
    return (Take(),) * len(dims), out, 0


def _elements(d, v):
    """The element numbers of one entry: `v` [size, ...] to [size, ..., its own axis]."""
    if not isinstance(d, Span | Tile):
        return v
    apart, start = (d.stride, v) if isinstance(d, Span) else (1, v * np.asarray(d.step, v.dtype))
    return start[:, None] + lax.iota(v.dtype, d.size)[None] * np.asarray(apart, v.dtype)


def _access(ref, args, dims, batched):
    """Index entries over the batch and the operands behind them with their batch axes where the tile has its own."""
    n, size = len(dims), batch_size(args, batched)
    new, values, at = _gathered(dims, args[:n], batched[:n], size)
    more = [jnp.moveaxis(front(v, b, size), 0, at) for v, b in zip(args[n:], batched[n:], strict=True)]
    return [ref, *values, *more], new, at


def _only_place(batched, dims) -> bool:
    return all(b is None for b in batched[: len(dims)])


def _load(args, batched, *, dims, pad, masked):
    ref, *rest = args
    if _only_place(batched[1:], dims):  # only the masks differ: one load serves all of them, and each takes its lanes
        mask = jnp.moveaxis(rest[-1], batched[-1], 0)
        whole = prims.load_p.bind(ref, *rest[:-1], mask.any(0), dims=dims, pad=pad, masked=True)
        return jnp.where(mask, whole[None], jnp.full((), pad, whole.dtype)), 0
    operands, new, at = _access(ref, rest, dims, batched[1:])
    return prims.load_p.bind(*operands, dims=new, pad=pad, masked=masked), at


def _store(args, batched, *, dims, masked):
    ref, *rest = args
    n = len(dims)
    if _only_place(batched[1:], dims):
        if not masked or batched[-1] is None:
            raise TransformError(
                "a store of batched values at one place, under jax.vmap inside of the kernel: every element of the "
                "batch would write the same elements; index the Ref by the element, or return the value and store it "
                "outside",
                user_place(),
            )
        mask = jnp.moveaxis(rest[-1], batched[-1], 0)
        value = rest[n] if batched[1 + n] is None else _last(jnp.moveaxis(rest[n], batched[1 + n], 0), mask)
        prims.store_p.bind(ref, *rest[:n], value, mask.any(0), dims=dims, masked=True)
        return [], []
    operands, new, _ = _access(ref, rest, dims, batched[1:])
    prims.store_p.bind(*operands, dims=new, masked=masked)
    return [], []


def _last(values, mask):
    """Each element of `values` [size, ...] from the last lane where `mask` is true; from the first where none is."""
    lanes = lax.broadcasted_iota(np.dtype(np.int32), mask.shape, 0)
    last = jnp.where(mask, lanes, jnp.zeros_like(lanes)).max(0)
    count = math.prod(last.shape)
    flat = last.reshape(-1) * np.int32(count) + lax.iota(np.dtype(np.int32), count)
    return prims.take_p.bind(values.reshape(-1), flat).reshape(last.shape)


def _atomic(args, batched, *, fn, dims, masked):
    ref, *rest = args
    n = len(dims)
    if _only_place(batched[1:], dims) and n == 0:
        raise TransformError(
            f"an atomic {fn} of batched values on a Ref of rank 0, under jax.vmap inside of the kernel; reduce the "
            "values first, or give the Ref one element and index it by zeros",
            user_place(),
        )
    if _only_place(batched[1:], dims):  # every element of the batch acts on the same place, one after the other
        size = batch_size(rest, batched[1:])
        rest = [jnp.broadcast_to(rest[0], (size, *rest[0].shape)), *rest[1:]]
        batched = [None, 0, *batched[2:]]
    operands, new, at = _access(ref, rest, dims, batched[1:])
    return prims.atomic_p.bind(*operands, fn=fn, dims=new, masked=masked), at


def _print(args, batched, *, format):
    """One line that shows the whole batch."""
    moved = [v if d is None else jnp.moveaxis(v, d, 0) for v, d in zip(args, batched, strict=True)]
    return prims.print_p.bind(*moved, format=format), []


def _assert(args, batched, *, message):
    del batched
    return prims.assert_p.bind(args[0].all(), message=message), []


_BATCHERS = {
    prims.load_p: _load,
    prims.store_p: _store,
    prims.atomic_p: _atomic,
    prims.print_p: _print,
    prims.assert_p: _assert,
}
