"""Three to 16 rows of x times a matrix in memory, on Hopper at the block level: yᵀ = W xᵀ, W read once.

Such a product is as fast as W comes from memory, as one of one row is (`hopper_gemv`), but so many rows take the tensor
cores. Rows of W are the rows of the product, of which an instruction has 64, and the rows of x are its columns. A block
stays on each multiprocessor with a deep ring of W. All blocks get an equal share of the rounds (stream-K), whichever
rows of W these belong to, and the last block that has some of a row's rounds puts together what they gave.

Where `jt.config(overlap=True)` promises that the kernel in front does not make W, the ring is filled while that kernel
still ends: its role is an early one. A role of its own brings x, so that W does not wait for it.

More rows are quicker in tiles (`matmul`): x comes from the cache again for each round, so that 64 rows of it are as
many bytes as those of W in a round. So are matrices of many rows, from 9 rows of x on: what an early role saves is
little of their time.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.dispatch import first_unmet
from jtile.ops.epilogues import ACTIVATIONS

ROWS = 64  # rows of W in a tile
FEW = 8  # rows of x for which a matrix may have any number of rows
# Rows of x, at most. Of 16, all products in tiles took 1396 us for a step of eight layers of Llama-3.1-8B, and 1373
# with those of [4096, 4096] and [4096, 14336] in this kernel; with that of [6144, 4096], too, 1388.
MOST = 16
_SLOT = 32 << 10  # bytes of W in a round
_SLOTS, _X_SLOTS = 6, 3  # rounds of W on their way at most, and of x at least
_RINGS = 222 << 10  # bytes of shared memory for both rings: a norm's block, which has few, finds room beside them
_REGISTERS = 152  # registers of a thread that multiplies
_HELD = 4096  # numbers of a tile's parts that are put together at a time


@dataclasses.dataclass(frozen=True)
class _Share:
    """The rounds that a program has, of the rounds of all tiles one behind the other.

    The program begins with the tile that it shares with the program behind it, so that it ends with a tile of its own
    where it has one: putting a shared tile together takes time, in which W goes on coming.

    Attributes:
      rounds: rounds of a tile. size: rounds of a program.
      begin, end: the program's first round, and the one behind its last. turn: where the tile begins that comes first.
    """

    rounds: int
    size: int
    begin: jax.Array
    end: jax.Array
    turn: jax.Array

    @property
    def count(self):
        return self.end - self.begin

    def at(self, k):
        """The k-th round of the program: u, its number among the rounds of all tiles."""
        u = self.turn + k
        return jnp.where(u < self.end, u, u - self.count)

    def left(self, u):
        """How many rounds from u on are of the same tile and come one after the other."""
        stop = jnp.where(u >= self.turn, self.end, self.turn)
        return jnp.minimum(self.rounds - jax.lax.rem(u, jnp.int32(self.rounds)), stop - u)

    def programs(self, tile):
        """The first and the last program that have rounds of a tile."""
        size = jnp.int32(self.size)
        return jax.lax.div(tile * self.rounds, size), jax.lax.div(tile * self.rounds + self.rounds - 1, size)


def _share(rounds: int, tiles: int, programs: int) -> _Share:
    size = jt.cdiv(rounds * tiles, programs)
    begin = jnp.minimum(jt.program_id(0) * size, rounds * tiles)
    end = jnp.minimum(begin + size, rounds * tiles)
    turn = jax.lax.div(end, jnp.int32(rounds)) * rounds
    return _Share(rounds, size, begin, end, jnp.maximum(turn, begin))


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers and barriers of a program.

    Attributes:
      rings: for each weight a ring of 64 rows of it. x: the ring of x.
      full, empty: a round of W has come; has been read. x_full, x_empty: a round of x has come; has been read.
    """

    rings: list[jt.Shared]
    x: jt.Shared
    full: jt.Barrier
    empty: jt.Barrier
    x_full: jt.Barrier
    x_empty: jt.Barrier


def _place(program, begins):
    """Where a program leaves the sums of a tile that it shares; `begins`: the tile begins in it."""
    return 2 * program + begins.astype(jnp.int32)


@jt.function
def _sums(mem: _Memory, first, count):
    """The sums [64, columns] of each weight, over `count` rounds."""
    sums = tuple(jt.zeros((ROWS, mem.x.shape[0]), jnp.float32) for _ in mem.rings)
    for k in jt.range(first, first + count):
        mem.full.at(k).wait()
        mem.x_full.at(k).wait()
        sums = tuple(jt.dot_async(ring.at(k), mem.x.at(k).T, acc) for ring, acc in zip(mem.rings, sums))
        sums = jt.dot_wait(*sums, pending=0)
        sums = sums if isinstance(sums, tuple) else (sums,)
        mem.empty.at(k).arrive()
        mem.x_empty.at(k).arrive()
    return sums


@jt.function
def _together(parts, share: _Share, tile, like):
    """The sums of a tile that several programs p have, as `like`; c: `side` of these at a time."""
    first, last = share.programs(tile)
    total = tuple(jnp.zeros(one.shape, jnp.float32) for one in like)
    side = min(max(_HELD // (len(like) * like[0].size), 1), 4)
    for c in jt.range(jt.cdiv(last + 1 - first, side)):
        found = []
        for p in (first + c * side + k for k in range(side)):  # all loads are on their way at once
            begins = p * share.size <= tile * share.rounds
            at, there = _place(p, begins), p <= last
            whole = slice(None)
            found.append([jt.load(parts, (at, w, whole, whole), mask=there) for w in range(len(like))])
        for part in found:
            total = tuple(a + b for a, b in zip(total, part))
    return total


@jt.function
def _consume(mem: _Memory, share: _Share, bias, y, parts, activation):
    """The role that multiplies: all tiles of the program. u: a round, see `_Share.at`; w: a weight."""
    done = jt.counters("tiles", jt.cdiv(y.shape[1], ROWS))
    k = jnp.int32(0)
    while k < share.count:
        u = share.at(k)
        tile, count = jax.lax.div(u, jnp.int32(share.rounds)), share.left(u)
        sums = _sums(mem, k, count)
        if count == share.rounds:
            _write(sums, bias, y, tile, activation)
        else:
            at = _place(jt.program_id(0), u == tile * share.rounds)
            for w, one in enumerate(sums):
                parts[at, w, :, :] = one
            first, last = share.programs(tile)
            if jt.arrive(done, tile, last - first + 1):
                _write(_together(parts, share, tile, sums), bias, y, tile, activation)
        k = k + count


def _write(sums, bias, y, place, activation) -> None:
    """Write y for 64 rows of W from the sums of each weight."""
    one, *other = sums
    if bias is not None:
        one = one + bias.tiles(None, ROWS)[0, place].astype(jnp.float32)[:, None]
    out = ACTIVATIONS[activation](one)
    out = out * other[0] if other else out
    y.tiles(one.shape[1], ROWS)[0, place] = out.T.astype(y.dtype)


@jt.function
def _produce(mem: _Memory, share: _Share, weights):
    """The role that fills the rings of W; r: the round of its tile."""
    depth = mem.x.shape[1]
    for k in jt.range(share.count):
        u = share.at(k)
        tile, r = jax.lax.div(u, jnp.int32(share.rounds)), jax.lax.rem(u, jnp.int32(share.rounds))
        mem.empty.at(k).wait(before=True)
        mem.full.at(k).expect(sum(ring.nbytes for ring in mem.rings))
        for w, ring in zip(weights, mem.rings):
            jt.async_copy(w.tiles(ROWS, depth).at[tile, r], ring.at(k), mem.full.at(k))


@jt.function
def _feed(mem: _Memory, share: _Share, x):
    """The role that fills the ring of x; r: the round of its tile."""
    for k in jt.range(share.count):
        r = jax.lax.rem(share.at(k), jnp.int32(share.rounds))
        mem.x_empty.at(k).wait(before=True)
        mem.x_full.at(k).expect(mem.x.nbytes)
        jt.async_copy(x.tiles(*mem.x.shape).at[0, r], mem.x.at(k), mem.x_full.at(k))


def _types(x, weights, *_, columns: int, parts: int, out_dtype: str, **__):
    y = jax.ShapeDtypeStruct((x.shape[0], weights[0].shape[0]), jnp.dtype(out_dtype))
    return y, jax.ShapeDtypeStruct((2 * parts, len(weights), ROWS, columns), jnp.float32)


@jt.kernel(out_type=_types, grid=lambda *_, parts, **__: parts)
def hopper_rows(
    x, weights: tuple, bias, y, sums,
    *, columns: int, depth: int, slots: int, x_slots: int, parts: int, activation, out_dtype: str,
    early: bool = False,
):  # fmt: skip
    """y [m, out] of x [m, in], weights [out, in], one or two (y = act(x Gᵀ) * (x Uᵀ)), and bias [1, out] or None; sums:
    what programs share.

    A tile has 64 rows of W, or of each of two, and a round `depth` terms of it; `parts` programs."""
    # Yᵀ = W Xᵀ, a sum over rounds of `depth` terms
    ring = lambda shape, n: jt.alloc(shape, x.dtype, slots=n)
    mem = _Memory(
        rings=[ring((ROWS, depth), slots) for _ in weights],
        x=ring((columns, depth), x_slots),
        full=jt.barrier(slots),
        empty=jt.barrier(slots),
        x_full=jt.barrier(x_slots),
        x_empty=jt.barrier(x_slots),
    )
    share = _share(jt.cdiv(x.shape[1], depth), jt.cdiv(y.shape[1], ROWS), parts)
    with jt.role("consumer", warps=4, registers=_REGISTERS):
        _consume(mem, share, bias, y, sums, activation)
    with jt.role("producer", warps=1, registers=24, early=early):
        _produce(mem, share, weights)
    with jt.role("feeder", warps=1, registers=24):
        _feed(mem, share, x)


def choice(m: int, weights: int, itemsize: int = 2) -> dict[str, int]:
    """Meta-parameters for m rows of x and so many weights."""
    columns = max(jt.next_power_of_2(m), 8)
    depth = _SLOT // (itemsize * ROWS * weights)
    of_x = columns * depth * itemsize
    slots = min(_SLOTS, (_RINGS - _X_SLOTS * of_x) // _SLOT)
    x_slots = min((_RINGS - slots * _SLOT) // of_x, slots)
    return dict(columns=columns, depth=depth, slots=slots, x_slots=x_slots)


def misfit(x, weights: tuple) -> str | None:
    """Why the kernel does not compute x [m, in] times these [out, in], None where it does."""
    m = x.shape[0]
    return gpu_tiles.misfit_of_stream(x, weights) or first_unmet(
        (2 < m <= MOST, f"there are {m} rows, not 3 to {MOST}"),
        (m <= FEW or _small(weights), f"tiles are quicker for {m} rows times so large a matrix"),
    )


def _small(weights: tuple) -> bool:
    """Whether a matrix has so few rows that two programs or more share each of its tiles."""
    return len(weights) == 1 and 2 * jt.cdiv(weights[0].shape[0], ROWS) <= gpu_tiles.processors()


def product(x, weights: tuple, bias=None, *, activation=None, out_dtype=jnp.float32) -> jax.Array:
    """The product [m, out] of x [m, in] and one weight, or the gated one of two; bias [1, out]."""
    meta = choice(x.shape[0], len(weights), x.dtype.itemsize)
    meta |= dict(parts=gpu_tiles.processors(), activation=activation, out_dtype=jnp.dtype(out_dtype).name)
    return hopper_rows(x, weights, bias, early=gpu_tiles.overlaps(), **meta)[0]
