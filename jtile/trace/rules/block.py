"""The block level: one card for each primitive; markers of roles."""

from __future__ import annotations

from jtile import ir
from jtile.trace.lower import Lowering, rule
from jtile.trace.rules.memory import to_index


@rule("jtile_alloc_shared")
def _(c: Lowering, *, shape, dtype, slots):
    return c.add(ir.AllocShared(shape, dtype, slots))


@rule("jtile_alloc_barriers")
def _(c: Lowering, *, count, arrivals):
    return c.add(ir.AllocBarriers(count, arrivals))


@rule("jtile_slot")
def _(c: Lowering, buffer, at):
    return c.add(ir.Slot(buffer, at))


@rule("jtile_transpose_shared")
def _(c: Lowering, buffer):
    return c.add(ir.TransposeShared(buffer))


@rule("jtile_slice_shared")
def _(c: Lowering, buffer, *, starts, sizes):
    return c.add(ir.SliceShared(buffer, starts, sizes))


@rule("jtile_load_shared")
def _(c: Lowering, buffer, **_):
    return c.add(ir.LoadShared(buffer))


@rule("jtile_store_shared")
def _(c: Lowering, buffer, value):
    c.b.add(ir.StoreShared(buffer, value))
    return []


@rule("jtile_fence_shared")
def _(c: Lowering):
    c.b.add(ir.FenceShared())
    return []


@rule("jtile_role_barrier")
def _(c: Lowering):
    c.b.add(ir.RoleBarrier())
    return []


@rule("jtile_kernels_wait")
def _(c: Lowering, *, hold):
    c.b.add(ir.KernelsWait(hold))
    return []


@rule("jtile_expect")
def _(c: Lowering, barrier, at, *when, bytes):
    c.b.add(ir.Expect(barrier, at, bytes, *when))
    return []


@rule("jtile_arrive")
def _(c: Lowering, barrier, at, *when, count):
    c.b.add(ir.Arrive(barrier, at, count, *when))
    return []


@rule("jtile_wait")
def _(c: Lowering, barrier, at, parity, *when):
    c.b.add(ir.Wait(barrier, at, parity, *when))
    return []


@rule("jtile_async_load")
def _(c: Lowering, ref, *rest, dims, pad, evict):
    n = len(dims)
    buffer, barrier, at, *when = rest[n:]
    index = to_index(dims, rest[:n])
    c.b.add(ir.AsyncLoad(ref, index, buffer, barrier, at, pad, when=when[0] if when else None, evict=evict))
    return []


@rule("jtile_prefetch")
def _(c: Lowering, ref, *rest, dims):
    n = len(dims)
    buffer, *when = rest[n:]
    c.b.add(ir.Prefetch(ref, to_index(dims, rest[:n]), buffer, *when))
    return []


@rule("jtile_async_store")
def _(c: Lowering, ref, *rest, dims, fn):
    c.b.add(ir.AsyncStore(ref, to_index(dims, rest[: len(dims)]), rest[-1], fn))
    return []


@rule("jtile_store_wait")
def _(c: Lowering, *, pending):
    c.b.add(ir.StoreWait(pending))
    return []


@rule("jtile_dot_async")
def _(c: Lowering, a, b, *rest, has, fast, **_):
    given = iter(rest)
    acc, keep, places = (next(given) if there else None for there in has)
    return c.add(ir.DotAsync(a, b, acc, keep, fast, places))


@rule("jtile_dot_wait")
def _(c: Lowering, *values, pending):
    return c.b.add(ir.DotWait(values, pending)).results


@rule("jtile_clock")
def _(c: Lowering):
    return c.add(ir.Clock())


@rule("jtile_role_begin")
def _(c: Lowering, *memory, name, warps, registers, early, names):
    for v, known in zip(memory, names, strict=True):
        v.name = v.name or known
    c.roles.begin(name, warps, registers, early)
    return []


@rule("jtile_role_end")
def _(c: Lowering):
    c.roles.end()
    return []
