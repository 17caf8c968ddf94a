"""Other devices of a mesh: where this one is, Refs of another, signals, barriers."""

from __future__ import annotations

from jtile import ir
from jtile.trace.lower import Lowering, rule


@rule("jtile_axis_index")
def _(c: Lowering, *, axis, size):
    c.devices[axis] = size
    return c.add(ir.AxisIndex(axis))


@rule("jtile_on")
def _(c: Lowering, ref, index, *, axis, size):
    c.devices[axis] = size
    return c.b.value(ir.On(ref, axis, index), ref.name)


@rule("jtile_signal")
def _(c: Lowering, ref, *rest, fn):
    *at, value = rest
    c.b.add(ir.Signal(fn, ref, tuple(map(ir.At, at)), value))
    return []


@rule("jtile_wait_signal")
def _(c: Lowering, ref, *rest):
    *at, at_least = rest
    c.b.add(ir.WaitSignal(ref, tuple(map(ir.At, at)), at_least))
    return []


@rule("jtile_axis_barrier")
def _(c: Lowering, *, axis, size):
    c.devices[axis] = size
    c.b.add(ir.AxisBarrier(axis))
    return []
