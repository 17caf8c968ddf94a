"""Groups with windows on tiles: each value is computed backwards from what a program writes, at the places needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops._shapes import machine

from .frames import Frame, plus, times
from .layout import Layout
from .steps import ELEMENTWISE, Constant, Operand, Step, Value
from .windows import Along, Loose, Needs, Place, Read, home, longest, reads, roots_of

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
        self._known: dict[Any, Any] = {}  # numbers of places that several values need: each is computed once

    def _once(self, make: Callable[[], Any], *key: Any) -> Any:
        """What `make` gives, which depends on nothing but the key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

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

    def numbers(self, axis: int):
        """The numbers along an axis of this program's elements."""
        return self._once(lambda: super(WindowFrame, self).numbers(axis), axis)

    def _number(self, index: Along):
        """Where the elements of this program lie along a dimension."""

        def make():
            return plus(times(self.numbers(index.axis), index.stride), index.shift)

        return self._once(make, index)

    def _first(self, index: Along):
        """Where the first element of this program lies along a dimension."""

        begins = lambda: times(self.ids.get(index.axis, 0), self.sides[index.axis])
        return plus(times(self._once(begins, "begins", index.axis), index.stride), index.shift)

    def _made_of(self, step: Step, place: Place):
        shape = self._shape(place)
        if step.name == "iota":
            index = place[step.params["dimension"]]
            if isinstance(index, Along):
                return self._number(index).astype(step.outs[0].dtype)
            return jax.lax.full((1,) * len(shape), index or 0, step.outs[0].dtype)
        if step.name in ("pad", "concatenate"):
            return self._of_parts(step, place, shape)
        needed = self._reads(step, place)
        if self._within and (step, place) in self._within.chosen:
            return self._operand(self._within.chosen[step, place], shape)
        found = {read.operand: self.at(read.operand, read.place) for read in needed if _is_value(read)}
        if step.name not in ELEMENTWISE:  # a dimension is moved, or comes or goes: tiles have all axes in their order
            return found[step.ins[0]] if step.ins[0] in found else self._full(step.ins[0], (1,) * len(shape))
        shape = np.broadcast_shapes((1,) * len(shape), *(tile.shape for tile in found.values()))
        return step.run([_spread(found[x], shape) if x in found else self._full(x, shape) for x in step.ins])[0]

    def _of_parts(self, step: Step, place: Place, shape: tuple[int, ...]):
        """A pad or a concatenation: for each element that part which it lies in."""
        found = reads(step, place)
        if step.name == "pad":
            found = found or [Read(step.ins[1], ())]
            if self._within or isinstance(step, Loose) or (len(found) == 1 and not found[0].inside):
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
            inside = [own for index, n in read.inside if (own := self._is_inside(index, n)) is not None]
            own = _spread(_all_of(inside), shape) if inside else None
            part = self._operand(read, shape)
            tile = part if own is None else jax.lax.select(own, part, tile)
        return tile

    def _is_inside(self, index: Along, n: int):
        """Which elements of this program lie among the first n of a dimension; None if those of all programs do."""
        return self._once(lambda: self._among(self._number(index), index, n), "inside", index, n)

    def _among(self, number: Any, index: Along, n: int):
        """Which of the numbers along a dimension, those of this program, are 0 to n - 1; None if those of all are."""
        last = jt.cdiv(self.layout.sizes[index.axis], self.sides[index.axis]) * self.sides[index.axis] - 1
        ends = index.shift, index.stride * last + index.shift
        tests = [jax.lax.ge(number, np.int32(0))] if min(ends) < 0 else []
        tests += [jax.lax.lt(number, np.int32(n))] if max(ends) >= n else []
        return _all_of(tests) if tests else None

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

        def begins():
            first = self._first(index)
            if not self._within or isinstance(first, int):
                return first
            last = np.int32(n - 1 - (side - 1) * index.stride)  # as it is anyway; so the bounds of the load are known
            return jax.lax.min(jax.lax.max(first, np.int32(0)), last)

        return jt.ds(self._once(begins, "span", index, n), side, index.stride)

    def _masked(self, ref, own: Sequence[Along | int], order: Sequence[int]):
        sides, index, inside = [self.sides[a] for a in order], [], []
        for at, n in zip(own, ref.shape, strict=True):
            if isinstance(at, int):
                index.append(at)
                continue
            shape = tuple(self.sides[a] if a == at.axis else 1 for a in order)

            def places(at=at, shape=shape, n=n):
                number = self._once(lambda: jt.arange(self.sides[at.axis]).reshape(shape), "places", at.axis, shape)
                number = plus(times(number, at.stride), self._first(at))
                return number, self._among(number, at, n)

            number, here = self._once(places, "masked", at, shape, n)
            index.append(number)
            inside += [here] if here is not None else []
        mask = _spread(_all_of(inside), tuple(sides)) if inside else None
        return jt.load(ref, tuple(index), mask=mask, other=0)


def _is_value(read: Read) -> bool:
    return isinstance(read.operand, Value)


def _all_of(tests: Sequence[Any]):
    """Where all of these tests hold."""
    shape = np.broadcast_shapes(*(test.shape for test in tests))
    return functools.reduce(jax.lax.bitwise_and, [_spread(test, shape) for test in tests])


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
        start = times(ids.get(a, 0), side)
        if isinstance(start, int):
            here = np.bool_(first <= start <= last - side + 1)
        else:
            here = jax.lax.bitwise_and(jax.lax.ge(start, np.int32(first)), jax.lax.le(start, np.int32(last - side + 1)))
        inside = here if inside is None else jax.lax.bitwise_and(inside, here)
    ended = any(needs.within[a] != (0, n - 1) for a, n in enumerate(layout.sizes))
    if inside is None or never or (machine().whole and not ended):
        run(needs if inside is None else None)
    else:
        jax.lax.cond(inside, lambda: run(needs), lambda: run(None))


def ends_within(group: Group) -> Needs:
    """What a group needs where no window leaves its array."""
    return Needs(group.steps, group.layout, roots_of(group.outputs, group.last), within=True)
