"""Tile sizes of the library's kernels on GPUs: what one block of threads holds in registers and shared memory."""

from __future__ import annotations

import functools

from jtile import cdiv


@functools.cache
def product(m: int, n: int, k: int, itemsize: int, gates: int = 1) -> dict[str, int]:
    """Of `gates` matrix products [m, k] [k, n] of elements of `itemsize` bytes in one kernel: `bm`, `bn`, `bk`."""
    if itemsize >= 4:  # no tensor cores for exact float32: registers are the limit
        return {"bm": _side(m, 64), "bn": _side(n, 64), "bk": min(_power(k), 16)}
    bk = min(_power(k), 128 // itemsize)
    for bm, bn in ((128, 256 // gates), (128, 128), (64, 128), (64, 64)):
        if cdiv(m, bm) * cdiv(n, bn) >= 132:
            break
    return {"bm": _side(m, bm), "bn": _side(n, bn), "bk": max(bk, 16)}


@functools.cache
def attention(t: int, s: int, d: int, itemsize: int, causal: bool) -> dict[str, int]:
    """Of attention of t queries over s keys with heads of d: queries `bq` and keys `bk` of a tile."""
    if itemsize >= 4:  # operands of three times the size: float32 products are sums of tf32 ones
        bq, bk = (64, 32) if d <= 64 else (32, 32) if d <= 128 else (32, 16)
    elif d <= 64:
        bq, bk = 64, 64
    elif d <= 128:
        bq, bk = (64, 32) if causal else (128, 128)
    else:
        bq, bk = (128, 64) if d <= 256 else (32, 32)
    return {"bq": _side(t, bq), "bk": _side(s, bk)}


def _side(n: int, limit: int) -> int:
    """A power of two that covers n, from 16 (what matrix instructions need) to the limit."""
    return min(max(_power(n), 16), limit)


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
