"""Forms of small products, in one round of tiles of one role or two each (`jtile.ops.hopper_small`), and the model of
time that chooses among them, fitted as that of `jtile.tune.warpgroups` is."""

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
# Microseconds of 64 terms of a tile, by its sides, the terms of a round, and the parts and roles: what the role does
# besides counts.
STEPS = {
    (64, 64, MANY, 1, 1): 0.14,
    (64, 64, MANY, 2, 1): 0.175,
    (64, 128, MANY, 1, 1): 0.24,
    (128, 64, MANY, 1, 1): 0.25,
    (64, 128, FEW, 1, 1): 0.216,
    (128, 64, FEW, 1, 1): 0.216,
    (64, 128, FEW, 1, 2): 0.2,
    (128, 64, FEW, 1, 2): 0.2,
}
# Of the multiprocessors, those that clusters of four reach: what is left of a group of them is no cluster.
REACHED = {1: 1.0, 2: 1.0, 4: 120 / 132}
# Microseconds of a row of 128 bytes of an operand, which begins with a line of memory, and which does not.
ROW, SPLIT = 0.82e-3, 2.5e-3
# Microseconds besides the rounds; for a cluster; for parts of sums; for a role for copies.
START, MEETING, JOIN, OWN = 2.6, 0.1, 0.8, 0.3
LEAST, LONGEST, LONG = 512, 6144, 4096  # terms of a sum; of one in parts; between those of small tiles and of two roles
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
      roles: two if one is for copies alone.
    """

    rows: int
    columns: int
    share: int = 1
    parts: int = 1
    terms: int = MANY
    roles: int = 1

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


# Where rows begin with lines, sharing was slower, but for long sums with the left operand as [k, m].
WHOLE = Form(64, 128, terms=FEW), Form(128, 64, terms=FEW), Form(64, 64, parts=2), Form(64, 64)
LEFT = Form(64, 128, 2, terms=FEW, roles=2)
SHARED = Form(64, 128), Form(64, 128, 2), Form(128, 64), Form(128, 64, 4, terms=FEW, roles=2)


def candidates(p: Product, on: Gpu) -> Iterator[Form]:
    """The forms whose tiles are one round of the multiprocessors, of those that were quick anywhere."""
    whole = not any(pitch % LINE for pitch in p.pitches)
    left = whole and p.left and not p.transposed and p.k > LONG
    for form in (*WHOLE, *((LEFT,) if left else ())) if whole else SHARED:
        clusters = form.share == 1 or form.grid(p.m, p.n)[1] > 1
        long = form.parts == 1 or LEAST * form.parts <= p.k <= LONGEST
        short = form != Form(64, 64) or p.k <= LONG
        if clusters and long and short and form.blocks(p.m, p.n) <= on.processors * REACHED[form.share * form.parts]:
            yield form


def predicted_us(p: Product, form: Form, on: Gpu) -> float:
    """Predicted microseconds of a product in this form, from the start of one to that of the next."""
    rows, columns = (form.rows / form.share, form.columns) if form.across else (form.rows, form.columns / form.share)
    brought = sum(side * (SPLIT if pitch % LINE else ROW) for side, pitch in zip((rows, columns), p.pitches))
    step = at_once(STEPS[form.rows, form.columns, form.terms, form.parts, form.roles] / on.speed, brought)
    read = p.itemsize * (p.m * p.k + p.k * p.n) / (READ * on.memory)
    rounds = cdiv(p.k, form.terms * form.parts) * form.terms / 64
    besides = START + MEETING * (form.share > 1) + JOIN * (form.parts > 1) + OWN * (form.roles > 1)
    return besides + at_once(rounds * step, read)


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
