"""From a group to a kernel of jtile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import fit, machine

from .costs import COLUMNS
from .groups import Group
from .layout import Layout
from .steps import ELEMENTWISE, MOVES, PLACES, REDUCTIONS, RUNNING, Operand, Step, Value


def tiles_of(layout: Layout) -> tuple[int, ...]:
    """The sides of the tile of a program: whole axes, and of the others blocks, the innermost first, as far as a
    program has room for more."""
    m = machine()
    sides = [n if a in layout.whole else 1 for a, n in enumerate(layout.sizes)]
    room = max((m.row if layout.whole else m.tile) // max(layout.row, 1), 1)
    programs = math.prod(n for a, n in enumerate(layout.sizes) if a not in layout.whole)
    room = min(room, max(jt.cdiv(programs, m.programs), 1)) if layout.whole else room
    last = len(sides) - 1
    if layout.whole and last not in layout.whole:  # elements that lie side by side in memory
        room = max(room, min(layout.sizes[last], COLUMNS))
    for a in reversed(range(len(layout.sizes))):
        if a not in layout.whole and room > 1:
            sides[a] = fit(layout.sizes[a], min(room, layout.sizes[a]))
            room //= sides[a]
    return tuple(sides)


class GroupKernel:
    """The kernel of a group. Its arrays have a dimension for every axis of theirs that is longer than one element.

    Attributes:
      kernel: it.
      sides: those of a program's tile, along all axes of the group.
      programs: how many there are.
    """

    def __init__(self, group: Group):
        layout, self.group = group.layout, group
        self.sides = sides = tiles_of(layout)
        grid_axes = [a for a in range(len(sides)) if a not in layout.whole]
        grid = tuple(jt.cdiv(layout.sizes[a], sides[a]) for a in grid_axes)

        def body(*refs):
            frame = Frame(layout, sides, {a: jt.program_id(k) for k, a in enumerate(grid_axes)})
            for value, ref in zip(group.inputs, refs):
                frame.load(value, ref)
            for step in group.steps:
                frame.run(step)
            for value, ref in zip(group.outputs, refs[len(group.inputs) :], strict=True):
                frame.store(value, ref)

        self.programs = math.prod(grid)
        self.types = [jax.ShapeDtypeStruct(layout.shape_of(v), v.dtype) for v in group.outputs]
        self.kernel = jt.call(body, out_type=self.types, grid=grid or 1, name=name_of(group))

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The outputs of the group for its inputs."""
        return self._unpacked(self.kernel(*self._packed(args)))

    def interpret(self, args: Sequence[Any]) -> list[Any]:
        """The same by the interpreter."""
        return self._unpacked(self.kernel.interpret(*self._packed(args)))

    def _packed(self, args: Sequence[Any]) -> list[Any]:
        return [x.reshape(self.group.layout.shape_of(v)) for v, x in zip(self.group.inputs, args, strict=True)]

    def _unpacked(self, outs: Sequence[Any]) -> list[Any]:
        return [y.reshape(v.shape) for v, y in zip(self.group.outputs, outs, strict=True)]


def name_of(group: Group) -> str:
    """`fused_` and what it computes first: profilers show it."""
    names = dict.fromkeys(s.name.removeprefix("reduce_") for s in group.steps if s.name not in MOVES | {"copy"})
    return "_".join(["fused", *[*names][:4]])


class Frame:
    """The tiles of one program. All of them have one side for every axis of the group, 1 where the value has not."""

    def __init__(self, layout: Layout, sides: tuple[int, ...], ids: dict[int, Any]):
        self.layout, self.sides, self.ids = layout, sides, ids
        self.tiles: dict[Value, Any] = {}

    def _shape(self, value: Operand) -> tuple[int, ...]:
        own = self.layout.axes[value] if isinstance(value, Value) else ()
        return tuple(n if a in own else 1 for a, n in enumerate(self.sides))

    def _view(self, value: Value, ref):
        """(the tiles of an array, the index of this program's)."""
        own = self.layout.axes[value]
        return ref.tiles(*(self.sides[a] for a in own)), tuple(self.ids.get(a, 0) for a in own)

    def load(self, value: Value, ref) -> None:
        own = self.layout.axes[value]
        if not own:
            tile = ref[...]
        else:
            view, index = self._view(value, ref)
            tile = view[index]
            if list(own) != sorted(own):
                tile = jnp.transpose(tile, [own.index(a) for a in sorted(own)])
        self.tiles[value] = tile.reshape(self._shape(value))

    def store(self, value: Value, ref) -> None:
        own = self.layout.axes[value]
        tile = self.tiles[value].reshape([self.sides[a] for a in sorted(own)])
        if not own:
            ref[...] = tile
            return
        if list(own) != sorted(own):
            tile = jnp.transpose(tile, [sorted(own).index(a) for a in own])
        view, index = self._view(value, ref)
        view[index] = tile

    def read(self, x: Operand):
        if isinstance(x, Value):
            return self.tiles[x]
        return jnp.full((1,) * len(self.sides), x.value, x.dtype)

    def run(self, step: Step) -> None:
        (out,) = step.outs
        self.tiles[out] = self._result(step, out, [self.read(x) for x in step.ins])

    def _result(self, step: Step, out: Value, tiles: list):
        if step.name in ELEMENTWISE:
            spread = [jnp.broadcast_to(t, self._shape(out)) for t in tiles]
            return step.run(spread)[0]
        if step.name == "iota":
            return self._iota(step, out)
        if step.name not in REDUCTIONS | PLACES | RUNNING:
            return tiles[0]  # dimensions of one element come and go, or are spread where they are used
        (x,) = step.ins
        place = self._places(x)
        if step.name in RUNNING:
            at = place[step.params["axis"]]
            return tiles[0] if at is None else step.run(tiles, axis=at)[0]
        gone = sorted({a for i in step.params["axes"] if (a := place[i]) is not None})
        if not gone:
            return jnp.zeros(self._shape(out), out.dtype) if step.name in PLACES else tiles[0]
        return step.run(tiles, axes=tuple(gone))[0].reshape(self._shape(out))

    def _places(self, x: Operand) -> dict[int, int | None]:
        """Of each dimension of a value its axis. The dimensions of a merged axis all have that one."""
        assert isinstance(x, Value)
        own, found = list(self.layout.axes[x]), {}
        left = 0
        for i, n in enumerate(x.shape):
            if n == 1:
                found[i] = None
                continue
            left = left or self.layout.sizes[own[0]]
            found[i] = own[0]
            left //= n
            if left <= 1:
                own, left = own[1:], 0
        return found

    def _iota(self, step: Step, out: Value):
        at = step.params["dimension"]
        if out.shape[at] == 1:
            return jnp.zeros(self._shape(out), out.dtype)
        axis = self._places(out)[at]
        assert axis is not None
        numbers = jt.arange(self.sides[axis]) + self.ids.get(axis, 0) * self.sides[axis]
        shape = [self.sides[axis] if a == axis else 1 for a in range(len(self.sides))]
        return jnp.broadcast_to(numbers.astype(out.dtype).reshape(shape), self._shape(out))
