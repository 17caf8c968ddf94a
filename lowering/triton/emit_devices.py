"""Other devices, on NVIDIA's GPUs: symmetric memory and signals at addresses of this device and of its peers.

A call site has one block of memory on each device, which peers reach; the kernel gets the address of its own. All of
it stays where it is from call to call, so that a command buffer can hold the launch. Bytes of the block, and who writes
them (`ffi/csrc/gpu_devices.cc` makes the block, and writes what is the host's):

    0    i32 fault     not zero: a call has failed. Every device sets it on all, and programs that find it end; one
                       that waits for what is posted sets its own, and programs go on, so that they post to others
    4    i32 claimed   not zero: a program of this device has reported a fault
    16   i64 timeout   nanoseconds that a program waits                                          (the host's)
    24   i64 report    address of host memory for the report of a fault: seven i32               (the host's)
    32   i32 place     of this device along each axis                                            (the host's)
    ..   i64 table     for each device of the group how far its block is from this one, / 256    (the host's)
    ..   i32 epochs    for each program the calls in which it has ended: the number of the call at hand
    ..   i32 barriers  for each axis with barriers and each program: arrivals, and rounds begun here; never cleared
    ..   i32 signals   four sets
    ..   memory        two sets; four, where programs hand over elements (`jt.post`)

Call c has signals of set c % 4, and clears those of set (c + 2) % 4. No peer sends any of these: it would be in call
c + 2, and nobody is two calls ahead of another. So no program has to know which of them ends last, and a call ends
without atomics. Memory takes turns likewise; only that to which elements are posted has to be cleared.

Signals of which nothing but arithmetic stands between share one fence: each fence waits until what was stored before
has come to where it goes, the signal in front of it too.

A report says: what went wrong (one of `FAULTS`, written last), the site, the program's place in the grid, and three
numbers. Stores of all threads come before a signal: a barrier, then one thread's fence of system scope and atomic. One
thread polls where a program waits, with an acquire of system scope, and passes on by a barrier what it saw.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jtile import ir
from jtile.passes.intervals import Interval, Intervals, walk

from .emit_debug import _program
from .emitter import Buffer, Emitter, emits, memory_elem
from .ttir import Val

ALIGN = 256  # bytes: alignment of the block and of each Ref, and the unit of the table
FAULT, CLAIMED, TIMEOUT, REPORT, PLACE = 0, 4, 16, 24, 32
# A report begins with the index of its fault here.
FAULTS = ("", "wait", "barrier", "device", "signal", "value", "post")
CLEARED = 1024  # signals that a program clears with one store
SETS = 4  # sets of signals, and of memory where elements are posted
KEPT = 4  # devices up to which a program has the whole table in registers from its beginning

# One thread polls. $0 is 0 where the counter at $1 has come to $2, 1 where $4 ns have passed, 2 where the flag at $3
# says that a device has failed before; all threads get the same. Differences are compared, since counters wrap around.
# The flag and the clock are looked at once in 64 turns: each look would let the signal itself be seen later.
_POLL = """
{ .reg .pred %jp, %jq; .reg .b32 %js, %jx, %jf, %jk; .reg .b64 %jb, %jn;
mov.b32 %js, 0; mov.b32 %jk, 0; mov.b64 %jb, 0; mov.u32 %jx, %tid.x; setp.ne.u32 %jq, %jx, 0; @%jq bra JT_JOIN;
JT_POLL: ld.acquire.sys.global.b32 %jx, [$1]; sub.s32 %jx, %jx, $2; setp.ge.s32 %jp, %jx, 0; @%jp bra JT_JOIN;
add.u32 %jk, %jk, 1; and.b32 %jf, %jk, 63; setp.ne.u32 %jp, %jf, 0; @%jp bra JT_POLL;
ld.relaxed.sys.global.b32 %jf, [$3]; setp.ne.u32 %jp, %jf, 0; @%jp mov.b32 %js, 2; @%jp bra JT_JOIN;
mov.u64 %jn, %globaltimer; setp.eq.u64 %jp, %jb, 0; @%jp mov.b64 %jb, %jn;
sub.u64 %jn, %jn, %jb; setp.lt.u64 %jp, %jn, $4; @%jp bra JT_POLL; mov.b32 %js, 1;
JT_JOIN: setp.ne.u32 %jq, %js, 0; bar.red.or.pred %jp, 0, %jq; @!%jp bra JT_DONE;
setp.eq.u32 %jq, %js, 1; bar.red.or.pred %jp, 0, %jq; selp.b32 %js, 1, 2, %jp;
JT_DONE: mov.b32 $0, %js; }
"""
WAIT = " ".join(_POLL.splitlines()).strip()
# One thread raises the counter at $1 by $2, or to it, and waits for no answer; where it is fenced, what was stored
# before has come to where it goes first.
_RAISE = """
{{ .reg .pred %jp; .reg .b32 %jx; mov.u32 %jx, %tid.x; setp.eq.u32 %jp, %jx, 0;
{fence}@%jp red.relaxed.sys.global.{fn} [$1], $2; mov.b32 $0, 0; }}
"""
RAISE = {
    (fn, fenced): " ".join(_RAISE.format(fence="@%jp fence.acq_rel.sys; " if fenced else "", fn=name).split())
    for fn, name in (("add", "add.u32"), ("set", "max.s32"))
    for fenced in (True, False)
}
FENCE = "fence.acq_rel.sys; mov.b32 $0, 0;"
LET = "griddepcontrol.launch_dependents; mov.b32 $0, 0;"  # the kernel behind this one may start its early roles
AFTER = "griddepcontrol.wait; mov.b32 $0, 0;"  # the kernels in front of this one have ended
EXIT = "mov.b32 $0, 0; exit;"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything lies in the block of a device, in bytes.

    Attributes:
      table, epochs, barriers, signals, memory: where these begin; end: bytes of the whole block.
      axes: the axes of the kernel's barriers, in their order.
      first: where each symmetric Ref begins in a set.
      signal_set, memory_set: bytes of a set; memory_sets: how many of memory there are.
    """

    table: int
    epochs: int
    barriers: int
    signals: int
    memory: int
    end: int
    axes: tuple[str, ...]
    first: dict[ir.Value, int]
    signal_set: int
    memory_set: int
    memory_sets: int


def layout(kernel: ir.Kernel) -> Layout:
    first: dict[ir.Value, int] = {}
    table = _up(PLACE + 4 * len(kernel.devices), 8)
    epochs = table + 8 * math.prod(n for _, n in kernel.devices)
    barriers = epochs + 4 * math.prod(kernel.grid)
    axes = tuple(sorted({op.axis for op in kernel.body.walk() if isinstance(op, ir.AxisBarrier)}))
    signals = barriers + 8 * len(axes) * math.prod(kernel.grid)
    count = memory = 0
    for v in kernel.refs("signal"):
        first[v] = 4 * count
        count += math.prod(v.shape)
    for v in kernel.refs("symmetric"):
        first[v] = memory
        memory += _up(-(-math.prod(v.shape) * ir.DTYPES[v.dtype].bits // 8), ALIGN)
    start = _up(signals + 4 * SETS * count, ALIGN)
    sets = SETS if ir.posts(kernel) else 2
    return Layout(table, epochs, barriers, signals, start, start + sets * memory, axes, first, 4 * count, memory, sets)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


Place = tuple[Val, ...]


class Devices:
    """Where this device is, and where Refs of other devices are."""

    def __init__(self, em: Emitter):
        self.em, self.kernel, self.layout = em, em.kernel, layout(em.kernel)
        self.axes = [axis for axis, _ in em.kernel.devices]
        self.sizes = [n for _, n in em.kernel.devices]
        self.strides = [math.prod(self.sizes[k + 1 :]) for k in range(len(self.sizes))]
        self.sites: list[dict[str, Any]] = []
        self.places: dict[ir.Value, Place] = {}
        self.base = em.param({"kind": "devices"}, "!tt.ptr<i8>", " {tt.divisibility = 16 : i32}")
        self.near = _intervals(em.kernel)
        self.fenced = _behind_signals(em.kernel.body)
        self._begin()

    def _begin(self) -> None:
        """Emit the beginning of a program: it reads all that the block has for it, and ends where a call has failed.

        Where launches overlap, a program starts while the kernels in front of it still run, reads what is the host's,
        and then waits for them: one of them may be the call before this one of the same site."""
        em, code, at = self.em, self.em.code, self.layout
        if em.features.dependents:
            self.instruction(LET)
        self.here: Place = tuple(self.number(PLACE + 4 * k) for k in range(len(self.axes)))
        self.waits = code.let(f"tt.load {self.own(TIMEOUT, 'i64').name} : !tt.ptr<i64>", (), "i64")
        count = math.prod(self.sizes)
        self.table = [self.entry(code.i32(k)) for k in range(count)] if count <= KEPT else []
        if em.features.dependents:
            self.instruction(AFTER, "=r,~{memory}")
        fault = self.number(FAULT)
        self.program = code.let("tt.get_program_id x : i32", (), "i32")
        self.epoch_at = code.let(
            f"tt.addptr {self.own(at.epochs, 'i32').name}, {self.program.name} : !tt.ptr<i32>, i32", (), "!tt.ptr<i32>"
        )
        self.epoch = code.let(f"tt.load {self.epoch_at.name} : !tt.ptr<i32>", (), "i32")
        with self.branch(code.cmp("ne", fault, code.i32(0))):
            self.instruction(EXIT)
        self.signals = self.set_of(self.epoch, SETS, at.signals, at.signal_set)
        self.memory = self.set_of(self.epoch, at.memory_sets, at.memory, at.memory_set)
        for v in em.kernel.shared:
            self.put(v, v, self.here, None)

    def set_of(self, epoch: Val, count: int, start: int, size: int) -> Val:
        """Where the set of a call begins, in bytes."""
        code = self.em.code
        turn = code.to_int(code.op("arith.andi", epoch, code.i32(count - 1)), "i64")
        return code.shift(code.scale(turn, size), start)

    def end(self) -> None:
        """Emit the end of a program: it clears its part of the signals of the next call but one, and counts."""
        code = self.em.code
        self.em.barrier()  # all threads have read the number of the call before it changes
        if self.layout.signal_set:
            self._clear()
        epoch = code.shift(self.epoch, 1)
        code.do(f"tt.store {self.epoch_at.name}, {epoch.name} : !tt.ptr<i32>")

    def _clear(self) -> None:
        code, at = self.em.code, self.layout
        count = at.signal_set // 4
        lanes = min(1 << (count - 1).bit_length(), CLEARED)
        later = self.set_of(code.shift(self.epoch, 2), SETS, at.signals, at.signal_set)
        start = self.at(self.base, later, "i32")
        blocks = code.let("tt.get_num_programs x : i32", (), "i32")
        with self.loop(self.program, code.i32(-(-count // lanes)), blocks) as chunk:
            number = code.add(code.splat(code.scale(chunk, lanes), (lanes,)), code.arange(lanes))
            many = code.splat(start, (lanes,))
            where = code.let(f"tt.addptr {many.name}, {number.name} : {many.type}, {number.type}", (lanes,), many.elem)
            names = [where, code.const(0, "i32", (lanes,))]
            names += [code.cmp("slt", number, code.const(count, "i32", (lanes,)))] if count % lanes else []
            code.do(f"tt.store {', '.join(v.name for v in names)} : {where.type}")

    # -- addresses ----------------------------------------------------------------------------------------------------

    def own(self, offset: int, elem: str) -> Val:
        """A pointer into this device's block."""
        return self.at(self.base, self.em.code.const(offset, "i64"), elem)

    def at(self, base: Val, offset: Val, elem: str) -> Val:
        """A pointer into a block: `base` is the pointer to this device's, or how far another's is from that."""
        code = self.em.code
        offset = offset if base is self.base else code.add(base, offset)
        moved = code.let(f"tt.addptr {self.base.name}, {offset.name} : {self.base.elem}, i64", (), self.base.elem)
        return code.bitcast(moved, f"!tt.ptr<{elem}>")

    def number(self, offset: int) -> Val:
        return self.em.code.let(f"tt.load {self.own(offset, 'i32').name} : !tt.ptr<i32>", (), "i32")

    def block_of(self, rank: Val) -> Val:
        """How far a device's block is from this one, i64; that it is a multiple of 256 can be seen."""
        code = self.em.code
        if not self.table:
            return self.entry(rank)
        found = self.table[0]
        for k, entry in enumerate(self.table[1:], 1):
            found = code.select(code.cmp("eq", rank, code.i32(k)), entry, found)
        return found

    def entry(self, rank: Val) -> Val:
        """The entry of a device in the table, in bytes."""
        code = self.em.code
        table = self.own(self.layout.table, "i64")
        entry = code.let(f"tt.addptr {table.name}, {rank.name} : {table.elem}, i32", (), table.elem)
        return code.scale(code.let(f"tt.load {entry.name} : {entry.elem}", (), "i64"), ALIGN)

    def rank(self, place: Place) -> Val:
        """The number of a device: row by row over the axes."""
        code = self.em.code
        return functools.reduce(
            code.add, [code.scale(at, s) for at, s in zip(place, self.strides, strict=True)], code.i32(0)
        )

    def put(self, v: ir.Value, param: ir.Value, place: Place, block: Val | None) -> None:
        """Bind `v` to a parameter's Ref on the device at a place. `block`: how far its block is from this device's;
        None: it is this device's."""
        self.places[v] = place
        signal = param.type.role == "signal"  # type: ignore[union-attr]
        offset = self.em.code.shift(self.signals if signal else self.memory, self.layout.first[param])
        pointer = self.at(self.base if block is None else block, offset, memory_elem(param.dtype))
        strides = tuple(math.prod(param.shape[k + 1 :]) for k in range(len(param.shape)))
        self.em.refs[v] = Buffer(pointer, param.shape, strides, param.dtype, scope="sys")

    def counter(self, op: ir.Signal | ir.WaitSignal) -> tuple[Val, Val]:
        """The pointer to a signal, and its number among those of a device; a fault where there is no such signal."""
        em, code, param = self.em, self.em.code, ir.root(op.ref)
        buf, at, inside = em.refs[op.ref], code.i32(0), None
        known = self.near[op][: len(op.index)]
        for d, n, stride, near in zip(op.index, param.shape, buf.strides, known, strict=True):
            k = em.integer(ir.dim_value(d))
            at = code.add(at, code.scale(k, stride))  # type: ignore[arg-type]
            if near is None or near.lo < 0 or near.hi >= n:
                inside = code.both(inside, code.cmp("ult", k, code.i32(n)))
        if inside is not None:
            at = self.checked(at, inside, op, "signal", at)
        where = code.let(f"tt.addptr {buf.pointer.name}, {at.name} : {buf.pointer.elem}, i32", (), buf.pointer.elem)
        return where, code.shift(at, self.layout.first[param] // 4)

    # -- instructions -------------------------------------------------------------------------------------------------

    def rmw(self, fn: str, pointer: Val, value: Val, order: str, scope: str = "sys") -> Val:
        """An atomic that one thread does; returns the old number."""
        true = self.em.code.const(True, "i1")
        names = ", ".join(v.name for v in (pointer, value, true))
        kinds = f"({pointer.elem}, i32, i1) -> i32"
        return self.em.code.let(f"tt.atomic_rmw {fn}, {order}, {scope}, {names} : {kinds}", (), "i32")

    def raise_(self, op: ir.Signal, counter: Val, value: Val) -> None:
        """Raise a counter, behind what all threads have stored."""
        fenced = op not in self.fenced
        if fenced:
            self.em.barrier()
        self.instruction(RAISE[op.fn, fenced], "=r,l,r,~{memory}", (self.address(counter), value))

    def instruction(self, text: str, constraints: str = "=r", args: Sequence[Val] = ()) -> Val:
        attributes = f'constraints = "{constraints}", packed_element = 1 : i32, pure = false'
        kinds = f" {', '.join(a.name for a in args)} : {', '.join(a.elem for a in args)}" if args else ""
        return self.em.code.let(f'tt.elementwise_inline_asm "{text}" {{{attributes}}}{kinds} -> i32', (), "i32")

    def wait(self, op: ir.Op, counter: Val, at_least: Val, fault: str, number: Val, wanted: Val, base: Val) -> None:
        """Wait until a counter of this device has come to a number; `wanted` is it above `base`, for the report."""
        code = self.em.code
        flag = self.address(self.own(FAULT, "i32"))
        args = (self.address(counter), at_least, flag, self.waits)
        status = self.instruction(WAIT, "=r,l,r,l,l,~{memory}", args)
        with self.branch(code.cmp("ne", status, code.i32(0))):
            with self.branch(code.cmp("eq", status, code.i32(1))):
                stands = code.sub(self.rmw("add", counter, code.i32(0), "relaxed"), base)
                self.report(op, fault, number, wanted, stands)
            self.instruction(EXIT)

    def address(self, pointer: Val) -> Val:
        return self.em.code.cast("tt.ptr_to_int", pointer, "i64")

    # -- faults -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def branch(self, cond: Val) -> Iterator[None]:
        self.em.code.do(f"scf.if {cond.name} {{")
        with self.em.code.region():
            yield
        self.em.code.do("}")

    def checked(self, number: Val, cond: Val, op: ir.Op, fault: str, *numbers: Val) -> Val:
        """A number for which a condition holds; where it does not, the program reports it and ends."""
        code = self.em.code
        with self.branch(code.op("arith.xori", cond, code.const(True, "i1"))):
            self.report(op, fault, *numbers)
            self.instruction(EXIT)
        return number

    def report(self, op: ir.Op, fault: str, *numbers: Val) -> None:
        """Report what went wrong, unless another program of this device has done so, and let all devices end."""
        em, code = self.em, self.em.code
        lanes = em.kernel.lanes
        self.sites.append({"kind": "assert", "message": op.mnemonic, "where": str(op.loc), "args": [],
                           "axes": max(3, len(em.kernel.grid) - lanes), "lanes": lanes})  # fmt: skip
        em.barrier()
        claimed = self.rmw("exch", self.own(CLAIMED, "i32"), code.i32(1), "relaxed", "gpu")
        with self.branch(code.cmp("eq", claimed, code.i32(0))):
            at = code.let(f"tt.load {self.own(REPORT, 'i64').name} : !tt.ptr<i64>", (), "i64")
            words = [code.i32(len(self.sites) - 1), code.to_int(_program(em), "i32"), *numbers]
            for k, word in enumerate(words):
                self._tell(at, k + 1, word)
            self.instruction(FENCE)
            self._tell(at, 0, code.i32(FAULTS.index(fault)))
        with self.each(math.prod(self.sizes)) as rank:
            flag = self.at(self.block_of(rank), code.const(FAULT, "i64"), "i32")
            self.rmw("or", flag, code.i32(1), "relaxed")

    def _tell(self, report: Val, k: int, word: Val) -> None:
        code = self.em.code
        where = code.cast("tt.int_to_ptr", code.shift(report, 4 * k), "!tt.ptr<i32>")
        code.do(f"tt.store {where.name}, {word.name} : !tt.ptr<i32>")

    @contextlib.contextmanager
    def loop(self, first: Val, end: Val, step: Val) -> Iterator[Val]:
        code = self.em.code
        k = Val(code.name(), (), "i32")
        code.do(f"scf.for {k.name} = {first.name} to {end.name} step {step.name} : i32 {{")
        with code.region():
            yield k
        code.do("} {tt.num_stages = 1 : i32}")

    def each(self, n: int) -> contextlib.AbstractContextManager[Val]:
        """A loop over n devices."""
        code = self.em.code
        return self.loop(code.i32(0), code.i32(n), code.i32(1))

    def facts(self) -> dict[str, Any]:
        """The entry `devices` of the launch record, which the launcher reads: see `record.py`."""
        at, kernel = self.layout, self.kernel
        names = [[v.name, list(v.shape)] for v in kernel.refs("signal")]
        posts = ir.posts(kernel)  # behind a fault their memory is cleared
        return {
            "axes": [list(pair) for pair in kernel.devices], "signals": names, "table": at.table,
            "counters": at.epochs, "memory": at.end if posts else at.memory, "bytes": at.end,
            "waits": ir.waits(kernel),
            "grid": list(kernel.grid), "list": self.sites,
        }  # fmt: skip


def _intervals(kernel: ir.Kernel) -> dict[ir.Op, list[Interval | None]]:
    """The bounds of the numbers that name devices and signals, for each op."""
    found: dict[ir.Op, list[Interval | None]] = {}

    def look(op: ir.Op, known: Intervals) -> None:
        if isinstance(op, ir.On):
            found[op] = [known(op.index)]
        elif isinstance(op, ir.Signal | ir.WaitSignal):
            found[op] = [known(ir.dim_value(d)) for d in op.index]
        if isinstance(op, ir.Signal):
            found[op].append(known(op.value))

    walk(kernel, look)
    return found


def _behind_signals(body: ir.Block) -> set[ir.Op]:
    """The signals that stand behind another one with nothing in between that a fence would order."""
    found: set[ir.Op] = set()
    todo = [body]
    while todo:
        behind = False
        for op in todo.pop().ops:
            todo += op.blocks()
            if isinstance(op, ir.Signal):
                found |= {op} if behind else set()
                behind = True
            else:
                behind &= op.effect == "none" and not any(True for _ in op.blocks())
    return found


def devices(em: Emitter) -> Devices:
    return em.memo["devices"]


# -- the cards --------------------------------------------------------------------------------------------------------


@emits(ir.AxisIndex)
def _axis_index(em: Emitter, op: ir.AxisIndex) -> Val:
    d = devices(em)
    return d.here[d.axes.index(op.axis)]


@emits(ir.On)
def _on(em: Emitter, op: ir.On) -> None:
    d, code = devices(em), em.code
    axis = d.axes.index(op.axis)
    at, (near,) = em.integer(op.index), d.near[op]
    if near is None or near.lo < 0 or near.hi >= d.sizes[axis]:
        inside = code.cmp("ult", at, code.i32(d.sizes[axis]))
        at = d.checked(at, inside, op, "device", code.i32(axis), at)
    place = d.places[op.ref]
    place = (*place[:axis], at, *place[axis + 1 :])
    d.put(op.result, ir.root(op.ref), place, d.block_of(d.rank(place)))


@emits(ir.Signal)
def _signal(em: Emitter, op: ir.Signal) -> None:
    d, code = devices(em), em.code
    where, number = d.counter(op)
    value, near = em.integer(op.value), d.near[op][-1]
    if near is None or near.lo < 1:
        value = d.checked(value, code.cmp("sge", value, code.i32(1)), op, "value", number, value)
    d.raise_(op, where, value)


@emits(ir.WaitSignal)
def _wait_signal(em: Emitter, op: ir.WaitSignal) -> None:
    d = devices(em)
    where, number = d.counter(op)
    wanted = em.integer(op.at_least)
    d.wait(op, where, wanted, "wait", number, wanted, em.code.i32(0))


@emits(ir.AxisBarrier)
def _axis_barrier(em: Emitter, op: ir.AxisBarrier) -> None:
    d, code = devices(em), em.code
    axis, n = d.axes.index(op.axis), dict(em.kernel.devices)[op.axis]
    line = code.shift(code.scale(d.program, 8), 8 * d.layout.axes.index(op.axis) * math.prod(em.kernel.grid))
    offset = code.shift(code.to_int(line, "i64"), d.layout.barriers)
    em.barrier()
    rounds = d.rmw("add", d.at(d.base, code.shift(offset, 4), "i32"), code.i32(1), "relaxed", "gpu")
    with d.each(n) as k:
        rank = d.rank((*d.here[:axis], k, *d.here[axis + 1 :]))
        d.rmw("add", d.at(d.block_of(rank), offset, "i32"), code.i32(1), "release")
    begun = code.scale(rounds, n)
    counter = d.at(d.base, offset, "i32")
    d.wait(op, counter, code.shift(begun, n), "barrier", code.i32(axis), code.i32(n), begun)
