"""Gradients of the weights of convolutions on Hopper at the block level: products whose rounds are boxes of points.

A consumer has a point of the window and 64 channels. What boxes of points read there, and their cotangents, come
through tensor maps (see `hopper_convolution`), and the cotangents are those of all consumers. Programs have a share of
the boxes each; a kernel behind this one adds up their sums.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.convolution_points import Sides
from jtile.ops.hopper_convolution import ROWS, Axis, box_of_x, corner_of, split_up


@dataclasses.dataclass(frozen=True)
class SumForm:
    """How a program computes its sums.

    Attributes:
      box: sides of the box of images and points of a round, powers of two. columns: outputs of a program.
      consumers: of 64 channels at a point of the window. splits: shares of the boxes.
      slots: of the rings. share: neighbours that bring the cotangents together. registers: of a consumer's thread.
    """

    box: Sides
    columns: int
    consumers: int = 2
    splits: int = 1
    slots: int = 4
    share: int = 1
    registers: int = 240

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler that put neighbours into clusters."""
        return {"multicast": self.share} if self.share > 1 else {}

    @property
    def whole(self) -> Sides:
        """The sides of the box."""
        return self.box

    def boxes(self, sides: Sides) -> Sides:
        """How many boxes cover images and points of these sides."""
        return tuple(map(jt.cdiv, sides, self.box))


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers and barriers of a program.

    Attributes:
      rows: for each consumer the ring of what it reads. columns: the ring of cotangents.
      full, empty: a round has come; has been read.
    """

    rows: list[jt.Shared]
    columns: jt.Shared
    full: jt.Barrier
    empty: jt.Barrier


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a program sums: channels and outputs of a group, of which `output` is the first; its number among those that
    share out boxes; how many boxes it takes; its units, a point of the window and 64 channels each, from `unit` on."""

    group: jax.Array | int
    output: jax.Array | int
    number: jax.Array
    rounds: int
    unit: jax.Array


def _units(axes: tuple[Axis, ...], channels: int) -> int:
    return math.prod(a.window for a in axes) * jt.cdiv(channels, ROWS)


def _place(axes: tuple[Axis, ...], channels: int, unit) -> tuple[list, jax.Array]:
    """The point of the window along each axis, and the first channel in the group, of a unit."""
    units = _units(axes, channels)
    *taps, part = split_up(jnp.minimum(unit, units - 1), [*(a.window for a in axes), jt.cdiv(channels, ROWS)])
    return taps, part * ROWS


@jt.function
def _fill(x, g, mem: _Memory, part: _Part, axes, form: SumForm, channels: int) -> None:
    """The role that fills the rings: what consumers read, and the cotangents."""
    sides = g.shape[:-1]
    places = [_place(axes, channels, part.unit + h) for h in range(form.consumers)]
    nbytes = len(mem.rows) * mem.rows[0].nbytes + mem.columns.nbytes
    for k in jt.range(part.rounds):
        mem.empty.at(k).wait(before=True)
        mem.full.at(k).expect(nbytes)
        corner = corner_of(form, k * form.splits + part.number, sides)
        for (taps, channel), ring in zip(places, mem.rows):
            box = box_of_x(x, axes, [0] * len(axes), taps, corner, part.group * channels + channel, form.box, ROWS)
            jt.async_copy(box, ring.at(k), mem.full.at(k))
        here = [jt.ds(at, side) for at, side in zip(corner, form.box)]
        jt.async_copy(g.at[(*here, jt.ds(part.output, form.columns))], mem.columns.at(k), mem.full.at(k))


@jt.function
def _sum(mem: _Memory, rows, rounds: int, form: SumForm):
    """The sums of a consumer."""
    total, last = jt.zeros((ROWS, form.columns), jnp.float32), mem.full.count - 1
    for k in jt.range(rounds):
        mem.full.at(k).wait()
        total = jt.dot_wait(jt.dot_async(rows.at(k).T, mem.columns.at(k), total, keep=k > 0), pending=1)
        mem.empty.at(k + last).arrive(when=k > 0)
    total = jt.dot_wait(total)
    mem.empty.at(jnp.int32(rounds + last)).arrive()
    return total


def _shape(x, g, axes, form: SumForm, groups: int) -> Sides:
    return form.splits, math.prod(a.window for a in axes), x.shape[-1] // axes[-1].stride // groups, g.shape[-1]


def _grid(x, g, *, axes, form: SumForm, groups: int):
    *_, channels, outputs = _shape(x, g, axes, form, groups)
    programs = jt.cdiv(jt.cdiv(_units(axes, channels), form.consumers), form.share) * form.share
    return form.splits, groups * jt.cdiv(outputs // groups, form.columns), programs


@jt.kernel(
    out_type=lambda x, g, *, axes, form, groups: jax.ShapeDtypeStruct(
        _shape(x, g, axes, form, groups), x.dtype if form.splits == 1 else jnp.float32
    ),
    grid=_grid,
)
def hopper_convolution_sums(x, g, dw, *, axes: tuple[Axis, ...], form: SumForm, groups: int):
    """x as for `hopper_convolution`, g [batch, *points, o]; dw [splits, points of the window, c / groups, o]: parts of
    its gradient in float32, or, if there is one, the gradient in the dtype of x."""
    # dw[k, c, o] = sum_nu x[n, stride u + start + step k, c] g[n, u, o]
    number, column, unit = (jt.program_id(axis) for axis in range(3))
    channels, outputs = dw.shape[2], g.shape[-1] // groups
    blocks = jt.cdiv(outputs, form.columns)
    group, column = split_up(column, [groups, blocks]) if groups > 1 else (0, column)
    rounds = jt.cdiv(math.prod(form.boxes(g.shape[:-1])), form.splits)
    part = _Part(group, group * outputs + column * form.columns, number, rounds, unit * form.consumers)
    points = math.prod(form.box)
    mem = _Memory(
        rows=[jt.alloc((points, ROWS), x.dtype, slots=form.slots) for _ in range(form.consumers)],
        columns=jt.alloc((points, form.columns), g.dtype, slots=form.slots),
        full=jt.barrier(form.slots),
        empty=jt.barrier(form.slots, arrivals=form.consumers),
    )
    for h in range(form.consumers):
        with jt.role(f"consumer{h}", warps=4, registers=form.registers, early=True):
            jt.wait_for_kernels()
            total = _sum(mem, mem.rows[h], rounds, form)
            taps, channel = _place(axes, channels, part.unit + h)
            tap = 0
            for a, here in zip(axes, taps):
                tap = tap * a.window + here
            if part.unit + h < _units(axes, channels):
                dw[number, tap, jt.ds(channel, ROWS), jt.ds(part.output, form.columns)] = total.astype(dw.dtype)
    with jt.role("producer", warps=1, registers=24, early=True):
        jt.wait_for_kernels()
        _fill(x, g, mem, part, axes, form, channels)
