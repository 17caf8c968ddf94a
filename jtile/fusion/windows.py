"""Windows: slices, pads, concatenations and shifts of arrays, which a group reads where they lie instead of in copies.

A group with windows is computed backwards, from what it writes: the element i of `x[2:]` is the element i + 2 of x. Of
each value the group needs some *places*: for each dimension the elements along an axis of the group, with a stride and
a shift, or one index. A value of the group that is needed at several places is computed anew at each of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import lax

from .layout import MOST_AXES, Axes, Layout, relate
from .steps import (
    ELEMENTWISE,
    MOVES,
    REDUCTIONS,
    Constant,
    Node,
    Operand,
    Step,
    Value,
    applies,
    is_tile,
    size_of,
    steps_of,
)

WINDOWS = frozenset(["slice", "pad", "concatenate", "rev"])
SCATTERS = frozenset(["scatter", "scatter-add", "scatter_add"])
MOST_LOADS = 64  # windows of inputs that a program loads, at most
MOST_ANEW = 1.5  # how much more arithmetic a group may do than if each value was computed once


@dataclasses.dataclass(frozen=True)
class Along:
    """The elements `stride * i + shift` along a dimension, for the numbers i along an axis of the group."""

    axis: int
    stride: int = 1
    shift: int = 0


Index = Along | int | None  # along an axis, one element, or the only one of a dimension of one element
Place = tuple[Index, ...]


@dataclasses.dataclass(frozen=True)
class Read:
    """An operand that a step needs, and the conditions under which it does: pairs of a place along a dimension of it,
    and the length of that dimension, within which the place lies."""

    operand: Operand
    place: Place
    inside: tuple[tuple[Along, int], ...] = ()


def has_windows(steps: Iterable[Step]) -> bool:
    return any(step.name in WINDOWS for step in steps)


def with_windows(nodes: Sequence[Node], outputs: Collection[Operand]) -> list[Node]:
    """The nodes of a program, where windows have steps; so have updates of a block whose place is known. Windows of all
    of an array are left out, unless they are `outputs` of the program."""
    made: dict[Value, Node] = {}
    same: dict[Operand, Operand] = {}
    found = []
    for node in nodes:
        node = _renamed(node, same)
        if not node.steps and not node.eqn.eqn.effects:
            if node.name in WINDOWS and _is_window(node.eqn):
                step = _without_nothing(node.eqn)
                (out,) = step.outs
                if step.name != "rev" and step.ins[0].shape == out.shape and len(step.ins) == 1 and out not in outputs:
                    same[out] = step.ins[0]
                    continue
                node = dataclasses.replace(node, eqn=step, steps=(step,))
            elif node.name in SCATTERS and (starts := _starts(node.eqn, made)) is not None:
                node = dataclasses.replace(node, steps=_update_steps(node.eqn, starts))
        made.update(dict.fromkeys(node.outs, node))
        found.append(node)
    return _needed(found, outputs)


def _needed(nodes: Sequence[Node], outputs: Collection[Operand]) -> list[Node]:
    read, kept = set(outputs), []
    for node in reversed(nodes):
        if node.eqn.eqn.effects or not read.isdisjoint(node.outs):
            kept.append(node)
            read.update(x for step in (node.eqn, *node.steps) for x in step.ins)
    return kept[::-1]


def _renamed(node: Node, same: Mapping[Operand, Operand]) -> Node:
    """A node that reads other values instead of some."""
    if not any(x in same for x in node.ins):
        return node
    change = lambda step: dataclasses.replace(step, ins=tuple(same.get(x, x) for x in step.ins))
    eqn = change(node.eqn)
    return dataclasses.replace(node, eqn=eqn, steps=tuple(eqn if s is node.eqn else change(s) for s in node.steps))


def _without_nothing(step: Step) -> Step:
    """A concatenation without its parts that have no elements."""
    if step.name != "concatenate":
        return step
    return dataclasses.replace(step, ins=tuple(x for x in step.ins if 0 not in x.shape))


def _is_window(step: Step) -> bool:
    values = [*step.ins, *step.outs]
    if not all(map(is_tile, values)) or any(isinstance(x, Constant) and x.shape for x in step.ins):
        return False
    if 0 in step.outs[0].shape:
        return False
    return step.name != "pad" or not any(inner for *_, inner in step.params["padding_config"])


def _starts(step: Step, made: Mapping[Value, Node]) -> list[int] | None:
    """Where the block begins that a scatter updates; None if it updates something else, or in a place not known."""
    numbers = step.params["dimension_numbers"]
    x, index, update = step.ins
    if applies(step):
        return None
    if not all(isinstance(v, Value) and is_tile(v) and 0 not in v.shape for v in (x, update)):
        return None
    starts = _known(index, made)
    if starts is None or starts.ndim != 1 or numbers.operand_batching_dims or x.dtype != update.dtype:
        return None
    window = [i for i in range(len(x.shape)) if i not in numbers.inserted_window_dims]
    if tuple(numbers.update_window_dims) != tuple(range(len(window))) or len(update.shape) != len(window):
        return None
    found = [0] * len(x.shape)
    for i, start in zip(numbers.scatter_dims_to_operand_dims, starts.tolist(), strict=True):
        found[i] = start
    sizes = dict(zip(window, update.shape, strict=True))
    fits = all(0 <= at <= n - sizes.get(i, 1) for i, (at, n) in enumerate(zip(found, x.shape, strict=True)))
    return found if fits else None


def _known(x: Operand, made: Mapping[Value, Node]) -> np.ndarray | None:
    """The value of an operand that the text of the program says."""
    if isinstance(x, Constant):
        return np.asarray(x.value)
    node = made.get(x)
    if node is None or node.name not in ("broadcast_in_dim", "reshape", "concatenate") or size_of(x) > 8:
        return None
    parts = [_known(y, made) for y in node.ins]
    if any(part is None for part in parts):
        return None
    if node.name == "concatenate":
        return np.concatenate(parts, node.eqn.params["dimension"])  # type: ignore[arg-type]
    (part,) = parts
    return np.broadcast_to(part, x.shape) if part.ndim == 0 else part.reshape(x.shape)  # type: ignore[union-attr]


class Loose(Step):
    """A pad of which nobody reads the padding."""


def _update_steps(step: Step, starts: Sequence[int]) -> tuple[Step, ...]:
    """The steps of an update: a choice between the array and the block, which is padded to its size."""
    numbers = step.params["dimension_numbers"]

    def updated(x, _, block):
        block = lax.expand_dims(block, numbers.inserted_window_dims)
        own = None
        for i, (at, n, size) in enumerate(zip(starts, block.shape, x.shape, strict=True)):
            if n != size:
                number = lax.broadcasted_iota(np.int32, x.shape, i)
                tests = [lax.ge(number, np.int32(at))] if at else []
                tests += [lax.lt(number, np.int32(at + n))] if at + n < size else []
                own = functools.reduce(lax.bitwise_and, tests if own is None else [own, *tests])
        edges = [(at, size - at - n, 0) for at, n, size in zip(starts, block.shape, x.shape, strict=True)]
        block = lax.pad(block, np.zeros((), block.dtype), edges)
        block = block if step.name == "scatter" else lax.add(x, block)
        return block if own is None else lax.select(own, block, x)

    steps = steps_of(jax.make_jaxpr(updated)(*(v.aval for v in step.ins)), step, _is_window)
    return tuple(Loose(s.eqn, s.ins, s.outs) if s.name == "pad" else s for s in steps)


def reads(step: Step, place: Place) -> list[Read]:
    """What a step needs of its operands to give its value at a place, constants left out. For a concatenation all
    parts that the place may meet; for a pad the padded operand first, if the place meets it."""
    if step.name == "slice":
        return [Read(step.ins[0], _sliced(step, place))]
    if step.name == "rev":
        return [Read(step.ins[0], _turned(step, place))]
    if step.name == "pad":
        return _padded(step, place)
    if step.name == "concatenate":
        return _parts(step, place)
    if step.name == "iota":
        return []
    return [Read(x, _place_of(step, x, place)) for x in step.ins if isinstance(x, Value)]


def _moved(step: Step, x: Value, out: Value, place: Place) -> Sequence[Index]:
    if step.name in ELEMENTWISE:
        return place if x.shape else ()
    if step.name == "broadcast_in_dim":
        return [place[j] for j in step.params["broadcast_dimensions"]]
    if step.name == "transpose":
        order = step.params["permutation"]
        return [place[order.index(i)] for i in range(len(order))]
    long = iter([i for i, n in zip(place, out.shape, strict=True) if n != 1])
    return [next(long) if n != 1 else None for n in x.shape]


def _shifted(index: Index, size: int, own: int, stride: int, start: int) -> Index:
    """Where in a dimension of `own` elements the element `stride * i + start` lies, for the index of one of `size`."""
    if own == 1:
        return None
    if size == 1 or index is None:
        return start
    if isinstance(index, int):
        return start + stride * index
    return Along(index.axis, stride * index.stride, start + stride * index.shift)


def _sliced(step: Step, place: Place) -> Place:
    (x,), (out,) = step.ins, step.outs
    starts, strides = step.params["start_indices"], step.params["strides"] or (1,) * len(place)
    every = zip(place, out.shape, x.shape, strides, starts, strict=True)
    return tuple(_shifted(index, n, own, int(stride), int(start)) for index, n, own, stride, start in every)


def _turned(step: Step, place: Place) -> Place:
    turned = step.params["dimensions"]
    every = enumerate(zip(place, step.outs[0].shape, strict=True))
    return tuple(_shifted(at, n, n, -1, n - 1) if i in turned else at for i, (at, n) in every)


def _padded(step: Step, place: Place) -> list[Read]:
    (x, value), (out,) = step.ins, step.outs
    index, inside = [], []
    for at, n, own, (low, _, _) in zip(place, out.shape, x.shape, step.params["padding_config"], strict=True):
        here = _shifted(at, n, max(own, 2), 1, -int(low))
        if isinstance(here, int) and not 0 <= here < own:
            return [Read(value, ())] if isinstance(value, Value) else []
        if isinstance(here, Along) and (low or n != own):
            inside.append((here, own))
        index.append(None if own == 1 else here)
    found = [Read(x, tuple(index), tuple(inside))] if isinstance(x, Value) else []
    return found + [Read(value, ())] * (isinstance(value, Value) and bool(inside))


def _parts(step: Step, place: Place) -> list[Read]:
    d, first, found = step.params["dimension"], 0, []
    for x in step.ins:
        own = x.shape[d]
        here = _shifted(place[d], step.outs[0].shape[d], max(own, 2), 1, -first)
        first += own
        if isinstance(here, int) and not 0 <= here < own:
            continue
        inside = ((here, own),) if isinstance(here, Along) and own != step.outs[0].shape[d] else ()
        found.append(Read(x, (*place[:d], None if own == 1 else here, *place[d + 1 :]), inside))
    return found


def home(value: Value, layout: Layout) -> Place:
    """The place at which a group writes a value, or sums it: the numbers along its axes."""
    axes = iter(layout.axes[value])
    return tuple(None if n == 1 else Along(next(axes)) for n in value.shape)


class Needs:
    """What a group needs, at which places.

    Attributes:
      of: the places of each value.
      anew: how much arithmetic the group does, relative to each value computed once.
      within: for each axis the numbers (first, last) between which no window leaves what it is a window of, and no
        choice by such numbers changes: there, of a concatenation the longest part is needed alone, and no padding.
      chosen: what such choices choose there.
    """

    def __init__(self, steps: Sequence[Step], layout: Layout, roots: Sequence[Value], within: bool = False):
        self.made = {v: step for step in steps for v in step.outs}
        self.of: dict[Value, dict[Place, None]] = {}
        self.within = {a: (0, n - 1) for a, n in enumerate(layout.sizes)}
        self._only_within = within
        self.chosen: dict[tuple[Step, Place], Read] = {}
        self._reads: dict[tuple[Step, Place], list[Read]] = {}
        todo = [(v, home(v, layout)) for v in roots]
        while todo:
            value, place = todo.pop()
            if place in self.of.setdefault(value, {}):
                continue
            self.of[value][place] = None
            if value in self.made:
                todo += [(r.operand, r.place) for r in self.reads(self.made[value], place) if _is_value(r.operand)]
        cost = {v: _cost(step) for v, step in self.made.items() if v in self.of}
        total = sum(cost.values())
        self.anew = sum(n * len(self.of[v]) for v, n in cost.items()) / total if total else 1.0

    @property
    def loads(self) -> dict[Value, list[Place]]:
        """The places of each input."""
        return {v: [*places] for v, places in self.of.items() if v not in self.made}

    def reads(self, step: Step, place: Place) -> list[Read]:
        """What a step needs for its value at a place; `within`, one operand alone of a concatenation, of a pad, or of a
        choice that is the same for all elements."""
        if step.name in REDUCTIONS:
            return []  # its operand is a root, too
        if not self._only_within:
            return reads(step, place)
        if (step, place) not in self._reads:
            self._reads[step, place] = self._reads_within(step, place)
        return self._reads[step, place]

    def _reads_within(self, step: Step, place: Place) -> list[Read]:
        if step.name == "select_n" and len(step.ins) == 3:
            truth = self._truth(*_moved_to(step, 0, place))
            if truth is not None:
                x = step.ins[1 + truth]
                self.chosen[step, place] = Read(x, _place_of(step, x, place))
                return [self.chosen[step, place]]
        found = reads(step, place)
        if step.name not in WINDOWS or not found:
            return found
        found = [longest(found)]
        for index, n in found[0].inside:
            self._narrow(index, 0, n - 1)
        return found

    def _narrow(self, index: Along, low: int, high: int) -> None:
        """Leaves the numbers for which the place along a dimension is `low` to `high`."""
        first, last = self.within[index.axis]
        ends = (low, high) if index.stride > 0 else (high, low)
        here = -((index.shift - ends[0]) // index.stride), (ends[1] - index.shift) // index.stride
        self.within[index.axis] = max(first, here[0]), min(last, here[1])

    def _truth(self, value: Operand, place: Place) -> bool | None:
        """What a comparison of numbers along an axis gives for most elements, which are then those `within`; None for
        other values."""
        step = self.made.get(value) if isinstance(value, Value) else None
        if step is None:
            return None
        if step.name in MOVES:
            return self._truth(*_moved_to(step, 0, place)) if step.ins else None  # type: ignore[misc]
        if step.name in ("and", "or"):
            sides = [self._truth(*_moved_to(step, k, place)) for k in range(2)]  # type: ignore[misc]
            return None if None in sides else all(sides) if step.name == "and" else any(sides)
        if step.name not in _COMPARED or not isinstance(step.ins[1], Constant):
            return None
        index = self._number(*_moved_to(step, 0, place))  # type: ignore[misc]
        if not isinstance(index, Along) or abs(index.stride) != 1:
            return None
        bound = int(step.ins[1].value)
        low, high = sorted(index.stride * i + index.shift for i in self.within[index.axis])
        name, least = step.name, {"ge": bound, "gt": bound + 1, "lt": bound, "le": bound + 1}[step.name]
        above = high - least + 1 > least - low  # whether most numbers are `least` or more
        self._narrow(index, *((least, high) if above else (low, least - 1)))
        return above == (name in ("ge", "gt"))

    def _number(self, value: Operand, place: Place) -> Index:
        """The number along an axis, with a shift, that an integer is; None for others, and where its dtype does not
        have all of these numbers."""
        if not isinstance(value, Value) or not np.issubdtype(value.dtype, np.signedinteger):
            return None
        index = self._number_of(self.made.get(value), place)
        if isinstance(index, Along):
            limits = np.iinfo(value.dtype)
            ends = [index.stride * i + index.shift for i in self.within[index.axis]]
            return index if limits.min <= min(ends) and max(ends) <= limits.max else None
        return index

    def _number_of(self, step: Step | None, place: Place) -> Index:
        if step is None:
            return None
        if step.name == "iota":
            return place[step.params["dimension"]]
        if step.name in MOVES or step.name == "convert_element_type":
            return self._number(*_moved_to(step, 0, place))  # type: ignore[misc]
        if step.name not in ("add", "sub") or not isinstance(step.ins[1], Constant):
            return None
        index, more = self._number(*_moved_to(step, 0, place)), int(step.ins[1].value)  # type: ignore[misc]
        more = more if step.name == "add" else -more
        return Along(index.axis, index.stride, index.shift + more) if isinstance(index, Along) else None


_COMPARED = frozenset(["ge", "gt", "lt", "le"])


def _moved_to(step: Step, k: int, place: Place) -> tuple[Operand, Place]:
    """An operand of an elementwise step or a move, and its place."""
    return step.ins[k], _place_of(step, step.ins[k], place)


def _place_of(step: Step, x: Operand, place: Place) -> Place:
    if not isinstance(x, Value):
        return ()
    index = _moved(step, x, step.outs[0], place)
    return tuple(i if n != 1 else None for i, n in zip(index, x.shape, strict=True))


def _is_value(x: Operand) -> bool:
    return isinstance(x, Value)


def longest(found: Sequence[Read]) -> Read:
    """The part of a concatenation that has most elements; the operand of a pad."""
    return max(found, key=lambda read: size_of(read.operand))


def _cost(step: Step) -> int:
    if step.name in MOVES | WINDOWS | REDUCTIONS or step.name in ("convert_element_type", "copy"):
        return 0
    return 1 if step.name in CHEAP else 8


# Functions of one instruction or a few; the others take about as long as eight of these.
CHEAP = frozenset(
    ["add", "sub", "mul", "max", "min", "neg", "abs", "square", "integer_pow", "select_n", "eq", "ne", "lt", "le", "gt",
     "ge", "and", "or", "xor", "not", "sign", "stop_gradient", "shift_left", "shift_right_logical",
     "shift_right_arithmetic"]
)  # fmt: skip


def window_layout(steps: Sequence[Step], written: Sequence[Value], last: Sequence[Step]) -> Layout | None:
    """The layout of a group with windows, where nothing but the steps `last` sums; None if no kernel takes it."""
    if any(step.name not in ELEMENTWISE | MOVES | WINDOWS for step in steps if step not in last):
        return None
    axes, late = Axes(), []
    for step in steps:
        if step.name in WINDOWS:
            _relate_window(step, axes)
        else:
            relate(step, axes, late)
    results, roots = {step.outs[0] for step in last}, roots_of(written, last)
    of = {v: [axes.find((v, i)) for i, n in enumerate(v.shape) if n != 1] for v in [*roots, *written]}
    order: list = []
    sizes: dict = {}
    for v in sorted(roots, key=lambda v: -len(of[v])):
        for root, n in zip(of[v], (n for n in v.shape if n != 1), strict=True):
            if sizes.setdefault(root, n) != n:
                return None
            order += [root] * (root not in order)
    if not order or len(order) > MOST_AXES or any(len(set(own)) < len(own) for own in of.values()):
        return None
    if any(not set(own) <= set(order) for own in of.values()):
        return None
    number = {root: k for k, root in enumerate(order)}
    summed = frozenset(number[root] for at in late if (root := axes.find(at)) in number)
    layout = Layout(
        tuple(sizes[root] for root in order),
        frozenset(),
        {v: tuple(number[root] for root in own) for v, own in of.items()},
        summed,
    )
    if bool(last) != bool(summed) or not all(
        layout.covers(v, summed if v in results else frozenset()) for v in written
    ):
        return None
    return layout if _is_worth_it(Needs(steps, layout, roots)) else None


def _is_worth_it(needs: Needs) -> bool:
    """Whether a program reads few windows, computes little anew, and every place of a value has axes of its own."""
    if needs.anew > MOST_ANEW or sum(map(len, needs.loads.values())) > MOST_LOADS:
        return False
    for places in needs.of.values():
        for place in places:
            axes = [index.axis for index in place if isinstance(index, Along)]
            if len(set(axes)) < len(axes):
                return False
    return True


def _relate_window(step: Step, axes: Axes) -> None:
    (out,) = step.outs
    for x in step.ins:
        for i in range(len(x.shape)):
            axes.join(x, i, out, i)


def roots_of(written: Sequence[Value], last: Sequence[Step]) -> list[Value]:
    """The values that a group with windows is computed for: what it writes, and what it sums."""
    results = {step.outs[0] for step in last}
    return [*(v for v in written if v not in results), *(x for step in last if isinstance(x := step.ins[0], Value))]


def long_shape(value: Value) -> tuple[int, ...]:
    """The shape of the array that stands for an input: its dimensions of more than one element."""
    return tuple(n for n in value.shape if n != 1)


def traffic(values: Iterable[Operand]) -> int:
    """The number of elements of values."""
    return sum(math.prod(v.shape) for v in values if isinstance(v, Value) and hasattr(v.aval, "shape"))
