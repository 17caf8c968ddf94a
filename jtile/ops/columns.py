"""Tiles of a product with as many columns as suit its size, where threads hold powers of two only: such a tile has
columns in several places of the matrix, a power of two in each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import jtile as jt


@dataclasses.dataclass(frozen=True)
class Columns:
    """Neighbouring columns of a tile: those of tile number `at` of the matrix cut into tiles of `width` columns.

    Attributes:
      own: whether these columns are the program's to write; None: they always are.
    """

    width: int
    at: int | jax.Array
    own: jax.Array | None = None

    def store(self, ref, before: tuple, value) -> None:
        """Store a tile of these columns to ref [..., m, n]; `before`: the other places, the last of which is the
        number of the rows' tile."""
        view = ref.tiles(*[None] * (len(before) - 1), *value.shape)
        jt.store(view, (*before, self.at), value, mask=self.own)


def cut_columns(n: int, bn: int, j) -> list[Columns]:
    """The columns of the j-th of the programs that share n columns, bn for each: bn as a sum of powers of two, of which
    the largest have the first columns of the matrix. Some of the last programs find no columns left for the smaller
    ones; they read others, and write nothing."""
    programs, begin, found = jt.cdiv(n, bn), 0, []
    for width in powers(bn):
        last = jt.cdiv(n, width) - 1
        at = begin // width + j
        whole = begin // width + programs - 1 <= last
        found.append(Columns(width, at) if whole else Columns(width, jnp.minimum(at, last), at <= last))
        begin += programs * width
    return found


def powers(n: int) -> list[int]:
    """The powers of two whose sum is n, the largest first."""
    return [1 << k for k in reversed(range(n.bit_length())) if n >> k & 1]
