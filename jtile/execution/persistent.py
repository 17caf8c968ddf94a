"""A graph as one persistent launch of a GPU: the plan that its blocks go by, and its image.

`lowering/triton/emit_tasks.py` says what the words of a plan mean. Each block has the bands that the predicted timeline
gives to a core: no block takes those of another, so that all blocks must run at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jtile import ir
from jtile._errors import UnsupportedError
from jtile.ir.types import DTYPES
from jtile.lowering import registry
from jtile.lowering.platforms import Platform, milliseconds
from jtile.lowering.targets import Target
from jtile.lowering.triton.emit_tasks import AHEAD, SIGNALS, STARTS, UNIT, Shape, row_words
from jtile.lowering.triton.task_devices import Far
from jtile.lowering.triton.task_pages import ROW as COPY
from jtile.lowering.triton.task_pages import Pages
from jtile.primitive.lowering import compiler_options
from jtile.tune.prune import predicted_us

from .boxes import parts
from .build import Piece
from .devices import Sum
from .encode import arena
from .pages import inputs_in_pages, lists, pages_for, room_for_pages, rows
from .schedule import Schedule
from .tasks import Task, TaskGraph, footprint_of

PLACED = 256  # bytes of which the beginning of the inner memories is a multiple
LEAST_NS = 300.0  # nanoseconds of a program, at least
FETCHED = 128 << 10  # bytes of an array that a block fetches for its next band, at most: all blocks fill half the cache


def spread(programs: int, cost: float, cores: int) -> list[tuple[int, int]]:
    """The bands of a grid: as many as there are cores, where it has so many programs. A band costs its block no more
    than the program itself, and a block reads memory at its own rate only."""
    del cost
    n = min(programs, cores)
    return [(programs * k // n, programs * (k + 1) // n) for k in range(n)]


def predicted(piece: Piece | Sum, kernel: ir.Kernel) -> float:
    """Predicted nanoseconds of one program of a kernel, when all multiprocessors run some."""
    whole, programs = predicted_us(kernel, piece.target) * 1e3, max(math.prod(kernel.grid), 1)
    return max(whole * min(piece.target.programs_at_once, programs) / programs, LEAST_NS)


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the call of a graph needs.

    Attributes:
      plan: int32, the last operand of the call.
      inner: bytes of the memory between tasks, the result behind those of the graph.
      shape: what the code depends on.
    """

    plan: np.ndarray
    inner: int
    shape: Shape


def launched(schedule: Schedule, operands: int, traced: bool, target: Target) -> tuple[Launch, Any]:
    """The plan of a schedule and its compiled launch; without pages where no block has room for them.

    Args:
      operands: how many the graph has.
    """
    launch = launch_of(schedule, operands, traced, room_for_pages(target))
    try:
        return launch, image(schedule.graph, launch, target)
    except UnsupportedError:
        if launch.shape.pages is None:
            raise
    launch = launch_of(schedule, operands, traced, pages=False)
    return launch, image(schedule.graph, launch, target)


def launch_of(schedule: Schedule, operands: int, traced: bool, pages: bool = True) -> Launch:
    """The plan of a schedule.

    Args:
      operands: how many the graph has.
      pages: whether weights come in pages.
    """
    graph = schedule.graph
    results = sum(m.result is not None for m in graph.memories)
    offsets, size = arena(graph, apart=True)
    places = sorted(set(offsets.values()))
    arrays = operands + results
    others, far = _others(graph)
    first = -(-8 * (arrays + len(places) + len(others) // 2) // PLACED) * PLACED
    entry = [_entry(m, operands, arrays, places, offsets.get(k)) for k, m in enumerate(graph.memories)]
    for k, m in enumerate(sorted(graph.shared)):
        entry[m] = arrays + len(places) + k * (graph.devices + 1)
    arrivals = np.cumsum([0, *(_counters(task.kernel) for task in graph.tasks)])
    fixed = dict(zip(numbers(graph), _fixed(graph), strict=True))
    ring, copies = _pages(schedule, entry, fixed) if pages else (None, [])
    in_pages = {
        s: inputs_in_pages(k, fixed[s]) if ring else set() for s, k in zip(fixed, kernels_of(graph), strict=True)
    }
    names = row_words(far is not None)
    lines, more = _rows(schedule, names, entry, arrivals, in_pages)
    starts = np.cumsum([0, *(len(own) for own in lines)])
    flat = [row for own in lines for row in own]
    width = len(flat[0])
    head = STARTS + len(starts) + (len(flat) + 1) * width
    end = head + len(more) + len(places)
    behind = end + len(others)
    behind += -(behind + len(starts)) % COPY  # so that rows of copies are a multiple of their words from the beginning
    words = np.zeros(behind + len(copies), np.int32)
    words[:5] = head + len(more), len(places), behind, end, len(others) // 2
    words[end : end + len(others)] = others
    words[behind:] = copies
    words[behind : behind + len(starts)] += (behind + len(starts)) // COPY if ring else 0
    words[STARTS : STARTS + len(starts)] = starts
    table = words[STARTS + len(starts) : head].reshape(-1, width)
    table[: len(flat)] = flat
    for word in {"signals", "meetings"} & set(names):
        table[: len(flat), names.index(word)] += head
    words[head : head + len(more)] = more
    words[head + len(more) :][: len(places)] = [(first + at) // UNIT for at in places]
    shape = Shape(
        (operands, results), graph.cores, traced, len(graph.events), int(arrivals[-1]), "jtile_graph",
        tuple(fixed.values()), ring, far,
    )  # fmt: skip
    return Launch(words, first + max(size, 1), shape)


def _others(graph: TaskGraph) -> tuple[list[int], Far | None]:
    """The entries for memories that devices read of each other, two words each, and how the graph talks to them: for
    each memory the own one first, then that of each device."""
    if graph.devices == 1:
        return [], None
    words, at = [], 0
    for m in sorted(graph.shared):
        words += [word for d in (graph.devices, *range(graph.devices)) for word in (at // UNIT, d)]
        at += -(-graph.memories[m].bytes // PLACED) * PLACED
    return words, Far(graph.axes, len(graph.awaited), at)


def _pages(
    schedule: Schedule, entry: Sequence[int], fixed: dict[Any, tuple[int, ...]]
) -> tuple[Pages | None, list[int]]:
    """The pages of a launch, and the words of its copies: for each block where they begin, then their rows."""
    found = lists(schedule, entry, fixed)
    pages = pages_for(found)
    if pages is None:
        return None, []
    words = [rows(own, pages) for own in found]
    return pages, [*map(int, np.cumsum([0, *(len(own) // COPY for own in words)])), *(w for own in words for w in own)]


def _entry(memory: Any, operands: int, arrays: int, places: Sequence[int], offset: int | None) -> int:
    """The number of a memory in the table of arrays."""
    if memory.result is not None:
        return operands + memory.result
    if memory.operand is not None:
        return memory.operand
    return arrays + places.index(offset) if offset is not None else 0


def _fixed(graph: TaskGraph) -> tuple[tuple[int, ...], ...]:
    """For each kernel the inputs that, in all of its tasks, neither the task nor an earlier one writes, such as
    weights. Later ones that write them wait for its bands."""
    written: set[int] = set()
    number = numbers(graph)
    found: list[set[int]] = [set(range(len(k.inputs))) for k in kernels_of(graph)]
    for task in graph.tasks:
        written.update(task.memories[len(task.kernel.inputs) :])
        found[number[task.source]] -= {k for k, m in enumerate(task.memories) if m in written}
    return tuple(tuple(sorted(own)) for own in found)


def _counters(kernel: ir.Kernel) -> int:
    return sum(size for _, size in ir.counters_of(kernel).values())


def _rows(
    schedule: Schedule,
    names: Sequence[str],
    entry: Sequence[int],
    arrivals: np.ndarray,
    in_pages: dict[Any, set[int]],
) -> tuple[list[list[list[int]]], list[int]]:
    """For each block the rows of its bands, and the events and meetings that bands count in besides those that their
    rows have words for. `names`: of the words of a row. `in_pages`: for the source of each task the inputs of which
    tiles come in pages."""
    graph = schedule.graph
    event, signals = _counted(graph, graph.events)
    meeting, met = _counted(graph, graph.awaited)
    number = numbers(graph)
    arrays = max(len(task.memories) for task in graph.tasks)
    rows: list[list[list[int]]] = [[] for _ in range(graph.cores)]
    more: list[int] = []
    row_of: dict[int, list[int]] = {}  # the row of the last band of each block
    for place, b in enumerate(schedule.order):
        band = graph.bands[b]
        task, own = graph.tasks[band.task], signals[b]
        words = {
            "kernel": number[task.source], "begin": band.begin, "end": band.end,
            "event": event[band.needs] if band.needs else -1, "count": len(band.needs),
            "more": len(own[len(SIGNALS) :]), "signals": len(more),
            "arrivals": int(arrivals[band.task]), "band": place,
        }  # fmt: skip
        words |= {word: own[k] if k < len(own) else -1 for k, word in enumerate(SIGNALS)}
        more += own[len(SIGNALS) :]
        if graph.devices > 1:
            words |= {
                "meeting": meeting[band.everywhere] if band.everywhere else -1, "all": len(band.everywhere),
                "met": met[b][0] if met[b] else -1, "more meetings": len(met[b][1:]), "meetings": len(more),
            }  # fmt: skip
            more += met[b][1:]
        memories = _arrays(graph, task, entry)
        row = [words.get(w, 0) for w in names] + memories + [0] * (arrays - len(memories))
        core = schedule.core[b]
        if core in row_of:  # the band in front fetches for this one
            for words_of, part in zip(AHEAD, _ahead(graph, b, entry, in_pages[task.source]), strict=False):
                for word, number_ in zip(words_of, part, strict=True):
                    row_of[core][names.index(word)] = number_
        rows[core].append(row)
        row_of[core] = row
    return rows, more


def _counted(graph: TaskGraph, sets: Sequence[tuple[int, ...]]) -> tuple[dict[tuple[int, ...], int], list[list[int]]]:
    """(the number of each set of bands; for each band the numbers of those that it is in)"""
    numbers_, of_band = {own: k for k, own in enumerate(sets)}, [[] for _ in graph.bands]
    for own, k in numbers_.items():
        for b in own:
            of_band[b].append(k)
    return numbers_, of_band


def _arrays(graph: TaskGraph, task: Task, entry: Sequence[int]) -> list[int]:
    """The numbers of the arrays of a task: those of other devices stand behind the own one."""
    if graph.devices == 1 or not task.peers:
        return [entry[m] for m in task.memories]
    return [entry[m] + 1 + peer for m, peer in zip(task.memories, task.peers, strict=True)]


def _ahead(graph: TaskGraph, band: int, entry: Sequence[int], but: set[int]) -> list[tuple[int, int, int]]:
    """(array, place in units of `UNIT` bytes, bytes) of what a band reads in one piece and no task writes: weights, the
    largest parts first, without the inputs `but`, which come in pages."""
    b = graph.bands[band]
    task = graph.tasks[b.task]
    found = []
    for k, (m, region) in enumerate(zip(task.memories, footprint_of(task.kernel, b.begin, b.end).reads, strict=True)):
        memory = graph.memories[m]
        if k in but or memory.operand is None or memory.result is not None or not region.boxes:
            continue
        for offset, size in parts(region, DTYPES[memory.dtype].bits // 8, 1):
            first, last = offset // UNIT, min(offset + size, offset + FETCHED) // UNIT
            if last > first:
                found.append((entry[m], first, (last - first) * UNIT))
    return sorted(found, key=lambda part: -part[2])[: len(AHEAD)]


def numbers(graph: TaskGraph) -> dict[Any, int]:
    """The kernels of a graph, each once, and their numbers."""
    out: dict[Any, int] = {}
    for task in graph.tasks:
        out.setdefault(task.source, len(out))
    return out


def kernels_of(graph: TaskGraph) -> list[ir.Kernel]:
    """The kernels of a graph, by their numbers."""
    return list({task.source: task.kernel for task in graph.tasks}.values())


def image(graph: TaskGraph, launch: Launch, target: Target) -> Any:
    """The compiled launch, an `Artifact`."""
    kernels, pieces = dict(zip(numbers(graph), kernels_of(graph), strict=True)), list(numbers(graph))
    options = [{} if isinstance(p, Sum) else compiler_options(p.program, p.number, target) for p in pieces]
    text = "\n".join(ir.print_kernel(kernels[p], locations=False) for p in pieces)
    return registry.compile_graph([kernels[p] for p in pieces], target, options, launch.shape, key=text)


def attributes(platform: Platform, artifact: Any, groups: np.ndarray | None = None) -> dict[str, Any]:
    """The attributes of the custom call. `groups`: the devices that talk to each other, see `device_groups`; None:
    each is alone."""
    given = platform.attributes(artifact, None, {})  # type: ignore[arg-type]
    return given | {"groups": np.zeros(0, np.int64) if groups is None else groups, "timeout": milliseconds()}
