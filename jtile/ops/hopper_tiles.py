"""Tile sizes for GPUs with warpgroup products (sm_90), where kernels run at the block level: one block a processor, a
producer, and a consumer for every 64 rows. None: what other GPUs take is as good."""

from __future__ import annotations

import functools

from jtile import cdiv

PROCESSORS = 132  # of an H200
# Tiles of products, and how much of the speed of the best one they reach: operands for one product after the other.
RATES = {(128, 256): 1.0, (256, 128): 0.97, (128, 128): 0.86, (64, 256): 0.78, (64, 128): 0.62}
# Of 8-bit floats whose sums stay in the tensor cores; three consumers share the rows of the first.
BYTES = RATES | {(192, 128): 1.01}
GATED = {(128, 128): 1.0, (128, 64): 0.8, (64, 128): 0.7, (64, 64): 0.55}


@functools.cache
def product(
    m: int,
    n: int,
    k: int,
    itemsize: int,
    *,
    gates: int = 1,
    transposed: bool = False,
    fast: bool = False,
    batch: int = 1,
) -> dict[str, int] | None:
    """Of `batch` times `gates` products [m, k] [k, n]: `bm`, `bn`, `bk`.

    Args:
      transposed: the right operand lies in memory as [n, k].
      fast: sums stay in the accumulators of the tensor cores; those of 8-bit floats take twice the registers otherwise.
    """
    bk = 128 // max(itemsize, 1)
    byte = itemsize == 1
    apart = k * itemsize % 16 or n * itemsize % 16  # rows that tensor maps do not take
    if m <= 64 or n < 64 or k <= bk or itemsize > 2 or (byte and not transposed) or apart:
        return None
    rates = GATED if gates > 1 else BYTES if byte and fast else RATES
    sides = [(bm, bn) for bm, bn in rates if not byte or fast or (bm <= 128 and bn <= 128)]
    waves = lambda bm, bn: cdiv(batch * cdiv(m, bm) * cdiv(n, bn), PROCESSORS)
    bm, bn = min(sides, key=lambda s: waves(*s) * s[0] * s[1] / rates[s])
    return {"bm": bm, "bn": bn, "bk": bk}


@functools.cache
def attention(t: int, s: int, d: int, itemsize: int, lengths: bool = False) -> dict[str, int] | None:
    """Of attention of t queries over s keys with heads of d: queries `bq` and keys `bk` of a tile; with `lengths` of
    keys, every consumer has a tile of values of its own besides, with zeros behind the length."""
    if itemsize != 2 or d not in (64, 128, 256) or t < 64 or s < 64:
        return None
    bq = 64 if t <= 64 else 192 if d == 64 and t > 256 else 128
    bk = (64 if d == 256 else 128) // (2 if lengths and d > 64 else 1)
    return {"bq": 128 if lengths and bq > 128 else bq, "bk": min(bk, 1 << (s - 1).bit_length())}
