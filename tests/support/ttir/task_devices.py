"""Launches of execution graphs of several GPUs: the blocks of all devices, each in a thread, over memory that all of
them reach. A seed decides who goes on, and in which order the counters of a meeting are raised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jtile.execution.schedule import Schedule
from jtile.lowering.triton.task_devices import MEET, TELL

from .devices import PLACE, REPORT, TIMEOUT, UNIT, EndedError, Program, Turns, in_threads, waited
from .memory import SKEW, Memory
from .ops_math import ACTS
from .tasks import GraphSite


def _tell(m: Program, table, counter, devices) -> int:
    array, offset = m.memory.place(int(table))
    away = m.memory.bytes[array][offset : offset + 8 * int(devices)].view(np.int64)
    for k in m.random.permutation(int(devices)):
        m.signalled()
        m.word(int(counter) + UNIT * int(away[k]))[0] += 1
    return 0


def _meet(m: Program, counters, wanted, fault, timeout, devices) -> int:
    return waited(m, [int(counters) + 4 * k for k in range(int(devices))], wanted, fault, timeout)


ACTS |= {TELL: (("i64", "i64", "i32"), _tell), MEET: (("i64", "i32", "i64", "i64", "i32"), _meet)}


class GraphWorld(GraphSite):
    """A call site of a graph on all of its devices: their blocks of memory stay from call to call."""

    def __init__(self, schedule: Schedule, arch: str = "sm_90"):
        super().__init__(schedule, arch)
        self.sizes = tuple(n for _, n in schedule.graph.axes)
        count = math.prod(self.sizes)
        self.blocks = [np.zeros(self.facts["bytes"] + UNIT, np.uint8) for _ in range(count)]
        for block in self.blocks:  # memory that others read is undefined when a call begins
            block[UNIT - SKEW + self.facts["memory"] :] = 0xFF
        self.reports = [np.zeros(8, np.int32) for _ in self.blocks]

    def launches(
        self, operands: Sequence[Sequence[Sequence[np.ndarray]]], seed: int = 0, plan: np.ndarray | None = None
    ) -> list[list[list[np.ndarray]]]:
        """The results of launches one behind the other, on every device: a device begins its next one when all of its
        blocks have ended, whatever the others do.

        Args:
          operands: of each launch on each device.
        """
        each = [[self.arrays(own, plan) for own in of_launch] for of_launch in operands]
        outside = [x for of_launch in each for own, _ in of_launch for x in own]
        arrays = [*outside, *(x for pair in zip(self.blocks, self.reports, strict=True) for x in pair)]
        first, behind, count = len(outside), len(arrays), len(self.blocks)
        pages = self.launch.shape.pages
        arrays += [np.full(pages.bytes, 0xFF, np.uint8) for _ in self.blocks for _ in self.grid()] if pages else []
        memory = Memory(arrays)
        base = [memory.base(k) for k in range(len(arrays))]
        begins = [base[first + 2 * rank] + UNIT - SKEW for rank in range(count)]
        for rank, place in enumerate(np.ndindex(*self.sizes)):
            report = base[first + 2 * rank + 1]
            self._write(memory.bytes[first + 2 * rank][UNIT - SKEW :], place, report, begins, rank)
        turns, programs, n = Turns(count * len(self.grid()), seed), [], len(each[0][0][0])
        for k in range(len(each)):
            programs.append([])
            for rank in range(count):
                at = [*base[n * (count * k + rank) :][:n], begins[rank]]
                me = len(programs[k])
                programs[k] += self.programs(turns, memory, at, behind + me, me, seed + 1000 * k)
        self._run_in_a_row(turns, programs, memory)
        return [[results for _, results in of_launch] for of_launch in each]

    def _write(self, block: np.ndarray, place: Sequence[int], report: int, begins: Sequence[int], rank: int) -> None:
        """What the host writes."""
        block[TIMEOUT : TIMEOUT + 8].view(np.int64)[0] = 1
        block[REPORT : REPORT + 8].view(np.int64)[0] = report
        block[PLACE : PLACE + 4 * len(place)].view(np.int32)[:] = place
        table = block[self.facts["table"] :][: 8 * len(begins)].view(np.int64)
        table[:] = [(begin - begins[rank]) // UNIT for begin in begins]

    def _run_in_a_row(self, turns: Turns, programs: Sequence[Sequence[Any]], memory: Memory) -> None:
        """Calls the function by all programs of each launch, a thread for those of one number."""
        blocks = len(self.grid())
        ended = [[0] * len(self.blocks) for _ in programs]

        def body(me: int) -> None:
            try:
                turns.begin(me)
                for k, of_launch in enumerate(programs):
                    machine, args = of_launch[me]
                    values = [np.asarray(a, t.numpy) for a, (_, t) in zip(args, self.function.params, strict=True)]
                    with np.errstate(all="ignore"):
                        machine.call(self.function, values)
                    ended[k][me // blocks] += 1
                    while ended[k][me // blocks] < blocks:
                        turns.give(me)
            except EndedError:
                for of_launch in ended:  # the host hears of it, and starts no other launch
                    of_launch[me // blocks] += blocks
            except BaseException as e:
                turns.error = turns.error or e
            finally:
                turns.end(me)

        in_threads(body, [(me,) for me in range(len(programs[0]))], turns, memory)
