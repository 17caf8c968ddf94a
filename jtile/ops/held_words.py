"""Rows of packed codes in registers, a word to a lane, and the numbers of a row of x that they are multiplied with.

A strip is 32 words of a row of W, of four words to a unit: a unit has the 32 codes of 4 bits, or the 16 of 8 bits, of
16 bytes. Short rows fill more lanes so than with 16 bytes to a lane: 576 codes of 4 bits are 24 numbers in each lane,
and not 32 in 18 of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.operands import Weight
from jtile.ops.streamed_numbers import EIGHT, LANES, _bytes, _whole_fields, bits_of, integers
from jtile.ops.streamed_operands import Rows, by_block
from jtile.ops.weight_codes import FLOAT8

UNITS, WORDS = 8, 4  # units of a strip, and words of a unit
ROWS = 4  # rows of W that are loaded at a time: one a warp


def strips_of(inner: int, kind: str) -> range:
    """The strips of a row of `inner` codes."""
    return range(jt.cdiv(inner * bits_of(kind), 32 * LANES))


def numbers_of_lane(inner: int, kind: str) -> int:
    """How many numbers of a row a lane has."""
    return len(strips_of(inner, kind)) * 32 // bits_of(kind)


def of_strip(array, inner: int, kind: str) -> int:
    """How many scales of a row of `inner` codes belong to a strip; 0 where that is no whole number."""
    n = array.shape[-1] * (32 * LANES // bits_of(kind))
    return n // inner if n % inner == 0 else 0


def fits(weight: Weight, inner: int, kind: str) -> bool:
    """Whether codes are words, and scales are those of whole strips."""
    return weight.codes.dtype == jnp.uint32 and all(of_strip(a, inner, kind) for a in by_block(weight, kind))


def load(weight: Weight, tile, rows: int, kind: str, inner: int) -> list:
    """The words of a tile of `rows` rows and their scales (and minima), `ROWS` rows at a time: for each of these, and
    each strip, words [ROWS, LANES] and arrays [ROWS, groups of a strip]."""
    at = [(tile * (rows // ROWS) + part, k) for part in range(rows // ROWS) for k in strips_of(inner, kind)]
    blocks = lambda place: [a.tiles(ROWS, of_strip(a, inner, kind))[place] for a in by_block(weight, kind)]
    found = [(weight.codes.tiles(ROWS, LANES)[place].reshape(ROWS, UNITS, WORDS), blocks(place)) for place in at]
    each = len(strips_of(inner, kind))
    return [found[i : i + each] for i in range(0, len(found), each)]


def fields(words, blocks: list, kind: str) -> list:
    """The weights of a strip, float32 [ROWS, UNITS, WORDS], those of a word one behind the other."""
    scales = [_spread(a) for a in blocks]
    if integers(kind):
        return _whole_fields(words, scales, kind)
    found = [jax.lax.bitcast_convert_type(byte, FLOAT8).astype(jnp.float32) for byte in _bytes(words)]
    return [field * scales[0] if scales else field for field in found]


def _spread(scales):
    """Scales [ROWS, groups], repeated for the units and words of these groups."""
    rows, groups = scales.shape
    wide = jnp.broadcast_to(scales.astype(jnp.float32)[:, :, None], (rows, groups, UNITS * WORDS // groups))
    return wide.reshape(rows, UNITS, WORDS)


def tiles_of(x: Rows, ref, lead: tuple, k: int) -> list:
    """The numbers of strip k of a row [in / n, n] of `ref`, or of that of its first axis, float32 [UNITS, `EIGHT`]."""
    view = ref.tiles(*[None] * len(lead), UNITS, EIGHT)
    return [view[*lead, k, q].astype(jnp.float32) for q in range(x.x.shape[2] // EIGHT)]


def planes(tiles: list) -> list:
    """Such numbers as [UNITS, WORDS] for each of `fields`."""
    # the axes of a block are s, h, t, e: see `QuantizedTensor.packed`; a tile has one s and one h
    wide = [tile.reshape(UNITS, WORDS, 2) for tile in tiles]
    return [jax.lax.slice_in_dim(t, e, e + 1, axis=2).reshape(UNITS, WORDS) for e in range(2) for t in wide]


def sums(numbers: list, x: list):
    """The products [ROWS] of rows, as `fields` gives each strip, with a row of x, as `planes` gives each strip."""
    parts = [functools.reduce(jnp.add, [f * p[None] for f, p in zip(*of)]) for of in zip(numbers, x)]
    return functools.reduce(jnp.add, parts).sum((1, 2))
