"""What a kernel moves and computes, counted from its Tile IR."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jtile import ir

SAMPLES = 4096  # programs of a large grid that stand for all of them
TRIPS = 8  # rounds assumed for a loop whose bounds depend on what a program loads
# Functions that GPUs compute an eighth as fast as a multiplication, and CPUs by a polynomial.
SPECIAL = frozenset((
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "tanh", "asin", "acos",
    "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erf_inv", "pow", "atan2", "logistic", "cbrt",
))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Work:
    """What all programs of a kernel do together.

    Attributes:
      read, written: bytes of arrays that must be moved at least: each element that is touched once.
      loaded, stored: bytes that all loads and stores move, those that programs repeat included.
      products: operations of matrix products by dtype of the operands, a multiply-add counting as two.
      elements: operations on elements of tiles, one for each element.
      special: those of them that are exponentials, roots and the like.
      programs: the number of programs of the grid.
      exact: False where a loop's length or a condition depends on loaded values, and was guessed.
    """

    read: int
    written: int
    loaded: int
    stored: int
    products: Mapping[str, int]
    elements: int
    special: int
    programs: int
    exact: bool

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def traffic(self) -> int:
        return self.loaded + self.stored

    @property
    def flops(self) -> int:
        """Operations of matrix products of all dtypes."""
        return sum(self.products.values())


def work(kernel: ir.Kernel) -> Work:
    """The `Work` of a kernel of static sizes; tiles that hang over an edge count their elements inside, products and
    operations on tiles all of theirs."""
    return counted(kernel).result()


def counted(kernel: ir.Kernel) -> Counter:
    """What `work` counts, and how often each product runs."""
    counter = Counter(kernel)
    counter.block(kernel.body, np.ones(counter.samples))
    return counter


def together(done: Sequence[Work]) -> Work:
    """What the kernels of one program do together."""
    if len(done) == 1:
        return done[0]
    products: dict[str, int] = {}
    for w in done:
        for dtype, n in w.products.items():
            products[dtype] = products.get(dtype, 0) + n
    add = lambda name: sum(getattr(w, name) for w in done)
    return Work(
        add("read"), add("written"), add("loaded"), add("stored"), products, add("elements"), add("special"),
        add("programs"), all(w.exact for w in done),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often all programs together run an op, and how often the innermost loop around it does in one go."""

    times: float
    trips: float


class Counter:
    """Walks a kernel with, for every sampled program at once, how often an op runs (`times`) and what the integer
    scalars that decide this are (`known`).

    Attributes:
      runs: how often each product runs.
    """

    def __init__(self, kernel: ir.Kernel):
        self.kernel = kernel
        self.programs = math.prod(kernel.grid)
        self.ids = _sampled(kernel)
        self.samples = max(self.ids[0].size, 1) if self.ids else 1
        self.known: dict[ir.Value, np.ndarray] = {}
        self.loads: dict[ir.Value, float] = {}
        self.stores: dict[ir.Value, float] = {}
        self.products: dict[str, float] = {}
        self.elements = self.special = 0.0
        self.exact = True
        self.runs: dict[ir.Op, Runs] = {}
        self._trips_around = 1.0

    def result(self) -> Work:
        scale = self.programs / self.samples
        total = lambda sums: {k: round(n * scale) for k, n in sums.items()}
        loads, stores = total(self.loads), total(self.stores)
        arrays = {*self.kernel.inputs, *self.kernel.outputs}
        least = lambda moved: sum(min(n, _size(r)) for r, n in moved.items() if r in arrays)
        return Work(
            least(loads), least(stores),
            sum(n for r, n in loads.items() if r in arrays), sum(n for r, n in stores.items() if r in arrays),
            total(self.products), round(self.elements * scale), round(self.special * scale), self.programs, self.exact,
        )  # fmt: skip

    def block(self, block: ir.Block, times: np.ndarray) -> None:
        for op in block.ops:
            self.op(op, times)

    def op(self, op: ir.Op, times: np.ndarray) -> None:
        match op:
            case ir.For():
                self._loop(op, times)
            case ir.While():
                self.exact = False
                self.block(op.cond, times * (TRIPS + 1))
                self.block(op.body, times * TRIPS)
            case ir.If():
                self._branch(op, times)
            case ir.Roles():
                for body in op.bodies:
                    self.block(body, times)
            case ir.Load() | ir.AsyncLoad():
                self._move(self.loads, op.ref, op.index, times)
            case ir.Store() | ir.AsyncStore(fn="set"):
                self._move(self.stores, op.ref, op.index, times)
            case ir.Atomic() | ir.AsyncStore():
                self._move(self.loads, op.ref, op.index, times)
                self._move(self.stores, op.ref, op.index, times)
            case ir.DotAsync():
                # of a sparse product, what is multiplied: instructions for it are twice as quick as those of all terms
                self._product(op, op.a.dtype, 2 * math.prod(op.a.shape) * op.b.shape[1], times)
            case ir.Dot():
                batch, m, n, k = op.sizes()
                self._product(op, op.a.dtype, 2 * math.prod(batch) * m * n * k, times)
            case ir.DotScaled():
                self._product(op, op.a.dtype, 2 * math.prod(op.result.shape) * op.a.shape[1], times)
            case _:
                self._compute(op, times)

    def _loop(self, op: ir.For, times: np.ndarray) -> None:
        inside = times * self._trips(op)
        around = self._trips_around
        self._trips_around = float(inside.sum()) / max(float(times.sum()), 1e-9)
        self.block(op.body, inside)
        self._trips_around = around

    def _product(self, op: ir.Op, dtype: str, count: int, times: np.ndarray) -> None:
        self.runs[op] = Runs(float(times.sum()) * self.programs / self.samples, self._trips_around)
        self.products[dtype] = self.products.get(dtype, 0.0) + count * float(times.sum())

    def _compute(self, op: ir.Op, times: np.ndarray) -> None:
        self._scalar(op)
        count = _elements(op)
        self.elements += count * float(times.sum())
        if isinstance(op, ir.Map) and op.fn in SPECIAL:
            self.special += count * float(times.sum())

    def _scalar(self, op: ir.Op) -> None:
        """The value of a scalar that follows from the program's place in the grid."""
        if len(op.results) != 1 or op.results[0].shape or not isinstance(op.results[0].type, ir.TileType):
            return
        if isinstance(op, ir.ProgramId):
            self.known[op.result] = np.asarray(self.ids[op.axis], np.int32)
        elif isinstance(op, ir.NumPrograms):
            self.known[op.result] = np.asarray(self.kernel.grid[op.axis], np.int32)
        elif isinstance(op, ir.Full | ir.Map | ir.Cast | ir.Select):
            values = [self.known.get(v) for v in op.operands()]
            if all(v is not None for v in values):
                self.known[op.result] = np.asarray(op.reference(*np.broadcast_arrays(*values)))

    def _trips(self, op: ir.For) -> Any:
        lo, hi, step = (self.known.get(v) for v in (op.lo, op.hi, op.step))
        if lo is None or hi is None or step is None or not np.all(step):
            self.exact = False
            return TRIPS
        lo, hi, step = (x.astype(np.int64) for x in (lo, hi, step))
        return np.maximum(-((lo - hi) // step), 0)

    def _branch(self, op: ir.If, times: np.ndarray) -> None:
        cond = self.known.get(op.cond)
        if cond is None:  # the condition is not known: each branch is taken to run half of the time
            self.exact = False
            cond = np.asarray(0.5)
        self.block(op.then, times * cond)
        self.block(op.orelse, times * (1 - cond.astype(np.float64)))

    def _move(self, sums: dict[ir.Value, float], ref: ir.Value, index: ir.Index, times: np.ndarray) -> None:
        count: Any = 1.0
        taken = False
        for d, n in zip(index, ref.shape):
            if isinstance(d, ir.Take):
                count = count * (1 if taken else math.prod(d.indices.shape))
                taken = True
            elif isinstance(d, ir.Span):
                count = count * min(d.size, n)
            elif isinstance(d, ir.Tile):
                count = count * self._inside(d, n)
        sums[ref] = sums.get(ref, 0.0) + float((times * count).sum()) * ref.type.info.bits / 8

    def _inside(self, d: ir.Tile, n: int) -> Any:
        """How many elements of a tile lie inside of a dimension of n."""
        index = self.known.get(d.index)
        if index is not None:
            return np.clip(n - index.astype(np.int64) * d.step, 0, d.size)
        return min(d.size, n / max(-(-n // d.step), 1)) if d.size == d.step else min(d.size, n)


def _sampled(kernel: ir.Kernel) -> list[np.ndarray]:
    """Program ids by axis, of the programs that stand for all: every one along the axes that decide how often something
    runs or how much of a tile lies inside, as far as `SAMPLES` allow, and one along the others."""
    used = _deciding(kernel)
    counts = [n if axis in used else min(n, 1) for axis, n in enumerate(kernel.grid)]
    while math.prod(counts) > SAMPLES:
        counts[counts.index(max(counts))] = max(counts) // 2
    middles = [(2 * np.arange(c) + 1) * n // (2 * max(c, 1)) for c, n in zip(counts, kernel.grid)]
    return [x.ravel() for x in np.meshgrid(*middles, indexing="ij")]


def _deciding(kernel: ir.Kernel) -> set[int]:
    """The axes of the grid that loop bounds, conditions and tiles over an edge depend on."""
    axes: dict[ir.Value, frozenset[int]] = {}
    of = lambda *values: frozenset().union(*(axes.get(v, frozenset()) for v in values))
    used: set[int] = set()
    for op in kernel.body.walk():
        if isinstance(op, ir.ProgramId):
            axes[op.result] = frozenset({op.axis})
        elif isinstance(op, ir.For):
            used |= of(op.lo, op.hi, op.step)
        elif isinstance(op, ir.If):
            used |= of(op.cond)
        elif isinstance(op, ir.Load | ir.Store | ir.Atomic | ir.AsyncLoad | ir.AsyncStore):
            tiles = [(d, n) for d, n in zip(op.index, op.ref.shape) if isinstance(d, ir.Tile)]
            used |= of(*(d.index for d, n in tiles if d.size != d.step or not d.size or n % d.size))
        elif len(op.results) == 1:
            axes[op.result] = of(*op.operands())
    return used


def _size(ref: ir.Value) -> int:
    return -(-math.prod(ref.shape) * ref.type.info.bits // 8)


def _elements(op: ir.Op) -> int:
    """Elements that an op of arithmetic computes; what only moves elements, and scalars, count nothing."""
    if isinstance(op, ir.Map | ir.Select):
        return op.result.type.size if op.result.shape else 0
    if isinstance(op, ir.Reduce | ir.ArgReduce | ir.UserReduce | ir.Cumulative | ir.UserScan):
        return max((v.type.size for v in op.operands() if isinstance(v.type, ir.TileType)), default=0)
    if isinstance(op, ir.Sort):
        n = max(op.xs[0].shape[-1] if op.xs[0].shape else 1, 2)
        return op.xs[0].type.size * math.ceil(math.log2(n))
    return 0
