"""Up to 64 rows of x times a matrix in memory, on Hopper at the block level: y = x Wᵀ, W read once, in wide tiles.

Such a product is as fast as W comes from memory, if what comes besides does not take longer: a multiprocessor gets 85
bytes a nanosecond, and a tile of 32 rows of W brings twice as many bytes of x as of W. So a tile has as many rows of W
as make one round of the multiprocessors: any multiple of 8, up to 128 of each weight. Where a matrix has too few rows
for that, several programs share a tile (split-K), and each gives float32 sums over its part of the terms: whatever
reads the result adds them up.

Rows of x are the rows of the instructions, of which there are 64. Those that are missing are zeros from the start: a
copy whose box lies over the edge of x takes a tensor map longer (a product of 32 rows with its sum over two H200s 29.5
us instead of 21.8).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.dispatch import BLOCK_LEVEL, Implementation, Op, first_unmet, has
from jtile.ops.epilogues import ACTIVATIONS
from jtile.ops.hopper_columns import piece, pieces

ROWS, TERMS = 64, 128  # rows of an instruction; terms of a round
WIDEST = 128  # rows of a weight in a tile
MOST_PARTS = 8
# Rows of x that are taken, where kernels overlap. Otherwise tiles of other sides are as quick: a layer of Llama-3.1-8B
# with 64 rows takes 167 us on an H200 with those, 170 with these, and 162 where these are launched early. Eight layers
# take 1376 us a step with 32 rows, 1445 in other tiles, but 1340 and 1287 with 16, for which other tiles are smaller.
TAKEN = range(17, 65)
_RINGS = 216 << 10  # bytes of shared memory for both rings
_REGISTERS = 216


@dataclasses.dataclass(frozen=True)
class Form:
    """Tiles of `columns` rows of each weight, a multiple of 8, whose sums are made in `parts`; rings of `slots` rounds,
    which have `terms` each, a multiple of 64."""

    columns: int
    parts: int
    slots: int
    terms: int = TERMS


@dataclasses.dataclass(frozen=True)
class Memory:
    """Buffers and barriers of a program.

    Attributes:
      rings: for each weight a ring of rows of it. x: the ring of x.
      full, empty: a round of W has come; has been read. x_full: a round of x has come.
      rows: of x that copies bring.
    """

    rings: list[jt.Shared]
    x: jt.Shared
    full: jt.Barrier
    empty: jt.Barrier
    x_full: jt.Barrier
    rows: int


def memory(x, weights: tuple, form: Form) -> Memory:
    """Buffers and barriers for x [m, k] and these weights."""
    wide = jt.next_power_of_2(form.columns)
    ring = lambda rows: jt.alloc((rows, form.terms), x.dtype, slots=form.slots)
    return Memory(
        rings=[ring(wide) for _ in weights],
        x=ring(ROWS),
        full=jt.barrier(form.slots),
        empty=jt.barrier(form.slots),
        x_full=jt.barrier(form.slots),
        rows=brought(x.shape[0], ROWS),
    )


def brought(m: int, most: int) -> int:
    """Of `most` rows of a tile those that copies bring of m rows."""
    return min(most, jt.cdiv(m, 8) * 8)


@jt.function
def clear(ring, rows: int) -> None:
    """Write zeros to the rows of the buffers of a ring that copies do not bring."""
    at = rows
    while at < ring.shape[0]:
        width = at & -at  # a slice begins at a multiple of its size
        for slot in range(ring.slots):
            ring[slot][at : at + width].store(jt.zeros((width, ring.shape[1]), ring.dtype))
        at += width
    if rows < ring.shape[0]:
        jt.fence_shared()


@jt.function
def bring_tile(x, round_, buffer, full, rows: int) -> None:
    """Copy the terms of a round of the first rows of x to a buffer."""
    for at, width in pieces(rows, ROWS):
        terms = jt.ds(round_ * buffer.shape[1], buffer.shape[1])
        jt.async_copy(x.at[jt.ds(at, width), terms], buffer[at : at + width], full)


def rounds_of(part, k: int, form: Form) -> tuple:
    """The first round of a part of sums over k terms, and how many rounds it has."""
    rounds = jt.cdiv(k, form.terms)
    each = jt.cdiv(rounds, form.parts)
    first = part * each
    return first, jnp.minimum(rounds - first, each)


@jt.function
def sums_of(mem: Memory, rounds, form: Form):
    """The sums of a program for each weight, in the first columns of a tile."""
    clear(mem.x, mem.rows)
    sums = tuple(jt.zeros((ROWS, ring.shape[0]), jnp.float32) for ring in mem.rings)
    for k in jt.range(rounds):
        mem.full.at(k).wait()
        mem.x_full.at(k).wait()
        sums = tuple(
            jt.dot_async(mem.x.at(k), ring.at(k)[: form.columns].T, total) for ring, total in zip(mem.rings, sums)
        )
        sums = jt.dot_wait(*sums, pending=0)
        sums = sums if isinstance(sums, tuple) else (sums,)
        mem.empty.at(k).arrive()
    return sums


def write(sums, y, part, tile, form: Form, activation) -> None:
    """Write what the sums of a tile give: float32 sums of a part, or the result."""
    there = jt.arange(ROWS)[:, None] < y.shape[1]
    for at, width in pieces(form.columns, 64):
        first = tile * form.columns + at
        one, *other = (piece(total, at, width) for total in sums)
        out = ACTIVATIONS[activation](one)
        out = out * other[0] if other else out
        inside = there & (first + jt.arange(width)[None, :] < y.shape[2])
        jt.store(y, (part, jt.ds(0, ROWS), jt.ds(first, width)), out.astype(y.dtype), mask=inside)


@jt.function
def bring_weights(mem: Memory, weights, tile, first, rounds, form: Form):
    """The role that fills the rings of W."""
    nbytes, terms = len(weights) * form.columns * form.terms * weights[0].dtype.itemsize, form.terms
    for k in jt.range(rounds):
        mem.empty.at(k).wait(before=True)
        mem.full.at(k).expect(nbytes)
        for w, ring in zip(weights, mem.rings):
            for at, width in pieces(form.columns, WIDEST):
                row = tile * form.columns + at
                row = jnp.where(row < w.shape[0], row, 0)  # what is outside takes a tensor map longer
                buffer = ring.at(k)[at : at + width]
                jt.async_copy(
                    w.at[jt.ds(row, width), jt.ds((first + k) * terms, terms)], buffer, mem.full.at(k), evict="first"
                )


@jt.function
def bring_rows(mem: Memory, x, first, rounds):
    """The role that fills the ring of x."""
    for k in jt.range(rounds):
        mem.empty.at(k).wait(before=True)
        mem.x_full.at(k).expect(mem.rows * mem.x.shape[1] * x.dtype.itemsize)
        bring_tile(x, first + k, mem.x.at(k), mem.x_full.at(k), mem.rows)


def _types(x, weights, *, form: Form, out_dtype: str, **_):
    return jax.ShapeDtypeStruct((form.parts, x.shape[0], weights[0].shape[0]), jnp.dtype(out_dtype))


def _grid(x, weights, *, form: Form, **_):
    return form.parts * jt.cdiv(weights[0].shape[0], form.columns)


@jt.kernel(out_type=_types, grid=_grid)
def hopper_wide(x, weights: tuple, y, *, form: Form, activation, out_dtype: str, early: bool = False):
    """y [parts, m, n] of x [m, k], m <= 64, and weights [n, k]: one, or two of a gated product (y = act(x Gᵀ) * (x Uᵀ),
    in one part)."""
    # Y_s = X_s W_sᵀ, a sum over rounds of `terms`
    tile, part = jax.lax.div(jt.program_id(0), form.parts), jax.lax.rem(jt.program_id(0), form.parts)
    mem = memory(x, weights, form)
    first, count = rounds_of(part, x.shape[1], form)
    with jt.role("consumer", warps=4, registers=_REGISTERS):
        write(sums_of(mem, count, form), y, part, tile, form, activation)
    with jt.role("producer", warps=1, registers=24, early=early):
        bring_weights(mem, weights, tile, first, count, form)
    with jt.role("feeder", warps=1, registers=24):
        bring_rows(mem, x, first, count)


def slots(columns: int, weights: int, itemsize: int = 2) -> int:
    """Slots that the rings have room for."""
    return min(_RINGS // ((weights * jt.next_power_of_2(columns) + ROWS) * TERMS * itemsize), 12)


def choice(n: int, k: int, weights: int) -> Form | None:
    """The form for weights [n, k], or None where no form fills three quarters of the multiprocessors in one round."""
    units, found = gpu_tiles.processors(), []
    for parts in (1, 2, 4, MOST_PARTS) if weights == 1 else (1,):
        columns = jt.cdiv(jt.cdiv(n * parts, units), 8) * 8
        if columns <= WIDEST and k >= 4 * parts * TERMS:
            busy = parts * jt.cdiv(n, columns)
            found.append(((busy >= 0.9 * units) * columns, Form(columns, parts, slots(columns, weights))))
    best = max(found, key=lambda one: one[0], default=(0, None))
    return best[1] if best[0] else None


def misfit(x, weights: tuple) -> str | None:
    """Why the kernel does not compute x [m, k] times these [n, k], None where it does and is the quickest."""
    return gpu_tiles.misfit_of_stream(x, weights) or first_unmet(
        (x.shape[0] in TAKEN, f"{x.shape[0]} rows are as quick otherwise"),
        (choice(weights[0].shape[0], x.shape[1], len(weights)), "tiles of other sides are as quick"),
    )


def product(x, weights: tuple, *, activation=None) -> jax.Array:
    """The product of x [m, k] and weights [n, k]: [m, n] in x's dtype, if one part makes it; else the float32 sums of
    each part, [parts, m, n]."""
    form = choice(weights[0].shape[0], x.shape[1], len(weights))
    assert form is not None
    out = x.dtype.name if form.parts == 1 else "float32"
    y = hopper_wide(x, weights, form=form, activation=activation, out_dtype=out, early=gpu_tiles.overlaps())
    return y[0] if form.parts == 1 else y


def parts_of(x, w) -> int:
    """In how many parts `in_parts` makes the sums of x [m, k] times w [n, k]; 1: that is not for it."""
    there = has(jt.target(), *BLOCK_LEVEL) and misfit(x, (w,)) is None
    form = choice(*w.shape, 1) if there else None
    return 1 if form is None else form.parts


def _wide(x, w, *, parts: int):
    del parts
    return product(x, (w,))


def _not_wide(x, w, *, parts: int) -> str | None:
    form = choice(*w.shape, 1)
    return misfit(x, (w,)) or first_unmet((form is not None and parts == form.parts > 1, "parts are others"))


def _whole(x, w, *, parts: int):
    from jtile.ops.matmul import matmul  # imported here, since that module imports this one

    y = matmul(x, w, transpose_b=True, out_dtype=jnp.float32)
    return jnp.concatenate([y[None], jnp.zeros((parts - 1, *y.shape), y.dtype)])


# Float32 sums [parts, m, n] that are x [m, k] times the transposed w [n, k] when they are added up.
in_parts = Op(
    "product in parts",
    Implementation("wide tiles", _wide, _not_wide, BLOCK_LEVEL, portable=False),
    Implementation("whole sums", _whole),
)
