"""The reference interpreter of execution graphs, which says what a graph means, and finds missing edges.

Programs of bands that may run at the same time take turns, as a seed decides. Every memory notes who touched each of
its elements; two accesses to one, of which one is a write, must be ordered by edges. So an edge that misses is found in
whatever order the programs run, if an element shows that it is needed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jtile._errors import RaceError
from jtile.interpret.machine import Machine
from jtile.interpret.memory import Buffer, Lanes, poison
from jtile.interpret.order import Order
from jtile.ir.types import DTYPES
from jtile.lowering.targets import Target

from .boxes import Box, region
from .build import array_of, wire
from .regions import Region
from .tasks import TaskGraph, footprint_of


class _Edges(Order[int]):
    """Bands are spans; what happened before one is what the edges of the graph say. Bands of one task are not in each
    other's way here, which is their kernel's own affair, but none of them stands for another."""

    def __init__(self, graph: TaskGraph):
        super().__init__()
        self.graph, self.band, self.ours = graph, 0, 0
        self.own = [0] * len(graph.tasks)  # the bands of each task
        for k, b in enumerate(graph.bands):
            self.own[b.task] |= 1 << k

    def span(self) -> int:
        return self.band

    def known(self) -> int:
        return self.graph.above[self.band] | self.ours

    def before(self, span: int, known: int) -> bool:
        return bool(known >> self.spans[span] & 1)

    def name(self, span: int) -> str:
        return self.graph.name(self.spans[span])

    def unknown(self, others: np.ndarray) -> np.ndarray:
        with self._ours():
            return super().unknown(others)

    def stranger(self, number: int) -> int:
        with self._ours():
            return super().stranger(number)

    @contextlib.contextmanager
    def _ours(self) -> Iterator[None]:
        self.ours = self.own[self.graph.bands[self.band].task]
        try:
            yield
        finally:
            self.ours = 0


class _Shared(Buffer):
    """The memory of a graph, as one Ref of one task sees it: its elements, and whether they hold something, are those
    of all; who of the task's own programs touched them is its own."""

    def __init__(self, whole: Buffer, shape: tuple[int, ...], number: int, noted: bool):
        super().__init__(np.empty(0, whole.data.dtype), defined=True)
        self.shape, self.data, self.defined, self.whole, self.number = shape, whole.data, whole.defined, whole, number
        if noted:
            self.plain, self.atomic, self.reader = (np.full(self.data.shape, -1) for _ in range(3))


class _TaskMachine(Machine):
    """One task: its kernel over the memory of the graph."""

    def __init__(self, graph: TaskGraph, number: int, memories: Sequence[Buffer], edges: _Edges):
        task = graph.tasks[number]
        kernel, self.graph, self.edges = task.kernel, graph, edges
        refs = [*kernel.inputs, *kernel.outputs]
        empty = [np.empty(v.shape, DTYPES[v.dtype].numpy) for v in kernel.inputs]
        super().__init__(kernel, empty, check=True)
        written = set(task.memories[len(kernel.inputs) :])
        views: dict[int, _Shared] = {}
        for v, m in zip(refs, task.memories, strict=True):
            if m not in views:
                views[m] = _Shared(memories[m], v.shape, m, m in written)
            view = views[m]
            if v.shape != view.shape:  # one memory is two operands of two shapes, which note their programs together
                view = _Shared(memories[m], v.shape, m, False)
                view.plain, view.atomic, view.reader = views[m].plain, views[m].atomic, views[m].reader
            self.env[v] = view

    def touch(self, op: Any, buffer: Buffer, lanes: Lanes, kind: str) -> None:
        if isinstance(buffer, _Shared):
            at = lanes.elements
            conflict = buffer.whole.access(at, 0, kind, self.edges)
            if conflict:
                element, other, did = conflict
                raise self._race(op, buffer, kind, element, f"{self.edges.name(other)} {did}")
            if kind != "write" and not buffer.defined[at].all():
                element = int(at[np.argmin(buffer.defined[at])])
                late = self._writer(buffer, element)
                if late is not None:
                    raise self._race(op, buffer, kind, element, f"{self.graph.name(late)} writes")
        super().touch(op, buffer, lanes, kind)

    def _race(self, op: Any, buffer: _Shared, kind: str, element: int, what: str) -> RaceError:
        verb = {"read": "reads", "write": "writes", "atomic": "updates atomically"}[kind]
        memory = f"%{buffer.number} of the graph"
        own = self.graph.name(self.edges.band)
        why = f"an edge is missing: {own} {verb} element {buffer.unravel(element)} of {memory}, which {what}"
        error = self.error(RaceError, op, f"{why}, and no edge orders the two", op.ref)
        assert isinstance(error, RaceError)
        return error

    def _writer(self, buffer: _Shared, element: int) -> int | None:
        """A band that may write an element, and that this one does not wait for."""
        known = self.edges.known() | self.edges.own[self.graph.bands[self.edges.band].task]
        for k, band in enumerate(self.graph.bands):
            task = self.graph.tasks[band.task]
            if known >> k & 1 or buffer.number not in task.memories[len(task.kernel.inputs) :]:
                continue
            found = footprint_of(task.kernel, band.begin, band.end)
            refs = [*task.kernel.inputs, *task.kernel.outputs]
            for v, m, written in zip(refs, task.memories, found.writes, strict=True):
                at = np.unravel_index(element, v.shape) if v.shape else ()
                box = Box(tuple(int(i) for i in at), tuple(int(i) + 1 for i in at))
                if m == buffer.number and written.meets(region(v.shape, [box])):
                    return k
        return None


def run_graph(graph: TaskGraph, operands: Sequence[np.ndarray], seed: int = 0) -> list[np.ndarray]:
    """Runs a graph; gives the results, in the order of their numbers.

    Raises:
      RaceError: two bands touch one element, one of them writes it, and no edge orders them.
      What `jtile.interpret.interpret` raises for each kernel.
    """
    memories = []
    for m in graph.memories:
        known = m.operand is not None
        start = operands[m.operand] if m.operand is not None else poison(m.shape, m.dtype)
        memories.append(Buffer(np.asarray(start).reshape(m.shape), defined=known, shared=True))
    edges = _Edges(graph)
    machines = [_TaskMachine(graph, t, memories, edges) for t in range(len(graph.tasks))]
    missing = [len(b.needs) for b in graph.bands]
    after: list[list[int]] = [[] for _ in graph.bands]
    left = [0] * len(graph.tasks)
    for k, band in enumerate(graph.bands):
        left[band.task] += 1
        for early in band.needs:
            after[early].append(k)
    rng = random.Random(seed)
    ready = [k for k, n in enumerate(missing) if not n]
    running: dict[int, int] = {}  # band -> its next program
    with np.errstate(all="ignore"):
        while ready or running:
            if ready and (not running or (len(running) < max(graph.cores, 2) and rng.random() < 0.5)):
                k = ready.pop(rng.randrange(len(ready)))
                running[k] = graph.bands[k].begin
            k = rng.choice(list(running))
            band = graph.bands[k]
            edges.band = k
            machines[band.task].program(running[k])
            running[k] += 1
            if running[k] < band.end:
                continue
            del running[k]
            left[band.task] -= 1
            arrivals = machines[band.task].arrivals
            if not left[band.task] and arrivals is not None:
                arrivals.end()
            for late in after[k]:
                missing[late] -= 1
                if not missing[late]:
                    ready.append(late)
    results = sorted((m.result, k) for k, m in enumerate(graph.memories) if m.result is not None)
    return [memories[k].array.copy() for _, k in results]


def interpret_region(
    region: Region,
    values: Sequence[np.ndarray],
    target: Target,
    cores: int,
    seed: int = 0,
    change: Callable[[TaskGraph], TaskGraph] | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """The outputs of a region for its inputs, by the interpreter; `change` makes another graph of its graph;
    `options` are those of `wire`. Where devices talk to each other, each array has one more axis in front, of all
    devices, and the graph is that of all of them."""
    wired = wire(region, target, cores, poison=False, **options)
    whole = wired.joint or wired.graph
    graph = change(whole) if change else whole
    worlds = [values] if wired.joint is None else [[x[d] for x in values] for d in range(wired.graph.devices)]
    operands = []
    for own in worlds:
        have = dict(zip(region.inputs, own, strict=True))
        operands += [array_of(x, have) for x in wired.operands]
    found = run_graph(graph, operands, seed)
    if wired.joint is None:
        return [found[r].reshape(v.shape) for r, v in zip(wired.results, region.outputs, strict=True)]
    each = len(found) // len(worlds)
    of = lambda r, v: np.stack([found[d * each + r].reshape(v.shape) for d in range(len(worlds))])
    return [of(r, v) for r, v in zip(wired.results, region.outputs, strict=True)]
