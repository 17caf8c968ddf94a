"""What 16 bytes of a lane hold, and how it is multiplied: plain 16-bit numbers, packed codes, 8-bit floats.

Integer codes are multiplied as integers, four bytes with an instruction: x is brought to 16 bits in each lane (24 bits
where x is float32), by a power of two for the lane, and a byte of x at a time is multiplied. These sums are exact.
8-bit floats become float16 two at a time, and these float32, by instructions: one and a half for each.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jtile.ops.weight_codes import FLOAT8

FOUR_BIT = ("q4_0", "q4_1")
LANES = 32
ZERO = {"q4_0": 8, "q4_1": 0, "q8_0": 128, "int8": 128}  # the field of a word that stands for the weight 0
_NIBBLES = 0x0F0F0F0F
_LARGE, _LARGE_BITS = 1.5 * 2**23, 0x4B400000  # a float32 whose last bit says 1, and its bits


def bits_of(kind: str) -> int:
    """The bits of a weight in memory; `kind`: the kind of a quantised weight, or the dtype of a plain one."""
    return 4 if kind in FOUR_BIT else 8 if kind in ("q8_0", "int8", "fp8") else 16


def integers(kind: str) -> bool:
    """Whether codes are integers, and x becomes integers too."""
    return bits_of(kind) < 16 and kind != "fp8"


def groups_of(kind: str) -> int:
    """The number of 512-byte pieces that hold 1024 weights."""
    return bits_of(kind) // 4


def real(x) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def bytes_of(dtype) -> int:
    """The bytes of the integer that a number of x of this dtype becomes."""
    return 2 if dtype in (jnp.bfloat16, jnp.float16) else 3


def planes_of(x, kind: str):
    """x [lanes * groups, of a lane] as [8, lanes, 4]: for each word of a lane's 16 bytes, its fields' factors, where
    codes are floats."""
    if bits_of(kind) == 8:  # the axes of a block are s, h, t, e: see `QuantizedTensor.packed`
        x = x.reshape(2, LANES, 2, 4, 2).transpose(0, 4, 2, 1, 3)
    else:
        x = x.reshape(4, LANES, 2, 4).transpose(0, 2, 1, 3)
    return x.reshape(8, LANES, 4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Integers:
    """x of one role and round for products with integers: tiles, or buffers of them.

    Attributes:
      planes: for each byte of x, the highest first, two of uint32 [lanes, 4], which the words of a lane are multiplied
        with: for codes of 4 bits their lower and their upper halves, else the words of each group.
      shifts: for each byte and group int32 [lanes], what its sums begin with, as the code of the weight 0 is not 0.
      unit: for each group float32 [lanes], the factor that turns sums of integers back into sums of numbers.
      total: for each group float32 [lanes], the sums of x.
    """

    planes: list
    shifts: list
    unit: list
    total: list


def room_for_integers(kind: str, count: int) -> Integers:
    """The shapes and dtypes of `Integers` of `count` bytes."""
    of = lambda dtype, *more: jax.ShapeDtypeStruct((LANES, *more), dtype)
    lanes = lambda dtype: [of(dtype)] * groups_of(kind)
    planes, shifts = [[of(jnp.uint32, 4)] * 2] * count, [lanes(jnp.int32)] * count
    return Integers(planes, shifts, lanes(jnp.float32), lanes(jnp.float32))


EIGHT = 8  # numbers of a lane in a tile of x that becomes integers: a thread holds them, and 1024 are four tiles


def integers_of(x: list, kind: str, count: int) -> Integers:
    """x, float32, in four tiles [lanes, `EIGHT`], as integers of `count` bytes; the tiles of a group stand one behind
    the other. A lane whose largest number is infinite, or NaN, has a unit of NaN."""
    each = len(x) // groups_of(kind)
    found = [_integers_of_group(x[i : i + each], kind, count) for i in range(0, len(x), each)]
    bytes_, shifts, unit, total = ([list(of) for of in zip(*part)] for part in zip(*found))  # lists by group
    planes = [_in_words([part for group in of_byte for part in group], kind) for of_byte in bytes_]
    return Integers(planes, shifts, unit[0], total[0])


def _integers_of_group(x: list, kind: str, count: int):
    """For the numbers of a group: the tiles of each byte, the shift of each byte, and [unit] and [total]."""
    bits = 8 * count - 1
    largest = functools.reduce(jnp.maximum, [abs(part) for part in x])
    power = jax.lax.bitcast_convert_type(jnp.max(largest, axis=1), jnp.uint32) >> np.uint32(23)  # biased by 127
    power = jnp.maximum(power, np.uint32(bits))
    up = real((np.uint32(253 + bits) - jnp.minimum(power, np.uint32(254))) << np.uint32(23))
    unit = real((power - np.uint32(bits - 1)) << np.uint32(23))
    unit = jnp.where(power == np.uint32(255), jnp.float32(np.nan), unit)
    most = np.float32((1 << bits) - 1)
    whole = [_rounded(part * up[:, None], most) for part in x]
    total = lambda parts: functools.reduce(jnp.add, parts).sum(1, dtype=jnp.int32)
    bytes_ = [[part >> np.int32(bits - 7) for part in whole]]
    bytes_ += [[(part >> np.int32(8 * k)) & np.int32(255) for part in whole] for k in reversed(range(count - 1))]
    totals = [total(byte) for byte in bytes_]
    shifts = [of_byte * np.int32(-ZERO[kind]) for of_byte in totals]
    of_all = functools.reduce(lambda high, low: (high << np.int32(8)) + low, totals)
    return bytes_, shifts, [unit], [of_all.astype(jnp.float32) * unit]


def _rounded(x, most):
    """x, float32 of up to `most` and down to below -most by less than 1, as the nearest int32. Where these are 16 bits
    the sum with 1.5 * 2^23 has them as its lowest: instructions that round and convert are eight times as slow as sums
    are, and a program of 14336 numbers of a row would wait for them for a microsecond."""
    if most > np.float32(1 << 15):
        return jnp.minimum(jnp.round(x), most).astype(jnp.int32)
    sum_ = jnp.minimum(x, most) + jnp.float32(_LARGE)
    return jax.lax.bitcast_convert_type(sum_, jnp.int32) - np.int32(_LARGE_BITS)


def _in_words(x: list, kind: str) -> list:
    """The low bytes of integers, as `integers_of` has them, put where the words of a lane have the codes that they are
    multiplied with. The axes of a block are s, h, t, e: see `QuantizedTensor.packed`; a tile has one s and one h."""

    def of_pairs(part):
        u = (jax.lax.bitcast_convert_type(part, jnp.uint32) & np.uint32(255)).reshape(LANES, 4, 2)
        return (u << (jax.lax.broadcasted_iota(jnp.uint32, u.shape, 2) * np.uint32(16))).sum(2, dtype=jnp.uint32)

    a, b, c, d = (of_pairs(part) for part in x)
    words = ((a, c), (b, d)) if bits_of(kind) == 4 else ((a, b), (c, d))
    return [low + (high << np.uint32(8)) for low, high in words]


def _fields(stored, kind: str) -> list:
    """The floats that 512 bytes of each of some rows hold, as float32 [rows, lanes, 4], four at a time."""
    rows = stored.shape[0]
    if bits_of(kind) == 16:
        return [numbers.astype(jnp.float32) for numbers in cut(stored.reshape(rows, LANES, 2, 4), 2)]
    words = stored.reshape(rows, LANES, 4)
    return [jax.lax.bitcast_convert_type(byte, FLOAT8).astype(jnp.float32) for byte in bytes_of_words(words)]


def bytes_of_words(words) -> list:
    return [(words >> np.uint32(8 * k)).astype(jnp.uint8) for k in range(4)]


def _dot(a: list, words, signed: bool):
    """The sum of the products of the four bytes of words with `a`, four int32 tiles."""
    of_words = [jax.lax.bitcast_convert_type(b, jnp.int8) if signed else b for b in bytes_of_words(words)]
    return functools.reduce(jnp.add, [x * y.astype(jnp.int32) for x, y in zip(a, of_words)])


def room(kind: str, count: int):
    """The shapes and dtypes of x of one row, role and round, as `put` stores it; count: see `bytes_of`."""
    return room_for_integers(kind, count) if integers(kind) else jax.ShapeDtypeStruct((8, LANES, 4), jnp.float32)


def put(rings, k, parts: list, kind: str, count: int) -> None:
    """Store x of one row, role and round, float32, in the buffers that `room` is of: four tiles [lanes, `EIGHT`], or
    one where codes are floats."""
    found = integers_of(parts, kind, count) if integers(kind) else planes_of(parts[0], kind)
    for ring, tile in zip(leaves(rings), jax.tree.leaves(found)):
        ring.at(k).store(tile)


def leaves(tree) -> list:
    """The rings in a tree, as a list."""
    return jax.tree.leaves(tree, is_leaf=is_ring)


def is_ring(x) -> bool:
    return hasattr(x, "at")


def held(x):
    """x of one role and round in registers: for each row the planes [lanes, 4], cut apart along their first axis, or
    `Integers` of tiles."""
    return [_held_integers(row) if isinstance(row, Integers) else cut(row.load(), 0) for row in x]


def _held_integers(row: Integers) -> Integers:
    words = [[part.load() for part in plane] for plane in row.planes]
    groups = lambda rings: [ring.load() for ring in rings]
    return Integers(words, [groups(of_byte) for of_byte in row.shifts], groups(row.unit), groups(row.total))


def cut(t, axis: int) -> list:
    """The tile cut along an axis, which is dropped. It is cut by halves, so that registers can be told apart."""
    if t.shape[axis] == 1:
        return [t.reshape(*t.shape[:axis], *t.shape[axis + 1 :])]
    half = t.shape[axis] // 2
    part = lambda first: jax.lax.slice_in_dim(t, first, first + half, axis=axis)
    return [*cut(part(0), axis), *cut(part(half), axis)]


def lane_sums(pieces, of_blocks, x: list, kind: str):
    """What one round adds to the products of rows of W with each row of x, as `held` gives it: [rows, lanes].

    pieces: the 512 bytes of each group; of_blocks: for each group the scales and, for Q4_1, the minima.
    """
    if integers(kind):
        return [_integer_sums(pieces, of_blocks, row, kind) for row in x]
    fields = [_fields(stored, kind) for stored in pieces]
    return [_float_sums(fields, of_blocks, row) for row in x]


def _float_sums(fields: list[list], of_blocks, planes: list):
    wide, out = None, None
    for group, of_group in enumerate(fields):
        own = planes[group * len(of_group) : (group + 1) * len(of_group)]
        terms = [field * plane[None] for field, plane in zip(of_group, own)]
        wide = functools.reduce(jnp.add, terms if wide is None else [wide, *terms])
        if of_blocks:  # without scales one chain of multiply-adds goes over all groups
            part = functools.reduce(jnp.add, cut(wide, 2)) * of_blocks[0][group]
            wide, out = None, part if out is None else out + part
    return functools.reduce(jnp.add, cut(wide, 2)) if out is None else out


def _integer_sums(pieces, of_blocks, x: Integers, kind: str):
    out: jax.Array | None = None
    for group, stored in enumerate(pieces):
        words = stored.reshape(stored.shape[0], LANES, 4)
        nibbles = [words & np.uint32(_NIBBLES), (words >> np.uint32(4)) & np.uint32(_NIBBLES)]
        fields = nibbles if bits_of(kind) == 4 else [words]
        codes = [[byte.astype(jnp.int32) for byte in bytes_of_words(field)] for field in fields]
        of_bytes = []
        for k, (plane, shift) in enumerate(zip(x.planes, x.shifts)):
            own = plane if bits_of(kind) == 4 else plane[group : group + 1]
            dots = [_dot(a, jnp.broadcast_to(b[None], words.shape), signed=k == 0) for a, b in zip(codes, own)]
            parts = cut(functools.reduce(jnp.add, dots), 2)
            of_bytes.append(functools.reduce(jnp.add, parts) + shift[group][None])
        part = ((of_bytes[-2] << np.int32(8)) + of_bytes[-1]).astype(jnp.float32)
        for byte in of_bytes[:-2]:
            part = part + byte.astype(jnp.float32) * jnp.float32(1 << 16)
        unit = x.unit[group][None]
        part = part * (unit * of_blocks[0][group] if of_blocks else unit)
        part = part + x.total[group][None] * of_blocks[1][group] if kind == "q4_1" else part
        out = part if out is None else out + part
    return out


def spread(scales, rows: int):
    """Scales [rows, blocks], repeated for the lanes that have weights of these blocks."""
    blocks, lanes = scales.shape[1], LANES // scales.shape[1]
    scales = scales.astype(jnp.float32)
    wide = jnp.broadcast_to(scales[:, :, None], (rows, blocks, lanes)) if lanes > 1 else scales
    return wide.reshape(rows, LANES) if lanes > 1 else wide
