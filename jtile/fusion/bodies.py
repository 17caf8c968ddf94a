"""From a group or a loop to a kernel of jtile."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax

from .choices import Tunable, digest_of
from .gathers import table_shape
from .loops import Loop
from .products import ProductKernel
from .row_scatters import RowScatter, RowScatterKernel
from .steps import MOVES, Step, Value
from .sums import Sums, in_shape, shares_of
from .tilings import Tiling, group_tiling, loop_tiling, window_tiling
from .units import Group, Product, Unit
from .windowed import ends_within, window_body
from .windows import long_shape
from .written import jaxpr_of


def name_of(first: str, steps: Sequence[Step]) -> str:
    """The name of a kernel in profilers: `first`, and the names of the first few functions that its steps compute."""
    names = dict.fromkeys(s.name.removeprefix("reduce_") for s in steps if s.name not in MOVES | {"copy"})
    return "_".join([first, *[*names][:4]]).replace("-", "_")


def kept_tiles(group: Group) -> int:
    """How many values of the elementwise steps of a group are read several times."""
    if group.layout.whole or group.layout.late:
        return 0
    reads = collections.Counter(x for s in group.steps if s.name not in MOVES for x in s.ins if isinstance(x, Value))
    return sum(reads[out] > 1 for step in group.steps for out in step.outs)


class GroupKernel:
    """The kernel of a group. Its arrays have a dimension for every axis of theirs that is longer than one element.

    Attributes:
      kernel: the kernel.
    """

    def __init__(self, group: Group):
        self.group, tiling = group, self._tiling(group)
        self._sums = Sums(group, tiling)
        self.types = [self._sums.type_of(v) for v in group.outputs]
        body, name = self._sums.body if group.last else self._body, name_of("fused", group.steps)
        key = lambda: digest_of(group.steps, group.outputs)
        own = {"scratch": self._sums.scratch, "compared": self._sums.joined}
        if not group.last and not group.windowed:
            own["written"] = functools.partial(jaxpr_of, group)
        self._tunable = Tunable(body, self.types, tiling, name=name, key=key, **own)
        self.kernel = self._tunable.kernel

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The outputs of the group for its inputs."""
        return self._unpacked(self._tunable(*self._packed(args)), args)

    @functools.cached_property
    def choice(self) -> tuple[Tiling, str]:
        """How its programs share the elements, and who chose that."""
        values = self.group.read
        types = [jax.ShapeDtypeStruct(shape, v.dtype) for v, shape in zip(values, self.shapes, strict=True)]
        return self._tunable.choice(types)

    @property
    def tiling(self) -> Tiling:
        return self.choice[0]

    def interpret(self, args: Sequence[Any], **choice: Any) -> list[Any]:
        """The same by the interpreter; `choice`: a tile, and an order of programs."""
        return self._unpacked(self.kernel.interpret(*self._packed(args), **choice), args)

    def _tiling(self, group: Group) -> Tiling:
        if group.windowed:
            return window_tiling(group.layout, ends_within(group).within)
        tiling = group_tiling(group.layout, kept_tiles(group))
        return Tiling(tiling.layout, tiling.sides, shares_of(group.scatters, tiling.shares))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the arrays that the kernel reads."""
        group, layout = self.group, self.group.layout
        if group.windowed:
            return [*map(long_shape, group.inputs)]
        return [*map(layout.shape_of, group.loaded), *(table_shape(step, layout) for step in group.gathers)]

    def _packed(self, args: Sequence[Any]) -> list[Any]:
        return [in_shape(x, shape) for x, shape in zip(args, self.shapes)]

    def _unpacked(self, outs: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        group = self.group
        into = dict(zip((step.outs[0] for step in group.scatters), args[len(group.read) :], strict=True))
        return [self._sums.finished(v, y, into) for v, y in zip(group.outputs, outs, strict=True)]

    def _body(self, tiling: Tiling, refs: Sequence[Any]) -> None:
        if self.group.windowed:
            return window_body(self.group, tiling, refs)
        group, frame = self.group, tiling.frame()
        frame.tables = dict(zip(group.gathers, refs[len(group.loaded) :]))
        for value, ref in zip(group.loaded, refs):
            frame.load(value, ref)
        for step in group.steps:
            frame.run(step)
        for value, ref in zip(group.outputs, refs[len(group.read) :], strict=True):
            frame.store(value, ref)


class LoopKernel:
    """The kernel of a loop.

    Attributes:
      kernel: the kernel.
    """

    def __init__(self, loop: Loop):
        self.loop = loop
        self.types = [jax.ShapeDtypeStruct(self._shape(r), v.dtype) for r, v in zip(loop.written, loop.outputs)]
        how = loop.length, loop.reverse, len(loop.constants), len(loop.carry)
        key = lambda: digest_of(loop.steps, loop.next, how)
        name = name_of("loop", loop.steps)
        self._tunable = Tunable(self._body, self.types, loop_tiling(loop.layout), name=name, key=key)
        self.kernel = self._tunable.kernel

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The outputs of the loop for its inputs."""
        return self._unpacked(self._tunable(*self._packed(args)))

    @functools.cached_property
    def choice(self) -> tuple[Tiling, str]:
        """How its programs share the elements of a round, and who chose that."""
        return self._tunable.choice([jax.ShapeDtypeStruct(shape, x.dtype) for x, shape in self._shapes()])

    @property
    def tiling(self) -> Tiling:
        return self.choice[0]

    def interpret(self, args: Sequence[Any], **choice: Any) -> list[Any]:
        """The same by the interpreter; `choice`: a tile, and an order of programs."""
        return self._unpacked(self.kernel.interpret(*self._packed(args), **choice))

    def _shape(self, written: int | Value) -> tuple[int, ...]:
        if isinstance(written, int):
            return self.loop.layout.shape_of(self.loop.carry[written])
        return self.loop.length, *self.loop.layout.shape_of(written)

    def _shapes(self) -> list[tuple[Value, tuple[int, ...]]]:
        """What the kernel reads, and the shapes of its arrays."""
        loop, layout = self.loop, self.loop.layout
        values = [*loop.constants, *loop.carry, *loop.elements]
        rounds = [()] * (len(values) - len(loop.elements)) + [(loop.length,)] * len(loop.elements)
        return [
            (x, (*n, *layout.shape_of(v)))
            for x, v, n in zip(loop.nodes[0].ins, values, rounds, strict=True)
            if isinstance(x, Value)
        ]

    def _packed(self, args: Sequence[Any]) -> list[Any]:
        given = dict(zip(self.loop.inputs, args, strict=True))
        return [given[x].reshape(shape) for x, shape in self._shapes()]

    def _unpacked(self, outs: Sequence[Any]) -> list[Any]:
        return [y.reshape(v.shape) for v, y in zip(self.loop.outputs, outs, strict=True)]

    def _body(self, tiling: Tiling, refs: Sequence[Any]) -> None:
        loop, frame = self.loop, tiling.frame()
        refs: Any = iter(refs)
        for value, x in zip([*loop.constants, *loop.carry], loop.nodes[0].ins):
            frame.tiles[value] = frame.tile(value, next(refs)) if isinstance(x, Value) else frame.spread(x, value)
        start = tuple(frame.tiles[value] for value in loop.carry)
        of_round = [(value, next(refs)) for value in loop.elements]
        outs = list(zip(loop.written, refs, strict=True))

        def one(i, carry):
            at = loop.length - 1 - i if loop.reverse else i
            own = frame.with_tiles(dict(zip(loop.carry, carry)))
            for value, ref in of_round:
                own.load(value, ref, at)
            for step in loop.steps:
                own.run(step)
            for value, ref in outs:
                if not isinstance(value, int):
                    own.store(value, ref, at)
            return tuple(own.spread(x, of) for x, of in zip(loop.next, loop.carry, strict=True))

        carry = jax.lax.fori_loop(0, loop.length, one, start)
        for k, ref in outs:
            if isinstance(k, int):
                frame.tiles[loop.carry[k]] = carry[k]
                frame.store(loop.carry[k], ref)


def kernel_of(unit: Unit) -> Any:
    """The function that runs a unit: it takes the unit's inputs and gives its outputs."""
    if isinstance(unit, Group):
        return GroupKernel(unit)
    if isinstance(unit, Product):
        return ProductKernel(unit)
    if isinstance(unit, RowScatter):
        return RowScatterKernel(unit)
    return LoopKernel(unit) if isinstance(unit, Loop) else unit
