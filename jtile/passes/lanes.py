"""Where programs that run as one stand in a tile, and how a value depends on which of them it is of (`coarsen`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from jtile.ir import At, Broadcast, Cast, Index, Iota, Map, Reshape, Take, TileType, Value
from jtile.ir.types import DTYPES

from .fold import number


@dataclasses.dataclass(frozen=True)
class New:
    """The programs are an axis of their own, in front of axis `at` of the tile that each of them has."""

    at: int

    def shape(self, shape: Sequence[int], programs: int) -> tuple[int, ...]:
        return (*shape[: self.at], programs, *shape[self.at :])


@dataclasses.dataclass(frozen=True)
class Wide:
    """The programs' tiles lie one behind the other along axis `at`."""

    at: int

    def shape(self, shape: Sequence[int], programs: int) -> tuple[int, ...]:
        return (*shape[: self.at], shape[self.at] * programs, *shape[self.at + 1 :])


Lanes = New | Wide
ANY = "any"  # of values that are computed from program ids alone, wherever they are needed
Kind = Lanes | str | None  # None: one value for all of the programs


class Refused(Exception):  # noqa: N818
    """These programs cannot run as one; the text says why."""


def before(lanes: Lanes, shape: Sequence[int]) -> int:
    """How many tiles of each program stand in front of the axis of programs: lanes with equal numbers have the elements
    in one order."""
    return math.prod(shape[: lanes.at])


def place(shape: Sequence[int], front: int) -> New | None:
    """The first place for an axis of programs with `front` elements in front of it."""
    return next((New(q) for q in range(len(shape) + 1) if math.prod(shape[:q]) == front), None)


def first_axis(index: Index, k: int) -> int:
    """The axis of what is accessed at which dimension k of an index stands, or would stand if it was not dropped."""
    axis, taken = 0, False
    for d in index[:k]:
        if isinstance(d, Take):
            if isinstance(index[k], Take):
                return axis
            axis += 0 if taken else len(d.indices.shape)
            taken = True
        elif not isinstance(d, At):
            axis += 1
    return axis


@dataclasses.dataclass(frozen=True)
class Slopes:
    """Of a tile of integers that grow evenly: by how much from one program to the next, and along axes."""

    program: int
    axes: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def times(self, n: int) -> Slopes:
        return Slopes(self.program * n, {a: c * n for a, c in self.axes.items()})

    def plus(self, other: Slopes, sign: int) -> Slopes:
        axes = {a: self.axes.get(a, 0) + sign * other.axes.get(a, 0) for a in {**self.axes, **other.axes}}
        return Slopes(self.program + sign * other.program, axes)


FLAT = Slopes(0)


def slopes(v: Value, counts: Callable[[Value], bool], kinds: Mapping[Value, Kind]) -> Slopes | None:
    """How a value grows from program to program; None where it does not grow evenly, or may wrap around. `counts`:
    whether a value is the number of the program."""
    if not isinstance(v.type, TileType) or DTYPES[v.dtype].kind not in "iu" or DTYPES[v.dtype].bits < 32:
        return None
    if kinds.get(v) is None and (not v.shape or number(v) is not None):
        return FLAT
    if counts(v):
        return Slopes(1)
    inner = lambda x: slopes(x, counts, kinds)
    match v.op:
        case Iota(_, a, _):
            return Slopes(0, {a: 1})
        case Cast(x) if DTYPES[x.dtype].kind in "iu" and DTYPES[x.dtype].bits <= DTYPES[v.dtype].bits:
            return inner(x)
        case Broadcast(x, _, dims):
            s = inner(x)
            return s and Slopes(s.program, {dims[a]: c for a, c in s.axes.items() if x.shape[a] > 1})
        case Reshape(x):
            s = inner(x)
            old, new = ([k for k, n in enumerate(t.shape) if n != 1] for t in (x, v))
            if s is None or [x.shape[k] for k in old] != [v.shape[k] for k in new]:
                return None
            return Slopes(s.program, {new[old.index(a)]: c for a, c in s.axes.items() if a in old})
        case Map("neg", (x,)):
            s = inner(x)
            return s and s.times(-1)
        case Map("add" | "sub" as fn, (x, y)):
            s, t = inner(x), inner(y)
            return None if s is None or t is None else s.plus(t, 1 if fn == "add" else -1)
        case Map("mul", (x, y)):
            for a, by in ((x, number(y)), (y, number(x))):
                if by is not None and (s := inner(a)) is not None:
                    return s.times(int(by))
    return None
