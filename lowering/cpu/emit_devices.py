"""Other devices: symmetric memory through a table of addresses, and signals as calls of the host (ffi/csrc/devices.cc).

A call's memory is one block on each device, where symmetric Ref k stands at `offset`; its signals are numbered through.
The devices of a call are numbered row by row over their axes.
"""

from __future__ import annotations

import json
import math
from typing import Any

from jtile import ir
from jtile.ir.devices import SIGNALS

from .emit_debug import HOST, _callback, _program_ids, _site
from .emitter import Emitter, emits
from .llvm import Val, i64
from .values import Buffer, dense_strides

MEMORY_SLOT, PLACE_SLOT, SIGNAL_SLOT, WAIT_SLOT, BARRIER_SLOT, OUTSIDE_SLOT = range(3, 9)  # in struct jtile_host
ALIGN = 64  # alignment, in bytes, of each Ref in the block of memory

Place = tuple[Val, ...]


def layout(kernel: ir.Kernel) -> tuple[dict[ir.Value, int], dict[str, Any]]:
    """Where each symmetric Ref begins (in bytes of memory, or in numbers of signals), and the launch's attributes."""
    first: dict[ir.Value, int] = {}
    memory = signals = 0
    for v in kernel.refs("symmetric"):
        first[v] = memory
        size = -(-math.prod(v.shape) * ir.DTYPES[v.dtype].bits // 8)
        memory += -(-size // ALIGN) * ALIGN
    for v in kernel.refs("signal"):
        first[v] = signals
        signals += math.prod(v.shape)
    names = [[v.name, list(v.shape)] for v in kernel.refs("signal")]
    return first, {"memory": memory, "devices": json.dumps({"axes": kernel.devices, "signals": names})}


class Devices:
    """Where this device is, and where Refs of other devices are."""

    def __init__(self, em: Emitter):
        self.em, self.kernel = em, em.kernel
        self.axes = [axis for axis, _ in em.kernel.devices]
        sizes = [n for _, n in em.kernel.devices]
        self.strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
        self.first, _ = layout(em.kernel)
        self.places: dict[ir.Value, Place] = {}
        code = em.code
        table = code.load("ptr", code.gep("ptr", HOST, PLACE_SLOT), align=8)
        self.here: Place = tuple(code.load("i32", code.gep("i32", table, k), align=4) for k in range(len(sizes)))
        for v in em.kernel.shared:
            self.put(v, v, self.here)

    def rank(self, place: Place) -> Val:
        """The number of a device."""
        code, out = self.em.code, i64(0)
        for at, stride in zip(place, self.strides, strict=True):
            out = code.add(out, code.mul(code.cast("sext", at, "i64"), stride))
        return out if isinstance(out, Val) else i64(out)

    def put(self, v: ir.Value, param: ir.Value, place: Place) -> None:
        """Bind `v` to the Ref of a parameter on the device at a place."""
        self.places[v] = place
        if param.type.role == "signal":  # type: ignore[union-attr]
            return
        code = self.em.code
        table = code.load("ptr", code.gep("ptr", HOST, MEMORY_SLOT), align=8)
        base = code.load("ptr", code.gep("ptr", table, self.rank(place)), align=8)
        ptr = code.gep("i8", base, self.first[param])
        self.em.env[v] = Buffer(ptr, param.shape, dense_strides(param.shape), param.dtype, None, owned=False)

    def number(self, op: ir.Signal | ir.WaitSignal) -> Val:
        """The number of the signal that an op means, among those of a device; -1: there is no such signal."""
        code, param = self.em.code, ir.root(op.ref)
        out: Any = self.first[param]
        outside: list[Val] = []
        for d, n, stride in zip(op.index, param.shape, dense_strides(param.shape), strict=True):
            at = code.cast("sext", self.em.scalar(ir.dim_value(d)), "i64")
            out = code.add(code.mul(at, stride), out)
            outside.append(code.cmp("icmp", "uge", at, i64(n)))
        out = out if isinstance(out, Val) else i64(out)
        for bad in outside:
            out = code.select(bad, i64(-1), out)
        return out

    def call(self, slot: int, op: ir.Op, *facts: Val) -> None:
        """Call the host, which learns where the op stands and in which program."""
        site = _site(self.em, op, kind="assert", message=op.mnemonic)
        operands = ", ".join(map(str, [HOST, site, _program_ids(self.em), *facts]))
        self.em.code.do(f"call void {_callback(self.em, slot).name}({operands})")


def devices(em: Emitter) -> Devices:
    assert em.devices is not None
    return em.devices


@emits(ir.AxisIndex)
def _axis_index(em: Emitter, op: ir.AxisIndex) -> None:
    d = devices(em)
    em.env[op.result] = d.here[d.axes.index(op.axis)]


@emits(ir.On)
def _on(em: Emitter, op: ir.On) -> None:
    d, code = devices(em), em.code
    axis, size = d.axes.index(op.axis), dict(em.kernel.devices)[op.axis]
    at = em.scalar(op.index)
    with code.when(code.cmp("icmp", "uge", at, Val("i32", str(size)))):
        d.call(OUTSIDE_SLOT, op, i64(axis), code.cast("sext", at, "i64"))
    place = d.places[op.ref]
    d.put(op.result, ir.root(op.ref), (*place[:axis], at, *place[axis + 1 :]))


@emits(ir.Signal)
def _signal(em: Emitter, op: ir.Signal) -> None:
    d = devices(em)
    fn = i64(SIGNALS.index(op.fn))
    d.call(SIGNAL_SLOT, op, d.rank(d.places[op.ref]), d.number(op), em.scalar(op.value), fn)


@emits(ir.WaitSignal)
def _wait_signal(em: Emitter, op: ir.WaitSignal) -> None:
    d = devices(em)
    d.call(WAIT_SLOT, op, d.number(op), em.scalar(op.at_least))


@emits(ir.AxisBarrier)
def _axis_barrier(em: Emitter, op: ir.AxisBarrier) -> None:
    d = devices(em)
    d.call(BARRIER_SLOT, op, i64(d.axes.index(op.axis)))


__all__ = ["Devices", "layout"]
