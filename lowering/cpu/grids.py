"""How many small programs of a grid run as one, on a CPU: as few as have tiles worth a program, with the bits of every
element as they were."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jtile import ir
from jtile.passes.coarsen import Plan, coarsen, rounds
from jtile.passes.lanes import New, Refused, Wide

from .cost import program_cost_ns
from .isa import Isa

FEWEST = 16  # programs of a grid whose overhead is worth the time to compile another kernel
SMALL = 512  # elements of the largest tile of a program that is too small
LARGE = 4096  # elements of the largest tile of programs that run as one
ROW = 256  # elements along the last axis of arrays, and of vectors that are all that a program has
VECTOR = 2048
SIDE = 16  # of tiles that are transposed: rows of an array that lie a power of two apart share few sets of a cache
ROWS = 64
PRODUCT = 64, 64  # columns and rows of products
TERMS = 128  # along the axis that a loop of products sums over, in one of its rounds
TERMS_OF_ROW = 1024  # and of a loop that reduces a row
MANY = 32  # programs that are left in any case where one of them takes longer than
LONG_NS = 16000
OPS = 256  # of a program that is not small, however few elements it has: its expressions are cut by their lengths


def coarse_grid(kernel: ir.Kernel, isa: Isa) -> tuple[ir.Kernel, int]:
    """The kernel with a coarser grid, where its programs are small and may run together, else the kernel itself; and
    after how many terms the sums of products are to be added up where rounds have become longer, or 0."""
    if not all(isinstance(n, int) for n in kernel.grid) or math.prod(kernel.grid) < FEWEST or not is_small(kernel):
        return kernel, 0
    if _adds_in_turn(kernel) or sum(1 for _ in kernel.body.walk()) > OPS:
        return kernel, 0
    wide = max((ir.DTYPES[r.dtype].bits for op in kernel.body.walk() for r in op.results), default=32)
    row = 2 * isa.lanes(max(wide, 32))
    terms: set[int] = set()
    keeps = lambda old, new: keeps_bits(old, new, row, terms)
    kernel = _longer_rounds(kernel, keeps, terms)
    for axis in reversed(range(len(kernel.grid))) if _largest(kernel) < SMALL else ():
        count = _count(kernel, axis, isa)
        made = coarsen(kernel, axis, count, keeps) if count > 1 else None
        kernel = made or kernel
    return kernel, max(terms, default=0)


def is_small(kernel: ir.Kernel) -> bool:
    """Whether the tiles of a program are so small that several programs may run as one."""
    return _largest(kernel) < SMALL


def _longer_rounds(kernel: ir.Kernel, keeps: Callable[[ir.Op, ir.Op], bool], terms: set[int]) -> ir.Kernel:
    """The kernel, whose loops over small tiles take several of them in a round. `terms`: of products of floats that
    were in one round."""
    for number in range(sum(isinstance(op, ir.For) for op in kernel.body.walk())):
        loop = [op for op in kernel.body.walk() if isinstance(op, ir.For)][number]  # as many as there were
        loads = [op for op in loop.body.walk() if isinstance(op, ir.Load)]
        sides = [d.size for op in loads for d in op.index if isinstance(d, ir.Tile | ir.Span) and op.result.shape]
        if not sides or not (trips := rounds(loop)):
            continue
        most = TERMS if any(isinstance(op, ir.Dot) for op in loop.body.walk()) else TERMS_OF_ROW
        count = next((n for n in range(min(trips, most // max(sides)), 1, -1) if trips % n == 0), 1)
        before = set(terms)
        made = coarsen(kernel, loop, count, keeps)
        if made is None or len(terms) > 1:
            terms &= before
        else:
            kernel = made
    return kernel


def _largest(kernel: ir.Kernel) -> int:
    """Elements of the largest tile that a program makes; of kernels without products, or that it reads."""
    ops = [op for op in kernel.body.walk() if not isinstance(op, ir.For | ir.If)]
    if any(isinstance(op, ir.Dot) for op in ops):
        ops = [op for op in ops if not isinstance(op, ir.Load | ir.Transpose | ir.Cast)]
    return max((r.type.size for op in ops for r in op.results if isinstance(r.type, ir.TileType)), default=1)


def _count(kernel: ir.Kernel, axis: int, isa: Isa) -> int:
    """How many programs along an axis shall be one."""
    if kernel.grid[axis] < 2:
        return 1
    try:
        plan = Plan(kernel, axis, 2)
    except (Refused, RecursionError):
        return 1
    side, goal = _goal(plan, axis)
    limit = min(kernel.grid[axis], goal // max(side, 1), LARGE // _largest(kernel))
    programs, cost = math.prod(kernel.grid), program_cost_ns(kernel, isa)
    limit = min(limit, max(programs // MANY, int(LONG_NS // cost)))
    return _divisor(kernel.grid[axis], limit)


def _divisor(programs: int, limit: int) -> int:
    """A number of programs up to a limit that leaves no rest, if there is one that is more than half of it."""
    return next((n for n in range(limit, limit // 2, -1) if programs % n == 0), limit)


def _goal(plan: Plan, axis: int) -> tuple[int, int]:
    """How many elements of arrays a program has along a grid axis, and how many it should have."""
    along, across, side = False, False, 1
    for op, lanes in plan.access.items():
        k = next(k for k, d in enumerate(op.index) if plan.kind(ir.dim_value(d)) is not None)
        last = k == len(op.index) - 1
        along |= last and len(op.index) > 1
        across |= not last
        if not isinstance(lanes, New):
            side = max(side, _tile(op).shape[lanes.at])
    dots = [plan.kind(op.result) for op in plan.kernel.body.walk() if isinstance(op, ir.Dot)]
    if dots:
        return side, PRODUCT[0 if Wide(1) in dots else 1]
    if along and across:
        return side, SIDE
    if across:
        return 1, ROWS
    return side, ROW if along else VECTOR


def _tile(op: ir.Load | ir.Store | ir.Atomic) -> ir.TileType:
    v = op.result if isinstance(op, ir.Load) else op.value
    assert isinstance(v.type, ir.TileType)
    return v.type


# -- bits -----------------------------------------------------------------------------------------------------------


def keeps_bits(old: ir.Op, new: ir.Op, row: int, terms: set[int]) -> bool:
    """Whether sums and products have the bits that they had.

    Args:
      row: elements of a sum that is alone in its program, from which it is summed in chains.
      terms: gets the terms that a product of floats had, if it has more now.
    """
    match old, new:
        case ir.Reduce(x, fn, axes), ir.Reduce():
            if fn not in ("sum", "prod") or ir.DTYPES[x.dtype].kind != "f" or x.shape == new.x.shape:
                return True
            alone = all(n == 1 for k, n in enumerate(x.shape) if k not in axes)
            if alone and math.prod(x.shape) >= row:
                return False
            return _across(x.shape, axes) == _across(new.x.shape, new.axes)
        case ir.Dot(), ir.Dot():
            if old.precision == "default" and {old.a.dtype, old.b.dtype} == {"float32"}:
                if old.sizes()[3] != new.sizes()[3]:
                    terms.add(old.sizes()[3])
                return True  # and see `emit_programs`
            return ir.DTYPES[old.a.dtype].kind in "iu" or (old.a.shape, old.b.shape) == (new.a.shape, new.b.shape)
        case ir.Atomic(), ir.Atomic():
            # Floats are added one by one, in the order of the tile: programs come first in it.
            if old.fn != "add" or ir.DTYPES[old.value.dtype].kind != "f" or old.value.type.size == 1:
                return True
            return len(old.value.shape) == len(new.value.shape) and old.value.shape[1:] == new.value.shape[1:]
    return True


def _adds_in_turn(kernel: ir.Kernel) -> bool:
    """Whether a program adds floats to one array in several places, or in a loop: one program's additions came before
    the next one's."""
    adds = _float_adds(kernel.body)
    loops = [op for op in kernel.body.walk() if isinstance(op, ir.For | ir.While)]
    return len({op.ref for op in adds}) < len(adds) or any(_float_adds(b) for loop in loops for b in loop.blocks())


def _float_adds(block: ir.Block) -> list[ir.Atomic]:
    """The atomic additions of floats in a block, and in those inside of it."""
    adds = [op for op in block.walk() if isinstance(op, ir.Atomic) and op.fn == "add"]
    return [op for op in adds if ir.DTYPES[op.value.dtype].kind == "f"]


def _across(shape: Sequence[int], axes: Sequence[int]) -> bool:
    """Whether vectors of a reduction have a sum in each lane, and not terms of one sum."""
    inner = [k for k, n in enumerate(shape) if n > 1]
    return bool(inner) and inner[-1] not in axes


__all__ = ["coarse_grid", "is_small", "keeps_bits"]
