"""Partial sums: grid axes along which an accumulator is summed away become loops, in a fixed number of chunks; those
along which neighbours overlap get a copy of the accumulator for each colour of programs that do not."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence

from jtile.ir import At, Atomic, Block, Builder, If, Kernel, ProgramId, RefType, Value

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


@dataclasses.dataclass(frozen=True)
class Colours:
    """A grid axis of `size` programs that overlap with the next few only: those of one of `count` colours, their ids
    modulo `count`, do not meet."""

    axis: int
    size: int
    count: int


Cut = Chunks | Colours


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


def chunked(kernel: Kernel, cuts: Sequence[Cut], summed: Collection[Value]) -> tuple[Kernel, dict[Value, Value]]:
    """The kernel with the axes of `cuts` in chunks or colours. Where that leaves several of them, each of the outputs
    `summed` has a new leading axis, one entry for each; gives the new Ref of each of those outputs."""
    total = math.prod(c.count for c in cuts)
    parts = {r: Value(RefType((total, *r.shape), r.dtype, "out"), r.name) for r in summed} if total > 1 else {}
    walk = _Walk(kernel, {c.axis: c for c in cuts}, parts)
    body = walk.run(cuts)
    params = tuple(parts.get(p, p) for p in kernel.params)
    return dataclasses.replace(kernel, grid=tuple(walk.grid), lanes=0, body=body, params=params), parts


class _Walk:
    """Copies a kernel into the new grid and its loops."""

    def __init__(self, kernel: Kernel, cuts: dict[int, Cut], parts: dict[Value, Value]):
        self.kernel, self.cuts, self.parts = kernel, cuts, parts
        self.grid: list[int] = []
        self.values: dict[int, Value] = {}  # the program ids of the old kernel
        self.entry: dict[int, Value] = {}  # of each cut axis: which chunk or colour this is
        self.number: Value | None = None
        rules = Rules()
        rules(ProgramId)(lambda op, rw: self.values[op.axis])
        rules(Atomic)(self.atomic)
        self.rw = Rewriter(kernel, rules)
        self.b = self.rw.b

    def atomic(self, op: Atomic, rw: Rewriter):
        if op.ref not in self.parts or self.number is None:
            return None
        index = (At(self.number), *op.index)
        rw.b.add(Atomic(op.fn, self.parts[op.ref], index, op.value, None, op.mask))
        return op.value

    def run(self, cuts: Sequence[Cut]) -> Block:
        b = self.b
        with b.region() as body:
            for axis, n in enumerate(self.kernel.grid):
                self.axis(axis, n)
            self.number = self.entry_number(cuts)
            chunks = [c for c in cuts if isinstance(c, Chunks)]
            starts = [b.map("mul", self.entry[c.axis], b.index(c.each)) for c in chunks]
            loops = [Counted(b.index(0), _rounds(b, c, s)) for c, s in zip(chunks, starts, strict=True)]

            def inside(found: list[Value]) -> None:
                for c, s, k in zip(chunks, starts, found, strict=True):
                    self.values[c.axis] = b.map("add", s, k)
                self.guarded([c for c in cuts if isinstance(c, Colours) and c.size % c.count])

            nest(b, loops, inside)
        return body

    def axis(self, axis: int, n: int) -> None:
        cut = self.cuts.get(axis)
        match cut:
            case None:
                self.values[axis] = self.program_id(n)
            case Chunks():
                self.entry[axis] = self.program_id(cut.count) if cut.count > 1 else self.b.index(0)
            case Colours():
                high, low = self.program_id(-(-n // cut.count)), self.program_id(cut.count)
                self.entry[axis] = low
                self.values[axis] = self.b.map("add", self.b.map("mul", high, self.b.index(cut.count)), low)

    def program_id(self, n: int) -> Value:
        self.grid.append(n)
        return self.b.value(ProgramId(len(self.grid) - 1))

    def entry_number(self, cuts: Sequence[Cut]) -> Value:
        """Row-major number of the entry of partial sums."""
        b, out = self.b, self.b.index(0)
        for c in cuts:
            out = b.map("add", b.map("mul", out, b.index(c.count)), self.entry[c.axis])
        return out

    def guarded(self, ragged: Sequence[Colours]) -> None:
        """The old body, for the programs that there are."""
        b, rw = self.b, self.rw
        if not ragged:
            rw.inline(self.kernel.body)
            return
        inside = [b.map("lt", self.values[c.axis], b.index(c.size)) for c in ragged]
        with b.region() as then:
            rw.inline(self.kernel.body)
        with b.region() as orelse:
            pass
        b.add(If(functools.reduce(lambda x, y: b.map("and", x, y), inside), then, orelse))


def _rounds(b: Builder, c: Chunks, start: Value) -> Value:
    """How many programs of the axis this chunk has."""
    whole = b.index(c.each)
    return whole if c.each * c.count == c.size else b.map("min", whole, b.map("sub", b.index(c.size), start))
