"""Sums of products over devices, on Hopper at the block level: tiles travel while others are made.

Each device makes the tiles for the others first, and copies them into their memory while it makes the next ones; then
it makes its own tiles, and adds what has come, which takes the way of the operands into shared memory. Two consumers
have 64 rows of a tile each, and signal the tile that they have sent late in the next one, so that nobody waits for a
copy. Blocks stay, one on each multiprocessor.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.collective_parts import accumulator
from jtile.ops.dispatch import first_unmet

BAND = 8  # rows of tiles that blocks walk together, column by column


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
def consume(A, B, full, empty, rounds: int, it, acc, first: bool = True):
    """Add the products of rounds `it` to `it + rounds` of the rings A and B to a sum, which counts as zero if they are
    the `first` of a tile; returns the next round and the sum."""
    for k in jt.range(rounds):
        full.at(it).wait()
        acc = jt.dot_wait(jt.dot_async(A.at(it), B.at(it), acc, keep=k > 0 if first else None), pending=1)
        empty.at(it + full.count - 1).arrive(when=k > 0)
        it += 1
    acc = jt.dot_wait(acc)
    empty.at(it + full.count - 1).arrive()
    return it, acc


@jt.function
def send(C, p: int, piece, place):
    """Copy a piece of a tile to its place by way of C; p: its number, one after that of the piece before it."""
    jt.store_wait(C.slots - 1)  # the copy that used this buffer last has read it
    C[p % C.slots].store(piece.astype(C.dtype))
    jt.fence_shared()
    jt.async_copy(C[p % C.slots], place)


@jt.kernel(
    out_type=lambda x, w, **_: jt.like(x, shape=(x.shape[1], w.shape[1])),
    grid=lambda x, w, *, blocks, **_: blocks,
    scratch=lambda x, w, *, axis, bm, bn, **_: [
        jt.symmetric((jt.axis_size(axis), x.shape[1], w.shape[1]), x.dtype),
        jt.signals((x.shape[1] // (bm // 2), w.shape[1] // bn, jt.axis_size(axis))),
    ],
)
def scattered(
    x, w, o, box, came, *, axis: str, blocks: int, bm: int = 128, bn: int = 256, bk: int = 64, slots: int = 4
):
    """x [devices, m, k], a share of rows for each device, w [k, columns]: o [m, columns], the sum of the products of
    all devices for this one. m is a multiple of bm, columns of bn, bn of bk.

    All blocks end a tile at about the same time, and then want to send more than the link takes at once. So half of a
    tile leaves when it is made, and the other half waits in registers until a quarter of the next tile is made."""
    # o = sum over d of x_me of device d, times its w
    # A, B: rings of tiles of x and w; C: two pieces of a tile that leave; late: the half of the tile
    # before that is still to be sent; t: number of a tile among those of all n
    # devices, (i, j) its place in the share of device d; c: consumer; p: piece; it: round of the rings
    n, me = jt.axis_size(axis), jt.axis_index(axis)
    half, rounds = bm // 2, jt.cdiv(x.shape[2], bk)
    rows, columns, wide = x.shape[1] // bm, w.shape[1] // bn, bn // bk
    A = [jt.alloc((half, bk), x.dtype, slots=slots) for _ in range(2)]
    B = jt.alloc((bk, bn), w.dtype, slots=slots)
    C = [jt.alloc((half, bk), o.dtype, slots=2) for _ in range(2)]
    full, empty = jt.barrier(slots), jt.barrier(slots, arrivals=2)
    each = rows * columns
    mine = (jt.program_id(0), n * each, blocks)
    early = rounds * 3 // 4  # rounds of a tile in front of the signal for the one before, which has been copied by then
    sooner = rounds // 4  # rounds of a tile in front of the late pieces of the one before

    def home(t):  # the device that tile t is made for, and its place there
        return (me + 1 + t // each) % n, *banded(t % each, rows, columns, BAND)

    def send_late(t, late, c: int):
        to, at, column = home(t)
        there = box.on(axis, to).tiles(None, half, bk)
        for p, piece in enumerate(pieces(late, bk)):
            send(C[c], wide // 2 + p, piece, there.at[me, 2 * at + c, column * wide + wide // 2 + p])

    for c in range(2):
        with jt.role(f"consumer{c}", warps=4, registers=232):
            it, before = 0, -1
            late = jt.zeros((half, bn // 2), o.dtype)
            for t in jt.range(*mine):
                i, j = banded(t % each, rows, columns, BAND)
                acc = jt.zeros((half, bn), accumulator(x.dtype))
                if sooner:
                    it, acc = consume(A[c], B, full, empty, sooner, it, acc)
                if before >= 0:
                    send_late(before, late, c)
                if early > sooner:
                    it, acc = consume(A[c], B, full, empty, early - sooner, it, acc, first=not sooner)
                if before >= 0:
                    to, at, column = home(before)
                    jt.signal(came.on(axis, to)[2 * at + c, column, me])
                it, acc = consume(A[c], B, full, empty, rounds - early, it, acc, first=not early)
                if t < (n - 1) * each:
                    there = box.on(axis, (me + 1 + t // each) % n).tiles(None, half, bk)
                    for p, piece in enumerate(pieces(acc[:, : bn // 2], bk)):
                        send(C[c], p, piece, there.at[me, 2 * i + c, j * wide + p])
                    late = acc[:, bn // 2 :].astype(o.dtype)
                    before = t
                else:
                    before = -1
                    for p, piece in enumerate(pieces(acc, bk)):
                        total = piece
                        for _ in range(n - 1):
                            full.at(it).wait()
                            part = A[c].at(it).load()
                            jt.fence_shared()  # the next copy to this slot comes behind what threads still read from it
                            empty.at(it).arrive()
                            total = total + part.astype(total.dtype)
                            it += 1
                        send(C[c], p, total, o.tiles(half, bk).at[2 * i + c, j * wide + p])
            if before >= 0:
                send_late(before, late, c)
                jt.store_wait(0)
                to, at, column = home(before)
                jt.signal(came.on(axis, to)[2 * at + c, column, me])
            else:
                jt.store_wait(0)
    with jt.role("producer", warps=1, registers=40):
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
            if t >= (n - 1) * each:
                for c in range(2):
                    for k in range(n - 1):
                        jt.wait(came[2 * i + c, j, (me + 1 + k) % n])
                for p in range(wide):
                    for k in range(n - 1):
                        empty.at(it).wait(before=True)
                        full.at(it).expect(2 * A[0].nbytes)
                        for c in range(2):
                            here = box.tiles(None, half, bk).at[jnp.where(k < me, k, k + 1), 2 * i + c, j * wide + p]
                            jt.async_copy(here, A[c].at(it), full.at(it))
                        it += 1


# -- which calls gain -------------------------------------------------------------------------------------------------

# Tiles of the result that a device has at least for each multiprocessor, and its operations at most. On two H200s
# products of 30, 60 and 120 billion take 64, 104 and 197 us, and 78, 134 and 235 as shards beside copies; of 240 and
# 480 the latter is 1 and 10 % quicker. On four those of 15, 30 and 60 billion take 53, 89 and 146 us, and 118, 188 and
# 190; of 240 the latter is 6 % quicker.
TILES, MUCH = 0.75, 150e9
MOST = 128 << 20  # bytes of symmetric memory of a call site, of which there are two sets
DEVICES = 8  # the kernel is for any number, up to a tensor map for each; two and four have been measured


def scattered_sums(x, w, *, axis: str):
    """`matmul_reduce_scatter` of x [devices, m, k], w [k, columns]: [m, columns]."""
    tiles = x.shape[0] * (x.shape[1] // 128) * (w.shape[1] // 256)
    return scattered(x, w, axis=axis, blocks=min(gpu_tiles.processors(), tiles))


def misfit(x, w, *, axis: str) -> str | None:
    """Why travelling tiles do not suit x [devices, m, k], w [k, columns]."""
    if not all(isinstance(s, int) for s in (*x.shape, *w.shape)):
        return "sizes are not known"
    (n, m, k), columns = x.shape, w.shape[1]
    with jt.config() as now:
        peers = now.gpu_peers
    return first_unmet(
        (bool(peers) and jax.process_count() == 1, "the devices do not reach each other's memory"),
        (x.dtype.name in ("bfloat16", "float16"), "elements are no 16-bit floats"),
        (n <= DEVICES, "there are many devices"),
        (m % 128 == 0 and columns % 256 == 0 and k % 64 == 0, "tiles would hang over"),
        (n * m * columns >= TILES * gpu_tiles.processors() * 128 * 256, "there are few tiles"),
        (2 * n * m * k * columns < MUCH, "the product is long"),
        (n * m * columns * x.dtype.itemsize <= MOST, "it takes much memory"),
    )
