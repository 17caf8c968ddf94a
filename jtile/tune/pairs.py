"""Forms of products with 2:4 weights in pairs (`jtile.ops.hopper_pairs`), and the model of time that chooses among
them, fitted to times on an H200."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from jtile.tune.columns import LEAVING, RESERVE, ROOM, ROWS
from jtile.tune.warpgroups import Gpu, at_once, cdiv

SPAN = 128  # terms of a round of places, at least: 16 bytes of a row, as tensor maps ask
MOST = 8  # slots of a ring
# Bytes that shared memory gives and takes in a microsecond: instructions read x once for each 64 rows of W, and nothing
# else is as busy. Bytes of operands that a block gets in one from the second-level cache, and all from memory.
SHARED, BROUGHT, READ = 265e3, 150e3, 4.3e6
START, WAIT = 5.5, 0.08  # microseconds: the launch, the first operands and the end; the wait of each span
NARROW = 64  # columns of a tile of two consumers are more: with fewer they waited for each other


@dataclasses.dataclass(frozen=True)
class Form:
    """How a program computes a tile.

    Attributes:
      consumers: consumers, of 64 rows of W each.
      columns: rows of x, a multiple of 8 up to 256.
      terms: terms of a round, a multiple of 64.
      slots, code_slots: slots of the rings of numbers, and of places.
      band: tiles of x that are computed beside each other; a divisor of their number.
      programs: programs, which take the tiles in turns; 0: one for each tile.
      registers: registers of a consumer's thread.
      span: terms of a round of places, a multiple of `terms`.
    """

    consumers: int
    columns: int
    terms: int
    slots: int
    code_slots: int = 3
    band: int = 1
    programs: int = 0
    registers: int = 232
    span: int = SPAN

    @property
    def rows(self) -> int:
        """Rows of W of a program."""
        return self.consumers * ROWS

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Tiles of W and of x."""
        return cdiv(n, self.rows), cdiv(m, self.columns)

    def room(self, itemsize: int) -> int:
        """Slots of numbers that shared memory has room for, with results of `itemsize` bytes."""
        wide = 1 << (self.columns - 1).bit_length()
        leaving = 2 * LEAVING if self.columns % LEAVING else LEAVING  # and smaller pieces, which are fewer together
        leaving *= 2 * ROWS * itemsize * self.consumers
        codes = self.code_slots * self.rows * self.span // 8
        numbers = self.rows * self.terms // 2 + wide * self.terms
        return (ROOM - RESERVE - leaving - codes) // (2 * numbers)


def candidates(m: int, n: int, k: int) -> Iterator[Form]:
    """The forms for m rows of x and a weight [n, k], without what follows from them."""
    long = k % (2 * SPAN) == 0
    for consumers in (1, 2) if n % (2 * ROWS) == 0 else (1,):
        least = cdiv(m, 256)
        for columns in {256, *(cdiv(m, across * 8) * 8 for across in range(least, least + 4))}:
            if consumers == 1 or columns > NARROW:
                terms = 64 if columns > 64 else 256 if columns <= 16 and long else SPAN
                yield Form(consumers, columns, terms, 1, span=2 * SPAN if long and columns <= 128 else SPAN)


def predicted_us(m: int, n: int, k: int, form: Form, on: Gpu) -> float:
    """Predicted microseconds of the product of x [m, k] and a weight [n, k]."""
    terms = 64
    numbers, x = form.rows * (terms + terms // 8), form.columns * terms * 2  # bytes that come in 64 terms
    read = form.consumers * 2 * (form.columns * terms + ROWS * 32)  # by two instructions for each 64 rows
    step = at_once((read + numbers + x) / (SHARED * on.speed), (numbers + x) / BROUGHT)
    one = k // form.span * (form.span // terms * step + WAIT)
    high, wide = form.tiles(m, n)
    full, last = divmod(high * wide, on.processors)
    share = (n * k * 9 / 8 + 2 * m * k) / (READ * on.memory) / (high * wide)
    rounds = full * at_once(one, on.processors * share) + (at_once(one, last * share) if last else 0.0)
    return START + rounds


@functools.lru_cache(maxsize=1024)
def choice(m: int, n: int, k: int, itemsize: int, on: Gpu) -> Form:
    """The form that is best for x [m, k] and a weight [n, k], with results of `itemsize` bytes."""
    form = min(candidates(m, n, k), key=lambda form: predicted_us(m, n, k, form, on))
    high, wide = form.tiles(m, n)
    form = dataclasses.replace(
        form,
        code_slots=3 if form.terms < form.span else MOST,
        band=next(b for b in range(min(4, wide), 0, -1) if wide % b == 0),
        programs=on.processors if high * wide > on.processors else 0,
    )
    return dataclasses.replace(form, slots=min(MOST, form.room(itemsize)))
