"""Constants and movement of elements."""

from __future__ import annotations

import math

from jtile import ir
from jtile.trace.lower import Lowering, rule


@rule("broadcast_in_dim")
def _(c: Lowering, x, *dyn, shape, broadcast_dimensions, **_):
    shape = tuple(shape)
    if isinstance(x.op, ir.Full):
        return c.b.full(x.op.value, shape, x.type.dtype)
    return x if x.type.shape == shape else c.add(ir.Broadcast(x, shape, tuple(broadcast_dimensions)))


@rule("broadcast_to")
def _(c: Lowering, x, *, shape, **_):
    rank = x.type.rank
    return c.add(ir.Broadcast(x, tuple(shape), tuple(range(len(shape) - rank, len(shape)))))


@rule("reshape")
def _(c: Lowering, x, *dyn, new_sizes, dimensions=None, **_):
    x = transpose(c, x, dimensions) if dimensions is not None else x
    return c.b.reshape(x, tuple(new_sizes))


@rule("squeeze")
def _(c: Lowering, x, *, dimensions, **_):
    gone = {d % x.type.rank for d in dimensions}
    return c.b.reshape(x, [n for k, n in enumerate(x.type.shape) if k not in gone])


@rule("expand_dims")
def _(c: Lowering, x, *, dimensions, **_):
    shape = list(x.type.shape)
    for d in sorted(d % (len(shape) + len(dimensions)) for d in dimensions):
        shape.insert(d, 1)
    return c.b.reshape(x, shape)


def transpose(c: Lowering, x: ir.Value, perm) -> ir.Value:
    perm = tuple(int(p) for p in perm)
    return x if perm == tuple(range(x.type.rank)) else c.add(ir.Transpose(x, perm))


@rule("transpose")
def _(c: Lowering, x, *, permutation, **_):
    return transpose(c, x, permutation)


@rule("concatenate")
def _(c: Lowering, *xs, dimension, **_):
    return xs[0] if len(xs) == 1 else c.add(ir.Concat(tuple(xs), dimension))


@rule("pad")
def _(c: Lowering, x, value, *, padding_config, **_):
    """Padding, where a negative one cuts: interior padding comes first, then the slice."""
    low, high, inner = zip(*padding_config, strict=True) if padding_config else ((), (), ())
    up = lambda v: tuple(max(int(n), 0) for n in v)
    if any((*up(low), *up(high), *inner)):
        x = c.add(ir.Pad(x, value, up(low), up(high), tuple(int(n) for n in inner)))
    starts = tuple(max(-int(n), 0) for n in low)
    stops = tuple(n - max(-int(h), 0) for n, h in zip(x.type.shape, high, strict=True))
    return slice_(c, x, starts, tuple(max(a, b) for a, b in zip(starts, stops, strict=True)))


def slice_(c: Lowering, x: ir.Value, starts, stops, strides=None) -> ir.Value:
    """A static slice; the operand itself where the slice keeps everything."""
    strides = tuple(strides or (1,) * len(starts))
    if all((a, b, s) == (0, n, 1) for a, b, s, n in zip(starts, stops, strides, x.type.shape, strict=True)):
        return x
    return c.add(ir.Slice(x, tuple(map(int, starts)), tuple(map(int, stops)), tuple(map(int, strides))))


@rule("slice")
def _(c: Lowering, x, *, start_indices, limit_indices, strides, **_):
    return slice_(c, x, start_indices, limit_indices, strides)


@rule("split")
def _(c: Lowering, x, *, sizes, axis, **_):
    out, at = [], 0
    for n in sizes:
        starts, stops = [0] * x.type.rank, list(x.type.shape)
        starts[axis], stops[axis] = at, at + n
        out.append(slice_(c, x, starts, stops))
        at += n
    return out


@rule("unstack")
def _(c: Lowering, x, *, axis, **_):
    rest = [n for k, n in enumerate(x.type.shape) if k != axis]
    out = []
    for k in range(x.type.shape[axis]):
        starts, stops = [0] * x.type.rank, list(x.type.shape)
        starts[axis], stops[axis] = k, k + 1
        out.append(c.b.reshape(slice_(c, x, starts, stops), rest))
    return out


@rule("tile")
def _(c: Lowering, x, *, reps, **_):
    """`jnp.tile`: a broadcast of new axes in front of each, then a reshape."""
    both = [m for r, n in zip(reps, x.type.shape, strict=True) for m in (r, n)]
    wide = c.add(ir.Broadcast(x, tuple(both), tuple(range(1, len(both), 2))))
    return c.b.reshape(wide, [r * n for r, n in zip(reps, x.type.shape, strict=True)])


@rule("rev")
def _(c: Lowering, x, *, dimensions, **_):
    return c.add(ir.Reverse(x, tuple(dimensions))) if dimensions else x


@rule("iota")
def _(c: Lowering, *dyn, dtype, shape, dimension, **_):
    return c.add(ir.Iota(tuple(shape), dimension, c.dtype(dtype)))


@rule("empty", "empty2")
def _(c: Lowering, *_, **__):
    return c.full(0, c.out)


@rule("dynamic_slice")
def _(c: Lowering, x, *starts, slice_sizes, **_):
    return c.add(ir.DynamicSlice(x, tuple(starts[: x.type.rank]), tuple(slice_sizes)))


@rule("dynamic_update_slice")
def _(c: Lowering, x, update, *starts, **_):
    return c.add(ir.DynamicUpdate(x, update, tuple(starts)))


@rule("stack")
def _(c: Lowering, *xs, axis, **_):
    shape = list(xs[0].type.shape)
    shape.insert(axis, 1)
    wide = [c.b.reshape(x, shape) for x in xs]
    return wide[0] if len(wide) == 1 else c.add(ir.Concat(tuple(wide), axis))


@rule("zeros_like")
def _(c: Lowering, x, **_):
    return c.full(0, x.type)


@rule("iota_2x32_shape")
def _(c: Lowering, *, shape):
    """The row-major number of each element, as the high and the low 32 bits."""
    if math.prod(shape) > 2**32:
        raise c.unsupported("random bits of more than 2**32 elements in one tile")
    flat = c.add(ir.Iota((math.prod(shape),), 0, "uint32"))
    return [c.b.full(0, tuple(shape), "uint32"), c.b.reshape(flat, tuple(shape))]
