"""Groups with windows on tiles: each value is computed backwards from what a program writes, at the places needed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops._shapes import machine

from .frames import Frame, plus, times
from .layout import Layout
from .pieces import NeedsInPieces, Pieces, pieced
from .steps import ELEMENTWISE, Constant, Operand, Step, Value
from .windows import Along, Loose, Needs, Place, Read, home, reads, roots_of

if TYPE_CHECKING:
    from .tilings import Tiling
    from .units import Group


class WindowFrame(Frame):
    """The tiles of one program of a group with windows. within: what is needed by a program whose tile meets no end of
    a window, so that padding and the shorter parts of concatenations are not. shifted: the last tile along an axis ends
    where the axis does, so that its loads need no tests; it computes some elements that the tile before it stores."""

    def __init__(
        self,
        layout: Layout,
        sides: tuple[int, ...],
        ids: dict[int, Any],
        refs: Mapping[Value, Any],
        made: Mapping[Value, Step],
        *,
        within: Needs | None = None,
        shifted: bool = False,
    ):
        super().__init__(layout, sides, ids, {})
        self._refs, self._made, self._within, self._shifted = refs, made, within, shifted
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
        if self._within:
            return self._within.reads(step, place)
        if step.name != "concatenate":
            return reads(step, place)
        whole = self._once(lambda: pieced(step, place, self._made), "pieced", step, place)
        return reads(step, place) if whole is None else [whole]

    def _shape(self, place: Place) -> tuple[int, ...]:
        own = {index.axis for index in place if isinstance(index, Along | Pieces)}
        return tuple(n if a in own else 1 for a, n in enumerate(self.sides))

    def numbers(self, axis: int):
        """The numbers along an axis of this program's elements."""
        if not self._moves(axis):
            return self._once(lambda: super(WindowFrame, self).numbers(axis), axis)
        shape = self._shape((Along(axis),))
        return self._once(lambda: self._lanes(Along(axis), shape), axis)

    def _moves(self, axis: int) -> bool:
        """Whether the last tile along an axis ends where the axis does, and begins where no other would."""
        side, n = self.sides[axis], self.layout.sizes[axis]
        return self._shifted and side < n and n % side != 0

    def _last(self, axis: int) -> int:
        """Where the last tile along an axis begins."""
        side, n = self.sides[axis], self.layout.sizes[axis]
        return n - side if self._moves(axis) else (jt.cdiv(n, side) - 1) * side

    def _number(self, index: Along):
        """Where the elements of this program lie along a dimension."""

        def make():
            return plus(times(self.numbers(index.axis), index.stride), index.shift)

        return self._once(make, index)

    def _first(self, index: Along):
        """Where the first element of this program lies along a dimension."""
        return plus(times(self._begins(index.axis), index.stride), index.shift)

    def _begins(self, axis: int):
        """Where the tile of this program begins along an axis."""

        def make():
            first = times(self.ids.get(axis, 0), self.sides[axis])
            return jax.lax.min(first, np.int32(self._last(axis))) if self._moves(axis) else first

        return self._once(make, "begins", axis)

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
        found = self._reads(step, place) if step.name == "concatenate" else reads(step, place)
        if step.name == "pad":
            found = found or [Read(step.ins[1], ())]
            if self._within or isinstance(step, Loose) or (len(found) == 1 and not found[0].inside):
                return self._operand(found[0], shape)
            tile = (
                self._full(step.ins[1], shape) if isinstance(step.ins[1], Constant) else self._operand(found[1], shape)
            )
            found = found[:1]
        else:
            if len(found) == 1:
                return self._operand(found[0], shape)
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
        last = self._last(index.axis) + self.sides[index.axis] - 1
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
        order = [index.axis for index in own if isinstance(index, Along | Pieces)]
        if all(self._stays(index, n) for index, n in zip(own, ref.shape, strict=True)):
            tile = ref[tuple(self._span(index, n) for index, n in zip(own, ref.shape, strict=True))]
        else:
            tile = self._masked(ref, own, order)
        if order != sorted(order):
            tile = jnp.transpose(tile, [order.index(a) for a in sorted(order)])
        return tile.reshape(self._shape(place))

    def _stays(self, index: Along | Pieces | int, n: int) -> bool:
        """Whether no program's tile begins outside of a dimension of n elements, and its elements lie side by side."""
        if isinstance(index, int | Pieces):
            return isinstance(index, int)
        if self._within or index.stride < 0:
            return index.stride > 0
        return index.shift >= 0 and index.stride * self._last(index.axis) + index.shift < n

    def _span(self, index: Along | int, n: int):
        if isinstance(index, int):
            return index
        side = self.sides[index.axis]

        def begins():
            first, last = self._first(index), n - 1 - (side - 1) * index.stride
            known = index.shift >= 0 and index.stride * self._last(index.axis) + index.shift <= last
            if not self._within or isinstance(first, int) or known:
                return first
            return jax.lax.min(jax.lax.max(first, np.int32(0)), np.int32(last))  # as it is: so the bounds are known

        return jt.ds(self._once(begins, "span", index, n), side, index.stride)

    def store(self, value: Value, ref, at: Any | None = None) -> None:
        """Writes a tile, but for what another program writes."""
        own = self.layout.axes[value]
        if not any(self._moves(a) for a in own):
            return super().store(value, ref, at)
        order = sorted(own)
        tile = self.spread(value, value).reshape([self.sides[a] for a in order])
        if [*own] != order:
            tile = jnp.transpose(tile, [order.index(a) for a in own])
        index, new = [], []
        for k, a in enumerate(own):
            index.append(jt.ds(self._begins(a), self.sides[a]))
            if self._moves(a):
                number = self._lanes(Along(a), tuple(self.sides[a] if j == k else 1 for j in range(len(own))))
                new.append(jax.lax.ge(number, times(self.ids[a], self.sides[a])))
        jt.store(ref, tuple(index), tile, mask=_spread(_all_of(new), tile.shape))

    def _masked(self, ref, own: Sequence[Along | Pieces | int], order: Sequence[int]):
        scalars = [a for a in order if self.sides[a] == 1 and "warps" in jt.target().features]
        long, index, inside = [a for a in order if a not in scalars], [], []
        for at, n in zip(own, ref.shape, strict=True):
            if isinstance(at, int):
                index.append(at)
                continue
            shape = () if at.axis in scalars else tuple(self.sides[a] if a == at.axis else 1 for a in long)
            number, here = self._once(
                lambda at=at, shape=shape, n=n: self._counted(at, shape, n), "masked", at, shape, n
            )
            index.append(number)
            inside += [here] if here is not None else []
        mask = _spread(_all_of(inside), tuple(self.sides[a] for a in long)) if inside else None
        return jt.load(ref, tuple(index), mask=mask, other=0).reshape([self.sides[a] for a in order])

    def _counted(self, at: Along | Pieces, shape: tuple[int, ...], n: int):
        """(the numbers along a dimension of n elements of this program's elements, which of them it has or None)."""
        if isinstance(at, Pieces):
            return self._in_pieces(at, shape, n), None
        number = self._lanes(at, shape)
        here = self._among(number, at, n)
        return (number if shape or here is None else _within(number, n)), here

    def _lanes(self, index: Along | int, shape: tuple[int, ...]):
        """The numbers along a dimension of this program's elements, in a shape of one side."""
        first = index if isinstance(index, int) else self._first(index)
        if isinstance(index, int) or not shape:
            return jax.lax.full(shape, first, np.int32) if isinstance(first, int) else first
        number = self._once(lambda: jt.arange(math.prod(shape)).reshape(shape), "places", index.axis, shape)
        return plus(times(number, index.stride), first)

    def _in_pieces(self, index: Pieces, shape: tuple[int, ...], n: int):
        """The numbers along a dimension of n elements of this program's elements, where they differ by the part."""
        *others, (last, *_) = index.parts
        number = self._lanes(last, shape)
        for at, here, size in reversed(others):
            inside = self._among(self._lanes(here, shape), here, size)
            own = self._lanes(at, shape)
            number = own if inside is None else jax.lax.select(inside, own, number)
        return _within(number, n)  # of elements that are stored it is as it was


def _is_value(read: Read) -> bool:
    return isinstance(read.operand, Value)


def _within(number: Any, n: int):
    """Numbers from 0 to n - 1, as those are that count: so the bounds of the load are known."""
    return jax.lax.min(jax.lax.max(number, np.int32(0)), np.int32(n - 1))


def _all_of(tests: Sequence[Any]):
    """Where all of these tests hold."""
    shape = np.broadcast_shapes(*(test.shape for test in tests))
    return functools.reduce(jax.lax.bitwise_and, [_spread(test, shape) for test in tests])


def _spread(tile, shape: tuple[int, ...]):
    return tile if tile.shape == shape else jax.lax.broadcast_in_dim(tile, shape, range(tile.ndim))


def window_body(group: Group, tiling: Tiling, refs: Sequence[Any]) -> None:
    """The body of the kernel of a group with windows. Tiles that meet no end of a window go another way; tiles that
    only meet the end of an array do not: their loads test for it, and one way compiles faster than two. (NPUs have two
    ways for these, too.)"""
    layout, ids = group.layout, tiling.frame().ids
    ins, outs = dict(zip(group.inputs, refs)), refs[len(group.inputs) :]
    made = {v: step for step in group.steps for v in step.outs}

    needs, gpu = ends_within(group, tiling.sides), "warps" in jt.target().features
    shifted = gpu and not group.last

    def run(within: Needs | None) -> None:
        frame = WindowFrame(layout, tiling.sides, ids, ins, made, within=within, shifted=shifted)
        for value, ref in zip(group.outputs, outs, strict=True):
            frame.store(value, ref)

    inside, never = None, False
    for a, (first, last) in needs.within.items():
        n, side = layout.sizes[a], tiling.sides[a]
        if (first, last) == (0, n - 1) and (n % side == 0 or (shifted and side < n)):
            continue
        never = never or (-(-first // side) + 1) * side - 1 > last
        start = times(ids.get(a, 0), side)
        if isinstance(start, int):
            here = np.bool_(first <= start <= last - side + 1)
        else:
            here = jax.lax.bitwise_and(jax.lax.ge(start, np.int32(first)), jax.lax.le(start, np.int32(last - side + 1)))
        inside = here if inside is None else jax.lax.bitwise_and(inside, here)
    ended = any(needs.within[a] != (0, n - 1) for a, n in enumerate(layout.sizes))
    apart = needs.apart if gpu else ended or not machine().whole
    if inside is None or never or not apart:
        run(needs if inside is None else None)
    else:
        jax.lax.cond(inside, lambda: run(needs), lambda: run(None))


def ends_within(group: Group, sides: Sequence[int] = ()) -> NeedsInPieces:
    """What a group needs where no window leaves its array, in tiles of these sides."""
    alone = frozenset(a for a, n in enumerate(sides) if n == 1)
    return NeedsInPieces(group.steps, group.layout, roots_of(group.outputs, group.last), alone)
