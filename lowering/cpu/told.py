"""Masks that say no more than the bounds rule: `i < n` for the places i of a tile in an array of n elements.

Lanes outside of an array read the pad in any case, and are not written. Where a mask holds for all lanes inside, the
tile is what a load without it gives: most programs read the array in place, and those at an edge a padded copy; and a
store needs to look at no lane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jtile import ir
from jtile.passes.affine import Affine

if TYPE_CHECKING:
    from .emitter import Emitter

# For each axis of a value its axis in the tile that is loaded; None for those that repeat one element.
Places = tuple[int | None, ...]
_SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def by_bounds(em: Emitter, op: ir.Load | ir.Store) -> bool:
    """Whether the mask of an access (None: there is none) holds wherever its tile lies in the array. A tile to load
    that hangs over in every program would be copied by each of them: its mask stays."""
    if op.mask is None:
        return True
    loads = isinstance(op, ir.Load)
    starts: dict[int | None, tuple[Affine, int]] = {}
    for d, n in zip(op.index, op.ref.shape, strict=True):
        if isinstance(d, ir.At):
            continue
        start = em.forms.start(d)
        if not isinstance(d, ir.Span | ir.Tile) or start is None or not isinstance(n, int):
            return False
        if isinstance(d, ir.Span) and d.stride != 1:
            return False
        if loads and (d.size > n or not (start.terms or 0 <= start.const <= n - d.size)):
            return False
        starts[len(starts)] = start, n
    return _holds(em, op.mask, tuple(range(len(op.mask.shape))), starts)


def _holds(em: Emitter, v: ir.Value, places: Places, starts: dict[int | None, tuple[Affine, int]]) -> bool:
    """Whether all conditions of a mask hold for the elements of the array."""
    match v.op:
        case ir.Map() if v.op.fn == "and":
            return all(_holds(em, a, places, starts) for a in v.op.args)
        case ir.Map() if v.op.fn in _SWAPPED:
            return _holds_for(em, v.op, places, starts)
        case ir.Full():
            return bool(v.op.value)
        case ir.Broadcast() | ir.Reshape():
            moved = _moved(v.op, places)
            return moved is not None and _holds(em, v.op.x, moved, starts)
    return False


def _holds_for(em: Emitter, op: ir.Map, places: Places, starts: dict[int | None, tuple[Affine, int]]) -> bool:
    """Whether a comparison of an axis's places with a number holds for all elements along it."""
    x, y = (em.forms.tile(a) for a in op.args)
    if x is None or y is None or op.args[0].dtype not in ("int32", "int64"):
        return False
    fn = op.fn
    if not x[1]:
        x, y, fn = y, x, _SWAPPED[fn]
    ((axis, step),) = x[1].items() if len(x[1]) == 1 else ((-1, 0),)
    if y[1] or step != 1 or places[axis] not in starts:
        return False
    start, n = starts[places[axis]]
    away = x[0].plus(y[0], -1).plus(start, -1)  # the condition is `i + away fn 0` for 0 <= i < n
    if away.terms:
        return False
    least, most = away.const, n - 1 + away.const
    return {"ge": least >= 0, "gt": least > 0, "lt": most < 0, "le": most <= 0}[fn]


def _moved(op: ir.Broadcast | ir.Reshape, places: Places) -> Places | None:
    """Where the axes are of what an op repeats, or gives axes of length 1."""
    if isinstance(op, ir.Broadcast):
        return tuple(places[d] if n > 1 else None for n, d in zip(op.x.shape, op.dims, strict=True))
    before, after = ([k for k, n in enumerate(shape) if n != 1] for shape in (op.x.shape, op.shape))
    if [op.x.shape[k] for k in before] != [op.shape[k] for k in after]:
        return None
    to = dict(zip(before, (places[k] for k in after), strict=True))
    return tuple(to.get(k) for k in range(len(op.x.shape)))


__all__ = ["by_bounds"]
