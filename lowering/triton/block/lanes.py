"""Where threads of four warps have the operands and sums of products of lanes (`ir.DotLanes`).

An instruction multiplies 16 rows with 8 columns, of 32 terms for 8-bit integers, of 16 for 16-bit floats. Its columns
are eight rows of a. Its terms are those of four lanes: thread (g, q) of a warp, g = thread / 4, q = thread % 4, brings
words of row g of a and of lane q. Its rows are the two planes of b, for each of the four lanes, with zeros for the
terms of the other three: so sums of four lanes come out of one instruction. Thread (g, q) has in the end those of rows
2q and 2q + 1 of a for lane g % 4 and plane g / 4.
"""

from __future__ import annotations

import functools

from jtile import ir

from .layouts import Layout, Linear, sliced
from .linear import halved, permuted, reshaped

WARPS, COUNT, WORDS, EIGHT = 4, 32, 4, 8  # warps of a role; lanes, words of a lane, rows of an instruction
# From the bits (rows / 8, three of the row, five of the lane, the lower of the word) to those of sums: rows / 8, three
# of the row, the plane, five of the lane.
PERM = (0, 7, 8, 9, 1, 4, 5, 6, 2, 3)
BACK = tuple(PERM.index(k) for k in range(len(PERM)))


def fits(op: ir.DotLanes, warps: int) -> bool:
    """Whether instructions compute this product in a role of so many warps."""
    (rows, *rest), planes = op.terms[0].shape, op.result.shape[1]
    return warps == WARPS and rows % EIGHT == 0 and rest == [COUNT, WORDS] and planes == 2


@functools.cache
def words(rows: int) -> Linear:
    """The layout of a, [rows, lanes, words]."""
    more = tuple((EIGHT << k, 0, 0) for k in range((rows // EIGHT).bit_length() - 1))
    return Linear(
        ((0, 0, 1), (0, 0, 2), (0, 4, 0), *more),
        ((0, 1, 0), (0, 2, 0), (1, 0, 0), (2, 0, 0), (4, 0, 0)),
        ((0, 8, 0), (0, 16, 0)),
    )


@functools.cache
def spread() -> Linear:
    """The layout of eight rows of a with an axis for each bit of the row."""
    return reshaped(words(EIGHT), (EIGHT, COUNT, WORDS), (2, 2, 2, COUNT, WORDS))


@functools.cache
def factors() -> Layout:
    """The layout of b, [planes, lanes, words]: every thread g has what its four neighbours have."""
    return sliced(spread(), [1, 2])


def bits(rows: int) -> tuple[int, ...]:
    return (rows // EIGHT, *(2,) * 9)


@functools.cache
def sums(rows: int) -> Linear:
    """The layout of the sums, [rows, planes, lanes]."""
    whole = words(rows)
    apart = permuted(reshaped(whole, (rows, COUNT, WORDS), (rows, COUNT, 2, 2)), (0, 1, 3, 2))
    own = halved(apart)
    assert own is not None
    return reshaped(permuted(reshaped(own, (rows, COUNT, 2), bits(rows)), PERM), (*tuple(bits(rows)[k] for k in PERM),),
                    (rows, 2, COUNT))  # fmt: skip
