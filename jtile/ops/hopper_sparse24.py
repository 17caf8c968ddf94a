"""Products of up to 64 rows with a 2:4 weight on Hopper, at the block level: yᵀ = W xᵀ.

The kept numbers and their places (see `jtile.ops.two_of_four`) come through tensor maps; consumers make the rows of W
from them in registers and multiply from there with x, whose order is that of the weight. Memory gives 9/16 of the bytes
of a dense weight; four consumers of one 64 rows share the rounds, so that some make numbers while others wait.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.dispatch import first_unmet

HALVES, PLACES, KEPT = 2, 4, 2
ROWS = 64  # rows of W of a program
TAKEN = range(1, 65)  # rows of x that are taken


@dataclasses.dataclass(frozen=True)
class Form:
    """How a program computes 64 rows of W.

    Attributes:
      columns: rows of x, a power of two from 8 on.
      deep: consumers, which share the rounds.
      slots, x_slots: slots of the ring of the weight, a multiple of `deep`, and of that of x, in which a round takes
        two, a multiple of 2 `deep`: a consumer always has the same slots, for a barrier tells only one phase from the
        next.
      together: products of a consumer that run at once.
      registers: registers of a consumer's thread.
      width: bytes of codes of a row in a round.
    """

    columns: int
    deep: int
    slots: int
    x_slots: int
    together: int = 4
    registers: int = 216
    width: int = 64


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers and barriers of a program.

    Attributes:
      values, codes: the rings of the weight. x: the ring of x, half a round at a time.
      partial: the sums of each consumer but the first.
      full, empty: a round of the weight has come; has been read. x_full, x_empty: half a round of x likewise.
      done: the sums in `partial` are there.
    """

    values: list[jt.Shared]
    codes: jt.Shared
    x: jt.Shared
    partial: list[jt.Shared]
    full: jt.Barrier
    empty: jt.Barrier
    x_full: jt.Barrier
    x_empty: jt.Barrier
    done: jt.Barrier


def _memory(x, values, form: Form) -> _Memory:
    return _Memory(
        values=[jt.alloc((ROWS, form.width), values.dtype, slots=form.slots) for _ in range(HALVES * KEPT)],
        codes=jt.alloc((ROWS, form.width), jnp.uint8, slots=form.slots),
        x=jt.alloc((PLACES * form.columns, form.width), x.dtype, slots=form.x_slots),
        partial=[jt.alloc((ROWS, form.columns), jnp.float32) for _ in range(form.deep - 1)],
        full=jt.barrier(form.slots),
        empty=jt.barrier(form.slots),
        x_full=jt.barrier(form.x_slots),
        x_empty=jt.barrier(form.x_slots),
        done=jt.barrier(max(form.deep - 1, 1)),
    )


def _words(tile, dtype):
    """Neighbours of a tile [rows, width] of bytes or of 16-bit numbers, in the halves of words [rows, width / 2]."""
    pairs = tile if tile.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(tile, jnp.uint16)
    pairs = pairs.reshape(tile.shape[0], tile.shape[1] // 2, 2).astype(jnp.uint32)
    side = jax.lax.broadcasted_iota(jnp.uint32, pairs.shape, 2)
    return (pairs << (side * np.uint32(16))).sum(2, dtype=jnp.uint32)


def _places(code, h: int) -> list:
    """For both kept numbers of half h the bits of their places, as masks of the halves of words."""
    bit = lambda k: ((code >> np.uint32(k)) & np.uint32(0x00010001)) * np.uint32(0xFFFF)
    return [[bit(4 * h + 2 * e + k) for k in range(2)] for e in range(KEPT)]


def _number(kept, places, c: int, dtype):
    """A tile of W_(h, c): the kept numbers of half h whose place is c, zero elsewhere."""
    there = lambda mask, wanted: mask if wanted else ~mask
    one, other = (v & there(low, c % 2) & there(high, c // 2) for v, (low, high) in zip(kept, places))
    halves = jax.lax.bitcast_convert_type(one | other, jnp.uint16)
    return jax.lax.bitcast_convert_type(halves, dtype).reshape(one.shape[0], -1)


@jt.function
def _consume(mem: _Memory, first: int, rounds: int, form: Form):
    """The sums [64, columns] over every `deep`-th round from the first on."""
    acc, dtype = jt.zeros((ROWS, form.columns), jnp.float32), mem.x.dtype
    for k in jt.range(first, rounds, form.deep):
        mem.full.at(k).wait()
        code = _words(mem.codes.at(k).load(), dtype)
        for h in range(HALVES):
            at, places = HALVES * k + h, _places(code, h)
            kept = [_words(ring.at(k).load(), dtype) for ring in mem.values[KEPT * h : KEPT * h + KEPT]]
            mem.x_full.at(at).wait()
            x = mem.x.at(at)
            for c in range(PLACES):
                right = x[c * form.columns : (c + 1) * form.columns]
                acc = jt.dot_async(_number(kept, places, c, dtype), right.T, acc)
                if c % form.together == form.together - 1:
                    acc = jt.dot_wait(acc)
            mem.x_empty.at(at).arrive()
        mem.empty.at(k).arrive()
    return acc


def _grid(x, values, codes, **_):
    return jt.cdiv(codes.shape[0], ROWS)


@jt.kernel(
    out_type=lambda x, values, codes, *, m, **_: jax.ShapeDtypeStruct((m, codes.shape[0]), jnp.float32),
    grid=_grid,
)
def hopper_sparse24(x, values, codes, y, *, m: int, form: Form):
    """y [m, n] of a weight (values [n, 4, p], codes [n, p]) and x [8 columns, p]: rows of x by halves and places, with
    zeros where there are fewer than `columns`."""
    # Yᵀ = sum_(h, c) W_(h, c) X_(h, c)ᵀ, a sum over rounds of `width` bytes of codes
    tile = jt.program_id(0)
    mem, rounds = _memory(x, values, form), jt.cdiv(codes.shape[1], form.width)
    for j in range(form.deep):
        with jt.role(f"consumer{j}", warps=4, registers=form.registers):
            acc = _consume(mem, j, rounds, form)
            if j:
                mem.partial[j - 1].store(acc)
                mem.done[j - 1].arrive()
            else:
                for i, partial in enumerate(mem.partial):
                    mem.done[i].wait(0)
                    acc = acc + partial.load()
                y.tiles(form.columns, ROWS)[0, tile] = acc.T
    with jt.role("producer", warps=1, registers=24):
        for k in jt.range(rounds):
            full = mem.full.at(k)
            mem.empty.at(k).wait(before=True)
            full.expect(sum(ring.nbytes for ring in (*mem.values, mem.codes)))
            for n, ring in enumerate(mem.values):
                jt.async_copy(values.tiles(ROWS, None, form.width).at[tile, n, k], ring.at(k), full)
            jt.async_copy(codes.tiles(ROWS, form.width).at[tile, k], mem.codes.at(k), full)
    with jt.role("feeder", warps=1, registers=24):
        for k in jt.range(rounds):
            for h in range(HALVES):
                at = HALVES * k + h
                mem.x_empty.at(at).wait(before=True)
                mem.x_full.at(at).expect(mem.x.nbytes)
                jt.async_copy(x.tiles(PLACES * form.columns, form.width).at[h, k], mem.x.at(at), mem.x_full.at(at))


def choice(m: int) -> Form:
    """The form for m rows of x: the quickest of three to five that an H200 timed for each number of columns."""
    columns = max(8, jt.next_power_of_2(m))
    if columns == 16:
        return Form(columns, deep=3, slots=6, x_slots=12, registers=152, width=32)
    if columns == 64:
        return Form(columns, deep=2, slots=4, x_slots=8, width=32)
    return Form(columns, deep=2, slots=4, x_slots=8 if columns == 8 else 4)


def misfit(x, values, codes) -> str | None:
    """Why the kernel does not compute the product of x [m, k] and a 2:4 weight, None where it does and is the
    quickest."""
    sizes = *x.shape, *codes.shape
    return first_unmet(
        (all(isinstance(n, int) and n > 0 for n in sizes), "sizes are 0, or not known"),
        (x.shape[0] in TAKEN, f"{x.shape[0]} rows are as quick otherwise"),
        (x.dtype in (jnp.bfloat16, jnp.float16) and values.dtype == x.dtype, "the two are not 16-bit floats alike"),
        (codes.shape[1] % 16 == 0, f"rows of {codes.shape[1]} bytes of codes are no lines of copies"),
        (gpu_tiles.on_one_device(), "rows may be shared out among several devices"),
    )


def product(x, values, codes) -> jax.Array:
    """The float32 product [m, n] of x [m, k] and a weight with values [n, 4, k / 8] and codes [n, k / 8]."""
    form, (m, k) = choice(x.shape[0]), x.shape
    parts = x.reshape(m, HALVES, k // (HALVES * PLACES), PLACES).transpose(1, 3, 0, 2)
    parts = jnp.pad(parts, [(0, 0), (0, 0), (0, form.columns - m), (0, 0)])
    return hopper_sparse24(parts.reshape(-1, parts.shape[-1]), values, codes, m=m, form=form)
