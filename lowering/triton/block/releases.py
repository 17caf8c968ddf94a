"""Which arrivals need a fence in front of them: those that let a copy overwrite what the role's loads may still read.

An arrival at a barrier says that threads have issued their loads of a buffer, not that these are done: in machine code
the loads, BAR.SYNC and the arrival stand in a row, and none of them waits for the loads. Stores of other threads come
behind loads that were issued before, but asynchronous copies take another way to shared memory. A copy that such an
arrival let start has overwritten numbers in front of a load: a grouped product of Q8_0, whose rings have two slots,
gave other bits in 2 to 100 % of its calls on an H200 that several processes shared, and a plain one of 256 rows in 1 to
8 %. With a proxy fence in front of the arrival, none of 220,000 did, on the same H200 at the same time.
"""

from __future__ import annotations

from collections.abc import Set

from jtile import ir

VIEWS = (ir.Slot, ir.TransposeShared, ir.SliceShared)


def root(v: ir.Value) -> ir.Value:
    """The allocated buffer or barriers that v is a view of."""
    while isinstance(v.op, VIEWS):
        v = v.op.buffer
    return v


def behind_loads(kernel: ir.Kernel) -> Set[ir.Op]:
    """The arrivals that come behind loads from buffers which asynchronous copies fill, with no fence in between."""
    filled = {root(op.buffer) for op in kernel.body.walk() if isinstance(op, ir.AsyncLoad)}
    found: set[ir.Op] = set()
    _look(kernel.body, False, filled, found)
    return found


def _look(block: ir.Block, loaded: bool, filled: Set[ir.Value], found: set[ir.Op]) -> bool:
    """Whether loads that no fence has followed stand behind the block; `loaded`: whether they stand in front of it."""
    for op in block.ops:
        if isinstance(op, ir.LoadShared):
            loaded |= root(op.buffer) in filled
        elif isinstance(op, ir.FenceShared):
            loaded = False
        elif isinstance(op, ir.Arrive):
            if loaded:
                found.add(op)
            loaded = False
        elif op.inner:
            for inner in op.blocks():
                once = _look(inner, loaded, filled, found)
                loaded |= _look(inner, loaded or once, filled, found)  # behind another round, if it is a loop
    return loaded
