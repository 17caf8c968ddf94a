"""Steps on tiles: what one program of a kernel does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt

from .gathers import clipped, fill_of, table_axes
from .layout import Layout
from .steps import ELEMENTWISE, PLACES, REDUCTIONS, RUNNING, Operand, Step, Value


class Frame:
    """The tiles of one program. All of them have one side for every axis of the group, 1 where the value has not.
    tables: of each gather the array that it picks from."""

    def __init__(
        self,
        layout: Layout,
        sides: tuple[int, ...],
        ids: dict[int, Any],
        tiles: dict[Value, Any],
        tables: Mapping[Step, Any] | None = None,
    ):
        self.layout, self.sides, self.ids, self.tiles, self.tables = layout, sides, ids, tiles, tables or {}

    def with_tiles(self, tiles: dict[Value, Any]) -> Frame:
        """A frame of the same program that knows some tiles besides."""
        return Frame(self.layout, self.sides, self.ids, {**self.tiles, **tiles}, self.tables)

    def shape_of(self, value: Operand) -> tuple[int, ...]:
        """The shape of the tile of a value."""
        own = self.layout.axes[value] if isinstance(value, Value) else ()
        return tuple(n if a in own else 1 for a, n in enumerate(self.sides))

    def _view(self, value: Value, ref, at: Any | None):
        """(the tiles of an array, the index of this program's tile)."""
        own = self.layout.axes[value]
        rounds = () if at is None else (None,)
        index = () if at is None else (at,)
        return ref.tiles(*rounds, *(self.sides[a] for a in own)), (*index, *(self.ids.get(a, 0) for a in own))

    def tile(self, value: Value, ref, at: Any | None = None):
        """The elements of this program of an array, or of its part number `at` along the first dimension."""
        own = self.layout.axes[value]
        if not own:
            tile = ref[...] if at is None else ref[at]
        else:
            view, index = self._view(value, ref, at)
            tile = view[index]
            if list(own) != sorted(own):
                tile = jnp.transpose(tile, [own.index(a) for a in sorted(own)])
        return tile.reshape(self.shape_of(value))

    def load(self, value: Value, ref, at: Any | None = None) -> None:
        self.tiles[value] = self.tile(value, ref, at)

    def store(self, value: Value, ref, at: Any | None = None) -> None:
        """Writes a tile to where `tile` reads it."""
        own = self.layout.axes[value]
        tile = self.spread(value, value).reshape([self.sides[a] for a in sorted(own)])
        if not own:
            ref[... if at is None else at] = tile
            return
        if list(own) != sorted(own):
            tile = jnp.transpose(tile, [sorted(own).index(a) for a in own])
        view, index = self._view(value, ref, at)
        view[index] = tile

    def spread(self, x: Operand, of: Operand):
        """The tile of an operand, in the shape that the tile of a value has."""
        return self._spread(x, self.shape_of(of))

    def _spread(self, x: Operand, shape: tuple[int, ...]):
        if not isinstance(x, Value):
            return jax.lax.full(shape, x.value, x.dtype)
        tile = self.tiles[x]
        return tile if tile.shape == shape else jax.lax.broadcast_in_dim(tile, shape, range(len(shape)))

    def read(self, x: Operand):
        return self.tiles[x] if isinstance(x, Value) else self._spread(x, (1,) * len(self.sides))

    def run(self, step: Step) -> None:
        (out,) = step.outs
        self.tiles[out] = self._result(step, out)

    def _result(self, step: Step, out: Value):
        if step.name in ELEMENTWISE:
            shape = self.shape_of(out)
            return step.run([self._spread(x, shape) for x in step.ins])[0]
        if step.name == "iota":
            return self._iota(step, out)
        if step.name == "gather":
            return self._picked(step, out)
        if step.name not in REDUCTIONS | PLACES | RUNNING:
            return self.read(step.ins[0])  # dimensions of one element come and go, or are spread where they are used
        tiles = [self.spread(x, x) for x in step.ins]  # a sum counts every element, so repeated ones have to be there
        if step.name in RUNNING:
            at = self._places(step.ins[0])[step.params["axis"]]
            return tiles[0] if at is None else step.run(tiles, axis=at)[0]
        gone = self.gone(step)
        if not gone:
            return jnp.zeros(self.shape_of(out), out.dtype) if step.name in PLACES else tiles[0]
        return step.run(tiles, axes=tuple(gone))[0].reshape(self.shape_of(out))

    def axis_of(self, value: Operand, dimension: int) -> int | None:
        """The axis of a dimension of a value; None for one of one element."""
        return self._places(value)[dimension]

    def gone(self, step: Step) -> list[int]:
        """The axes along which a step sums."""
        place = self._places(step.ins[0])
        return sorted({a for i in step.params["axes"] if (a := place[i]) is not None})

    def _places(self, x: Operand) -> dict[int, int | None]:
        """The axis of each dimension of a value. All dimensions of a merged axis have that axis."""
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
            return jnp.zeros(self.shape_of(out), out.dtype)
        axis = self._places(out)[at]
        assert axis is not None
        return jnp.broadcast_to(self.numbers(axis).astype(out.dtype), self.shape_of(out))

    def _picked(self, step: Step, out: Value):
        """The elements that a gather picks from its table for this program."""
        ref, (front, behind) = self.tables[step], table_axes(step, self.layout)
        row, inside = clipped(self.read(step.ins[1]), ref.shape[len(front)])
        tile = jt.load(ref, (*map(self.numbers, front), row, *map(self.numbers, behind)))
        fill = fill_of(step)
        if fill is not None:
            tile = jnp.where(jnp.broadcast_to(inside, tile.shape), tile, jnp.full_like(tile, fill))
        return tile.reshape(self.shape_of(out))

    def numbers(self, axis: int):
        """The numbers along an axis of this program's elements."""
        side, shape = self.sides[axis], [self.sides[axis] if a == axis else 1 for a in range(len(self.sides))]
        return plus(jt.arange(side).reshape(shape), times(self.ids.get(axis, 0), side))


def times(x: Any, factor: int) -> Any:
    """x * factor, for int32; JAX traces operators of arrays as functions, which takes ten times as long."""
    if factor == 1:
        return x
    return x * factor if isinstance(x, int) else jax.lax.mul(x, np.int32(factor))


def plus(x: Any, y: Any) -> Any:
    """x + y, for int32, where y is a number or has no axes."""
    if isinstance(y, int) and y == 0:
        return x
    if isinstance(x, int):
        return x + y if isinstance(y, int) else plus(y, x)
    return jax.lax.add(x, np.int32(y) if isinstance(y, int) else y)


class WideFrame(Frame):
    """A frame of elementwise steps that computes bfloat16 in float32, and rounds what it stores: as XLA does, which
    need not round between functions either. Float16 is rounded after each function: it has few exponents, and what is
    inf in XLA's program is inf here."""

    def tile(self, value: Value, ref, at: Any | None = None):
        return super().tile(value, ref, at).astype(wide(value.dtype))

    def store(self, value: Value, ref, at: Any | None = None) -> None:
        rounded = self.spread(value, value).astype(value.dtype)
        Frame(self.layout, self.sides, self.ids, {value: rounded}).store(value, ref, at)

    def _spread(self, x: Operand, shape: tuple[int, ...]):
        tile = super()._spread(x, shape)
        return tile if isinstance(x, Value) else tile.astype(wide(x.dtype))

    def _result(self, step: Step, out: Value):
        if step.name == "convert_element_type":
            return self.spread(step.ins[0], out).astype(wide(out.dtype))
        return super()._result(step, out)


ROUNDED = frozenset(["nextafter", "reduce_precision"])  # functions that are about the bits of a float


def wide(dtype: Any) -> Any:
    """The dtype in which a `WideFrame` computes values of a dtype."""
    return jnp.float32 if dtype == jnp.bfloat16 else dtype
