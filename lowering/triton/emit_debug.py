"""Print and assert: records in a log, an extra result of the call that the launcher reads after the kernel.

Neither the printf nor the trap of a device is used: the one has a buffer and a format of its own, the other ends the
CUDA context. The log starts zeroed (`record.zeroed`). Its layout, little-endian (`ffi/csrc` reads it):

    0   u64 used      bytes of records that programs asked for; more than there is room for where records were dropped
    8   u64 failure   0, or `FIRST` - (program << 16 | site) of the failed assertion that is lowest by program and site
    16  u64 dropped   records that found no room
    24  u64 zero
    32  records, one behind the other, as programs asked for room:
        +0   i32 site      position in the list of sites
        +4   i32 size      bytes of the record; a multiple of 8. 0 ends the list
        +8   i64 program   its place in the grid, the last axis fastest
        +16  the arguments, each from a multiple of 8: dense, row-major, bools and 4-bit numbers one a byte

A record is written whole or not at all; the records of one program lie in its order. `record.sites` is
`{"buffer": number of the array, "bytes": its size, "grid": [sides], "list": [sites]}`, a site as on the CPU:
`{"kind": "print" | "assert", "format" | "message": ..., "where": "file:line", "args": [{"dtype", "shape"}]}`, with
`axes` and `lanes` where the kernel has more than three axes of its own, or is under vmap.
"""

from __future__ import annotations

import math

from jtile import ir

from .emit_basics import emit_size, static_programs
from .emitter import Emitter, emits, padded
from .lanes import fold
from .record import expression
from .ttir import Val

HEADER, HEAD = 32, 16  # bytes of the header of the log, and of the header of a record
USED, FAILURE, DROPPED = 0, 8, 16
FIRST = 2**63 - 1  # failures count down from here, so that the largest is the lowest program and 0 is none
LOG = 1 << 20  # bytes of a log whose number of records is not known, or large


@emits(ir.Print)
def _print(em: Emitter, op: ir.Print) -> None:
    code = em.code
    args = [{"dtype": a.dtype, "shape": list(a.shape)} for a in op.args]
    site = _site(em, op, kind="print", format=op.format, args=args)
    places, size = _places(op)
    log = _log(em)
    at = _count(em, USED, code.const(size, "i64"))
    fits = code.cmp("ule", at, code.const(_log_size(em.kernel) - HEADER - size, "i64"))
    _count(em, DROPPED, code.const(1, "i64"), code.op("arith.xori", fits, code.const(1, "i1")))
    record = _step(em, log, code.shift(at, HEADER))
    _put(em, record, 0, code.const(size << 32 | site, "i64"), fits)
    _put(em, record, 8, _program(em), fits)
    for a, place in zip(op.args, places, strict=True):
        _put(em, record, place, em.val(a), fits, a.shape)


@emits(ir.Assert)
def _assert(em: Emitter, op: ir.Assert) -> None:
    code = em.code
    site = _site(em, op, kind="assert", message=op.message, args=[])
    _log(em)
    cond = fold(code, em.filled(op.cond, True), "arith.andi") if op.cond.shape else em.val(op.cond)
    key = code.sub(code.const(FIRST - site, "i64"), code.scale(_program(em), 1 << 16))
    _count(em, FAILURE, key, code.op("arith.xori", cond, code.const(1, "i1")), "umax")


def _site(em: Emitter, op: ir.Op, **facts) -> int:
    """Note a print or assert as a site of the kernel; returns the site's number."""
    lanes = em.kernel.lanes
    axes = max(3, len(em.kernel.grid) - lanes)
    shape = {} if (axes, lanes) == (3, 0) else {"axes": axes, "lanes": lanes}
    em.sites.append({**facts, **shape, "where": str(op.loc)})
    return len(em.sites) - 1


def _log(em: Emitter) -> Val:
    """The address of the log, which the first site makes a result of the call."""
    if em.log is None:
        size = _log_size(em.kernel)
        em.log = em.extra_result(size, "i8")
        numbers = {name: k for k, name in enumerate(em.symbols)}
        grid = [expression(n, numbers) for n in em.kernel.grid]
        buffer = em.record.params[-1]["buffer"]
        em.record.sites = {"buffer": buffer, "bytes": size, "grid": grid, "list": em.sites}
        em.record.zeroed.append(buffer)
    return em.log


def _log_size(kernel: ir.Kernel) -> int:
    """Bytes of the log: room for every record where their number is known and small."""
    sizes = [_places(op)[1] for op in kernel.body.walk() if isinstance(op, ir.Print)]
    records, programs = _bytes_of_a_program(kernel.body), static_programs(kernel)
    if records is None or programs is None:
        return HEADER + max(LOG, *sizes)
    return HEADER + min(records * programs, max([LOG, *sizes]))


def _bytes_of_a_program(block: ir.Block) -> int | None:
    """The most that one run of a block prints; None where a loop prints."""
    total = 0
    for op in block.ops:
        if isinstance(op, ir.Print):
            total += _places(op)[1]
        for inner in op.blocks():
            n = _bytes_of_a_program(inner)
            if n is None or (n and not isinstance(op, ir.If)):
                return None
            total += n
    return total


def _places(op: ir.Print) -> tuple[list[int], int]:
    """Where each argument lies in its record, and the bytes of the record."""
    places, at = [], HEAD
    for a in op.args:
        places.append(at)
        at += -(-math.prod(a.shape) * max(a.type.info.bits, 8) // 64) * 8
    return places, at


def _program(em: Emitter) -> Val:
    """The place of this program in the grid, as i64."""
    code, programs = em.code, static_programs(em.kernel)
    wide = "i32" if programs is not None and programs < 2**31 else "i64"
    at = code.const(0, wide)
    for axis, n in enumerate(em.kernel.grid):
        at = code.mul(at, code.to_int(emit_size(em, n), wide)) if axis else at
        at = code.add(at, code.to_int(em.program[axis], wide))
    return code.to_int(at, "i64")


def _count(em: Emitter, place: int, value: Val, mask: Val | None = None, fn: str = "add") -> Val:
    """Change a number of the log's header atomically; returns the old number."""
    code = em.code
    pointer = code.bitcast(_step(em, _log(em), code.const(place, "i64")), "!tt.ptr<i64>")
    mask = mask or code.const(1, "i1")
    names = ", ".join(v.name for v in (pointer, value, mask))
    return code.let(f"tt.atomic_rmw {fn}, relaxed, gpu, {names} : ({pointer.type}, i64, i1) -> i64", (), "i64")


def _step(em: Emitter, pointer: Val, offset: Val) -> Val:
    """A scalar pointer, moved by elements."""
    right = f"tt.addptr {pointer.name}, {offset.name} : {pointer.elem}, {offset.elem}"
    return em.code.let(right, (), pointer.elem)


def _put(em: Emitter, record: Val, place: int, value: Val, mask: Val, shape: tuple[int, ...] = ()) -> None:
    """Write a tile densely into a record."""
    code = em.code
    if 0 in shape:
        return
    value = code.to_int(value, "i8", signed=False) if value.elem == "i1" else value
    pointer = code.bitcast(_step(em, record, code.const(place, "i64")), f"!tt.ptr<{value.elem}>")
    if shape:
        full, offset = padded(shape), code.const(0, "i32", padded(shape))
        for axis in range(len(shape)):
            offset = code.add(offset, code.scale(em.iota(shape, axis), math.prod(shape[axis + 1 :])))
        many = code.splat(pointer, full)
        pointer = code.let(f"tt.addptr {many.name}, {offset.name} : {many.type}, {offset.type}", full, many.elem)
        inside, mask = em.valid(shape), code.splat(mask, full)
        mask = mask if inside is None else code.op("arith.andi", inside, mask)
    code.do(f"tt.store {pointer.name}, {value.name}, {mask.name} : {pointer.type}")
