"""Partial sums: grid axes along which an accumulator is summed away become loops, in a fixed number of chunks; those
along which neighbours overlap get a copy of the accumulator for each colour of programs that do not."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

from jtile.ir import At, Atomic, Block, Builder, If, Kernel, ProgramId, RefType, Value

from .nests import Counted, nest, size_value
from .rewrite import Rewriter, Rules

PROGRAMS = 64  # enough for a CPU, and the same on all of them, for the order of a sum is visible
FEWEST = 8  # see `Busy.least`
PARTIAL_BYTES = 64 << 20  # bytes of the partial sums of one output, at most: the caller reads them again


@dataclasses.dataclass(frozen=True)
class Busy:
    """What keeps a machine busy that sums along a grid axis.

    Attributes:
      programs: the number of programs.
      rounds: that each of more than `PROGRAMS` has at least: it has sums of its own, which are added up.
      stages: the stages in which the rounds are pipelined.
      least: the fewest programs that a kernel may be left with which adds up in memory, one program after the other;
        with fewer, programs run at once and their additions are atomic.
    """

    programs: int = PROGRAMS
    rounds: int = 4
    stages: int | None = None
    least: int = FEWEST


ANY = Busy()


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A grid axis of `size` programs as `count` programs (the last one shorter) that do `each` of them in order."""

    axis: int
    size: Any  # an int, or an Extent
    count: int

    @property
    def each(self) -> int:
        return -(-self.size // self.count)


@dataclasses.dataclass(frozen=True)
class Colours:
    """A grid axis of `size` programs that overlap with the next few only: those of one of `count` colours, their ids
    modulo `count`, do not meet."""

    axis: int
    size: Any  # an int, or an Extent
    count: int


Cut = Chunks | Colours


def likely(n: Any) -> int:
    """A size, or what is taken for one that is known when the kernel runs: enough."""
    return n if isinstance(n, int) else PROGRAMS


def chunks(grid: Sequence[Any], axes: Collection[int], nbytes: int, busy: Busy = ANY) -> list[Chunks]:
    """How the grid axes `axes` are cut: all programs together keep a machine busy, unless the other axes have so
    many already, and `nbytes` of an output for every chunk stay below `PARTIAL_BYTES`."""
    whole = math.prod(map(likely, grid))
    programs = min(busy.programs, max(PROGRAMS, whole // busy.rounds))
    want = -(-programs // max(math.prod(likely(n) for k, n in enumerate(grid) if k not in axes), 1))
    want = max(min(want, PARTIAL_BYTES // max(nbytes, 1)), 1)
    out = []
    for axis in sorted(axes):
        n = grid[axis]
        # An axis of unknown size has as many chunks as it may; some of them may have no program.
        count = _even(n, want) if isinstance(n, int) else want
        out.append(Chunks(axis, grid[axis], count))
        want = -(-want // count)
    return out


def _even(n: int, want: int) -> int:
    """About `want` chunks of n programs, if possible of equally many: those whose length varies are guarded."""
    count = -(-n // -(-n // min(n, want)))
    return next((c for c in range(min(n, want), want * 3 // 4, -1) if n % c == 0), count)


def chunked(
    kernel: Kernel, cuts: Sequence[Cut], summed: Collection[Value], stages: int | None = None
) -> tuple[Kernel, dict[Value, Value]]:
    """The kernel with the axes of `cuts` in chunks, whose rounds are in `stages`, or colours. Where that leaves several
    of them, each of the outputs `summed` has a new leading axis, one entry for each; gives the new Ref of each."""
    total = math.prod(c.count for c in cuts)
    parts = {r: Value(RefType((total, *r.shape), r.dtype, "out"), r.name) for r in summed} if total > 1 else {}
    walk = _Walk(kernel, {c.axis: c for c in cuts}, parts, stages)
    body = walk.run(cuts)
    params = tuple(parts.get(p, p) for p in kernel.params)
    return dataclasses.replace(kernel, grid=tuple(walk.grid), lanes=0, body=body, params=params), parts


class _Walk:
    """Copies a kernel into the new grid and its loops."""

    def __init__(self, kernel: Kernel, cuts: dict[int, Cut], parts: dict[Value, Value], stages: int | None):
        self.kernel, self.cuts, self.parts, self.stages = kernel, cuts, parts, stages
        self.grid: list[Any] = []
        self.values: dict[int, Value] = {}  # the program ids of the old kernel
        self.entry: dict[int, Value] = {}  # for each cut axis, which chunk or colour the program has
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
            rounds = [_rounds(b, c, self.entry[c.axis]) for c in chunks]
            loops = [Counted(b.index(0), count) for count, _, _ in rounds]
            loops[-1:] = [dataclasses.replace(c, stages=self.stages) for c in loops[-1:]]

            def inside(found: list[Value]) -> None:
                for c, (_, first, step), k in zip(chunks, rounds, found, strict=True):
                    self.values[c.axis] = b.map("add", first, b.map("mul", k, b.index(step)))
                self.guarded([c for c in cuts if isinstance(c, Colours) and c.size % c.count != 0])

            nest(b, loops, inside)
        return body

    def axis(self, axis: int, n: Any) -> None:
        cut = self.cuts.get(axis)
        match cut:
            case None:
                self.values[axis] = self.program_id(n)
            case Chunks():
                self.entry[axis] = self.program_id(cut.count) if cut.count > 1 else self.b.index(0)
            case Colours() if cut.size == cut.count:
                self.values[axis] = self.entry[axis] = self.program_id(cut.count)
            case Colours():
                high, low = self.program_id(-(-n // cut.count)), self.program_id(cut.count)
                self.entry[axis] = low
                self.values[axis] = self.b.map("add", self.b.map("mul", high, self.b.index(cut.count)), low)

    def program_id(self, n: Any) -> Value:
        self.grid.append(n)
        return self.b.value(ProgramId(len(self.grid) - 1))

    def entry_number(self, cuts: Sequence[Cut]) -> Value:
        """The row-major number of the program's entry in the partial sums."""
        b, out = self.b, self.b.index(0)
        for c in cuts:
            out = b.map("add", b.map("mul", out, b.index(c.count)), self.entry[c.axis])
        return out

    def guarded(self, ragged: Sequence[Colours]) -> None:
        """Put the old body under a guard, for the programs that there are."""
        b, rw = self.b, self.rw
        if not ragged:
            rw.inline(self.kernel.body)
            return
        inside = [b.map("lt", self.values[c.axis], size_value(b, c.size)) for c in ragged]
        with b.region() as then:
            rw.inline(self.kernel.body)
        with b.region() as orelse:
            pass
        b.add(If(functools.reduce(lambda x, y: b.map("and", x, y), inside), then, orelse))


def _rounds(b: Builder, c: Chunks, chunk: Value) -> tuple[Value, Value, int]:
    """Which programs of the axis a chunk has: how many, the first, and how far they are apart.

    They lie side by side; where their number is known only when the kernel runs, in turns, so that the index of the
    program stays a sum of constant multiples.
    """
    if not isinstance(c.size, int):
        left = b.map("sub", b.map("add", size_value(b, c.size), b.index(c.count - 1)), chunk)
        return b.map("div", left, b.index(c.count)), chunk, c.count
    first, whole = b.map("mul", chunk, b.index(c.each)), b.index(c.each)
    if c.each * c.count == c.size:
        return whole, first, 1
    return b.map("min", whole, b.map("sub", b.index(c.size), first)), first, 1
