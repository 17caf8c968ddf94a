"""One axis of blocks for all axes of a grid, in an order that caches like; few blocks that take many tiles each."""

from __future__ import annotations

import dataclasses
import math

from jtile.ir import Builder, For, Full, Kernel, Load, NumPrograms, ProgramId, Value
from jtile.ir.types import INDEX
from jtile.passes.order import axes_of, grouped_axes
from jtile.passes.rewrite import Rewriter, Rules

from .feeds import tile_bytes
from .uneven import Uneven, shared, uneven
from .uneven import ids as uneven_ids

APART = 128  # tiles of which no two are one block's: blocks are as many or more
LONGER = 1.5  # how many times the bytes along the rows of a wave of tiles may be those along its columns


@dataclasses.dataclass(frozen=True)
class Bands:
    """Tiles of a matrix product: bands of `rows` rows, column by column inside a band; i, j: the axes of the grid."""

    i: int
    j: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Tiles as they come, but each block has tiles from all over the last axis of the grid: of those of one place along
    it, the tiles that one block would get next are moved. How long tiles take is known only when they run, and is often
    alike for tiles of one place."""


Order = Uneven | Bands | Mixed | None  # tiles by length, in bands, or as they come


def bands(kernel: Kernel, blocks: int) -> Bands | None:
    """The bands of a matrix product of which `blocks` tiles are worked on at a time. These tiles read fewest bytes
    where they read about as many along the rows as along the columns; and all bands are about as high. None: the
    kernel is no such product."""
    axes = grouped_axes(kernel)
    if axes is None:
        return None
    moved = dict.fromkeys(axes, 0)
    for op in kernel.body.walk():
        if isinstance(op, Load) and len(along := axes_of(op) & moved.keys()) == 1:
            moved[along.pop()] += tile_bytes(op.result)
    row, column = (max(n, 1) for n in moved.values())  # an element of half a byte must not count as none
    rows = 1
    while (2 * rows) ** 2 * row <= LONGER * blocks * column:
        rows *= 2
    height = kernel.grid[axes[0]]
    return Bands(*axes, -(-height // -(-height // rows)))


def persist(kernel: Kernel, blocks: int, cache: int, mixed: bool = False) -> Kernel:
    """The kernel as a grid of `blocks` programs: each takes every `blocks`-th of the tiles, which are the programs of
    the old grid; one each where there are no more tiles than blocks. `cache`: see `plan.Machine`; `mixed`:
    see `Mixed`."""
    tiles = math.prod(kernel.grid)
    order = Mixed() if mixed else uneven(kernel, cache) or bands(kernel, min(blocks, tiles))
    walk = Rewriter(kernel, Rules())
    b = walk.b
    b.loc = kernel.loc
    first = b.value(ProgramId(0), "tile")
    if blocks >= tiles:
        _program(walk, kernel, first, order)
        return dataclasses.replace(kernel, grid=(tiles,), body=b.block, lanes=0)
    bounds = first, b.index(tiles), b.index(blocks)
    with b.region([INDEX], ("t",)) as body:
        t = body.params[0]
        if isinstance(order, Uneven):
            turn = b.map("div", t, b.index(blocks))
            _inlined(walk, kernel, shared(b, kernel.grid, turn, first, blocks, order))
        else:
            _program(walk, kernel, t, order)
    b.loc = kernel.loc
    b.add(For(*bounds, (), body))
    return dataclasses.replace(kernel, grid=(blocks,), body=b.block, lanes=0)


def _program(walk: Rewriter, kernel: Kernel, tile: Value, order: Order) -> None:
    """The body of the kernel for one tile."""
    b, grid = walk.b, kernel.grid
    ids = uneven_ids(b, grid, tile, order) if isinstance(order, Uneven) else _ids(b, grid, tile, order)
    _inlined(walk, kernel, ids)


def _inlined(walk: Rewriter, kernel: Kernel, ids: list[Value]) -> None:
    """The body of the kernel for the program of these ids."""
    rules = Rules()
    rules(ProgramId)(lambda op, w: ids[op.axis] if op.axis < len(ids) else w.new(Full(0, (), "int32")))
    rules(NumPrograms)(lambda op, w: w.new(Full(int((*kernel.grid, 1, 1, 1)[op.axis]), (), "int32")))
    walk.rules = rules
    walk.inline(kernel.body)


def _ids(b: Builder, grid: tuple[int, ...], tile: Value, banded: Bands | Mixed | None) -> list[Value]:
    """The program ids of a tile: the last axis fastest, or bands of the rows of a matrix product."""
    ids: dict[int, Value] = {}
    rest = tile
    if isinstance(banded, Mixed):
        last = len(grid) - 1
        rest, place = _divided(b, tile, grid[last], math.prod(grid[:last]))
        side = b.index(grid[last])
        moved = b.map("div", b.map("mul", rest, side), b.index(APART))
        ids[last] = b.map("rem", b.map("add", place, moved), side)
    elif banded:
        i, j = banded.i, banded.j
        rest, inner = _divided(b, tile, grid[i] * grid[j], math.prod(grid[:i]))
        ids[i], ids[j] = _banded(b, inner, grid[i], grid[j], banded.rows)
    for axis in reversed(range(len(grid))):
        if axis not in ids:
            before = math.prod(n for k, n in enumerate(grid[:axis]) if k not in ids)
            rest, ids[axis] = _divided(b, rest, grid[axis], before)
    return [ids[axis] for axis in range(len(grid))]


def _divided(b: Builder, v: Value, side: int, before: int) -> tuple[Value, Value]:
    """Quotient and remainder of `v < before * side`."""
    if side == 1:
        return v, b.index(0)
    if before == 1:
        return b.index(0), v
    n = b.index(side)
    return b.map("div", v, n), b.map("rem", v, n)


def _banded(b: Builder, v: Value, rows: int, columns: int, band: int) -> tuple[Value, Value]:
    """(row, column) of a tile: bands of `band` rows, column after column inside a band."""
    if rows <= band:
        n = b.index(rows)
        return b.map("rem", v, n), b.map("div", v, n)
    width = b.index(band * columns)
    first = b.map("mul", b.map("div", v, width), b.index(band))
    inside = b.map("rem", v, width)
    side = b.index(band) if rows % band == 0 else b.map("min", b.map("sub", b.index(rows), first), b.index(band))
    return b.map("add", first, b.map("rem", inside, side)), b.map("div", inside, side)
