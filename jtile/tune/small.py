"""Forms of small products, in one round of tiles of one role each (`jtile.ops.hopper_small`), and the model of time
that chooses among them, fitted as that of `jtile.tune.warpgroups` is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from jtile.tune.columns import RESERVE, ROOM
from jtile.tune.warpgroups import LINE, READ, Gpu, Product, at_once, cdiv, quicker

# Terms of a round: the fewer, the more rounds are under way. Where rows in memory start inside of lines, three lines
# are read for 128 terms, and four for two times 64.
FEW, MANY = 64, 128
MOST = 8  # slots of a ring
# Microseconds of 64 terms of a tile, by its sides and the terms of a round: what the role does besides counts.
STEPS = {
    (64, 64, MANY): 0.175,
    (64, 128, MANY): 0.24,
    (128, 64, MANY): 0.25,
    (64, 128, FEW): 0.216,
    (128, 64, FEW): 0.216,
}
# Of the multiprocessors, those that clusters of four reach: what is left of a group of them is no cluster.
REACHED = {1: 1.0, 2: 1.0, 4: 120 / 132}
# Microseconds of a row of 128 bytes of an operand, which begins with a line of memory, and which does not.
ROW, SPLIT = 0.82e-3, 2.5e-3
START, MEETING, JOIN = 2.6, 0.1, 0.8  # microseconds besides the rounds; for a cluster; for parts of sums
LEAST, LONGEST = 512, 6144  # terms of a sum; of one in parts
# Of the time of other tiles, at most, as predicted: what these take between launches is more than that counts.
BETTER = 1.05


@dataclasses.dataclass(frozen=True)
class Form:
    """How a block computes a tile.

    Attributes:
      rows, columns: of a tile.
      share: blocks that bring the longer of both together.
      parts: of the terms of a tile, each of which a block of its own sums.
      terms: of a round.
    """

    rows: int
    columns: int
    share: int = 1
    parts: int = 1
    terms: int = MANY

    @property
    def across(self) -> bool:
        """Whether neighbours have the same rows of x, not the same columns of w."""
        return self.rows > self.columns

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler that put blocks into clusters."""
        return {name: n for name, n in (("multicast", self.share), ("spread", self.parts)) if n > 1}

    def slots(self, itemsize: int = 2) -> int:
        """Slots that the ring has room for."""
        room = ROOM - RESERVE - self.rows * self.columns * (itemsize + 4 * (self.parts - 1))
        return min(MOST, room // ((self.rows + self.columns) * self.terms * itemsize))

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Tiles along both sides of a result [m, n], of which those along the last one are whole clusters: along its
        columns where `across`, along its rows otherwise. Some may be empty."""
        down, along = cdiv(m, self.rows), cdiv(n, self.columns)
        first, last = (down, along) if self.across else (along, down)
        return first, cdiv(last, self.share) * self.share

    def blocks(self, m: int, n: int) -> int:
        """Blocks that compute a result [m, n]."""
        first, last = self.grid(m, n)
        return first * last * self.parts


# Where rows begin with lines, sharing was slower, and so were small tiles in one part.
WHOLE = Form(64, 128, terms=FEW), Form(128, 64, terms=FEW), Form(64, 64, parts=2)
SHARED = Form(64, 128), Form(64, 128, 2), Form(128, 64), Form(128, 64, 4)


def candidates(p: Product, on: Gpu) -> Iterator[Form]:
    """The forms whose tiles are one round of the multiprocessors, of those that were quick anywhere."""
    for form in SHARED if any(pitch % LINE for pitch in p.pitches) else WHOLE:
        clusters = form.share == 1 or form.grid(p.m, p.n)[1] > 1
        long = form.parts == 1 or LEAST * form.parts <= p.k <= LONGEST
        if clusters and long and form.blocks(p.m, p.n) <= on.processors * REACHED[form.share * form.parts]:
            yield form


def predicted_us(p: Product, form: Form, on: Gpu) -> float:
    """Predicted microseconds of a product in this form, from the start of one to that of the next."""
    rows, columns = (form.rows / form.share, form.columns) if form.across else (form.rows, form.columns / form.share)
    brought = sum(side * (SPLIT if pitch % LINE else ROW) for side, pitch in zip((rows, columns), p.pitches))
    step = at_once(STEPS[form.rows, form.columns, form.terms] / on.speed, brought)
    read = p.itemsize * (p.m * p.k + p.k * p.n) / (READ * on.memory)
    rounds = cdiv(p.k, form.terms * form.parts) * form.terms / 64
    return START + MEETING * (form.share > 1) + JOIN * (form.parts > 1) + at_once(rounds * step, read)


@functools.lru_cache(maxsize=1024)
def choice(p: Product, on: Gpu) -> Form | None:
    """The form that is best for a product of 16-bit floats; None where other tiles are as quick."""
    found = {form: predicted_us(p, form, on) for form in candidates(p, on)} if fits(p) else {}
    return quicker(found, BETTER, p, on)


def fits(p: Product) -> bool:
    """Whether a product is one that such kernels compute."""
    rows = p.m if p.left else p.k, p.k if p.transposed else p.n  # what lies along the rows of the operands
    single = p.batch == 1 and p.gates == 1 and p.itemsize == 2
    return single and p.m > 64 and p.n >= 64 and p.k >= LEAST and not any(size % 8 for size in (*rows, p.n))
