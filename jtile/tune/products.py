"""Tile sizes of products and attention where no model of time chooses them: on GPUs at tile level, by rules measured on
an H200 (`benchmarks/records` has the numbers; warps and stages count for NVIDIA's GPUs), on CPUs, and on NPUs, by what
their memories hold alone, for nothing was measured there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from jtile.tune.warpgroups import cdiv

LONG = 8192  # terms from which on a sum of few rows counts as long
_ROWS_IN_PARTS = 128
EVEN = 1.05  # how many times as many tiles as there are the cores of a CPU may have room for in as many rounds
SIDE = 256  # side of a tile of the result on a CPU: panels of both operands stay in the second-level cache


@functools.lru_cache(maxsize=1024)
def on_gpu(m: int, n: int, k: int, itemsize: int, gates: int, transposed: bool, processors: int) -> dict[str, int]:
    """`bm`, `bn` and `bk` of `gates` products [m, k] [k, n] of elements of `itemsize` bytes in one kernel.

    Args:
      transposed: the right operand lies in memory as [n, k].
      processors: multiprocessors of the GPU.
    """
    if itemsize >= 4:  # no tensor cores for exact float32: registers are the limit
        bm, bn = (32, 32) if itemsize == 8 else (64, 64)
        return {"bm": side(m, bm), "bn": side(n, bn), "bk": max(min(power(k), 16), 1)}
    if m <= 64:
        return _few_rows(m, n, k, itemsize, gates, transposed, processors)
    bk = min(power(k), 128 // itemsize)
    sides = ((128, 256), (128, 128), (64, 128), (64, 64)) if gates == 1 else ((128, 128), (128, 64), (64, 64))
    for bm, bn in sides:
        if cdiv(m, bm) * cdiv(n, bn) >= (processors if gates == 1 else processors * 3 // 4):
            break
    return {"bm": side(m, bm), "bn": side(n, bn), "bk": max(bk, 16)}


def _few_rows(m: int, n: int, k: int, itemsize: int, gates: int, transposed: bool, processors: int) -> dict[str, int]:
    """A product that is bound by reading the right operand: tiles of long lines, enough of them for all of the GPU."""
    if m == 1:
        bn, bk = (16, 256) if transposed else (32, 128)
    else:
        bn = (64 if m <= 16 else 128) // gates
        least = processors * 2 // 3 if m > 32 else processors * 3 // 4  # taller tiles are worth some idle blocks
        while bn > 16 and cdiv(n, bn) < least:
            bn //= 2
        bk = 256 if transposed and m <= 16 else 128
    return {"bm": 1 if m == 1 else side(m, 64), "bn": side(n, bn), "bk": max(min(power(k), bk * 2 // itemsize), 16)}


def long_sums_of_few_rows(m: int, n: int, k: int, processors: int) -> dict[str, int] | None:
    """`bm`, `bn`, `bk` of up to 32 rows of 16-bit floats times a matrix [n, k] of long lines, where the GPU is sm_90;
    None where others are as quick.

    As few steps as shared memory has room for, since each waits for memory: of [16, 8192] times [2048, 8192] a product
    took 11.5 us so, and 16.2 with half of the terms in a step; of one row 9.5 us. In steps of models, 16 rows times
    [4096, 14336] took 30.0 instead of 32.2 us, times [4096, 4096] 10.9 instead of 11.7; 32 rows times [2048, 4096] 8.9
    instead of 12.3, times [5120, 2048] 8.8 instead of 9.2. Where so much memory leaves a second round of blocks,
    shorter steps are quicker: 16 rows times [6144, 4096] took 15.1 us, and 17.4 with twice the terms.
    """
    if m == 1:
        return {"bm": 1, "bn": 8, "bk": 1024} if k >= LONG else None
    if m > 32:
        return None
    if m <= 16 and k >= LONG and cdiv(n, 16) <= processors:
        return {"bm": 16, "bn": 16, "bk": 512}
    found = _few_rows(m, n, k, 2, 1, True, processors)
    bn, at_once = found["bn"], cdiv(n, found["bn"]) <= processors
    if m <= 16:
        return found | {"bk": 512} if bn == 32 and at_once and k >= LONG // 2 else None
    return found | {"bk": 256} if k >= LONG // 4 and (bn == 32 or (bn == 16 and at_once)) else None


def warps(bm: int, bn: int, itemsize: int, gates: int = 1) -> dict[str, int]:
    """`num_warps` of a product in such tiles on a GPU of NVIDIA, where the compiler's own choice is worse."""
    if itemsize >= 4:
        return {}
    if bm == 1:
        return {"num_warps": 2}
    if bm <= 64 and bn * gates <= 128:
        return {"num_warps": 4}
    if gates == 2:
        return {"num_warps": 8 if bm * bn >= 128 * 128 else 4}
    return {}


def stages_of_few_rows(bm: int, bn: int, bk: int, itemsize: int) -> tuple[dict[str, int], dict[str, int]]:
    """What a product of few rows takes besides on a GPU of NVIDIA, `stages` and `num_warps`: stages for as many bytes
    of the right operand on their way as such a product needs, which is bound by reading it, and no more warps than 32
    rows have work for."""
    if bm == 1 and bn == 8:
        return {}, {"num_warps": 4}  # the steps have 1024 terms
    if not 1 < bm <= 64:
        return {}, {}
    if (bm, bn, bk, itemsize) == (16, 16, 512, 2):
        return {"stages": 4}, {"num_warps": 2}
    if (bm, bn, bk, itemsize) == (32, 16, 256, 2):
        return {"stages": 6}, {}
    stages = {"stages": 4} if bn * bk * itemsize <= 16384 or (bm, bn, bk, itemsize) == (16, 32, 512, 2) else {}
    return stages, {"num_warps": 2} if bm <= 32 and 64 <= bn <= 128 and itemsize <= 2 else {}


@functools.lru_cache(maxsize=1024)
def attention_on_gpu(t: int, s: int, d: int, itemsize: int, causal: bool, little: bool) -> dict[str, int]:
    """Queries `bq` and keys `bk` of a tile of attention of t queries over s keys with heads of d.

    Args:
      little: a block has 100 KB of shared memory or less.
    """
    if itemsize >= 4:  # operands of three times the size: float32 products are sums of tf32 ones
        bq, bk = (64, 32) if d <= 64 else (32, 32) if d <= 128 else (16 if little and d > 256 else 32, 16)
    elif d <= 64:
        bq, bk = 64, 64
    elif d <= 128:
        bq, bk = (64, 32) if causal else (128, 128)
    elif d <= 256:
        bq, bk = (64, 32) if little else (128, 64)
    else:
        bq, bk = (16, 16) if little else (32, 32)
    return {"bq": side(t, bq), "bk": side(s, bk)}


def warps_of_attention(d: int, itemsize: int) -> dict[str, int]:
    """`num_warps` of attention on a GPU of NVIDIA, where the compiler's own choice does not hold the tiles."""
    return {"num_warps": 8} if itemsize >= 4 and 64 < d <= 128 else {}


def in_parts_on_cpu(m: int, n: int, cores: int) -> dict[str, int]:
    """`bm` and `bn` of a product of float32 rows with a bfloat16 matrix on a CPU with tile registers: each program
    takes its rows apart, so that it has as many columns as leave every core two programs."""
    bm = even(m, _ROWS_IN_PARTS)
    count = cdiv(2 * cores, cdiv(m, bm))
    return {"bm": bm, "bn": min(n, max(-(-n // count // 32) * 32, 64))}


@functools.lru_cache(maxsize=1024)
def on_cpu(m: int, n: int, k: int, cores: int) -> dict[str, int]:
    """`bm` and `bn` of a product on a CPU: near `SIDE`, dividing the sides evenly where they can, and small enough to
    give every core work."""
    bm, bn = even(m, SIDE), even(n, SIDE)
    wider = even(n, 2 * SIDE)
    # a wider tile packs its rows less often; but every core wants several, and as many as the others
    found = cdiv(m, bm) * cdiv(n, wider)
    if found >= 4 * cores and cdiv(found, cores) * cores <= EVEN * found:
        bn = wider
    if m <= 16:
        bn = even(n, max(64, (256 << 10) // max(k, 1)))
    return {"bm": bm, "bn": bn}


def on_npu(
    m: int, n: int, k: int, itemsize: int, gates: int, memories: Mapping[str, int], cores: int
) -> dict[str, int]:
    """`bm`, `bn` and `bk` of a product on an NPU whose matrix unit has memories of its own, bytes by name.

    A tile of sums takes half of `l0c`, so that one is stored while the next is summed, and tiles of the operands half
    of `l0a` and `l0b`; smaller where there are fewer tiles than cores.
    """
    sides = [
        (bm, bn) for bm, bn in ((128, 128), (64, 128), (64, 64), (32, 64)) if gates * bm * bn * 8 <= memories["l0c"]
    ]
    bm, bn = next((s for s in sides if cdiv(m, s[0]) * cdiv(n, s[1]) >= cores), sides[-1])
    bk = min(memories["l0a"] // (2 * bm * itemsize), memories["l0b"] // (2 * bn * itemsize))
    return {"bm": side(m, bm), "bn": side(n, bn), "bk": side(k, 1 << max(bk.bit_length() - 1, 4))}


def attention_on_npu(t: int, s: int, d: int, memories: Mapping[str, int]) -> dict[str, int]:
    """Queries `bq` and keys `bk` of a tile of attention on an NPU: `l0c` holds the sums of both products."""
    bq = bk = 128
    while (bq * bk + bq * d) * 4 > memories["l0c"] and bq > 16:
        bq, bk = (bq, bk // 2) if bk == bq else (bq // 2, bk)
    return {"bq": side(t, bq), "bk": side(s, bk)}


def even(n: int, limit: int) -> int:
    """A side that covers n in equal parts of at most `limit`, rounded up to whole vectors."""
    if n <= limit:
        return max(n, 1)
    part = math.ceil(n / math.ceil(n / limit))
    return next((d for d in range(limit, part - 1, -1) if n % d == 0), -(-part // 16) * 16)


def side(n: int, limit: int) -> int:
    """A power of two that covers n, from 16 (what matrix instructions need) to the limit."""
    return min(max(power(n), 16), limit)


def power(n: int) -> int:
    """The power of two that covers n."""
    return 1 << max(n - 1, 0).bit_length()
