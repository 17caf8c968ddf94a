"""Rows in the order of groups, each of which has a matrix of its own: what kernels of such products share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops._shapes import sums_in
from jtile.ops.activations import swiglu
from jtile.ops.epilogues import ACTIVATIONS

Index = jax.Array | int


def tiles_of_groups(sizes, bm: int, rows: int):
    """How tiles of `bm` rows go on from group to group: (the first tile behind each group, the first row behind it, the
    number of all tiles); the rows behind the last group come last."""
    last, ends = (jnp.cumsum(x, dtype=jnp.int32) for x in ((sizes + (bm - 1)) // bm, sizes))
    behind = jnp.maximum(rows - ends.max(), 0)
    return last, ends, last.max() + (behind + (bm - 1)) // bm


def place(last, ends, groups: int, t, bm: int, rows: int):
    """(group, first row, row behind the last, whether a group has it) of tile t. The numbers do not
    depend on each other, which saves time: groups before that of tile t are those for which `last` is at most t."""
    before = last <= t
    g = before.sum(dtype=jnp.int32)
    first = jnp.where(before, ends, 0).max() + (t - jnp.where(before, last, 0).max()) * bm
    end = jnp.where(before, rows, jnp.minimum(ends, rows)).min()
    return jnp.minimum(g, groups - 1), first, end, g < last.shape[0]


def in_parts[T: tuple](arrays: T, activation: str | None) -> T:
    """A named tuple of arrays [groups, out, …]; with an activation, those of a gated layer, as [groups, 2, out / 2, …],
    gates first, then the factors that they gate."""
    if activation is None:
        return arrays
    apart = lambda a: None if a is None else a.reshape(a.shape[0], 2, a.shape[1] // 2, *a.shape[2:])
    return type(arrays)(*map(apart, arrays))


def parts[T: tuple](arrays: T, group: Index, activation: str | None) -> list[T]:
    """In a kernel, the matrix of a group, or its two parts, in a list, from the arrays that `in_parts` gives."""
    matrix = of_group(arrays, group)
    return [matrix] if activation is None else [of_group(matrix, n) for n in range(2)]


def gated(products: Sequence[jax.Array], activation: str | None) -> jax.Array:
    """The result from the products with the `parts` of a matrix."""
    first, *more = products
    return ACTIVATIONS[activation](first) * more[0] if more else first


def joined(y, activation: str, out_dtype: str):
    """The result from the products with both halves of a matrix."""
    if activation == "silu":
        return swiglu(y).astype(out_dtype)
    gate, up = jnp.split(y.astype(sums_in(y)), 2, axis=1)
    return (ACTIVATIONS[activation](gate) * up).astype(out_dtype)


def most_tiles(rows: int, groups: int, bm: int) -> int:
    """The most tiles of `bm` rows: every group has one that it does not fill, as have the rows behind the groups."""
    return rows // bm + groups + 1


def padded(sizes):
    """Sizes of groups, int, as int32, with zeros behind the groups up to a power of two: a tile that every
    target has."""
    groups = sizes.shape[0]
    return jnp.pad(sizes.astype(jnp.int32), (0, jt.next_power_of_2(groups) - groups))


@dataclasses.dataclass(frozen=True)
class _OfGroup:
    """The matrix of one group in a stack of matrices, for code that reads the Ref of a matrix."""

    stack: jt.Ref
    group: Index

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self.stack.dtype

    def tiles(self, *sides: int | None) -> _TilesOfGroup:
        return _TilesOfGroup(self.stack.tiles(None, *sides), self.group)


@dataclasses.dataclass(frozen=True)
class _TilesOfGroup:
    view: jt.TileView
    group: Index

    def __getitem__(self, index: tuple) -> jax.Array:
        return self.view[(self.group, *index)]


def of_group[T: tuple](arrays: T, group: Index) -> T:
    """The arrays of one group, which have `shape`, `dtype` and `tiles`, from a named tuple of Refs with a leading axis
    of groups."""
    return type(arrays)(*(None if a is None else _OfGroup(a, group) for a in arrays))


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows from `first` to before `end` that a program takes. They are those of a `group` or, if not `inside`, of none:
    such rows come last. Programs for which there are none have a tile that does not exist."""

    exists: jax.Array
    group: jax.Array
    first: jax.Array
    end: jax.Array
    inside: jax.Array

    def mine(self, bm: int, width: int) -> jax.Array:
        """Which elements of a result [bm, width] belong to the rows of this tile."""
        return jnp.broadcast_to((self.first + jt.arange(bm) < self.end)[:, None], (bm, width))


def tile_of_rows(sizes: jt.Ref, groups: int, t: Index, bm: int, rows: int) -> Tile:
    """The t-th of the tiles of `bm` rows of all groups."""
    last, ends, tiles = tiles_of_groups(sizes[...], bm, rows)
    group, first, end, inside = place(last, ends, groups, t, bm, rows)
    return Tile(t < tiles, group, first, end, inside)


def as_int32(index: jax.Array, groups: int) -> jax.Array:
    """An index as int32, in which numbers that int32 has not, and which name no group, still name none."""
    if jnp.iinfo(index.dtype).max > jnp.iinfo(jnp.int32).max:
        index = jnp.clip(index, -1 if jnp.issubdtype(index.dtype, jnp.signedinteger) else 0, groups)
    return index.astype(jnp.int32)


def within(index: jax.Array, groups: int) -> jax.Array:
    """An index, in which `groups` stands wherever it names no group."""
    return jnp.where((index >= 0) & (index < groups), index, groups)


def named(index: jt.Ref, i: Index, groups: int) -> tuple[jax.Array, jax.Array]:
    """The matrix that an index names for row i, and whether there is such a matrix."""
    g = index[i]
    return jnp.clip(g, 0, groups - 1), (g >= 0) & (g < groups)
