"""Ops that move elements: broadcasts, reshapes, slices, pads, concatenations, gathers.

Sides of tensors are powers of two, so an op moves nothing where the tile's own sides are; see `moves` for the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jtile import ir

from . import moves
from .emitter import Emitter, elem_of, emits, padded
from .ttir import Val


def _constant(em: Emitter, op: ir.Op, v: Val) -> Val | None:
    """The result of moving a tile all of whose lanes are one number, or no lane at all."""
    t = op.result.type
    number = 0 if 0 in t.shape else v.number
    return None if number is None else em.code.const(number, elem_of(t.dtype), padded(t.shape))


# ---- broadcast, transpose, reshape ----------------------------------------------------------------------------------


@emits(ir.Broadcast)
def _broadcast(em: Emitter, op: ir.Broadcast) -> Val:
    v, full = em.val(op.x), padded(op.shape)
    if (same := _constant(em, op, v)) is not None:
        return same
    if not v.shape:
        return em.code.splat(v, full)
    out = v
    for k in range(len(full)):
        if k not in op.dims:
            out = em.code.expand_dims(out, k)
    out = em.code.broadcast(out, full)
    kept = {d for n, d in zip(op.x.shape, op.dims, strict=True) if n == op.shape[d]}
    filled = all(k in kept or n == m for k, (n, m) in enumerate(zip(op.shape, full, strict=True)))
    return dataclasses.replace(out, fill=v.fill if filled else None)


@emits(ir.Transpose)
def _transpose(em: Emitter, op: ir.Transpose) -> Val:
    v = em.val(op.x)
    if (same := _constant(em, op, v)) is not None:
        return same
    return dataclasses.replace(em.code.transpose(v, op.perm), fill=v.fill)


@emits(ir.Reshape)
def _reshape(em: Emitter, op: ir.Reshape) -> Val:
    v, full = em.val(op.x), padded(op.shape)
    if (same := _constant(em, op, v)) is not None:
        return same
    groups = _groups([n for n in op.x.shape if n != 1], [n for n in op.shape if n != 1])
    if all(map(_dense, [side for g in groups for side in g])):
        return dataclasses.replace(em.code.reshape(v, full), fill=v.fill)
    sides = [(math.prod(padded(a)), math.prod(padded(b))) for a, b in groups]
    maps = {
        k: (lambda lane, a=a, b=b: _regroup(em, lane, a, b))
        for k, (a, b) in enumerate(groups)
        if not (_dense(a) and _dense(b))
    }
    v = em.code.reshape(v, [p for p, _ in sides])
    return em.code.reshape(moves.move(em, v, [m for _, m in sides], maps), full)


def _groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of axes of two shapes that hold the same elements; sides are at least 2."""
    out: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(a):
        x, y = [a[i]], [b[j]]
        i, j = i + 1, j + 1
        while math.prod(x) != math.prod(y):
            if math.prod(x) < math.prod(y):
                x.append(a[i])
                i += 1
            else:
                y.append(b[j])
                j += 1
        out.append((x, y))
    return out


def _dense(shape: Sequence[int]) -> bool:
    """Whether a tile's elements are the first lanes of its tensor, in order."""
    return tuple(shape[1:]) == padded(shape[1:])


def _regroup(em: Emitter, lane: Val, a: Sequence[int], b: Sequence[int]) -> Val:
    """The lanes of a tile of shape `a` that hold the elements of the given lanes of a tile of shape `b`."""
    code, element = em.code, lane
    if not _dense(b):
        full, at = padded(b), []
        for n, stride in zip(full, moves.row_major(full), strict=True):
            digit = code.op("arith.shrui", lane, code.const(stride.bit_length() - 1, "i32", lane.shape))
            at.append(moves.low_bits(code, digit, n))
        element = moves.position(code, at, moves.row_major(b))
    if not _dense(a):
        at, rest = [], element
        for n in reversed(a[1:]):
            side = code.const(n, "i32", lane.shape)
            at.insert(0, code.op("arith.remui", rest, side))
            rest = code.op("arith.divui", rest, side)
        element = moves.position(code, [rest, *at], moves.row_major(padded(a)))
    return moves.low_bits(code, element, math.prod(padded(a)))  # lanes beyond the tile hold anything


# ---- slices, reversal -----------------------------------------------------------------------------------------------


@emits(ir.Slice)
def _slice(em: Emitter, op: ir.Slice) -> Val:
    v = em.val(op.x)
    if (same := _constant(em, op, v)) is not None:
        return same
    if op.result.shape == op.x.shape:
        return v
    full, maps = padded(op.result.shape), {}
    for k, (first, m, step) in enumerate(zip(op.starts, op.result.shape, op.strides, strict=True)):
        step = step if m > 1 else 1
        if (first, full[k], step) == (0, v.shape[k], 1):
            continue
        cut = _cut(em, v, k, first, full[k], step)
        if cut is not None:
            v = cut
        else:
            p = v.shape[k]
            maps[k] = lambda j, first=first, step=step, p=p: moves.low_bits(
                em.code, em.code.shift(em.code.scale(j, step), first), p
            )
    return moves.move(em, v, full, maps) if maps else dataclasses.replace(v, fill=None)


def _cut(em: Emitter, v: Val, axis: int, first: int, m: int, step: int) -> Val | None:
    """Elements `first + j * step` of an axis, taken in registers where they are a row or column of its lanes."""
    code, p = em.code, v.shape[axis]
    row, column = divmod(first, step)
    if p % (m * step) or p // m > moves.TILED or row % m or step & (step - 1):
        return None
    before, after = v.shape[:axis], v.shape[axis + 1 :]
    if p > m * step:
        v = moves.unstack(code, code.reshape(v, (*before, p // (m * step), m * step, *after)), axis, row // m)
    if step > 1:
        v = moves.unstack(code, code.reshape(v, (*before, m, step, *after)), axis + 1, column)
    return v


@emits(ir.Reverse)
def _reverse(em: Emitter, op: ir.Reverse) -> Val:
    v, shape = em.val(op.x), op.x.shape
    if (same := _constant(em, op, v)) is not None:
        return same
    axes = [k for k in op.axes if shape[k] > 1]
    if not axes:
        return v
    maps = {k: (lambda j, k=k: _mirror(em, j, shape[k], v.shape[k])) for k in axes}
    return moves.move(em, v, v.shape, maps)


def _mirror(em: Emitter, j: Val, n: int, p: int) -> Val:
    """The index `n - 1 - j`, kept inside a side of p lanes."""
    last = em.code.const(n - 1, "i32", j.shape)
    return em.code.op("arith.xori", j, last) if n == p else moves.low_bits(em.code, em.code.sub(last, j), p)


# ---- pad, concat ----------------------------------------------------------------------------------------------------


@emits(ir.Pad)
def _pad(em: Emitter, op: ir.Pad) -> Val:
    code, v, shape = em.code, em.val(op.x), op.result.shape
    full, value = padded(shape), em.val(op.value)
    filling = lambda sides: code.splat(value, sides) if value.number is None else code.const(
        value.number, value.elem, sides)  # fmt: skip
    if not shape:
        return v
    if 0 in op.x.shape:
        return filling(full)
    maps, mask = {}, None
    for k, (n, low, gap) in enumerate(zip(op.x.shape, op.low, op.interior, strict=True)):
        step, p = (gap + 1 if n > 1 else 1), v.shape[k]
        wide = _widened(em, v, k, low, full[k], step, filling)
        inside: Val | None = None
        j = code.arange(full[k])
        if wide is None:
            maps[k] = lambda j, low=low, step=step, p=p: _unpadded(em, j, low, step, p)
            inside = _of_source(em, j, low, n, step)
        else:
            v = wide
            if n < p and low + n * step < shape[k]:  # lanes beyond the tile come to lie inside the result
                inside = code.cmp("slt", j, code.const(low + n * step, "i32", j.shape))
        mask = code.both(mask, None if inside is None else code.along(inside, k, full))
    v = moves.move(em, v, full, maps) if maps else dataclasses.replace(v, fill=None)
    return v if mask is None else code.select(mask, v, filling(full))


def _widened(em: Emitter, v: Val, axis: int, low: int, m: int, step: int, filling) -> Val | None:
    """A tensor with `low` fillings before, `step - 1` between, and others behind the lanes of an axis, in registers."""
    code, p = em.code, v.shape[axis]
    row, column = divmod(low, step)
    if m % (p * step) or m // p > moves.TILED or row % p or step & (step - 1):
        return None
    for at, count, place in ((axis + 1, step, column), (axis, m // (p * step), row // p)):
        if count > 1:
            parts = [filling(v.shape)] * count
            parts[place] = v
            v = _merged(em, moves.stack(code, parts, at), axis)
    return v


def _merged(em: Emitter, v: Val, axis: int) -> Val:
    """A tensor with axes `axis` and `axis + 1` merged into one."""
    return em.code.reshape(v, (*v.shape[:axis], v.shape[axis] * v.shape[axis + 1], *v.shape[axis + 2 :]))


def _unpadded(em: Emitter, j: Val, low: int, step: int, p: int) -> Val:
    at = em.code.shift(j, -low)
    at = at if step == 1 else em.code.op("arith.divui", at, em.code.const(step, "i32", j.shape))
    return moves.low_bits(em.code, at, p)


def _of_source(em: Emitter, j: Val, low: int, n: int, step: int) -> Val:
    """The places of a padded axis that hold elements of the operand."""
    code, at = em.code, em.code.shift(j, -low)
    inside = code.cmp("ult", at, code.const((n - 1) * step + 1, "i32", j.shape))
    if step == 1:
        return inside
    rest = code.op("arith.remui", at, code.const(step, "i32", j.shape))
    return code.op("arith.andi", inside, code.cmp("eq", rest, code.const(0, "i32", j.shape)))


@emits(ir.Concat)
def _concat(em: Emitter, op: ir.Concat) -> Val:
    axis, full = op.axis, padded(op.result.shape)
    if 0 in op.result.shape:
        return em.code.const(0, elem_of(op.result.dtype), full)
    parts, at = [], 0
    for x in op.xs:
        if x.shape[axis]:
            parts.append((at, x))
        at += x.shape[axis]
    if len(parts) == 1:
        return em.val(parts[0][1])
    rolled = _one_source(em, parts, axis, full)
    if rolled is not None:
        return rolled
    by_side: dict[int, list[tuple[int, ir.Value]]] = {}
    for at, x in parts:
        by_side.setdefault(padded(x.shape)[axis], []).append((at, x))
    out: Val | None = None
    for some in by_side.values():
        v = _laid(em, some, axis, full)
        out = v if out is None else em.code.select(_mine(em, some, axis, full), v, out)
    if out is None:
        raise AssertionError("concat of nothing")
    return dataclasses.replace(out, fill=None)


def _one_source(em: Emitter, parts: list[tuple[int, ir.Value]], axis: int, full: tuple[int, ...]) -> Val | None:
    """A concatenation of slices of one tile, as `jnp.roll` and im2col make them, by one gather of that tile."""
    windows = [_window(x, axis) for _, x in parts]
    first, axes = windows[0]
    if first is None or first.x not in em.env or math.prod(first.x.shape) <= 1:
        return None
    for window, order in windows:
        if window is None or (window.x, window.strides, order) != (first.x, first.strides, axes):
            return None
    code, v = em.code, em.val(first.x)
    at, strides = moves.coordinates(code, full), moves.row_major(v.shape)
    steps = [a * b for a, b in zip(strides, first.strides, strict=True)]
    along = steps[axes.index(axis)] if axis in axes else 0
    offsets = [
        (begin, sum(a * b for a, b in zip(w.starts, strides, strict=True)) - begin * along)
        for (begin, _), (w, _) in zip(parts, windows, strict=True)
        if w is not None
    ]
    lane = code.add(moves.position(code, [at[k] for k in axes], steps), _piecewise(em, at[axis], offsets))
    return code.reshape(moves.pick(em, v, moves.low_bits(code, lane, v.size)), full)


def _window(x: ir.Value, axis: int) -> tuple[ir.Slice | None, list[int]]:
    """The slice that a part of a concatenation is, and the axes of the part that the slice's axes are."""
    op, axes = x.op, list(range(len(x.shape)))
    if isinstance(op, ir.Reshape) and x.shape[axis] == 1 and op.x.shape == (*x.shape[:axis], *x.shape[axis + 1 :]):
        op = op.x.op
        axes.remove(axis)
    return (op, axes) if isinstance(op, ir.Slice) and axes else (None, axes)


def _piecewise(em: Emitter, j: Val, values: list[tuple[int, int]]) -> Val:
    """The number that belongs to the last `(from, number)` with `from <= j`."""
    code, out = em.code, em.code.const(values[0][1], "i32", j.shape)
    for at, k in values[1:]:
        out = code.select(code.cmp("sge", j, code.const(at, "i32", j.shape)), code.const(k, "i32", j.shape), out)
    return out


def _laid(em: Emitter, parts: list[tuple[int, ir.Value]], axis: int, full: tuple[int, ...]) -> Val:
    """Parts whose tensors have one shape at their places of the result; other lanes hold anything."""
    code = em.code
    vals = [em.val(x) for _, x in parts]
    p = vals[0].shape[axis]
    exact = all(at == k * p for k, (at, _) in enumerate(parts))
    if p == full[axis] and exact:
        return vals[0]
    if p == 1 and len(parts) == 1:
        return code.broadcast(vals[0], full)
    vals += [vals[0]] * (padded((len(vals),))[0] - len(vals))
    if exact and len(vals) * p == full[axis]:
        return _merged(em, moves.stack(code, vals, axis), axis)
    joined = moves.stack(code, vals, len(full))  # the part is the fastest axis: joined in registers, moved once
    sides = (math.prod(full[:axis]), full[axis], math.prod(full[axis + 1 :]))
    before, j, after = moves.coordinates(code, sides)
    within = moves.low_bits(code, code.sub(j, _piecewise(em, j, [(at, at) for at, _ in parts])), p)
    part = _piecewise(em, j, [(at, k) for k, (at, _) in enumerate(parts)])
    strides = moves.row_major((sides[0], p, sides[2], len(vals)))
    return code.reshape(moves.pick(em, joined, moves.position(code, [before, within, after, part], strides)), full)


def _mine(em: Emitter, parts: list[tuple[int, ir.Value]], axis: int, full: tuple[int, ...]) -> Val:
    """The lanes of a concatenation that come from some of its parts."""
    code, j = em.code, em.code.arange(full[axis])
    mask: Val | None = None
    for at, x in parts:
        one = code.cmp("ult", code.shift(j, -at), code.const(x.shape[axis], "i32", j.shape))
        mask = one if mask is None else code.op("arith.ori", mask, one)
    if mask is None:
        raise AssertionError("no parts")
    return code.along(mask, axis, full)


# ---- places that are known when the kernel runs ---------------------------------------------------------------------


def _clamped(em: Emitter, start: ir.Value, most: int) -> Val:
    """A traced start between 0 and `most`, as i32."""
    code, info = em.code, ir.DTYPES[start.dtype]
    wide = "i64" if info.bits == 64 else "i32"
    at, limit = em.integer(start, wide), em.code.const(most, wide)
    if info.kind == "u":
        return code.to_int(code.op("arith.minui", at, limit), "i32")
    at = code.op("arith.minsi", code.op("arith.maxsi", at, code.const(0, wide)), limit)
    return code.to_int(at, "i32")


@emits(ir.DynamicSlice)
def _dynamic_slice(em: Emitter, op: ir.DynamicSlice) -> Val:
    v, maps = em.val(op.x), {}
    if (same := _constant(em, op, v)) is not None:
        return same
    for k, (start, m, n) in enumerate(zip(op.starts, op.sizes, op.x.shape, strict=True)):
        if m != n:
            first = _clamped(em, start, n - m)
            maps[k] = lambda j, first=first, p=v.shape[k]: moves.low_bits(
                em.code, em.code.add(j, em.code.splat(first, j.shape)), p
            )
    return moves.move(em, v, padded(op.sizes), maps) if maps else v


@emits(ir.DynamicUpdate)
def _dynamic_update(em: Emitter, op: ir.DynamicUpdate) -> Val:
    code, x, update = em.code, em.val(op.x), em.val(op.update)
    if 0 in op.update.shape:
        return x
    maps, mask = {}, None
    for k, (start, m, n) in enumerate(zip(op.starts, op.update.shape, op.x.shape, strict=True)):
        if m == n:
            continue
        first = _clamped(em, start, n - m)
        behind = lambda j, first=first: code.sub(j, code.splat(first, j.shape))
        maps[k] = lambda j, behind=behind, p=update.shape[k]: moves.low_bits(code, behind(j), p)
        j = code.arange(x.shape[k])
        inside = code.cmp("ult", behind(j), code.const(m, "i32", j.shape))
        mask = code.both(mask, code.along(inside, k, x.shape))
    if mask is None:
        return update
    single = all(update.shape[k] == 1 for k in maps)
    update = code.broadcast(update, x.shape) if single else moves.move(em, update, x.shape, maps)
    return code.select(mask, update, x)


@emits(ir.Gather)
def _gather(em: Emitter, op: ir.Gather) -> Val:
    code, v, axis = em.code, em.val(op.x), op.axis
    if (same := _constant(em, op, v)) is not None:
        return same
    full = padded(op.result.shape)
    p = v.shape[axis]
    if p == 1:
        return code.broadcast(v, full)
    sides = (math.prod(full[:axis]), full[axis], math.prod(full[axis + 1 :]))
    before, _, after = moves.coordinates(code, sides)
    index = code.reshape(em.integer(op.indices), (math.prod(full),))
    index = moves.low_bits(code, index, p)  # lanes beyond the tile hold anything
    at = moves.position(code, [before, index, after], moves.row_major((sides[0], p, sides[2])))
    return code.reshape(moves.pick(em, v, at), full)
