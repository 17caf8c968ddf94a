"""Products of few rows that are summed over devices, on Hopper at the block level: a block has a tile of all rows,
posts it to the same block of every other device, and adds what they post.

Such a product is as fast as its matrix comes from memory, and its result is small. So nothing is gained by tiles that
travel while others are made; but a kernel of its own for the sum would start, read the product and wait.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.collective_posts import not_posted, post_to_others, receive_terms
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_wide import bring_tile, brought, clear

ROWS, TERMS = 64, 128  # of a tile of x
TAKEN = range(17, ROWS + 1)  # rows of x; fewer have not been timed
DEVICES = 2  # at most: the kernel is for any number, and more have not been timed
_SHARED = 196 << 10  # bytes of the ring


def _columns_of(w, tb: bool) -> int:
    return w.shape[0] if tb else w.shape[1]


@jt.kernel(
    out_type=lambda x, w, *, tb=False, **_: jt.like(x, shape=(x.shape[0], _columns_of(w, tb))),
    grid=lambda x, w, *, bn, tb=False, **_: jt.cdiv(_columns_of(w, tb), bn),
    scratch=lambda x, w, *, axis, bn, tb=False, bm=ROWS, **_: [
        jt.symmetric((jt.axis_size(axis), jt.cdiv(_columns_of(w, tb), bn), bm, bn), x.dtype)
    ],
)
def summed_rows(x, w, o, box, *, axis: str, bn: int, slots: int, tb: bool = False, bm: int = ROWS, bk: int = TERMS):
    """x [m, k], m at most bm, w [k, columns], or [columns, k] with tb: o [m, columns], the sum of the products of all
    devices."""
    # o = sum over d of (x w) of device d     A, B: rings of tiles of x and w; C: the tile of this device
    j, rounds = jt.program_id(0), jt.cdiv(x.shape[1], bk)
    rows = brought(x.shape[0], bm)
    A, B = jt.alloc((bm, bk), x.dtype, slots=slots), jt.alloc((bn, bk) if tb else (bk, bn), w.dtype, slots=slots)
    C = jt.alloc((bm, bn), o.dtype)
    full, empty = jt.barrier(slots), jt.barrier(slots)
    with jt.role("consumer", warps=4, registers=200):
        clear(A, rows)
        acc = jt.zeros((bm, bn), jnp.float32)
        for k in jt.range(rounds):
            full.at(k).wait()
            acc = jt.dot_wait(jt.dot_async(A.at(k), B.at(k).T if tb else B.at(k), acc))
            empty.at(k).arrive()
        C.store(acc.astype(o.dtype))  # so that a thread has neighbours in a row, which it posts at once
        jt.role_barrier()
        own, place = C.load(), (j, slice(None), slice(None))
        post_to_others(box, place, own, axis)
        terms = [term.astype(jnp.float32) for term in receive_terms(box, place, own, axis)]
        o.tiles(bm, bn)[0, j] = functools.reduce(jnp.add, terms).astype(o.dtype)
    with jt.role("producer", warps=1, registers=40):
        for k in jt.range(rounds):
            empty.at(k).wait(before=True)
            full.at(k).expect(rows * bk * x.dtype.itemsize + B.nbytes)
            bring_tile(x, k, A.at(k), full.at(k), rows)
            tile = w.tiles(bn, bk).at[j, k] if tb else w.tiles(bk, bn).at[k, j]
            jt.async_copy(tile, B.at(k), full.at(k), evict="first")


# -- which calls gain -------------------------------------------------------------------------------------------------


def _columns(columns: int) -> int | None:
    """Columns of a tile: the fewest of which all blocks run at once."""
    fits = (bn for bn in (16, 32, 64, 128) if columns % bn == 0 and columns // bn <= gpu_tiles.processors())
    return next(fits, None)


def sums(x, w, *, axis: str, tb: bool = False):
    """`matmul_all_reduce` of x [m, k] and w [k, columns], or with `tb` [columns, k]."""
    bn = _columns(_columns_of(w, tb))
    slots = min(16, _SHARED // ((ROWS + bn) * TERMS * x.dtype.itemsize))
    return summed_rows(x, w, axis=axis, bn=bn, slots=slots, tb=tb)


def misfit(x, w, *, axis: str, tb: bool = False) -> str | None:
    """Why this kernel does not suit x [m, k] and w [k, columns], or with `tb` [columns, k]."""
    if why := not_posted(x, axis):
        return why
    if not all(isinstance(s, int) for s in w.shape):
        return "sizes are not known"
    (m, k), columns = x.shape, _columns_of(w, tb)
    return first_unmet(
        (x.dtype.name in ("bfloat16", "float16"), "elements are no 16-bit floats"),
        (jt.axis_size(axis) <= DEVICES, "there are many devices"),
        (m in TAKEN, f"there are {m} rows"),
        (k % 8 == 0 and k >= 8 * TERMS, "sums are short, or rows are no whole lines of copies"),
        (_columns(columns) is not None, "tiles of all columns do not run at once"),
    )
