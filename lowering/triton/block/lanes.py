"""Where threads of four warps have the operands and sums of products of quads of lanes (`ir.DotQuads`).

An instruction multiplies 16 rows with 8 columns, of 32 terms for 8-bit integers, of 16 for 16-bit floats. Thread (g, q)
of a warp, g = thread / 4, q = thread % 4, brings words of rows g and g + 8, of lane q of a quad; a warp has two quads.
Its columns are the two planes of factors, for each of the two quads and of the two parts of codes, with zeros for the
terms of others: so sums of both quads and parts come out of one chain of instructions. Column 4 p + 2 h + d is plane d,
the warp's quad h, part p; thread (g, q) has columns 2q and 2q + 1 of its rows in the end.
"""

from __future__ import annotations

import functools

from jtile import ir

from .layouts import Layout, Linear, sliced
from .linear import halved, permuted, reshaped

WARPS, COUNT, WORDS, EIGHT = 4, 32, 4, 8  # warps of a role; lanes, words of a lane, rows of a tile
WORDS_OF = (EIGHT, COUNT, WORDS)
# The axes of words: rows, the warp, the quad, two bits of the lane in it, two of the word; and without the quad, where
# words are sums: whether rows are the last 8, rows, the plane, the warp, its quad, the part.
BITS, SUMS = (EIGHT, WARPS, 2, 2, 2, 2, 2), (2 * EIGHT, 2, 16)
LAST, PERM = (0, 1, 3, 4, 5, 6, 2), (4, 0, 5, 1, 3, 2)


def fits(op: ir.DotQuads, warps: int) -> bool:
    """Whether instructions compute this product in a role of so many warps."""
    return warps == WARPS


@functools.cache
def words() -> Linear:
    """The layout of words, [rows, lanes, words]. Threads that read shared memory at once, of two rows, have rows 4
    apart, whose 64 bytes a swizzle of 128 bytes puts in different banks."""
    return Linear(
        ((0, 0, 1), (0, 0, 2), (0, 4, 0)),
        ((0, 1, 0), (0, 2, 0), (4, 0, 0), (1, 0, 0), (2, 0, 0)),
        ((0, 8, 0), (0, 16, 0)),
    )


@functools.cache
def spread() -> Linear:
    """The layout of words with an axis for each bit of the row."""
    return reshaped(words(), WORDS_OF, (2, 2, 2, COUNT, WORDS))


@functools.cache
def factors() -> Layout:
    """The layout of factors, [planes, lanes, words]: four threads have the same."""
    return sliced(spread(), [1, 2])


@functools.cache
def sums() -> Linear:
    """The layout of the sums, [rows, planes, parts of quads]."""
    own = halved(permuted(reshaped(words(), WORDS_OF, BITS), LAST))
    assert own is not None
    apart = tuple(BITS[k] for k in LAST[:-1])
    return reshaped(permuted(own, PERM), tuple(apart[k] for k in PERM), SUMS)
