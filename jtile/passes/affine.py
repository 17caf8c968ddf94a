"""Affine forms: an index value as a constant plus multiples of program ids, loop indices and unknown constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jtile.ir import (
    Alloc,
    At,
    Atomic,
    Block,
    Broadcast,
    Cast,
    Dim,
    For,
    Full,
    If,
    Index,
    Iota,
    Kernel,
    LastArrival,
    Load,
    Map,
    Op,
    ProgramId,
    Reshape,
    Size,
    Span,
    Store,
    Take,
    Tile,
    Value,
    at_least,
    dim_value,
    root,
)
from jtile.ir.types import DTYPES, RefType

from .extents import UpperBounds
from .fold import number
from .intervals import Interval, Intervals
from .rewrite import buffers, free_values

# What an affine form counts: a grid axis, the index of a loop, or a scalar that is the same in every program.
Var = int | Value
UNKNOWN = 1 << 40  # programs of an axis whose size is known when the kernel runs: as many as there can be


@dataclasses.dataclass(frozen=True)
class Affine:
    """`const + sum of coefficient * variable`; no coefficient is 0."""

    const: int
    terms: tuple[tuple[Var, int], ...] = ()

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        out = dict(self.terms)
        for v, c in other.terms:
            out[v] = out.get(v, 0) + c * factor
        return Affine(self.const + other.const * factor, tuple((v, c) for v, c in out.items() if c))

    def times(self, n: int) -> Affine:
        return Affine(self.const * n, tuple((v, c * n) for v, c in self.terms) if n else ())


def ranges(kernel: Kernel, known: Intervals | None = None) -> Intervals:
    """Intervals of all values, whatever branch they stand in; no condition is assumed. They are added to `known`, where
    it is given."""
    known = known or Intervals(kernel)

    def block(b: Block) -> None:
        for op in b.ops:
            if isinstance(op, For):
                known.enter_loop(op)
            for inner in op.blocks():
                block(inner)
            known.visit(op)

    block(kernel.body)
    return known


class Forms:
    """Affine forms and ranges of the values of one kernel.

    Attributes:
      known: the interval of every integer.
      loops: the loop of every loop index.
    """

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.known = ranges(kernel)
        self.upper = UpperBounds(kernel, self.known)
        ops = list(kernel.body.walk())
        self.loops: dict[Value, For] = {op.body.params[0]: op for op in ops if isinstance(op, For)}
        roots = buffers(kernel)
        self.written = {root(op.ref, roots) for op in ops if isinstance(op, Store | Atomic)}
        self.roots = roots
        self._forms: dict[Value, Affine | None] = {}
        self._uniform: dict[Value, bool] = {}

    def form(self, v: Value) -> Affine | None:
        """The affine form of an integer scalar, or None."""
        if v not in self._forms:
            self._forms[v] = self._form(v)
        return self._forms[v]

    def _form(self, v: Value) -> Affine | None:
        if isinstance(v.type, RefType) or v.shape or DTYPES[v.dtype].kind not in "iu":
            return None
        if v in self.loops:
            return Affine(0, ((v, 1),))
        if self._wraps(v):
            return Affine(0, ((v, 1),)) if self.uniform(v) else None
        match v.op:
            case Full():
                return Affine(number(v))
            case ProgramId(axis):
                grid = self.kernel.grid
                return Affine(0, ((axis, 1),)) if axis < len(grid) and grid[axis] != 1 else Affine(0)
            case Cast(x) | Reshape(x) | Broadcast(x) if not x.shape and DTYPES[x.dtype].kind in "iu":
                out = self.form(x)
            case Map():
                out = self._map(v.op)
            case _:
                out = None
        return Affine(0, ((v, 1),)) if out is None and self.uniform(v) else out

    def _wraps(self, v: Value) -> bool:
        """Whether an integer may be another one than what it is computed by says: numbers of 8 and 16 bits wrap around
        in kernels that are right, and so do casts to fewer bits. Indices of 32 bits do not."""
        if v in self.known.known or not isinstance(v.op, Cast | Map):
            return False
        bits = DTYPES[v.dtype].bits
        return bits < 32 or (isinstance(v.op, Cast) and bits < DTYPES[v.op.x.dtype].bits)

    def _map(self, op: Map) -> Affine | None:
        forms = [self.form(a) for a in op.args]
        a, b = forms[0], forms[-1]
        if a is None or b is None:
            return None
        match op.fn:
            case "add" | "sub":
                return a.plus(b, 1 if op.fn == "add" else -1)
            case "neg":
                return a.times(-1)
            case "mul" if not b.terms or not a.terms:
                return a.times(b.const) if not b.terms else b.times(a.const)
            case "shl" if not b.terms and 0 <= b.const < 31:
                return a.times(1 << b.const)
        return None

    def uniform(self, v: Value) -> bool:
        """Whether a value is the same wherever and by whichever program it is computed."""
        if v not in self._uniform:
            self._uniform[v] = v.op is not None and self._uniform_op(v.op)
        return self._uniform[v]

    def _uniform_op(self, op: Op) -> bool:
        if isinstance(op, ProgramId | Alloc | Atomic | LastArrival):
            return False
        changing = {*self.written, *self.kernel.scratch, *self.kernel.shared}
        if isinstance(op, Load) and root(op.ref, self.roots) in changing:
            return False
        inner = [x for b in op.blocks() for x in b.walk()]
        if any(isinstance(x, ProgramId | Alloc | Atomic | LastArrival | Load) for x in inner):
            return False
        return all(isinstance(v.type, RefType) or self.uniform(v) for v in free_values(op))

    # -- ranges -------------------------------------------------------------------------------------------------------
    def steps(self, v: Var) -> tuple[int, int, int]:
        """(first, step, count) of a grid axis or loop index: it takes some of the values first + step * [0, count)."""
        if isinstance(v, int):
            n = self.kernel.grid[v]
            return 0, 1, n if isinstance(n, int) else UNKNOWN
        loop = self.loops[v]
        lo, hi, step = self.known(loop.lo), self.known(loop.hi), self.known(loop.step)
        if lo is None or hi is None or step is None or not step.single or step.lo <= 0:
            limits = self.known(v) or Interval(0, 0)
            return limits.lo, 1, max(limits.hi - limits.lo + 1, 1)
        step = step.lo if lo.single else 1
        return lo.lo, step, max(-(-(hi.hi - lo.lo) // step), 0)

    def static(self, loop: For) -> bool:
        """Whether a loop makes the same rounds everywhere, at least one, upwards."""
        lo, hi, step = (self.known(x) for x in (loop.lo, loop.hi, loop.step))
        return bool(lo and hi and step and lo.single and hi.single and step.single and step.lo > 0 and hi.lo > lo.lo)

    def legal(self, index: Index, shape: tuple[int, ...]) -> bool:
        """Whether an access may stand anywhere: it starts inside the array for all values of its index."""
        return all(self._legal(d, n) for d, n in zip(index, shape, strict=True))

    def _legal(self, d: Dim, n: Size) -> bool:
        if isinstance(d, Take):
            return True
        i = self.known(dim_value(d))
        if i is None or i.lo < 0:
            return False
        return any(last is not None and _starts_inside(d, n, last) for last in (i.hi, self.upper(dim_value(d))))

    # -- dimensions of an index ---------------------------------------------------------------------------------------
    def start(self, d: Dim) -> Affine | None:
        """The smallest element of an index dimension; None where it is not affine."""
        if isinstance(d, Take):
            tile = self.tile(d.indices)
            if tile is None:
                return None
            form, axes = tile
            return form.plus(Affine(sum(c * (d.indices.shape[a] - 1) for a, c in axes.items() if c < 0)))
        form = self.form(dim_value(d))
        return form.times(d.step) if form is not None and isinstance(d, Tile) else form

    def lanes(self, d: Dim) -> list[tuple[int, int, Lane]]:
        """(distance, count, axis) of the elements of an index dimension that is affine."""
        match d:
            case Span(_, size, stride):
                return [(stride, size, Lane())]
            case Tile(_, size, _):
                return [(1, size, Lane())]
            case Take(indices):
                _, axes = self.tile(indices) or (None, {})
                return [(abs(c), indices.shape[a], Lane(a)) for a, c in axes.items()]
        return []

    def tile(self, v: Value) -> tuple[Affine, dict[int, int]] | None:
        """A tile of integers as a scalar plus multiples of its own coordinates: axis -> factor."""
        if not v.shape:
            form = self.form(v)
            return None if form is None else (form, {})
        if self._wraps(v):
            return None
        match v.op:
            case Full():
                return Affine(number(v)), {}
            case Iota(_, axis, _):
                return Affine(0), {axis: 1}
            case Cast(x) if DTYPES[x.dtype].kind in "iu":
                return self.tile(x)
            case Broadcast(x, _, dims):
                inner = self.tile(x)
                return inner and (inner[0], {dims[a]: c for a, c in inner[1].items() if x.shape[a] > 1})
            case Reshape(x):
                inner = self.tile(x)
                old, new = ([k for k, n in enumerate(t.shape) if n != 1] for t in (x, v))
                if inner is None or [x.shape[k] for k in old] != [v.shape[k] for k in new]:
                    return None
                return inner[0], {new[old.index(a)]: c for a, c in inner[1].items() if a in old}
            case Map(fn, args) if fn in ("add", "sub", "mul"):
                return self._combined(fn, *map(self.tile, args))
        return None

    def _combined(self, fn: str, a, b) -> tuple[Affine, dict[int, int]] | None:
        if a is None or b is None:
            return None
        if fn == "mul":
            a, b = (b, a) if not a[0].terms and not a[1] else (a, b)
            n = b[0].const
            return None if b[0].terms or b[1] else (a[0].times(n), {k: c * n for k, c in a[1].items() if n})
        sign = 1 if fn == "add" else -1
        axes = {k: a[1].get(k, 0) + sign * b[1].get(k, 0) for k in {**a[1], **b[1]}}
        return a[0].plus(b[0], sign), {k: c for k, c in axes.items() if c}


@dataclasses.dataclass(frozen=True)
class Lane:
    """The lanes of one dimension; those along `axis` of the gathers of an index, which their dimensions share."""

    axis: int | None = None


def _starts_inside(d: Dim, n: Size, last: Size) -> bool:
    """Whether an entry that is at most `last` is legal in a dimension of n elements."""
    match d:
        case At():
            return at_least(n, last + 1)
        case Tile(_, _, step):
            return last == 0 or at_least(-(-n // step), last + 1)
    return at_least(n, last)


# -- places of accumulation -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Site:
    """One accumulation `ref[index] += value`, and the regions around it, outermost first."""

    op: Atomic
    path: tuple[Op, ...]

    @property
    def loops(self) -> list[For]:
        return [op for op in self.path if isinstance(op, For)]

    @property
    def plain(self) -> bool:
        """Whether only counted loops and branches stand around the accumulation."""
        return all(isinstance(op, For | If) for op in self.path)


def sites(kernel: Kernel, wanted: Callable[[Value], bool]) -> dict[Value, list[Site]]:
    """The accumulations onto each Ref that `wanted` names, in program order."""
    out: dict[Value, list[Site]] = {}

    def block(b: Block, path: tuple[Op, ...]) -> None:
        for op in b.ops:
            if isinstance(op, Atomic) and wanted(op.ref):
                out.setdefault(op.ref, []).append(Site(op, path))
            for inner in op.blocks():
                block(inner, (*path, op))

    block(kernel.body, ())
    return out


def accumulators(kernel: Kernel) -> list[Value]:
    """Float outputs that start from 0 and are touched by additions alone, whose old values nobody reads."""
    aliased = {kernel.outputs[o] for _, o in kernel.aliases}
    inits = dict(zip(kernel.outputs, kernel.inits, strict=False))
    used = {v for op in kernel.body.walk() for v in op.operands()}
    used |= {v for op in kernel.body.walk() for b in op.blocks() for v in b.yields}
    adds: set[Value] = set()
    bad = set(aliased)
    for op in kernel.body.walk():
        if isinstance(op, Atomic) and op.fn == "add" and op.result not in used:
            adds.add(op.ref)
        elif isinstance(op, Load | Store | Atomic):
            bad.add(op.ref)
    wide = ("float32", "float64")
    return [o for o in kernel.outputs if o in adds - bad and inits.get(o) == 0 and o.dtype in wide]
