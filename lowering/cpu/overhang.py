"""Tiles that hang over the edge of an array, where nothing ever looks at what is behind the edge.

A load needs a padded copy of a tile whose readers see all of it. An elementwise chain from loads to stores computes an
element only where the store writes it: if that keeps every load inside of its array, the arrays are read in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jtile import ir

from .emitter import DEPTH, Emitter
from .evaluate import reshape_groups
from .llvm import Val
from .packed import is_packed

if TYPE_CHECKING:
    from .indexing import Axis

LARGEST = 1 << 31  # elements of an axis from which on places may wrap around in 32 bits

# For each axis of a tile its axis in the value that is made of it; None for those of length 1, which have no place.
Places = tuple[int | None, ...]


def unread(em: Emitter, op: ir.Load, axes: list[Axis]) -> bool:
    """Whether stores alone read a tile, element by element, and write no element for which the load leaves its array
    along one of the axes that are checked."""
    checked = [(a, d) for a, d in zip(axes, op.index, strict=True) if a.checked]
    if any(a.axis is None or a.size == 1 or not isinstance(a.limit, int) for a, _ in checked):
        return False
    stores = list(_stores(em, op.result))
    return all(store is not None and _keep_inside(em, checked, *store) for store in stores)


def _keep_inside(em: Emitter, checked: list[tuple[Axis, ir.Dim]], store: ir.Store, places: Places) -> bool:
    forms = em.forms
    written: dict[int | None, tuple[ir.Dim, ir.Size]] = {k: (d, n) for k, d, n in _tile_axes(store)}
    for a, d in checked:
        place = None if a.axis is None else places[a.axis]
        there, limit = written.get(place, (None, 0))
        if there is None or isinstance(limit, ir.Extent) or _stride(there) != a.stride:
            return False
        first, other = forms.start(d), forms.start(there)
        away = first.plus(other, -1) if first is not None and other is not None else None
        if away is None or away.terms or away.const < 0 or isinstance(a.limit, Val):
            return False
        if limit + away.const > a.limit or a.limit >= LARGEST:
            return False
    return True


def _tile_axes(op: ir.Store) -> Iterator[tuple[int, ir.Dim, ir.Size]]:
    """(the axis of the tile, the index along it, the length of the array) of each axis of a store."""
    k = 0
    for d, n in zip(op.index, op.ref.shape, strict=True):
        if isinstance(d, ir.Tile | ir.Span):
            yield k, d, n
            k += 1


def _stride(d: ir.Dim) -> int:
    return d.stride if isinstance(d, ir.Span) else 1


def _stores(em: Emitter, v: ir.Value) -> Iterator[tuple[ir.Store, Places] | None]:
    """The stores that a tile reaches through elementwise ops, which its readers evaluate element by element, and where
    its axes are there; None for every other reader."""
    ops, uses = em.plan.block.ops, em.plan.uses
    start: Places = tuple(k if n > 1 else None for k, n in enumerate(v.shape))
    todo, seen = [(v, start)], {v: start}
    while todo:
        value, places = todo.pop()
        for k in uses.get(value, [len(ops)]):
            op = ops[k] if k < len(ops) else None
            if isinstance(op, ir.Store):
                lane_by_lane = is_packed(op.ref) or any(isinstance(d, ir.Take) for d in op.index)
                yield None if lane_by_lane or op.value is not value else (op, places)
                continue
            moved = None if op is None else _through(op, places)
            if op is None or moved is None or op.result in em.flagged or em.plan.depths[op.result] > DEPTH:
                yield None
            elif op.result not in seen:
                seen[op.result] = moved
                todo.append((op.result, moved))
            elif seen[op.result] != moved:
                yield None


def _through(op: ir.Op, places: Places) -> Places | None:
    """Where the axes of a tile are in what an op makes of it element by element; None for other ops."""
    match op:
        case ir.Map() | ir.Select() | ir.Cast() | ir.Bitcast():
            return places
        case ir.Broadcast(_, _, dims):
            return tuple(None if k is None else dims[k] for k in places)
        case ir.Reshape(x):
            to: dict[int | None, int | None] = {None: None}
            for before, after in reshape_groups(x.shape, op.shape):
                long, now = ([k for k in side if n[k] > 1] for side, n in ((before, x.shape), (after, op.shape)))
                if len(long) != len(now) or len(long) > 1:
                    return None
                to.update(zip(long, now, strict=True))
            return tuple(to[k] for k in places)
    return None
