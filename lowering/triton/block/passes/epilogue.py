"""Results leave through shared memory: a tensor map writes them while the role goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jtile.ir import AllocShared, AsyncStore, Builder, FenceShared, Load, Slot, Store, StoreShared, StoreWait, Value

from .narrow import Narrow, narrowed
from .plan import Output


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
    """Buffers for the stores of one consumer, by the Ref that they write. Stores of one dtype and shape share them."""
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


def store(b: Builder, op: Store, leaving: Leaving, read_only: Callable[[Load], bool]) -> None:
    """Ops that store a tile [rows, columns] piece by piece. A buffer is written again when its copy has read it, and
    what a piece is made of is loaded before the piece in front of it is computed.

    The operands of `op` are values of the role that is built.
    """
    out = leaving.output
    pieces = op.value.shape[1] // out.columns
    parts = [Narrow(b, k, pieces, read_only) for k in range(pieces)]
    for k, part in enumerate(parts):
        for following in parts[k : k + 2] if pieces > 1 else ():
            following.load(op.value, 1)
        piece = part(op.value, 1) if pieces > 1 else op.value
        b.add(StoreWait(out.buffers - 1 if k or leaving.even else 0))
        buffer = b.value(Slot(leaving.ring, b.index(k % out.buffers)), op.ref.name)
        b.add(StoreShared(buffer, piece))
        b.add(FenceShared())
        b.add(AsyncStore(op.ref, narrowed(b, op.index, k, pieces), buffer, "set", op.checked))
