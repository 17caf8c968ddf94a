"""Fission: what a kernel computes before a loop that is about to change places with its grid, and would then compute in
every round of it again, goes through memory instead: one kernel stores it, the others load it.

Example: `z = a b` over a loop, `g = f(z)`, then `dA[i, k] += g b[k]` over a second one. The kernel of `dA` has the grid
(i, k), and would compute `z` once for each k; it loads `g` instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from jtile.ir import (
    At,
    Atomic,
    Cast,
    Dot,
    DotScaled,
    For,
    Index,
    Kernel,
    Load,
    Op,
    ProgramId,
    RefType,
    Span,
    Store,
    Tile,
    TileType,
    Value,
    is_dynamic,
)
from jtile.ir.types import DTYPES

from .affine import Forms
from .axes import Node, tile_axes
from .cut import smallest_cut
from .dce import dce
from .rewrite import Copier, buffers, free_values, reads_only, written


@dataclasses.dataclass(frozen=True)
class Fission:
    """Two kernels for one.

    Attributes:
      first: the kernel, with an output for each value that goes through memory, behind its own.
      rest: the kernel, which loads them from inputs, behind its own.
      rounded: the same, where what such a value was rounded from is the value, too.
      between: these outputs of `first`, and the inputs of `rest`, one for one.
    """

    first: Kernel
    rest: Kernel
    rounded: Kernel
    between: tuple[tuple[Value, Value], ...]


def fission(kernel: Kernel, refs: Collection[Value]) -> Fission | None:
    """Two kernels, where loops that accumulate onto `refs` take what products or loops before them have made; None
    where they take nothing of the kind, where it cannot be stored, or is more than all arrays of the kernel."""
    if is_dynamic(kernel) or kernel.aliases:
        return None
    cut = _frontier(kernel, refs)
    if not cut or any(not _storable(v) for v in cut):
        return None
    places = _Places(kernel)
    found = {v: places.of(v) for v in cut}
    arrays = sum(_nbytes(v.shape, v.dtype) for v in (*kernel.inputs, *kernel.outputs))
    if sum(_nbytes(shape, v.dtype) for v, (shape, _) in found.items()) > arrays:
        return None
    names = {v: f"kept{k}" for k, v in enumerate(cut)}
    outs = {v: Value(RefType(shape, v.dtype, "out"), names[v]) for v, (shape, _) in found.items()}
    ins = {v: Value(RefType(shape, v.dtype, "in"), names[v]) for v, (shape, _) in found.items()}
    wide = {v.op.x: v for v in cut if isinstance(v.op, Cast) and DTYPES[v.op.x.dtype].kind == "f"}
    first = _Kept(kernel, outs, found, load=False).whole(kernel)
    halves = [_Kept(kernel, ins, found, load=True, wide=w).whole(kernel) for w in ({}, wide)]
    given = (*kernel.inputs, *ins.values(), *kernel.outputs, *kernel.scratch)
    rest, rounded = (dce(dataclasses.replace(k, params=given, inits=_inits(kernel))) for k in halves)
    params = (*kernel.inputs, *kernel.outputs, *outs.values(), *kernel.scratch)
    first = dataclasses.replace(first, params=params, inits=(*_inits(kernel), *[None] * len(outs)))
    return Fission(first, rest, rounded, tuple((outs[v], ins[v]) for v in cut))


def _inits(kernel: Kernel) -> tuple[float | int | None, ...]:
    return tuple(kernel.inits) or (None,) * len(kernel.outputs)


def _storable(v: Value) -> bool:
    return isinstance(v.type, TileType) and v.dtype != "bool" and DTYPES[v.dtype].bits >= 8


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * DTYPES[dtype].bits // 8


# -- what goes through memory -----------------------------------------------------------------------------------------


def _frontier(kernel: Kernel, refs: Collection[Value]) -> list[Value]:
    """The fewest bytes from which the loops that accumulate onto `refs` can go on without a product or a loop before
    them; what lies between is computed again."""
    loops = [op for op in kernel.body.ops if any(isinstance(x, Atomic) and x.ref in refs for x in _walk(op))]
    if not all(isinstance(op, For) for op in loops):
        return []
    if any(isinstance(v.type, RefType) and v.type.role == "scratch" for op in loops for v in free_values(op)):
        return []
    roots = buffers(kernel)
    wrote = set(written(kernel.body, roots))
    made: dict[Value, tuple[Value, ...]] = {}  # values behind a product or a loop: from which of those
    for op in kernel.body.ops:
        before = tuple(dict.fromkeys(v for v in free_values(op) if v in made))
        source = isinstance(op, Dot | DotScaled) or bool(op.blocks()) or (before and not reads_only(op))
        source = source or (isinstance(op, Load) and roots.get(op.ref, op.ref) in wrote)
        if source or before:
            made |= dict.fromkeys(op.results, () if source else before)
    wanted = [v for v in dict.fromkeys(v for op in loops for v in free_values(op)) if v in made]
    size = {v: _nbytes(v.shape, v.dtype) if _storable(v) else 1 << 50 for v in made}
    return smallest_cut(made, size, wanted) if wanted else []


def _walk(op: Op) -> list[Op]:
    return [op, *(x for b in op.blocks() for x in b.walk())]


# -- where it stands there --------------------------------------------------------------------------------------------


class _Places:
    """Shapes of arrays that hold a tile of every program, and the index of a program's tile: along an axis that follows
    a grid axis the tiles lie side by side, so that the array is one that a product could be taken of; the grid axes
    that none follows are axes of their own, in front. Axes of one element are none of the array."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.classes = kernel, tile_axes(kernel)
        forms = Forms(kernel)
        self.axes: dict[Node, set[tuple[int, int]]] = {}  # roots -> (grid axis, size of a tile)
        for op in kernel.body.walk():
            if isinstance(op, Load | Store | Atomic):
                self._access(op, forms)

    def _access(self, op: Load | Store | Atomic, forms: Forms) -> None:
        tile, axis = (op.result if isinstance(op, Load) else op.value), 0
        for d in op.index:
            if isinstance(d, Tile):
                form = forms.form(d.index)
                if form is not None and form.const == 0 and len(form.terms) == 1 and d.step == d.size:
                    (variable, factor), *_ = form.terms
                    if isinstance(variable, int) and factor == 1:
                        self.axes.setdefault(self.classes.find((tile, axis)), set()).add((variable, d.size))
            axis += 0 if isinstance(d, At) else 1 if isinstance(d, Tile | Span) else len(d.indices.shape)

    def of(self, v: Value) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        """The shape; and for each axis of the tile the grid axis that it follows, or None."""
        follows: list[int | None] = []
        for axis, n in enumerate(v.shape):
            if n == 1:
                continue
            found = self.axes.get(self.classes.find((v, axis)), set())
            only = next(iter(found)) if len(found) == 1 else None
            follows.append(only[0] if only and only[1] == n and only[0] not in follows else None)
        others = [n for axis, n in enumerate(self.kernel.grid) if axis not in follows]
        whole = [n if g is None else n * self.kernel.grid[g] for n, g in zip(_long(v), follows, strict=True)]
        return (*others, *whole), tuple(follows)


def _long(v: Value) -> tuple[int, ...]:
    """The shape as it lies in memory: without axes of one element, so that tiles of one number a row are lines."""
    return tuple(n for n in v.shape if n != 1)


class _Kept(Copier):
    """Copies a kernel, and stores some values as they are made, or loads them instead, those of `wide` as what they
    are rounded to."""

    def __init__(
        self, kernel: Kernel, refs: Mapping[Value, Value],
        places: Mapping[Value, tuple[tuple[int, ...], tuple[int | None, ...]]], *, load: bool,
        wide: Mapping[Value, Value] = MappingProxyType({}),
    ):  # fmt: skip
        super().__init__()
        self.grid, self.refs, self.places, self.load, self.wide = kernel.grid, refs, places, load, wide

    def put(self, op: Op) -> Op:
        new = super().put(op)
        for old in op.results:
            if old in self.wide:
                narrow = self.wide[old]
                self.env[old] = self.b.cast(self.loaded(narrow), old.dtype)
            if old in self.refs:
                if self.load:
                    self.env[old] = self.loaded(old)
                else:
                    self.b.add(Store(self.refs[old], self.index(old), self.b.reshape(self.env[old], _long(old))))
        return new

    def loaded(self, v: Value) -> Value:
        return self.b.reshape(self.b.value(Load(self.refs[v], self.index(v)), v.name), v.shape)

    def index(self, v: Value) -> Index:
        b, follows = self.b, self.places[v][1]
        others = [At(b.value(ProgramId(g))) for g in range(len(self.grid)) if g not in follows]
        own = [
            Span(b.index(0), n, 1) if g is None else Tile(b.value(ProgramId(g)), n, n)
            for n, g in zip(_long(v), follows, strict=True)
        ]
        return (*others, *own)
