"""Rows of W in registers, and the row of x that they are multiplied with: how both lie in the lanes of a warp.

Packed codes lie in words, one to a lane: a strip of a row is 32 words of four to a unit, which has the 32 codes of 4
bits, or the 16 of 8 bits, of 16 bytes. Short rows fill more lanes so than with 16 bytes to a lane: of 576 codes of 4
bits a lane has 24 numbers, and not 18 lanes 32 each. Of numbers of 16 bits a strip is 256, 16 bytes to a lane.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops.operands import Weight
from jtile.ops.streamed_numbers import EIGHT, LANES, ZERO, bits_of, bytes_of_words, cut, integers, real
from jtile.ops.streamed_operands import by_block
from jtile.ops.weight_codes import FLOAT8

UNITS, WORDS = 8, 4  # units of a strip of packed codes, and words of a unit
TOGETHER = 4  # rows of words that are loaded at a time: one a warp
_PLAIN = 8 * LANES  # numbers of 16 bits of a strip
_MAGIC = 0x4B000000  # the bits of 2^23, whose last bit counts 1


def _add(found: list):
    return functools.reduce(jnp.add, found)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The form of rows of `inner` numbers of a kind, `rows` of them in a program.

    A row of x is [inner / n, n], n numbers to 16 bytes of weights. It is loaded in tiles [`side`, `EIGHT`], of which
    `places` says for each strip where they are.
    """

    kind: str
    inner: int
    rows: int

    @property
    def packed(self) -> bool:
        return bits_of(self.kind) < 16

    @property
    def side(self) -> int:
        return UNITS if self.packed else LANES

    @property
    def each(self) -> int:
        """The rows that are loaded, multiplied and stored together."""
        return TOGETHER if self.packed else self.rows

    def at(self, tile) -> list:
        """Where the rows of a tile of `rows` are, in tiles of `each`."""
        parts = self.rows // self.each
        return [tile * parts + part if parts > 1 else tile for part in range(parts)]

    @property
    def places(self) -> list[list[tuple]]:
        eights = range(128 // bits_of(self.kind) // EIGHT)
        return [[(k, q) for q in eights] for k in range(strips_of(self.inner, self.kind))]

    def tiles(self, load: Callable) -> list[list]:
        """`load(place)` of each tile of a row, as float32, by strip."""
        return [[load(place).astype(jnp.float32) for place in of] for of in self.places]

    def of(self, ref, *lead) -> list[list]:
        """The tiles of a row [inner / n, n] of `ref`; lead: the row's number where there are several."""
        view = ref.tiles(*[None] * len(lead), self.side, EIGHT)
        return self.tiles(lambda place: view[*lead, *place])

    def planes(self, tiles: list[list]) -> list[list]:
        """Such tiles as the fields of `numbers` are multiplied with: [units, words], or [lanes, 4]."""
        return [_planes_of_units(of) if self.packed else cut(of[0].reshape(LANES, 2, 4), 1) for of in tiles]

    def load(self, weight: Weight, tile) -> list[list]:
        """The codes of the rows of a tile, and their scales (and minima): for `each` of the rows, by strip."""
        strips, arrays = range(strips_of(self.inner, self.kind)), by_block(weight, self.kind)
        if not self.packed:
            return [[(weight.codes.tiles(self.rows, _PLAIN)[tile, k], []) for k in strips]]
        blocks = lambda place: [a.tiles(TOGETHER, of_strip(a, self.inner, self.kind))[place] for a in arrays]
        words = lambda place: weight.codes.tiles(TOGETHER, LANES)[place].reshape(TOGETHER, UNITS, WORDS)
        return [[(words((at, k)), blocks((at, k))) for k in strips] for at in self.at(tile)]

    def numbers(self, stored: list[list], planes: list[list] | None) -> list:
        """The weights of what `load` gave, by strip, times those of a norm, whose `planes` these are."""
        found = [[_fields(*one, self.kind) for one in strips] for strips in stored]
        if planes is None:
            return found
        normed = lambda fields, of: [field * plane[None] for field, plane in zip(fields, of)]
        return [[normed(fields, of) for fields, of in zip(strips, planes)] for strips in found]

    def sums(self, numbers: list, planes: list[list]):
        """The products of `each` rows with a row of x, float32 [each]."""
        terms = [[field * plane[None] for field, plane in zip(*of)] for of in zip(numbers, planes)]
        if self.packed:  # a sum for each strip, so that not all terms are one chain
            return _add([_add(of) for of in terms]).sum((1, 2))
        return _add(cut(_add([term for of in terms for term in of]), 2)).sum(1)

    def squares(self, tiles: list[list], planes: list[list]):
        """Sums of the squares of a row, which are left to add up."""
        if self.packed:
            return _add([_add([p * p for p in of]) for of in planes])
        return _add([t * t for of in tiles for t in of]).sum(1)


def strips_of(inner: int, kind: str) -> int:
    """The strips of a row of `inner` numbers."""
    return jt.cdiv(inner, _PLAIN if bits_of(kind) == 16 else 32 * LANES // bits_of(kind))


def of_strip(array, inner: int, kind: str) -> int:
    """How many scales of a row of `inner` codes belong to a strip; 0 where that is no whole number."""
    n = array.shape[-1] * (32 * LANES // bits_of(kind))
    return n // inner if n % inner == 0 else 0


def fits(weight: Weight, inner: int, kind: str) -> bool:
    """Whether a weight is no packed one, or one whose scales are those of whole strips."""
    packed = weight.codes.dtype == jnp.uint32 and all(of_strip(a, inner, kind) for a in by_block(weight, kind))
    return packed or bits_of(kind) == 16


def numbers_of_lane(inner: int, kind: str) -> int:
    """How many numbers of a row a lane has."""
    return strips_of(inner, kind) * (EIGHT if bits_of(kind) == 16 else 32 // bits_of(kind))


@jt.function
def made(form: Rows, stored: list, planes):
    """For each weight the `Rows.numbers` of what `Rows.load` gave. They are made in a loop of one round, of which the
    compiler does not know that it has any: else it would make them when the kernel in front has ended. (No square is 5
    more than a multiple of 8.)"""
    time = jt.clock().astype(jnp.int32)
    once = jnp.where((time * time & 7) == 5, 0, 1)
    numbers = jax.tree.map(jnp.zeros_like, [form.numbers(of, planes) for of in stored])
    for _ in jt.range(once):
        numbers = [form.numbers(of, planes) for of in stored]
    return numbers


def _fields(stored, blocks: list, kind: str) -> list:
    """The weights of a strip of rows: of packed codes float32 [rows, units, words], those of a word one behind the
    other; else [rows, lanes, 4], twice."""
    if bits_of(kind) == 16:
        return [numbers.astype(jnp.float32) for numbers in cut(stored.reshape(stored.shape[0], LANES, 2, 4), 2)]
    scales = [_spread(a) for a in blocks]
    if integers(kind):
        return _whole_fields(stored, scales, kind)
    found = [jax.lax.bitcast_convert_type(byte, FLOAT8).astype(jnp.float32) for byte in bytes_of_words(stored)]
    return [field * scales[0] if scales else field for field in found]


def _whole_fields(words, scales: list, kind: str) -> list:
    """Weights of integer codes, which become float32 by their bits, for an instruction that converts takes as long as
    eight others. A field that stands k bits higher than the lowest counts 2^k times, and is scaled down."""
    bits, out = bits_of(kind), []
    for k in range(32 // bits):
        at = k % (23 // bits) * bits  # fields become floats where they stand, as many of a word as a mantissa has
        word = words >> np.uint32(k * bits - at) if k * bits > at else words
        found = (word & np.uint32(((1 << bits) - 1) << at)) | np.uint32(_MAGIC)
        number = real(found) - jnp.float32(2.0**23 + ZERO[kind] * 2**at)
        number = number * (scales[0] * jnp.float32(2.0**-at) if scales else jnp.float32(2.0**-at))
        out.append(number + scales[1] if kind == "q4_1" else number)
    return out


def _spread(scales):
    """Scales [rows, groups], repeated for the units and words of these groups."""
    rows, groups = scales.shape
    wide = jnp.broadcast_to(scales.astype(jnp.float32)[:, :, None], (rows, groups, UNITS * WORDS // groups))
    return wide.reshape(rows, UNITS, WORDS)


def _planes_of_units(tiles: list) -> list:
    """Tiles [units, `EIGHT`] of a strip as [units, words] for each of `_fields`."""
    # the axes of a block are s, h, t, e: see `QuantizedTensor.packed`; a tile has one s and one h
    wide = [tile.reshape(UNITS, WORDS, 2) for tile in tiles]
    return [jax.lax.slice_in_dim(t, e, e + 1, axis=2).reshape(UNITS, WORDS) for e in range(2) for t in wide]
