"""What the parts of a program are that run as kernels, and the plan of a program that is cut into them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from .chains import Chain
from .gathers import JOINS
from .layout import Layout
from .loops import Loop
from .operands import Source
from .row_scatters import RowScatter
from .steps import Node, Program, Step, Value
from .windows import has_windows


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Nodes of a program that one kernel computes.

    Attributes:
      nodes: the nodes, in order; those that make constants for them first.
      inputs, outputs: what the kernel reads and writes; behind all other inputs the table of each gather, and behind
        these that of each scatter, which the kernel does not read.
      layout: which axes the values have.
      last: sums along axes that no program takes whole.
    """

    nodes: list[Node]
    inputs: list[Value]
    outputs: list[Value]
    layout: Layout
    last: list[Step]

    @property
    def steps(self) -> list[Step]:
        return [step for node in self.nodes for step in node.steps]

    @functools.cached_property
    def windowed(self) -> bool:
        """Whether the group reads windows of arrays: slices of them, say."""
        return has_windows(self.steps)

    @functools.cached_property
    def gathers(self) -> list[Step]:
        """The steps of the group that pick from tables."""
        return [step for step in self.steps if step.name == "gather"]

    @functools.cached_property
    def scatters(self) -> list[Step]:
        """The steps of the group that add to tables."""
        return [step for step in self.steps if step.name in JOINS]

    @property
    def read(self) -> list[Value]:
        """The inputs of the kernel: those of the group without the tables of scatters."""
        return self.inputs[: len(self.inputs) - len(self.scatters)]

    @property
    def loaded(self) -> list[Value]:
        """The inputs of the group without the tables of gathers and scatters."""
        return self.inputs[: len(self.inputs) - len(self.gathers) - len(self.scatters)]

    @property
    def by_equations(self) -> bool:
        """Whether the derivative is that of the equations: some have rules of their own, or a kernel's would keep all
        partial sums, or add to elements of a table, or of windows, one by one."""
        return bool(self.last or self.gathers or self.windowed) or any(node.ruled for node in self.nodes)


ROWS, COLUMNS = 0, 1  # the axes of a product's layout


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """Products of one left operand, what computes their operands, and what is computed of their elements.

    Attributes:
      nodes: those that compute or transpose operands, the products, and the elementwise nodes behind them.
      inputs: what the left operand is or is computed of, the same of the right ones, and what the nodes behind read.
      outputs: what the kernel writes.
      products: the equations of the products. steps: the elementwise ones.
      layout: its two axes are the rows and the columns of the products.
      sources: where the left operand and the right ones come from.
    """

    nodes: list[Node]
    inputs: list[Value]
    outputs: list[Value]
    products: list[Step]
    steps: list[Step]
    layout: Layout
    sources: list[Source]

    by_equations = True  # the derivative has products of other shapes, which choose kernels of their own

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns, and terms of a sum."""
        m, n = self.layout.sizes
        return m, n, self.products[0].ins[0].shape[-1]

    @property
    def extras(self) -> list[Value]:
        """What the elementwise nodes behind the products read besides."""
        return self.inputs[sum(len(source.inputs) for source in self.sources) :]


Unit = Group | Chain | Loop | Product | RowScatter  # the parts of a program that run as kernels


@dataclasses.dataclass
class Plan:
    """How a program runs.

    Attributes:
      order: what runs one after another: a unit, or the number of a node that stays XLA's.
      left: for each group that is not worth a kernel (the number of the first node, those of all nodes, why).
      inside: by a node's number, and the name of a parameter, the plans of the functions in it, if one has a kernel.
      firsts: the number of the first node of each kernel. windows: whether kernels read slices and pads in place.
      origin: what to say of who cut it.
      kernels: those of its parts that have been made.
    """

    program: Program
    order: list[Unit | int]
    left: list[tuple[int, list[int], str]]
    inside: dict[int, dict[str, tuple[Plan, ...]]]
    firsts: list[int]
    windows: bool = False
    origin: str = ""
    kernels: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def units(self) -> list[Unit]:
        """The kernels of the plan, without those of functions inside."""
        return [unit for unit in self.order if not isinstance(unit, int)]

    @property
    def has_kernels(self) -> bool:
        return bool(self.units or self.inside)
