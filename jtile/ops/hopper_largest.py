"""The largest of the products of each of up to 64 rows of x with the rows of a matrix, on Hopper at the block level.

A greedy step wants the largest logit of each row and its place, and none of the other logits: 64 rows of 128,256 of
them are 33 MB, which a head writes and the kernel behind it reads. Here each program keeps the largest ones of its own
columns in registers. As many programs as there are multiprocessors stay, each with rings of W and of x that go on
filling from tile to tile. W is read once, and may be read early, as in `hopper_wide`, whose rings these are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.argmax import keys_of
from jtile.ops.dispatch import BLOCK_LEVEL, first_unmet, has
from jtile.ops.hopper_columns import pieces
from jtile.ops.hopper_wide import ROWS, TAKEN, WIDEST, Form, Memory, bring_tile, clear, memory

FORM = Form(128, 1, 4)  # wider tiles bring fewer bytes of x, and are slower
_LAST, _LEAST = 2**31 - 1, -(2**31)
_REGISTERS = 240


@jt.function
def _largest(mem: Memory, n: int, first, programs, tiles, rounds: int, form: Form):
    """(the keys of the largest sums of each row, int32 [ROWS], the first columns that have them) of a program."""
    clear(mem.x, mem.rows)
    (ring,) = mem.rings
    best, at = jt.full((ROWS,), _LEAST, jnp.int32), jt.full((ROWS,), _LAST, jnp.int32)
    for i in jt.range(tiles):
        total = jt.zeros((ROWS, ring.shape[0]), jnp.float32)
        for r in jt.range(rounds):
            k = i * rounds + r
            mem.full.at(k).wait()
            mem.x_full.at(k).wait()
            total = jt.dot_async(mem.x.at(k), ring.at(k)[: form.columns].T, total)
            total = jt.dot_wait(total, pending=0)
            mem.empty.at(k).arrive()
        within = jt.arange(ring.shape[0])[None, :]
        column = (first + i * programs) * form.columns + within
        keys = jnp.where((column < n) & (within < form.columns), keys_of(total), jnp.int32(_LEAST))
        top = keys.max(1)
        place = jnp.where(keys == top[:, None], column, jnp.int32(_LAST)).min(1)
        more = top > best
        best, at = jnp.where(more, top, best), jnp.where(more, place, at)
    return best, at


@jt.function
def _bring_weights(mem: Memory, w, first, programs, tiles, rounds: int, form: Form):
    """The role that fills the ring of W."""
    nbytes, terms = form.columns * form.terms * w.dtype.itemsize, form.terms
    for k in jt.range(tiles * rounds):
        tile = first + k // rounds * programs
        mem.empty.at(k).wait(before=True)
        mem.full.at(k).expect(nbytes)
        for at, width in pieces(form.columns, WIDEST):
            row = tile * form.columns + at
            row = jnp.where(row < w.shape[0], row, 0)  # what is outside takes a tensor map longer
            source = w.at[jt.ds(row, width), jt.ds(k % rounds * terms, terms)]
            jt.async_copy(source, mem.rings[0].at(k)[at : at + width], mem.full.at(k), evict="first")


@jt.function
def _bring_rows(mem: Memory, x, tiles, rounds: int):
    """The role that fills the ring of x."""
    for k in jt.range(tiles * rounds):
        mem.empty.at(k).wait(before=True)
        mem.x_full.at(k).expect(mem.rows * mem.x.shape[1] * x.dtype.itemsize)
        bring_tile(x, k % rounds, mem.x.at(k), mem.x_full.at(k), mem.rows)


def _types(x, w, *, programs: int, **_):
    found = jax.ShapeDtypeStruct((x.shape[0], programs), jnp.int32)
    return found, found


@jt.kernel(out_type=_types, grid=lambda x, w, *, programs, **_: programs)
def hopper_largest(x, w, tops, places, *, programs: int, form: Form = FORM, early: bool = False):
    """tops, places int32 [m, programs]: the largest of `keys_of` the products of x [m, k], m <= 64, with the rows of w
    [n, k] that a program has, and the first row of w that has it. Program p has every `programs`-th tile of
    `form.columns` rows of w."""
    # y_i: the first j with (X Wᵀ)_ij = max_j (X Wᵀ)_ij
    p, n, rounds = jt.program_id(0), w.shape[0], jt.cdiv(x.shape[1], form.terms)
    tiles = (jt.cdiv(n, form.columns) - p + programs - 1) // programs
    mem = memory(x, (w,), form)
    with jt.role("consumer", warps=4, registers=_REGISTERS):
        best, at = _largest(mem, n, p, programs, tiles, rounds, form)
        there = jt.arange(ROWS) < x.shape[0]
        jt.store(tops, (jt.ds(0, ROWS), p), best, mask=there)
        jt.store(places, (jt.ds(0, ROWS), p), at, mask=there)
    with jt.role("producer", warps=1, registers=24, early=early):
        _bring_weights(mem, w, p, programs, tiles, rounds, form)
    with jt.role("feeder", warps=1, registers=24):
        _bring_rows(mem, x, tiles, rounds)


def misfit(x, w) -> str | None:
    """Why the kernel does not take x [m, k] and this [n, k], None where it does and is the quickest."""
    few = FORM.columns * gpu_tiles.processors()
    return gpu_tiles.misfit_of_stream(x, (w,)) or first_unmet(
        (has(jt.target(), *BLOCK_LEVEL), "the target has no block level"),
        (x.shape[0] in TAKEN, f"{x.shape[0]} rows are as quick otherwise"),
        (w.shape[0] >= few, f"{w.shape[0]} rows of the matrix are not one tile for each multiprocessor"),
    )


def largest(x, w) -> tuple[jax.Array, jax.Array]:
    """(the largest of `keys_of` the products, int32 [m, programs], the first rows of w that have them), each program
    with some of the rows of w [n, k], for x [m, k]."""
    return hopper_largest(x, w, programs=gpu_tiles.processors(), early=gpu_tiles.overlaps())
