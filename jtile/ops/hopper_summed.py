"""Products of few rows that are summed over devices, on Hopper at the block level: a block has a tile of all rows,
sends it to the same block of every other device, and adds what they send.

Such a product is as fast as its matrix comes from memory, and its result is small. So nothing is gained by tiles that
travel while others are made; but a kernel of its own for the sum would start, read the product and wait.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_travelling import consume

ROWS, TERMS = 64, 128  # of a tile of x
DEVICES = 2  # at most: the kernel is for any number, and more have not been timed
_SHARED = 196 << 10  # bytes of the ring


@jt.kernel(
    out_type=lambda x, w, **_: jt.like(x, shape=(x.shape[0], w.shape[1])),
    grid=lambda x, w, *, bn, **_: jt.cdiv(w.shape[1], bn),
    scratch=lambda x, w, *, axis, bn, **_: [
        jt.symmetric((jt.axis_size(axis), x.shape[0], w.shape[1]), x.dtype),
        jt.signals((jt.cdiv(w.shape[1], bn), jt.axis_size(axis))),
    ],
)
def summed_rows(x, w, o, box, came, *, axis: str, bn: int, slots: int, bm: int = ROWS, bk: int = TERMS):
    """x [m, k], m at most bm, w [k, columns]: o [m, columns], the sum of the products of all devices."""
    # o = sum over d of (x w) of device d     A, B: rings of tiles of x and w; C: the tile of this device; n: devices
    n, me, j = jt.axis_size(axis), jt.axis_index(axis), jt.program_id(0)
    rounds = jt.cdiv(x.shape[1], bk)
    A, B = jt.alloc((bm, bk), x.dtype, slots=slots), jt.alloc((bk, bn), w.dtype, slots=slots)
    C = jt.alloc((bm, bn), o.dtype)
    full, empty = jt.barrier(slots), jt.barrier(slots)
    with jt.role("consumer", warps=4, registers=200):
        _, acc = consume(A, B, full, empty, rounds, 0, jt.zeros((bm, bn), jnp.float32))
        C.store(acc.astype(o.dtype))  # so that a thread has neighbours in a row, which it sends at once
        jt.role_barrier()
        part = C.load()
        others = [(me + 1 + step) % n for step in range(n - 1)]
        for d in others:
            box.on(axis, d).tiles(None, bm, bn)[me, 0, j] = part
        for d in others:
            jt.signal(came.on(axis, d)[j, me])
        for d in others:
            jt.wait(came[j, d])
        total = _total(part, box.tiles(None, bm, bn), j, axis)
        o.tiles(bm, bn)[0, j] = total.astype(o.dtype)
    with jt.role("producer", warps=1, registers=40):
        for k in jt.range(rounds):
            empty.at(k).wait(before=True)
            full.at(k).expect(A.nbytes + B.nbytes)
            jt.async_copy(x.tiles(bm, bk).at[0, k], A.at(k), full.at(k))
            jt.async_copy(w.tiles(bk, bn).at[k, j], B.at(k), full.at(k))


def _total(part, boxes, j, axis: str):
    """The sum of tile j of all devices, in their order, float32; part: that of this one."""
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    wide = lambda tile: tile.astype(jnp.float32)
    if n == 2:  # two numbers have the same sum in either order
        return wide(part) + wide(boxes[1 - me, 0, j])
    # this device has stored nothing: what is loaded in its place is not used
    tiles = [wide(jnp.where(d == me, part, boxes[jnp.where(d == me, (me + 1) % n, d), 0, j])) for d in range(n)]
    return functools.reduce(jnp.add, tiles)


# -- which calls gain -------------------------------------------------------------------------------------------------


def _columns(columns: int) -> int | None:
    """Columns of a tile: the fewest of which all blocks run at once."""
    fits = (bn for bn in (16, 32, 64, 128) if columns % bn == 0 and columns // bn <= gpu_tiles.processors())
    return next(fits, None)


def sums(x, w, *, axis: str):
    """`matmul_all_reduce` of x [m, k], w [k, columns]."""
    bn = _columns(w.shape[1])
    slots = min(16, _SHARED // ((ROWS + bn) * TERMS * x.dtype.itemsize))
    return summed_rows(x, w, axis=axis, bn=bn, slots=slots)


def misfit(x, w, *, axis: str) -> str | None:
    """Why this kernel does not suit x [m, k], w [k, columns]."""
    if not all(isinstance(s, int) for s in (*x.shape, *w.shape)):
        return "sizes are not known"
    (m, k), columns = x.shape, w.shape[1]
    with jt.config() as now:
        peers = now.gpu_peers
    return first_unmet(
        (bool(peers) and jax.process_count() == 1, "the devices do not reach each other's memory"),
        (x.dtype.name in ("bfloat16", "float16"), "elements are no 16-bit floats"),
        (jt.axis_size(axis) <= DEVICES, "there are many devices"),
        (ROWS // 2 < m <= ROWS, f"there are {m} rows"),  # fewer have not been timed
        (k % 8 == 0 and k >= 8 * TERMS, "sums are short, or rows are no whole lines of copies"),
        (_columns(columns) is not None, "tiles of all columns do not run at once"),
    )
