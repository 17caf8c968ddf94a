"""Which axes the values of a group have in common, and which of them a program takes whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

from jtile._memo import memo

from .gathers import JOINS, index_dimensions, table_dimensions, tiles_of
from .steps import ELEMENTWISE, PLACES, REDUCTIONS, RUNNING, Operand, Step, Value

MOST_AXES = 6
COLUMNS = 64  # columns that a tile has at least where a sum runs along another axis than the last


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a group of steps.

    Attributes:
      sizes: the size of each axis.
      whole: the axes that every program takes whole, since something is summed along them; the grid has the others.
      axes: for each value, the axis of each of its dimensions of more than one element.
      late: the axes along which nothing but results is summed: each program adds up what it has, and its sums are added
        up at the end.
    """

    sizes: tuple[int, ...]
    whole: frozenset[int]
    axes: dict[Value, tuple[int, ...]]
    late: frozenset[int] = frozenset()

    @property
    def row(self) -> int:
        """The number of elements along the axes that a program takes whole."""
        return math.prod(self.sizes[a] for a in self.whole)

    def shape_of(self, value: Value) -> tuple[int, ...]:
        """The shape of the array that stands for a value: without dimensions of one element, and with merged ones."""
        return tuple(self.sizes[a] for a in self.axes[value])

    def covers(self, value: Value, without: frozenset[int] = frozenset()) -> bool:
        """Whether no two programs have the same element of a value, which lacks the axes `without`."""
        own = set(self.axes[value])
        return set(range(len(self.sizes))) - self.whole - without <= own and without.isdisjoint(own)


class Axes:
    """Which dimensions of values are the same axis, as steps say: a union-find forest."""

    def __init__(self):
        self._parent: dict[tuple[Value, int], tuple[Value, int]] = {}

    def find(self, at: tuple[Value, int]) -> tuple[Value, int]:
        parent, root = self._parent, at
        while (above := parent.get(root)) is not None:
            root = above
        while at != root:
            parent[at], at = root, parent[at]
        return root

    def join(self, x: Operand, i: int, y: Operand, j: int) -> None:
        if isinstance(x, Value) and isinstance(y, Value) and x.shape[i] != 1 and y.shape[j] != 1:
            self.unite((x, i), (y, j))

    def unite(self, x: tuple[Value, int], y: tuple[Value, int]) -> None:
        a, b = self.find(x), self.find(y)
        if a != b:
            self._parent[a] = b


def layout_of(
    steps: Sequence[Step],
    ends: Sequence[Value],
    same: Iterable[tuple[Operand, Operand]] = (),
    last: Collection[Step] = (),
    apart: Collection[tuple[Value, int]] = (),
) -> Layout | None:
    """The layout of steps whose inputs and outputs are `ends`, where pairs of `same` shape have the same axes; None if
    their values have no axes in common. last: sums that no other step reads, which need no whole axes; apart:
    dimensions that are not merged with others."""
    axes, whole, alone, late = Axes(), [], [*apart], []
    for step in steps:
        relate(step, axes, late if step in last else whole, alone)
    for x, y in same:
        for i in range(len(x.shape)):
            axes.join(x, i, y, i)
    tables_of = {step.outs[0] for step in steps if step.name in JOINS}  # what is scattered into has axes of its own
    ends = [v for v in ends if v not in tables_of]
    of_steps = (
        v for step in steps for v in (*tiles_of(step), *step.outs) if isinstance(v, Value) and v not in tables_of
    )
    values = list(dict.fromkeys([*of_steps, *ends]))
    of = {v: [axes.find((v, i)) for i, n in enumerate(v.shape) if n != 1] for v in values}
    if any(len(set(roots)) < len(roots) for roots in of.values()):
        return None
    tables = [
        [axes.find((step.outs[0], i)) for i in side]
        for step in steps
        if step.name == "gather"
        for side in table_dimensions(step)
    ]
    order: list = []
    for v in sorted(values, key=lambda v: -len(of[v])):
        order += [root for root in of[v] if root not in order]
    kept = {axes.find(at) for at in whole}
    summed = {axes.find(at) for at in late} - kept
    kinds = {root: (root in kept, root in summed) for root in order}
    runs = _merged(order, kinds, {axes.find(at) for at in alone}, of.values(), [of[v] for v in ends] + tables)
    number = {root: k for k, run in enumerate(runs) for root in run[:1]}
    sizes = tuple(math.prod(root[0].shape[root[1]] for root in run) for run in runs)
    if len(sizes) > MOST_AXES:
        return None
    numbers = {v: tuple(number[root] for root in roots if root in number) for v, roots in of.items()}
    whole_axes, late_axes = (frozenset(number[root] for root in roots if root in number) for roots in (kept, summed))
    return Layout(sizes, whole_axes, numbers, late_axes)


def relate(step: Step, axes: Axes, whole: list | None = None, alone: list | None = None) -> None:
    """What one step says of the dimensions of its values: `whole` gets those along which something is summed, `alone`
    those that are not merged with others."""
    found = _related(step)
    for x, y in found.pairs:
        axes.unite(x, y)
    if whole is not None:
        whole += found.whole
    if alone is not None:
        alone += found.alone


class _Relations(Axes):
    """What one step says, whatever group it is asked for: `pairs` of dimensions that are the same, and those that
    `relate` adds to `whole` and to `alone`."""

    def __init__(self):
        super().__init__()
        self.pairs: list[tuple[tuple[Value, int], tuple[Value, int]]] = []
        self.whole: list[tuple[Value, int]] = []
        self.alone: list[tuple[Value, int]] = []

    def unite(self, x: tuple[Value, int], y: tuple[Value, int]) -> None:
        self.pairs.append((x, y))


@memo(entries=1024)
def _related(step: Step) -> _Relations:
    axes = _Relations()
    whole, alone = axes.whole, axes.alone
    (out,) = step.outs
    if step.name in ELEMENTWISE or step.name in RUNNING:
        for x in step.ins:
            for i in range(len(x.shape)):
                axes.join(x, i, out, i)
        if step.name in RUNNING:
            whole.append((out, step.params["axis"]))
            alone.append((out, step.params["axis"]))
    elif step.name in REDUCTIONS or step.name in PLACES:
        (x,) = step.ins
        gone = set(step.params["axes"])
        for j, i in enumerate(i for i in range(len(x.shape)) if i not in gone):
            axes.join(x, i, out, j)
        whole += [(x, i) for i in gone if isinstance(x, Value)]
        alone += [(x, i) for i in gone if step.name in PLACES and isinstance(x, Value)]
    elif step.name == "broadcast_in_dim":
        for i, j in enumerate(step.params["broadcast_dimensions"]):
            axes.join(step.ins[0], i, out, j)
    elif step.name == "transpose":
        for j, i in enumerate(step.params["permutation"]):
            axes.join(step.ins[0], i, out, j)
    elif step.name == "dot_general":
        _relate_product(step, axes)
    elif step.name == "gather":
        for i, j in enumerate(index_dimensions(step)):
            axes.join(step.ins[1], i, out, j)
    elif step.name in JOINS:
        _relate_scatter(step, axes, whole, alone)
    elif step.name == "iota":
        alone.append((out, step.params["dimension"]))
    else:  # the step only adds or drops dimensions of one element
        before, after = ([i for i, n in enumerate(v.shape) if n != 1] for v in (step.ins[0], out))
        for i, j in zip(before, after, strict=True):
            axes.join(step.ins[0], i, out, j)
    return axes


def _relate_scatter(step: Step, axes: Axes, whole: list, alone: list) -> None:
    """The indices have the dimensions of the updates that do not lie in the table; all of the updates are added up."""
    (_, *parts, updates), window = step.ins, step.params["dimension_numbers"].update_window_dims
    of_index = [i for i in range(len(updates.shape)) if i not in window]
    for part in parts:
        for i, j in enumerate(of_index):
            axes.join(part, i, updates, j)
    whole += [(updates, i) for i in range(len(updates.shape))]
    alone += [(updates, i) for i in window]


def _relate_product(step: Step, axes: Axes) -> None:
    (x, y), (out,) = step.ins, step.outs
    (sum_x, sum_y), (batch_x, batch_y) = step.params["dimension_numbers"]
    for i, j in [*zip(sum_x, sum_y, strict=True), *zip(batch_x, batch_y, strict=True)]:
        axes.join(x, i, y, j)
    free_x = [i for i in range(len(x.shape)) if i not in (*sum_x, *batch_x)]
    free_y = [i for i in range(len(y.shape)) if i not in (*sum_y, *batch_y)]
    for k, i in enumerate([*batch_x, *free_x]):
        axes.join(x, i, out, k)
    for k, i in enumerate(free_y, len(batch_x) + len(free_x)):
        axes.join(y, i, out, k)


def _merged(order: list, kinds: dict, alone: set, values: Iterable[list], ends: list[list]) -> list[list]:
    """Runs of axes that every value has side by side or not at all: arrays have one dimension for each."""
    values = [*map(list, values)]
    runs: list[list] = []
    for root in order:
        last = runs[-1][-1] if runs else None
        beside = last is not None and root not in alone and last not in alone and kinds[root] == kinds[last]
        if beside and all(_together(roots, last, root) for roots in [*values, *ends]):
            runs[-1].append(root)
        else:
            runs.append([root])
    return runs


def _together(roots: list, first, second) -> bool:
    if first not in roots and second not in roots:
        return True
    return first in roots and roots.index(first) + 1 < len(roots) and roots[roots.index(first) + 1] == second
