"""How many elements a program takes along each axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile._errors import KernelValueError
from jtile.ops._shapes import fit, machine
from jtile.ops.dispatch import vector_cores

from .frames import Frame
from .layout import COLUMNS, Layout

LOOP_TILE = 256  # elements that a program takes through all rounds of a loop at most
LANES = 16  # elements that such a program takes at least; elements of one or two vectors of a CPU


class Tiling:
    """How programs share the elements of a layout.

    Attributes:
      sides: those of a program's tile, along all axes.
      shares: how many programs, at most, share the blocks of the axes whose sums are added up at the end.
      order: the axes that programs share without sums, as the grid has them: programs that run one after another differ
        in the last one.
      grid: the number of programs: the shares first, then along each axis of `order`.
    """

    def __init__(self, layout: Layout, sides: tuple[int, ...], shares: int = 0, order: Sequence[int] | None = None):
        self.layout, self.sides, self.shares = layout, sides, shares
        own = (a for a in range(len(sides)) if a not in layout.whole | layout.late)
        self.order = tuple(own) if order is None else tuple(order)
        self.grid = (*(shares,) * bool(layout.late), *(self.blocks(a) for a in self.order))

    def of(self, sides: Sequence[int], order: Sequence[int]) -> Tiling:
        """The tiling with other sides, and another order of programs.

        Raises:
          KernelValueError: the axes that programs take whole have other sides (a kernel would sum along a part of them,
            or along padding), or these are no sides of this layout, or the order is not one of its axes.
        """
        fits = len(sides) == len(self.sides) and all(isinstance(n, int) and n > 0 for n in sides)
        if not fits or any(sides[a] != self.sides[a] for a in self.layout.whole):
            raise KernelValueError(f"a tile has sides {self.sides} along the axes taken whole, got {sides!r}")
        if sorted(order) != sorted(self.order):
            raise KernelValueError(f"the grid has the axes {self.order} in any order, got {order!r}")
        return Tiling(self.layout, tuple(sides), self.shares, order)

    def blocks(self, axis: int) -> int:
        """How many tiles an axis has."""
        return jt.cdiv(self.layout.sizes[axis], self.sides[axis])

    @property
    def late_blocks(self) -> int:
        """How many tiles the axes have whose sums are added up at the end."""
        return math.prod(self.blocks(a) for a in self.layout.late)

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    def frame(self, kind: type[Frame] = Frame) -> Frame:
        """The frame, of a `kind`, of the program that is being traced."""
        first = len(self.grid) - len(self.order)
        return kind(self.layout, self.sides, {a: jt.program_id(k) for k, a in enumerate(self.order, first)}, {})

    def places(self, number) -> dict[int, Any]:
        """The place of a tile, by its number, along each of the axes whose sums are added up at the end."""
        found = {}
        for a in sorted(self.layout.late, reverse=True):
            found[a], number = (
                jax.lax.rem(number, jnp.int32(self.blocks(a))),
                jax.lax.div(number, jnp.int32(self.blocks(a))),
            )
        return found


FIRST_CACHE = 8192  # elements of a CPU's first-level cache, which holds several tiles beside each other
LEAST_TILE = 256


def group_tiling(layout: Layout, kept: int = 0) -> Tiling:
    """The tiling of a group: programs take axes whole, and of others blocks, the innermost first, as far as a program
    has room for more. kept: how many tiles stand in memory besides what is read and written, since they are read
    several times."""
    m = machine()
    sides = [n if a in layout.whole else 1 for a, n in enumerate(layout.sizes)]
    passes = bool(layout.whole or layout.late)
    budget, last = m.row if passes else m.tile, len(sides) - 1
    if m.whole and kept > FIRST_CACHE // m.tile:
        budget = min(budget, max(FIRST_CACHE // kept, LEAST_TILE))
    left = math.prod(n for a, n in enumerate(layout.sizes) if a not in layout.whole)
    left = max(jt.cdiv(left, m.programs), 1) if passes else left  # elements of a program, so that all have some
    tiles, lanes, crossed = set(layout.axes.values()), lanes_of(layout), frozenset[int]()
    if m.whole and not layout.whole:
        crossed = crossed_axes(layout)
    beside = math.prod(min(layout.sizes[a], CROSSED) for a in crossed)
    for a in sorted(set(range(len(sides))) - layout.whole, key=lambda a: (a == last, a in crossed, a), reverse=True):
        room = budget // max((math.prod(sides[b] for b in own) for own in tiles if a in own), default=1)
        if layout.whole and a == last:  # along this axis elements lie side by side in memory
            room = max(room, COLUMNS)
        elif a in crossed:
            room = min(room, CROSSED)
        elif crossed and a == last:
            room = min(room, max(budget // beside, LANES))
        n, most = layout.sizes[a], max(min(room, left, layout.sizes[a]), 1)
        sides[a] = side_by_side(n, most, lanes) if a == last or a in crossed else fit(n, most)
        left = max(left // sides[a], 1)
    tiling = Tiling(layout, tuple(sides))
    if not layout.late:
        return tiling
    others = math.prod(tiling.grid[1:])
    return Tiling(layout, tuple(sides), max(1, min(m.sums // others, tiling.late_blocks)))


CROSSED = 32  # elements that a tile has along an axis which lies side by side in memory in a transposed array


def crossed_axes(layout: Layout) -> frozenset[int]:
    """The axes, but the last, along which the elements of transposed values lie side by side in memory. A tile of one
    long row reads one element of each of their cache lines, and the next program reads the lines again: `2 * x.T + y`
    of 1024 by 1024 takes 5.6 ms in tiles of 4 by 1024 and 1.6 in tiles of 32 by 128 (XLA 4 to 8)."""
    return frozenset(own[-1] for own in layout.axes.values() if [*own] != sorted(own)) - {len(layout.sizes) - 1}


def lanes_of(layout: Layout) -> int:
    """How many elements of the widest values of a layout a CPU's vector has at most."""
    return LANES // 2 if any(v.dtype.itemsize > 4 for v in layout.axes) else LANES


def side_by_side(n: int, most: int, lanes: int = LANES) -> int:
    """A side of tiles, at most `most`, along an axis of n elements that lie side by side in memory. On CPUs it is a
    number of whole vectors, and if one of at least half as many divides the axis, that: no tile has a rest then, whose
    code would double a kernel, and none hangs over the end (Mandelbrot's set of 1000 by 1000 takes 9.8 ms in tiles of
    200, and 15.4 in tiles of 256)."""
    if not machine().whole or vector_cores() or most >= n or most < LANES:
        return fit(n, most)
    whole = range(most // lanes * lanes, most // 2, -lanes)
    even = jt.cdiv(jt.cdiv(n, jt.cdiv(n, most)), LANES) * LANES
    return next((side for side in whole if n % side == 0), min(even, most // LANES * LANES))


def window_tiling(layout: Layout, within: Mapping[int, tuple[int, int]]) -> Tiling:
    """The tiling of a group with windows, of which `within` says for each axis between which numbers none leaves its
    array: tiles are narrower than rows there, so that most of them do not meet an end, and on GPUs always. There a tile
    is a part of one row where windows leave their arrays, since the numbers of rows are scalars then."""
    m, sides, last = machine(), [1] * len(layout.sizes), len(layout.sizes) - 1
    narrow = last > 0 and (not m.whole or within[last] != (0, layout.sizes[last] - 1))
    ended = any(within[a] != (0, n - 1) for a, n in enumerate(layout.sizes))
    row, left = (NARROW_CPU if narrow else (m.tile, m.tile)) if m.whole else ENDED_GPU if ended else NARROW_GPU
    row = row if last else left
    for a in reversed(range(len(sides))):
        n = layout.sizes[a]
        most = min(row, left) if a == last else left
        even = side_by_side if a == last else fit
        sides[a] = most if narrow and a == last and most < n else even(n, min(most, n))
        left = 1 if ended and not m.whole and a == last and sides[a] >= LEAST_PART else max(left // sides[a], 1)
    tiling = Tiling(layout, tuple(sides))
    if not layout.late:
        return tiling
    return Tiling(layout, tuple(sides), max(1, min(m.sums // math.prod(tiling.grid[1:]), tiling.late_blocks)))


# The elements of such a tile along the last axis, and in all.
LEAST_PART = 128  # elements of a row, of which one part alone is such a tile
NARROW_CPU, NARROW_GPU, ENDED_GPU = (64, 1024), (256, 1024), (512, 512)


def loop_tiling(layout: Layout) -> Tiling:
    """The tiling of a loop: programs that run all rounds take few elements, which stay in registers."""
    sides = [n if a in layout.whole else 1 for a, n in enumerate(layout.sizes)]
    programs = math.prod(n for a, n in enumerate(layout.sizes) if a not in layout.whole)
    room = max(min(jt.cdiv(programs, machine().programs), LOOP_TILE // layout.row), 1)
    room = jt.cdiv(room, LANES) * LANES if machine().whole else jt.next_power_of_2(max(room, LANES))
    for a in reversed(range(len(layout.sizes))):
        if a not in layout.whole and room > 1:
            sides[a] = fit(layout.sizes[a], room) if layout.sizes[a] <= room else room
            room //= sides[a]
    return Tiling(layout, tuple(sides))
