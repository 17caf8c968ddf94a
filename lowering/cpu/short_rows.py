"""Sums (products, maxima, ...) of many rows that are shorter than a vector: a lane for each row.

A row that fills half of a vector, or less, would leave the rest of it empty in all that is computed of it. As many rows
as a vector has lanes are turned in registers, so that a vector has one element of each. The terms of a sum meet in the
order in which the halves of a vector would: its bits are the same.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jtile import ir

from . import access
from .access import Lanes
from .convert import from_memory, memory_type
from .evaluate import Index, Point
from .llvm import Val, i64, lanes_of, shuffle, vec
from .values import Buffer, Ix, Lazy

if TYPE_CHECKING:
    from .emitter import Emitter

WRITTEN = 128  # vector instructions of all copies of the operands' expressions, at most
_PLACED = (ir.Map, ir.Select, ir.Cast, ir.Bitcast, ir.Full, ir.Iota, ir.Broadcast, ir.Transpose)  # move no element


def lanes_for(em: Emitter, roots: list[ir.Value], shape, axes, bits: int) -> int:
    """How many rows are reduced together, each in a lane; 0: rows are reduced along their vectors. `roots`: what is
    reduced over `axes` of `shape`, and computed in registers of at most `bits` bits an element."""
    long = [k for k, n in enumerate(shape) if n > 1]
    if len(long) < 2 or long[-1] not in axes or long[-2] in axes or sum(k in axes for k in long) > 1:
        return 0
    n, rows, lanes = shape[long[-1]], shape[long[-2]], em.isa.lanes(bits)
    if not em.isa.has("avx512f") or bits < 32:  # elsewhere a shuffle is several instructions
        return 0
    if n & (n - 1) or 2 * n > lanes or rows < lanes or n * sum(map(em.expression_cost, roots)) > WRITTEN:
        return 0
    return lanes if all(_reads_rows(em, root) for root in roots) else 0


def _reads_rows(em: Emitter, root: ir.Value) -> bool:
    """Whether an expression reads memory at the places of its elements, and stores nothing on the way, which it would
    row by row, for other readers."""
    lazy = [v for v, _ in em.tree(root) if isinstance(em.env.get(v), Lazy)]
    return all(isinstance(v.op, _PLACED) and v not in em.flagged for v in lazy)


@dataclasses.dataclass
class Turned:
    """Rows whose elements are read as vectors of one element of each.

    Attributes:
      row: the index of the first row, along the axis of rows; columns: those of the elements of a row.
    """

    em: Emitter
    row: Ix
    columns: list[Ix]
    read_before: dict = dataclasses.field(default_factory=dict)

    def read(self, buf: Buffer, ix: Index, lanes: int) -> Val | None:
        """The elements at `ix` of memory whose rows lie as those of the tile do; None: they do not."""
        rows = [k for k, x in enumerate(ix) if x is self.row]
        places = [(k, c) for k, x in enumerate(ix) for c, y in enumerate(self.columns) if x is y]
        if len(rows) != 1 or len(places) != 1 or any(x.step for x in ix if x is not self.row):
            return None
        ((axis, column),) = places
        if buf.strides[axis] != 1 or buf.strides[rows[0]] == 1:
            return None
        others = tuple(x.base.name for k, x in enumerate(ix) if k not in (rows[0], axis))
        key = buf.ptr.name, rows[0], axis, others
        if key not in self.read_before:
            self.read_before[key] = columns(self.em, self._rows(buf, ix, rows[0], axis, lanes))
        return self.read_before[key][column]

    def _rows(self, buf: Buffer, ix: Index, row: int, axis: int, lanes: int) -> list[Val]:
        """The elements of all rows in vectors, row by row."""
        em, n = self.em, len(self.columns)
        at = [*ix]
        if buf.strides[row] == n:  # they lie behind each other
            found, ty = [], memory_type(buf.dtype)
            for first in range(0, lanes, lanes // n):
                at[row], at[axis] = Ix(em.code.add(self.row.base, first)), Ix(i64(0))
                ptr = em.code.gep(ty, buf.ptr, access.offset(em.code, buf, tuple(at))[0])
                raw = em.code.load(vec(lanes, ty), ptr, align=access.elem_bytes(buf.dtype))
                found.append(from_memory(em.code, em.isa, raw, buf.dtype))
            return found
        parts = []
        for r in range(lanes):
            at[row], at[axis] = Ix(em.code.add(self.row.base, r)), Ix(i64(0), 1)
            parts.append(access.read(em.code, em.isa, buf, tuple(at), Lanes(n)))
        while lanes_of(parts[0].ty) < lanes:
            every = [*range(2 * lanes_of(parts[0].ty))]
            parts = [shuffle(em.code, a, b, every) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts


def columns(em: Emitter, rows: list[Val]) -> list[Val]:
    """Vectors that hold one element of each row, for vectors of rows of as many elements as there are vectors."""
    if len(rows) == 1:
        return rows
    lanes = lanes_of(rows[0].ty)
    parts = []
    for odd in range(2):
        order = [*range(odd, 2 * lanes, 2)]
        parts.append(columns(em, [shuffle(em.code, a, b, order) for a, b in zip(rows[::2], rows[1::2], strict=True)]))
    return [v for pair in zip(*parts, strict=True) for v in pair]


def points(em: Emitter, shape, axes, index: list[Ix], axis: int, lanes: int) -> list[Point]:
    """The points at the elements of `lanes` rows from that at `index` on; `axis`: along which the rows follow."""
    lane = max(k for k in axes if shape[k] > 1)
    row = Ix(index[axis].base, 1)
    turned = Turned(em, row, [Ix(i64(k)) for k in range(shape[lane])])
    place = lambda k, x, column: row if k == axis else column if k == lane else x
    return [
        Point(em, tuple(shape), tuple(place(k, x, c) for k, x in enumerate(index)), Lanes(lanes), turned=turned)
        for c in turned.columns
    ]


def halves(values, combine) -> Val:
    """What the lanes of a vector would give, of which its halves are combined until one is left; `values`: functions
    that compute a term."""
    if len(values) == 1:
        return values[0]()
    return combine(halves(values[::2], combine), halves(values[1::2], combine))


__all__ = ["Turned", "columns", "halves", "lanes_for", "points"]
