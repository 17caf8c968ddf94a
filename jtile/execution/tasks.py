"""The execution graph: kernels as tasks, their programs in bands, and which bands wait for which.

It is a small IR of its own below the tensor level: a `TaskGraph` prints, is simulated (`schedule`), interpreted
(`interpret`) and run by one call (`primitive`). Its tasks are Tile IR.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jtile import ir
from jtile._errors import KernelValueError
from jtile._memo import memo
from jtile.ir.types import DTYPES

from .boxes import Footprint, Region, footprint

LEAST_NS = 2_000  # nanoseconds of work that are worth a band of their own
PER_CORE = 2  # bands into which a task is cut for each core, at most


@dataclasses.dataclass(frozen=True)
class Memory:
    """An array that tasks read or write; under in-place updates, all of its versions.

    Attributes:
      shape, dtype: its shape, and the dtype of its elements, a name of Tile IR.
      operand: which operand of the graph it is at first, or None: nothing is in it before a task writes.
      result: which result of the graph it is in the end, or None.
      name: its name in texts.
    """

    shape: tuple[int, ...]
    dtype: str
    operand: int | None
    result: int | None
    name: str

    @property
    def bytes(self) -> int:
        return -(-math.prod(self.shape) * DTYPES[self.dtype].bits // 8)

    @property
    def inner(self) -> bool:
        """Whether nobody outside of the graph sees it."""
        return self.operand is None and self.result is None


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """One kernel of a graph.

    Attributes:
      kernel: Tile IR, with an input for each number that an output starts from.
      memories: for each input and output of the kernel the number of its memory.
      cost: predicted nanoseconds of one program.
      source: the caller's own name or object for the task.
      peers: for each of its memories the device whose memory it is, -1 for the own one; empty: all are its own.
      device: the device that runs it, in a graph of several.
    """

    kernel: ir.Kernel
    memories: tuple[int, ...]
    cost: float
    source: Any = None
    peers: tuple[int, ...] = ()
    device: int | None = None

    @property
    def programs(self) -> int:
        return math.prod(self.kernel.grid)


@dataclasses.dataclass(frozen=True)
class Band:
    """The programs [begin, end) of a task, which one core runs one after another.

    Attributes:
      task: the number of the task.
      cost: predicted nanoseconds of all programs of the band.
      needs: the bands that must be over before it starts, by number; none that another of them waits for.
      everywhere: bands that must be over on all devices.
    """

    task: int
    begin: int
    end: int
    cost: float
    needs: tuple[int, ...]
    everywhere: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class TaskGraph:
    """Tasks, in an order in which they may run one after another, their bands and the memory between them; that of one
    device, where `devices` run equal graphs, those along `axes` of a mesh (with their sizes)."""

    tasks: tuple[Task, ...]
    memories: tuple[Memory, ...]
    bands: tuple[Band, ...]
    cores: int
    devices: int = 1
    axes: tuple[tuple[str, int], ...] = ()

    @functools.cached_property
    def above(self) -> tuple[int, ...]:
        """For each band the bands that are surely over when it starts, as bits."""
        return tuple(_above([band.needs for band in self.bands]))

    @property
    def edges(self) -> int:
        return sum(len(band.needs) + len(band.everywhere) for band in self.bands)

    @functools.cached_property
    def events(self) -> tuple[tuple[int, ...], ...]:
        """The sets of bands that bands wait for, each once: a counter in memory stands for each."""
        return tuple(dict.fromkeys(band.needs for band in self.bands if band.needs))

    @functools.cached_property
    def awaited(self) -> tuple[tuple[int, ...], ...]:
        """The sets of bands that bands wait for on all devices, each once."""
        return tuple(dict.fromkeys(band.everywhere for band in self.bands if band.everywhere))

    @functools.cached_property
    def meetings(self) -> tuple[tuple[int, ...], ...]:
        """`awaited`, and last the set of all bands that read memory of others."""
        if self.devices == 1:
            return ()
        readers = tuple(k for k, band in enumerate(self.bands) if self.tasks[band.task].peers)
        return tuple(dict.fromkeys([*self.awaited, readers]))

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """The memories that other devices read."""
        if self.devices == 1:
            return frozenset()
        return frozenset(m for t in self.tasks for m, d in zip(t.memories, t.peers, strict=False) if d >= 0)

    @functools.cached_property
    def alone(self) -> TaskGraph:
        """The graph as if what a band needs of all devices were of its own only."""
        bands = [
            dataclasses.replace(b, needs=tuple(sorted({*b.needs, *b.everywhere})), everywhere=()) for b in self.bands
        ]
        return self if self.devices == 1 else dataclasses.replace(self, bands=tuple(bands), devices=1)

    def name(self, band: int) -> str:
        """The name of a band in messages."""
        b = self.bands[band]
        task = self.tasks[b.task]
        where = "" if task.device is None else f" of device {task.device}"
        return f"task {b.task} ({task.kernel.name}){where}, programs {b.begin}:{b.end}"

    def without(self, edge: tuple[int, int]) -> TaskGraph:
        """The graph without one edge, (the band that waits, the band that it waits for): wrong, for tests of the
        interpreter."""
        late, early = edge
        if early not in self.bands[late].needs:
            raise KernelValueError(f"band {late} does not wait for band {early}: it waits for {self.bands[late].needs}")
        rest = tuple(n for n in self.bands[late].needs if n != early)
        bands = [dataclasses.replace(b, needs=rest) if k == late else b for k, b in enumerate(self.bands)]
        return dataclasses.replace(self, bands=tuple(bands))

    def __str__(self) -> str:
        head = (
            f"graph of {len(self.tasks)} tasks, {len(self.bands)} bands, {self.edges} edges, {len(self.events)} events"
        )
        devices = f" of each of {self.devices} devices" if self.devices > 1 else ""
        lines = [f"{head}, for {self.cores} cores{devices}"]
        lines += [f"  %{k} = {_described(m)}" for k, m in enumerate(self.memories)]
        for t, task in enumerate(self.tasks):
            peers = task.peers or (-1,) * len(task.memories)
            names = ", ".join(f"%{m}" + f" of {d}" * (d >= 0) for m, d in zip(task.memories, peers, strict=True))
            lines.append(f"  task {t}: {task.kernel.name}{tuple(task.kernel.grid)} on {names}")
            for k, b in enumerate(self.bands):
                if b.task == t:
                    waits = ", ".join(map(str, b.needs))
                    far = ", ".join(map(str, b.everywhere))
                    behind = f" behind {waits}" if waits else ""
                    behind += f" behind {far} of all devices" if far else ""
                    lines.append(f"    band {k}: programs {b.begin}:{b.end}, {b.cost / 1e3:.1f} us{behind}")
        return "\n".join(lines)


def _described(m: Memory) -> str:
    ends = [f"operand {m.operand}"] * (m.operand is not None) + [f"result {m.result}"] * (m.result is not None)
    return f"{m.dtype}[{','.join(map(str, m.shape))}] {', '.join(ends) or 'inner'}"


def _above(needs: Sequence[tuple[int, ...]]) -> list[int]:
    out: list[int] = []
    known: dict[tuple[int, ...], int] = {}  # many bands wait for the same ones: they share a number of many bits
    for own in needs:
        if own not in known:
            known[own] = functools.reduce(lambda bits, n: bits | out[n] | 1 << n, own, 0)
        out.append(known[own])
    return out


# -- making one -------------------------------------------------------------------------------------------------------


def cut(programs: int, cost: float, cores: int) -> list[tuple[int, int]]:
    """The bands of a grid: as many as its work is worth, a multiple of the cores where it has enough for all."""
    worth = int(min(programs, PER_CORE * cores, max(programs * cost // LEAST_NS, 1)))
    if worth > cores:
        worth -= worth % cores
    return [(programs * k // worth, programs * (k + 1) // worth) for k in range(worth)]


@memo(entries=4096)
def footprint_of(kernel: ir.Kernel, begin: int, end: int) -> Footprint:
    return footprint(kernel, begin, end)


@dataclasses.dataclass(frozen=True)
class _Touch:
    """What bands of a task do to a memory."""

    task: int
    reads: Region
    writes: Region

    def orders(self, later: _Touch) -> bool:
        """Whether a later access must wait for this one."""
        if self.task == later.task:
            return False
        return self.writes.meets(later.reads) or self.writes.meets(later.writes) or self.reads.meets(later.writes)


def make_graph(
    tasks: Sequence[Task],
    memories: Sequence[Memory],
    cores: int,
    split: Callable[[int, float, int], list[tuple[int, int]]] = cut,
) -> TaskGraph:
    """The graph of tasks that may run in the given order: a band waits for those of earlier tasks that write what it
    touches, or read what it writes.

    Args:
      split: (programs of a task, predicted nanoseconds of one, cores) to the bands (begin, end) of the task.
    """
    written = {m for task in tasks for m in task.memories[len(task.kernel.inputs) :]}
    touched: dict[int, dict[_Touch, list[int]]] = {m: {} for m in written}  # bands that touch the same share an entry
    bands: list[Band] = []
    lasts = _Lasts()
    for t, task in enumerate(tasks):
        new: list[tuple[int, _Touch, int]] = []
        known: dict[tuple[int, _Touch], frozenset[int]] = {}  # bands that touch the same wait for the same
        for begin, end in split(task.programs, task.cost, cores):
            found = footprint_of(task.kernel, begin, end)
            needs: frozenset[int] = frozenset()
            for m, reads, writes in zip(task.memories, found.reads, found.writes, strict=True):
                if m not in written:
                    continue
                touch = _Touch(t, reads, writes)
                new.append((m, touch, len(bands)))
                if (m, touch) not in known:
                    earlier = [own for old, own in touched[m].items() if old.orders(touch)]
                    known[m, touch] = frozenset(itertools.chain.from_iterable(earlier))
                needs |= known[m, touch]
            bands.append(Band(t, begin, end, (end - begin) * task.cost, lasts.add(needs)))
        for m, touch, band in new:
            touched[m].setdefault(touch, []).append(band)
    return TaskGraph(tuple(tasks), tuple(memories), tuple(bands), cores)


class _Lasts:
    """Leaves out of what bands wait for, band by band, those that another of them waits for."""

    def __init__(self) -> None:
        self.above: list[int] = []
        self.known: dict[frozenset[int], tuple[tuple[int, ...], int]] = {}

    def add(self, needs: frozenset[int]) -> tuple[int, ...]:
        if needs not in self.known:
            kept: list[int] = []
            bits = 0
            for n in sorted(needs, reverse=True):
                if not bits >> n & 1:
                    kept.append(n)
                    bits |= self.above[n]
            self.known[needs] = tuple(sorted(kept)), functools.reduce(lambda bits, n: bits | 1 << n, kept, bits)
        kept_, bits = self.known[needs]
        self.above.append(bits)
        return kept_
