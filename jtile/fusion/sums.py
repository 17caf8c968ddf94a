"""Groups whose last steps sum along axes that no program takes whole: each program goes through many tiles and adds up
what it has, and XLA adds up the sums of the programs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops._shapes import machine
from jtile.ops.dispatch import vector_cores

from .frames import Frame
from .gathers import JOINS
from .scatters import add_tile
from .steps import Step, Value
from .tilings import Tiling
from .units import Group
from .windowed import WindowFrame

LEAST_PARTS = 2  # programs that have a table of their own to add to
TOGETHER = {
    "reduce_sum": jnp.add,
    "reduce_prod": jnp.multiply,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_and": jnp.bitwise_and,
    "reduce_or": jnp.bitwise_or,
}


def in_shape(x: Any, shape: tuple[int, ...]) -> Any:
    """An array in a shape, by no operation where it has that shape."""
    return x if x.shape == shape else x.reshape(shape)


def neutral(step: Step, dtype: np.dtype) -> Any:
    """The neutral element of a step that sums: 0 for sums, -inf for maxima, say."""
    kind = JOINS.get(step.name) or step.name.removeprefix("reduce_")
    if kind in ("sum", "or", "prod"):
        return kind == "prod"
    if kind == "and":
        return np.invert(np.zeros((), dtype))
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if kind == "max" else np.inf
    return kind == "min"


def dtype_of_sums(step: Step) -> np.dtype:
    """The dtype in which a step adds up: float32 for shorter floats."""
    dtype = step.outs[0].dtype
    return np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def shares_of(scatters: Sequence[Step], shares: int) -> int:
    """How many programs share the updates of scatters: to fill and to join their tables takes little of the time."""
    for step in scatters:
        most = math.prod(step.ins[-1].shape) // (2 * math.prod(step.outs[0].shape))
        shares = min(shares, max(most, LEAST_PARTS))
    return shares


class Sums:
    """The body of a kernel whose group sums along axes that programs share.

    Attributes:
      steps: all steps of the group. last: those that sum along the axes that programs share.
    """

    def __init__(self, group: Group, tiling: Tiling):
        self.group, self.tiling, self.last = group, tiling, group.last
        self._of = {step.outs[0]: step for step in self.last}

    def type_of(self, value: Value) -> jax.ShapeDtypeStruct:
        """The type of what the kernel writes for an output: for a sum, one part for each program."""
        step = self._of.get(value)
        if step is None:
            return jax.ShapeDtypeStruct(self.group.layout.shape_of(value), value.dtype)
        shape = value.shape if step.name in JOINS else self.group.layout.shape_of(value)
        return jax.ShapeDtypeStruct((self.tiling.shares, *shape), dtype_of_sums(step))

    @property
    def scratch(self) -> list[jax.ShapeDtypeStruct]:
        """The tables of a program: one for each scatter."""
        return [jax.ShapeDtypeStruct(s.outs[0].shape, dtype_of_sums(s)) for s in self.group.scatters]

    def finished(self, value: Value, written: Any, tables: Mapping[Value, Any]) -> Any:
        """An output of the group, computed from what the kernel has written for it, and the table that it was scattered
        into."""
        total, step = self._joined(value, written), self._of.get(value)
        if step is not None and step.name in JOINS:
            total = TOGETHER[f"reduce_{JOINS[step.name]}"](total, tables[value].astype(total.dtype))
        return in_shape(total if total.dtype == value.dtype else total.astype(value.dtype), value.shape)

    def joined(self, outs: Sequence[Any]) -> list[Any]:
        """What the kernel has written, without the programs' parts."""
        return [self._joined(v, written) for v, written in zip(self.group.outputs, outs, strict=True)]

    def _joined(self, value: Value, written: Any) -> Any:
        step = self._of.get(value)
        if step is None:
            return written
        if step.name not in JOINS:
            return step.run([written], axes=(0,))[0]
        how = JOINS[step.name]
        return getattr(jnp, how)(written, axis=0, **({"dtype": written.dtype} if how == "sum" else {}))

    def body(self, tiling: Tiling, refs: Sequence[Any]) -> None:
        """The body of the kernel, whose programs share the elements by a tiling of as many shares."""
        group, layout = self.group, self.group.layout
        frame, share = tiling.frame(), jt.program_id(0)
        ins, behind = list(zip(group.loaded, refs)), len(group.read) + len(group.outputs)
        frame.tables = dict(zip(group.gathers, refs[len(group.loaded) :]))
        outs = dict(zip(group.outputs, refs[len(group.read) : behind], strict=True))
        mine = dict(zip(group.scatters, refs[behind:], strict=True))
        for step, ref in mine.items():
            ref[...] = jnp.full(ref.shape, neutral(step, ref.dtype), ref.dtype)
        added = [step for step in self.last if step not in mine]
        made = {v: step for step in group.steps for v in step.outs}
        for value, ref in ins:
            if not group.windowed and not layout.late & set(layout.axes[value]):
                frame.load(value, ref)
        each = jt.cdiv(tiling.late_blocks, tiling.shares)
        until = jnp.minimum((share + 1) * each, tiling.late_blocks)

        def one(number, sums):
            ids = {**frame.ids, **tiling.places(number)}
            if group.windowed:
                own = WindowFrame(layout, frame.sides, ids, dict(ins), made)
            else:
                own = Frame(layout, frame.sides, ids, dict(frame.tiles), frame.tables)
                self._compute(own, ins)
            for value, ref in outs.items():
                if value not in self._of:
                    own.store(value, ref)
            for step, ref in mine.items():
                add_tile(own, step, ref, self._ends(own))
            return tuple(self._more(own, step, so_far) for step, so_far in zip(added, sums, strict=True))

        sums = jax.lax.fori_loop(share * each, until, one, tuple(self._none(frame, step) for step in added))
        for step, ref in mine.items():
            outs[step.outs[0]][share] = ref[...]
        for step, total in zip(added, sums, strict=True):
            (out,) = step.outs
            tile = total if self._at_once else self._sum(frame, step, total)
            frame.tiles[out] = tile.reshape(frame.shape_of(out))
            frame.store(out, outs[out], share)

    def _compute(self, frame: Frame, ins: Sequence[tuple[Value, Any]]) -> None:
        for value, ref in ins:
            if value not in frame.tiles:
                frame.load(value, ref)
        for step in self.group.steps:
            if step not in self.last:
                frame.run(step)

    @functools.cached_property
    def _at_once(self) -> bool:
        """Whether each tile is summed at once: a CPU's code adds up all sums of a tile in registers, in one pass, where
        sums of whole tiles would be read and written. On a GPU a sum of a tile waits for all of its threads."""
        return machine().whole and not vector_cores()

    def _sum(self, frame: Frame, step: Step, tile):
        return step.run([tile], axes=tuple(frame.gone(step)))[0]

    def _none(self, frame: Frame, step: Step):
        dtype, shape = dtype_of_sums(step), frame.shape_of(step.ins[0])
        if self._at_once:
            gone = frame.gone(step)
            shape = [n for a, n in enumerate(shape) if a not in gone]
        return jnp.full(shape, neutral(step, dtype), dtype)

    def _more(self, frame: Frame, step: Step, so_far):
        """The sum with the elements of one more tile; those behind the end of an axis change nothing."""
        (x,) = step.ins
        tile, ends = frame.spread(x, x).astype(so_far.dtype), self._ends(frame)
        if ends is not None:
            tile = jnp.where(jnp.broadcast_to(ends, tile.shape), tile, jnp.full_like(tile, neutral(step, tile.dtype)))
        return TOGETHER[step.name](so_far, self._sum(frame, step, tile) if self._at_once else tile)

    def _ends(self, frame: Frame) -> Any:
        """Which elements of a tile lie within the axes along which programs add up; None where all do."""
        sizes = self.group.layout.sizes
        inside = [frame.numbers(a) < sizes[a] for a in self.group.layout.late if sizes[a] % frame.sides[a]]
        return functools.reduce(jnp.logical_and, inside) if inside else None
