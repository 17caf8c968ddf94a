"""Launches of execution graphs: the blocks of one GPU, each in a thread, over the memory of a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jtile import passes
from jtile.execution.persistent import kernels_of, launch_of
from jtile.execution.schedule import Schedule
from jtile.ir.types import DTYPES
from jtile.lowering import starts
from jtile.lowering.triton.emit_tasks import AGAIN, FETCH, POLL, SIGNAL, Tasks
from jtile.lowering.triton.features import features

from .devices import UNIT, Program, Turns, _wait, own_view, run_in_turns
from .launch import _argument, _check_params, read, value_of
from .memory import SKEW, Memory
from .ops_math import ACTS

REPORT, TIMEOUT = 24, 16  # bytes of the block, see emit_devices.py


def _signal(m: Program, counter) -> int:
    m.signalled()
    m.word(int(counter))[0] += 1
    return 0


ACTS |= {POLL: (("i64", "i32", "i64", "i64"), _wait), SIGNAL: (("i64",), _signal), AGAIN: (("i64",), _signal)}
ACTS |= {FETCH: (("i64", "i32"), lambda m, address, size: 0 * m.word(int(address))[0])}


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
        g = self.graph
        outs = sorted((m.result, m) for m in g.memories if m.result is not None)
        results = [np.full(math.prod(m.shape), 0xAA, np.uint8) for _, m in outs]
        results = [
            np.full(m.shape, np.nan if DTYPES[m.dtype].kind == "f" else 77, DTYPES[m.dtype].numpy)
            if m.operand is None
            else np.array(operands[m.operand])
            for _, m in outs
        ]
        inner = np.full(self.launch.inner, 0xFF, np.uint8)
        given = [np.array(x) for x in operands]
        arrays = [*given, self.launch.plan if plan is None else plan, *results, inner, self.block, self.report]
        memory = Memory(arrays)
        base = [memory.base(k) for k in range(len(arrays))]
        block = memory.bytes[-2][UNIT - SKEW :]
        block[TIMEOUT : TIMEOUT + 8].view(np.int64)[0] = 1
        block[REPORT : REPORT + 8].view(np.int64)[0] = base[-1]
        self._run(memory, [*base[:-2], base[-2] + UNIT - SKEW], seed)
        return results

    def _run(self, memory: Memory, base: Sequence[int], seed: int) -> None:
        grid = value_of(self.record.grid)
        turns, programs = Turns(grid, seed), []
        for block in range(grid):
            machine = Program(turns, block, read(self.text), own_view(memory), grid, [], seed + block)
            machine.block = block
            args = [base[-1] if p["kind"] == "devices" else _argument(p, base, [], []) for p in self.record.params]
            programs.append((machine, args))
        _check_params(self.function, self.record)
        run_in_turns(self.function, programs, turns, memory)
