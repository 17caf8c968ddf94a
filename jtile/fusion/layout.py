"""Which axes the values of a group have in common, and which of them a program takes whole."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jtile._memo import memo

from .gathers import JOINS, index_dimensions, table_dimensions, tiles_of
from .steps import ELEMENTWISE, PLACES, REDUCTIONS, RUNNING, Node, Operand, Step, Value

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


At = tuple[Value, int]  # a dimension of a value


class Axes:
    """Which dimensions of values are the same axis, as steps say."""

    def __init__(self):
        self._root: dict[At, At] = {}  # of each dimension that is the same as another one which stands for both
        self._others: dict[At, list[At]] = {}  # what such a one stands for besides itself

    def find(self, at: At) -> At:
        return self._root.get(at, at)

    def join(self, x: Operand, i: int, y: Operand, j: int) -> None:
        if isinstance(x, Value) and isinstance(y, Value) and x.shape[i] != 1 and y.shape[j] != 1:
            self.unite((x, i), (y, j))

    def unite(self, x: At, y: At) -> None:
        self.unite_all(((x, y),))

    def unite_all(self, pairs: Iterable[tuple[At, At]]) -> None:
        """Says of pairs of dimensions that the two are the same axis, for which the root of the second stands."""
        root, others = self._root, self._others
        for x, y in pairs:
            a, b = root.get(x, x), root.get(y, y)
            if a != b:
                moved = others.pop(a, [])
                moved.append(a)
                for at in moved:
                    root[at] = b
                if b in others:
                    others[b] += moved
                else:
                    others[b] = moved


class Said(Axes):
    """What steps say together of the values that they have.

    Attributes:
      dims: the dimensions of more than one element of each value.
      alone: those that are not merged with others.
      sums: for each step that sums, the dimensions along which it does.
      tables: what is scattered into.
    """

    def __init__(self, steps: Iterable[Step] = ()):
        super().__init__()
        self.dims: dict[Value, Sequence[At]] = {}
        self.alone: list[At] = []
        self.sums: list[tuple[Step, list[At]]] = []
        self.tables: list[Value] = []
        self._add(steps)

    def with_more(self, steps: Iterable[Step]) -> Said:
        """What these steps say, and others behind them."""
        new = Said()
        new._root, new.dims = self._root.copy(), self.dims.copy()
        new._others = {root: those.copy() for root, those in self._others.items()}
        new.alone, new.sums, new.tables = self.alone.copy(), self.sums.copy(), self.tables.copy()
        new._add(steps)
        return new

    def _add(self, steps: Iterable[Step]) -> None:
        for step in steps:
            found = _related(step)
            if found.pairs:
                self.unite_all(found.pairs)
            self.dims.update(found.dims)
            self.alone += found.alone
            if found.whole:
                self.sums.append((step, found.whole))
            if step.name in JOINS:
                self.tables.append(step.outs[0])


class Sayings:
    """What the steps of groups say, where a group is often one that was asked for before, with a node behind it."""

    BACK = 3  # nodes that were added since the group that is known, at most

    def __init__(self):
        self._known: dict[tuple[int, ...], tuple[list[Node], Said]] = {}

    def of(self, numbers: tuple[int, ...], constants: list[Node], nodes: Sequence[Node]) -> Said:
        """What the steps of a group's nodes say.

        Args:
          numbers: of `nodes` in the program; () where these have other steps than there.
          constants: the nodes in front of them.
        """
        steps = lambda nodes: [step for node in nodes for step in node.steps]
        said = None
        for n in range(len(numbers) - 1, max(len(numbers) - 1 - self.BACK, 0), -1):
            before = self._known.get(numbers[:n])
            if before is not None and before[0] == constants:
                said = before[1].with_more(steps(nodes[n:]))
                break
        said = said or Said(steps([*constants, *nodes]))
        if numbers:
            self._known[numbers] = constants, said
        return said


def layout_of(
    steps: Sequence[Step],
    ends: Sequence[Value],
    same: Sequence[tuple[Operand, Operand]] = (),
    last: Collection[Step] = (),
    apart: Collection[At] = (),
    said: Said | None = None,
) -> Layout | None:
    """The layout of steps whose inputs and outputs are `ends`, where pairs of `same` shape have the same axes; None if
    their values have no axes in common. last: sums that no other step reads, which need no whole axes; apart:
    dimensions that are not merged with others; said: by the steps, where that is known."""
    if said is None or same:
        said = Said(steps)
    for x, y in same:
        for i in range(len(x.shape)):
            said.join(x, i, y, i)
    whole = [at for step, along in said.sums if step not in last for at in along]
    late = [at for step, along in said.sums if step in last for at in along] if last else []
    tables_of, dims = set(said.tables), said.dims  # what is scattered into has axes of its own
    if tables_of:
        dims = {v: own for v, own in dims.items() if v not in tables_of}
    ends = [v for v in ends if v not in tables_of]
    if more := {v: _long(v) for v in ends if v not in dims}:
        dims = dims | more
    find = said.find
    of = {v: tuple(map(find, own)) for v, own in dims.items()}
    different = sorted(dict.fromkeys(of.values()), key=len, reverse=True)  # many values have the same axes
    if any(len(roots) > 1 and len(set(roots)) < len(roots) for roots in different):
        return None
    tables = [
        tuple(find((step.outs[0], i)) for i in side)
        for step in steps
        if step.name == "gather"
        for side in table_dimensions(step)
    ]
    order = [*dict.fromkeys(itertools.chain.from_iterable(different))]
    kept = set(map(find, whole))
    summed = set(map(find, late)) - kept
    kinds = {root: (root in kept, root in summed) for root in order}
    runs = _merged(order, kinds, set(map(find, [*said.alone, *apart])), [*different, *tables])
    number = {root: k for k, run in enumerate(runs) for root in run[:1]}
    sizes = tuple(math.prod(root[0].shape[root[1]] for root in run) for run in runs)
    if len(sizes) > MOST_AXES:
        return None
    picked = lambda roots: tuple([number[root] for root in roots if root in number])
    numbers = {roots: picked(roots) for roots in different}
    return Layout(
        sizes, frozenset(picked(kept)), {v: numbers[roots] for v, roots in of.items()}, frozenset(picked(summed))
    )


def _long(v: Value) -> list[At]:
    return [(v, i) for i, n in enumerate(v.shape) if n != 1]


def relate(step: Step, axes: Axes, whole: list | None = None, alone: list | None = None) -> None:
    """What one step says of the dimensions of its values: `whole` gets those along which something is summed, `alone`
    those that are not merged with others."""
    found = _related(step)
    axes.unite_all(found.pairs)
    if whole is not None:
        whole += found.whole
    if alone is not None:
        alone += found.alone


class _Relations(Axes):
    """What one step says, whatever group it is asked for: `pairs` of dimensions that are the same, those that `relate`
    adds to `whole` and to `alone`, and `dims`, the dimensions of more than one element of its tiles and results."""

    def __init__(self, step: Step):
        super().__init__()
        self.pairs: list[tuple[At, At]] = []
        self.whole: list[At] = []
        self.alone: list[At] = []
        self.dims = {v: _long(v) for v in (*tiles_of(step), *step.outs) if isinstance(v, Value)}

    def unite(self, x: At, y: At) -> None:
        self.pairs.append((x, y))


@memo(entries=1024)
def _related(step: Step) -> _Relations:
    axes = _Relations(step)
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


def _merged(order: list[At], kinds: Mapping[At, Any], alone: Collection[At], values: list[tuple]) -> list[list[At]]:
    """Runs of axes that every value has side by side or not at all: arrays have one dimension for each."""
    runs: list[list[At]] = []
    for root in order:
        last = runs[-1][-1] if runs else None
        beside = last is not None and root not in alone and last not in alone and kinds[root] == kinds[last]
        if beside and all(_together(roots, last, root) for roots in values):
            runs[-1].append(root)
        else:
            runs.append([root])
    return runs


def _together(roots: tuple, first: At, second: At) -> bool:
    if first not in roots:
        return second not in roots
    at = roots.index(first) + 1
    return at < len(roots) and roots[at] == second
