"""The operands of streamed products: rows of x, with a norm in front or without one, and the scales of weights.

See `hopper_gemv`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.operands import Norm, Weight
from jtile.ops.streamed_numbers import EIGHT, LANES, bits_of, groups_of

PIECE = 1024  # weights of a row that a role takes in a round


def of_piece(array, inner: int, kind: str) -> int:
    """How many scales of a row of `inner` weights belong to 512 bytes of codes; 0 where that is no whole number."""
    n = array.shape[-1] * (PIECE // groups_of(kind))
    return n // inner if n % inner == 0 else 0


def of_blocks(weight: Weight, kind: str) -> tuple:
    """The arrays that come with the words: scales or minima of groups of weights."""
    return by_block(weight, kind) if in_lines(weight, kind) else ()


def read_alone(weight: Weight, kind: str) -> tuple:
    """The arrays that the roles read themselves: tensor maps do not copy rows that are no whole lines of 16 bytes."""
    return () if in_lines(weight, kind) else by_block(weight, kind)


def by_block(weight: Weight, kind: str) -> tuple:
    """The arrays of scales or minima; one scale for each row of W is left to the role that writes."""
    return () if bits_of(kind) == 16 or weight.scaled_last(kind) else weight.of_blocks


def in_lines(weight: Weight, kind: str) -> bool:
    """Whether tensor maps copy the rows of all arrays of scales or minima."""
    return all(a.shape[1] * jnp.dtype(a.dtype).itemsize % 16 == 0 for a in by_block(weight, kind))


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that are multiplied: those of x [m, in / n, n], or the RMS norm of x, or of x + norm.residual."""

    x: jt.Ref
    norm: Norm | None = None
    eps: float = 0.0

    @property
    def count(self) -> int:
        """How many rows are multiplied."""
        return self.x.shape[0]

    @property
    def pieces(self) -> int:
        return jt.cdiv(self.x.shape[1] * self.x.shape[2], PIECE)

    @property
    def piece(self) -> tuple[int, int]:
        """The sizes of a piece of a row [in / n, n]."""
        return PIECE // self.x.shape[2], self.x.shape[2]

    def view(self, ref):
        """The pieces of [m, in / n, n]."""
        return ref.tiles(None, *self.piece)

    def eights(self, at) -> list[tuple]:
        """Where the four tiles [lanes, `EIGHT`] of a piece are."""
        groups, eights = PIECE // self.x.shape[2] // LANES, self.x.shape[2] // EIGHT
        return [(at * groups + group, k) for group in range(groups) for k in range(eights)]

    def before(self, i: int, at, eight: tuple | None = None):
        """Piece `at` of row i as float32, before the norm, or one of its `eights`."""
        sizes = self.piece if eight is None else (LANES, EIGHT)
        view = lambda ref: ref.tiles(None, *sizes)
        place = (i, at, 0) if eight is None else (i, *eight)
        x = view(self.x)[place].astype(jnp.float32)
        residual = None if self.norm is None else self.norm.residual
        return x if residual is None else x + view(residual)[place].astype(jnp.float32)

    def scale(self, squares: list):
        """1 / sqrt(mean of the squares + eps) of a row, from the sums of squares that its roles found."""
        total = functools.reduce(jnp.add, [part.sum() for part in squares])
        return jax.lax.rsqrt(total * jnp.float32(1 / (self.x.shape[1] * self.x.shape[2])) + self.eps)

    def weights(self, at, eights: bool) -> list:
        """The weights of the norm, for piece `at` or for each of its `eights`; None where there is no norm."""
        if self.norm is None:
            return [None] * (len(self.eights(at)) if eights else 1)
        w = self.norm.weight
        if eights:
            return [w.tiles(LANES, EIGHT)[place] for place in self.eights(at)]
        return [w.tiles(*self.piece)[at, 0]]

    def parts(self, i: int, at, eights: bool) -> list:
        """Piece `at` of row i before the norm, whole or as its `eights`."""
        return [self.before(i, at, eight) for eight in (self.eights(at) if eights else [None])]


def shares_of_parts(sums: list) -> list:
    """What each part of attention counts, from the logarithms of its sums."""
    # 2^(lse_p - M) / sum_p 2^(lse_p - M)     M = max_p lse_p
    top = functools.reduce(jnp.maximum, sums)
    shares = [jnp.exp2(x - top) for x in sums]
    root = jax.lax.rsqrt(functools.reduce(jnp.add, shares))  # of a number from 1 on: sooner done than a quotient
    return [x * root * root for x in shares]


@dataclasses.dataclass(frozen=True)
class Joined(Rows):
    """A row that attention has left in parts, x [parts, in / n, n], and the logarithms, to the base 2, of their sums of
    weights, lse float32 [parts, heads]: put together as it is read."""

    lse: jt.Ref | None = None

    @property
    def count(self) -> int:
        return 1

    def before(self, i: int, at, eight: tuple | None = None):
        # sum_p 2^(lse_p - M) x_p / sum_p 2^(lse_p - M)     M = max_p lse_p
        sizes, place = (self.piece, (at, 0)) if eight is None else ((LANES, EIGHT), eight)
        (parts, rows, _), heads = self.x.shape, self.lse.shape[1]
        head = jnp.minimum((place[0] * sizes[0] + jt.arange(sizes[0])) // (rows // heads), heads - 1)
        tiles = [self.x.tiles(None, *sizes)[(p, *place)].astype(jnp.float32) for p in range(parts)]
        sums = [self.lse[p, head] for p in range(parts)]
        shares = [share[:, None] for share in shares_of_parts(sums)]
        return functools.reduce(jnp.add, [x * share for x, share in zip(tiles, shares)])


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of rows of a program, from `first` on every `programs`-th, `tiles` of them, in `chunks` rounds each."""

    first: jax.Array
    programs: jax.Array
    tiles: jax.Array
    chunks: int
    rows: int
    roles: int

    def scales(self, weights, j: int, kind: str, k):
        """What role j reads itself for round k: for each weight and array the scales of each group, as they are. None
        where they come with the words."""
        read = [read_alone(w, kind) for w in weights]
        if not read[0]:
            return None
        n = jnp.minimum(self.first + k // self.chunks * self.programs, jt.cdiv(read[0][0].shape[0], self.rows) - 1)
        count, inner = groups_of(kind), weights[0].codes.shape[1] * 32 // bits_of(kind)
        at = [((k % self.chunks) * self.roles + j) * count + group for group in range(count)]
        return [[[a.tiles(self.rows, of_piece(a, inner, kind))[n, p] for p in at] for a in arrays] for arrays in read]


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the tiles of rows of a program are: of matrices that lie as they are multiplied. early: the kernel in front
    does not make what the places depend on."""

    early = True

    def of_weight(self, w: int, tile, piece, rows: int) -> tuple:
        """The place of a 512-byte piece of a tile of weight w, in tiles of `rows` rows and such pieces."""
        return tile, piece

    def of_result(self, i: int, tile) -> tuple:
        """The place of what a tile of rows gives for row i of x, in tiles of so many columns of y."""
        return i, tile


IN_ORDER = Places()
