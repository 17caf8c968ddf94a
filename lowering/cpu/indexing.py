"""The dimensions of an access as native code: where each begins, and whether it may leave its array."""

from __future__ import annotations

import dataclasses

from jtile import ir

from .emitter import Emitter
from .evaluate import scalar_i64
from .llvm import Val


@dataclasses.dataclass
class Axis:
    """One dimension of an access: element `start + i * stride` for i < size; `axis` is its axis in the tile (None:
    dropped)."""

    start: Val
    size: int
    stride: int
    limit: int | Val
    axis: int | None
    checked: bool


def affine_axes(em: Emitter, op: ir.Load | ir.Store | ir.Atomic) -> list[Axis | None]:
    """The dimensions of an access in order; None stands for a gathered one. Emits the start computations."""
    out: list[Axis | None] = []
    k, taken = 0, False
    for d, n in zip(op.index, op.ref.shape, strict=True):
        if isinstance(d, ir.Take):
            k += 0 if taken else d.indices.type.rank
            taken = True
            out.append(None)
            continue
        start = scalar_i64(em, ir.dim_value(d))
        size, stride, axis = 1, 1, None
        if isinstance(d, ir.Tile):
            start, size, axis = em.code.mul(start, d.step), d.size, k
        elif isinstance(d, ir.Span):
            size, stride, axis = d.size, d.stride, k
        k += axis is not None
        out.append(Axis(start, size, stride, em.size(n), axis, _may_leave(op, start, size, stride, n)))
    return out


def _may_leave(op, start: Val, size: int, stride: int, n: ir.Size) -> bool:
    if not getattr(op, "checked", True) or size == 0:
        return False
    if start.name.lstrip("-").isdigit():
        return int(start.name) < 0 or not ir.at_least(n, int(start.name) + 1 + (size - 1) * stride)
    return True


def take_axes(op) -> tuple[int, int]:
    """(first tile axis of the gathered indices, their rank)."""
    k = 0
    for d in op.index:
        if isinstance(d, ir.Take):
            return k, d.indices.type.rank
        k += not isinstance(d, ir.At)
    return 0, 0
