"""Products of one or two rows that are summed over devices, in one kernel (`hopper_gemv`): the role that writes posts
each tile to all devices when it is made, and at last adds up what has come of its own tiles. The kernel behind fills
its ring meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import hopper_gemv, hopper_held
from jtile.ops.collective_posts import not_posted
from jtile.ops.dispatch import first_unmet
from jtile.ops.operands import NO_EPILOGUE, Weight
from jtile.ops.streamed_operands import Rows, Walk

POSTED = False  # whether products of one or two rows and the sums behind them are one kernel: not timed yet


@dataclasses.dataclass(frozen=True)
class Others:
    """Where the tiles of all devices along `axis` come together: `box` float32 [devices, m, programs, tiles of a
    program, rows of a tile] of this device."""

    axis: str
    box: jt.Ref

    def post(self, walk: Walk, i: int, n, out) -> None:
        """Post what tile number n of a program gives for row i, float32 [rows], to all devices, this one last."""
        count, me = jt.axis_size(self.axis), jt.axis_index(self.axis)
        for k in range(count):
            there = self.box.on(self.axis, (me + 1 + k) % count)
            jt.post(there, (me, i, walk.first, n, slice(None)), out)

    def add(self, walk: Walk, y) -> None:
        """Write the sums over devices of the tiles of a program, which are received together."""
        count, tiles, me = self.box.shape[0], self.box.shape[3], jt.axis_index(self.axis)
        # two numbers have the same sum in either order, and this device's are here first
        devices = [me, 1 - me] if count == 2 else range(count)
        number = jt.arange(tiles)[:, None]
        for i in range(y.shape[0]):
            terms = [
                jt.receive(self.box, (d, i, walk.first, slice(None), slice(None)), mask=number < walk.tiles)
                for d in devices
            ]
            total = functools.reduce(jnp.add, terms)
            for n in range(tiles):  # what is behind the last tile is outside of y
                one = jnp.where(number == n, total, 0).sum(0)
                y.tiles(None, walk.rows)[i, walk.first + n * walk.programs] = one.astype(y.dtype)


def _boxes(x, weights, *, axis: str, rows: int, **_):
    outputs = jt.cdiv(weights[0].codes.shape[0], rows)
    programs = hopper_gemv._grid(x, weights, rows=rows)
    tiles = jt.next_power_of_2(jt.cdiv(outputs, programs))
    return [jt.symmetric((jt.axis_size(axis), x.shape[0], programs, tiles, rows), jnp.float32)]


@jt.kernel(out_type=hopper_gemv._outputs, grid=hopper_gemv._grid, scratch=_boxes, name="hopper_gemv_sum")
def summed_product(x, weights: tuple[Weight, ...], y, box, *, axis: str, kind: str, out_dtype: str, rows: int,
                   roles: int, slots: int, early: bool = False, beside: bool = False):  # fmt: skip
    """y [m, out], the sum over the devices along an axis of x [m, in / n, n], n weights to a lane, times a weight."""
    options = dict(kind=kind, activation=None, rows=rows, roles=roles, slots=slots, early=early, beside=beside)
    hopper_gemv.program(Rows(x), weights, NO_EPILOGUE, y, None, others=Others(axis, box), **options)


def product(x, w, *, axis: str) -> jax.Array:
    """x [m, in] times the transposed w [out, in], summed over the devices along an axis: [m, out]."""
    kind = x.dtype.name
    x, options = hopper_gemv._arguments(x, (Weight(w),), kind, None)
    return summed_product(x, (Weight(w),), axis=axis, kind=kind, out_dtype=kind, **options)


def misfit(x, w, *, axis: str) -> str | None:
    """Why the kernel does not compute x [m, in] times the transposed w [out, in], summed over devices."""
    return (
        not_posted(x, axis)
        or hopper_gemv.misfit(x, Weight(w), x.dtype.name)
        or first_unmet(
            (POSTED, "no GPU has timed it"),
            (hopper_held.choice(x, (Weight(w),), x.dtype.name) is None, "the matrix is small, and held in registers"),
        )
    )
