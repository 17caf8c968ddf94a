"""Groups with windows on tiles: each value is computed backwards from what a program writes, at the places needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import machine

from .frames import Frame
from .layout import Layout
from .steps import ELEMENTWISE, Constant, Operand, Step, Value
from .windows import Along, Needs, Place, Read, home, longest, reads, roots_of

if TYPE_CHECKING:
    from .tilings import Tiling
    from .units import Group


class WindowFrame(Frame):
    """The tiles of one program of a group with windows. within: what is needed by a program whose tile meets no end of
    a window, so that padding and the shorter parts of concatenations are not."""

    def __init__(
        self,
        layout: Layout,
        sides: tuple[int, ...],
        ids: dict[int, Any],
        refs: Mapping[Value, Any],
        made: Mapping[Value, Step],
        *,
        within: Needs | None = None,
    ):
        super().__init__(layout, sides, ids, {})
        self._refs, self._made, self._within = refs, made, within
        self._at: dict[tuple[Value, Place], Any] = {}

    def spread(self, x: Operand, of: Operand):
        """The tile of an operand, in the shape that the tile of a value has."""
        if isinstance(x, Value) and x not in self.tiles:
            self.tiles[x] = self.at(x, home(x, self.layout))
        return super().spread(x, of)

    def at(self, value: Value, place: Place):
        """The tile of a value at a place, behind those that it is made of: chains of steps are longer than Python's
        stack."""
        todo = [(value, place)]
        while todo:
            key = todo[-1]
            if key not in self._at:
                step = self._made.get(key[0])
                needed = [] if step is None else self._reads(step, key[1])
                missing = [k for r in reversed(needed) if _is_value(r) and (k := (r.operand, r.place)) not in self._at]
                if missing:
                    todo += missing
                    continue
                self._at[key] = self._load(*key) if step is None else self._made_of(step, key[1])
            todo.pop()
        return self._at[value, place]

    def _reads(self, step: Step, place: Place) -> list[Read]:
        return self._within.reads(step, place) if self._within else reads(step, place)

    def _shape(self, place: Place) -> tuple[int, ...]:
        own = {index.axis for index in place if isinstance(index, Along)}
        return tuple(n if a in own else 1 for a, n in enumerate(self.sides))

    def _number(self, index: Along):
        """Where the elements of this program lie along a dimension."""
        number = self.numbers(index.axis)
        number = number if index.stride == 1 else number * index.stride
        return number if not index.shift else number + index.shift

    def _made_of(self, step: Step, place: Place):
        shape = self._shape(place)
        if step.name == "iota":
            index = place[step.params["dimension"]]
            number = self._number(index) if isinstance(index, Along) else jnp.full((), index or 0, jnp.int32)
            return jnp.broadcast_to(number.astype(step.outs[0].dtype), shape)
        if step.name in ("pad", "concatenate"):
            return self._of_parts(step, place, shape)
        needed = self._reads(step, place)
        if self._within and (step, place) in self._within.chosen:
            return self._operand(self._within.chosen[step, place], shape)
        found = {read.operand: self.at(read.operand, read.place) for read in needed if _is_value(read)}
        if step.name not in ELEMENTWISE:  # a dimension is moved, or comes or goes: tiles have all axes in their order
            return found[step.ins[0]] if step.ins[0] in found else self._full(step.ins[0], shape)
        return step.run([_spread(found[x], shape) if x in found else self._full(x, shape) for x in step.ins])[0]

    def _of_parts(self, step: Step, place: Place, shape: tuple[int, ...]):
        """A pad or a concatenation: for each element that part which it lies in."""
        found = reads(step, place)
        if step.name == "pad":
            found = found or [Read(step.ins[1], ())]
            if self._within or (len(found) == 1 and not found[0].inside):
                return self._operand(found[0], shape)
            tile = (
                self._full(step.ins[1], shape) if isinstance(step.ins[1], Constant) else self._operand(found[1], shape)
            )
            found = found[:1]
        else:
            if self._within or len(found) == 1:
                return self._operand(longest(found), shape)
            tile, found = self._operand(found[-1], shape), found[-2::-1]
        for read in found:
            inside = [self._is_inside(index, n) for index, n in read.inside]
            own = jnp.broadcast_to(functools.reduce(jnp.logical_and, inside), shape)
            tile = jnp.where(own, self._operand(read, shape), tile)
        return tile

    def _is_inside(self, index: Along, n: int):
        number = self._number(index)
        return (number >= 0) & (number < n)

    def _operand(self, read: Read, shape: tuple[int, ...]):
        x = read.operand
        return _spread(self.at(x, read.place), shape) if isinstance(x, Value) else self._full(x, shape)

    def _full(self, x: Operand, shape: tuple[int, ...]):
        assert isinstance(x, Constant)
        return jax.lax.full(shape, x.value, x.dtype)

    def _load(self, value: Value, place: Place):
        """Elements of an input; those outside of it are zeros."""
        ref, own = self._refs[value], [i for i, n in zip(place, value.shape, strict=True) if n != 1]
        if not own:
            return ref[...].reshape(self._shape(place))
        order = [index.axis for index in own if isinstance(index, Along)]
        if all(self._stays(index, n) for index, n in zip(own, ref.shape, strict=True)):
            tile = ref[tuple(self._span(index, n) for index, n in zip(own, ref.shape, strict=True))]
        else:
            tile = self._masked(ref, own, order)
        if order != sorted(order):
            tile = jnp.transpose(tile, [order.index(a) for a in sorted(order)])
        return tile.reshape(self._shape(place))

    def _stays(self, index: Along | int, n: int) -> bool:
        """Whether no program's tile begins outside of a dimension of n elements."""
        if isinstance(index, int):
            return True
        if self._within or index.stride < 0:
            return index.stride > 0
        last = (jt.cdiv(self.layout.sizes[index.axis], self.sides[index.axis]) - 1) * self.sides[index.axis]
        return index.shift >= 0 and index.stride * last + index.shift < n

    def _span(self, index: Along | int, n: int):
        if isinstance(index, int):
            return index
        side = self.sides[index.axis]
        first = self.ids.get(index.axis, 0) * side * index.stride + index.shift
        if self._within:  # as it is anyway; so the bounds of the load are known
            first = jnp.clip(first, 0, n - 1 - (side - 1) * index.stride)
        return jt.ds(first, side, index.stride)

    def _masked(self, ref, own: Sequence[Along | int], order: Sequence[int]):
        sides, index, inside = [self.sides[a] for a in order], [], None
        for at, n in zip(own, ref.shape, strict=True):
            if isinstance(at, int):
                index.append(at)
                continue
            shape = [self.sides[a] if a == at.axis else 1 for a in order]
            first = self.ids.get(at.axis, 0) * self.sides[at.axis] * at.stride + at.shift
            number = (jt.arange(self.sides[at.axis]) * at.stride).reshape(shape) + first
            index.append(number)
            here = (number >= 0) & (number < n)
            inside = here if inside is None else inside & here
        return jt.load(ref, tuple(index), mask=jnp.broadcast_to(inside, sides), other=0)


def _is_value(read: Read) -> bool:
    return isinstance(read.operand, Value)


def _spread(tile, shape: tuple[int, ...]):
    return tile if tile.shape == shape else jax.lax.broadcast_in_dim(tile, shape, range(len(shape)))


def window_body(group: Group, tiling: Tiling, refs: Sequence[Any]) -> None:
    """The body of the kernel of a group with windows. Tiles that meet no end of a window go another way; on CPUs, tiles
    that only meet the end of an array do not: their loads test for it, and one way compiles faster than two."""
    layout, ids = group.layout, tiling.frame().ids
    ins, outs = dict(zip(group.inputs, refs)), refs[len(group.inputs) :]
    made = {v: step for step in group.steps for v in step.outs}

    needs = ends_within(group)

    def run(within: Needs | None) -> None:
        frame = WindowFrame(layout, tiling.sides, ids, ins, made, within=within)
        for value, ref in zip(group.outputs, outs, strict=True):
            frame.store(value, ref)

    inside, never = None, False
    for a, (first, last) in needs.within.items():
        n, side = layout.sizes[a], tiling.sides[a]
        if (first, last) == (0, n - 1) and n % side == 0:
            continue
        never = never or (-(-first // side) + 1) * side - 1 > last
        start = ids.get(a, 0) * side
        here = (start >= first) & (start <= last - side + 1)
        inside = here if inside is None else inside & here
    ended = any(needs.within[a] != (0, n - 1) for a, n in enumerate(layout.sizes))
    if inside is None or never or (machine().whole and not ended):
        run(needs if inside is None else None)
    else:
        jax.lax.cond(inside, lambda: run(needs), lambda: run(None))


def ends_within(group: Group) -> Needs:
    """What a group needs where no window leaves its array."""
    return Needs(group.steps, group.layout, roots_of(group.outputs, group.last), within=True)
