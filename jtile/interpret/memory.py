"""Memory of the interpreter: buffers that know who read and wrote each element, and the bounds rule."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jtile.ir import At, Index, Span, Take, Tile, dim_value, index_shape
from jtile.ir.types import DTYPES

if TYPE_CHECKING:
    from .order import Order

NOBODY, SEVERAL = -1, -2
_FAR = 2**62
# What another program must not have done to an element before an access of this kind.
CONFLICTS = {"read": ("plain", "atomic"), "write": ("plain", "atomic", "reader"), "atomic": ("plain", "reader")}


def poison(shape, dtype: str) -> np.ndarray:
    """Memory that nobody wrote: NaN for floats that have one, True for bool, bytes 0xAA for the rest."""
    d = DTYPES[dtype]
    if d.kind == "b":
        return np.ones(shape, np.bool_)
    if d.kind == "f" and d.name != "float4_e2m1fn":
        return np.full(shape, np.nan, np.float32).astype(d.numpy)
    if d.bits < 8:  # NumPy has one element a byte, of which two or four bits hold the pattern
        pattern = 0xAA & ((1 << d.bits) - 1)
        return np.full(shape, pattern if d.kind == "u" else pattern - (1 << d.bits), np.float32).astype(d.numpy)
    return np.full(math.prod(shape) * d.bits // 8, 0xAA, np.uint8).view(d.numpy).reshape(shape)


class Handle:
    """What stands in the place of a value that is no tile: memory, barriers, a product under way."""


class Buffer(Handle):
    """The elements of one array, row-major and flat, and for each of them who wrote and read it.

    Attributes:
      data: the elements; `defined`: which of them hold something.
      plain, atomic, reader: program that wrote plainly, wrote atomically, read; NOBODY, or SEVERAL of them.
        None for memory that cannot be raced for: inputs that no output aliases, and scratch.
    """

    def __init__(self, array: np.ndarray, defined: bool, shared: bool = False):
        self.shape = array.shape
        self.data = np.array(array, copy=True).reshape(-1)
        self.defined = np.full(self.data.shape, defined)
        self.plain = np.full(self.data.shape, NOBODY) if shared else None
        self.atomic = np.full(self.data.shape, NOBODY) if shared else None
        self.reader = np.full(self.data.shape, NOBODY) if shared else None

    @property
    def array(self) -> np.ndarray:
        return self.data.reshape(self.shape)

    def unravel(self, flat: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(flat, self.shape))

    def access(
        self, at: np.ndarray, program: int, kind: str, order: Order | None = None
    ) -> tuple[int, int, str] | None:
        """Record that `program` does a `kind` ("read", "write", "atomic") access to the elements `at`; `order` says
        what came before it.

        Returns None, or a conflict: the flat element, the other program (or SEVERAL; a span, where there is an order),
        and what that one did.
        """
        if self.plain is None or self.atomic is None or self.reader is None or not at.size:
            return None
        for name in CONFLICTS[kind]:
            other = getattr(self, name)[at]
            bad = (other != NOBODY) & (other != program) if order is None else order.unknown(other)
            if bad.any():
                first = int(np.argmax(bad))
                did = {"plain": "wrote", "atomic": "wrote atomically", "reader": "read"}[name]
                who = int(other[first])
                return int(at[first]), who if order is None else order.stranger(who), did
        mine = {"read": self.reader, "write": self.plain, "atomic": self.atomic}[kind]
        before = mine[at]
        if order is not None:
            mine[at] = order.joined(before)
            return None
        mine[at] = np.where((before == NOBODY) | (before == program), program, SEVERAL)
        return None


@dataclasses.dataclass(frozen=True)
class Lanes:
    """An index resolved against a shape: the lanes of the tile, row-major.

    Attributes:
      shape: shape of the tile.
      at: flat element of each lane [prod(shape)]; 0 where the lane is not active.
      active: which lanes touch memory [prod(shape)]: inside the array and not masked.
    """

    shape: tuple[int, ...]
    at: np.ndarray
    active: np.ndarray

    @functools.cached_property
    def elements(self) -> np.ndarray:
        return self.at if self.active.all() else self.at[self.active]


def resolve(index: Index, values: list[np.ndarray], shape: tuple[int, ...], mask: np.ndarray | None) -> Lanes:
    """The lanes that `index` names; `values` are the traced numbers of its dimensions, in order."""
    out = index_shape(index)
    flat, active = np.int64(0), mask  # as small as the axes so far allow; None: all lanes
    for n, i in zip(shape, coordinates(index, values, shape), strict=True):
        inside = (i >= 0) & (i < n)
        if not inside.all():
            active = inside if active is None else active & inside
            i = np.where(inside, i, 0)
        flat = flat * n + i
    flat = _whole(flat, out)
    if active is None:
        return Lanes(out, flat, np.ones(flat.shape, np.bool_))
    active = _whole(active, out)
    return Lanes(out, np.where(active, flat, 0), active)


def _whole(x: np.ndarray | np.int64, shape: tuple[int, ...]) -> np.ndarray:
    """What broadcasts to a shape, flat and whole."""
    return (x if x.shape == shape else np.broadcast_to(x, shape)).reshape(-1)


def coordinates(index: Index, values: list[np.ndarray], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """For each axis of an array the element indices that the lanes of a tile have along it, of a shape that broadcasts
    to that of the tile."""
    rank = len(index_shape(index))
    axis, take_axis = 0, None
    for k, (d, v) in enumerate(zip(index, values, strict=True)):
        if isinstance(d, At):
            yield _int64(v)
        elif isinstance(d, Take):
            if take_axis is None:
                take_axis, axis = axis, axis + v.ndim
            yield _int64(v).reshape(v.shape + (1,) * (rank - take_axis - v.ndim))
        else:
            step = d.stride if isinstance(d, Span) else 1
            start = int(v) * d.step if isinstance(d, Tile) else int(v)
            if abs(start) + d.size * step < _FAR:
                i = np.arange(start, start + d.size * step, step, np.int64)
            else:  # Python ints are used, since a start near the end of int64 must not wrap into the array
                lanes = [start + j * step for j in range(d.size)]
                i = np.array([j if 0 <= j < shape[k] else -1 for j in lanes], np.int64)
            yield i.reshape((-1,) + (1,) * (rank - axis - 1))
            axis += 1


def _int64(v: np.ndarray) -> np.ndarray:
    """Indices as int64; uint64 numbers past its end leave every array."""
    return (np.minimum(v, np.uint64(2**63 - 1)) if v.dtype == np.uint64 else v).astype(np.int64)


def tile_count(n: int, step: int) -> int:
    """Number of tiles that start inside an axis of n elements; an empty axis has one (empty) tile."""
    return max(-(-n // step), 1)


def violation(
    index: Index, values: list[np.ndarray], shape: tuple[int, ...], beyond: bool = False, before: bool = False
) -> str | None:
    """Why the bounds rule forbids this access, or None; `beyond`: spans and tiles may start behind the end, as those of
    roles do, which share a tile that hangs over; `before`: spans may start in front of it, as those of copies do.

    An element index must lie in the array, a span must start in `[0, n]`, a tile index in `[0, tile_count)`. What hangs
    over the end, and gathers, are legal: those lanes read the pad and are not written.
    """
    for k, (d, v) in enumerate(zip(index, values, strict=True)):
        n, i = shape[k], 0 if isinstance(d, Take) else int(v)
        if isinstance(d, At) and not 0 <= i < n:
            return f"index {i} is outside axis {k}, which has {n} elements"
        if (beyond and i >= 0 and isinstance(d, Span | Tile)) or (before and i < 0 and isinstance(d, Span)):
            continue
        if isinstance(d, Span) and not 0 <= i <= n:
            return f"a span that starts at {i} leaves axis {k}, which has {n} elements"
        if isinstance(d, Tile) and not 0 <= i < tile_count(n, d.step):
            count = tile_count(n, d.step)
            return f"tile index {i} is outside axis {k}, which has {count} tiles ({n} elements in steps of {d.step})"
    return None


def index_values(index: Index, env) -> list[np.ndarray]:
    """The traced numbers of an index."""
    return [env[dim_value(d)] for d in index]
