"""Partial sums: grid axes along which an accumulator is summed away become loops, in a fixed number of chunks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from jtile.ir import At, Atomic, Builder, Kernel, ProgramId, RefType, Value

from .nests import Counted, nest
from .rewrite import Rewriter, Rules

PROGRAMS = 64  # enough for the machines of today, and the same on all of them, for the order of a sum is visible
PARTIAL_BYTES = 64 << 20  # of the partial sums of one output, which the caller reads again


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A grid axis of `size` programs as `count` programs (the last one shorter) that do `each` of them in order."""

    axis: int
    size: int
    count: int

    @property
    def each(self) -> int:
        return -(-self.size // self.count)


def chunks(grid: Sequence[int], axes: Collection[int], nbytes: int) -> list[Chunks]:
    """How the grid axes `axes` are cut: all programs together are about `PROGRAMS`, unless the other axes have so
    many already, and `nbytes` of an output for every chunk stay below `PARTIAL_BYTES`."""
    want = -(-PROGRAMS // max(math.prod(n for k, n in enumerate(grid) if k not in axes), 1))
    want = max(min(want, PARTIAL_BYTES // max(nbytes, 1)), 1)
    out = []
    for axis in sorted(axes):
        each = -(-grid[axis] // min(grid[axis], want))
        count = -(-grid[axis] // each)
        out.append(Chunks(axis, grid[axis], count))
        want = -(-want // count)
    return out


def chunked(kernel: Kernel, cuts: Sequence[Chunks], summed: Collection[Value]) -> tuple[Kernel, dict[Value, Value]]:
    """The kernel with the axes of `cuts` in chunks. Where that leaves several chunks, each of the outputs `summed` has
    a new leading axis, one entry a chunk; gives the new Ref of each of them."""
    total = math.prod(c.count for c in cuts)
    old = {c.axis: c for c in cuts}
    grid: list[int] = []
    place: dict[int, int] = {}
    for axis, n in enumerate(kernel.grid):
        if axis not in old or old[axis].count > 1:
            place[axis] = len(grid)
            grid.append(old[axis].count if axis in old else n)
    parts = {r: Value(RefType((total, *r.shape), r.dtype, "out"), r.name) for r in summed} if total > 1 else {}
    values: dict[int, Value] = {}
    number: list[Value] = []
    rules = Rules()

    @rules(ProgramId)
    def _(op: ProgramId, rw: Rewriter):
        return values[op.axis]

    @rules(Atomic)
    def _(op: Atomic, rw: Rewriter):
        if op.ref not in parts:
            return None
        rw.b.add(Atomic(op.fn, parts[op.ref], (At(number[0]), *op.index), op.value, None, op.mask))
        return op.value

    rw = Rewriter(kernel, rules)
    b = rw.b
    with b.region() as body:
        for axis in range(len(kernel.grid)):
            values[axis] = b.value(ProgramId(place[axis])) if axis in place else b.index(0)
        number.append(_number(b, cuts, values))
        starts = [b.map("mul", values[c.axis], b.index(c.each)) for c in cuts]
        loops = [Counted(b.index(0), _rounds(b, c, s)) for c, s in zip(cuts, starts, strict=True)]

        def inside(found: list[Value]) -> None:
            for c, s, k in zip(cuts, starts, found, strict=True):
                values[c.axis] = b.map("add", s, k)
            rw.inline(kernel.body)

        nest(b, loops, inside)
    params = tuple(parts.get(p, p) for p in kernel.params)
    return dataclasses.replace(kernel, grid=tuple(grid), lanes=0, body=body, params=params), parts


def _number(b: Builder, cuts: Sequence[Chunks], values: dict[int, Value]) -> Value:
    """Row-major number of the chunk."""
    out = b.index(0)
    for c in cuts:
        out = b.map("add", b.map("mul", out, b.index(c.count)), values[c.axis])
    return out


def _rounds(b: Builder, c: Chunks, start: Value) -> Value:
    """How many programs of the axis this chunk has."""
    whole = b.index(c.each)
    return whole if c.each * c.count == c.size else b.map("min", whole, b.map("sub", b.index(c.size), start))
