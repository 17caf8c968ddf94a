"""A graph as the numbers that the runtime of CPUs reads (ffi/csrc/task_plan.cc), and where its inner memory lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jtile.ir.types import DTYPES

from .boxes import parts
from .schedule import Schedule
from .tasks import TaskGraph, footprint_of

VERSION = 2  # the version of this format; ffi/csrc/task_plan.cc refuses others
ALIGNMENT = 64  # bytes of which the place of a memory is a multiple
OPERAND, RESULT, ARENA = range(3)
AHEAD, PARTS = 256 << 10, 64  # bytes that a band fetches while it waits, and in how many parts


def arena(graph: TaskGraph, apart: bool = False) -> tuple[dict[int, int], int]:
    """(byte where each inner memory lies, bytes of all). A memory lies where an earlier one did if every band that
    touches the earlier one is over before any band that touches the later one starts. `apart`: what other devices read
    lies elsewhere."""
    graph, shared = graph.alone, graph.shared
    users: dict[int, list[int]] = {}
    for k, band in enumerate(graph.bands):
        for m in set(graph.tasks[band.task].memories):
            users.setdefault(m, []).append(k)
    slots: list[list[int]] = []  # [bytes, bands that touched what lay there last]
    slot: dict[int, int] = {}
    for m, memory in enumerate(graph.memories):  # memories stand in the order of the tasks that make them
        if not memory.inner or m not in users or (apart and m in shared):
            continue
        over = _over_before(graph, users[m])
        fits = [k for k, (_, last) in enumerate(slots) if last & ~over == 0]
        if fits:
            k = min(fits, key=lambda k: (abs(slots[k][0] - memory.bytes), k))
            slots[k] = [max(slots[k][0], memory.bytes), _bits(users[m])]
        else:
            k = len(slots)
            slots.append([memory.bytes, _bits(users[m])])
        if m in shared:  # nothing here says when other devices have read it: nothing comes behind it
            slots[k][1] = -1
        slot[m] = k
    ends = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size, _ in slots)])
    return {m: int(ends[k]) for m, k in slot.items()}, int(ends[-1])


def _over_before(graph: TaskGraph, users: Sequence[int]) -> int:
    """The bands that are over before any of `users` starts, as bits."""
    over = -1
    for above in {id(graph.above[k]): graph.above[k] for k in users}.values():
        over &= above
    return over


def _bits(bands: Sequence[int]) -> int:
    out = bytearray(max(bands) // 8 + 1)
    for k in bands:
        out[k // 8] |= 1 << k % 8
    return int.from_bytes(out, "little")


def encode(schedule: Schedule, kernels: Sequence[int], static: bool) -> tuple[np.ndarray, int]:
    """(the plan, bytes of the arena).

    Args:
      kernels: for each task the number of its compiled kernel.
      static: every core has the bands that the schedule gives it; otherwise each core takes the next band of all.
    """
    graph = schedule.graph
    offsets, size = arena(graph)
    out: list[int] = [VERSION, len(graph.tasks)]
    for kernel, task in zip(kernels, graph.tasks, strict=True):
        out += [kernel, len(task.memories)]
        for m, device in zip(task.memories, task.peers or (-1,) * len(task.memories), strict=True):
            memory = graph.memories[m]
            if memory.result is not None:
                out += [RESULT, memory.result]
            else:
                out += [OPERAND, memory.operand] if memory.operand is not None else [ARENA, offsets[m]]
            out.append(device + 1)
    place = {b: k for k, b in enumerate(schedule.order)}
    event = {needs: k for k, needs in enumerate(graph.events)}
    meeting = {needs: len(event) + k for k, needs in enumerate(graph.meetings)}
    signals, everywhere = _signals(graph, event), _signals(graph, meeting)
    out += [len(event) + len(meeting), *map(len, event), *(len(m) * graph.devices for m in meeting), len(graph.bands)]
    for b in schedule.order:
        band = graph.bands[b]
        waits = [event[band.needs]] if band.needs else []
        waits += [meeting[band.everywhere]] if band.everywhere else []
        ahead = _ahead(graph, b) if waits else []
        out += [band.task, band.begin, band.end, len(waits), *waits, len(signals[b]), *signals[b]]
        out += [len(everywhere[b]), *everywhere[b], len(ahead)]
        for part in ahead:
            out += part
    ends = [meeting[m] for m in graph.meetings[-1:]]
    out += [len(ends), *ends]
    cores = [schedule.core[b] if static else 0 for b in schedule.order]
    queues = [
        [place[b] for b, c in zip(schedule.order, cores, strict=True) if c == core] for core in sorted(set(cores))
    ]
    out.append(len(queues))
    for queue in queues:
        out += [len(queue), *queue]
    return np.asarray(out, np.int64), size


def _signals(graph: TaskGraph, numbers: dict[tuple[int, ...], int]) -> list[list[int]]:
    """For each band the numbers of the sets that it is part of."""
    out: list[list[int]] = [[] for _ in graph.bands]
    for needs, e in numbers.items():
        for b in needs:
            out[b].append(e)
    return out


def _ahead(graph: TaskGraph, band: int) -> list[tuple[int, int, int]]:
    """(operand, offset, bytes) of what a band reads that no task writes: weights."""
    b = graph.bands[band]
    task = graph.tasks[b.task]
    found = footprint_of(task.kernel, b.begin, b.end)
    out: list[tuple[int, int, int]] = []
    left = AHEAD
    for m, region in zip(task.memories, found.reads, strict=True):
        memory: Any = graph.memories[m]
        if memory.operand is None or memory.result is not None or not region.boxes:
            continue
        for offset, size in parts(region, DTYPES[memory.dtype].bits // 8, PARTS - len(out)):
            if left > 0 and size > 0:
                out.append((memory.operand, offset, min(size, left)))
                left -= size
    return out
