"""The model of time of products on GPUs with warpgroup products (sm_90), where kernels run at the block level: one
block a multiprocessor, a producer, and a consumer for every 64 rows. `jtile.ops` and `jt.auto` choose tiles by it.

The numbers of the model are fitted to times on an H200 (`python -m benchmarks gpu --only choices` says how far the
choices are from the best ones); a `Gpu` says in what another one differs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

PROCESSORS, RATE, MEMORY = 132, 989e12, 4800e9  # data of the H200 that the numbers are fitted to: see `Gpu`
# Sides of a tile -> microseconds of a block for 128 bytes of terms at the highest clock, and for the rest of a tile.
TILES = {
    (128, 256): (0.576, 1.65),
    (256, 128): (0.637, 1.52),
    (192, 256): (0.86, 2.2),
    (192, 128): (0.448, 0.84),
    (128, 128): (0.300, 0.57),
    (64, 256): (0.299, 0.97),
    (64, 128): (0.161, 0.35),
    (128, 64): (0.177, 0.48),
    (64, 64): (0.129, 0.17),
}
# The same of tiles whose columns a kernel cuts in 128 and 64: see `Product.cut`. They fill a round of 132 blocks
# where powers of two need a second one; with 128 rows they were no quicker than other tiles, nor were 96, 160 and 224
# columns.
CUT = {(192, 192): (0.71, 2.3)}
BYTES = 1.08  # how many times as long 128 bytes of 8-bit operands take
CLOCK = 0.24  # what rounds take in addition where all blocks work all the time: power lowers the clock
SHARP = 5.1  # two things at once, each as long as the other, take 2 ** (1 / SHARP) times as long as one
START = 2.4  # microseconds: the launch, and the first operands
READ = 4.5e6  # bytes of operands in a microsecond from memory
SECOND, KEPT = 4.6, 20e6  # microseconds of the kernel that adds parts up; bytes that it and the parts move in one
LEAST = 4096  # terms of a part of a sum, at least
# Operations in a microsecond of 16-bit products at tile level, in the largest tiles and in small ones; and what a copy
# costs besides what it moves.
PLAIN, PLAIN_FEW, COPY = 190e6, 75e6, 2.0
# Bytes of operands that a block gets in a microsecond; where rows in memory start inside of lines, each is read twice.
EVEN, UNEVEN = 152e3, 79e3
LINE = 128
FEW, HANGING = 256, 16  # of so few rows, those outside of the left operand take time, if tiles have two lines
PITCH = 16  # bytes that the distance of an operand's rows in memory is a multiple of, where tensor maps take them
# How many times the shortest predicted time a form may take that a search tries; and so many it tries always.
NEAR, ALWAYS = 1.25, 4
GATED = tuple((bm, bn // 2) for bm, bn in TILES if bn >= 128)  # a tile of two products is as one of twice the columns
# Three consumers make 256 columns of two products, but of one they are no quicker than two with 128 rows (8192^3), and
# slower where there are few tiles.
SINGLE = tuple(sides for sides in TILES if sides != (192, 256))
FULL = 1.01  # how many times as long the largest of `GATED` take, one after the other: their rings have few slots


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the times of products depend on, besides the products.

    Attributes:
      processors: multiprocessors, each of which works on one tile at a time.
      speed: how many times as fast as one of an H200 a multiprocessor multiplies.
      memory: how many times as fast as an H200's its memory is.
    """

    processors: int
    speed: float = 1.0
    memory: float = 1.0


@functools.lru_cache(maxsize=64)
def gpu(target: Any) -> Gpu:
    """The `Gpu` of a `Target`; what its data leave out is as on an H200."""
    processors = target.units("device") or PROCESSORS
    rate = dict(target.rates).get("bfloat16") or RATE
    memory = next((m.bandwidth for m in target.memories if m.name == "dram" and m.bandwidth), MEMORY)
    return Gpu(processors, rate / processors / (RATE / PROCESSORS), memory / MEMORY)


def at_hand() -> Gpu:
    """The `Gpu` that kernels called here run on, if it has warpgroup products; otherwise sm_90's common card."""
    from jtile.lowering import targets
    from jtile.tune import device

    found = device.target()
    return gpu(found if multiplies(found) else targets.resolve("cuda:sm_90"))


def multiplies(target: Any) -> bool:
    """Whether a `Target` has warpgroup products, so that kernels run at the block level."""
    return "warpgroup products" in target.features


@dataclasses.dataclass(frozen=True)
class Product:
    """`batch` times `gates` products [m, k] [k, n] of elements of `itemsize` bytes.

    Attributes:
      transposed: the right operand lies in memory as [n, k]; left: the left one as [k, m].
      fast: sums stay in the accumulators of the tensor cores; those of 8-bit floats take twice the registers otherwise.
      cut: the kernel takes tiles whose columns are no power of two, and cuts them (`jtile.ops.columns`).
    """

    m: int
    n: int
    k: int
    itemsize: int = 2
    batch: int = 1
    gates: int = 1
    transposed: bool = False
    left: bool = False
    fast: bool = False
    cut: bool = False

    @property
    def pitches(self) -> tuple[int, int]:
        """Bytes from row to row of the two operands in memory."""
        along = self.m if self.left else self.k, self.k if self.transposed else self.n
        return along[0] * self.itemsize, along[1] * self.itemsize

    def tiles(self, bm: int, bn: int) -> int:
        """How many tiles [bm, bn] the results have."""
        return self.batch * cdiv(self.m, bm) * cdiv(self.n, bn)


class Form(NamedTuple):
    """Tiles [bm, bn] of a result, whose sums are made in `parts`."""

    parts: int
    bm: int
    bn: int


@functools.lru_cache(maxsize=1024)
def tiles(p: Product, on: Gpu) -> dict[str, int] | None:
    """The tiles that are best for a product, `bm`, `bn` and `bk`; None for one that is as quick at tile level."""
    return next(iter(ranked(p, on)), None)


@functools.lru_cache(maxsize=1024)
def ranked(p: Product, on: Gpu) -> tuple[dict[str, int], ...]:
    """All tiles of such products, `bm`, `bn` and `bk`, the shortest predicted time first."""
    sides = sorted(candidates(p), key=lambda s: predicted_us(p, Form(1, *s), on))
    return tuple({"bm": bm, "bn": bn, "bk": terms(p, bm, bn)} for bm, bn in sides)


def terms(p: Product, bm: int, bn: int) -> int:
    """How many terms of the sums a step of a tile takes."""
    lines = 2 if p.gates == 1 and p.itemsize == 2 and p.k >= 512 and two_lines(bm, bn, *p.pitches) else 1
    few = p.m <= FEW and -p.m % bm >= HANGING and not p.left
    lines = 1 if few and not any(pitch % LINE for pitch in p.pitches) else lines
    return lines * LINE // p.itemsize


def two_lines(bm: int, bn: int, *pitches: int) -> bool:
    """Whether a step of a tile takes 256 bytes of each row, not 128. What a step costs besides its products is much for
    the smallest tile; and of rows that start inside of lines, three lines are read for two then, not four."""
    return bm * bn <= (64 * 128 if any(p % LINE for p in pitches) else 64 * 64)


def candidates(p: Product) -> tuple[tuple[int, int], ...]:
    """The sides of tiles of such products; none where they stay at tile level."""
    byte = p.itemsize == 1
    apart = any(pitch % PITCH for pitch in p.pitches)
    if p.m <= 64 or p.n < 64 or p.itemsize > 2 or p.k <= 128 // p.itemsize or (byte and not p.transposed) or apart:
        return ()
    cut = p.cut and p.m > FEW and p.batch == 1 and not byte
    sides = GATED if p.gates > 1 else (*SINGLE, *CUT) if cut else SINGLE
    return tuple((bm, bn) for bm, bn in sides if not byte or p.fast or (bm <= 128 and bn <= 128))


def predicted_us(p: Product, form: Form, on: Gpu) -> float:
    """Predicted microseconds of products in this form; a part of a sum is a tile of its own."""
    parts, bm, bn = form
    processors = on.processors
    step, rest = CUT[bm, bn] if p.cut and (bm, bn) in CUT else TILES[bm, bn * p.gates]
    step /= on.speed
    step *= BYTES if p.itemsize == 1 else 1
    sides = zip((bm, bn * p.gates), p.pitches)
    brought = sum(side * LINE / (UNEVEN if pitch % LINE else EVEN) for side, pitch in sides)
    count = parts * p.tiles(bm, bn)
    step *= FULL if p.gates > 1 and (bm, bn) == GATED[0] and count > processors else 1
    one = cdiv(p.k * p.itemsize, LINE * parts) * max(step, brought) + rest
    sums = SECOND + 8 * parts * p.m * p.n / KEPT if parts > 1 else 0.0
    return in_rounds(p, one, count, on) + sums


def neighbours(p: Product, bm: int, bn: int, on: Gpu) -> int:
    """How many blocks next to each other share what all of them copy, the columns of their tiles. Two where bringing
    operands takes longest, because rows start inside of lines, and all tiles are one round. (1000^3 takes 8.0 us so on
    an H200, 9.9 without; in tiles whose rows begin with lines it gained nothing. Only these tiles, in sums not much
    shorter, were measured.)"""
    measured = (bm, bn) == (64, 128) and p.k >= 512
    if p.batch * p.gates > 1 or p.itemsize != 2 or not measured or not p.pitches[1] % LINE:
        return 1
    brought = sum(side * LINE / (UNEVEN if pitch % LINE else EVEN) for side, pitch in zip((bm, bn), p.pitches))
    one_round = p.tiles(bm, bn) <= on.processors and cdiv(p.m, bm) % 2 == 0
    return 2 if one_round and brought > TILES[bm, bn][0] / on.speed else 1


def in_rounds(p: Product, one: float, count: int, on: Gpu) -> float:
    """Predicted microseconds of products in `count` tiles, of which a multiprocessor makes one in `one` microseconds at
    the highest clock, where operands come at once."""
    processors = on.processors
    one *= 1 + CLOCK * count / processors / cdiv(count, processors)  # by the share of the blocks that work
    read = p.batch * p.itemsize * (p.m * p.k + p.gates * p.k * p.n) / (READ * on.memory) / count
    full, last = divmod(count, processors)  # full rounds, and blocks of the last one, which reads little
    rounds = full * at_once(one, processors * read) + (at_once(one, last * read) if last else 0.0)
    return START + rounds


def at_once(*times: float) -> float:
    """The time of things that share a machine: the longest of theirs, and a little more where they are alike."""
    return sum(t**SHARP for t in times) ** (1 / SHARP)


@functools.lru_cache(maxsize=1024)
def parts_of_product(p: Product, on: Gpu) -> tuple[int, dict[str, int]] | None:
    """In how many parts the sums of a product are made, 1 for whole, and the tiles of the parts."""
    times = forms(p, on) if p.itemsize == 2 else {}
    if not times:
        return None
    parts, bm, bn = min(times, key=times.__getitem__)
    return (parts, {"bm": bm, "bn": bn, "bk": 64}) if parts > 1 else (1, {})


def forms(p: Product, on: Gpu) -> dict[Form, float]:
    """The forms of a product, and the predicted microseconds of each."""
    whole = candidates(p)
    found = [Form(1, *s) for s in whole]
    for bm, bn in [s for s in whole if s not in CUT] if p.itemsize == 2 and p.batch == 1 else ():
        most = min(on.processors // p.tiles(bm, bn), p.k // LEAST)
        found += [Form(1 << x, bm, bn) for x in range(1, most.bit_length())]
    return {form: predicted_us(p, form, on) for form in found}


def quicker[T](found: Mapping[T, float], most: float, p: Product, on: Gpu) -> T | None:
    """Of forms of another kind, with their predicted times, the quickest; None where it takes more than `most` of the
    time of the quickest of `forms`."""
    best = min(found, key=found.__getitem__, default=None)
    return best if best is not None and found[best] <= most * min(forms(p, on).values(), default=0.0) else None


@functools.lru_cache(maxsize=1024)
def extended(p: Product, on: Gpu) -> tuple[int, int, int]:
    """The sizes whose rows of operands are whole `PITCH`es, where a copy to there takes less time than it saves."""
    up = lambda size: cdiv(size * p.itemsize, PITCH) * PITCH // p.itemsize
    rows = {"m" if p.left else "k", "k" if p.transposed else "n"}  # what lies along the rows of an operand
    m, n, k = sizes = p.m, p.n, p.k
    m2, n2, k2 = wide = tuple(up(x) if name in rows else x for name, x in (("m", m), ("n", n), ("k", k)))
    times = forms(dataclasses.replace(p, m=m2, n=n2, k=k2), on) if wide != sizes else {}
    if not times:
        return sizes
    changed = (m2, k2) != (m, k), (k2, n2) != (k, n), (m2, n2) != (m, n)  # a larger result is cut to size afterwards
    moved = [s for s, c in zip(((m2, k2), (k2, n2), (m2, n2)), changed) if c]
    copies = sum(COPY + 2 * p.batch * p.itemsize * x * y / (READ * on.memory) for x, y in moved)
    few = p.tiles(128, 256) < on.processors
    plain = 2 * p.batch * m * n * k / (PLAIN_FEW if few else PLAIN) * p.itemsize / 2
    return wide if min(times.values()) + copies < plain else sizes


def near(p: Product, on: Gpu, *, whole: bool) -> list[Form]:
    """The `forms` near the best, of sums that are `whole` or in parts, which a search tries."""
    times = {f: us for f, us in forms(p, on).items() if f.parts == 1 or not whole}
    ranked = sorted(times, key=times.__getitem__)
    return [f for place, f in enumerate(ranked) if place < ALWAYS or times[f] <= NEAR * times[ranked[0]]]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def head(d: int) -> int:
    """The side of tiles that hold rows of d features: at the block level a power of two, with zeros behind the row."""
    return max(64, 1 << (d - 1).bit_length())


@functools.lru_cache(maxsize=1024)
def attention(
    t: int, s: int, d: int, itemsize: int, causal: bool = False, lengths: bool = False
) -> dict[str, int] | None:
    """Tiles of attention of t queries over s keys with heads of d: queries `bq` and keys `bk`; with `lengths` of
    keys, every consumer has a tile of values of its own besides, with zeros behind the length, for which heads of 256
    leave room only where blocks are smaller.

    Heads of 64 have as much to do for exponentials as for products, so that three or four consumers take turns. Under a
    causal mask small blocks of keys lose less at the edge, and 256 rows leave no rest of a power of two.
    """
    if itemsize != 2 or d not in (64, 128, 256) or t < 64 or s < 64:
        return None
    if d == 64 and t > 256:
        bq, bk = (256, 64) if causal else (192, 128)
    else:
        bq, bk = 64 if t <= 64 else 128, (64 if d == 256 else 128) // (2 if lengths and d > 128 else 1)
    return {"bq": bq, "bk": min(bk, 1 << (s - 1).bit_length())}
