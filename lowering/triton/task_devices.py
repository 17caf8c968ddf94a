"""Execution graphs of several GPUs: memory that the devices read of each other, and bands that wait for all of them.

Every device runs the same plan (`emit_tasks.py`). What others read lies in the block of memory that a call site has on
each device (`emit_devices.py`), behind its counters, in two sets that launches take in turn. A device that has ended a
launch has waited for all others in it. So these have ended the launch before that one, and read nothing of the set that
comes next. An array of another device is an entry of the table of arrays like any other.

A *meeting* is a set of bands that a band waits for on all devices. It has a counter on each device for each of them, so
that nobody mistakes what one device counts in the next launch for what another one has yet to count in this one. A band
counts on all devices at once, a thread each, and a block that waits looks at all counters of a meeting at once.

Of the plan, words 3 and 4 say where entries for such arrays begin, and how many there are, two words each: where the
array lies in a set, in units of 16 bytes, and the number of the device, or that of all devices for this one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from .emit_devices import ALIGN, FAULT, PLACE, WAIT
from .ttir import Val

if TYPE_CHECKING:
    from .emit_tasks import Shape, Tasks

FAR = ("meeting", "all", "met", "more meetings", "meetings")  # words of a band: what it waits for, what it counts in
CHUNK = 256  # entries that are written at once
UNIT = 16  # bytes of which the place of an array is a multiple
MOST = 32  # devices, of which a thread of a warp has one each
SETS = 2  # of memory

# A thread for each device counts there: $1 is this device's table of devices, $2 the counter in its own block, $3 the
# number of devices. What all threads have stored comes before.
_TELL = """
{ .reg .pred %jp; .reg .b32 %jx; .reg .b64 %ja; mov.u32 %jx, %tid.x; setp.lt.u32 %jp, %jx, $3;
mul.wide.u32 %ja, %jx, 8; add.u64 %ja, %ja, $1; @%jp ld.global.b64 %ja, [%ja]; shl.b64 %ja, %ja, 8;
add.u64 %ja, %ja, $2; @%jp fence.acq_rel.sys; @%jp red.relaxed.sys.global.add.u32 [%ja], 1; mov.b32 $0, 0; }
"""
TELL = " ".join(_TELL.split("\n")).strip()
# A thread for each device polls the counters from $1 on, of which there are $5; else as `WAIT`.
MEET = (
    WAIT.replace(
        "setp.ne.u32 %jq, %jx, 0; @%jq bra JT_JOIN; ",
        "setp.ge.u32 %jq, %jx, $5; @%jq bra JT_JOIN; mul.wide.u32 %ja, %jx, 4; add.u64 %ja, %ja, $1; ",
    )
    .replace("[$1]", "[%ja]")
    .replace(".reg .b64 %jb, %jn;", ".reg .b64 %ja, %jb, %jn;")
)


@dataclasses.dataclass(frozen=True)
class Far:
    """How a graph talks to other devices.

    Attributes:
      axes: of the mesh, with their sizes.
      meetings: how many there are.
      bytes: of a set of the memory that other devices read.
    """

    axes: tuple[tuple[str, int], ...]
    meetings: int
    bytes: int

    @property
    def devices(self) -> int:
        return math.prod(n for _, n in self.axes)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything lies in the block of a device, in bytes; see `emit_tasks.py`."""

    table: int
    epochs: int
    events: int
    arrivals: int
    meetings: int
    memory: int
    end: int


def layout(shape: Shape) -> Layout:
    far = shape.far
    axes, devices, meetings = (len(far.axes), far.devices, far.meetings) if far else (1, 1, 0)
    table = _up(PLACE + 4 * axes, 8)
    epochs = table + 8 * devices
    events = epochs + 4 * shape.blocks
    arrivals = events + 4 * shape.events
    at = arrivals + 4 * shape.arrivals
    memory = _up(at + 4 * meetings * devices, ALIGN)
    return Layout(table, epochs, events, arrivals, at, memory, memory + SETS * _up(far.bytes if far else 0, ALIGN))


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


class Others:
    """Emits what a block does about other devices."""

    def __init__(self, tasks: Tasks, far: Far):
        self.tasks, self.code, self.far, self.layout = tasks, tasks.code, far, tasks.layout

    def begin(self, table: Val, start: Val, first: Val) -> None:
        """Read where this device is, and write the entries of the arrays that devices read of each other, from number
        `first` on."""
        t, code = self.tasks, self.code
        self.rank = code.i32(0)
        for k, (_, n) in enumerate(self.far.axes):
            self.rank = code.add(code.scale(self.rank, n), t.word(t.at(PLACE + 4 * k)))
        turn = code.scale(code.op("arith.andi", t.epoch, code.i32(SETS - 1)), _up(self.far.bytes, ALIGN) // UNIT)
        own = code.shift(code.op("arith.divsi", code.sub(t.address(t.own), start), code.const(UNIT, "i64")),
                         self.layout.memory // UNIT)  # fmt: skip
        own = code.add(own, code.to_int(turn, "i64"))
        at, count = (t.word(t.moved(t.plan, code.i32(k))) for k in (3, 4))
        words, devices = t.moved(t.plan, at), t.at(self.layout.table, "i64")
        count = t.em.kept(count)
        lanes, n = code.arange(CHUNK), code.const(self.far.devices, "i32", (CHUNK,))
        k = Val(code.name(), (), "i32")
        code.do(f"scf.for {k.name} = {code.i32(0).name} to {count.name} step {code.i32(CHUNK).name} : i32 {{")
        with code.region():
            number = code.add(lanes, code.splat(k, (CHUNK,)))
            inside = code.cmp("slt", number, code.splat(count, (CHUNK,)))
            place, device = (t.some(words, code.shift(code.scale(number, 2), j), inside) for j in range(2))
            other = code.both(inside, code.cmp("slt", device, n))
            away = code.scale(t.some(devices, device, other), ALIGN // UNIT)
            found = code.add(code.add(away, code.to_int(place, "i64")), code.splat(own, (CHUNK,)))
            to = t.vector(t.moved(table, first), number)
            code.do(f"tt.store {to.name}, {found.name}, {inside.name} : {to.type}")
        code.do("} {tt.num_stages = 1 : i32}")

    def _counters(self, meeting: Val) -> Val:
        """The counters of a meeting, one for each device."""
        t = self.tasks
        return t.moved(t.at(self.layout.meetings), self.code.scale(meeting, self.far.devices))

    def tell(self, row: dict[str, Val]) -> None:
        """Count a band as over on all devices, in all meetings that it is part of."""
        t, code = self.tasks, self.code
        self._tell(row["met"])
        k = Val(code.name(), (), "i32")
        code.do(
            f"scf.for {k.name} = {code.i32(0).name} to {row['more meetings'].name} step {code.i32(1).name} : i32 {{"
        )
        with code.region():
            self._tell(t.word(t.moved(t.plan, code.add(row["meetings"], k))))
        code.do("} {tt.num_stages = 1 : i32}")

    def _tell(self, meeting: Val) -> None:
        t, code = self.tasks, self.code
        with t.branch(code.cmp("sge", meeting, code.i32(0))):
            mine = t.moved(self._counters(meeting), self.rank)
            args = (t.address(t.at(self.layout.table, "i64")), t.address(mine), code.i32(self.far.devices))
            t.instruction(TELL, "=r,l,l,r,~{memory}", args)

    def wait(self, row: dict[str, Val], number: int) -> None:
        """Wait until all bands of a meeting are over in this launch, on all devices."""
        t, code, meeting, count = self.tasks, self.code, row["meeting"], row["all"]
        with t.branch(code.cmp("sge", meeting, code.i32(0))):
            counters = self._counters(meeting)
            before = code.mul(t.epoch, count)
            args = (t.address(counters), code.add(before, count), t.address(t.at(FAULT)), t.timeout,
                    code.i32(self.far.devices))  # fmt: skip
            status = t.instruction(MEET, "=r,l,r,l,l,r,~{memory}", args)
            with t.branch(code.cmp("ne", status, code.i32(0))):
                with t.branch(code.cmp("eq", status, code.i32(1))):
                    stands = code.i32(0)
                    for k in range(self.far.devices):
                        counter = t.moved(counters, code.i32(k))
                        stands = code.add(stands, code.sub(t.atomic("add", counter, code.i32(0)), before))
                    wanted = code.scale(count, self.far.devices)
                    t.report(code.shift(meeting, max(t.shape.events, 1)), wanted, stands, number)
                t.exit()

    def fail(self) -> None:
        """Let all devices end."""
        t, code = self.tasks, self.code
        table = t.at(self.layout.table, "i64")
        k = Val(code.name(), (), "i32")
        code.do(f"scf.for {k.name} = {code.i32(0).name} to {code.i32(self.far.devices).name} "
                f"step {code.i32(1).name} : i32 {{")  # fmt: skip
        with code.region():
            entry = t.moved(table, k)
            away = code.scale(code.let(f"tt.load {entry.name} : {entry.elem}", (), "i64"), ALIGN)
            flag = code.bitcast(t.moved(t.moved(t.own, away), code.const(FAULT, "i64")), "!tt.ptr<i32>")
            t.atomic("or", flag, code.i32(1), "sys")
        code.do("} {tt.num_stages = 1 : i32}")
