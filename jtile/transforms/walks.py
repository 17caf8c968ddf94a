"""How grid axes and loops walk along the dimensions of Refs: every index, computed for every program, and classified.

An index that is a function of one or two counters (a program id or a loop variable) and of constants is small: it is
evaluated for all of their values with the ops' own reference meaning. So `h // 4` counts as what it is, however it is
spelt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jtile import ir

MOST = 1 << 16  # values of an index that are worth computing


@dataclasses.dataclass(frozen=True)
class Counter:
    """A grid axis or a loop `0, 1, .. extent - 1`.

    Attributes:
      axis: the axis of the grid, or None.
      loop: the loop, or None.
    """

    extent: int
    axis: int | None = None
    loop: ir.For | None = None


@dataclasses.dataclass(frozen=True)
class Walk:
    """An index along a dimension that follows a counter.

    Attributes:
      counter: the counter that the index follows.
      size: elements per step (1 for one element); steps of neighbours touch and do not overlap.
      coarse: how many neighbouring counts share one step (grouped heads), or 1.
      inner: counts of another counter inside of one step (`pid * inner + k`), or 1; a step is then `inner * size`
        elements.
      reverse: whether it walks from the end.
    """

    counter: Counter
    size: int
    coarse: int = 1
    inner: int = 1
    reverse: bool = False

    @property
    def step(self) -> int:
        """Elements of the dimension that one step owns."""
        return self.size * self.inner


@dataclasses.dataclass(frozen=True)
class Inside:
    """An index that repeats with a period of counts (`pid % period`): the same dimension for every block of counts."""

    counter: Counter
    period: int


WHOLE = "whole"  # an access of all of a dimension


@dataclasses.dataclass(frozen=True)
class Use:
    """One dimension of one access.

    Attributes:
      op, place: the access, and which dimension of its index.
      how: `WHOLE`, a `Walk`, an `Inside`, or None: not understood.
      counters: all that the index depends on.
      axis: the axis of the loaded or stored tile that lies along the dimension, or None.
    """

    op: ir.Load | ir.Store | ir.Atomic
    place: int
    how: str | Walk | Inside | None
    counters: tuple[Counter, ...]
    axis: int | None

    @property
    def node(self) -> tuple[ir.Value, int]:
        return self.op.ref, self.place

    @property
    def tile(self) -> ir.Value:
        return self.op.result if isinstance(self.op, ir.Load) else self.op.value


class Walks:
    """All accesses of a kernel without dead code.

    Attributes:
      uses: one per dimension of every access.
      stray: counters that something else than an index depends on, with the place of the first such use.
    """

    def __init__(self, kernel: ir.Kernel):
        self.kernel = kernel
        self.counter: dict[ir.Value, Counter] = {}
        self.uses: list[Use] = []
        self.stray: dict[Counter, str] = {}
        self._grid = [Counter(n, axis=a) for a, n in enumerate(kernel.grid)]
        self._tables: dict[ir.Value, tuple[tuple[Counter, ...], np.ndarray] | None] = {}
        self._values: dict[tuple[ir.Value, tuple[Counter, ...]], np.ndarray | None] = {}
        self._depends: dict[ir.Value, frozenset[Counter]] = {}
        self._block(kernel.body)

    # -- the walk ---------------------------------------------------------------------------------------------------
    def _block(self, b: ir.Block) -> None:
        for op in b.ops:
            match op:
                case ir.ProgramId(axis=axis):
                    self.counter[op.result] = self._grid[axis]
                case ir.NumPrograms(axis=axis):
                    self._stray(self._grid[axis], op)
                case ir.Load() | ir.Store() | ir.Atomic():
                    self._access(op)
                case ir.For():
                    self._loop(op)
                case _ if not scalar_op(op):
                    self._other(op, op.operands())
            if not isinstance(op, ir.For):
                for inner in op.blocks():
                    self._block(inner)
                    self._other(op, inner.yields)

    def _loop(self, op: ir.For) -> None:
        lo, hi, step = (self._fixed(v) for v in (op.lo, op.hi, op.step))
        if lo == 0 and step == 1 and hi is not None:
            self.counter[op.body.params[0]] = Counter(hi, loop=op)
        self._other(op, [v for v in op.operands() if self._fixed(v) is None])
        self._block(op.body)
        self._other(op, op.body.yields)

    def _access(self, op: ir.Load | ir.Store | ir.Atomic) -> None:
        rest = [op.mask] if isinstance(op, ir.Load) else [op.value, op.mask, getattr(op, "compare", None)]
        self._other(op, [v for v in rest if v is not None])
        axis = 0
        for place, dim in enumerate(op.index):
            counters = tuple(sorted(self.depends(ir.dim_value(dim)), key=_order))
            how = self._classify(op.ref.shape[place], dim)
            self.uses.append(Use(op, place, how, counters, None if isinstance(dim, ir.At | ir.Take) else axis))
            axis += len(dim.indices.shape) if isinstance(dim, ir.Take) else not isinstance(dim, ir.At)
            if isinstance(dim, ir.Take):
                self._other(op, [dim.indices])

    def _other(self, op: ir.Op, values) -> None:
        for v in values:
            for c in self.depends(v) if not isinstance(v.type, ir.RefType) and not v.shape else ():
                self._stray(c, op)

    def _stray(self, counter: Counter, op: ir.Op) -> None:
        self.stray.setdefault(counter, f"{op.mnemonic} at {op.loc}")

    # -- scalars ----------------------------------------------------------------------------------------------------
    def depends(self, v: ir.Value) -> frozenset[Counter]:
        """The counters that a scalar is computed from by scalar arithmetic."""
        if v in self.counter:
            return frozenset([self.counter[v]])
        if v not in self._depends:
            op = v.op
            parts = [self.depends(x) for x in op.operands()] if op is not None and scalar_op(op) else []
            self._depends[v] = frozenset().union(*parts)
        return self._depends[v]

    def table(self, v: ir.Value) -> tuple[tuple[Counter, ...], np.ndarray] | None:
        """(counters, the value for each of their counts) of a scalar that depends on nothing else; else None."""
        if v not in self._tables:
            self._tables[v] = self._tabulate(v)
        return self._tables[v]

    def _fixed(self, v: ir.Value) -> int | None:
        """The one value that a scalar has in every program and round, whatever it is computed from."""
        if v.shape or v.type.info.kind not in "iu":
            return None
        found = self.table(v)
        values = None if found is None else np.unique(found[1])
        return None if values is None or values.size != 1 else int(values[0])

    def _tabulate(self, v: ir.Value):
        counters = tuple(sorted(self.depends(v), key=_order))
        if len(counters) > 2 or np.prod([c.extent for c in counters], dtype=np.int64) > MOST:
            return None
        values = self._evaluate(v, counters)
        return None if values is None else (counters, values)

    def _evaluate(self, v: ir.Value, counters: tuple[Counter, ...]) -> np.ndarray | None:
        """The value for each of the counters' counts; None where that takes more than scalar arithmetic."""
        if (v, counters) not in self._values:  # many indices are computed from the same few values
            self._values[v, counters] = self._computed(v, counters)
        return self._values[v, counters]

    def _computed(self, v: ir.Value, counters: tuple[Counter, ...]) -> np.ndarray | None:
        if v in self.counter:
            shape = [1] * len(counters)
            shape[counters.index(self.counter[v])] = -1
            counts = np.arange(self.counter[v].extent, dtype=v.type.info.numpy).reshape(shape)
            return np.broadcast_to(counts, [c.extent for c in counters])
        if v.op is None or not scalar_op(v.op):
            return None
        found = [self._evaluate(x, counters) for x in v.op.operands()]
        args = [a for a in found if a is not None]
        if len(args) < len(found):
            return None
        if isinstance(v.op, ir.Full):
            return np.full([c.extent for c in counters], v.op.reference())
        with np.errstate(all="ignore"):
            return np.asarray(v.op.reference(*args))

    # -- what an index is -------------------------------------------------------------------------------------------
    def _classify(self, n, dim: ir.Dim) -> str | Walk | Inside | None:
        """How `dim` walks along a dimension of `n` elements."""
        if isinstance(dim, ir.Take) or not isinstance(n, int) or not isinstance(getattr(dim, "size", 1), int):
            return None
        found = self.table(ir.dim_value(dim))
        if found is None:
            return None
        counters, steps = found
        size = getattr(dim, "size", 1)
        if n == size == 1 and not steps.any():  # the one head of multi-query attention: `h // heads`
            return WHOLE
        if isinstance(dim, ir.Span):
            if dim.stride != 1 or size == 0 or (steps % size).any():
                return None
            steps = steps // size
        elif isinstance(dim, ir.Tile) and dim.step != size:
            return WHOLE if n == size and not steps.any() else None
        if n == size and not steps.any() and not isinstance(dim, ir.At):
            return WHOLE
        if len(counters) == 1:
            return _one(counters[0], steps.astype(np.int64), size, n)
        return _two(counters, steps.astype(np.int64), size, n) if len(counters) == 2 else None


def scalar_op(op: ir.Op) -> bool:
    """Whether an op is arithmetic on scalars, which a table can follow."""
    if isinstance(op, ir.Full):
        return not op.shape
    return isinstance(op, ir.Map | ir.Select | ir.Cast) and not op.result.shape


def _order(c: Counter) -> tuple[int, int]:
    """A key that sorts grid axes first, and loops as they come."""
    return (0, c.axis) if c.axis is not None else (1, id(c.loop))


def _one(c: Counter, steps: np.ndarray, size: int, n: int) -> Walk | Inside | None:
    counts, total = np.arange(c.extent), -(-n // size)
    if total and c.extent % total == 0:
        coarse = c.extent // total
        for reverse in (False, True):
            walk = Walk(c, size, coarse, reverse=reverse)
            if np.array_equal(steps, positions(walk, counts, total)) and (coarse == 1 or n % size == 0):
                return walk
    for period in divisors(c.extent):
        if np.array_equal(steps, np.tile(steps[:period], c.extent // period)):
            return Inside(c, period)
    return None


def positions(walk: Walk, counts: np.ndarray, total: int) -> np.ndarray:
    steps = counts // walk.coarse
    return total - 1 - steps if walk.reverse else steps


def _two(counters, steps: np.ndarray, size: int, n: int) -> Walk | None:
    """The walk of an index `outer * inner + k`, where the counter of k runs once through `inner`; None for others."""
    for outer, inner, table in ((*counters, steps), (*counters[::-1], steps.T)):
        expected = np.arange(outer.extent)[:, None] * inner.extent + np.arange(inner.extent)
        if n == size * outer.extent * inner.extent and np.array_equal(table, expected):
            return Walk(outer, size, inner=inner.extent)
    return None


def divisors(n: int) -> Iterator[int]:
    """Proper divisors of n, ascending."""
    return (d for d in range(1, n // 2 + 1) if n % d == 0)
