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


class Growth:
    """How integers grow from program to program.

    Args:
      counts: whether a value is the number of the program.
      kinds: of each value, as far as they are known.
      size: how many programs there are.
    """

    def __init__(self, counts: Callable[[Value], bool], kinds: Mapping[Value, Kind], size: int):
        self.counts, self.kinds, self.size = counts, kinds, size
        self.known: dict[Value, Slopes | None] = {}  # while no kind changes

    def of(self, v: Value) -> Slopes | None:
        """How a value grows; None where it does not grow evenly, or may wrap around."""
        if v not in self.known:
            found = self._of(v) if isinstance(v.type, TileType) and DTYPES[v.dtype].kind in "iu" else None
            self.known[v] = found if found and self._fits(v, found) else None
        return self.known[v]

    def _fits(self, v: Value, s: Slopes) -> bool:
        """Whether all that a value grows by has place in 31 bits, so that none of it wraps around on the way."""
        ways = [abs(s.program) * self.size, *(abs(c) * v.shape[a] for a, c in s.axes.items())]
        return DTYPES[v.dtype].bits >= 32 and sum(ways) < 2**31

    def _of(self, v: Value) -> Slopes | None:
        unsigned = DTYPES[v.dtype].kind == "u"
        if self.kinds.get(v) is None and (not v.shape or number(v) is not None):
            # of unsigned numbers, which stand for negative ones, too, those that are known
            return FLAT if not unsigned or 0 <= (number(v) if number(v) is not None else -1) < 2**31 else None
        if self.counts(v):
            return Slopes(1)
        match v.op:
            case Iota(_, a, _):
                return Slopes(0, {a: 1})
            case Cast(x):
                return self.of(x) if self._counts_up(x) or (x.dtype == v.dtype and not unsigned) else None
            case Broadcast(x, _, dims):
                s = self.of(x)
                return s and Slopes(s.program, {dims[a]: c for a, c in s.axes.items() if x.shape[a] > 1})
            case Reshape(x):
                return self._reshape(x, v)
            case Map("neg", (x,)) if not unsigned:
                s = self.of(x)
                return s and s.times(-1)
            case Map("add" | "sub" as fn, (x, y)) if fn == "add" or not unsigned:
                s, t = self.of(x), self.of(y)
                return None if s is None or t is None else s.plus(t, 1 if fn == "add" else -1)
            case Map("mul", (x, y)):
                for a, by in ((x, number(y)), (y, number(x))):
                    if by is not None and (s := self.of(a)) is not None:
                        return s.times(int(by))
        return None

    def _counts_up(self, v: Value) -> bool:
        """Whether a value counts programs or elements from 0, and means the same in each dtype of 32 bits or more."""
        while isinstance(v.op, Broadcast | Reshape):
            v = v.op.x
        return self.counts(v) or isinstance(v.op, Iota)

    def _reshape(self, x: Value, v: Value) -> Slopes | None:
        s = self.of(x)
        old, new = ([k for k, n in enumerate(t.shape) if n != 1] for t in (x, v))
        if s is None or [x.shape[k] for k in old] != [v.shape[k] for k in new]:
            return None
        return Slopes(s.program, {new[old.index(a)]: c for a, c in s.axes.items() if a in old})
