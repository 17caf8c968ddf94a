"""Tiles that take different times: the longest first, so that no processor starts a long one when others are done."""

from __future__ import annotations

import dataclasses
import math

from jtile.ir import Builder, Cast, Dot, For, Full, Kernel, Load, Map, ProgramId, Select, Value
from jtile.ir.types import DTYPES

from ..affine import ranges
from ..rewrite import Rewriter, Rules


@dataclasses.dataclass(frozen=True)
class Uneven:
    """How programs differ along an axis of the grid, and how they are best taken.

    Attributes:
      axis: the loops of programs are longer at one end of it than at the other.
      grows: the last program of the axis has the longest ones.
      group: so many programs of the other axes are worked on together, for all places along `axis`: what they load
        stays in the second-level cache.
    """

    axis: int
    grows: bool
    group: int


def uneven(kernel: Kernel, cache: int) -> Uneven | None:
    """The axis along which programs with products differ; None where none does. `cache`: bytes that loads may take."""
    loops = [op for op in kernel.body.walk() if isinstance(op, For) and any(isinstance(x, Dot) for x in op.body.walk())]
    if all(isinstance(v.op, Full) for op in loops for v in (op.lo, op.hi)):
        return None
    axes = set().union(*(_axes(v) for op in loops for v in (op.lo, op.hi)))
    for axis, n in enumerate(kernel.grid):
        if n == 1 or axis not in axes:
            continue
        first, last = _rounds(kernel, axis, 0), _rounds(kernel, axis, n - 1)
        if first != last:
            others = math.prod(kernel.grid) // n
            refs = {op.ref for loop in loops for op in loop.body.walk() if isinstance(op, Load)}
            held = sum(math.prod(r.shape) * DTYPES[r.dtype].bits // 8 for r in refs) // others
            fits = [g for g in range(1, others + 1) if others % g == 0 and g * held <= cache]
            return Uneven(axis, first < last, max(fits, default=1))
    return None


def _axes(bound: Value) -> set[int]:
    """The grid axes that a bound follows from by arithmetic; what is loaded says nothing of the order of programs."""
    found: set[int] = set()
    seen: set[Value] = set()
    todo = [bound]
    while todo:
        v = todo.pop()
        if v in seen or v.shape or v.op is None:
            continue
        seen.add(v)
        if isinstance(v.op, ProgramId):
            found.add(v.op.axis)
        elif isinstance(v.op, Map | Select | Cast):
            todo += v.op.operands()
    return found


def _rounds(kernel: Kernel, axis: int, at: int) -> int:
    """How many rounds the loops with products of a program can have, where its number along an axis is given."""
    rules = Rules()
    rules(ProgramId)(lambda op, w: w.new(Full(at, (), "int32")) if op.axis == axis else None)
    fixed = Rewriter(kernel, rules).run()
    known = ranges(fixed)
    total = 0
    for op in fixed.body.walk():
        if isinstance(op, For) and any(isinstance(x, Dot) for x in op.body.walk()):
            lo, hi = known(op.lo), known(op.hi)
            total += max(hi.hi - lo.lo, 0) if lo and hi else 0
    return total


def ids(b: Builder, grid: tuple[int, ...], tile: Value, order: Uneven) -> list[Value]:
    """The program ids of a tile: groups one after the other, in a group the longest programs first."""
    n = grid[order.axis]
    group = b.index(order.group)
    width = b.index(order.group * n)
    inside = b.map("rem", tile, width)
    place = b.map("div", inside, group)
    own = b.map("sub", b.index(n - 1), place) if order.grows else place
    rest = b.map("add", b.map("mul", b.map("div", tile, width), group), b.map("rem", inside, group))
    out = {order.axis: own}
    for axis in reversed(range(len(grid))):
        if axis not in out:
            side = b.index(grid[axis])
            out[axis] = b.map("rem", rest, side)
            rest = b.map("div", rest, side)
    return [out[axis] for axis in range(len(grid))]


def snake(b: Builder, tile: Value, tiles: int, blocks: int) -> Value:
    """The tile that a block takes in place of `tile`: every other round of the blocks goes backwards, so that the block
    that had the longest tile has the shortest one next. A last round that is not full goes forwards."""
    n = b.index(blocks)
    turn = b.map("div", tile, n)
    back = b.map(
        "sub", b.map("mul", b.map("add", b.map("add", turn, turn), b.index(1)), n), b.map("add", tile, b.index(1))
    )
    odd = b.map("eq", b.map("and", turn, b.index(1)), b.index(1))
    full = b.map("lt", turn, b.index(tiles // blocks))
    return b.value(Select(b.map("and", odd, full), back, tile))
