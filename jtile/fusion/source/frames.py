"""The tiles of a program as text: their shapes, loads and stores, and steps on them.

A tile has one side for each axis of `order`, 1 where the value has not the axis. Axes of which a program takes one
element have no side: views drop them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jtile.fusion.layout import Layout
from jtile.fusion.steps import ELEMENTWISE, MOVES, PLACES, REDUCTIONS, RUNNING, Constant, Operand, Step, Value
from jtile.fusion.sums import dtype_of_sums

from .expressions import ATOM, PLUS, TEMPORARY, Body, Text, dtype_text, elementwise, no_text

JOINED = {"reduce_sum": "sum", "reduce_prod": "prod", "reduce_max": "max", "reduce_min": "min"}
Shape = frozenset  # the axes that a tile has


@dataclasses.dataclass
class TileText:
    """How the tiles of a kernel's body are written.

    Attributes:
      layout: the axes. order: those that tiles have sides for. sides, places: of each axis the text of a tile's side,
        and of the number of this program's tile (absent: the program takes all of it, or "0").
    """

    layout: Layout
    order: tuple[int, ...]
    sides: dict[int, str]
    places: dict[int, str]
    body: Body

    def own(self, value: Operand) -> tuple[int, ...]:
        return self.layout.axes[value] if isinstance(value, Value) else ()

    def shape_of(self, value: Operand) -> Shape:
        return Shape(a for a in self.own(value) if a in self.order)

    def shape_text(self, shape: Shape) -> str:
        sides = [self.sides[a] if a in shape else "1" for a in self.order]
        return f"({', '.join(sides)}{',' * (len(sides) == 1)})"

    def spread(self, x: Text, shape: Shape | None) -> str:
        """The text of an expression in a shape."""
        if x.shape == shape or not shape:
            return x.text
        return f"jnp.broadcast_to({x.text}, {self.shape_text(shape)})"

    def view(self, value: Value, ref: str, first: str | None = None) -> str:
        """The tile of an array, as it stands in memory; `first`: the place along a dimension before all others."""
        own = self.own(value)
        if not own:
            return f"{ref}[{'...' if first is None else first}]"
        if first is None and all(a in self.order and a not in self.places for a in own):
            return f"{ref}[...]"
        rounds = [] if first is None else ["None"]
        sides = [*rounds, *(self.sides[a] if a in self.order else "None" for a in own)]
        places = [*([] if first is None else [first]), *(self.places.get(a, "0") for a in own)]
        return f"{ref}.tiles({', '.join(sides)})[{', '.join(places)}]"

    def load(self, value: Value, ref: str, wanted: str, first: str | None = None) -> None:
        """Gives the tile of an array a name."""
        text, own = self.view(value, ref, first), [a for a in self.own(value) if a in self.order]
        ranks = sorted(own, key=self.order.index)
        if own != ranks:
            text = f"jnp.transpose({text}, {tuple(own.index(a) for a in ranks)})" if len(own) > 2 else f"{text}.T"
        if own and len(own) < len(self.order):
            text += f"[{', '.join(':' if a in own else 'None' for a in self.order)}]"
        self.body.texts[value] = self.body.name(Text(text, shape=Shape(own)), wanted) if own else Text(text)

    def store(self, value: Value, ref: str, first: str | None = None, text: Text | None = None) -> None:
        """Writes the tile of a value to its array."""
        x, shape = text or self.body.read(value), self.shape_of(value)
        made, own = self.spread(x, shape), [a for a in self.own(value) if a in self.order]
        ranks = sorted(own, key=self.order.index)
        if own and len(own) < len(self.order):
            made = f"({made})" if x.level < ATOM and made == x.text else made
            made += f".reshape({', '.join(self.sides[a] for a in ranks)})"
        elif not shape and x.constant is not None:
            made = f"{dtype_text(value.dtype)}({made})"
        elif not shape and x.shape is not None and self.order:
            made = f"({made}).reshape(())" if x.level < ATOM else f"{made}.reshape(())"
        if own != ranks:
            turned = f"jnp.transpose({made}, {tuple(ranks.index(a) for a in own)})"
            made = f"{made}.T" if len(own) == 2 and made.isidentifier() else turned
        self.body.line(f"{self.view(value, ref, first)} = {made}")

    def run(self, step: Step) -> None:
        """One step on tiles."""
        (out,) = step.outs
        self.body.give(out, self.result(step), TEMPORARY.get(step.name, step.name))

    def result(self, step: Step) -> Text:
        """The text of a step's result."""
        (out,) = step.outs
        if step.name in ELEMENTWISE:
            xs = self.body.operands(step)
            shape = Shape().union(*shapes) if (shapes := [x.shape for x in xs if x.shape is not None]) else None
            return elementwise(step, xs, lambda x: self.spread(self._typed(x, step), shape), shape)
        if step.name == "iota":
            return self._iota(step, out)
        if step.name in MOVES:
            return self.body.read(step.ins[0])
        if step.name in REDUCTIONS | PLACES | RUNNING:
            return self._along(step, out)
        raise no_text(step)

    def total(self, step: Step) -> Text:
        """The text of one program's part of a sum, in the dtype in which the parts are added up."""
        return self._along(step, step.outs[0], dtype_of_sums(step))

    def _typed(self, x: Text, step: Step) -> Text:
        if x.constant is None:
            return x
        return dataclasses.replace(x, text=f"{dtype_text(step.ins[0].dtype)}({x.text})", level=ATOM)

    def _along(self, step: Step, out: Value, dtype: np.dtype | None = None) -> Text:
        """The text of a reduction, a running reduction, or the place of an extreme."""
        (source,) = step.ins
        x, whole = self.body.read(source), self.shape_of(source)
        gone = along(self.layout, step)
        axes = [self.order.index(a) for a in gone]
        if not axes:
            return Text(f"jnp.zeros({self.shape_text(whole)}, {dtype_text(out.dtype)})", shape=whole) if (
                step.name in PLACES
            ) else x  # fmt: skip
        text, left = self.spread(self._typed(x, step), whole), whole - set(gone)
        axis = str(axes[0]) if len(axes) == 1 else str(tuple(axes))
        if step.name in RUNNING:
            back = ", reverse=True" if step.params["reverse"] else ""
            return Text(f"jax.lax.{step.name}({text}, axis={axis}{back})", shape=whole)
        if step.name in PLACES:
            return Text(
                f"jnp.{step.name}({text}, axis={axis}, keepdims=True).astype({dtype_text(out.dtype)})", shape=left
            )
        count = math.prod(self.layout.sizes[a] for a in gone)
        return dataclasses.replace(
            reduction(step, text, axis, dtype or out.dtype), shape=left, mean=self._mean(step, text, axis, count)
        )

    def _mean(self, step: Step, text: str, axis: str, count: int) -> tuple[str, int] | None:
        if step.name != "reduce_sum":
            return None
        return f"jnp.mean({text}, axis={axis}, keepdims=True)", count

    def _iota(self, step: Step, out: Value) -> Text:
        axis = places_of(self.layout, out)[step.params["dimension"]]
        if axis is None:
            return Text("0", constant=out.dtype.type(0))
        text = self.numbers(axis)
        if out.dtype.name != "int32":
            text = Text(f"{text.at(ATOM)}.astype({dtype_text(out.dtype)})", shape=text.shape)
        return text

    def numbers(self, axis: int) -> Text:
        """The numbers along an axis of this program's elements."""
        if axis not in self.order:
            return Text(self.places.get(axis, "0"), shape=None)
        text, level = f"jt.arange({self.sides[axis]})", ATOM
        if len(self.order) > 1:
            text += f"[{', '.join(':' if a == axis else 'None' for a in self.order)}]"
        if axis in self.places:
            place = self.places[axis]
            place = place if place.isidentifier() else f"({place})"
            text, level = f"{place} * {self.sides[axis]} + {text}", PLUS
        return Text(text, level, shape=Shape([axis]))


def reduction(step: Step, text: str, axis: str, dtype: np.dtype) -> Text:
    """The text of a reduction along axes, which keep one element; `dtype` is that of the result."""
    if step.name in JOINED:
        short = JOINED[step.name] in ("sum", "prod") and (dtype.kind in "iub" or dtype.itemsize < 4)
        named = f", dtype={dtype_text(dtype)}" if short else ""
        return Text(f"jnp.{JOINED[step.name]}({text}, axis={axis}, keepdims=True{named})")
    if dtype.name == "bool":
        return Text(f"jnp.{'all' if step.name == 'reduce_and' else 'any'}({text}, axis={axis}, keepdims=True)")
    axes = axis if axis.startswith("(") else f"({axis},)"
    return Text(f"jnp.expand_dims(jax.lax.{step.name}({text}, axes={axes}), {axes})")


def places_of(layout: Layout, x: Value) -> dict[int, int | None]:
    """The axis of each dimension of a value. All dimensions of a merged axis have that axis."""
    own, found = [*layout.axes[x]], {}
    left = 0
    for i, n in enumerate(x.shape):
        if n == 1:
            found[i] = None
            continue
        left = left or layout.sizes[own[0]]
        found[i] = own[0]
        left //= n
        if left <= 1:
            own, left = own[1:], 0
    return found


def along(layout: Layout, step: Step) -> list[int]:
    """The axes along which a step sums."""
    (x,) = step.ins
    if isinstance(x, Constant):
        return []
    place = places_of(layout, x)
    axes: Sequence[int] = step.params["axes"] if "axes" in step.params else (step.params["axis"],)
    return sorted({a for i in axes if (a := place[i]) is not None})
