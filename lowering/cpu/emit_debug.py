"""Print and assert: calls back into the host through the `jtile_host` table (see ffi/csrc)."""

from __future__ import annotations

from jtile import ir

from .emitter import Emitter, emits
from .evaluate import Point
from .llvm import Val, i64
from .nest import emit_nest

HOST = Val("ptr", "%host")
PRINT_SLOT, FAIL_SLOT = 0, 1  # positions in struct jtile_host


def _site(em: Emitter, op: ir.Op, **facts) -> Val:
    axes, lanes = _axes(em)
    shape = {} if (axes, lanes) == (3, 0) else {"axes": axes, "lanes": lanes}
    em.sites.append({**facts, **shape, "where": str(op.loc)})
    return i64(len(em.sites) - 1)


def _axes(em: Emitter) -> tuple[int, int]:
    """How many program ids the host is shown: the kernel's own (at least three), and those that stand for vmaps."""
    lanes = em.kernel.lanes
    return max(3, len(em.kernel.grid) - lanes), lanes


def _program_ids(em: Emitter) -> Val:
    """The program ids in memory: the kernel's own, then those of vmaps, the outer one first."""
    axes, lanes = _axes(em)
    slot = em.code.var("i64", count=axes + lanes)
    for place, k in enumerate((*range(lanes, lanes + axes), *range(lanes))):
        em.code.store(em.program.get(k, i64(0)), em.code.gep("i64", slot, place))
    return slot


def _callback(em: Emitter, slot: int) -> Val:
    return em.code.load("ptr", em.code.gep("ptr", HOST, slot), align=8)


@emits(ir.Print)
def _print(em: Emitter, op: ir.Print) -> None:
    code = em.code
    args = [{"dtype": a.dtype, "shape": list(a.shape)} for a in op.args]
    site = _site(em, op, kind="print", format=op.format, args=args)
    table = code.var("ptr", count=max(len(op.args), 1))
    shown = []
    for k, a in enumerate(op.args):
        shown.append(em.copy(a, em.new_buffer(a.shape, a.dtype)))
        code.store(shown[-1].ptr, code.gep("ptr", table, k))
    for buf in shown:  # the call below reads all of these buffers
        em.arena.touch(buf.alloc)
    code.do(f"call void {_callback(em, PRINT_SLOT).name}({HOST}, {site}, {_program_ids(em)}, {table})")


@emits(ir.Assert)
def _assert(em: Emitter, op: ir.Assert) -> None:
    code = em.code
    site = _site(em, op, kind="assert", message=op.message, args=[])
    bad = code.var("i8", Val("i8", "0"))
    em.prepare([op.cond], ())

    def body(p: Point) -> None:
        ok = code.cast("zext", p.at(op.cond, p.ix), "i8")
        wrong = code.binary("xor", ok, Val("i8", "1"))
        code.store(code.binary("or", code.load("i8", bad), wrong), bad)

    emit_nest(
        em, op.cond.shape, 8, body, scalar=True, bounds={0: (i64(0), i64(op.cond.shape[0]))} if op.cond.shape else None
    )
    with code.when(code.cmp("icmp", "ne", code.load("i8", bad), Val("i8", "0"))):
        code.do(f"call void {_callback(em, FAIL_SLOT).name}({HOST}, {site}, {_program_ids(em)})")
