"""The matmul of docs/block_level.md in graded steps, from no tensor cores to a full schedule: one kernel a step.

`python -m benchmarks gpu --only tutorial` measures them all, next to cuBLAS. Every step computes a @ b for bfloat16 or
float16, a [m, k] and b [k, n], and keeps what the step before it has found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch

SIZES = ((4096, 4096, 4096), (8192, 8192, 8192))  # m, n, k
TINY = ((256, 256, 128),)


def _product(a: Any, b: Any, **_: Any) -> jax.ShapeDtypeStruct:
    return jt.like(a, shape=(a.shape[0], b.shape[1]))


def _tiles(a: Any, b: Any, *, bm: int, bn: int, **_: Any) -> tuple[int, int]:
    return jt.cdiv(a.shape[0], bm), jt.cdiv(b.shape[1], bn)


# -- step 0: the tile level, where the compiler makes the schedule ----------------------------------------------------


@jt.kernel(out_type=_product, grid=_tiles)
def tile_level(a, b, o, *, bm=128, bn=256, bk=64):
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = a.tiles(bm, bk), b.tiles(bk, bn)
    acc = jt.zeros((bm, bn), jnp.float32)
    for k in jt.range(A.shape[1], stages=4):
        acc = jt.dot(A[i, k], B[k, j], acc)
    o.tiles(bm, bn)[i, j] = acc.astype(o.dtype)


# -- step 1: no tensor cores: every multiply-add is an instruction of a thread ----------------------------------------


@jt.kernel(out_type=_product, grid=_tiles)
def multiply_adds(a, b, o, *, bm=64, bn=64, bk=16):
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = a.tiles(bm, bk), b.tiles(bk, bn)
    acc = jt.zeros((bm, bn), jnp.float32)
    for k in jt.range(A.shape[1], stages=3):
        acc = jt.dot(A[i, k].astype(jnp.float32), B[k, j].astype(jnp.float32), acc, precision="highest")
    o.tiles(bm, bn)[i, j] = acc.astype(o.dtype)


# -- step 2: everything in turn, through registers --------------------------------------------------------------------


@jt.kernel(out_type=_product, grid=_tiles)
def through_registers(a, b, o, *, bm=128, bn=128, bk=64):
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = jt.alloc((bm, bk), a.dtype), jt.alloc((bk, bn), b.dtype)
    with jt.role("all", warps=8):
        acc = jt.zeros((bm, bn), jnp.float32)
        for k in jt.range(jt.cdiv(a.shape[1], bk)):
            A.store(a.tiles(bm, bk)[i, k])
            B.store(b.tiles(bk, bn)[k, j])
            jt.fence_shared()
            jt.role_barrier()
            acc = jt.dot_wait(jt.dot_async(A, B, acc))
            jt.role_barrier()
        o.tiles(bm, bn)[i, j] = acc.astype(o.dtype)


# -- step 3: tensor maps bring the tiles, and nobody's registers are in the way ---------------------------------------


@jt.kernel(out_type=_product, grid=_tiles)
def tensor_maps(a, b, o, *, bm=128, bn=128, bk=64):
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = jt.alloc((bm, bk), a.dtype), jt.alloc((bk, bn), b.dtype)
    full = jt.barrier()
    with jt.role("all", warps=8):
        acc = jt.zeros((bm, bn), jnp.float32)
        for k in jt.range(jt.cdiv(a.shape[1], bk)):
            full[0].expect(A.nbytes + B.nbytes)
            jt.async_copy(a.tiles(bm, bk).at[i, k], A, full[0])
            jt.async_copy(b.tiles(bk, bn).at[k, j], B, full[0])
            full.at(k).wait()
            acc = jt.dot_wait(jt.dot_async(A, B, acc))
            jt.role_barrier()
        o.tiles(bm, bn)[i, j] = acc.astype(o.dtype)


# -- step 4: a ring of buffers, filled ahead of the products ----------------------------------------------------------


@jt.kernel(out_type=_product, grid=_tiles)
def ring(a, b, o, *, bm=128, bn=128, bk=64, slots=4):
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = jt.alloc((bm, bk), a.dtype, slots=slots), jt.alloc((bk, bn), b.dtype, slots=slots)
    full = jt.barrier(slots)
    rounds = jt.cdiv(a.shape[1], bk)

    def start(k):
        full.at(k).expect(A.nbytes + B.nbytes)
        jt.async_copy(a.tiles(bm, bk).at[i, k], A.at(k), full.at(k))
        jt.async_copy(b.tiles(bk, bn).at[k, j], B.at(k), full.at(k))

    with jt.role("all", warps=8):
        for k in range(min(slots - 1, rounds)):
            start(k)
        acc = jt.zeros((bm, bn), jnp.float32)
        for k in jt.range(rounds):
            full.at(k).wait()
            acc = jt.dot_wait(jt.dot_async(A.at(k), B.at(k), acc), pending=1)  # the product before this one has ended
            jt.role_barrier()
            if k + slots - 1 < rounds:
                start(k + slots - 1)  # into the slot that this product has read
        o.tiles(bm, bn)[i, j] = jt.dot_wait(acc).astype(o.dtype)


# -- step 5: a warp of its own for the copies -------------------------------------------------------------------------


@jt.kernel(out_type=_product, grid=_tiles)
def producer(a, b, o, *, bm=128, bn=128, bk=64, slots=4):
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = jt.alloc((bm, bk), a.dtype, slots=slots), jt.alloc((bk, bn), b.dtype, slots=slots)
    full, empty = jt.barrier(slots), jt.barrier(slots)
    rounds = jt.cdiv(a.shape[1], bk)
    with jt.role("consumer", warps=8):
        acc = jt.zeros((bm, bn), jnp.float32)
        for k in jt.range(rounds):
            full.at(k).wait()
            acc = jt.dot_wait(jt.dot_async(A.at(k), B.at(k), acc), pending=1)
            empty.at(k + slots - 1).arrive(when=k > 0)  # the slot of the product before, which has ended
        o.tiles(bm, bn)[i, j] = jt.dot_wait(acc).astype(o.dtype)
    with jt.role("producer", warps=1, registers=24):
        for k in jt.range(rounds):
            empty.at(k).wait(before=True)
            full.at(k).expect(A.nbytes + B.nbytes)
            jt.async_copy(a.tiles(bm, bk).at[i, k], A.at(k), full.at(k))
            jt.async_copy(b.tiles(bk, bn).at[k, j], B.at(k), full.at(k))


# -- step 6: two consumers, which share the tiles of b ----------------------------------------------------------------


@jt.kernel(out_type=_product, grid=_tiles)
def two_consumers(a, b, o, *, bm=128, bn=256, bk=64, slots=4):
    i, j = jt.program_id(0), jt.program_id(1)
    half = bm // 2
    A = [jt.alloc((half, bk), a.dtype, slots=slots) for _ in range(2)]
    B = jt.alloc((bk, bn), b.dtype, slots=slots)
    full, empty = jt.barrier(slots), jt.barrier(slots, arrivals=2)
    rounds = jt.cdiv(a.shape[1], bk)
    for w in range(2):
        with jt.role(f"consumer{w}", warps=4, registers=240):
            acc = jt.zeros((half, bn), jnp.float32)
            for k in jt.range(rounds):
                full.at(k).wait()
                acc = jt.dot_wait(jt.dot_async(A[w].at(k), B.at(k), acc), pending=1)
                empty.at(k + slots - 1).arrive(when=k > 0)  # the slot of the product before, which has ended
            o.tiles(half, bn)[2 * i + w, j] = jt.dot_wait(acc).astype(o.dtype)
    with jt.role("producer", warps=1, registers=24):
        for k in jt.range(rounds):
            empty.at(k).wait(before=True)
            full.at(k).expect(2 * A[0].nbytes + B.nbytes)
            for w in range(2):
                jt.async_copy(a.tiles(half, bk).at[2 * i + w, k], A[w].at(k), full.at(k))
            jt.async_copy(b.tiles(bk, bn).at[k, j], B.at(k), full.at(k))


# -- step 7: blocks that stay, and tiles in an order that finds its operands in the cache -----------------------------


def banded(t, rows: int, columns: int, band: int):
    """Tile number t, in bands of `band` rows of tiles, each walked column by column."""
    first = t // (band * columns) * band
    height = jnp.minimum(rows - first, band)
    within = t % (band * columns)
    return first + within % height, within // height


def resident() -> int:
    """The number of blocks of these kernels that run at once: the multiprocessors of the GPU at hand, or, to compile
    and to interpret without one, of an H200."""
    target = jt.target()
    if "warpgroup products" not in target.features:
        with jt.config(arch="sm_90"):
            target = jt.target()
    return target.units("device") or 1


def _blocks(a: Any, b: Any, *, bm: int, bn: int, blocks: int | None, **_: Any) -> int:
    return min(blocks or resident(), jt.cdiv(a.shape[0], bm) * jt.cdiv(b.shape[1], bn))


@jt.function
def consume(A, B, full, empty, rounds: int, it, acc):
    """Computes the products of one tile, rounds `it` to `it + rounds` of the ring; returns the next round and the
    sum."""
    for k in jt.range(rounds):
        full.at(it).wait()
        acc = jt.dot_wait(jt.dot_async(A.at(it), B.at(it), acc, keep=k > 0), pending=1)
        empty.at(it + full.count - 1).arrive(when=k > 0)
        it += 1
    acc = jt.dot_wait(acc)
    empty.at(it + full.count - 1).arrive()
    return it, acc


@jt.function
def fill(a, b, i, j, A, B, full, empty, rounds: int, it):
    """Starts the copies of one tile, for the rounds in which `consume` reads them."""
    for k in jt.range(rounds):
        empty.at(it).wait(before=True)
        full.at(it).expect(len(A) * A[0].nbytes + B.nbytes)
        for w, ring in enumerate(A):
            jt.async_copy(a.at[len(A) * i + w, k], ring.at(it), full.at(it))
        jt.async_copy(b.at[k, j], B.at(it), full.at(it))
        it += 1
    return it


@jt.kernel(out_type=_product, grid=_blocks)
def persistent(a, b, o, *, bm=128, bn=256, bk=64, slots=4, blocks=None, band=8):
    half = bm // 2
    A = [jt.alloc((half, bk), a.dtype, slots=slots) for _ in range(2)]
    B = jt.alloc((bk, bn), b.dtype, slots=slots)
    full, empty = jt.barrier(slots), jt.barrier(slots, arrivals=2)
    rounds, rows, columns = jt.cdiv(a.shape[1], bk), jt.cdiv(a.shape[0], bm), jt.cdiv(b.shape[1], bn)
    mine = (jt.program_id(0), rows * columns, min(blocks or resident(), rows * columns))
    for w in range(2):
        with jt.role(f"consumer{w}", warps=4, registers=240):
            it = 0
            for t in jt.range(*mine):
                i, j = banded(t, rows, columns, band)
                it, acc = consume(A[w], B, full, empty, rounds, it, jt.zeros((half, bn), jnp.float32))
                o.tiles(half, bn)[2 * i + w, j] = acc.astype(o.dtype)
    with jt.role("producer", warps=1, registers=24):
        it = 0
        for t in jt.range(*mine):
            i, j = banded(t, rows, columns, band)
            it = fill(a.tiles(half, bk), b.tiles(bk, bn), i, j, A, B, full, empty, rounds, it)


# -- step 8: results leave while the next tile is computed ------------------------------------------------------------


def pieces(x, width: int) -> list:
    """The tile in pieces of `width` columns, halved again and again: registers are renamed, no number moves."""
    n = x.shape[1]
    return [x] if n <= width else [*pieces(x[:, : n // 2], width), *pieces(x[:, n // 2 :], width)]


@jt.kernel(out_type=_product, grid=_blocks)
def overlapped(a, b, o, *, bm=128, bn=256, bk=64, slots=4, blocks=None, band=8, width=64):
    half = bm // 2
    A = [jt.alloc((half, bk), a.dtype, slots=slots) for _ in range(2)]
    B = jt.alloc((bk, bn), b.dtype, slots=slots)
    C = [jt.alloc((half, width), o.dtype, slots=2) for _ in range(2)]
    full, empty = jt.barrier(slots), jt.barrier(slots, arrivals=2)
    rounds, rows, columns = jt.cdiv(a.shape[1], bk), jt.cdiv(a.shape[0], bm), jt.cdiv(b.shape[1], bn)
    mine = (jt.program_id(0), rows * columns, min(blocks or resident(), rows * columns))
    for w in range(2):
        with jt.role(f"consumer{w}", warps=4, registers=240):
            it = 0
            for t in jt.range(*mine):
                i, j = banded(t, rows, columns, band)
                it, acc = consume(A[w], B, full, empty, rounds, it, jt.zeros((half, bn), jnp.float32))
                for p, piece in enumerate(pieces(acc, width)):
                    jt.store_wait(1)  # the copy before the last one has read its buffer
                    C[w][p % 2].store(piece.astype(o.dtype))
                    jt.fence_shared()
                    jt.async_copy(C[w][p % 2], o.tiles(half, width).at[2 * i + w, j * (bn // width) + p])
            jt.store_wait(0)
    with jt.role("producer", warps=1, registers=24):
        it = 0
        for t in jt.range(*mine):
            i, j = banded(t, rows, columns, band)
            it = fill(a.tiles(half, bk), b.tiles(bk, bn), i, j, A, B, full, empty, rounds, it)


STEPS = (
    tile_level, multiply_adds, through_registers, tensor_maps, ring, producer, two_consumers, persistent, overlapped,
)  # fmt: skip


def cases(tiny: bool = False) -> Iterator[Case]:
    """A case for each size and step, in turns with cuBLAS alone: on a card whose clock follows its power, each step is
    measured beside the same neighbour."""
    steps = [(j, step) for j, step in enumerate(STEPS) if not tiny or j in (0, 2, len(STEPS) - 1)]
    for m, n, k in TINY if tiny else SIZES:
        for number, step in steps:
            yield _case(m, n, k, number, step.with_options(interpret=True) if tiny and number else step)


def _case(m: int, n: int, k: int, number: int, step: Any) -> Case:
    make = lambda seed: (normal(2 * seed, m, k, dtype="bfloat16"), normal(2 * seed + 1, k, n, dtype="bfloat16"))
    wide = lambda x: x.astype(jnp.float32)
    return Case(
        workload="tutorial", config=f"{m}: {number} {step.name}", dtype="bfloat16", make=make, ours=step,
        peers={"cublas": Torch(lambda torch, a, b: a @ b)},
        reference=lambda a, b: jnp.matmul(wide(a), wide(b), precision="highest"),
        bytes=2 * (m * k + k * n + m * n), flops=2 * m * n * k,
    )  # fmt: skip
