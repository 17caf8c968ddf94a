"""Arrivals: an atomic addition to a counter in memory of the launcher, which lies at zero between calls.

All threads of the block, or of the role, have stored before one of them adds (a barrier), and its addition releases
their stores to the device, since it knows of them; it acquires, and another barrier passes on what it has learned: the
atomic gives its scalar to all threads through shared memory. Ordinary loads behind it then see what others stored: the
acquire has thrown away the lines that the first-level cache holds.
"""

from __future__ import annotations

from jtile import ir

from .emitter import Emitter, emits
from .ttir import Val


@emits(ir.LastArrival)
def _last_arrival(em: Emitter, op: ir.LastArrival) -> Val:
    code = em.code
    first, _ = ir.counters_of(em.kernel)[op.counters]
    assert em.counters is not None
    base, at = em.use(em.counters), code.shift(em.integer(op.index), first)
    counter = code.let(f"tt.addptr {base.name}, {at.name} : {base.elem}, i32", (), base.elem)
    count = em.integer(op.count)
    em.barrier()
    come = code.shift(_add(em, counter, code.i32(1), "acq_rel", code.const(True, "i1")), 1)
    em.barrier()
    # Programs that arrive again and again may come back before the last one has subtracted the arrivals of its round.
    last = code.cmp("eq", code.op("arith.remsi", come, count), code.i32(0))
    _add(em, counter, code.op("arith.subi", code.i32(0), count), "relaxed", last)
    return last


def _add(em: Emitter, counter: Val, value: Val, order: str, mask: Val) -> Val:
    names = ", ".join(v.name for v in (counter, value, mask))
    kinds = f"({counter.elem}, i32, i1) -> i32"
    return em.code.let(f"tt.atomic_rmw add, {order}, gpu, {names} : {kinds}", (), "i32")
