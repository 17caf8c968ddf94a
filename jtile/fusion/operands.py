"""Operands of products that elementwise functions make: tiles of them are computed where a product needs them, so casts
and dequantised weights are in no memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

import jtile as jt

from .frames import ROUNDED, Frame, WideFrame
from .layout import Layout, layout_of
from .steps import ELEMENTWISE, MOVES, Node, Operand, Step, Value, size_of

if TYPE_CHECKING:
    from .units import Group

LEFT, RIGHT = 0, 1


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Where a product gets an operand from.

    Attributes:
      value: the operand, or, if it is one that steps make, what they make: the same elements, maybe in more dimensions.
      inputs: the arrays that the kernel reads for it: the operand itself, if no steps make it.
      steps: what makes it. layout: that of the steps, None without.
      outer: the axis of the layout that the product has; None where it has one element. terms: those that it sums
        along, of which programs take all but the first whole.
      transposed: whether a right operand without steps lies in memory as [columns, terms].
      whole: whether steps sum along the terms, as a norm does: a program computes all terms of its rows at first.
    """

    value: Value
    inputs: list[Value]
    steps: list[Step] = dataclasses.field(default_factory=list)
    layout: Layout | None = None
    outer: int | None = None
    terms: tuple[int, ...] = ()
    transposed: bool = False
    whole: bool = False

    @property
    def inner(self) -> int:
        """The numbers of terms of a sum that belong together, of which a program takes several."""
        return math.prod(self.layout.sizes[a] for a in self.terms[1:]) if self.layout else 1

    @property
    def read(self) -> int:
        """The bytes that a kernel reads for each element which steps make."""
        assert self.layout is not None
        every = len(self.layout.sizes)
        return sum(v.dtype.itemsize for v in self.inputs if len(self.layout.axes[v]) == every)

    def shapes(self, terms: int) -> list[tuple[int, ...]]:
        """The shapes of the arrays that the kernel reads, for sums of so many terms."""
        if self.layout is not None:
            return [*map(self.layout.shape_of, self.inputs)]
        n = size_of(self.value) // terms
        return [self.value.shape if len(self.value.shape) == 2 else (n, terms)]


def source_of_rows(value: Operand, group: Group, terms: int) -> Source | None:
    """The source of a left operand that a group makes which takes its rows whole, all `terms` of each; None else."""
    layout = group.layout
    plain = not (group.windowed or group.gathers or group.scatters or group.last)
    if not plain or [value] != group.outputs or len(layout.whole) != 1 or len(layout.sizes) > 2:
        return None
    *outer, along = layout.axes[group.outputs[0]]
    if {along} != layout.whole or layout.sizes[along] != terms or len(outer) + 1 != len(layout.sizes):
        return None
    return Source(
        group.outputs[0], group.inputs, group.steps, layout, outer[0] if outer else None, (along,), whole=True
    )


def source_of(step: Step, side: int, nodes: Sequence[Node], constants: Sequence[Node]) -> Source | None:
    """The source of an operand of a product if nodes of `nodes` compute it, with those that make constants for them;
    None if they do not, or a kernel cannot."""
    made = {v: node for node in nodes for v in node.outs}
    x = step.ins[side]
    if not isinstance(x, Value) or x not in made:
        return None
    value = x
    if not made[x].steps and made[x].name == "reshape":
        (value,) = made[x].ins
    needed = _needed(value, made)
    if needed is None or not isinstance(value, Value):
        return None
    steps = [s for node in nodes if node in needed for s in node.steps]
    steps = [*_of_constants(steps, constants), *steps]
    if not any(s.name in ELEMENTWISE - ROUNDED - {"copy", "copy_p"} for s in steps):
        return None
    if any(s.name not in ELEMENTWISE - ROUNDED | MOVES for s in steps):
        return None
    own = {v for s in steps for v in s.outs}
    inputs = [*dict.fromkeys(y for s in steps for y in s.ins if isinstance(y, Value) and y not in own)]
    return _laid_out(step, side, value, inputs, steps)


def _needed(value: Operand, made: Mapping[Value, Node]) -> set[Node] | None:
    found: set[Node] = set()
    todo = [value]
    while todo:
        v = todo.pop()
        if isinstance(v, Value) and v in made and made[v] not in found:
            if not made[v].steps:
                return None
            found.add(made[v])
            todo += made[v].ins
    return found


def _of_constants(steps: Sequence[Step], constants: Sequence[Node]) -> list[Step]:
    """The steps that make constants which `steps` read."""
    read, found = {x for s in steps for x in s.ins}, []
    for node in reversed(constants):
        if not read.isdisjoint(node.outs):
            found.append(node)
            read.update(node.ins)
    return [s for node in found[::-1] for s in node.steps]


def _laid_out(step: Step, side: int, value: Value, inputs: list[Value], steps: list[Step]) -> Source | None:
    """A source whose dimensions are the terms of the sum and one dimension of the product, in either order."""
    x = step.ins[side]
    (along,) = step.params["dimension_numbers"][0][side]
    count, last = x.shape[along], along == len(x.shape) - 1
    first = _split(value.shape, count, last)
    if first is None or not inputs:
        return None
    layout = layout_of(steps, [value, *inputs], apart=[(value, i) for i in range(first, len(value.shape))])
    if layout is None:
        return None
    axes = layout.axes[value]
    split = _split([layout.sizes[a] for a in axes], count, last)
    if split is None or set(axes) != set(range(len(layout.sizes))):
        return None
    outer, terms = (axes[:split], axes[split:]) if last else (axes[split:], axes[:split])
    if len(outer) > 1 or not terms:
        return None
    return Source(value, inputs, steps, layout, outer[0] if outer else None, terms)


def _split(sizes: Sequence[int], count: int, last: bool) -> int | None:
    """How many dimensions stand in front of those, or are those if they come first, that have `count` elements."""
    return next((k for k in range(len(sizes) + 1) if math.prod(sizes[k:] if last else sizes[:k]) == count), None)


class Tiles:
    """The tiles of an operand in one program: `at(p)` gives number p along the terms.

    A left operand's are [outer, terms], a right one's [terms, outer].
    """

    def __init__(
        self, source: Source, refs: Sequence[Any], side: int, place: Any, outer: int, depth: int, terms: int, room: Any
    ):
        """room: memory for all terms of the rows, where the source computes them at first."""
        self.source, self._refs, self._side, self._place = source, refs, side, place
        self._outer, self._depth, self._terms, self._room = outer, depth, terms, room
        self._kept: dict[Value, Any] = {}
        if source.whole:
            room[...] = self._all()
        elif source.layout is not None:
            frame = self._frame(0)
            for value, ref in zip(source.inputs, refs, strict=True):
                if source.terms[0] not in source.layout.axes[value]:
                    frame.load(value, ref)
            self._kept = frame.tiles

    def at(self, p: Any) -> Any:
        source, outer, depth = self.source, self._outer, self._depth
        if source.whole:
            return self._room.tiles(outer, depth)[0, p]
        if source.layout is None:
            (ref,) = self._refs
            if self._side == LEFT:
                return ref.tiles(outer, depth)[self._place, p]
            turned = source.transposed
            return ref.tiles(outer, depth)[self._place, p].T if turned else ref.tiles(depth, outer)[p, self._place]
        frame = self._frame(p)
        for value, ref in zip(source.inputs, self._refs, strict=True):
            if value not in frame.tiles:
                frame.load(value, ref)
        for step in source.steps:
            frame.run(step)
        tile = self._whole(frame.spread(source.value, source.value).astype(source.value.dtype))
        if self._terms % depth:
            number = (p * depth + jt.arange(depth)).reshape((1, depth) if self._side == LEFT else (depth, 1))
            tile = jnp.where(jnp.broadcast_to(number < self._terms, tile.shape), tile, jnp.zeros_like(tile))
        return tile

    def _all(self) -> Any:
        """All terms of the rows of this program."""
        source, layout = self.source, self.source.layout
        assert layout is not None
        sides = tuple(n if a in layout.whole else self._outer for a, n in enumerate(layout.sizes))
        frame = Frame(layout, sides, {} if source.outer is None else {source.outer: self._place}, {})
        for value, ref in zip(source.inputs, self._refs, strict=True):
            frame.load(value, ref)
        for step in source.steps:
            frame.run(step)
        tile = frame.spread(source.value, source.value)
        if source.outer is not None and source.outer > source.terms[0]:
            tile = tile.T
        return tile.reshape(self._outer, self._terms)

    def _whole(self, tile: Any) -> Any:
        """A tile with the axes of the layout as one of two dimensions."""
        terms = [*self.source.terms]
        outer = [] if self.source.outer is None else [self.source.outer]
        order = [*outer, *terms] if self._side == LEFT else [*terms, *outer]
        if order != sorted(order):
            tile = jnp.transpose(tile, order)
        shape = (self._outer, self._depth) if self._side == LEFT else (self._depth, self._outer)
        return tile.reshape(shape)

    def _frame(self, p: Any) -> WideFrame:
        source, layout = self.source, self.source.layout
        assert layout is not None
        sides = [*layout.sizes]
        sides[source.terms[0]] = self._depth // source.inner
        ids = {source.terms[0]: p}
        if source.outer is not None:
            sides[source.outer] = self._outer
            ids[source.outer] = self._place
        return WideFrame(layout, tuple(sides), ids, dict(self._kept))
