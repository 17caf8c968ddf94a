"""Tiles reshaped, transposed and cut in a role: elements stay in their registers, and the layout says where."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jtile import ir

from ..ttir import Val
from .analysis import is_free, unmoved
from .emitter import BlockEmitter, emits
from .layouts import Layout
from .linear import doubled, halved, linear, permuted, registers_along, reshaped


def own(em: BlockEmitter, v: ir.Value) -> Val:
    """A tile in the layout that it lives in."""
    assert em.homes is not None
    return em.tile(v, em.homes[v])


def _as(v: Val, shape: Sequence[int], layout: Layout, name: str) -> Val:
    return dataclasses.replace(v, name=name, shape=tuple(shape), layout=layout, fill=None, number=None)


def _reshape(em: BlockEmitter, v: Val, shape: Sequence[int]) -> Val:
    if tuple(shape) == v.shape:
        return v
    out = _as(v, shape, reshaped(linear(v.layout, v.shape), v.shape, shape), em.code.name())
    em.code.do(f"{out.name} = tt.reshape {v.name} : {v.type} -> {out.type}")
    return out


def _transpose(em: BlockEmitter, v: Val, perm: Sequence[int], layout: Layout | None = None) -> Val:
    shape = [v.shape[p] for p in perm]
    out = _as(v, shape, layout or permuted(linear(v.layout, v.shape), perm), em.code.name())
    order = ", ".join(map(str, perm))
    em.code.do(f"{out.name} = tt.trans {v.name} {{order = array<i32: {order}>}} : {v.type} -> {out.type}")
    return out


@emits(ir.Transpose)
def _emit_transpose(em: BlockEmitter, op: ir.Transpose) -> Val:
    v = own(em, op.x)
    assert em.homes is not None
    home, moved = em.homes[op.result], permuted(linear(v.layout, v.shape), op.perm)
    return _transpose(em, v, op.perm, home if linear(home, op.result.shape) == moved else moved)


@emits(ir.Reshape)
def _emit_reshape(em: BlockEmitter, op: ir.Reshape) -> Val:
    if not op.result.shape:
        em.refuse(op, "no scalar from a tile of one element inside a role: reduce it instead")
    assert em.homes is not None
    made = unmoved(op, em.homes[op.result]) if is_free(op.x) else None  # a free tile is made again for the result
    return _reshape(em, own(em, op.x) if made is None else em.tile(op.x, made), op.shape)


@emits(ir.Slice)
def _emit_slice(em: BlockEmitter, op: ir.Slice) -> Val:
    """A slice of a size that is a power of two and at a multiple of it: bits of the axis that are registers' bits."""
    v = own(em, op.x)
    assert em.homes is not None
    for axis, (first, n) in enumerate(zip(op.starts, op.result.shape, strict=True)):
        if n == v.shape[axis]:
            continue
        if op.strides[axis] != 1 or first % n:
            em.refuse(op, f"slices of tiles at multiples of their size, got {n} elements from {first} on by steps of "
                          f"{op.strides[axis]}: put the tile in shared memory and slice the buffer")  # fmt: skip
        v = _part(em, v, axis, n, first // n)
    home = em.homes[op.result]
    return em.code.convert(v, home)  # this costs nothing where both layouts are the same by two names


def _part(em: BlockEmitter, v: Val, axis: int, n: int, which: int) -> Val:
    """Part number `which` of an axis in parts of n."""
    count = v.shape[axis] // n
    wide = (*v.shape[:axis], count, n, *v.shape[axis + 1 :])
    if not _apart(v, axis, n):
        v = em.code.convert(v, registers_along(v.shape, axis, em.warps))
    v = _reshape(em, v, wide)
    rank = len(wide)
    v = _transpose(em, v, [*(k for k in range(rank) if k != axis), axis])
    while count > 1:
        count //= 2
        if count > 1:
            v = _reshape(em, v, (*v.shape[:-1], count, 2))
        v = _halves(em, v)[which & 1]
        which >>= 1
    return v


def _apart(v: Val, axis: int, n: int) -> bool:
    """Whether the parts of n elements of an axis lie in registers of their own."""
    h = linear(v.layout, v.shape)
    return not any(b[axis] >= n for b in (*h.lane, *h.warp))


def _halves(em: BlockEmitter, v: Val) -> list[Val]:
    layout = halved(linear(v.layout, v.shape))
    assert layout is not None
    name = em.code.name()
    out = [_as(v, v.shape[:-1], layout, f"{name}#{k}") for k in range(2)]
    em.code.do(f"{name}:2 = tt.split {v.name} : {v.type} -> {out[0].type}")
    return out


@emits(ir.Concat)
def _emit_concat(em: BlockEmitter, op: ir.Concat) -> Val:
    """A concatenation of 2, 4, 8 ... tiles of one shape, each of which keeps registers of its own."""
    first, count, axis = op.xs[0], len(op.xs), op.axis
    if count & (count - 1) or any(x.shape != first.shape for x in op.xs):
        em.refuse(op, "concatenations of 2, 4, 8 ... tiles of one shape inside a role: go through shared memory")
    assert em.homes is not None
    parts = [em.tile(x, em.homes[first]) for x in op.xs]
    rank, steps = len(first.shape), 0
    while len(parts) > 1:  # the highest bit of a part's number is the first of the new axes
        half = len(parts) // 2
        parts = [_join(em, a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
        steps += 1
    v = _transpose(em, parts[0], [*range(axis), *range(rank, rank + steps), *range(axis, rank)])
    return em.code.convert(_reshape(em, v, op.result.shape), em.homes[op.result])


def _join(em: BlockEmitter, a: Val, b: Val) -> Val:
    out = _as(a, (*a.shape, 2), doubled(linear(a.layout, a.shape)), em.code.name())
    em.code.do(f"{out.name} = tt.join {a.name}, {b.name} : {a.type} -> {out.type}")
    return out
