"""Ops that put tiles together: each part is written to its place in one buffer."""

from __future__ import annotations

import dataclasses

from jtile import ir

from . import access, pairs, plan
from .convert import memory_type, register_type
from .elementwise import emit_elementwise
from .emitter import Emitter, emits
from .evaluate import clamped_start
from .llvm import Val, i64
from .nest import emit_nest
from .values import LAZY, Buffer


def part(em: Emitter, buf: Buffer, starts: list[Val | int], shape, steps=None) -> Buffer:
    """A box inside a buffer."""
    base = i64(0)
    for s, stride in zip(starts, buf.strides, strict=True):
        base = em.code.add(base, em.code.mul(s, stride))
    ptr = em.code.gep(memory_type(buf.dtype), buf.ptr, base)
    steps = steps or (1,) * len(shape)
    strides = tuple(s * k for s, k in zip(buf.strides, steps, strict=True))
    return Buffer(ptr, tuple(shape), strides, buf.dtype, buf.alloc, owned=False)


@emits(ir.Concat)
def _concat(em: Emitter, op: ir.Concat) -> None:
    pair = pairs.parts(op)
    if pair is not None and pairs.stored_next(em, op) is not None:
        em.env[op.result] = LAZY  # the operands' buffers stay as they are until the store
        return
    out = em.new_buffer(op.result.shape, op.result.dtype)
    if pair is not None:
        pairs.emit(em, pair, out, {})
        em.set_buffer(op.result, out)
        return
    at = 0
    for x in op.xs:
        starts = [0] * len(out.shape)
        starts[op.axis] = at
        em.copy(x, part(em, out, starts, x.shape))
        at += x.shape[op.axis]
    em.set_buffer(op.result, out)


@emits(ir.Pad)
def _pad(em: Emitter, op: ir.Pad) -> None:
    out = em.new_buffer(op.result.shape, op.result.dtype)
    value = em.scalar(op.value)

    def fill(p) -> None:
        access.write(em.code, em.isa, out, p.ix, value, p.lanes)

    emit_nest(em, out.shape, plan.register_bits(out.dtype), fill)
    em.copy(op.x, part(em, out, list(op.low), op.x.shape, [k + 1 for k in op.interior]))
    em.set_buffer(op.result, out)


@emits(ir.DynamicUpdate)
def _dynamic_update(em: Emitter, op: ir.DynamicUpdate) -> None:
    if op.x.type.rank == 0:
        em.env[op.result] = em.scalar(op.update)
        return
    update = em.materialise(op.update)
    if isinstance(em.rep(op.x), Buffer) and op.x is not op.update and em.overwritable(op.x, op.result):
        out = em.rep(op.x)
    else:
        out = em.copy(op.x, em.result_buffer(op.result))
    starts = [clamped_start(em, s, k, n) for s, k, n in zip(op.starts, op.update.shape, op.x.shape, strict=True)]
    from .emit_control import copy_buffer

    copy_buffer(em, update, part(em, out, starts, op.update.shape))
    em.set_buffer(op.result, out)


@emits(ir.Scatter)
def _scatter(em: Emitter, op: ir.Scatter) -> None:
    """Apply the updates one by one, in their order, so that updates of one element meet in program order."""
    code = em.code
    em.materialise(op.indices)
    em.materialise(op.updates)
    if isinstance(em.rep(op.x), Buffer) and op.x not in (op.indices, op.updates) and em.overwritable(op.x, op.result):
        out = em.rep(op.x)
    else:
        out = em.copy(op.x, em.result_buffer(op.result))
    em.arena.touch(out.alloc)

    def body(p) -> None:
        at = access.to_i64(code, p.at(op.indices, p.ix), op.indices.dtype)
        value = p.at(op.updates, p.ix)
        with code.when(code.cmp("icmp", "ult", at, i64(op.x.shape[0]))):
            slot = dataclasses.replace(out, ptr=code.gep(memory_type(out.dtype), out.ptr, at), shape=(), strides=())
            if op.fn != "set":
                old = access.read(code, em.isa, slot, (), p.lanes)
                value = combine_scalars(em, op.fn, old, value, op.x.dtype)
            access.write(code, em.isa, slot, (), value, p.lanes)

    emit_nest(em, op.updates.shape, 32, body, scalar=True)
    em.set_buffer(op.result, out)


def combine_scalars(em: Emitter, fn: str, a: Val, b: Val, dtype: str) -> Val:
    if ir.DTYPES[dtype].kind == "b":
        return em.code.binary({"add": "or", "max": "or", "mul": "and", "min": "and"}[fn], a, b)
    return emit_elementwise(em.code, em.isa, fn, [a, b], dtype)


@emits(ir.ProgramId)
def _program_id(em: Emitter, op: ir.ProgramId) -> None:
    pid = em.program.get(op.axis, i64(0))
    em.env[op.result] = Val("i32", pid.name) if pid.name.isdigit() else em.code.cast("trunc", pid, "i32")


@emits(ir.NumPrograms)
def _num_programs(em: Emitter, op: ir.NumPrograms) -> None:
    grid = em.kernel.grid
    side = grid[op.axis] if op.axis < len(grid) else 1
    if isinstance(side, ir.Extent):
        em.env[op.result] = em.code.cast("trunc", em.sizes[side], "i32")
    else:
        em.env[op.result] = Val("i32", str(side))


@emits(ir.SizeOf)
def _size_of(em: Emitter, op: ir.SizeOf) -> None:
    em.env[op.result] = em.code.cast("trunc", em.sizes[op.size], register_type(op.dtype, 1))
