"""Codes of quads of lanes times numbers of x by the tensor cores, as `jt.dot_quads` adds them up.

Where one scale belongs to the weights of four lanes at least, these lanes are summed at once: an instruction multiplies
the codes of 16 rows of W, which are the first two tiles of 8 rows of a matrix, or one of each of two matrices. x of a
quad, 64 or 128 numbers, is brought to the range of two digits by a power of two: integer codes meet digits of 8 bits,
both of them signed, and 8-bit floats two float16, of which the second is what the first lacks. Sums of integers are
exact.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt

LANES, QUADS, PARTS, ROWS = 32, 8, 16, 8
_KINDS = {"q4_0": "int4", "q4_1": "uint4", "q8_0": "int8", "int8": "int8", "fp8": "float8_e4m3fn"}
ON_GPUS = False  # off until a GPU has timed it
_NEARLY = 1 << 16  # where the largest number of a quad is nearly 2^15, its digit would be 128: it counts as larger
_BITS = 15  # of a number of x, beside its sign
_LARGE, _LARGE_BITS = 1.5 * 2**23, 0x4B400000  # a float32 whose last bit says 1, and its bits


def fits(kind: str, per_piece: tuple[int, ...], dtype) -> bool:
    """Whether codes of this kind are multiplied so; per_piece: how many scales, or minima, belong to 512 bytes."""
    return ON_GPUS and kind in _KINDS and dtype in (jnp.bfloat16, jnp.float16) and all(
        n and QUADS % n == 0 for n in per_piece
    )  # fmt: skip


def rows_fit(rows: int, gated: bool) -> bool:
    """Whether tiles of so many rows, of one or of two matrices, are whole instructions."""
    return rows % (ROWS if gated else 2 * ROWS) == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Digits:
    """x of one role and round: buffers, or tiles.

    Attributes:
      planes: uint32 [2 * lanes, 4], the words that those of a lane are multiplied with, first digits of all lanes in
        front: for codes of 4 bits their lower and their upper halves, for others the words of each group. For 8-bit
        floats [2 * lanes, 8], those of the lower and of the upper half of each word in turn. Tiles are [2, lanes, 4],
        those of a group in a list.
      unit: for each group the factor that turns sums of digits back into sums of numbers: buffers float32 [quads],
        tiles [parts of quads].
      total: for each group half of the sum of x of each quad in the same form, where weights have minima.
    """

    planes: list
    unit: list
    total: list


def room(kind: str, groups: int) -> Digits:
    """The shapes and dtypes of the buffers."""
    of = lambda n, width: [jax.ShapeDtypeStruct((2 * LANES, width), jnp.uint32)] * n
    units = [jax.ShapeDtypeStruct((QUADS,), jnp.float32)] * groups
    four = kind in ("q4_0", "q4_1")
    planes = of(2, 4) if four else of(groups, 8 if kind == "fp8" else 4)
    return Digits(planes, units, units if kind == "q4_1" else [])


def put(rings: Digits, k, parts: list, kind: str, groups: int) -> None:
    """Store x, float32, in four tiles [lanes, 8], of which those of a group stand one behind the other, in slot k of
    the buffers. A quad whose largest number is infinite, or NaN, has a unit of NaN."""
    each = len(parts) // groups
    for group in range(groups):
        tiles = parts[group * each : (group + 1) * each]
        tiles = [tile.reshape(QUADS, 4, 8) for tile in tiles]
        up, unit = _scale(tiles)
        scaled = [(tile * up[:, None, None]).reshape(LANES, 8) for tile in tiles]
        for n, pair in enumerate(_float_words(*scaled) if kind == "fp8" else _integer_words(scaled, kind)):
            for p, tile in enumerate(pair):
                rings.planes[group + n].at(k)[p * LANES : (p + 1) * LANES].store(tile)
        rings.unit[group].at(k).store(unit)
        if rings.total:
            total = functools.reduce(jnp.add, tiles).sum((1, 2))
            rings.total[group].at(k).store(total * jnp.float32(0.5))


def _scale(x: list):
    """For each quad the power of two that brings its numbers below 2^15, and the one that brings them back."""
    largest = functools.reduce(jnp.maximum, [abs(tile) for tile in x])
    found = jax.lax.bitcast_convert_type(jnp.max(largest, axis=(1, 2)), jnp.uint32)
    power = jnp.maximum((found + np.uint32(_NEARLY)) >> np.uint32(23), np.uint32(_BITS))  # biased by 127
    real = lambda v: jax.lax.bitcast_convert_type(v << np.uint32(23), jnp.float32)
    up = real(np.uint32(253 + _BITS) - jnp.minimum(power, np.uint32(254)))
    unit = jnp.where(power == np.uint32(255), jnp.float32(np.nan), real(power - np.uint32(_BITS - 1)))
    return up, unit


def _integer_words(x: list, kind: str) -> list:
    """For each tile of factors the words of both digits. Numbers below 2^15 in size are 256 times the first digit plus
    the second, which are between -128 and 127. The last bits of a sum with 1.5 * 2^23 are the nearest integer."""
    bits = lambda tile: jax.lax.bitcast_convert_type(tile + jnp.float32(_LARGE), jnp.int32)
    whole = [bits(tile) - np.int32(_LARGE_BITS) for tile in x]
    digits = [(tile + np.int32(128)) >> np.int32(8) for tile in whole], whole  # of the second, only the lower 8 bits
    return list(zip(*(_in_words(of, kind) for of in digits)))


def _in_words(x: list, kind: str) -> list:
    """The low bytes of integers, put where the words of a lane have the codes that they are multiplied with. The axes
    of a block are s, h, t, e: see `QuantizedTensor.packed`; a tile has one s and one h."""

    def of_pairs(tile):
        u = (jax.lax.bitcast_convert_type(tile, jnp.uint32) & np.uint32(255)).reshape(LANES, 4, 2)
        return (u << (jax.lax.broadcasted_iota(jnp.uint32, u.shape, 2) * np.uint32(16))).sum(2, dtype=jnp.uint32)

    found = [of_pairs(tile) for tile in x]
    words = [(found[0], found[2]), (found[1], found[3])] if len(found) == 4 else [tuple(found)]
    return [low + (high << np.uint32(8)) for low, high in words]


def _float_words(a, b) -> list:
    """Numbers of a group, of bytes 0 and 2 and of bytes 1 and 3 of words of codes, as words of two float16, and what
    these lack. They are rounded to 11 bits by their bits: an instruction that converts one float alone takes as long as
    four that convert two each, and these take numbers that nothing else does."""
    found = []
    for tile in (a, b):
        bits = jax.lax.bitcast_convert_type(tile, jnp.uint32)
        high = jax.lax.bitcast_convert_type((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000), jnp.float32)
        halves = [part.astype(jnp.float16) for part in (high, tile - high)]
        found.append([jax.lax.bitcast_convert_type(part, jnp.uint16).astype(jnp.uint32) for part in halves])
    return [tuple(first | (second << np.uint32(16)) for first, second in zip(*found))]


def taken(row: Digits) -> Digits:
    """The tiles that buffers hold."""
    of = lambda rings: [ring.load() for ring in rings]
    planes = [_by_halves(tile.reshape(2, LANES, tile.shape[1])) for tile in of(row.planes)]
    if len(row.unit) == 1:
        planes = [[half for tile in planes for half in tile]]
    of_parts = lambda rings: [jnp.broadcast_to(x[:, None], (QUADS, 2)).reshape(PARTS) for x in of(rings)]
    return Digits(planes, of_parts(row.unit), of_parts(row.total))


def _by_halves(tile) -> list:
    if tile.shape[2] == 4:
        return [tile]
    apart = tile.reshape(2, LANES, 4, 2)
    return [jax.lax.index_in_dim(apart, half, axis=3, keepdims=False) for half in range(2)]


def sums(first: list, second: list, scales: tuple[list, list], x: Digits, kind: str):
    """What one round adds to the products of two tiles of 8 rows with a row of x: two tiles [8, parts of quads].

    first, second: for each group the words [8, lanes * 4] of a tile; scales: for each of both, by array and group, the
    scales (and minima) [8, n]; none where they are applied last.
    """
    out: list[Any] = [None, None]
    for group, pair in enumerate(zip(first, second)):
        words = [part.reshape(ROWS, LANES, 4) for part in pair]
        found = jt.dot_quads(*words, x.planes[group], kind=_KINDS[kind]).reshape(2, ROWS, 2, PARTS)
        for k, of_blocks in enumerate(scales):
            own = jax.lax.index_in_dim(found, k, axis=0, keepdims=False)
            high, low = (jax.lax.index_in_dim(own, d, axis=1, keepdims=False) for d in range(2))
            part = high + low if kind == "fp8" else high * jnp.float32(256) + low
            unit = jnp.broadcast_to(x.unit[group][None], (ROWS, PARTS))
            part = part * (unit * _spread(of_blocks[0][group]) if of_blocks else unit)
            if kind == "q4_1":
                part = part + _spread(of_blocks[1][group]) * x.total[group][None]
            out[k] = part if out[k] is None else out[k] + part
    return out


def _spread(scales):
    """Scales [8, n], repeated for the parts of quads that have weights of these blocks."""
    n = scales.shape[1]
    wide = jnp.broadcast_to(scales.astype(jnp.float32)[:, :, None], (ROWS, n, PARTS // n))
    return wide.reshape(ROWS, PARTS)


@jt.function
def consume(mem, j: int, kind: str, walk) -> None:
    """Role j of `hopper_gemv`: adds up, in its lanes, the products of each tile of rows."""
    words, blocks, numbers, chunks = mem.words[j], mem.of_blocks[j], mem.numbers[j], walk.chunks
    eights = range(walk.rows // ROWS)
    tiles = [(w, i) for i in eights for w in range(len(words))]  # two that stand side by side are multiplied at once
    part = lambda tree, i: jax.tree.map(lambda tile: jax.lax.slice_in_dim(tile, i * ROWS, (i + 1) * ROWS), tree)
    at = lambda rings, k: jax.tree.map(lambda ring: ring.at(k), rings, is_leaf=lambda r: hasattr(r, "at"))
    load = lambda rings, k: jax.tree.map(lambda one: one.load(), at(rings, k), is_leaf=lambda r: hasattr(r, "at"))
    of_x = lambda k: [taken(row) for row in at(numbers, k)]
    x = of_x(0) if chunks == 1 else None
    for n in jt.range(walk.tiles):
        totals = tuple(jnp.zeros((ROWS, PARTS), jnp.float32) for _ in tiles for _ in numbers)
        for chunk in jt.range(chunks):
            k = n * chunks + chunk
            mem.full.at(k).wait()
            whole, of_blocks = load(words, k), load(blocks, k)
            mem.empty.at(k).arrive()
            stored = [part(whole[w], i) for w, i in tiles]
            scales = [part(of_blocks[w], i) for w, i in tiles]
            found = []
            for row in of_x(chunk) if x is None else x:
                for p in range(0, len(tiles), 2):
                    found += sums(stored[p], stored[p + 1], (scales[p], scales[p + 1]), row, kind)
            totals = tuple(a + b for a, b in zip(totals, found))
        mem.taken.at(n).wait(before=True)
        for t, total in enumerate(totals):
            w, i = tiles[t % len(tiles)]
            mem.sums[j][w][t // len(tiles)].at(n)[i * ROWS : (i + 1) * ROWS].store(total)
        mem.done.at(n).arrive()
