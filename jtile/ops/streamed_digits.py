"""Numbers of lanes times numbers of x by the tensor cores: sums of each lane, as `jt.dot_lanes` gives them.

x of a lane, 16 or 32 numbers, is brought to the range of digits by a power of two. Integer codes meet two digits of 8
bits, both of them signed; 8-bit floats meet two float16 that are integers of 10 bits; bfloat16 meets the number as
bfloat16, and as another what the first lacks. Sums of integers are exact. Each digit is a plane of its own, whose sums
are brought back by the unit of the plane.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt

LANES = 32
INTEGERS = ("q4_0", "q4_1", "q8_0", "int8")
_BITS, _FLOAT_BITS = 15, 19  # of a number of x as an integer, beside its sign, for integer codes and for 8-bit floats
_NEARLY = 1 << 16  # where the largest number of a lane is nearly 2^15, its digit would be 128: it counts as larger
_NIBBLES = 0x0F0F0F0F
_LARGE, _LARGE_BITS = 1.5 * 2**23, 0x4B400000  # a float32 whose last bit says 1, and its bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Digits:
    """x of one role and round: buffers of [2 * lanes, ...], tiles [2, lanes, ...], or pairs of tiles [lanes, ...].

    Attributes:
      planes: uint32 [2, lanes, 4], the words that those of a lane are multiplied with: for codes of 4 bits their lower
        and their upper halves, for others the words of each group. For 8-bit floats [2, lanes, 8], those of the lower
        and of the upper half of each word in turn; tiles have them apart.
      shifts: for each group of integer codes int32 [2, lanes], what its sums begin with, as the code of the weight 0 is
        not 0.
      unit: for each group float32 [2, lanes], the factor that turns sums of digits back into sums of numbers; none for
        bfloat16.
      total: for each group float32 [2, lanes], the sums of x by digit, where weights have minima.
    """

    planes: list
    shifts: list
    unit: list
    total: list


def room(kind: str, groups: int) -> Digits:
    """The shapes and dtypes of the buffers."""
    of = lambda dtype, *more: jax.ShapeDtypeStruct((2 * LANES, *more), dtype)
    if kind == "bfloat16":
        return Digits([of(jnp.uint32, 4)] * groups, [], [], [])
    units = [of(jnp.float32)] * groups
    if kind == "fp8":
        return Digits([of(jnp.uint32, 8)] * groups, [], units, [])
    return Digits([of(jnp.uint32, 4)] * 2, [of(jnp.int32)] * groups, units, units if kind == "q4_1" else [])


def put(rings: Digits, k, found: Digits) -> None:
    """Store what `digits_of` gives in slot k of the buffers."""
    for field in dataclasses.fields(Digits):
        for ring, pair in zip(getattr(rings, field.name), getattr(found, field.name)):
            for p, tile in enumerate(pair):
                ring.at(k)[p * LANES : (p + 1) * LANES].store(tile)


def taken(row: Digits) -> Digits:
    """The tiles that buffers hold."""
    of = lambda rings: [tile.reshape(2, LANES, *tile.shape[1:]) for tile in (ring.load() for ring in rings)]
    planes = [half for tile in of(row.planes) for half in _by_halves(tile)]
    return Digits(planes, of(row.shifts), of(row.unit), of(row.total))


def _by_halves(tile) -> list:
    if tile.shape[2] == 4:
        return [tile]
    apart = tile.reshape(2, LANES, 4, 2)
    return [jax.lax.index_in_dim(apart, half, axis=3, keepdims=False) for half in range(2)]


def digits_of(x: list, kind: str, groups: int, zero: int) -> Digits:
    """x, float32, in four tiles [lanes, 8], of which those of a group stand one behind the other; zero: the code of the
    weight 0. A lane whose largest number is infinite, or NaN, has a unit of NaN."""
    if kind == "bfloat16":
        return Digits([_bfloat16_words(tile) for tile in x], [], [], [])
    each = len(x) // groups
    of_groups = [x[i : i + each] for i in range(0, len(x), each)]
    scales = [_scale(tiles, kind) for tiles in of_groups]
    scaled = [[tile * up[:, None] for tile in tiles] for tiles, (up, _) in zip(of_groups, scales)]
    if kind == "fp8":
        units = [(unit * jnp.float32(1 << 10), unit) for _, unit in scales]
        return Digits([_float_words(*tiles) for tiles in scaled], [], units, [])
    units = [(unit * jnp.float32(1 << 8), unit) for _, unit in scales]
    found = [_integer_digits(tiles) for tiles in scaled]
    sums = [[functools.reduce(jnp.add, of).sum(1, dtype=jnp.int32) for of in digits] for digits in found]
    shifts = [tuple(total * np.int32(-zero) for total in of) for of in sums]
    totals = [tuple(a.astype(jnp.float32) * b for a, b in zip(*both)) for both in zip(sums, units)]
    planes = zip(*(_in_words([tile for digits in found for tile in digits[p]], kind) for p in range(2)))
    return Digits(list(planes), shifts, units, totals if kind == "q4_1" else [])


def _scale(x: list, kind: str):
    """The power of two that brings the numbers of a lane to the range of digits, and the one that brings them back."""
    bits, more = (_FLOAT_BITS, 0) if kind == "fp8" else (_BITS, _NEARLY)
    largest = functools.reduce(jnp.maximum, [abs(tile) for tile in x])
    found = jax.lax.bitcast_convert_type(jnp.max(largest, axis=1), jnp.uint32)
    power = jnp.maximum((found + np.uint32(more)) >> np.uint32(23), np.uint32(bits))  # biased by 127
    real = lambda v: jax.lax.bitcast_convert_type(v << np.uint32(23), jnp.float32)
    up = real(np.uint32(253 + bits) - jnp.minimum(power, np.uint32(254)))
    return up, jnp.where(power == np.uint32(255), jnp.float32(np.nan), real(power - np.uint32(bits - 1)))


def _integer_digits(x: list) -> list[list]:
    """Numbers below 2^15 in size as 256 times the first digit plus the second, which are between -128 and 127. The last
    bits of a sum with 1.5 * 2^23 are the nearest integer."""
    bits = lambda tile: jax.lax.bitcast_convert_type(tile + jnp.float32(_LARGE), jnp.int32)
    whole = [bits(tile) - np.int32(_LARGE_BITS) for tile in x]
    low = lambda tile: ((tile & np.int32(255)) ^ np.int32(128)) - np.int32(128)
    return [[(tile + np.int32(128)) >> np.int32(8) for tile in whole], [low(tile) for tile in whole]]


def _in_words(x: list, kind: str) -> list:
    """The low bytes of integers, put where the words of a lane have the codes that they are multiplied with. The axes
    of a block are s, h, t, e: see `QuantizedTensor.packed`; a tile has one s and one h."""

    def of_pairs(tile):
        u = (jax.lax.bitcast_convert_type(tile, jnp.uint32) & np.uint32(255)).reshape(LANES, 4, 2)
        return (u << (jax.lax.broadcasted_iota(jnp.uint32, u.shape, 2) * np.uint32(16))).sum(2, dtype=jnp.uint32)

    a, b, c, d = map(of_pairs, x)
    words = ((a, c), (b, d)) if kind in ("q4_0", "q4_1") else ((a, b), (c, d))
    return [low + (high << np.uint32(8)) for low, high in words]


def _float_words(a, b) -> list:
    """Numbers below 2^19 in size of a group, of bytes 0 and 2 and of bytes 1 and 3 of words of codes, as words of two
    float16: their upper digits, and their lower ones. The bits of a float16 that are a small integer, beside the sign,
    stand for so many times 2^-24."""
    found = []
    for tile in (a, b):
        whole = jax.lax.bitcast_convert_type(abs(tile) + jnp.float32(2.0**23), jnp.uint32)
        sign = (jax.lax.bitcast_convert_type(tile, jnp.uint32) >> np.uint32(16)) & np.uint32(0x8000)
        found.append([(whole >> np.uint32(shift)) & np.uint32(1023) | sign for shift in (10, 0)])
    return [first | (second << np.uint32(16)) for first, second in zip(*found)]


def _bfloat16_words(tile) -> tuple:
    """Numbers as words of two bfloat16, and what these lack."""
    pairs = tile.reshape(LANES, 4, 2)
    high = pairs.astype(jnp.bfloat16)
    low = (pairs - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return tuple(jax.lax.bitcast_convert_type(part, jnp.uint32) for part in (high, low))


def lane_sums(pieces: list, of_blocks: list, x: Digits, kind: str):
    """What one round adds to the products of rows of W with a row of x: [rows, lanes]. of_blocks: for each array and
    group the scales (and minima), [rows, lanes]."""
    if kind == "bfloat16":
        words = [jax.lax.bitcast_convert_type(of.reshape(of.shape[0], LANES, 4, 2), jnp.uint32) for of in pieces]
        return _by_lane(jt.dot_lanes(words, x.planes, kind=kind))
    out: Any = None
    each = len(x.planes) // len(pieces)
    for group, stored in enumerate(pieces):
        words = stored.reshape(stored.shape[0], LANES, 4)
        part = _products(words, x, group, x.planes[group * each : (group + 1) * each], kind)
        unit = x.unit[group][None]
        part = part * (unit * of_blocks[0][group][:, None] if of_blocks else unit)
        if kind == "q4_1":
            part = part + x.total[group][None] * of_blocks[1][group][:, None]
        out = part if out is None else out + part
    sums = _by_lane(out)
    return sums * jnp.float32(2.0**24) if kind == "fp8" else sums  # not in the unit, which may be large


def _products(words, x: Digits, group: int, planes: list, kind: str):
    """The sums [rows, 2, lanes] of a group, as float32."""
    if kind == "fp8":
        return jt.dot_lanes([words], planes, kind="float8_e4m3fn")
    fields = [words]
    if len(planes) == 2:
        fields = [words & np.uint32(_NIBBLES), (words >> np.uint32(4)) & np.uint32(_NIBBLES)]
    shift = jnp.broadcast_to(x.shifts[group][None], (words.shape[0], 2, LANES))
    return jt.dot_lanes(fields, planes, shift, kind="integers").astype(jnp.float32)


def _by_lane(sums):
    """Sums [rows, 2, lanes] as [rows, lanes]: a thread adds up those of lanes that are 4 apart."""
    rows = sums.shape[0]
    halves = sums.reshape(rows, 2, 4, 2, 4)
    low, up = (jax.lax.index_in_dim(halves, k, axis=3, keepdims=False) for k in range(2))
    return (low + up).reshape(rows, LANES)
