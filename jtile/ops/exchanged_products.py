"""Products fused with a collective where engines copy between devices (`jt.exchange`): products of shards by ordinary
kernels, while the shards of other devices, or sums for them, are on their way.

All products of a call write into one array, each its own part, so that nothing is put together behind them. What is
sent is rounded to the dtype of the result, as XLA's is; a device adds what it receives, in the order of the devices, to
its own float32 sum.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops._shapes import tuned
from jtile.ops.collective_parts import accumulator
from jtile.ops.dispatch import first_unmet

TURNS = 3  # in how many turns the shards of other devices are multiplied
PIECES = (1, 2, 4, 8)  # in how many pieces a device may make its share of the rows of a sum
GAP = 4e-6  # seconds between two kernels, and those that a copy takes to begin
COPIES = 0.8  # the share of the link's rate that engines for copies reach
ENOUGH = 20e9  # operations that are worth a meeting of the devices
ENOUGH_SUMS = 100e9  # likewise on two devices, where products wait for sums: less is sooner done otherwise


def _body(
    x, w, at, got, out, o,
    *, bm: int, bn: int, bk: int, n: int, of: str, to: str, rows: int, count: int, parts: int = 0, size: int = 0,
):  # fmt: skip
    """`rows` rows of x [1 or n, m, k] times w [k, columns], into rows of o.

    of, to: which parts of x and o: "first", "own", or "others", one after another.
    at: [3], the number of this device, and the tiles of bm rows at which x and o begin: pieces have one kernel.
    got: [n, rows, columns] or None, what other devices have sent, to be added.
    """
    # o_t[begin + i, j] = sum_p x_s[start + i, p] w[p, j] + sum over d != me of got_d[i, j]
    e, i, j = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    me = at[0]
    device = {"first": 0, "own": me, "others": (me + 1 + e) % n}
    X, W = x.tiles(None, bm, bk), w.tiles(bk, bn)
    total = jt.zeros((bm, bn), accumulator(x.dtype))
    for p in jt.range(W.shape[0], stages=3):
        total = jt.dot(X[device[of], at[1] + i, p], W[p, j], total)
    if got is not None:
        G = got.tiles(None, bm, bn)
        for k in range(n - 1):
            total = total + G[jnp.where(k < me, k, k + 1), i, j].astype(total.dtype)
    o.tiles(None, bm, bn)[device[to], at[2] + i, j] = total.astype(o.dtype)


def _grid(x, w, *_, bm, bn, rows, count, **__):
    return count, jt.cdiv(rows, bm), jt.cdiv(w.shape[1], bn)


_product_of_shards = jt.kernel(
    out_type=lambda x, w, *_, size, parts, **__: jt.like(x, shape=(parts, size, w.shape[1])),
    grid=_grid, name="product_of_shards",
)(_body)  # fmt: skip
_product_into = jt.kernel(
    out_type=lambda x, w, at, got, out, **_: jt.like(out), grid=_grid, alias={"out": "o"}, name="product_of_shards"
)(_body)


def _product(x, w, out, got=None, *, axis: str, rows: int, start: int = 0, begin: int = 0, step: int = 0, **which: Any):
    """A product of `rows` rows of x from `start` on. It is written to the rows from `begin` on of `out`, or of a new
    array, whose sizes (parts, rows) `out` then is. step: parts are those of the device so many places before this."""
    (k, columns), count = w.shape, which.get("count", 1)
    tiles = gpu_tiles.product(rows, columns, k, x.dtype.itemsize, batch=count)
    if rows < x.shape[1]:
        tiles["bm"] = math.gcd(tiles["bm"], rows)  # pieces begin with a tile
    options = gpu_tiles.product_options(tiles["bm"], tiles["bn"], x.dtype.itemsize)
    n, bm = jt.axis_size(axis), tiles["bm"]
    me = (jax.lax.axis_index(axis) + (n - step)) % n if step else jax.lax.axis_index(axis)
    at = jnp.stack([me.astype(jnp.int32), *(jnp.full_like(me, rows // bm, dtype=jnp.int32) for rows in (start, begin))])
    which = dict(count=1, n=n, rows=rows) | which | tiles
    if isinstance(out, tuple):
        return tuned(_product_of_shards, **options)(x, w, at, got, None, parts=out[0], size=out[1], **which)
    return tuned(_product_into, **options)(x, w, at, got, out, **which)


def gathered(x, w, *, axis: str):
    """`all_gather_matmul` of x [m, k], w [k, columns]: [devices, m, columns]. Shards of other devices are multiplied in
    turns, each while those of the next turn come. On four H200s 4096x7168 times 7168x4096 take 190 us so, and 232 with
    all others in one turn."""
    n, m = jt.axis_size(axis), x.shape[0]
    came = jt.exchange(x, axis, own=False)
    x, into = jax.lax.optimization_barrier((x, came.into))  # the exchange begins in front of the product
    came = jt.Travelling(into, came.sent, axis)
    y = _product(x[None], w, (n, m), axis=axis, rows=m, of="first", to="own")
    ends = [1 + (n - 1) * turn // min(n - 1, TURNS) for turn in range(min(n - 1, TURNS) + 1)]
    for first, end in itertools.pairwise(ends):
        for step in range(first, min(end, n - 1)):
            came, y = jt.exchanged(came, after=y, step=step)
        others = came.into
        if end == n:
            others, y = jt.exchanged(came, after=y)
        turn = dict(count=end - first, of="others", to="others", step=end)
        y = _product(others, w, y, axis=axis, rows=m, **turn)
    return y


def scattered(x, w, *, axis: str, pieces: int | None = None):
    """`matmul_reduce_scatter` of x [devices, m, k], w [k, columns]: [m, columns]."""
    return _summed(x, w, axis, pieces, False)[0]


def summed(x, w, *, axis: str, pieces: int | None = None):
    """`matmul_all_reduce` of x [m, k], w [k, columns]: [m, columns]."""
    n = jt.axis_size(axis)
    y = _summed(x.reshape(n, -1, x.shape[1]), w, axis, pieces, True)
    return y.reshape(x.shape[0], w.shape[1])


def _summed(x, w, axis: str, pieces: int | None, everywhere: bool):
    """The sums of products of all devices, a share on each or, `everywhere`, all: [1 or devices, m, columns].

    A share is made in pieces. First a device makes and sends the terms of all pieces for other devices, then its own.
    """
    n, m = jt.axis_size(axis), x.shape[1]
    pieces = pieces or pieces_of(n, m, *w.shape, x.dtype.itemsize, everywhere)
    rows = m // pieces
    coming = []
    for k in range(pieces):
        for_others = dict(of="others", to="others", count=n - 1)
        part = _product(x, w, (n, rows), axis=axis, rows=rows, start=k * rows, **for_others)
        sent = jt.exchange(part, axis, to="each", own=False)
        x, into = jax.lax.optimization_barrier((x, sent.into))  # the exchange begins in front of the next product
        coming.append(jt.Travelling(into, sent.sent, axis))
    y: jax.Array | tuple[int, int] = (n if everywhere else 1, m)
    flight = None
    for k, travelling in enumerate(coming):
        got, (x, y) = jt.exchanged(travelling, after=(x, y)) if k else (jt.exchanged(travelling), (x, y))
        place = dict(of="own", to="own" if everywhere else "first", start=k * rows, begin=k * rows)
        y = _product(x, w, y, got, axis=axis, rows=rows, **place)
        if everywhere:
            sent = () if flight is None else flight.sent
            flight = jt.exchange(None, axis, into=jt.Travelling(y, sent, axis), start=k * rows, rows=rows)
            y = flight.into
    return y if flight is None else jt.exchanged(flight)


# -- which calls gain -----------------------------------------------------------------------------------------------


def _times(n: int, m: int, k: int, columns: int, itemsize: int) -> tuple[float, float]:
    """Seconds of one round of tiles on all multiprocessors, and of the copy of a row of the result to a device."""
    target = jt.target()
    rate = dict(target.rates).get("bfloat16", 1e15) * 0.8
    link = next((s.link for s in target.scales if s.name == "node" and s.link), None) or 450e9
    return 2 * 128 * 256 * k * gpu_tiles.processors() / rate, columns * itemsize / (COPIES * link)


@functools.cache
def _predicted(pieces: int, n: int, m: int, columns: int, units: int, round_: float, row: float, all_: bool) -> float:
    """Seconds of a sum in pieces: products one after another, copies one after another, each when it can."""
    rows = m // pieces
    rounds = lambda count: math.ceil(count * math.ceil(rows / 128) * math.ceil(columns / 256) / units)
    product, others, copy = rounds(1) * round_ + GAP, rounds(n - 1) * round_ + GAP, (n - 1) * rows * row + GAP
    now, link, came = 0.0, 0.0, []
    for _ in range(pieces):
        now += others
        link = max(link, now) + copy
        came.append(link)
    for at in came:
        now = max(now, at) + product
        link = max(link, now) + copy
    return link if all_ else now


def pieces_of(n: int, m: int, k: int, columns: int, itemsize: int, everywhere: bool) -> int:
    """In how many pieces a share of m rows is made: those that tiles of 128 rows fill."""
    units, times = gpu_tiles.processors(), _times(n, m, k, columns, itemsize)
    able = [c for c in PIECES if c == 1 or m % (128 * c) == 0]
    return min(able, key=lambda c: _predicted(c, n, m, columns, units, *times, everywhere))


def misfit(x, w, *, rows: int | None = None, enough: float | None = None, axis: str) -> str | None:
    """Why products of shards do not suit x [..., rows, k], w [k, columns].

    Args:
      rows: of all products of a device; enough: operations that are worth it.
    """
    enough = ENOUGH if enough is None else enough
    if not all(isinstance(s, int) for s in (*x.shape, *w.shape)):
        return "sizes are not known"
    (k, columns), aligned = w.shape, 16 // x.dtype.itemsize
    rows = math.prod(x.shape[:-1]) if rows is None else rows
    return first_unmet(
        (x.dtype.itemsize == 2, "elements have no two bytes"),
        (k % aligned == 0 and columns % aligned == 0, "rows are no multiples of 16 bytes"),
        (rows >= 256 * jt.axis_size(axis), "there are few rows"),
        (2 * rows * k * columns >= enough, "the product is short"),
    )


def misfit_of_shard(x, w, *, axis: str) -> str | None:
    """Why products of shards do not suit x [m, k], the rows of one device; see `misfit`."""
    rows = x.shape[0] * jt.axis_size(axis) if isinstance(x.shape[0], int) else None
    return misfit(x, w, rows=rows, axis=axis)


def misfit_of_shares(x, w, *, axis: str) -> str | None:
    """Why products of shards do not suit x [devices, m, k], a share of the rows of sums for each; see `misfit`."""
    return misfit(x, w, enough=_enough_sums(axis), axis=axis)


def _enough_sums(axis: str) -> float:
    return ENOUGH_SUMS if jt.axis_size(axis) == 2 else ENOUGH


def misfit_of_sums(x, w, *, axis: str) -> str | None:
    """Why products of shards do not suit x [rows, k], of which each device sums a share; see `misfit`."""
    shared = isinstance(x.shape[0], int) and x.shape[0] % jt.axis_size(axis) == 0
    return misfit(x, w, enough=_enough_sums(axis), axis=axis) or first_unmet((shared, "rows are not shared out evenly"))
