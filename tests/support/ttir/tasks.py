"""Launches of execution graphs: the blocks of one GPU, each in a thread, over the memory of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jtile import passes
from jtile.execution.persistent import kernels_of, launch_of
from jtile.execution.schedule import Schedule
from jtile.ir.types import DTYPES
from jtile.lowering import starts
from jtile.lowering.triton.emit_tasks import AGAIN, FETCH, PARAMETER, POLL, SIGNAL, Tasks
from jtile.lowering.triton.features import features
from jtile.lowering.triton.task_pages import AWAIT, BEGIN, HERE, PUT, SIZES, START, TABLE
from jtile.lowering.triton.task_pages import PAGE as PAGE_BYTES

from .devices import UNIT, Program, Turns, _wait, own_view, run_in_turns
from .launch import _argument, _check_params, read, value_of
from .memory import SKEW, Memory
from .ops_math import ACTS, GIVES

REPORT, TIMEOUT = 24, 16  # bytes of the block, see emit_devices.py


def _signal(m: Program, counter) -> int:
    m.signalled()
    m.word(int(counter))[0] += 1
    return 0


ACTS |= {POLL: (("i64", "i32", "i64", "i64"), _wait), SIGNAL: (("i64",), _signal), AGAIN: (("i64",), _signal)}
ACTS |= {FETCH: (("i64", "i32"), lambda m, address, size: 0 * m.word(int(address))[0])}


# -- pages: a copy takes place when it starts or when it is waited for, as the seed of the block decides --------------


def _here(m: BlockProgram, size: int) -> int:
    assert size == m.memory.sizes[m.pages]
    return m.memory.base(m.pages)


def _begin(m: BlockProgram, base: int) -> int:
    m.read, m.begun, m.late = 0, 0, {}
    return 0


def _put(m: BlockProgram, at, address, size, starts):
    view = m.memory.bytes[m.pages]
    for one in zip(at, address, size, starts, strict=True):
        _, offset = m.memory.place(int(one[0]))
        view[offset : offset + 8].view(np.int64)[0] = one[1]
        view[offset + 8 : offset + 16].view(np.int32)[:] = one[2:]
    return np.zeros(at.shape, np.int32)


def _row(m: BlockProgram, k: int) -> tuple[int, int, int, int]:
    """(address, bytes, place, copies to start) of a row of the table."""
    row = m.memory.bytes[m.pages][TABLE + 16 * k :][:16]
    size, starts = map(int, row[8:].view(np.uint32))
    return int(row[:8].view(np.int64)[0]), size % (1 << SIZES), (size >> SIZES) * PAGE_BYTES, starts


def _copy(m: BlockProgram, k: int) -> None:
    address, size, place, _ = _row(m, k)
    array, offset = m.memory.place(address)
    assert not size or 0 <= offset <= offset + size <= m.memory.sizes[array], "a copy out of bounds"
    m.memory.bytes[m.pages][place : place + size] = m.memory.bytes[array][offset : offset + size] if size else 0


def _await(m: BlockProgram, base: int) -> int:
    assert m.read < m.begun, "a copy that nobody starts"
    if m.late.pop(m.read):
        _copy(m, m.read)
    return _row(m, m.read)[2]


def _start(m: BlockProgram, base: int, more: int) -> int:
    m.read += int(more)
    starts = _row(m, m.read)[3]
    for k in range(starts & 0xFFFF, starts >> 16):
        assert k == m.begun and k not in m.late
        _, size, place, _ = _row(m, k)
        m.memory.bytes[m.pages][place : place + size] = 0xFF  # what lay here is over
        m.begun, m.late[k] = k + 1, bool(m.random.integers(2))
        if not m.late[k]:
            _copy(m, k)
    return 0


ACTS |= {HERE: (("i32",), _here), BEGIN: (("i64",), _begin), AWAIT: (("i64",), _await)}
ACTS |= {START: (("i64", "i32"), _start), PUT: (("i64", "i64", "i32", "i32"), _put)}
GIVES[HERE] = "i64"
OF_GRAPH = PARAMETER.format(name="jtile_graph")
ACTS[OF_GRAPH], GIVES[OF_GRAPH] = (("i32",), lambda m, k: np.asarray(m.given, np.int64)[k]), "i64"


class BlockProgram(Program):
    """The machine of a block: its pages are a memory of its own."""

    pages = read = begun = 0
    given: Sequence[int] = ()  # its parameters
    late: dict[int, bool] = {}  # copies that have started; whether they take place only when they are waited for


class GraphSite:
    """A call site of a graph on one GPU: its block of memory stays from call to call."""

    def __init__(self, schedule: Schedule, arch: str = "sm_90"):
        self.graph = schedule.graph
        self.operands = sum(m.operand is not None for m in self.graph.memories)
        self.launch = launch_of(schedule, self.operands, traced=False)
        kernels = [passes.run_pipeline(starts.without_idle_aliases(k), passes.TILE) for k in kernels_of(self.graph)]
        self.text, self.record = Tasks(kernels, self.launch.shape, features(arch), [None] * len(kernels)).emit()
        (self.function,) = read(self.text).values()
        self.facts: dict[str, Any] = self.record.devices or {}
        self.block, self.report = np.zeros(self.facts["bytes"] + UNIT, np.uint8), np.zeros(8, np.int32)

    def call(self, operands: Sequence[np.ndarray], seed: int = 0, plan: np.ndarray | None = None) -> list[np.ndarray]:
        """The results of a launch, in the order of their numbers. Operands that are updated are copied."""
        outside, results = self.arrays(operands, plan)
        arrays = [*outside, self.block, self.report]
        base = [Memory(arrays).base(k) for k in range(len(arrays))]
        first, pages = len(arrays), self.launch.shape.pages
        arrays += [np.full(pages.bytes, 0xFF, np.uint8) for _ in self.grid()] if pages else []
        memory = Memory(arrays)
        block = memory.bytes[first - 2][UNIT - SKEW :]
        block[TIMEOUT : TIMEOUT + 8].view(np.int64)[0] = 1
        block[REPORT : REPORT + 8].view(np.int64)[0] = base[-1]
        turns = Turns(len(self.grid()), seed)
        at = [*base[:-2], base[-2] + UNIT - SKEW]
        self.run(turns, self.programs(turns, memory, at, first, 0, seed), memory)
        return results

    def arrays(
        self, operands: Sequence[np.ndarray], plan: np.ndarray | None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(the arrays of a call, the results among them)"""
        outs = sorted((m.result, m) for m in self.graph.memories if m.result is not None)
        results = [
            np.full(m.shape, np.nan if DTYPES[m.dtype].kind == "f" else 77, DTYPES[m.dtype].numpy)
            if m.operand is None
            else np.array(operands[m.operand])
            for _, m in outs
        ]
        inner = np.full(self.launch.inner, 0xFF, np.uint8)
        return [*map(np.array, operands), self.launch.plan if plan is None else plan, *results, inner], results

    def grid(self) -> range:
        return range(value_of(self.record.grid))

    def programs(
        self, turns: Turns, memory: Memory, base: Sequence[int], pages: int, first: int, seed: int
    ) -> list[tuple[Program, Sequence[int]]]:
        """The blocks of a device and their parameters: arrays begin at `base`, pages are the memories from number
        `pages` on, and `first` is the number of the first block among those of all devices."""
        found = []
        for block in self.grid():
            me = first + block
            machine = BlockProgram(turns, me, read(self.text), own_view(memory), len(self.grid()), [], seed + me)
            machine.block, machine.pages = block, pages + block
            args = [base[-1] if p["kind"] == "devices" else _argument(p, base, [], []) for p in self.record.params]
            machine.given = [int(a) for a in args]
            found.append((machine, args))
        return found

    def run(self, turns: Turns, programs: Sequence[tuple[Program, Sequence[int]]], memory: Memory) -> None:
        _check_params(self.function, self.record)
        run_in_turns(self.function, programs, turns, memory)
