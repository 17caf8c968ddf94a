"""Tiles that take different times: the longest first, so that no processor starts a long one when others are done."""

from __future__ import annotations

import dataclasses
import math

from jtile.ir import Builder, Cast, Dot, For, Full, Kernel, Load, Map, ProgramId, Select, Value
from jtile.ir.types import DTYPES
from jtile.passes.affine import ranges
from jtile.passes.rewrite import Rewriter, Rules


@dataclasses.dataclass(frozen=True)
class Uneven:
    """How programs differ along an axis of the grid, and how they are best taken.

    Attributes:
      axis: the loops of programs are longer at one end of it than at the other.
      grows: the last program of the axis has the longest ones.
      group: as many programs of the other axes are worked on together, for all places along `axis`: what they load
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
            held = sum(map(array_bytes, refs)) // others
            fits = [g for g in range(1, others + 1) if others % g == 0 and g * held <= cache]
            return Uneven(axis, first < last, max(fits, default=1))
    return None


def array_bytes(ref: Value) -> int:
    """Bytes of the array of a Ref."""
    return math.prod(ref.shape) * DTYPES[ref.dtype].bits // 8


def _axes(bound: Value) -> set[int]:
    """The grid axes that a bound follows from by arithmetic; what is loaded says nothing of the order of programs."""
    return {v.op.axis for v in _behind([bound]) if isinstance(v.op, ProgramId)}


def _behind(bounds: list[Value]) -> set[Value]:
    """The bounds themselves, and the scalars that they follow from by arithmetic."""
    seen: set[Value] = set()
    todo = list(bounds)
    while todo:
        v = todo.pop()
        if v in seen or v.shape or v.op is None:
            continue
        seen.add(v)
        if isinstance(v.op, Map | Select | Cast):
            todo += v.op.operands()
    return seen


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
    group, width = b.index(order.group), b.index(order.group * n)
    place, side = _split(b, b.map("rem", tile, width), group)
    rest = b.map("add", b.map("mul", b.map("div", tile, width), group), side)
    return _ids(b, grid, rest, place, order)


def shared(b: Builder, grid: tuple[int, ...], turn: Value, block: Value, blocks: int, order: Uneven) -> list[Value]:
    """The program ids of what a block takes in its `turn`, so that all blocks have as much to do.

    Most turns come in pairs, a long program and then the short one that makes up for it, of neighbours on the other
    axes, so that what blocks load at the same time is in the second-level cache. The rest, `LAST` pairs of turns and
    what is over, goes from the longest to the shortest program, there and back over the blocks.
    """
    n, others = grid[order.axis], math.prod(grid) // grid[order.axis]
    half, tiles = n // 2, n * others
    paired = 0 if n % 2 else max(tiles // 2 // blocks - LAST, 0)  # pairs of turns
    pair = b.map("add", b.map("mul", b.map("div", turn, b.index(2)), b.index(blocks)), block)
    rest, at = _split(b, pair, b.index(max(half, 1)))
    second = b.map("eq", b.map("and", turn, b.index(1)), b.index(1))
    place = b.value(Select(second, b.map("sub", b.index(n - 1), at), at))
    first, cut = divmod(paired * blocks, max(half, 1))
    whole = first + (cut > 0)
    heads, between = others - whole, n - 2 * cut if cut else 0
    # The rest in order: the long half of each program that no pair has had, what is left between the halves of the
    # program that the pairs have had in part, and the short halves.
    turn = b.map("sub", turn, b.index(2 * paired))
    tile = b.map("add", b.map("mul", turn, b.index(blocks)), block)
    s = _there_and_back(b, turn, block, tiles - 2 * paired * blocks, blocks, tile)
    behind = b.map("sub", s, b.index(heads * half + between))
    is_behind = b.map("le", b.index(0), behind)
    long, own = _split(b, b.value(Select(is_behind, behind, s)), b.index(max(heads, 1)))
    last = b.map("add", long, b.value(Select(is_behind, b.index(half), b.index(0))))
    own = b.map("add", own, b.index(whole))
    if between:
        middle = b.map("sub", s, b.index(heads * half))
        inside = b.map("and", b.map("le", b.index(0), middle), b.map("lt", behind, b.index(0)))
        last = b.value(Select(inside, b.map("add", middle, b.index(cut)), last))
        own = b.value(Select(inside, b.index(first), own))
    if paired:
        early = b.map("lt", turn, b.index(0))
        last, own = b.value(Select(early, place, last)), b.value(Select(early, rest, own))
    return _ids(b, grid, _inside(b, own, others), _inside(b, last, n), order)


LAST = 3  # pairs of turns of a block, at the end, that are shared out by length: what is left over is small then


def _ids(b: Builder, grid: tuple[int, ...], rest: Value, place: Value, order: Uneven) -> list[Value]:
    """The ids of a program from its number on the other axes, the last fastest, and its place from the longest."""
    own = b.map("sub", b.index(grid[order.axis] - 1), place) if order.grows else place
    out = {order.axis: own}
    for axis in reversed(range(len(grid))):
        if axis not in out:
            rest, out[axis] = _split(b, rest, b.index(grid[axis]))
    return [out[axis] for axis in range(len(grid))]


def _inside(b: Builder, v: Value, n: int) -> Value:
    """The number `v`, in a form from which the analysis of ranges knows that it is in [0, n)."""
    return b.map("min", b.map("max", v, b.index(0)), b.index(n - 1))


def _split(b: Builder, v: Value, n: Value) -> tuple[Value, Value]:
    return b.map("div", v, n), b.map("rem", v, n)


def _there_and_back(b: Builder, turn: Value, block: Value, tiles: int, blocks: int, tile: Value) -> Value:
    """`tile`, the one that is `block`-th in its turn, or the `block`-th from behind in every other turn: the block that
    had the longest one has the shortest one next. A last turn that is not full is of the first blocks, forwards; the
    turn before it gives them the shortest tiles."""
    full = tiles // blocks
    behind = b.map(
        "sub", b.map("mul", b.map("add", turn, b.index(1)), b.index(blocks)), b.map("add", block, b.index(1))
    )
    back = b.map("eq", b.map("and", turn, b.index(1)), b.index((full - 1) & 1))
    return b.value(Select(b.map("and", back, b.map("lt", turn, b.index(full))), behind, tile))


def balances(kernel: Kernel, order: Uneven, blocks: int) -> bool:
    """Whether `shared` gives all blocks as much to do: how long a program takes follows from its number alone, long
    ones have short ones as partners (not so under a window: most are as long), or there are few."""
    loops = [op for op in kernel.body.walk() if isinstance(op, For) and any(isinstance(x, Dot) for x in op.body.walk())]
    bounds = [v for op in loops for v in (op.lo, op.hi)]
    n = kernel.grid[order.axis]
    few = math.prod(kernel.grid) <= 2 * (LAST + 1) * blocks
    if any(isinstance(v.op, Load) for v in _behind(bounds)) or (n % 2 and not few):
        return False
    outer, inner = (sum(_rounds(kernel, order.axis, i) for i in (k, n - 1 - k)) for k in (0, (n - 1) // 2))
    return abs(outer - inner) <= SLACK


SLACK = 2  # rounds by which pairs of programs may differ
