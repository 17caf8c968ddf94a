"""Other devices, in the roles of a block: what `triton/emit_devices.py` does for whole programs.

The function begins with what a program reads of its block of memory, which roles capture, and ends with what a program
does at its end. A role never ends before its time, since others wait for it: behind a wait that has failed it goes on
with whatever is there, and all further waits pass. Asynchronous copies to other devices have a tensor map for each
device, which covers all sets of memory.
"""

from __future__ import annotations

import math
from typing import Any

from jtile import ir

from .. import emit_devices, tma, versions
from ..emit_devices import FAULT, RAISE, SETS, Devices
from ..ttir import Val, bits
from .emitter import BlockEmitter, emits

TURNS = 64  # of a wait, after which it looks at the clock, and whether another program has failed
OWN = -1  # what records call the device itself: TensorMap::kOwn of the launcher
LATE = 2  # what a program adds to its device's fault when its time is over; 1: some device has reported it
SENT = "cp.async.bulk.wait_group 0; mov.b32 $0, 0;"  # copies to arrays are done, not only read from shared memory
SEEN = "fence.proxy.async; mov.b32 $0, 0;"  # copies from arrays see what this thread has seen


class BlockDevices(Devices):
    """Where this device is, and where Refs of other devices are, for the role that is being emitted."""

    em: BlockEmitter

    def __init__(self, em: BlockEmitter):
        self._outside: dict[str, Any] = {}
        self._inside: dict[str, Any] = {}  # what a role has read itself
        super().__init__(em)

    def __getattribute__(self, name: str) -> Any:
        if name in _CAPTURED:
            if name in self._inside:
                return self._inside[name]
            found = self._outside[name]
            use = self.em.use
            return type(found)(map(use, found)) if isinstance(found, tuple | list) else use(found)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CAPTURED:
            self._outside[name] = value
        else:
            super().__setattr__(name, value)

    def _begin(self) -> None:
        em, code, at = self.em, self.em.code, self.layout
        self.here = tuple(self.number(emit_devices.PLACE + 4 * k) for k in range(len(self.axes)))
        self.waits = code.let(f"tt.load {self.own(emit_devices.TIMEOUT, 'i64').name} : !tt.ptr<i64>", (), "i64")
        count = math.prod(self.sizes)
        self.table = [self.entry(code.i32(k)) for k in range(count)] if count <= emit_devices.KEPT else []
        self.program = code.let("tt.get_program_id x : i32", (), "i32")
        epochs = self.own(at.epochs, "i32")
        self.epoch_at = code.let(
            f"tt.addptr {epochs.name}, {self.program.name} : !tt.ptr<i32>, i32", (), "!tt.ptr<i32>"
        )
        for name, value in self._of_call().items():
            setattr(self, name, value)
        for v in em.kernel.shared:
            self.put(v, v, self.here, None)

    def _of_call(self) -> dict[str, Val]:
        """The number of the call, and where its sets of signals and of memory are."""
        at = self.layout
        epoch = self.em.code.let(f"tt.load {self.epoch_at.name} : !tt.ptr<i32>", (), "i32")
        signals = self.set_of(epoch, SETS, at.signals, at.signal_set)
        memory = self.set_of(epoch, at.memory_sets, at.memory, at.memory_set)
        return {"epoch": epoch, "signals": signals, "memory": memory}

    def renew(self) -> None:
        """Read the number of the call once more, in a role that has waited for the kernels in front: where launches
        overlap, the call before this one of the same site may be among them."""
        self._inside = self._of_call()
        for v in self.em.kernel.shared:
            self.put(v, v, self.here, None)

    def leave(self) -> None:
        """Forget, behind a role, what it has read itself."""
        self._inside = {}

    def end(self) -> None:
        if not self.layout.signal_set:  # nothing to clear: nobody has to know the number
            self.em.barrier()
            self.instruction(
                RAISE["add", False], "=r,l,r,~{memory}", (self.address(self.epoch_at), self.em.code.i32(1))
            )
            return
        if self.early:  # all roles have waited by now
            self.epoch = self._of_call()["epoch"]
        super().end()

    @property
    def early(self) -> bool:
        """Whether roles start while kernels in front still run."""
        return any(any(op.early) for op in self.em.kernel.body.ops if isinstance(op, ir.Roles))

    def _clear(self) -> None:
        """Clear the signals of the call after the next one, each program some of them."""
        code, at = self.em.code, self.layout
        later = self.at(self.base, self.set_of(code.shift(self.epoch, 2), SETS, at.signals, at.signal_set), "i32")
        blocks = code.let("tt.get_num_programs x : i32", (), "i32")
        with self.loop(self.program, code.i32(at.signal_set // 4), blocks) as number:
            where = code.let(f"tt.addptr {later.name}, {number.name} : !tt.ptr<i32>, i32", (), "!tt.ptr<i32>")
            code.do(f"tt.store {where.name}, {code.i32(0).name} : !tt.ptr<i32>")

    def checked(self, number: Val, cond: Val, op: ir.Op, fault: str, *numbers: Val) -> Val:
        """The number, or 0 where the condition does not hold, which is reported."""
        code = self.em.code
        with self.branch(code.op("arith.xori", cond, code.const(True, "i1"))):
            self.report(op, fault, *numbers)
        return code.select(cond, number, code.i32(0))

    def wait(self, op: ir.Op, counter: Val, at_least: Val, fault: str, number: Val, wanted: Val, base: Val) -> None:
        code, failed = self.em.code, self._poll(counter, at_least)
        with self.branch(code.cmp("ne", failed, code.i32(0))):
            late = code.op("arith.andi", failed, code.i32(LATE))
            with self.branch(code.cmp("ne", late, code.i32(0))):
                stands = code.sub(self.rmw("add", counter, code.i32(0), "relaxed"), base)
                self.report(op, fault, number, wanted, stands)

    def _poll(self, counter: Val, at_least: Val) -> Val:
        """Poll a counter of this device. One thread does, by atomics, whose results all threads of the role get: that
        they are scalars. The clock is first read after some turns, since a look at it would let the signal be seen
        later. Gives zero, or, where the time is over or another program has failed, the fault."""
        code = self.em.code
        turn, begun, found, after, missed = (Val(code.name(), (), kind) for kind in ("i32", "i64", "i32", "i64", "i32"))
        results, looked = code.name(), code.name()
        zero, never = code.i32(0), code.const(0, "i64")
        heads = f"{turn.name} = {zero.name}, {begun.name} = {never.name}"
        code.do(f"{results}:3 = scf.while ({heads}) : (i32, i64) -> (i32, i64, i32) {{")
        with code.region():
            stands = self.rmw("add", counter, code.i32(0), "acquire")
            missing = code.cmp("slt", code.sub(stands, at_least), code.i32(0))
            look = code.cmp("eq", code.op("arith.andi", turn, code.i32(TURNS - 1)), code.i32(TURNS - 1))
            code.do(f"{looked}:2 = scf.if {look.name} -> (i32, i64) {{")
            with code.region():
                now = self._clock()
                began = code.select(code.cmp("eq", begun, code.const(0, "i64")), now, begun)
                late = code.cmp("uge", code.sub(now, began), self.waits)
                added = code.select(late, code.i32(LATE), code.i32(0))
                flag = self.rmw("or", self.own(FAULT, "i32"), added, "relaxed")
                code.do(f"scf.yield {flag.name}, {began.name} : i32, i64")
            code.do("} else {")
            with code.region():
                code.do(f"scf.yield {code.i32(0).name}, {begun.name} : i32, i64")
            code.do("}")
            kept, began = Val(f"{looked}#0", (), "i32"), Val(f"{looked}#1", (), "i64")
            on = code.both(missing, code.cmp("eq", kept, code.i32(0)))
            failed = code.select(missing, kept, code.i32(0))
            names = f"{turn.name}, {began.name}, {failed.name}"
            code.do(f"scf.condition({on.name}) {names} : i32, i64, i32")
        code.do("} do {")
        with code.region():
            code.do(f"^bb0({found.name}: i32, {after.name}: i64, {missed.name}: i32):")
            following = code.shift(found, 1)
            code.do(f"scf.yield {following.name}, {after.name} : i32, i64")
        code.do("}")
        return Val(f"{results}#2", (), "i32")

    def _clock(self) -> Val:
        asm = '"mov.u64 $0, %globaltimer;" {constraints = "=l", packed_element = 1 : i32, pure = false}'
        return self.em.code.let(f"tt.elementwise_inline_asm {asm} -> i64", (), "i64")

    def raise_(self, op: ir.Signal, counter: Val, value: Val) -> None:
        """Raise a counter, behind what all threads of the role have stored, and the copies that it has started."""
        if op not in self.fenced:
            self.assembly(SENT)
            self.em.barrier()
        self.rmw("add" if op.fn == "add" else "max", counter, value, "release")

    def assembly(self, text: str) -> None:
        kinds = '{constraints = "=r,~{memory}", packed_element = 1 : i32, pure = false}'
        self.em.code.let(f'tt.elementwise_inline_asm "{text}" {kinds} -> i32', (), "i32")

    def maps(
        self, op: ir.AsyncLoad | ir.AsyncStore, axes: list[tma.Axis], elem: str, layout: Any, nan: bool
    ) -> list[tuple[Val, Val | None]]:
        """The tensor maps of a copy to the memory of each device, and whether the copy goes to that device; one map,
        and None, for this device's own memory."""
        code, param = self.em.code, ir.root(op.ref)
        kept = self.em.memo.setdefault("maps", {})
        shape = tuple((a.size, a.stride, a.box) for a in axes)
        width, out = bits(elem) // 8, []
        own = op.ref is param
        at = None if own else self.rank(self.places[op.ref])
        for rank in [OWN] if own else range(math.prod(self.sizes)):
            key = (param, rank, shape, nan, layout)
            if key not in kept and len(kept) == tma.MAPS:
                self.em.refuse(op, f"at most {tma.MAPS} tensor maps, one for each device and shape of box")
            if key not in kept:
                record = {
                    "kind": "tensormap", "device": rank, "offset": self.layout.memory + self.layout.first[param],
                    "dims": [*(a.size for a in reversed(axes)), self.layout.memory_sets],
                    "strides": [*(a.stride * width for a in reversed(axes[:-1])), self.layout.memory_set],
                    "fill": "nan" if nan else "zero",
                }  # fmt: skip
                kept[key] = self.em.param(record, versions.tensordesc((1, *(a.box for a in axes)), elem, layout))
            out.append((kept[key], None if at is None else code.cmp("eq", at, code.i32(rank))))
        return out

    def set(self) -> Val:
        """Which set of memory this call has."""
        return self.em.code.op("arith.andi", self.epoch, self.em.code.i32(self.layout.memory_sets - 1))


_CAPTURED = ("base", "here", "waits", "table", "program", "epoch_at", "epoch", "signals", "memory")


def devices(em: BlockEmitter) -> BlockDevices:
    return em.memo["devices"]


@emits(ir.AxisIndex)
def _axis_index(em: BlockEmitter, op: ir.AxisIndex) -> Val:
    return emit_devices._axis_index(em, op)


@emits(ir.On)
def _on(em: BlockEmitter, op: ir.On) -> Val:
    emit_devices._on(em, op)
    return Val("", (), "i8")  # a Ref is no value; `em.refs` has it


@emits(ir.Signal)
def _signal(em: BlockEmitter, op: ir.Signal) -> None:
    emit_devices._signal(em, op)


@emits(ir.WaitSignal)
def _wait_signal(em: BlockEmitter, op: ir.WaitSignal) -> None:
    """Copies that start behind the wait see what has come."""
    emit_devices._wait_signal(em, op)
    if any(isinstance(o, ir.AsyncLoad) and o.ref.type.role == "symmetric" for o in em.kernel.body.walk()):  # type: ignore[union-attr]
        devices(em).assembly(SEEN)
