"""Results leave through shared memory: a tensor map writes them while the role goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jtile.ir import (
    AllocShared,
    AsyncStore,
    At,
    Builder,
    FenceShared,
    Index,
    Slice,
    Slot,
    Span,
    Store,
    StoreShared,
    StoreWait,
    Tile,
    Value,
)

from .plan import Output

Look = Callable[[Value], Value]


@dataclasses.dataclass(eq=False)
class Leaving:
    """Buffers of one consumer through which stores of one shape leave.

    Attributes:
      even: whether every store takes the buffers an even number of times, so that the last one that a store took is not
        the first that the next one takes.
    """

    ring: Value
    output: Output
    even: bool


def allocate(b: Builder, stores: list[tuple[Store, Output]], name: str) -> dict[Value, Leaving]:
    """Buffers for the stores of one consumer: Ref -> those it leaves through. Stores of one dtype and shape share."""
    kinds: dict[object, list[tuple[Store, Output]]] = {}
    for op, out in stores:
        kinds.setdefault((op.value.shape[0], op.value.dtype, out), []).append((op, out))
    found: dict[Value, Leaving] = {}
    for same in kinds.values():
        op, out = same[0]
        even = all(x.value.shape[1] // out.columns % 2 == 0 for x, _ in same)
        b.loc = op.loc
        ring = b.value(
            AllocShared((op.value.shape[0], out.columns), op.value.dtype, out.buffers), f"{op.ref.name}{name}"
        )
        leaving = Leaving(ring, out, even)
        found |= {x.ref: leaving for x, _ in same}
    return found


def store(b: Builder, op: Store, value: Value, look: Look, leaving: Leaving) -> None:
    """Ops that store a tile [rows, columns] piece by piece. A buffer is written again when its copy has read it."""
    out, columns = leaving.output, op.value.shape[1]
    pieces = _pieces(b, value, columns // out.columns)
    for k, piece in enumerate(pieces):
        free = out.buffers - 1 if k or leaving.even else 0
        b.add(StoreWait(free))
        buffer = b.value(Slot(leaving.ring, b.index(k % out.buffers)), op.ref.name)
        b.add(StoreShared(buffer, piece))
        b.add(FenceShared())
        b.add(AsyncStore(op.ref, _columns(b, op.index, look, k, len(pieces)), buffer, "set", op.checked))


def _pieces(b: Builder, v: Value, n: int) -> list[Value]:
    """A tile cut along its columns in halves of halves: threads have all of their registers' neighbours."""
    if n == 1:
        return [v]
    rows, columns = v.shape
    half = columns // 2
    left = b.value(Slice(v, (0, 0), (rows, half), (1, 1)))
    right = b.value(Slice(v, (0, half), (rows, columns), (1, 1)))
    return [*_pieces(b, left, n // 2), *_pieces(b, right, n // 2)]


def _columns(b: Builder, index: Index, look: Look, k: int, n: int) -> Index:
    """The index of piece k of n along the last axis."""
    out = []
    for d in index[:-1]:
        match d:
            case At(v):
                out.append(At(look(v)))
            case Tile(v, size, step):
                out.append(Tile(look(v), size, step))
            case Span(v, size, stride):
                out.append(Span(look(v), size, stride))
    return (*out, _part(b, index[-1], look, k, n))


def _part(b: Builder, d, look: Look, k: int, n: int):
    v, size = look(d.index if isinstance(d, Tile) else d.start), d.size
    if isinstance(d, Tile) and d.step == size:
        at = v if n == 1 else b.map("add", b.map("mul", v, b.index(n)), b.index(k))
        return Tile(at, size // n, size // n)
    start = b.map("mul", v, b.index(d.step)) if isinstance(d, Tile) else v
    return Span(start if n == 1 else b.map("add", start, b.index(k * (size // n))), size // n)
