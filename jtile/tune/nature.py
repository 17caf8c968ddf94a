"""What a traced kernel does, as far as tiles are chosen by it: what its meta-parameters are the sides of, and which
products it makes of arrays of which sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterator

from jtile import ir
from jtile.passes.products import operand, promoted
from jtile.tune import cost
from jtile.tune.warpgroups import Product, cdiv

Place = tuple[Hashable, ...]
ROWS, COLUMNS, TERMS, STAGES = ("rows",), ("columns",), ("terms",), ("stages",)
Products = ir.Dot | ir.DotScaled
_MADE_OF = (ir.Cast, ir.Bitcast, ir.Reshape, ir.Transpose, ir.Map, ir.Select, ir.Broadcast)


def places(kernel: ir.Kernel) -> dict[Place, Counter[int]]:
    """Every size in a kernel that a meta-parameter may be, by where it stands: `ROWS`, `COLUMNS` and `TERMS` of a
    product, ("array", position, axis) of what is read or written at a time, `STAGES` of a loop."""
    found: dict[Place, Counter[int]] = {}
    note = lambda place, size: found.setdefault(place, Counter()).update([size])
    params = {v: k for k, v in enumerate(kernel.params)}
    for op in kernel.body.walk():
        if isinstance(op, Products):
            for place, size in zip((ROWS, COLUMNS, TERMS), sizes(op)):
                note(place, size)
        elif isinstance(op, ir.Load | ir.Store | ir.Atomic) and op.ref in params:
            for axis, d in enumerate(op.index):
                if isinstance(d, ir.Tile | ir.Span):
                    note(("array", params[op.ref], axis), d.size)
                elif isinstance(d, ir.Take):
                    note(("array", params[op.ref], axis), d.indices.type.size)
        elif isinstance(op, ir.For):
            note(STAGES, op.stages or 0)
    return found


def moved(before: ir.Kernel, after: ir.Kernel) -> frozenset[Place]:
    """The places where two traces of one kernel differ."""
    a, b = places(before), places(after)
    return frozenset(place for place in {*a, *b} if a.get(place) != b.get(place))


def sizes(op: Products) -> tuple[int, int, int]:
    """Rows, columns and terms of one product of tiles."""
    if isinstance(op, ir.Dot):
        return op.sizes()[1:]
    return (*op.result.shape[-2:], op.a.shape[-1])


def products_of(kernel: ir.Kernel) -> list[Products]:
    """All products of a kernel."""
    return [op for op in kernel.body.walk() if isinstance(op, Products)]


@dataclasses.dataclass(frozen=True)
class Chain:
    """Attention, or what is like it: of t rows, s columns and d terms of the first product, which a second one sums.

    Attributes:
      uneven: programs sum over more or fewer columns, as under a causal mask; guessed: as many as loaded data say.
    """

    t: int
    s: int
    d: int
    dtype: str
    uneven: bool
    guessed: bool

    @property
    def itemsize(self) -> int:
        return max(ir.DTYPES[self.dtype].bits // 8, 1)


@dataclasses.dataclass(frozen=True)
class Whole:
    """Products of arrays, all of one kind, that a kernel makes tile by tile.

    Attributes:
      product: the sizes of the products.
      dtype: the dtype of the operands.
      tile: rows, columns and terms of the tiles of this trace.
    """

    product: Product
    dtype: str
    tile: tuple[int, int, int]


def whole_product(kernel: ir.Kernel) -> Whole | None:
    """The product of arrays that a kernel computes; None where it is not one, or several of equal sizes beside each
    other, or where its operands are no parts of arrays. Several that are added up are one with as many more terms."""
    dots = products_of(kernel)
    if len({sizes(d) for d in dots}) != 1 or len({d.a.dtype for d in dots}) != 1:
        return None
    runs = cost.counted(kernel).runs
    block = max(_blocks(kernel), key=lambda b: sum(op in runs for op in b.ops))
    beside = [op for op in block.ops if op in runs]
    dot = beside[0]
    left, right = _source(dot, right=False), _source(dot, right=True)
    if left is None or right is None or any(_feeds(a, b) for a in beside for b in beside):
        return None
    bm, bn, bk = sizes(dot)
    m, n = left.along(0), right.along(1)
    k = min(left.along(1), right.along(0), round(bk * max(runs[dot].trips, 1)))  # the rounds are an average
    tiles = sum(runs[d].times / max(runs[d].trips, 1) for d in dots if d in runs) / len(beside)
    added = all(isinstance(b, ir.Dot) and b.acc is a.results[0] for a, b in itertools.pairwise(beside))
    product = Product(
        m, n, k * (len(beside) if added else 1), max(ir.DTYPES[dot.a.dtype].bits // 8, 1),
        batch=max(round(tiles / (cdiv(m, bm) * cdiv(n, bn))), 1), gates=1 if added else min(len(beside), 2),
        transposed=right.turned, left=left.turned, fast=not (isinstance(dot, ir.Dot) and promoted(dot)),
    )  # fmt: skip
    return Whole(product, dot.a.dtype, (bm, bn, bk))


def chain(kernel: ir.Kernel) -> Chain | None:
    """The attention that a kernel computes: a product of a tile that is made from another product's result."""
    dots = [d for d in products_of(kernel) if isinstance(d, ir.Dot)]
    first = next((a for a in dots for b in dots if _feeds(a, b)), None)
    if first is None:
        return None
    left, right = _source(first, right=False), _source(first, right=True)
    if left is None or right is None:
        return None
    counted = cost.counted(kernel)
    loops = [op for op in kernel.body.walk() if isinstance(op, ir.For) and any(d in dots for d in op.body.walk())]
    fixed = all(isinstance(v.op, ir.Full) for op in loops for v in (op.lo, op.hi, op.step))
    return Chain(left.along(0), right.along(1), sizes(first)[2], first.a.dtype, not fixed, not counted.exact)


@dataclasses.dataclass(frozen=True)
class _Source:
    """The load of an operand.

    Attributes:
      lengths: those of the array, along the two axes of the operand as the product takes it.
      turned: whether it lies in memory the other way round than the product takes it.
    """

    lengths: tuple[int, int]
    turned: bool

    def along(self, axis: int) -> int:
        return self.lengths[axis]


def _source(dot: Products, *, right: bool) -> _Source | None:
    """Where an operand comes from; None where it is no tile of an array, or made of another product."""
    v, turned = operand(dot, right) if isinstance(dot, ir.Dot) else (dot.b if right else dot.a, False)
    shape = tuple(n for n in v.shape if n != 1) if 1 in v.shape else v.shape
    for load in _loads(v):
        kept = [(d, n) for d, n in zip(load.index, load.ref.shape) if not isinstance(d, ir.At)]
        if any(isinstance(d, ir.Take) and len(d.indices.shape) != 1 for d, _ in kept):
            continue
        lengths = [(_size(d), n) for d, n in kept]
        for sides in (lengths, [(s, n) for s, n in lengths if s != 1]):
            if len(sides) == 2 and len(v.shape) == 2 and [s for s, _ in sides] == list(v.shape):
                a, b = (n for _, n in sides)
                return _Source((b, a) if turned else (a, b), turned)
            if [s for s, _ in sides] == list(shape) and len(shape) == 2:
                a, b = (n for _, n in sides)
                return _Source((b, a) if turned else (a, b), turned)
    return None


def _size(d: ir.Dim) -> int:
    return d.indices.type.size if isinstance(d, ir.Take) else d.size


def _loads(v: ir.Value) -> Iterator[ir.Load]:
    """The loads that a tile is made of element by element, those of most elements first."""
    todo, seen, found = [v], set(), []
    while todo:
        x = todo.pop()
        if x in seen:
            continue
        seen.add(x)
        if isinstance(x.op, ir.Load):
            found.append(x.op)
        elif isinstance(x.op, _MADE_OF):
            todo += x.op.operands()
    yield from sorted(found, key=lambda op: -math.prod(op.result.shape))


def _feeds(a: ir.Op, b: ir.Op) -> bool:
    """Whether an operand of product b is computed from the result of product a."""
    todo, seen = [b.a, b.b], set()
    while todo:
        x = todo.pop()
        if x in seen or x.op is None:
            continue
        seen.add(x)
        if x.op is a:
            return True
        if not isinstance(x.op, ir.Load):
            todo += x.op.operands()
    return False


def _blocks(kernel: ir.Kernel) -> Iterator[ir.Block]:
    yield kernel.body
    for op in kernel.body.walk():
        yield from op.blocks()
