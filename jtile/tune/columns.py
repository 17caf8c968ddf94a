"""Forms of products whose tiles have any multiple of 8 columns (`jtile.ops.hopper_columns`), and the model of time that
chooses among them, fitted as that of `jtile.tune.warpgroups` is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from jtile.tune.warpgroups import LINE, Gpu, Product, at_once, cdiv, in_rounds, quicker

ROWS, TERMS = 64, 64  # rows of an instruction; terms of a round
LEAVING = 32  # columns of results that leave at a time
ROOM, RESERVE = 227 << 10, 3 << 10  # bytes of shared memory of a block; for barriers
LEAST, MOST = 3, 8  # slots of a ring
# Consumers -> columns of a tile at most, by the registers that threads start with; and registers of a consumer.
WIDEST = {1: 256, 2: 256, 3: 200, 4: 136}
REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}
# Microseconds of a round at the highest clock for each column of a consumer, and of a tile's rest for each number.
COLUMN, NUMBER = 1.12e-3, 4.5e-5
# Bytes of operands that a block gets in a microsecond, where W lies as [k, n], and as [n, k]; half as many of rows that
# start inside of lines.
BROUGHT = {False: 140e3, True: 120e3}
ALONE = 80  # columns of a tile of one consumer, at most; it gets operands at the first of these rates either way
FEWEST, NARROWEST = 1024, 72  # terms of a sum, and columns, at least
BETTER = 0.95  # of the time of other tiles, at most: predictions are off by 5 % on average


@dataclasses.dataclass(frozen=True)
class Form:
    """Tiles of `consumers` times 64 rows and of `columns`, a multiple of 8; `turned`: rows of W are the rows."""

    turned: bool
    consumers: int
    columns: int

    @property
    def registers(self) -> int:
        """Registers of a thread of a consumer."""
        return REGISTERS[self.consumers]

    def slots(self, itemsize: int = 2) -> int:
        """Slots that rings have room for."""
        wide = 1 << (self.columns - 1).bit_length()
        leaving = 2 * LEAVING if self.columns % LEAVING else LEAVING  # and smaller pieces, which are fewer together
        room = ROOM - RESERVE - self.consumers * ROWS * leaving * itemsize
        return min(MOST, room // ((ROWS * self.consumers + wide) * TERMS * itemsize))

    def tiles(self, p: Product) -> int:
        """How many tiles a product has."""
        rows, columns = (p.n, p.m) if self.turned else (p.m, p.n)
        return cdiv(rows, ROWS * self.consumers) * cdiv(columns, self.columns)


def candidates(p: Product, on: Gpu) -> Iterator[Form]:
    """The forms whose tiles are one round of the multiprocessors, of those that were quick anywhere: one consumer of
    many columns did not keep a multiprocessor busy, and four had too few columns; rows of x were quick in two, and
    where W lies as [n, k], so that what leaves has rows of 32 bytes."""
    for turned, teams, step in ((True, (1,) * p.transposed + (2, 3), 8), (False, (2,) * p.transposed, 16)):
        rows, columns = (p.n, p.m) if turned else (p.m, p.n)
        for consumers in teams:
            tall = cdiv(rows, ROWS * consumers)
            for across in range(1, on.processors // tall + 1):
                form = Form(turned, consumers, cdiv(columns, across * step) * step)
                measured = NARROWEST <= form.columns <= WIDEST[consumers] and form.columns & (form.columns - 1)
                measured = measured and (consumers > 1 or form.columns <= ALONE)
                if measured and form.slots(p.itemsize) >= LEAST:
                    yield form


def predicted_us(p: Product, form: Form, on: Gpu) -> float:
    """Predicted microseconds of a product in this form."""
    high = ROWS * form.consumers
    step = COLUMN * form.consumers * form.columns / on.speed
    sides = zip((form.columns, high) if form.turned else (high, form.columns), p.pitches)
    brought = sum(side * LINE * (2 if pitch % LINE else 1) for side, pitch in sides)
    brought /= BROUGHT[p.transposed and form.consumers > 1]
    one = cdiv(p.k, TERMS) * at_once(step, brought) + NUMBER * high * form.columns
    return in_rounds(p, one, form.tiles(p), on)


@functools.lru_cache(maxsize=1024)
def choice(p: Product, on: Gpu) -> Form | None:
    """The form that is best for a product of 16-bit floats; None where other tiles are as quick."""
    found = {form: predicted_us(p, form, on) for form in candidates(p, on)} if fits(p) else {}
    return quicker(found, BETTER, p, on)


def fits(p: Product) -> bool:
    """Whether a product is one that such kernels compute."""
    single = p.batch == 1 and p.gates == 1 and p.itemsize == 2 and not p.left
    return single and p.m > ROWS and p.n >= ROWS and p.k >= FEWEST and not any(size % 8 for size in (p.k, p.n))
