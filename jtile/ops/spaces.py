"""What the tuner may choose for the library's kernels, and the data that it measures with.

The functions that call these kernels choose by shape; an entry of the tuner goes before that choice (`override`). Sides
of tiles on a GPU are powers of two; a CPU has no warps, and its products take all terms of a sum at once (`bk` 0).
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_tiles
from jtile.ops.dispatch import small_tiles
from jtile.ops.hopper_tiles import Product

LINES = 128, 256  # bytes of a row of operands in shared memory
Points = list[dict[str, Any]]

# The arguments that a tuned choice depends on; other meta-parameters, which the heuristic chooses, do not count.
PRODUCT = ("a", "b", "bias", "activation", "ta", "tb", "out_dtype", "save")
GATED = ("x", "gate", "up", "activation", "tb", "save")


def _all(**values: Any) -> Points:
    return [dict(zip(values, point)) for point in itertools.product(*values.values())]


def _sides(n: int, *lengths: int) -> list[int]:
    """The lengths that are no longer than the power of two that covers n; at least one."""
    cover = jt.next_power_of_2(n)
    return [x for x in lengths if x <= cover] or [min(lengths)]


def products(a, b, *_, ta: bool, tb: bool, bk: int, **__) -> Points:
    """The choices of `matmul`: a [e, m, k], b [e, k, n]; on Hopper, tiles whose predicted time is near the shortest."""
    m, n, k = a.shape[2 if ta else 1], b.shape[1 if tb else 2], a.shape[1 if ta else 2]
    sides = None
    if gpu_tiles.warpgroups():
        of = dict(batch=max(a.shape[0], b.shape[0]), fast=not jnp.issubdtype(a.dtype, jnp.floating), cut=True)
        product = Product(m, n, k, a.dtype.itemsize, left=ta, transposed=tb, **of)
        sides = [(form.bm, form.bn) for form in hopper_tiles.near(product, whole=True)]
    return _products(m, n, k, a.dtype.itemsize, whole=bk == 0, sides=sides)


def gated_products(x, gate, *_, tb: bool, bk: int, **__) -> Points:
    """The choices of `gated_mlp`: x [m, k], gate [k, n]."""
    m, k, n, sides = *x.shape, gate.shape[0 if tb else 1], None
    if gpu_tiles.warpgroups():
        sides = hopper_tiles.candidates(Product(m, n, k, x.dtype.itemsize, gates=2, transposed=tb))
    return _products(m, n, k, x.dtype.itemsize, whole=bk == 0, sides=sides, gates=2)


def _products(m: int, n: int, k: int, itemsize: int, *, whole: bool, sides=None, gates: int = 1) -> Points:
    if not small_tiles():
        tiles = _all(bm=_sides(m, 32, 64, 128, 256, 512), bn=_sides(n, 64, 128, 256, 512))
        return [{**p, "bm": min(p["bm"], m), "bn": min(p["bn"], n)} for p in tiles] if whole else []
    if sides:  # the plan of the block level has its own warps and stages
        terms = lambda bm, bn: _sides(k, *(x // itemsize for x in LINES[: 2 if bm == 64 and bn <= 128 else 1]))
        return [{"bm": bm, "bn": bn, "bk": bk} for bm, bn in sides for bk in terms(bm, bn)]
    terms = _sides(k, *(x // itemsize for x in (64, 128, 256, 512, 1024)))
    if m == 1:
        return _all(bn=_sides(n, 16, 32, 64, 128), bk=terms, num_warps=[1, 2, 4, 8], stages=[2, 3, 5])
    if m <= 64:  # bound by reading: shorter lines, or fewer at once, were never close to the best
        terms = _sides(k, *(x // itemsize for x in (256, 512)))
        return _all(bn=_sides(n, 16, 32, 64, 128), bk=terms, num_warps=[2, 4], stages=[3, 4])
    rows, columns = _sides(m, 64, 128, 256), _sides(n, *(x for x in (64, 128, 256) if x <= 256 // gates))
    return _all(bm=rows, bn=columns, bk=[x for x in terms if x * itemsize <= 256], num_warps=[4, 8], stages=[2, 3, 4])


def attention(q, k, v, *_, **__) -> Points:
    """The choices of `flash_attention`: q [batch, t, heads, d], k and v [batch, s, kv heads, d]."""
    t, s = q.shape[1], k.shape[1]
    if not small_tiles():
        tiles = _all(bq=_sides(t, 32, 64, 128, 256), bk=_sides(s, 64, 128, 256, 512))
        return [{"bq": min(p["bq"], t), "bk": min(p["bk"], s)} for p in tiles]
    d = q.shape[3]
    if gpu_tiles.warpgroups() and q.dtype.itemsize == 2 and d in (64, 128, 256) and min(t, s) >= 64:
        rows = (64, 128, 192, 256) if d == 64 else (64, 128)
        return _all(bq=_sides(t, *rows), bk=_sides(s, 64, 128), persistent=[True, False])
    return _all(bq=_sides(t, 16, 32, 64, 128), bk=_sides(s, 16, 32, 64, 128), num_warps=[4, 8], stages=[1, 2, 3])


def splits(q, k, *_, **__) -> Points:
    """The choices of `decode_splits`."""
    if not small_tiles():
        return [{"bk": min(x, k.shape[1])} for x in _sides(k.shape[1], 32, 64, 128, 256)]
    return _all(bk=_sides(k.shape[1], 16, 32, 64, 128, 256), num_warps=[1, 2, 4, 8], stages=[2, 3, 4])


def full_cache(q, k, v, lengths, table, scales, **_) -> Any:
    """Data to measure `decode_splits` with: every slot is in use."""
    ones = (jnp.full(x.shape, 1 if jnp.issubdtype(x.dtype, jnp.integer) else 0.5, x.dtype) for x in (q, k, v))
    scales = tuple(jnp.full(x.shape, 0.5, x.dtype) for x in scales)
    slots = k.shape[1] * (1 if table is None else table.shape[1])
    pages = None if table is None else jnp.arange(table.size, dtype=table.dtype).reshape(table.shape) % k.shape[0]
    return (*ones, jnp.full(lengths.shape, slots, lengths.dtype), pages, scales)


def rows(x, *_, **__) -> Points:
    """The choices of kernels that hold `br` rows of x [rows, n]."""
    n = x.shape[1]
    most = max((1 << 14) // max(n, 1), 1)
    return _all(br=_sides(min(x.shape[0], most), 1, 2, 4, 8, 16, 32, 64), num_warps=[1, 2, 4, 8, 16])
