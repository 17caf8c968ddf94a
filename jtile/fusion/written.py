"""The jaxpr of a kernel's body, written equation by equation where that is as good as tracing it.

JAX takes 0.1 to 0.2 ms to trace an operation of a function that it has not seen before: it looks up what surrounds the
operation, works out the type of its result, and makes a tracer. The steps of a group are equations already, whose types
in a program follow from the layout. `tests/fusion/test_written.py` compares the result with what tracing gives.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import core
from jax.api_util import debug_info
from jax.extend import core as jexc
from jax.extend import source_info_util
from jax.lax import broadcast_in_dim_p, reshape_p, transpose_p

from jtile.language import _place
from jtile.language._equations import ref_aval
from jtile.language._index import Tile
from jtile.language._numbers import number
from jtile.language._primitives import READ, WRITE, allow_effects, load_p, program_id_p, store_p
from jtile.language._sizes import MAX_SIDE

from .frames import Frame
from .steps import ELEMENTWISE, MOVES, REDUCTIONS, Operand, Step, Value
from .tilings import Tiling
from .units import Group

WRITABLE = ELEMENTWISE | REDUCTIONS | MOVES - {"iota"}


def jaxpr_of(group: Group, tiling: Tiling, refs: Sequence[Any]) -> Any | None:
    """The closed jaxpr of a group's kernel over Refs of these types; None for a group that has to be traced."""
    if not tiling.sides or max(tiling.sides) > MAX_SIDE or not all(map(_is_written, group.steps)):
        return None
    allow_effects()
    _place.hide_own_frames()
    lines = Lines(refs)
    frame = WrittenFrame(lines, tiling)
    for value, ref in zip(group.loaded, lines.refs):
        frame.load(value, ref)
    for step in group.steps:
        frame.run(step)
    for value, ref in zip(group.outputs, lines.refs[len(group.read) :], strict=True):
        frame.store(value, ref)
    return lines.closed()


def _is_written(step: Step) -> bool:
    """Whether the type of a step's result is known without asking JAX."""
    return step.name in WRITABLE and not step.params.get("weak_type")


class Lines:
    """The equations of a jaxpr over Refs, in order.

    Attributes:
      refs: a variable for each Ref.
    """

    def __init__(self, refs: Sequence[Any]):
        self.refs = [jexc.Var(ref_aval(x.shape, x.dtype)) for x in refs]
        self._eqns: list[Any] = []
        self._types: dict[Any, Any] = {}
        self._here = source_info_util.current()

    def type(self, shape: tuple[int, ...], dtype: Any) -> Any:
        key = shape, dtype
        if key not in self._types:
            self._types[key] = core.ShapedArray(shape, dtype)
        return self._types[key]

    def literal(self, value: Any, dtype: Any) -> Any:
        return jexc.Literal(np.asarray(value, dtype)[()], self.type((), np.dtype(dtype)))

    def put(
        self, primitive: Any, ins: list[Any], out: Any, params: Any, effects: Any = jexc.no_effects, like: Any = None
    ) -> Any:
        """Adds an equation with a result of the type `out`, or none; `like`: the equation whose place it has."""
        outs = [] if out is None else [jexc.Var(out)]
        place, around = (self._here, None) if like is None else (like.source_info, like.ctx)
        self._eqns.append(jexc.new_jaxpr_eqn(ins, outs, primitive, params, effects, place, around))
        return outs[0] if outs else None

    def closed(self) -> Any:
        effects = set().union(*(eqn.effects for eqn in self._eqns))
        jaxpr = jexc.Jaxpr((), self.refs, (), self._eqns, effects, _described(len(self.refs)))
        return jexc.ClosedJaxpr(jaxpr, ())


@functools.cache
def _described(refs: int) -> Any:
    """What JAX says of a function of so many Refs in its messages."""

    def kernel(*refs: Any) -> tuple[()]:
        return ()

    return debug_info("fused kernel", kernel, (0,) * refs, {})._replace(result_paths=())


class WrittenFrame(Frame):
    """A frame whose tiles are variables of a jaxpr that is being written."""

    def __init__(self, lines: Lines, tiling: Tiling):
        first = len(tiling.grid) - len(tiling.order)
        number_of = lambda k: lines.put(program_id_p, [], lines.type((), np.dtype(np.int32)), {"axis": k})
        ids = {a: number_of(k) for k, a in enumerate(tiling.order, first)}
        super().__init__(tiling.layout, tiling.sides, ids, {})
        self._lines, self._zero = lines, lines.literal(0, np.int32)

    def _place(self, value: Value) -> tuple[tuple[Any, ...], list[Any]]:
        """(the dimensions of the tile of an array, the number of this program's along each)."""
        own = self.layout.axes[value]
        dims = tuple(Tile(self.sides[a], self.sides[a] or 1) for a in own)
        return dims, [self.ids.get(a, self._zero) for a in own]

    def tile(self, value: Value, ref: Any, at: Any | None = None) -> Any:
        own, (dims, index) = self.layout.axes[value], self._place(value)
        kind = self._lines.type(tuple(self.sides[a] for a in own), value.dtype)
        params = {"dims": dims, "pad": number(0, value.dtype, "pad"), "masked": False}
        tile = self._lines.put(load_p, [ref, *index], kind, params, {READ})
        tile = self._turned(tile, tuple(own.index(a) for a in sorted(own)))
        return self._shaped(tile, self.shape_of(value))

    def store(self, value: Value, ref: Any, at: Any | None = None) -> None:
        own, (dims, index) = self.layout.axes[value], self._place(value)
        tile = self._shaped(self.spread(value, value), tuple(self.sides[a] for a in sorted(own)))
        tile = self._turned(tile, tuple(sorted(own).index(a) for a in own))
        self._lines.put(store_p, [ref, *index, tile], None, {"dims": dims, "masked": False}, {WRITE})

    def _shaped(self, tile: Any, shape: tuple[int, ...]) -> Any:
        if tile.aval.shape == shape:
            return tile
        params = {"new_sizes": shape, "dimensions": None, "sharding": None}
        return self._lines.put(reshape_p, [tile], self._lines.type(shape, tile.aval.dtype), params)

    def _turned(self, tile: Any, order: tuple[int, ...]) -> Any:
        if order == tuple(range(len(order))):
            return tile
        shape = tuple(tile.aval.shape[k] for k in order)
        kind = self._lines.type(shape, tile.aval.dtype)
        return self._lines.put(transpose_p, [tile], kind, {"permutation": order})

    def _spread(self, x: Operand, shape: tuple[int, ...]) -> Any:
        known = isinstance(x, Value)
        tile = self.tiles[x] if known else self._lines.literal(x.value, x.dtype)
        if tile.aval.shape == shape:
            return tile
        own = tuple(range(len(shape))) if known else ()
        params = {"shape": shape, "broadcast_dimensions": own, "sharding": None}
        return self._lines.put(broadcast_in_dim_p, [tile], self._lines.type(shape, tile.aval.dtype), params)

    def _result(self, step: Step, out: Value) -> Any:
        eqn = step.eqn
        if step.name in ELEMENTWISE:
            shape = self.shape_of(out)
            ins = [self._spread(x, shape) for x in step.ins]
            if step.name == "convert_element_type" and ins[0].aval.dtype == out.dtype:
                return ins[0]  # what was weakly typed in the program
            return self._lines.put(eqn.primitive, ins, self._lines.type(shape, out.dtype), eqn.params, like=eqn)
        if step.name not in REDUCTIONS:
            return self.read(step.ins[0])
        tile, gone = self.spread(step.ins[0], step.ins[0]), self.gone(step)
        if not gone:
            return tile
        shape = tuple(n for a, n in enumerate(tile.aval.shape) if a not in gone)
        params = {**eqn.params, "axes": tuple(gone)}
        tile = self._lines.put(eqn.primitive, [tile], self._lines.type(shape, out.dtype), params, like=eqn)
        return self._shaped(tile, self.shape_of(out))
