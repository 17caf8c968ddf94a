"""Products of few rows that are gathered from all devices, on Hopper at the block level, in one kernel: while rows are
posted from device to device, the matrix comes from memory.

Each block has a tile of columns and a part of the terms, since a device has few columns and many terms. Its share of
this device's rows it posts to all devices, waits for the rows of the others at its own terms, multiplies, and posts
its sums to the blocks of the other parts: each of them adds up some rows. So a row comes to a device once, and blocks
wait for nothing but numbers that they need.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.collective_parts import others
from jtile.ops.collective_posts import not_posted
from jtile.ops.dispatch import first_unmet

ROWS, TERMS = 64, 128  # of a tile of x
SIDE = 8  # rows that a block posts at once
TAKEN = range(17, ROWS + 1)  # rows of all devices; fewer have not been timed
COLUMNS, PARTS = (32, 64, 128), (8, 4, 2)  # of a tile of w; of the terms
TAKERS = 4  # roles that wait for rows, so that these are on their way together
_SHARED = 208 << 10  # bytes of both rings


def _boxes(x, w, *, bn: int, parts: int, **_):
    """Rows of all devices, in tiles of terms, and sums of each part for each part."""
    return [
        jt.symmetric((x.shape[1] // TERMS, ROWS, TERMS), x.dtype),
        jt.symmetric((w.shape[1] // bn, parts, parts, ROWS // parts, bn), jnp.float32),
    ]


@jt.kernel(
    out_type=lambda x, w, *, axis, **_: jt.like(x, shape=(jt.axis_size(axis) * x.shape[0], w.shape[1])),
    grid=lambda x, w, *, bn, parts, **_: parts * (w.shape[1] // bn),
    scratch=_boxes,
)
def gathered_rows(x, w, o, rows, sums, *, axis: str, bn: int, parts: int):
    """x [m, k], at most 64 rows on all devices together, w [k, columns]: o [devices * m, columns], the rows of all
    devices times w."""
    # o = (x of all devices) w     A, B: rings of tiles of x and of w, C: the sums of this block
    n, me, m, tiles = jt.axis_size(axis), jt.axis_index(axis), x.shape[0], w.shape[1] // bn
    j, part = jt.program_id(0) // parts, jt.program_id(0) % parts
    rounds = x.shape[1] // (parts * TERMS)
    slots = min(rounds, _SHARED // (TERMS * (ROWS + bn) * w.dtype.itemsize))
    A, B = jt.alloc((ROWS, TERMS), x.dtype, slots=slots), jt.alloc((TERMS, bn), w.dtype, slots=slots)
    C = jt.alloc((ROWS, bn), jnp.float32)
    came, full, empty = jt.barrier(slots), jt.barrier(slots), jt.barrier(slots)
    with jt.role("consumer", warps=4):
        acc = jt.zeros((ROWS, bn), jnp.float32)
        for k in jt.range(rounds):
            came.at(k).wait()
            full.at(k).wait()
            acc = jt.dot_wait(jt.dot_async(A.at(k), B.at(k), acc))
            empty.at(k).arrive()
        C.store(acc)
        jt.role_barrier()
        height = ROWS // parts
        for q in range(parts):
            jt.post(sums, (j, q, part, slice(None), slice(None)), C[q * height : (q + 1) * height].load())
        terms = [jt.receive(sums, (j, part, q, slice(None), slice(None))) for q in range(parts)]
        o.tiles(height, bn)[part, j] = functools.reduce(jnp.add, terms).astype(o.dtype)
    for r in range(TAKERS):
        with jt.role(f"rows{r}", warps=4):
            blocks = jt.cdiv(m, SIDE)  # of this device's rows: those of a part are shared out to its tiles of columns
            for b in jt.range(j * TAKERS + r, rounds * blocks, tiles * TAKERS):
                k, row = part * rounds + b // blocks, b % blocks * SIDE + jt.arange(SIDE)[:, None]
                own = jt.load(x, (row, k * TERMS + jt.arange(TERMS)[None, :]), mask=row < m, other=0)
                for d in [*others(axis), me]:
                    jt.post(rows.on(axis, d), (k, jt.ds(me * m + b % blocks * SIDE, SIDE), slice(None)), own, row < m)
            there = jt.arange(ROWS)[:, None] < n * m
            for k in jt.range(r, rounds, TAKERS):
                tile = jt.receive(rows, (part * rounds + k, slice(None), slice(None)), mask=there)
                empty.at(k).wait(before=True)
                A.at(k).store(tile)
                jt.fence_shared()
                came.at(k).arrive()
    with jt.role("producer", warps=1):
        for k in jt.range(rounds):
            empty.at(k).wait(before=True)
            full.at(k).expect(TERMS * bn * w.dtype.itemsize)
            jt.async_copy(w.tiles(TERMS, bn).at[part * rounds + k, j], B.at(k), full.at(k), evict="first")


# -- which calls gain -------------------------------------------------------------------------------------------------


def _form(x, w) -> dict[str, int] | None:
    """Columns of a tile and parts of the terms: as many blocks as run at once, in few parts, or none where these leave
    half of the multiprocessors idle. On four H200s 64 rows of 7168 terms and 1024 columns a device take 16.2 us in
    tiles of 32 columns and four parts, 17.4 in 64 and eight, and 21.1 as a product behind the gather (XLA 24.6). On
    two, with 2048 columns, 20.9, 20.0 and 16.7: where a device has as many columns, the product behind is as fast."""
    most, k, columns = gpu_tiles.processors(), x.shape[1], w.shape[1]
    fits = [
        (parts * (columns // bn), -bn, parts)
        for bn in COLUMNS
        for parts in PARTS
        if columns % bn == 0 and k % (parts * TERMS) == 0 and most // 2 < parts * (columns // bn) <= most
    ]
    return dict(bn=-max(fits)[1], parts=max(fits)[2]) if fits else None


def product(x, w, *, axis: str):
    """x [m, k] of all devices times w [k, columns]: [devices, m, columns]."""
    found = gathered_rows(x, w, axis=axis, **_form(x, w))
    return found.reshape(jt.axis_size(axis), x.shape[0], w.shape[1])


def misfit(x, w, *, axis: str) -> str | None:
    """Why this kernel does not suit x [m, k] and w [k, columns]."""
    if why := not_posted(x, axis):
        return why
    if not all(isinstance(s, int) for s in w.shape):
        return "sizes are not known"
    rows = jt.axis_size(axis) * x.shape[0]
    return first_unmet(
        (x.dtype.name in ("bfloat16", "float16"), "elements are no 16-bit floats"),
        (jt.axis_size(axis) > 2, "there are two devices"),
        (rows in TAKEN, f"there are {rows} rows"),
        (_form(x, w) is not None, "its blocks do not fill the GPU, or do not run at once"),
    )
