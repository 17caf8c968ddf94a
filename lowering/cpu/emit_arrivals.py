"""Arrivals: an atomic addition to a counter of the call, in memory of the host (see ffi/csrc/program.cc)."""

from __future__ import annotations

from jtile import ir

from .emit_debug import HOST
from .emitter import Emitter, emits
from .llvm import Code, Module, Val, i64

COUNTERS_SLOT = 2  # position in struct jtile_host
NUMBER = "jtile_counters"


def emit_number(module: Module, kernel: ir.Kernel) -> None:
    """Emit `int64_t jtile_counters()`, which says how many counters a call has, if the kernel has any."""
    sizes = [size for _, size in ir.counters_of(kernel).values()]
    if sizes:
        Code(module, NUMBER, [], ret="i64", linkage="dso_local").finish(i64(sum(sizes)))


def shared_refs(kernel: ir.Kernel) -> set[ir.Value]:
    """Refs through which programs of a kernel with arrivals or signals exchange data: all that they read and write."""
    ops = list(kernel.body.walk())
    if not kernel.devices and not any(isinstance(op, ir.LastArrival) for op in ops):
        return set()
    reads = {op.ref for op in ops if isinstance(op, ir.Load | ir.Atomic)}
    return reads & {op.ref for op in ops if isinstance(op, ir.Store | ir.Atomic)}


@emits(ir.LastArrival)
def _last_arrival(em: Emitter, op: ir.LastArrival) -> None:
    code = em.code
    index, count = em.scalar(op.index), em.scalar(op.count)
    first, _ = ir.counters_of(em.kernel)[op.counters]
    at = code.add(code.cast("sext", index, "i64"), i64(first))
    base = code.load("ptr", code.gep("ptr", HOST, COUNTERS_SLOT), align=8)
    counter = code.gep("i32", base, at)
    old = code.let("i32", f"atomicrmw add {counter}, i32 1 acq_rel")
    come = code.binary("add", old, Val("i32", "1"))
    # Programs that arrive again and again may come back before the last one has subtracted the arrivals of its round.
    last = code.cmp("icmp", "eq", code.binary("srem", come, count), Val("i32", "0"))
    with code.when(last):
        code.let("i32", f"atomicrmw sub {counter}, {count} monotonic")
    em.env[op.result] = last
