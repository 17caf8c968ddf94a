"""Sums of products over devices, on Hopper at the block level: each device makes the tiles for the others first, and
copies them into their memory while it makes the next ones; then it makes its own tiles, and adds what has come.

Blocks stay, one on each multiprocessor. Two consumers have 64 rows of a tile each, and signal the tile that they sent
before when they have made the next one, so that nobody waits for a copy.
"""

from __future__ import annotations

import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.collective_parts import accumulator

BAND = 8  # rows of tiles that blocks walk together, column by column


def blocks_of(tiles: int) -> int:
    return min(gpu_tiles.processors(), tiles)


def pieces(x, width: int) -> list:
    """The tile in pieces of `width` columns, halved again and again: registers are renamed, no number moves."""
    n = x.shape[1]
    return [x] if n <= width else [*pieces(x[:, : n // 2], width), *pieces(x[:, n // 2 :], width)]


@jt.function
def banded(t, rows, columns: int, band: int):
    """Tile number t of a part, in bands of `band` rows of tiles, each walked column by column."""
    first = t // (band * columns) * band
    height = jnp.minimum(rows - first, band)
    within = t % (band * columns)
    return first + within % height, within // height


@jt.function
def consume(A, B, full, empty, rounds: int, it, acc):
    """The sum of one tile, of rounds `it` to `it + rounds` of the ring; returns the next round and the sum."""
    for k in jt.range(rounds):
        full.at(it).wait()
        acc = jt.dot_wait(jt.dot_async(A.at(it), B.at(it), acc, keep=k > 0), pending=1)
        empty.at(it + full.count - 1).arrive(when=k > 0)
        it += 1
    acc = jt.dot_wait(acc)
    empty.at(it + full.count - 1).arrive()
    return it, acc


@jt.kernel(
    out_type=lambda x, w, **_: jt.like(x, shape=(x.shape[1], w.shape[1])),
    grid=lambda x, w, *, blocks, **_: blocks,
    scratch=lambda x, w, *, axis, bm, bn, **_: [
        jt.symmetric((jt.axis_size(axis), x.shape[1], w.shape[1]), x.dtype),
        jt.signals((x.shape[1] // (bm // 2), w.shape[1] // bn, jt.axis_size(axis))),
    ],
)
def scattered(
    x, w, o, box, came, *, axis: str, blocks: int, bm: int = 128, bn: int = 256, bk: int = 64, slots: int = 4,
    width: int = 64,
):  # fmt: skip
    """x [devices, m, k], a share of rows for each device, w [k, columns]: o [m, columns], the sum of the products of
    all devices for this one. m is a multiple of bm, columns of bn."""
    # o = sum over d of x_me of device d, times its w
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    half, rounds = bm // 2, jt.cdiv(x.shape[2], bk)
    rows, columns = x.shape[1] // bm, w.shape[1] // bn
    A = [jt.alloc((half, bk), x.dtype, slots=slots) for _ in range(2)]
    B = jt.alloc((bk, bn), w.dtype, slots=slots)
    C = [jt.alloc((half, width), o.dtype, slots=2) for _ in range(2)]
    full, empty = jt.barrier(slots), jt.barrier(slots, arrivals=2)
    each = rows * columns
    mine = (jt.program_id(0), n * each, blocks)
    for c in range(2):
        with jt.role(f"consumer{c}", warps=4, registers=240):
            it, before = 0, -1
            for t in jt.range(*mine):
                d = (me + 1 + t // each) % n
                i, j = banded(t % each, rows, columns, BAND)
                it, acc = consume(A[c], B, full, empty, rounds, it, jt.zeros((half, bn), accumulator(x.dtype)))
                if before >= 0:
                    to = (me + 1 + before // each) % n
                    at, column = banded(before % each, rows, columns, BAND)
                    jt.signal(came.on(axis, to)[2 * at + c, column, me])
                if t < (n - 1) * each:
                    there = box.on(axis, d).tiles(None, half, width)
                    for p, piece in enumerate(pieces(acc, width)):
                        jt.store_wait(1)  # the copy before the last one has read its buffer
                        C[c][p % 2].store(piece.astype(o.dtype))
                        jt.fence_shared()
                        jt.async_copy(C[c][p % 2], there.at[me, 2 * i + c, j * (bn // width) + p])
                    before = t
                else:
                    before = -1
                    for k in range(n - 1):
                        jt.wait(came[2 * i + c, j, (me + 1 + k) % n])
                    here = box.tiles(None, half, width)
                    for p, piece in enumerate(pieces(acc, width)):
                        total = piece
                        for k in range(n - 1):
                            d = jnp.where(k < me, k, k + 1)
                            total = total + here[d, 2 * i + c, j * (bn // width) + p].astype(total.dtype)
                        jt.store_wait(1)
                        C[c][p % 2].store(total.astype(o.dtype))
                        jt.fence_shared()
                        jt.async_copy(C[c][p % 2], o.tiles(half, width).at[2 * i + c, j * (bn // width) + p])
            jt.store_wait(0)
            if before >= 0:
                to = (me + 1 + before // each) % n
                at, column = banded(before % each, rows, columns, BAND)
                jt.signal(came.on(axis, to)[2 * at + c, column, me])
    with jt.role("producer", warps=1, registers=24):
        it = 0
        for t in jt.range(*mine):
            d = (me + 1 + t // each) % n
            i, j = banded(t % each, rows, columns, BAND)
            for k in jt.range(rounds):
                empty.at(it).wait(before=True)
                full.at(it).expect(2 * A[0].nbytes + B.nbytes)
                for c in range(2):
                    jt.async_copy(x.tiles(None, half, bk).at[d, 2 * i + c, k], A[c].at(it), full.at(it))
                jt.async_copy(w.tiles(bk, bn).at[k, j], B.at(it), full.at(it))
                it += 1


UNIT = 2  # boxes of 64 columns that are signalled together


@jt.kernel(
    out_type=lambda x, w, *, axis, **_: jt.like(x, shape=(jt.axis_size(axis), x.shape[0], w.shape[1])),
    grid=lambda x, w, *, blocks, **_: blocks,
    scratch=lambda x, w, *, axis, bm, **_: [
        jt.symmetric((jt.axis_size(axis), *x.shape), x.dtype),
        jt.signals((x.shape[0] // (bm // 2), jt.axis_size(axis))),
    ],
)
def gathered(
    x, w, o, box, came, *, axis: str, blocks: int, bm: int = 128, bn: int = 256, bk: int = 64, slots: int = 4,
    width: int = 32,
):  # fmt: skip
    """x [m, k] of all devices, w [k, columns]: o [devices, m, columns]. m is a multiple of bm, columns of bn."""
    # o_d = (x of device d) w
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    half, rounds = bm // 2, jt.cdiv(x.shape[1], bk)
    rows, columns = x.shape[0] // bm, w.shape[1] // bn
    A = [jt.alloc((half, bk), x.dtype, slots=slots) for _ in range(2)]
    B = jt.alloc((bk, bn), w.dtype, slots=slots)
    C = [jt.alloc((half, width), o.dtype, slots=2) for _ in range(2)]
    S = jt.alloc((half, bk), x.dtype, slots=UNIT)
    full, empty = jt.barrier(slots), jt.barrier(slots, arrivals=2)
    brought = jt.barrier()
    own, units = rows * columns, jt.cdiv(rounds, UNIT)
    mine = (jt.program_id(0), n * own, blocks)
    for c in range(2):
        with jt.role(f"consumer{c}", warps=4, registers=216):
            it = 0
            for t in jt.range(*mine):
                d, i, j = _gathered_tile(t, own, rows, columns, n, me)
                it, acc = consume(A[c], B, full, empty, rounds, it, jt.zeros((half, bn), accumulator(x.dtype)))
                for p, piece in enumerate(pieces(acc, width)):
                    jt.store_wait(1)  # the copy before the last one has read its buffer
                    C[c][p % 2].store(piece.astype(o.dtype))
                    jt.fence_shared()
                    there = o.tiles(None, half, width).at[d, 2 * i + c, j * (bn // width) + p]
                    jt.async_copy(C[c][p % 2], there)
            jt.store_wait(0)
    with jt.role("producer", warps=1, registers=40):
        it = 0
        for t in jt.range(*mine):
            d, i, j = _gathered_tile(t, own, rows, columns, n, me)
            if d == me:
                for k in jt.range(rounds):
                    empty.at(it).wait(before=True)
                    full.at(it).expect(2 * A[0].nbytes + B.nbytes)
                    for c in range(2):
                        jt.async_copy(x.tiles(half, bk).at[2 * i + c, k], A[c].at(it), full.at(it))
                    jt.async_copy(w.tiles(bk, bn).at[k, j], B.at(it), full.at(it))
                    it += 1
            else:
                for c in range(2):
                    jt.wait(came[2 * i + c, d], units)
                for k in jt.range(rounds):
                    empty.at(it).wait(before=True)
                    full.at(it).expect(2 * A[0].nbytes + B.nbytes)
                    for c in range(2):
                        jt.async_copy(box.tiles(None, half, bk).at[d, 2 * i + c, k], A[c].at(it), full.at(it))
                    jt.async_copy(w.tiles(bk, bn).at[k, j], B.at(it), full.at(it))
                    it += 1
    with jt.role("sender", warps=1, registers=40):
        for u in jt.range(jt.program_id(0), 2 * rows * units, blocks):
            i, first = u // units, u % units * UNIT
            count = jnp.minimum(rounds - first, UNIT)
            brought[0].expect(UNIT * S[0].nbytes)
            for q in range(UNIT):
                jt.async_copy(x.tiles(half, bk).at[i, first + q], S[q], brought[0])
            brought.at(u // blocks).wait()
            for k in range(n - 1):
                to = box.on(axis, (me + 1 + k) % n).tiles(None, half, bk)
                for q in range(UNIT):
                    if q < count:
                        jt.async_copy(S[q], to.at[me, i, first + q])
            for k in range(n - 1):
                jt.signal(came.on(axis, (me + 1 + k) % n)[i, me])
            jt.store_wait(0)


@jt.function
def _gathered_tile(t, own: int, rows: int, columns: int, n: int, me):
    """The device and the place of tile t: a device's own rows first, then those of the others, block by block as they
    come."""
    r, j = banded(jnp.where(t < own, t, t - own), jnp.where(t < own, rows, (n - 1) * rows), columns, BAND)
    d = jnp.where(t < own, me, (me + 1 + r % (n - 1)) % n)
    return d, jnp.where(t < own, r, r // (n - 1)), j
