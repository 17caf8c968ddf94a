"""Which part of each array a range of programs may touch: boxes, from the intervals of the indices in Tile IR."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from jtile import ir
from jtile.ir.types import DTYPES, RefType
from jtile.passes.affine import ranges
from jtile.passes.intervals import Interval, Intervals

MOST = 8  # boxes of an array that are kept apart: more become one box around all of them


@dataclasses.dataclass(frozen=True)
class Box:
    """The elements from `starts` up to, not including, `stops`."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def empty(self) -> bool:
        return any(a >= b for a, b in zip(self.starts, self.stops, strict=True))

    def meets(self, other: Box) -> bool:
        """Whether two boxes of one array share an element."""
        for a, b, c, d in zip(self.starts, self.stops, other.starts, other.stops, strict=True):
            if a >= d or c >= b:
                return False
        return True

    def around(self, other: Box) -> Box:
        starts = tuple(map(min, self.starts, other.starts))
        return Box(starts, tuple(map(max, self.stops, other.stops)))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.starts, self.stops, strict=True)) + "]"


@dataclasses.dataclass(frozen=True)
class Region:
    """Boxes of an array of a shape. Regions of one memory in two shapes are compared by the elements between the first
    and the last of each, in row-major order."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def meets(self, other: Region) -> bool:
        """Whether both may share an element."""
        if not self.boxes or not other.boxes:
            return False
        if self.shape == other.shape:
            return any(a.meets(b) for a in self.boxes for b in other.boxes)
        return any(a < d and c < b for a, b in self._spans() for c, d in other._spans())

    def _spans(self) -> list[tuple[int, int]]:
        return [_span(self.shape, box) for box in self.boxes]


def _span(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """The elements from the first to behind the last of a box, in row-major order."""
    first = last = 0
    for n, a, b in zip(shape, box.starts, box.stops, strict=True):
        first, last = first * n + a, last * n + b - 1
    return first, last + 1


def region(shape: Sequence[int], boxes: Iterable[Box]) -> Region:
    """A region without the dimensions of one element, and without boxes that are empty or there twice."""
    kept = [k for k, n in enumerate(shape) if n != 1]
    found = [b for b in dict.fromkeys(boxes) if not b.empty]
    if len(found) > MOST:
        around = found[0]
        for b in found[1:]:
            around = around.around(b)
        found = [around]
    pick = lambda numbers: tuple(numbers[k] for k in kept)
    return Region(pick(tuple(shape)), tuple(dict.fromkeys(Box(pick(b.starts), pick(b.stops)) for b in found)))


def parts(region: Region, itemsize: int, most: int) -> list[tuple[int, int]]:
    """(offset, bytes) of what lies side by side in a region, at most `most` of them."""
    out: list[tuple[int, int]] = []
    for box in region.boxes:
        axis = len(region.shape)
        run = 1
        while axis and (axis == len(region.shape) or _whole(region, box, axis)):
            axis -= 1
            run *= box.stops[axis] - box.starts[axis]
        outer = [range(a, b) for a, b in zip(box.starts[:axis], box.stops[:axis], strict=True)]
        if math.prod(map(len, outer)) > most - len(out):
            continue
        for place in np.ndindex(*map(len, outer)):
            at = [r[k] for r, k in zip(outer, place, strict=True)] + list(box.starts[axis:])
            flat = 0
            for n, i in zip(region.shape, at, strict=True):
                flat = flat * n + i
            out.append((flat * itemsize, run * itemsize))
    return out


def _whole(region: Region, box: Box, axis: int) -> bool:
    return box.starts[axis] == 0 and box.stops[axis] == region.shape[axis]


# -- footprints -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What a range of programs may read and write: one region for each input and output of the kernel."""

    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


class _Programs(Intervals):
    """Intervals of the values in some programs of a kernel, whose ids lie between these ends."""

    def __init__(self, kernel: ir.Kernel, ids: Sequence[Interval]):
        super().__init__(kernel)
        self.ids = ids

    def visit(self, op: ir.Op) -> None:
        super().visit(op)
        if isinstance(op, ir.ProgramId) and op.axis < len(self.ids):
            self.set(op.results[0], self.ids[op.axis])


def ids_of(grid: Sequence[int], begin: int, end: int) -> list[Interval]:
    """The program ids of the programs [begin, end), counted with the last axis fastest: one interval for each axis."""
    ends = np.unravel_index([begin, end - 1], tuple(grid)) if grid else ()
    out, same = [], True
    for (a, b), n in zip(ends, grid, strict=True):
        out.append(Interval(int(a), int(b)) if same else Interval(0, n - 1))
        same = same and a == b
    return out


def footprint(kernel: ir.Kernel, begin: int, end: int) -> Footprint:
    """What the programs [begin, end) of a kernel may touch: exact boxes where indices are affine in the program's ids
    and the indices of loops, whole axes where they come from memory."""
    known = ranges(kernel, _Programs(kernel, ids_of(kernel.grid, begin, end)))
    refs = [*kernel.inputs, *kernel.outputs]
    reads: dict[ir.Value, list[Box]] = {r: [] for r in refs}
    writes: dict[ir.Value, list[Box]] = {r: [] for r in refs}
    for op in kernel.body.walk():
        if isinstance(op, ir.Load | ir.Store | ir.Atomic):
            if op.ref in reads:
                box = _box(known, op)
                if not isinstance(op, ir.Store):
                    reads[op.ref].append(box)
                if not isinstance(op, ir.Load):
                    writes[op.ref].append(box)
            continue
        for v in op.operands():  # an op that is no load, store or atomic may do anything to its Refs
            if isinstance(v.type, RefType) and v in reads and not isinstance(op, ir.SizeOf):
                reads[v].append(_all(v))
                writes[v].append(_all(v))
    of = lambda found: tuple(region(r.shape, found[r]) for r in refs)
    return Footprint(of(reads), of(writes))


def _all(ref: ir.Value) -> Box:
    return Box((0,) * len(ref.shape), tuple(ref.shape))


def _box(known: Intervals, op: ir.Load | ir.Store | ir.Atomic) -> Box:
    if DTYPES[op.ref.dtype].bits < 8:  # several elements share a byte
        return _all(op.ref)
    sides = [_side(known, d, n) for d, n in zip(op.index, op.ref.shape, strict=True)]
    return Box(tuple(a for a, _ in sides), tuple(b for _, b in sides))


def _side(known: Intervals, d: ir.Dim, n: int) -> tuple[int, int]:
    """The elements of one dimension, those inside of the array."""
    i = known(ir.dim_value(d))
    if i is None:
        return 0, n
    match d:
        case ir.Span(_, size, stride):
            low, high = i.lo, i.hi + max(size - 1, 0) * stride + 1
        case ir.Tile(_, size, step):
            low, high = i.lo * step, i.hi * step + size
        case _:
            low, high = i.lo, i.hi + 1
    return max(low, 0), min(high, n)
