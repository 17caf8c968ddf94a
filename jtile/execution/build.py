"""From a region to an execution graph: which memory each value is, what the kernels compile to, what they cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jtile import ir
from jtile._config import config, current
from jtile._memo import memo
from jtile.fusion.steps import Constant, Operand, Step, Value
from jtile.lowering import platforms
from jtile.lowering.targets import Target
from jtile.primitive.lowering import Complete, compile_piece, complete, pieces_of
from jtile.primitive.program import Program

from .devices import OF_GPU, PROGRAM, Sum, is_sum, joint, number_of, of_one
from .regions import Region, is_kernel, program_for
from .tasks import Memory, Task, TaskGraph, make_graph


@dataclasses.dataclass(frozen=True)
class Piece:
    """One kernel of a program: what a task is made of, and what it compiles to."""

    program: Program
    number: int
    target: Target

    @property
    def artifact(self) -> Any:
        """Of a platform whose graphs have an image for each task."""
        return compile_piece(self.program, self.number, self.target, bands=True)


@memo()
def _complete(program: Program, piece: int, target: Target, poison: bool) -> Complete:
    """The kernel as it is compiled: one object for all calls of a program, so that it is analysed once."""
    with config(poison=poison):
        return complete(pieces_of(program, target).kernels[piece], platforms.named(target.platform), bands=True)


@dataclasses.dataclass(frozen=True)
class Wired:
    """A graph, and how it is wired to what is outside.

    Attributes:
      operands: the graph's operands: values of the region, numbers of its text, arrays that outputs start from, tables
        of literals.
      results: for each output of the region the number of the result that holds it.
      joint: the graph of all devices, where these talk to each other: what the interpreter runs.
    """

    graph: TaskGraph
    operands: tuple[Operand | Any, ...]
    results: tuple[int, ...]
    joint: TaskGraph | None = None


class _Builder:
    """Gives every value of a region its memory. An update in place is a new version of one memory."""

    def __init__(
        self, region: Region, target: Target, poison: bool, cost: Callable[[Any, ir.Kernel], float], apart: bool
    ):
        self.region, self.target, self.poison, self.cost, self.apart = region, target, poison, cost, apart
        self.operands: list[Any] = []
        self.memories: list[Memory] = []
        self.of: dict[Any, int] = {}  # the number of the memory of a value, or of a constant
        self.tasks: list[Task] = []
        self.written: set[int] = set()

    def build(self, cores: int, **options: Any) -> Wired:
        for v in self.region.inputs:
            self.of[v] = self._operand(v, v.shape, ir.dtype_info(v.dtype).name)
        for step in self.region.steps:
            if is_sum(step):
                self._sum(step)
            elif is_kernel(step):
                self._kernel(step)
            else:
                self.of[step.outs[0]] = self._memory_of(step.ins[0])
        results = self._results()
        if self.apart:
            self._apart()
        devices = number_of(self.region.axes)
        if not self.region.axes:
            graph = make_graph(self.tasks, self.memories, cores, **options)
            return Wired(graph, tuple(self.operands), results)
        whole = make_graph(*joint(self.tasks, self.memories, devices), cores, **options)
        own = of_one(whole, self.tasks, self.memories, devices)
        own = dataclasses.replace(own, axes=self.region.axes)
        return Wired(own, tuple(self.operands), results, whole)

    def _operand(self, what: Any, shape: Sequence[int], dtype: str) -> int:
        self.operands.append(what)
        return self._memory(shape, dtype, len(self.operands) - 1)

    def _memory(self, shape: Sequence[int], dtype: str, operand: int | None = None) -> int:
        self.memories.append(Memory(tuple(shape), dtype, operand, None, f"m{len(self.memories)}"))
        return len(self.memories) - 1

    def _memory_of(self, x: Operand) -> int:
        if x not in self.of:
            assert isinstance(x, Constant)
            self.of[x] = self._operand(x, x.shape, ir.dtype_info(x.dtype).name)
        return self.of[x]

    def _kernel(self, step: Step) -> None:
        program = program_for(step, self.target)
        pieces = pieces_of(program, self.target)
        given = [self._memory_of(x) for x in step.ins]
        found: list[list[int]] = []
        for k, inputs in enumerate(pieces.inputs):
            found.append(self._piece(Piece(program, k, self.target), [given[i] for i in inputs]))
            given += [found[k][r.output] for r in pieces.between if r.piece == k]
        for v, r in zip(step.outs, pieces.results, strict=True):
            self.of[v] = found[r.piece][r.output]

    def _sum(self, step: Step) -> None:
        devices, program = number_of(self.region.axes), OF_GPU if self.apart else PROGRAM
        for x, v in zip(step.ins, step.outs, strict=True):
            source = Sum(math.prod(v.shape), ir.dtype_info(v.dtype).name, devices, self.target, program)
            kernel = source.kernel
            self.of[v] = self._memory(kernel.outputs[0].shape, source.dtype)
            self.written.add(self.of[v])
            memories, peers = (self._memory_of(x),) * devices, tuple(range(devices))
            cost = self.cost(source, kernel)
            self.tasks.append(Task(kernel, (*memories, self.of[v]), cost, source, (*peers, -1)))

    def _apart(self) -> None:
        """Let sums read memory of the graph alone: what others see is copied there first."""
        tasks: list[Task] = []
        for task in self.tasks:
            if task.peers and not self.memories[task.memories[0]].inner:
                source = dataclasses.replace(task.source, devices=1)
                copy = self._memory(source.kernel.outputs[0].shape, source.dtype)
                cost = self.cost(source, source.kernel)
                tasks.append(Task(source.kernel, (task.memories[0], copy), cost, source))
                task = dataclasses.replace(task, memories=(*(copy,) * task.source.devices, task.memories[-1]))
            tasks.append(task)
        self.tasks = tasks

    def _piece(self, piece: Piece, inputs: list[int]) -> list[int]:
        """Adds a task; gives the memories of its outputs."""
        whole = _complete(piece.program, piece.number, self.target, self.poison)
        kernel = whole.kernel
        starts = [self._operand(s, s.shape, ir.dtype_info(s.dtype).name) for s in (*whole.starts, *whole.tables)]
        inputs = [*inputs, *starts]
        source = {o: inputs[i] for i, o in kernel.aliases}
        outs = [source[k] if k in source else self._memory(v.shape, v.dtype) for k, v in enumerate(kernel.outputs)]
        self.written.update(outs)
        self.tasks.append(Task(kernel, (*inputs, *outs), self.cost(piece, kernel), piece))
        return outs

    def _results(self) -> tuple[int, ...]:
        """Numbers the results: the outputs of the region first, then operands that are updated for nobody outside."""
        own = dict.fromkeys(self.of[v] for v in self.region.outputs)
        updated = [k for k, m in enumerate(self.memories) if m.operand is not None and k in self.written]
        number = {m: k for k, m in enumerate(dict.fromkeys([*own, *updated]))}
        self.memories = [dataclasses.replace(m, result=number.get(k)) for k, m in enumerate(self.memories)]
        return tuple(number[self.of[v]] for v in self.region.outputs)


def guessed(piece: Piece | Sum, kernel: ir.Kernel) -> float:
    """Predicted nanoseconds of one program of a kernel, without compiling it."""
    from jtile.lowering.cpu.cost import program_cost_ns

    return float(program_cost_ns(kernel))


def compiled(piece: Piece | Sum, kernel: ir.Kernel) -> float:
    """Predicted nanoseconds of one program of a kernel, as it was compiled."""
    return float(piece.artifact.launch["cost"])


def wire(
    region: Region,
    target: Target,
    cores: int,
    cost: Callable[[Any, ir.Kernel], float] = guessed,
    poison: bool | None = None,
    apart: bool = False,
    **options: Any,
) -> Wired:
    """The execution graph of a region.

    Args:
      cost: predicted nanoseconds of a program of a kernel.
      poison: whether outputs start from numbers that no kernel computes by accident; None: as the option says.
      apart: what other devices read lies in memory of its own, where XLA puts no arrays.
      options: arguments of `make_graph`.
    """
    poison = current().poison if poison is None else poison
    return _Builder(region, target, poison, cost, apart).build(cores, **options)


def array_of(operand: Any, values: dict[Value, np.ndarray]) -> np.ndarray:
    """An operand of a graph as an array, where `values` has the inputs of the region."""
    if isinstance(operand, Value):
        return np.asarray(values[operand])
    if isinstance(operand, Constant):
        return np.asarray(operand.value, operand.dtype)
    if isinstance(operand, np.ndarray):
        return operand
    return np.full(operand.shape, operand.value, operand.dtype)
