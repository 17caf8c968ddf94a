"""A world of devices: the programs of all of them take turns, call after call, and vector clocks say what a program
knows of the others.

A clock counts, for each *line*, how much of it is known to have happened. A program has a line for what it does, and
with roles two more for each of these, what it does and the copies to arrays that it has started, and one for copies
from arrays; the last lines count the calls that each device has ended. A signal tells whoever waits for it what
its program knew; a call begins with what all programs of the device knew at the end of the one before.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from jtile._errors import DeadlockError, InterpreterError, OutOfBoundsError, ProtocolError, RaceError
from jtile.ir import (
    AxisBarrier,
    AxisIndex,
    Kernel,
    LastArrival,
    On,
    Op,
    Post,
    Receive,
    Roles,
    Signal,
    Value,
    WaitSignal,
)

from . import posts
from .block_devices import STOPS, crew_of
from .block_memory import place
from .machine import Machine, rule
from .memory import Buffer, Handle, poison
from .order import Order
from .turns import Standing, Steps, Turns, Voice, Walker

Place = tuple[int, ...]  # the place of a device along each axis of the call
Span = tuple[int, int, int, Op]  # line, how much of it had happened, call, op
SETS = 2  # sets of symmetric memory, which calls take in turn


class Clocks(Order[Span]):
    """The order of a world: what the clock of the program that acts now has counted."""

    def __init__(self, world: World):
        super().__init__()
        self.world = world

    def span(self) -> Span:
        p = self.world.part
        return p.line, int(p.clock[p.line]), p.call, p.op

    def known(self) -> np.ndarray:
        return self.world.part.clock

    def before(self, span: int, known: np.ndarray) -> bool:
        line, epoch, _, _ = self.spans[span]
        return epoch <= known[line]

    def name(self, span: int) -> str:
        line, _, call, op = self.spans[span]
        return f"{self.world.line_text(line, call)} ({place(op)})"


class Held(Buffer):
    """Symmetric memory of one device, as one call sees it: `at` is the place of the device."""

    value: Value
    at: Place
    by: np.ndarray | None = None  # which device has posted each element
    known: dict[int, np.ndarray]  # what such a device knew when its call began


@dataclasses.dataclass(frozen=True)
class Cells(Handle):
    """The signals of one device that a Ref names."""

    value: Value
    at: Place

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


@dataclasses.dataclass
class Counter:
    """One signal of one device in one call: its value, what raised it, and the most that anyone has waited for."""

    value: int = 0
    waited: int = 0
    log: list[tuple[int, np.ndarray, Op]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Meeting:
    """One meeting of programs at an axis barrier or a counter: who has come so far, and what they know."""

    clock: np.ndarray
    came: int = 0


class Part(Walker):
    """One program of one device in one call, while it runs.

    Attributes:
      number: of the program among those of all devices; `first`: its first line.
      voice: who acts now, the program itself or one of its roles.
    """

    stops = STOPS
    crews = frozenset({Roles})

    def __init__(self, world: World, machine: Machine, rank: int, linear: int, call: int):
        self.world, self.rank, self.call = world, rank, call
        self.number = rank * world.programs + linear
        self.first = self.number * world.width
        self.begun = world.ended[rank]
        known = self.begun.copy()
        known[self.first] += 1
        self.alone = self.voice = Voice(self.first, lambda: known)
        self.machine = m = copy.copy(machine)
        m.env, m.part, m.order = dict(machine.env), self, world.clocks
        m.where = f"{world.device_text(world.places[rank])}, {world.call_text(call)}"
        m.enter(linear)
        self.op: Op = world.kernel.body.ops[0]
        self.waits: Standing | None = None
        self.met: dict[tuple[Any, ...], int] = {}  # how often the program has been at each barrier
        self.walk = self.steps(world.kernel.body.ops)

    @property
    def line(self) -> int:
        return self.voice.line

    @property
    def clock(self) -> np.ndarray:
        return self.voice.clock

    def ready(self) -> bool:
        return self.waits is None or self.waits.passes()

    def crew(self, op: Op) -> Steps:
        assert isinstance(op, Roles)
        yield from crew_of(self, op)

    def advance(self) -> np.ndarray:
        """The clock of this program as it is now; what the program does afterwards is not in it."""
        known = self.clock.copy()
        self.clock[self.line] += 1
        return known

    def learn(self, clock: np.ndarray) -> None:
        np.maximum(self.clock, clock, out=self.clock)

    def prepare(self, op: Op) -> None:
        self.op = op

    def stand(self, op: Op) -> Steps:
        self.op = op
        if isinstance(op, WaitSignal):
            self.waits = self.world.wait(self, op)
        elif isinstance(op, Receive):
            self.waits = posts.receive(self, op)
        elif isinstance(op, AxisBarrier):
            self.waits = self.world.come(self, op)
        if self.waits is not None and not self.waits.passes():
            yield
        self.waits = None


class World:
    """The devices of one call site: a few calls of a kernel, one after another on each device.

    Attributes:
      places: the places of the devices.
      ended: what is known on each device when a call begins.
      part: the program that acts now.
    """

    part: Part

    def __init__(
        self, kernel: Kernel, inputs: Sequence[Sequence[np.ndarray]], *, check: bool = True, seed: int = 0, calls: int
    ):
        self.kernel, self.inputs, self.check, self.seed, self.calls = kernel, inputs, check, seed, calls
        self.axes = [axis for axis, _ in kernel.devices]
        self.sizes = tuple(n for _, n in kernel.devices)
        self.places: list[Place] = list(np.ndindex(*self.sizes))
        self.programs = math.prod(kernel.grid)
        self.clocks = Clocks(self)
        roles = next((len(op.names) for op in kernel.body.ops if isinstance(op, Roles)), 0)
        self.width = 2 + 2 * roles if roles else 1  # lines of a program
        lines = len(self.places) * (self.programs * self.width + 1)
        self.ended = [np.zeros(lines, np.int64) for _ in self.places]
        self.left = [0] * len(self.places)
        self.parts: dict[int, Part] = {}
        self.memory: dict[tuple[Any, ...], Buffer] = {}
        self.counters: dict[tuple[int, Place, Value, int], Counter] = {}
        self.meetings: dict[tuple[Any, ...], Meeting] = {}
        self.arrivals: dict[tuple[str, int, int, int], Meeting] = {}
        self.machines: list[Machine] = [None] * len(self.places)  # type: ignore[list-item]  # the machines of the call at hand
        self.rng = random.Random(int(seed) * 1_000_003)

    # -- turns --------------------------------------------------------------------------------------------------
    def run(self) -> list[list[np.ndarray]]:
        """The outputs of every device."""
        for rank in range(len(self.places)):
            self.start(rank, 0)
        turns = Turns(self.rng, range(len(self.places) * self.programs))
        last: int | None = None
        while self.parts:
            ready = [line for line, p in self.parts.items() if p.ready()]
            if not ready:
                raise self.deadlock()
            last = turns.next(ready, last)
            self.part = self.parts[last]
            try:
                next(self.part.walk)
            except StopIteration:
                del self.parts[last]
                self.leave(self.part)
        if self.check:
            self.end()
        return [[m.env[v].array.copy() for v in self.kernel.outputs] for m in self.machines]

    def start(self, rank: int, call: int) -> None:
        """Begin a call on a device, with memory that its peers may have written already."""
        m = self.machines[rank] = Machine(self.kernel, list(self.inputs[rank]), self.check, self.seed)
        m.silent = call + 1 < self.calls  # only the last call prints
        self.left[rank] = self.programs
        for v in self.kernel.shared:
            m.env[v] = self.of(v, self.places[rank], call)
        order = list(range(self.programs))
        self.rng.shuffle(order)
        for linear in order:
            part = Part(self, m, rank, linear, call)
            self.parts[part.number] = part
        if not order and call + 1 < self.calls:
            self.start(rank, call + 1)

    def leave(self, part: Part) -> None:
        rank = part.rank
        self.left[rank] -= 1
        done = self.ended[rank] = np.maximum(self.ended[rank], part.alone.clock)
        if self.left[rank] == 0:
            done[self.line_of_calls(rank)] = part.call + 1
            if part.call + 1 < self.calls:
                self.start(rank, part.call + 1)

    def line_of_calls(self, rank: int) -> int:
        return len(self.places) * self.programs * self.width + rank

    # -- memory -------------------------------------------------------------------------------------------------
    def of(self, v: Value, at: Place, call: int) -> Held | Cells:
        """What a Ref of the kernel stands for on one device in one call."""
        if v in self.kernel.refs("signal"):
            return Cells(v, at)
        key = (v, at, call)
        if key not in self.memory:
            held = Held(poison(v.shape, v.dtype), defined=False, shared=True)
            if call >= SETS:  # an earlier call had the same memory: nothing in it is defined any more
                first = self.of(v, at, call - SETS)
                assert isinstance(first, Held)
                held.data, held.plain, held.atomic, held.reader = first.data, first.plain, first.atomic, first.reader
            held.value, held.at, held.known = v, at, {}
            self.memory[key] = held
        return self.memory[key]  # type: ignore[return-value]

    def counter(self, op: Signal | WaitSignal, part: Part) -> tuple[Counter, str]:
        """A signal, and its name in messages."""
        cells, lanes = part.machine.lanes(op)
        assert isinstance(cells, Cells)
        if not lanes.active.all():
            raise part.machine.error(OutOfBoundsError, op, "there is no such signal", op.ref)
        at = int(lanes.at[0])
        name = self.signal_text(cells.value, at, cells.at)
        return self.counters.setdefault((part.call, cells.at, cells.value, at), Counter()), name

    # -- signals ------------------------------------------------------------------------------------------------
    def signal(self, part: Part, op: Signal) -> None:
        counter, name = self.counter(op, part)
        value, at = int(part.machine.env[op.value]), part.machine.env[op.ref].at
        if value < 1:
            raise part.machine.error(ProtocolError, op, f"a signal raises {name} by {value}: it is at least 1")
        if op.fn == "set" and value <= counter.value:
            why = f"{name} is set to {value}, and stands at {counter.value}: numbers that are set go up"
            raise part.machine.error(ProtocolError, op, why)
        self.in_time(part, op, at, f"it signals {name}")
        counter.value = value if op.fn == "set" else counter.value + value
        counter.log.append((counter.value, part.advance(), op))

    def in_time(self, part: Part, op: Op, at: Place, what: str) -> None:
        """Check that a device to which something is handed is not two calls behind."""
        if self.check and part.clock[self.line_of_calls(self.places.index(at))] < part.call - SETS + 1:
            why = f"race: {what}, which may still be in the call before the last: nothing orders the end of that one "
            raise part.machine.error(RaceError, op, why + "before (jt.axis_barrier at the end does)")

    def wait(self, part: Part, op: WaitSignal) -> Standing:
        counter, name = self.counter(op, part)
        wanted = int(part.machine.env[op.at_least])
        counter.waited = max(counter.waited, wanted)
        what = lambda: f"{name} to reach {wanted}: it stands at {counter.value}"
        return Standing(op, what, lambda: counter.value >= wanted)

    def pass_wait(self, part: Part, op: WaitSignal) -> None:
        """Pass a wait: the program learns what those knew who raised the signal to the number that it waited for."""
        counter, wanted = self.counter(op, part)[0], int(part.machine.env[op.at_least])
        for value, clock, _ in counter.log if wanted > 0 else ():
            part.learn(clock)
            if value >= wanted:
                break

    # -- barriers, and counters of a device ---------------------------------------------------------------------
    def come(self, part: Part, op: AxisBarrier) -> Standing:
        meeting, size = self.meeting(part, op), dict(self.kernel.devices)[op.axis]
        meeting.came += 1
        np.maximum(meeting.clock, part.advance(), out=meeting.clock)
        what = lambda: f"all devices along {op.axis!r}: {meeting.came} of {size} have come"
        return Standing(op, what, lambda: meeting.came == size)

    def pass_barrier(self, part: Part, op: AxisBarrier) -> None:
        part.learn(self.meeting(part, op).clock)
        key = self._axis_key(part, op.axis)
        part.met[key] = part.met.get(key, 0) + 1

    def meeting(self, part: Part, op: AxisBarrier) -> Meeting:
        key = self._axis_key(part, op.axis)
        time = (*key, part.call, part.met.get(key, 0))
        return self.meetings.setdefault(time, Meeting(np.zeros_like(part.clock)))

    def _axis_key(self, part: Part, axis: str) -> tuple[Any, ...]:
        others = [i for i, name in zip(self.places[part.rank], self.axes, strict=True) if name != axis]
        return axis, *others, part.machine.linear

    def arrive(self, part: Part, op: LastArrival) -> bool:
        """Arrive at a counter as in `Arrivals.arrive`, by the clocks of a world."""
        m = part.machine
        at, count = int(m.env[op.index]), int(m.env[op.count])
        if not 0 <= at < op.size or count < 1:
            why = f"there is no counter {op.counters}[{at}] of {op.size}, or no program of {count}"
            raise m.error(OutOfBoundsError, op, why)
        key = (op.counters, at, part.rank, part.call)
        meeting = self.arrivals.setdefault(key, Meeting(np.zeros_like(part.clock)))
        meeting.came += 1
        np.maximum(meeting.clock, part.advance(), out=meeting.clock)
        if meeting.came < count:
            return False
        part.learn(self.arrivals.pop(key).clock)
        return True

    # -- ends ---------------------------------------------------------------------------------------------------
    def end(self) -> None:
        """Check, when all calls have ended, that every signal was waited for."""
        for (call, at, v, index), counter in self.counters.items():
            if counter.value > counter.waited:
                why = f"{self.signal_text(v, index, at)} stands at {counter.value} at the end of {self.call_text(call)}"
                why += f", and nobody waited for more than {counter.waited}: what is left is a signal too many"
                raise self.error(ProtocolError, why, counter.log[-1][2])
        for (counters, index, *_), meeting in self.arrivals.items():
            why = f"{meeting.came} programs arrived at {counters}[{index}], fewer than the count that they gave"
            raise self.error(ProtocolError, why, None)

    def deadlock(self) -> DeadlockError:
        text, stuck = [], []
        for number, p in sorted(self.parts.items()):
            if p.waits is None:
                continue
            text.append(f"\n  {self.program_text(number, p.call)} waits at {place(p.waits.op)} for {p.waits.what()}")
            loc = p.waits.op.loc
            where = (loc.file, loc.line) if loc.file else None
            stuck.append((self.program_text(number, p.call), p.waits.what(), 0, 0, where))
        ended = [self.device_text(at) for at, n in zip(self.places, self.left, strict=True) if n == 0]
        text += [f"\n  {', '.join(ended)} ended"] if ended else []
        first = next(p.waits.op for p in self.parts.values() if p.waits)
        error = self.error(DeadlockError, "deadlock: every program waits" + "".join(text), first)
        error.stuck = tuple(stuck)
        return error

    def error[E: InterpreterError](self, kind: type[E], message: str, op: Op | None) -> E:
        loc = op.loc if op is not None else self.kernel.loc
        return kind(f"kernel {self.kernel.name}: {message}", (loc.file, loc.line) if loc.file else None)

    # -- names --------------------------------------------------------------------------------------------------
    def device_text(self, at: Place) -> str:
        return f"device ({', '.join(f'{axis}={i}' for axis, i in zip(self.axes, at, strict=True))})"

    def signal_text(self, v: Value, index: int, at: Place) -> str:
        places = "".join(f"[{i}]" for i in np.unravel_index(index, v.shape))
        return f"{v.name or 'signal'}{places} of {self.device_text(at)}"

    def call_text(self, call: int) -> str:
        return f"call {call + 1}"

    def line_text(self, line: int, call: int) -> str:
        number, k = divmod(line, self.width)
        names = [*(op.names for op in self.kernel.body.ops if isinstance(op, Roles)), ()][0]
        who = f", role {names[(k - 1) % len(names)]}" if 0 < k <= 2 * len(names) else ""
        return self.program_text(number, call) + who + (", a copy" if k > len(names) else "")

    def program_text(self, number: int, call: int) -> str:
        rank, linear = divmod(number, self.programs)
        program = self.machines[rank].named(linear)
        return f"{self.device_text(self.places[rank])}, {self.call_text(call)}, program {program}"


# -- the cards ------------------------------------------------------------------------------------------------------


def _part(m: Machine) -> Part:
    if m.part is None:
        raise ValueError("this op belongs to a kernel on a mesh")
    return m.part


@rule(AxisIndex)
def _axis_index(m: Machine, op: AxisIndex):
    p = _part(m)
    return np.asarray(p.world.places[p.rank][p.world.axes.index(op.axis)], np.int32)


@rule(On)
def _on(m: Machine, op: On):
    p = _part(m)
    held, index = m.env[op.ref], int(m.env[op.index])
    size = dict(p.world.kernel.devices)[op.axis]
    if not 0 <= index < size:
        raise m.error(OutOfBoundsError, op, f"there is no device {index} of {size} along {op.axis!r}", op.ref)
    axis = p.world.axes.index(op.axis)
    at = (*held.at[:axis], index, *held.at[axis + 1 :])
    return (p.world.of(held.value, at, p.call),)


@rule(Signal)
def _signal(m: Machine, op: Signal):
    _part(m).world.signal(_part(m), op)
    return ()


@rule(WaitSignal)
def _wait_signal(m: Machine, op: WaitSignal):
    _part(m).world.pass_wait(_part(m), op)
    return ()


@rule(Post)
def _post(m: Machine, op: Post):
    posts.post(_part(m), op)
    return ()


@rule(Receive)
def _receive(m: Machine, op: Receive):
    return posts.received(_part(m), op)


@rule(AxisBarrier)
def _axis_barrier(m: Machine, op: AxisBarrier):
    _part(m).world.pass_barrier(_part(m), op)
    return ()
