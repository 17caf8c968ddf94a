"""Prefetches: one thread asks the memory system for a run of bytes, which then lies in the cache that all
multiprocessors share (L2). Nobody waits for it, and no register or shared memory takes it."""

from __future__ import annotations

from jtile import ir

from .addresses import Line, first_element, lines
from .emitter import Buffer, Emitter, emits, memory_elem
from .ttir import Val, bits

PIECE = 16 << 10  # bytes that one instruction asks for, at most
MOST = 64  # instructions of a prefetch, at most: rows that are not neighbours take one each
FIRST = "mov.u32 %jt, %tid.x; setp.eq.u32 %jp, %jt, 0;"  # one thread of the block
ANY = "elect.sync _|%jp, 0xffffffff;"  # one thread of each warp


@emits(ir.Prefetch)
def _prefetch(em: Emitter, op: ir.Prefetch) -> None:
    prefetch(em, op, FIRST)


def prefetch(em: Emitter, op: ir.Prefetch, choose: str) -> None:
    """Emit a prefetch by the thread that `choose` finds. Nothing where there is no such instruction, or where it would
    take many: it only saves time."""
    code, buf = em.code, em.refs[op.ref]
    static = all(isinstance(n, int) for n in (*buf.shape, *buf.strides))
    if not em.features.tma or not static or any(isinstance(d, ir.Take) for d in op.index):
        return
    found, width = lines(em, buf, op.index), bits(memory_elem(buf.dtype)) // 8
    run, rows = _runs(found)
    pieces = [
        (row * width + at, min(PIECE, run * width - at))
        for row in rows
        for at in range(0, run * width // 16 * 16, PIECE)
    ]
    if not width or not 0 < len(pieces) <= MOST:
        return
    base, inside = _begin(em, buf, found, width)
    go = code.i32(1) if inside is None else code.select(inside, code.i32(1), code.i32(0))
    asks = [
        f"add.s64 %ja, $1, {at}; and.b64 %ja, %ja, -16; @%jp cp.async.bulk.prefetch.L2.global [%ja], {size // 16 * 16};"
        for at, size in pieces
    ]
    text = " ".join([
        "{ .reg .pred %jp, %jq; .reg .b32 %jt; .reg .b64 %ja;", choose,
        "setp.ne.b32 %jq, $2, 0; and.pred %jp, %jp, %jq;", *asks, "mov.b32 $0, 0; }",
    ])  # fmt: skip
    kinds = '{constraints = "=r,l,r", packed_element = 1 : i32, pure = false}'
    code.let(f'tt.elementwise_inline_asm "{text}" {kinds} {base.name}, {go.name} : i64, i32 -> i32', (), "i32")


def _runs(found: list[Line]) -> tuple[int, list[int]]:
    """How many elements of a tile lie one behind the other, and where such runs begin."""
    run, rows = 1, [0]
    for line in reversed(found):
        size, stride = line.size or (1 if line.size is None else 0), int(line.stride)  # type: ignore[arg-type]
        if rows == [0] and stride == run and line.step == 1:
            run *= size
        elif len(rows) * size <= MOST:
            rows = [row + k * stride * line.step for row in rows for k in range(size)]
        else:
            return 0, []
    return run, rows


def _begin(em: Emitter, buf: Buffer, found: list[Line], width: int) -> tuple[Val, Val | None]:
    """The address of a tile, and whether it is wholly inside of the array; None where that is known."""
    code, at, inside = em.code, em.code.const(0, "i64"), None
    for line in found:
        start, last = code.to_int(first_element(em, line, True), "i64", signed=line.signed), int(line.side) - 1  # type: ignore[arg-type]
        near = line.known
        if near is None or near.lo < 0 or near.hi * line.scale + line.extent > last:
            inside = code.both(inside, code.cmp("sge", start, code.const(0, "i64")))
            inside = code.both(inside, code.cmp("sle", start, code.const(last - line.extent, "i64")))
        at = code.add(at, code.scale(start, int(line.stride) * width))  # type: ignore[arg-type]
    return code.add(code.cast("tt.ptr_to_int", buf.pointer, "i64"), at), inside
