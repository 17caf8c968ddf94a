"""Other devices of a mesh: where this one is, Refs of another, signals, barriers."""

from __future__ import annotations

from jtile import ir
from jtile.trace.lower import Lowering, rule
from jtile.trace.rules.memory import to_index


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


@rule("jtile_post")
def _(c: Lowering, ref, *rest, dims, masked):
    n = len(dims)
    c.b.add(ir.Post(ref, to_index(dims, rest[:n]), rest[n], rest[n + 1] if masked else None))
    return []


@rule("jtile_receive")
def _(c: Lowering, ref, *rest, dims, masked):
    return c.add(ir.Receive(ref, to_index(dims, rest[: len(dims)]), rest[len(dims)] if masked else None))


@rule("jtile_axis_barrier")
def _(c: Lowering, *, axis, size):
    c.devices[axis] = size
    c.b.add(ir.AxisBarrier(axis))
    return []
