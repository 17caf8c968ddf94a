"""Products of 256 rows with packed quantised weights on Hopper at the block level, whose programs share tiles.

Tiles of 128 rows of W and 256 of x are eight squares of 64 x 64. A matrix of 14336 rows has 112 of them, so that a
seventh of the multiprocessors of an H200 has none. Programs of seven squares are 128: each has 64 rows of W for all of
x, and three squares of the rows that are left, which four programs share.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_quantized
from jtile.ops.hopper_quantized import DEPTH, DOWN, PIECE, ROWS, WORDS, Memory, bring, consume, memory
from jtile.ops.operands import Weight

COLUMNS = 256  # rows of x of a program
WHOLE = COLUMNS // ROWS  # squares of a row of them, and programs of a band
REGISTERS = {5: (232, 224), 6: (232, 224), 7: (200, 152, 112)}  # of a thread of each role, by the squares of a program
# Microseconds of a round for each square, and for each role, which makes numbers of its words.
SQUARE, ROLE = 0.21, 0.185
ROOM = 222 << 10  # bytes of shared memory for rings


@dataclasses.dataclass(frozen=True)
class Share:
    """Some squares of 64 rows of W.

    Attributes:
      row: which 64 rows.
      taken: of the rows of x in a buffer, the first and the one behind the last.
      copies: (the first row in a buffer, how many, their place among the rows of x in steps of so many) of `taken`.
    """

    row: jax.Array
    taken: tuple[int, int]
    copies: list[tuple[int, int, jax.Array]]


def shares(squares: int, band, p) -> list[Share]:
    """What the p-th program of a band has: 64 rows of W, and of those that are left a pair of squares, one, or both.

    A band has `squares` times 64 rows of W. The first four are of one program each; the squares of the others, row by
    row, are dealt out in order, so that a pair begins at an even place. A buffer has the rows of x of the pair first,
    then those of the single one."""
    left = squares - WHOLE
    half = p // 2 if left == 3 else p % 2 if left == 2 else 1 - p // 2
    one = p ^ 2 if left == 3 else p if left == 1 else 2 * (1 - half)
    parts = [(0, 128, half), (128, 64, one), (192, 64, one ^ 1)]
    found = [Share(band * squares + p, (0, COLUMNS), parts)]
    behind = band * squares + WHOLE
    if left > 1:
        found.append(Share(behind + ((p + 1) // 2 if left == 3 else p // 2), (0, 128), parts[:1]))
    if left != 2:
        found.append(Share(behind + (p // 2 * 2 if left == 3 else 0), (128, 192), parts[1:2]))
    return found


def _type(x, weight, *, out_dtype, **_):
    return jax.ShapeDtypeStruct((x.shape[0], weight.codes.shape[0]), jnp.dtype(out_dtype))


def _grid(x, weight, *, squares, **_):
    return jt.cdiv(weight.codes.shape[0], squares * ROWS) * WHOLE, jt.cdiv(x.shape[0], COLUMNS)


def _piece(acc, at: int, width: int):
    """acc[:, at : at + width], by halves."""
    while (half := acc.shape[1] // 2) >= width:
        acc, at = (acc[:, half:], at - half) if at >= half else (acc[:, :half], at)
    return acc


def _write(acc, mem: Memory, y, column, share: Share, i: int, rounds: int):
    """Write the sums [64, taken] of a share to y: by copies out of a buffer of x that everybody has read, if y is as
    wide as x."""
    begin, end = share.taken
    if y.dtype == mem.x.dtype and y.shape[1] * y.dtype.itemsize % 16 == 0:
        at = rounds * (DEPTH // PIECE) + i
        mem.x_empty.at(at).wait(before=True)
        leaving = mem.x.at(at)
        leaving = leaving if end - begin == COLUMNS else leaving[begin:end]
        leaving.store(acc.T.astype(y.dtype))
        jt.fence_shared()
        for first, size, place in share.copies:
            here = leaving if size == end - begin else leaving[first - begin : first - begin + size]
            jt.async_copy(here, y.tiles(size, ROWS).at[column * (COLUMNS // size) + place, share.row])
        jt.store_wait()
        return
    for first, size, place in share.copies:
        for n in range(size // 64):
            part = _piece(acc, first - begin + 64 * n, 64)
            at = column * WHOLE + place * (size // 64) + n
            y.tiles(64, ROWS)[at, share.row] = part.T.astype(y.dtype)


@jt.kernel(out_type=_type, grid=_grid, sharding="m _, o _, o _, o _ -> m o")
def hopper_quantized_shares(
    x, weight: Weight, y, *, kind: str, squares: int, slots: int, x_slots: int, registers: tuple[int, ...],
    out_dtype: str = "float32",
):  # fmt: skip
    """The product [m, out] of x [m, in] and a weight: see `hopper_quantized_product`.

    A program has `squares` squares (5 to 7) of 64 rows of W and 64 of x; a role has those of the same rows of W, and
    `registers` each.
    """
    # Yᵀ = W Xᵀ, a sum over rounds of 256 weights
    band, p, column = jt.program_id(0) // WHOLE, jt.program_id(0) % WHOLE, jt.program_id(1)
    dtype, wide, codes, scale = x.dtype.type, 1 if kind in hopper_quantized.FOUR_BIT else 2, weight.codes, weight.scale
    last = weight.scaled_last(kind)
    blocks = [] if last else [scale, weight.minimum] if kind == "q4_1" else [scale]
    mine = shares(squares, band, p)
    mem = memory(x, blocks, wide=wide, high=len(mine), deep=1, columns=COLUMNS, slots=slots, x_slots=x_slots, pieces=1)
    rounds = jt.cdiv(codes.shape[1], WORDS * wide)
    for i, share in enumerate(mine):
        with jt.role(f"consumer{i}", warps=4, registers=registers[i], early=True):
            jt.wait_for_kernels(hold=True)
            acc = consume(mem, i, 0, rounds, 1, kind, 0, share.taken)
            acc = acc * jnp.float32(DOWN) if dtype == jnp.bfloat16 else acc
            acc = acc * scale.tiles(ROWS, 1)[share.row, 0] if last else acc
            _write(acc, mem, y, column, share, i, rounds)
    with jt.role("producer", warps=1, registers=24, early=True):
        jt.wait_for_kernels(hold=True)
        for k in jt.range(rounds):
            mem.empty.at(k).wait(before=True)
            bring(mem, k, k, codes, blocks, [(share.row,) for share in mine])
    with jt.role("feeder", warps=1, registers=24, early=True):
        jt.wait_for_kernels(hold=True)
        for k in jt.range(rounds * (DEPTH // PIECE)):
            mem.x_empty.at(k).wait(before=True)
            mem.x_full.at(k).expect(mem.x.nbytes)
            for first, size, place in mine[0].copies:
                rows = x.tiles(size, PIECE).at[column * (COLUMNS // size) + place, k]
                jt.async_copy(rows, mem.x.at(k)[first : first + size], mem.x_full.at(k))


@functools.lru_cache(maxsize=1024)
def squares(m: int, out: int, inner: int, processors: int) -> int | None:
    """How many squares programs have, None where whole tiles are as quick."""
    rounds, times = jt.cdiv(inner, DEPTH), {}
    for n, roles in REGISTERS.items():
        programs = WHOLE * jt.cdiv(out, n * ROWS) * jt.cdiv(m, COLUMNS)
        one = SQUARE * n + ROLE * len(roles)
        times[n] = hopper_quantized.predicted_us(programs, rounds, one, processors)
    best = min(times, key=times.__getitem__)
    least = hopper_quantized.BETTER * hopper_quantized.tiles_of_many(m, out, inner, processors)[2]
    return best if m > COLUMNS // 2 and times[best] <= least else None


def product(x, weight: Weight, *, kind: str, out_dtype=jnp.float32) -> jax.Array:
    """The product [m, out] of x [m, in] and a packed weight, in shares of tiles or in whole tiles."""
    (m, inner), out = x.shape, weight.codes.shape[0]
    found = squares(m, out, inner, gpu_tiles.processors())
    if found is None:
        return hopper_quantized.product(x, weight, kind=kind, out_dtype=out_dtype)
    slots = 2 if kind not in hopper_quantized.FOUR_BIT else 3 if found == 7 else 4
    left = ROOM - slots * len(REGISTERS[found]) * ROWS * hopper_quantized.row_bytes(weight, kind, inner)
    x_slots = min(4, left // (COLUMNS * PIECE * x.dtype.itemsize))
    if weight.minimum is None:  # all kinds have one signature
        weight = weight._replace(minimum=weight.scale)
    meta = {"slots": slots, "x_slots": x_slots, "registers": REGISTERS[found]}
    return hopper_quantized_shares(x, weight, kind=kind, squares=found, **meta, out_dtype=jnp.dtype(out_dtype).name)
