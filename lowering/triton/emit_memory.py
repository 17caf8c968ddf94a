"""Loads and stores of Refs through pointers."""

from __future__ import annotations

import dataclasses

from jtile import ir
from jtile.lowering.triton.emit_basics import code_of
from jtile.lowering.triton.emitter import Buffer, Emitter, emits, memory_elem, padded
from jtile.lowering.triton.ttir import Val

BIG = 2**31  # arrays of more elements than this are addressed by 64 bits


@emits(ir.Load)
def _load(em: Emitter, op: ir.Load) -> Val:
    buf = em.refs[op.ref]
    pointers, mask = addresses(em, buf, op.index, op.checked)
    mask = em.code.both(mask, None if op.mask is None else em.val(op.mask))
    meet(em, buf)
    elem, number = memory_elem(buf.dtype), code_of(op.pad, buf.dtype)
    if mask is None:
        v = em.code.let(f"tt.load {pointers.name} : {pointers.type}", pointers.shape, elem)
    else:
        other = em.code.const(number, elem, pointers.shape)
        right = f"tt.load {pointers.name}, {mask.name}, {other.name} : {pointers.type}"
        v = em.code.let(right, pointers.shape, elem, number)
    meet(em, buf)
    return from_memory(em, v, buf.dtype)


@emits(ir.Store)
def _store(em: Emitter, op: ir.Store) -> None:
    buf = em.refs[op.ref]
    pointers, mask = addresses(em, buf, op.index, op.checked)
    mask = em.code.both(mask, None if op.mask is None else em.val(op.mask))
    value = to_memory(em, em.val(op.value), buf.dtype)
    meet(em, buf)
    operands = [pointers, value] + ([] if mask is None else [mask])
    em.code.do(f"tt.store {', '.join(v.name for v in operands)} : {pointers.type}")
    meet(em, buf)


def meet(em: Emitter, buf: Buffer) -> None:
    """The threads of a block wait for each other where one may touch what another has written."""
    if buf.mutable:
        em.code.do("gpu.barrier")


def from_memory(em: Emitter, v: Val, dtype: str) -> Val:
    if dtype == "bool":
        out = em.code.cmp("ne", v, em.code.const(0, "i8", v.shape))
        return dataclasses.replace(out, fill=None if v.fill is None else bool(v.fill))
    return v


def to_memory(em: Emitter, v: Val, dtype: str) -> Val:
    return em.code.to_int(v, "i8", signed=False) if dtype == "bool" else v


def addresses(em: Emitter, buf: Buffer, index: ir.Index, checked: bool = True) -> tuple[Val, Val | None]:
    """Pointers to the elements of an access, and the mask of those that are its own and inside the array."""
    code = em.code
    shape = ir.index_shape(index)
    full = padded(shape)
    elem = "i64" if _is_big(buf) else "i32"
    offset: Val = code.const(0, elem, full)
    scalar: Val = code.const(0, elem)
    mask, axis = em.valid(shape), 0
    taken: int | None = None
    for d, n, stride in zip(index, buf.shape, buf.strides, strict=True):
        at, own = _positions(em, d)
        place = taken if isinstance(d, ir.Take) and taken is not None else axis
        rank = len(at.shape)
        if isinstance(d, ir.Take):
            taken, axis = place, axis + (rank if place == axis else 0)
        else:
            axis += rank
        if checked:
            mask = code.both(mask, _lay(em, _inside(em, at, n), place, full))
        at = code.to_int(at, elem)
        at = code.scale(at, stride) if isinstance(stride, int) else code.mul(
            at, code.splat(code.to_int(stride, elem), at.shape))  # fmt: skip
        if rank:
            offset = code.add(offset, _lay(em, at, place, full))
        else:
            scalar = code.add(scalar, at)
        del own
    pointer = code.let(
        f"tt.addptr {buf.pointer.name}, {scalar.name} : {buf.pointer.elem}, {elem}", (), buf.pointer.elem
    )
    if not full:
        return pointer, mask
    many = code.splat(pointer, full)
    return code.let(f"tt.addptr {many.name}, {offset.name} : {many.type}, {offset.type}", full, many.elem), mask


def _is_big(buf: Buffer) -> bool:
    n = 1
    for side in buf.shape:
        n = n * side if isinstance(side, int) else BIG
    return n >= BIG


def _positions(em: Emitter, d: ir.Dim) -> tuple[Val, None]:
    """The element numbers of a dimension, as i32: a scalar, a vector, or the tile of a gather."""
    code = em.code
    first = em.integer(ir.dim_value(d))
    if isinstance(d, ir.At | ir.Take):
        return first, None
    n = padded((d.size,))[0]
    stride = d.stride if isinstance(d, ir.Span) else 1
    start = first if isinstance(d, ir.Span) else code.scale(first, d.step)
    return code.add(code.splat(start, (n,)), code.scale(code.arange(n), stride)), None


def _inside(em: Emitter, at: Val, n: int | Val) -> Val:
    """0 <= at < n, as one comparison of unsigned numbers."""
    side = em.code.const(n, at.elem, at.shape) if isinstance(n, int) else em.code.splat(n, at.shape)
    return em.code.cmp("ult", at, side)


def _lay(em: Emitter, v: Val, axis: int, full: tuple[int, ...]) -> Val:
    """A scalar, vector or tile laid over the axes of a tensor, from `axis` on."""
    if not v.shape:
        return em.code.splat(v, full)
    for k in range(len(full)):
        if not axis <= k < axis + len(v.shape) and k < axis:
            v = em.code.expand_dims(v, k)
    while len(v.shape) < len(full):
        v = em.code.expand_dims(v, len(v.shape))
    return em.code.broadcast(v, full)
