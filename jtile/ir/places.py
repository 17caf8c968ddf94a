"""Parts of the memory of a block: which ones ops read and write."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from .block import AsyncLoad, AsyncStore, LoadShared, SliceShared, Slot, StoreShared, TransposeShared
from .block_products import DotAsync
from .core import Op, Value
from .scalars import Scalars
from .types import SharedType


@dataclasses.dataclass(frozen=True)
class Place:
    """Part of an allocation: the slot of a ring (`at` is the value that says which), a box of its axes."""

    root: Value
    slot: Hashable
    at: Value | None
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlaps(self, other: Place) -> bool:
        """Whether both surely share elements; their slots are numbers, or terms of one path."""
        if self.root is not other.root or self.slot != other.slot:
            return False
        boxes = zip(self.starts, self.sizes, other.starts, other.sizes, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in boxes)

    @property
    def known(self) -> bool:
        """Whether it is known which buffer it is."""
        return self.at is None or isinstance(self.slot, int)

    def __str__(self) -> str:
        name = f"%{self.root.name}" if self.root.name else "a buffer"
        return name if self.at is None else f"{name}[{self.slot}]"


def views(v: Value) -> tuple[Value, list[Op]]:
    """The allocation that a buffer or a view belongs to, and the views in between, the outermost first."""
    out: list[Op] = []
    while isinstance(v.op, Slot | TransposeShared | SliceShared):
        out.append(v.op)
        v = v.op.buffer
    return v, out


def root(v: Value) -> Value:
    """The allocation that a buffer or a view of one belongs to."""
    return views(v)[0]


def slot_number(v: Value) -> Value | None:
    """The value that says which slot of a ring a view is part of."""
    return next((op.at for op in views(v)[1] if isinstance(op, Slot)), None)


def place(v: Value, scalars: Scalars) -> Place:
    """The part of an allocation that a buffer or a view is."""
    base, through = views(v)
    starts, sizes = [0] * len(base.shape), list(base.shape)
    axes = list(range(len(sizes)))  # axis of the view -> axis of the allocation
    slot: Hashable = None
    at = None
    for op in reversed(through):
        if isinstance(op, Slot):
            slot, at = scalars.of(op.at), op.at
        elif isinstance(op, TransposeShared):
            axes.reverse()
        elif isinstance(op, SliceShared):
            for axis, start, size in zip(axes, op.starts, op.sizes, strict=True):
                starts[axis] += start
                sizes[axis] = size
    return Place(base, slot, at, tuple(starts), tuple(sizes))


def reads(op: Op) -> list[Value]:
    """Buffers whose contents an op reads."""
    if isinstance(op, LoadShared | AsyncStore):
        return [op.buffer]
    return [v for v in (op.a, op.b) if isinstance(v.type, SharedType)] if isinstance(op, DotAsync) else []


def fills(op: Op) -> list[Value]:
    """Buffers that an op writes."""
    return [op.buffer] if isinstance(op, AsyncLoad | StoreShared) else []
