"""Products of several rows with packed quantised weights on Hopper, at the block level: yᵀ = W xᵀ.

Words of codes come through tensor maps; warps make numbers of them between shared memory and the tensor cores, two at a
time and without a conversion (a code or-ed into the mantissa of a number), and multiply from registers; x is the other
operand. So rows of W are the rows of the product, of which an instruction has 64, and the rows of x are its columns:
any number from 8 on.

Weights are rounded to the dtype of x before they are multiplied, as they would be if they were stored dequantised.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.dispatch import first_unmet
from jtile.ops.operands import Weight
from jtile.ops.quantized_tensor import BLOCK

FOUR_BIT = ("q4_0", "q4_1")
ROWS = 64  # rows of W of a consumer
DEPTH = 256  # weights of a row that a round takes
WORDS = 32  # words in a row of a buffer: 128 bytes
PIECE = 64  # weights of a row that are made and multiplied at once
_UP, DOWN = 2.0**110, 2.0**23  # together they bring codes times 2^-133 back; a float16 times the first is a bfloat16
# What is stored of a code, less the code. Of Q4_1 it is 8, but added to the minimum it would cost that a bit and more.
LEAST = {"q4_0": 8, "q8_0": 128, "int8": 128}
_UP_FLOAT8 = 2.0 ** (120 - 23)  # this and DOWN bring codes times 2^-120 back


def _codes(words, kind: str, dtype):
    """The codes of words [rows, units, 4] as floats, exact: [rows, units, 4, parts, 2]; bfloat16: times 2^-133.

    In bfloat16 the bits of a code are a subnormal number: the field's, counted from the least code on, but of Q4_1, in
    which it is less that of 0. Of two fields of 4 bits in a byte the upper one stays where it is, and counts 16 times.
    In float16 a code ends the mantissa of 1024 + code.

    Codes that are floats of 8 bits stand where a bfloat16 has such fields, times 2^-120, or a float16, times 2^-8.
    """
    # u: the word that each part of it is cut out of
    four, half = kind in FOUR_BIT, dtype == jnp.float16
    shape = (*words.shape, 4 if four else 2)
    part = jax.lax.broadcasted_iota(jnp.uint32, shape, 3)
    number = lambda v: jax.lax.bitcast_convert_type(v, dtype)
    pair = lambda v: number(jax.lax.bitcast_convert_type(v, jnp.uint16))
    u = jnp.broadcast_to(words[:, :, :, None], shape)
    if kind == "fp8":
        u = u << (np.uint32(8) - part * np.uint32(8))
        down, field = (1, 0x3F803F80) if half else (4, 0x07F007F0)
        return pair(u & np.uint32(0x80008000) | u >> np.uint32(down) & np.uint32(field))
    if half:
        field, more = (0x000F000F, 1032) if four else (0x00FF00FF, 1152)
        u = u >> part * np.uint32(4 if four else 8)
        return pair(u & np.uint32(field) | np.uint32(0x64006400)) - dtype(more)
    if not four:
        return pair(u >> part * np.uint32(8) & np.uint32(0x00FF00FF))
    upper = part % np.uint32(2) == 1
    a = pair(u >> part // np.uint32(2) * np.uint32(8) & jnp.where(upper, np.uint32(0x00F000F0), np.uint32(0x000F000F)))
    if kind in LEAST:
        return a
    zero = jnp.where(upper, np.uint32(128), np.uint32(8)).astype(jnp.uint16)
    return a - jnp.broadcast_to(number(zero)[..., None], a.shape)


def _operand(words, scale, shift, kind: str, dtype):
    """a: 64 columns of W [rows, 64] from words [rows, units, 4], and `_scales` of two blocks; bfloat16: times 2^-23."""
    rows, units, _ = words.shape
    a = _codes(words, kind, dtype)
    parts = a.shape[3] // 2
    a = a.reshape(rows, 2, units // 2, 4, parts, 2, 2)
    if scale is not None:
        scale = scale.reshape(rows, 2, 1, 1, 1, *(scale.shape[2:] or (1,)), 1)
    elif dtype == jnp.bfloat16 or kind == "fp8":
        scale = dtype((_UP_FLOAT8 if kind == "fp8" else _UP) if dtype == jnp.bfloat16 else 256)
    if dtype == jnp.bfloat16 and kind != "fp8":  # what is added is exact, and the sum is rounded once
        shift = dtype(-LEAST[kind] / DOWN) if shift is None else shift.reshape(rows, 2, 1, 1, 1, 1, 1)
        a, scale, shift = (jnp.broadcast_to(t, a.shape).astype(jnp.float32) for t in (a, scale, shift))
        a = (a * scale + shift).astype(dtype)
    else:
        a = a if scale is None else a * scale
        a = a if shift is None else a + shift.reshape(rows, 2, 1, 1, 1, 1, 1)
    return a.reshape(rows, units, 4, 2 * parts, 2).transpose(0, 1, 3, 2, 4).reshape(rows, PIECE)


def _scales(tiles, kind: str, dtype) -> list:
    """The factors of the codes of blocks and the terms added to them, if there are any, of scales (and minima)
    [rows, blocks].

    They are [rows, blocks]; for 4-bit codes times 2^-133 factors are [rows, blocks, 2]: the second of two is for the
    upper fields, which count 16 times.
    """
    d, *low = (t.astype(jnp.float32) for t in tiles)
    shift = [m + 8 * d for m in low]  # added to d (q - 8)
    if dtype == jnp.float16:
        d = d * 256 if kind == "fp8" else d
        return [t.astype(dtype) for t in (d, *shift)]
    up = _UP_FLOAT8 if kind == "fp8" else _UP
    d, shift = d.astype(dtype), [m.astype(dtype) * dtype(1 / DOWN) for m in shift]  # powers of two come two at a time
    if kind in LEAST:
        shift = [d * dtype(-LEAST[kind] / DOWN)]
    if kind not in FOUR_BIT:
        return [d * dtype(up), *shift]
    upper = jax.lax.broadcasted_iota(jnp.int32, (*d.shape, 2), 2) == 1
    d = jnp.broadcast_to(d[:, :, None], upper.shape) * jnp.where(upper, dtype(up / 16), dtype(up))
    return [d, *shift]


def cover_of(array, inner: int) -> tuple[int, int]:
    """How many scales of a row belong to a round, and how many a buffer has: 16 bytes at least, as tensor maps ask."""
    of_round = array.shape[-1] * DEPTH // inner
    return of_round, max(of_round, 16 // array.dtype.itemsize)


def _of_round(tile, k, of_round: int):
    """The scales of round k in a buffer of scales, float [rows, cover], one for each block: [rows, DEPTH / BLOCK]."""
    rows, cover = tile.shape
    if cover > of_round:
        parts = tile.astype(jnp.float32).reshape(rows, cover // of_round, of_round)
        mine = jax.lax.broadcasted_iota(jnp.int32, parts.shape, 1) == k % (cover // of_round)
        tile = jnp.where(mine, parts, jnp.float32(0)).sum(1)
    shape = rows, of_round, DEPTH // BLOCK // of_round
    return tile if shape[2] == 1 else jnp.broadcast_to(tile[:, :, None], shape).reshape(rows, DEPTH // BLOCK)


def _columns(x, n: int) -> list:
    """The tile in parts of at most n columns."""
    if x.shape[1] <= n:
        return [x]
    half = x.shape[1] // 2
    return [*_columns(x[:, :half], n), *_columns(x[:, half:], n)]


def _type(x, weight, *, splits, out_dtype, **_):
    return jax.ShapeDtypeStruct((splits, x.shape[0], weight.codes.shape[0]), jnp.dtype(out_dtype))


def _grid(x, weight, *, high, columns, splits, **_):
    return jt.cdiv(weight.codes.shape[0], high * ROWS), jt.cdiv(x.shape[0], columns), splits


@dataclasses.dataclass(frozen=True)
class Memory:
    """Buffers and barriers of a program.

    Attributes:
      words: the rings of words, one for each 64 rows of W.
      of_blocks: for each 64 rows, the rings of the scales (and minima) that come with words.
      of_round: how many numbers of a row of each array of `of_blocks` belong to a round.
      x: the ring of x.
      partial: the sums of each consumer that has some of the rounds, but the first, for each 64 rows.
      full, empty: a round of the words has come; has been read.
      x_full, x_empty: a piece of x has come; has been read.
      done: the sums in `partial` are there.
    """

    words: list[list[jt.Shared]]
    of_blocks: list[list[jt.Shared]]
    of_round: list[int]
    x: jt.Shared
    partial: list[list[jt.Shared]]
    full: jt.Barrier
    empty: jt.Barrier
    x_full: jt.Barrier
    x_empty: jt.Barrier
    done: jt.Barrier


def memory(x, blocks, *, wide: int, high: int, deep: int, columns: int, slots: int, x_slots: int, pieces: int):
    covers = [cover_of(a, x.shape[1]) for a in blocks]
    return Memory(
        words=[[jt.alloc((ROWS, WORDS), jnp.uint32, slots=slots) for _ in range(wide)] for _ in range(high)],
        of_blocks=[
            [jt.alloc((ROWS, cover), a.dtype, slots=slots) for a, (_, cover) in zip(blocks, covers)]
            for _ in range(high)
        ],
        of_round=[n for n, _ in covers],
        x=jt.alloc((columns, PIECE * pieces), x.dtype, slots=x_slots),
        partial=[[jt.alloc((ROWS, columns), jnp.float32) for _ in range(high)] for _ in range(deep - 1)],
        full=jt.barrier(slots),
        empty=jt.barrier(slots, arrivals=high),
        x_full=jt.barrier(x_slots),
        x_empty=jt.barrier(x_slots, arrivals=high),
        done=jt.barrier(max(high * (deep - 1), 1)),
    )


def _round(mem: Memory, i: int, k, first, kind: str, dtype):
    """Words [64, 8, 4] and scales of round k, in registers; `first`: the program's first round among those of a row."""
    words = [ring.at(k).load().reshape(ROWS, 8, 4) for ring in mem.words[i]]
    tiles = [_of_round(ring.at(k).load(), first + k, n) for ring, n in zip(mem.of_blocks[i], mem.of_round)]
    return words, _scales(tiles, kind, dtype) if tiles else []


def _piece(words, scales, p: int, kind: str, dtype):
    """64 columns of W as numbers, the p-th of a round."""
    units = 2 * len(words)
    own = [t[:, 2 * p : 2 * p + 2] for t in scales] + [None, None]
    return _operand(words[p * units // 8][:, p * units % 8 : p * units % 8 + units], *own[:2], kind, dtype)


def bring(mem: Memory, slot, k, codes: jt.Ref, blocks: list[jt.Ref], places: list[tuple]) -> None:
    """Start to copy round k of the words and scales to the buffers of round `slot` of the rings. places: for each 64
    rows of W, their tile, behind the indices of axes in front of the rows."""
    full, wide = mem.full.at(slot), len(mem.words[0])
    full.expect(sum(t.nbytes for rings in (*mem.words, *mem.of_blocks) for t in rings))
    view = lambda a, columns: a.tiles(*(None,) * (a.ndim - 2), ROWS, columns)
    for i, at in enumerate(places):
        for n, ring in enumerate(mem.words[i]):
            jt.async_copy(view(codes, WORDS).at[(*at, k * wide + n)], ring.at(slot), full)
        for a, ring, n in zip(blocks, mem.of_blocks[i], mem.of_round):
            cover = ring.shape[1]
            place = k if cover == n else k // (cover // n)
            jt.async_copy(view(a, cover).at[(*at, place)], ring.at(slot), full)


@jt.function
def _taken(mem: Memory, i: int, k, first, kind: str):
    """What `_round` gives, when it has come; its place in the ring is free then."""
    mem.full.at(k).wait()
    found = _round(mem, i, k, first, kind, mem.x.dtype.type)
    mem.empty.at(k).arrive()  # words and scales are in registers
    return found


@jt.function
def _added(mem: Memory, acc, k, words, scales, kind: str, taken: tuple[int, int], whole: bool):
    """The sums acc and the products of round k; the product of its last piece is still added unless `whole`."""
    x, count = mem.x, DEPTH // PIECE
    pieces, (begin, end) = x.shape[1] // PIECE, taken
    for p in range(count):
        at = k * (count // pieces) + p // pieces
        a = _piece(words, scales, p, kind, x.dtype.type)
        if p % pieces == 0:
            mem.x_full.at(at).wait()
        b = x.at(at)
        b = b if pieces == 1 else b[:, PIECE * (p % pieces) : PIECE * (p % pieces + 1)]
        b = b if end - begin == x.shape[0] else b[begin:end]
        acc = jt.dot_async(a, b.T, acc)
        if p % pieces == pieces - 1 and (whole or p < count - 1):
            acc = _read(mem, acc, at)
    return acc


@jt.function
def _read(mem: Memory, acc, at):
    """The sums acc, to which nothing is added any more: what is at `at` of the ring of x has been read."""
    acc = jt.dot_wait(acc)
    mem.x_empty.at(at).arrive()
    return acc


@jt.function
def consume(
    mem, i: int, first_round: int, rounds: int, step: int, kind: str, first, taken: tuple[int, int] | None = None,
    ahead: bool = False,
):  # fmt: skip
    """The sums [64, columns] of a bᵀ, for 64 rows a of W and the rows b of x, over every `step`-th round; `first`: see
    `_round`; `taken`: the first of the rows of x and the one behind the last, where not all are taken; `ahead`: the
    words and scales of a round are loaded while the last piece of the one before is multiplied. Numbers are made while
    other roles' products run; making those of the next piece while the role's own product runs gained nothing for 16,
    64 and 256 rows of x."""
    taken = taken or (0, mem.x.shape[0])
    acc = jt.zeros((ROWS, taken[1] - taken[0]), jnp.float32)
    if not ahead:
        for k in jt.range(first_round, rounds, step):
            words, scales = _taken(mem, i, k, first, kind)
            acc = _added(mem, acc, k, words, scales, kind, taken, whole=True)
        return acc
    words, scales = _taken(mem, i, jnp.int32(first_round), first, kind)
    for k in jt.range(first_round, rounds - step, step):
        acc = _added(mem, acc, k, words, scales, kind, taken, whole=False)
        words, scales = _taken(mem, i, k + step, first, kind)
        acc = _read(mem, acc, (k + 1) * (DEPTH // mem.x.shape[1]) - 1)
    return _added(mem, acc, jnp.int32(rounds - step + first_round), words, scales, kind, taken, whole=True)


def _together(mem: Memory, acc, i: int):
    """The sums `acc` plus those of the consumers that had the other rounds."""
    for j, partial in enumerate(mem.partial):
        mem.done[j * len(partial) + i].wait(0)
        acc = acc + partial[i].load()
    return acc


def _write(acc, mem: Memory, y, split, column, row, i: int, rounds: int):
    """Write sums [64, columns] to y: by a copy out of a buffer of x that everybody has read, if y is as wide as x."""
    columns, pieces = mem.x.shape[0], mem.x.shape[1] // PIECE
    if pieces == 1 and y.dtype == mem.x.dtype and y.shape[2] * y.dtype.itemsize % 16 == 0:
        at = rounds * (DEPTH // PIECE) + i
        mem.x_empty.at(at).wait(before=True)
        mem.x.at(at).store(acc.T.astype(y.dtype))
        jt.fence_shared()
        jt.async_copy(mem.x.at(at), y.tiles(None, columns, ROWS).at[split, column, row])
        jt.store_wait()
        return
    parts = _columns(acc, 64)
    view = y.tiles(None, columns // len(parts), ROWS)
    for n, part in enumerate(parts):
        view[split, column * len(parts) + n, row] = part.T.astype(y.dtype)


@jt.kernel(out_type=_type, grid=_grid, sharding="m _, o _, o _, o _ -> _ m o")
def hopper_quantized_product(
    x, weight: Weight, y, *, kind: str, high: int, deep: int, columns: int, splits: int, slots: int,
    x_slots: int, pieces: int, registers: int, out_dtype: str = "float32",
):  # fmt: skip
    """Sums [splits, m, out] of x [m, in] and a weight: codes [out, words], scale [out, in / group], minimum like it,
    which is read for Q4_1 alone.

    A program has `high * 64` rows of W, `columns` of x and a part of the rounds. Consumer (j, i) takes the i-th 64 of
    the rows and every `deep`-th round from the j-th on: always the same slots, for a barrier tells only one phase from
    the next. x comes `pieces` pieces of 64 at a time. A block prepares itself while the kernel in front of it ends;
    the one behind may start then, whose early roles so see what stands in front of this one (a step's lengths).
    """
    # Yᵀ = W Xᵀ, a sum over rounds of 256 weights
    tile, column, split = (jt.program_id(k) for k in range(3))
    dtype, wide, codes, scale = x.dtype.type, 1 if kind in FOUR_BIT else 2, weight.codes, weight.scale
    last, ahead = weight.scaled_last(kind), columns > 128 and kind != "q4_1"  # its minima would take registers, too
    blocks = [] if last else [scale, weight.minimum] if kind == "q4_1" else [scale]
    mem = memory(x, blocks, wide=wide, high=high, deep=deep, columns=columns, slots=slots, x_slots=x_slots,
                  pieces=pieces)  # fmt: skip
    rounds, each = jt.cdiv(codes.shape[1], WORDS * wide) // splits, DEPTH // PIECE // pieces
    for j in range(deep):
        for i in range(high):
            with jt.role(f"consumer{j}{i}", warps=4, registers=registers, early=True):
                jt.wait_for_kernels(hold=True)
                acc = consume(mem, i, j, rounds, deep, kind, split * rounds, ahead=ahead)
                if j:
                    mem.partial[j - 1][i].store(acc)
                    mem.done[(j - 1) * high + i].arrive()
                else:
                    acc = _together(mem, acc, i)
                    acc = acc * jnp.float32(DOWN) if dtype == jnp.bfloat16 else acc
                    acc = acc * scale.tiles(ROWS, 1)[tile * high + i, 0] if last else acc
                    _write(acc, mem, y, split, column, tile * high + i, i, rounds)
    with jt.role("producer", warps=1, registers=24, early=True):
        jt.wait_for_kernels(hold=True)
        for k in jt.range(rounds):
            mem.empty.at(k).wait(before=True)
            bring(mem, k, split * rounds + k, codes, blocks, [(tile * high + i,) for i in range(high)])
    with jt.role("feeder", warps=1, registers=24, early=True):  # its ring has fewer rounds: words do not wait for x
        jt.wait_for_kernels(hold=True)
        for k in jt.range(rounds * each):
            mem.x_empty.at(k).wait(before=True)
            mem.x_full.at(k).expect(mem.x.nbytes)
            place = x.tiles(columns, PIECE * pieces).at[column, split * rounds * each + k]
            jt.async_copy(place, mem.x.at(k), mem.x_full.at(k))


def choice(m: int, out: int, inner: int, kind: str) -> dict[str, Any]:
    """Meta-parameters: for few rows of x four consumers, which share the rounds; for many two, with all registers.

    Splits where programs would be less than half of the processors. The slots of rings are multiples of `deep`.
    """
    return dict(_choice(m, out, inner, kind, gpu_tiles.processors()))


_LONG = 8  # rounds of a part of a large tile, at least: the kernel that adds parts up takes as long as two


def _splits(tiles: int, rounds: int, processors: int, least: int) -> int:
    """In how many parts of `least` rounds or more a tile is best made, so that most processors have one."""
    fits = [n for n in (1, 2, 4) if rounds % n == 0 and n * tiles <= processors and n * least <= rounds]
    return max(fits, default=1)


# Columns of a tile of 128 rows of W -> microseconds of a round of it on an H200; what rounds take in addition where all
# multiprocessors work, since power lowers the clock; what a kernel takes besides its rounds; and bytes that sums of
# parts, written, read and added up, move in a microsecond.
ROUND, POWER, START, ADDED = {256: 2.05, 128: 1.21, 64: 0.61}, 0.49, 3.3, 4.8e6
BETTER = 0.96  # of the time of larger tiles, at most


def predicted_us(programs: int, rounds: int, one: float, processors: int) -> float:
    """Predicted microseconds of a kernel of so many programs with so many rounds, one of which takes `one`."""
    waves = jt.cdiv(programs, processors)
    return START + waves * rounds * one * (1 + POWER * programs / (waves * processors))


def tiles_of_many(m: int, out: int, inner: int, processors: int) -> tuple[int, int, float]:
    """(columns, splits, predicted microseconds) of the tiles for more than 64 rows of x."""
    best, rounds = (0, 0, float("inf")), jt.cdiv(inner, DEPTH)
    for columns in ROUND:
        tiles = jt.cdiv(out, 2 * ROWS) * jt.cdiv(m, columns)
        for n in (1, 2, 4) if columns <= jt.next_power_of_2(m) else ():
            if n > 1 and (rounds % n or n * tiles > processors or n * _LONG > rounds):
                continue
            sums = m * out * (8 * n + 2) / ADDED if n > 1 else 0.0
            us = predicted_us(n * tiles, rounds // n, ROUND[columns], processors) + sums
            if us < best[2] * (1 if columns == best[0] else BETTER):
                best = columns, n, us
    return best


@functools.lru_cache(maxsize=1024)
def _choice(m: int, out: int, inner: int, kind: str, processors: int) -> dict[str, Any]:
    columns, four = max(jt.next_power_of_2(m), 8), kind in FOUR_BIT
    many = tiles_of_many(m, out, inner, processors) if columns > 64 else (columns, 1, 0.0)
    if many[0] > 64:
        return dict(high=2, deep=1, columns=many[0], splits=many[1], slots=4 if four else 2,
                    x_slots=1024 // many[0], pieces=1, registers=232)  # fmt: skip
    if columns > 64:
        slots = 6 if four else 2 if kind == "q8_0" else 4
        return dict(high=2, deep=2, columns=64, splits=many[1], slots=slots, x_slots=8, pieces=1, registers=112)
    high = 2 if jt.cdiv(out, 2 * ROWS) >= processors // 2 else 1
    deep = 2 if columns == 64 else 4 // high
    rounds, tiles = jt.cdiv(inner, DEPTH), jt.cdiv(out, high * ROWS)
    splits = _splits(tiles, rounds, processors, deep)
    slots = 6 if four and high == 2 else 2 if kind == "q8_0" and columns == 64 else 4
    rings = dict(slots=slots, x_slots=4 if columns == 32 else 8, pieces=1 if columns == 64 else 4)
    return rings | dict(high=high, deep=deep, columns=columns, splits=splits, registers=112)


def misfit(x, weight: Weight, kind: str) -> str | None:
    """Why the kernel does not compute x [m, in] times this weight, None where it does: for packed weights, 16-bit
    floats and rows that tensor maps can say."""
    m, inner = x.shape
    last = weight.scale is not None and weight.scaled_last(kind)
    whole = inner > 0 and inner % (BLOCK if last else DEPTH) == 0
    return first_unmet(
        (kind != "mxfp4", "codes are floats of 4 bits"),
        (weight.codes.dtype == jnp.uint32, f"codes are {weight.codes.dtype.name}, not packed words"),
        (x.dtype in (jnp.bfloat16, jnp.float16), f"rows are {x.dtype.name}, not 16-bit floats"),
        (isinstance(m, int), "the number of rows is not known"),
        (whole, f"rows of {inner} are not whole rounds"),
        (last or all(_copied(a, inner) for a in weight.of_blocks), "scales are not in lines of copies"),
    )


def _copied(array, inner: int) -> bool:
    """Whether tensor maps copy the scales of a round in lines of 16 bytes, two at most, or in one of several rounds."""
    of_round, cover = cover_of(array, inner)
    whole = of_round > 0 and cover % of_round == 0 and cover * array.dtype.itemsize <= 32
    return whole and array.shape[-1] * array.dtype.itemsize % 16 == 0


_ROOM = 225 << 10  # bytes of shared memory for rings and partial sums


def row_bytes(weight: Weight, kind: str, inner: int) -> int:
    """Bytes of words, scales and minima of a row of W that come for a round."""
    blocks = () if weight.scaled_last(kind) else weight.of_blocks
    return 4 * WORDS * (1 if kind in FOUR_BIT else 2) + sum(cover_of(a, inner)[1] * a.dtype.itemsize for a in blocks)


def _slots(meta: dict[str, Any], row: int, itemsize: int) -> int:
    """As many slots of the ring of words as are chosen and have room, where scales are wide."""
    high, deep, columns = (meta[name] for name in ("high", "deep", "columns"))
    taken = meta["x_slots"] * columns * PIECE * meta["pieces"] * itemsize + (deep - 1) * high * ROWS * columns * 4
    return min(meta["slots"], (_ROOM - taken) // (high * ROWS * row) // deep * deep)


def product(x, weight: Weight, *, kind: str, out_dtype=jnp.float32) -> jax.Array:
    """The product [m, out] of x [m, in] and a packed weight."""
    # fp8 has the tiles of the kind of one-byte integers whose scales lie like its own.
    like = kind if kind != "fp8" else "int8" if weight.scaled_last(kind) else "q8_0"
    meta = choice(x.shape[0], weight.codes.shape[0], x.shape[1], like)
    meta["slots"] = _slots(meta, row_bytes(weight, kind, x.shape[1]), x.dtype.itemsize)
    whole = meta["splits"] == 1
    meta |= {"out_dtype": jnp.dtype(out_dtype if whole else jnp.float32).name}
    if weight.minimum is None:  # all kinds have one signature
        weight = weight._replace(minimum=weight.scale)
    y = hopper_quantized_product(x, weight, kind=kind, **meta)
    return y[0] if whole else y.sum(0).astype(out_dtype)
