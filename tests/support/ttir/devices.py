"""Kernels that talk to other devices: the programs of all devices of a mesh, each in a thread, over memory that all of
them reach. One runs at a time; a seed decides who goes on where a program polls or signals, so that nothing depends on
time: the timer of a wait has run out when nobody has done anything for many turns."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jtile.ir import Kernel
from jtile.lowering.triton.compile import emit_kernel
from jtile.lowering.triton.emit_devices import (
    AFTER,
    EXIT,
    FAULTS,
    FENCE,
    LET,
    PLACE,
    RAISE,
    REPORT,
    SETS,
    TIMEOUT,
    WAIT,
)
from jtile.lowering.triton.features import features

from .launch import Buffers, _argument, _check_params, buffers, read, value_of
from .machine import Machine
from .memory import SKEW, Memory
from .ops_math import ACTS
from .types import TtirError

UNIT = 256  # of the table, and what the address of a block is a multiple of
PATIENCE = 40  # turns of every program without anything done


class EndedError(TtirError):
    """A program has ended on its own."""


@dataclasses.dataclass
class Fault:
    """What a device reported: the kind, the line of the site, the program, three numbers."""

    kind: str
    where: str
    program: int
    numbers: tuple[int, ...]


class Turns:
    """Which thread goes on."""

    def __init__(self, count: int, seed: int):
        self.changed, self.random = threading.Condition(), random.Random(seed)
        self.alive, self.now, self.idle = set(range(count)), 0, 0
        self.error: BaseException | None = None

    def begin(self, me: int) -> None:
        with self.changed:
            self._await(me)

    def give(self, me: int) -> None:
        """Let any program go on, and come back."""
        with self.changed:
            self._next()
            self._await(me)

    def end(self, me: int) -> None:
        with self.changed:
            self.alive.discard(me)
            self.idle = 0
            if self.alive:
                self._next()

    def _next(self) -> None:
        self.now = self.random.choice(sorted(self.alive))
        self.changed.notify_all()

    def _await(self, me: int) -> None:
        while self.now != me:
            self.changed.wait()
        if self.error is not None:
            raise EndedError("another program has failed")


class Program(Machine):
    """The machine of one program of one device."""

    def __init__(self, turns: Turns, me: int, *args):
        super().__init__(*args)
        self.turns, self.me = turns, me

    def signalled(self) -> None:
        self.turns.idle = 0
        self.turns.give(self.me)

    def word(self, address: int) -> np.ndarray:
        k, offset = self.memory.place(address)
        return self.memory.bytes[k][offset : offset + 4].view(np.int32)


def _wait(m: Program, counter, wanted, fault, timeout) -> int:
    """As `WAIT` does it; `timeout` is in nanoseconds, and here any number but 0."""
    return waited(m, [int(counter)], wanted, fault, timeout)


def waited(m: Program, counters: list[int], wanted, fault, timeout) -> int:
    """Waits until all of the counters have come to a number: 0; 1 if the time is over, 2 if another program failed."""
    m.memory.barrier()
    behind = lambda counter: np.subtract(m.word(counter), wanted, dtype=np.int32)[0] < 0
    while any(map(behind, counters)):
        if m.word(int(fault))[0]:
            return 2
        m.turns.idle += 1
        if int(timeout) <= 0 or m.turns.idle > PATIENCE * len(m.turns.alive):
            return 1
        m.turns.give(m.me)
    m.turns.idle = 0
    return 0


def _fence(m: Program) -> int:
    m.turns.idle = 0
    m.turns.give(m.me)
    return 0


def _raise(fn: str):
    def act(m: Program, counter, value) -> int:
        m.signalled()
        word = m.word(int(counter))
        word[0] = word[0] + value if fn == "add" else max(int(word[0]), int(value))
        return 0

    return act


def _in_order(_: Program) -> int:
    """Launches do not overlap here."""
    return 0


def _exit(m: Program) -> int:
    raise EndedError("exit")


ACTS |= {WAIT: (("i64", "i32", "i64", "i64"), _wait), FENCE: ((), _fence), EXIT: ((), _exit)}
ACTS |= {text: (("i64", "i32"), _raise(fn)) for (fn, _), text in RAISE.items()}
ACTS |= {LET: ((), _in_order), AFTER: ((), _in_order)}


def own_view(memory: Memory) -> Memory:
    """The same arrays, with notes of its own of what a program has read and stored."""
    own = copy.copy(memory)
    own._stores, own._loads, own._stored, own.loops = {}, {}, {}, []
    return own


def run_in_turns(
    function: Any, programs: Sequence[tuple[Program, Sequence[int]]], turns: Turns, memory: Memory
) -> None:
    """Calls a function by all programs, a thread each, of which one goes on at a time; raises the first error."""

    def body(machine: Program, args: Sequence[int]) -> None:
        try:
            turns.begin(machine.me)
            values = [np.asarray(a, t.numpy) for a, (_, t) in zip(args, function.params, strict=True)]
            with np.errstate(all="ignore"):
                machine.call(function, values)
        except EndedError:
            pass
        except BaseException as e:
            turns.error = turns.error or e
        finally:
            turns.end(machine.me)

    in_threads(body, programs, turns, memory)


def in_threads(body: Callable[..., None], arguments: Sequence[tuple], turns: Turns, memory: Memory) -> None:
    """Runs programs, each in a thread, and raises the error of the first that failed."""
    threads = [threading.Thread(target=body, args=of, daemon=True) for of in arguments]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    memory.finish()
    if turns.error is not None:
        raise turns.error


class Site:
    """A call site on the devices of one group: blocks of memory that stay from call to call."""

    def __init__(self, kernel: Kernel, arch: str = "sm_90"):
        self.kernel = kernel
        self.text, self.record = emit_kernel(kernel, features(arch))
        (self.function,) = read(self.text).values()
        assert self.record.devices is not None
        self.facts = self.record.devices
        self.sizes = tuple(n for _, n in kernel.devices)
        self.blocks = [np.zeros(self.facts["bytes"] + UNIT, np.uint8) for _ in range(math.prod(self.sizes))]
        for block in self.blocks:  # symmetric memory is undefined when a call begins
            block[UNIT - SKEW + self.facts["memory"] :] = 0xFF
        self.reports = [np.zeros(8, np.int32) for _ in self.blocks]

    def call(self, inputs: np.ndarray | Sequence[Sequence[np.ndarray]], seed: int = 0) -> list[list[np.ndarray]]:
        """One call on every device: the outputs of each. `inputs`: those of each device."""
        parts = [buffers(self.kernel, self.record, [np.asarray(x) for x in one]) for one in inputs]
        arrays = [x for b in parts for x in b.all] + [x for pair in zip(self.blocks, self.reports) for x in pair]
        memory = Memory(arrays)
        base = [memory.base(k) for k in range(len(arrays))]
        first = len(arrays) - 2 * len(self.blocks)
        for rank, place in enumerate(np.ndindex(*self.sizes)):
            self._write(memory.bytes[first + 2 * rank], base[first:], place, rank)
        return self.run(memory, parts, base, [base[first + 2 * rank] + UNIT - SKEW for rank in range(len(parts))], seed)

    def run(
        self, memory: Memory, parts: Sequence[Buffers], base: Sequence[int], blocks: Sequence[int], seed: int
    ) -> list[list[np.ndarray]]:
        """The programs of all devices over a memory, in which arrays begin at `base`, and each device's block at one of
        `blocks`."""
        grid = value_of(self.record.grid)
        turns = Turns(len(parts) * grid, seed)
        programs, each = [], len(parts[0].all)
        for rank, part in enumerate(parts):
            at = [*base[each * rank : each * (rank + 1)], blocks[rank]]
            for block in range(grid):
                me = len(programs)
                machine = Program(turns, me, read(self.text), own_view(memory), grid, [], seed + me)
                machine.block = block
                args = [at[-1] if p["kind"] == "devices" else _argument(p, at, part.symbols, []) for p in
                        self.record.params]  # fmt: skip
                programs.append((machine, args))
        _check_params(self.function, self.record)
        run_in_turns(self.function, programs, turns, memory)
        return [part.outputs() for part in parts]

    def _write(self, block: np.ndarray, base: Sequence[int], place: Sequence[int], rank: int) -> None:
        """What the host writes."""
        block = block[UNIT - SKEW :]
        block[TIMEOUT : TIMEOUT + 8].view(np.int64)[0] = 1
        block[REPORT : REPORT + 8].view(np.int64)[0] = base[2 * rank + 1]
        block[PLACE : PLACE + 4 * len(place)].view(np.int32)[:] = place
        table = block[self.facts["table"] : self.facts["table"] + 8 * len(self.blocks)].view(np.int64)
        table[:] = [(base[2 * k] - base[2 * rank]) // UNIT for k in range(len(self.blocks))]

    def faults(self) -> dict[int, Fault]:
        """The reports of devices that have one."""
        out = {}
        for rank, report in enumerate(self.reports):
            if report[0]:
                where = self.facts["list"][report[1]]["where"]
                out[rank] = Fault(FAULTS[report[0]], where, int(report[2]), tuple(map(int, report[3:6])))
        return out

    def numbers(self, rank: int) -> dict[str, np.ndarray | int]:
        """What a block holds in front of its memory."""
        block, f = self.blocks[rank][UNIT - SKEW :], self.facts
        words = block[: f["memory"] // 4 * 4].view(np.int32)
        signals = sum(math.prod(shape) for _, shape in f["signals"])
        programs, first = math.prod(f["grid"]), f["counters"] // 4
        epochs = words[first : first + programs]
        first += programs * (1 + 2 * len({op.axis for op in _barriers(self.kernel)}))
        return {"fault": int(words[0]), "epochs": epochs,
                "signals": words[first : first + SETS * signals].reshape(SETS, signals)}  # fmt: skip


def _barriers(kernel: Kernel):
    from jtile.ir import AxisBarrier

    return [op for op in kernel.body.walk() if isinstance(op, AxisBarrier)]


def run_on_mesh(kernel: Kernel, inputs: Sequence[np.ndarray], calls: int = 5, seed: int = 0) -> list[np.ndarray]:
    """Emit a kernel and evaluate a few calls of one site on all devices; gives the outputs of the last.

    Args:
      inputs: with one leading axis for each axis of the kernel's mesh; outputs likewise.
    Raises:
      TtirError: as `evaluate`; a fault was reported; or signals of the calls to come are not zero, or a program
        has not counted the call.
    """
    site = Site(kernel)
    sizes = site.sizes
    parts = [[x[place] for x in inputs] for place in np.ndindex(*sizes)]
    outputs: list[list[np.ndarray]] = []
    for call in range(calls):
        outputs = site.call(parts, seed + 1000 * call)
        if site.faults():
            raise TtirError(f"call {call}: {site.faults()}")
        for rank in range(len(parts)):
            found = site.numbers(rank)
            later = found["signals"][[(call + 1) % SETS, (call + 2) % SETS]]  # of the next two calls
            if found["fault"] or np.any(found["epochs"] != call + 1) or np.any(later):
                raise TtirError(f"device {rank} after call {call}: {found}")
    stack = lambda k: np.stack([o[k] for o in outputs]).reshape(*sizes, *outputs[0][k].shape)
    return [stack(k) for k in range(len(outputs[0]))]


__all__ = ["Fault", "Site", "run_on_mesh"]
