"""What neighbouring blocks of a kernel at the block level copy alike: one copy brings it to all of them.

Blocks of a cluster run at the same time and reach each other's shared memory. Where a copy does not depend on which of
them a block is, each of them brings a part of what it copies to the same place in all. A slot of a ring may then be
filled when it has been read in all blocks, so that their consumers arrive at the barriers of all of them. The PTX says
so: see `lowering/triton/clusters.py`.
"""

from __future__ import annotations

import dataclasses
import math

from jtile import ir
from jtile.ir.types import DTYPES, SharedType
from jtile.passes.order import grouped_axes

WIDTH, ROWS = 128, 8  # bytes of a row of a swizzled box; rows after which its pattern begins anew
_SCALAR = (ir.Map, ir.Select, ir.Cast, ir.Bitcast)


@dataclasses.dataclass(frozen=True)
class Shared:
    """What blocks of a cluster share.

    Attributes:
      blocks: of a cluster; neighbours in the grid.
      loads: copies that all of them make alike -> (axis of the buffer, elements along it) of the part of each block.
      rings: barriers at which the consumers of all of them arrive, of the slots that these copies fill -> how often
        slots are filled.
      far: stores and arrivals that go to another block -> its place in the cluster; awaited: waits for those, see
        `spread.py`.
    """

    blocks: int
    loads: dict[ir.AsyncLoad, tuple[int, int]]
    rings: dict[ir.Value, int]
    far: dict[ir.Op, int] = dataclasses.field(default_factory=dict)
    awaited: set[ir.Op] = dataclasses.field(default_factory=set)


def shared(kernel: ir.Kernel, blocks: int) -> Shared | None:
    """What clusters of `blocks` blocks share; None where they have nothing in common that could be shared."""
    sides = kernel.grid if all(isinstance(n, int) for n in kernel.grid) else (0,)
    if blocks < 2 or sides[-1] % blocks or not all(sides) or kernel.devices or grouped_axes(kernel):
        return None
    found = _Alike(kernel, blocks)
    loads: dict[ir.AsyncLoad, tuple[int, int]] = {}
    rings: dict[ir.Value, list[ir.AsyncLoad]] = {}
    for block in found.even:
        emptied: ir.Value | None = None
        for op in block.ops:
            if isinstance(op, ir.Wait):
                emptied = op.barrier
            if isinstance(op, ir.AsyncLoad) and emptied is not None and emptied is not op.barrier:
                rings.setdefault(emptied, []).append(op)
    even = {id(op) for block in found.even for op in block.ops}
    used: dict[ir.Value, int] = {}
    for ring, copies in rings.items():
        ends = [op for op in kernel.body.walk() if isinstance(op, ir.Arrive) and op.barrier is ring]
        parts = {op: part for op in copies if (part := _part(op, blocks)) and found.same(op)}
        together = all(id(op) in even and found.alike(op.when) and found.alike(op.at) for op in ends)
        if parts and ends and together and (fills := _fills(kernel, ring)):
            loads |= parts
            used[ring] = fills
    return Shared(blocks, loads, used) if loads else None


def _fills(kernel: ir.Kernel, ring: ir.Value) -> int:
    """How often the slots of a ring are filled; 0 where that is not known, or not how often each consumer lets them
    go."""
    roles = [op for op in kernel.body.ops if isinstance(op, ir.Roles)]
    bodies = roles[0].bodies if roles else ()
    waits, arrivals = ([_times(body, ring, kind) for body in bodies] for kind in (ir.Wait, ir.Arrive))
    fills = max(waits, default=0)
    once = sum(n != 0 for n in waits) == 1 and all(n in (0, fills) for n in arrivals)
    every = sum(n != 0 for n in arrivals) == ring.type.arrivals  # type: ignore[union-attr]
    return fills if once and every and fills > 0 else 0


def _times(block: ir.Block, ring: ir.Value, kind: type[ir.Wait | ir.Arrive], loop: ir.For | None = None) -> int:
    """How often a block of ops, the body of `loop` if there is one, in all rounds of that waits, or arrives, at the
    barriers of a ring; -1 where that is not known."""
    always, later = 0, 0  # in every round; in every round but the first
    for op in block.ops:
        if isinstance(op, ir.Wait | ir.Arrive) and isinstance(op, kind) and op.barrier is ring:
            if op.when is not None and not _not_first(op.when, loop):
                return -1
            always, later = always + (op.when is None), later + (op.when is not None)
        inner = op if isinstance(op, ir.For) else None
        inside = [_times(b, ring, kind, inner) for b in op.blocks()]
        if any(inside) and (inner is None or min(inside) < 0):
            return -1
        always += sum(inside)
    if loop is None or not (always or later):
        return always
    return rounds(loop) * always + (rounds(loop) - 1) * later if rounds(loop) else -1


def rounds(loop: ir.For) -> int:
    """How many rounds a loop has; 0 where that is not known."""
    bounds = [b.op.value if isinstance(b.op, ir.Full) else None for b in (loop.lo, loop.hi, loop.step)]
    return len(range(*bounds)) if all(isinstance(b, int) for b in bounds) else 0  # type: ignore[arg-type]


def _not_first(when: ir.Value, loop: ir.For | None) -> bool:
    """Whether a condition holds in all rounds of a loop but the first."""
    op = when.op
    if loop is None or not isinstance(op, ir.Map) or op.args[0] is not loop.body.params[0]:
        return False
    first, lo, step = op.args[1].op, loop.lo.op, loop.step.op
    up = isinstance(step, ir.Full) and isinstance(step.value, int) and step.value > 0
    then = op.fn == "ne" or (op.fn == "gt" and up)
    return then and isinstance(first, ir.Full) and isinstance(lo, ir.Full) and first.value == lo.value


def _part(op: ir.AsyncLoad, blocks: int) -> tuple[int, int] | None:
    """(axis, elements) of the part of a copy that one block makes; None where it has no such parts."""
    t = op.buffer.type
    if not isinstance(t, SharedType) or len(t.shape) != 2 or op.ref.type.role == "symmetric":  # type: ignore[union-attr]
        return None
    rows, columns = t.shape
    pieces, rest = divmod(columns * DTYPES[t.dtype].bits, 8 * WIDTH)
    if pieces > 1 and not rest and pieces % blocks == 0:
        return 1, columns // blocks
    return None if rows % (ROWS * blocks) else (0, rows // blocks)


class _Alike:
    """Which values of a kernel are the same in all blocks of a cluster, whose numbers begin at a multiple of theirs."""

    def __init__(self, kernel: ir.Kernel, blocks: int):
        self.grid, self.blocks = kernel.grid, blocks
        self.known: dict[ir.Value, bool] = {}
        self.loops: dict[ir.Value, tuple[ir.For, int]] = {}
        for op in kernel.body.walk():
            if isinstance(op, ir.For):
                self.loops |= {p: (op, k - 1) for k, p in enumerate(op.body.params)}
        self.unlike: set[ir.Value] = set()  # of the values that loops carry, and count
        while found := {v for v in self.loops if v not in self.unlike and not self._carried(v)}:
            self.unlike |= found
            self.known.clear()
        self.even: list[ir.Block] = []  # blocks of ops that all blocks of a cluster go through equally often
        self._enter(kernel.body)

    def _enter(self, block: ir.Block) -> None:
        self.even.append(block)
        for op in block.ops:
            bounds = (op.lo, op.hi, op.step) if isinstance(op, ir.For) else (op.cond,) if isinstance(op, ir.If) else ()
            if isinstance(op, ir.For | ir.If | ir.Roles) and all(map(self.alike, bounds)):
                for inner in op.blocks():
                    self._enter(inner)

    def same(self, op: ir.AsyncLoad) -> bool:
        """Whether all blocks of a cluster copy the same in the same rounds."""
        return op.when is None and all(self.alike(ir.dim_value(d)) for d in op.index) and self.alike(op.at)

    def alike(self, v: ir.Value | None) -> bool:
        if v is None:
            return True
        if v in self.loops:
            return v not in self.unlike
        if v not in self.known:
            self.known[v] = self._alike(v)
        return self.known[v]

    def _carried(self, v: ir.Value) -> bool:
        """Whether a value that a loop carries, or counts, is alike if those are that are not known to be unlike."""
        loop, k = self.loops[v]
        return all(map(self.alike, (loop.lo, loop.step) if k < 0 else (loop.inits[k], loop.body.yields[k])))

    def _alike(self, v: ir.Value) -> bool:
        op = v.op
        if isinstance(op, ir.Full | ir.NumPrograms | ir.SizeOf):
            return True
        if isinstance(op, ir.ProgramId):
            return op.axis >= len(self.grid) or self._behind(op.axis) % self.blocks == 0
        if isinstance(op, ir.For):
            return all(map(self.alike, (op.lo, op.hi, op.step, op.body.params[1 + op.results.index(v)])))
        if isinstance(op, ir.Map) and op.fn == "div" and self._counts(op.args[0]) and self._multiple(op.args[1]):
            return True
        return isinstance(op, _SCALAR) and not v.shape and all(map(self.alike, op.operands()))

    def _behind(self, axis: int) -> int:
        return math.prod(self.grid[axis + 1 :])

    def _counts(self, v: ir.Value) -> bool:
        """Whether a value is a multiple of `blocks`, alike in a cluster, plus the place of the block in it."""
        if isinstance(v.op, ir.ProgramId):
            return v.op.axis == len(self.grid) - 1
        if isinstance(v.op, ir.Map) and v.op.fn == "rem":
            return self._counts(v.op.args[0]) and self._multiple(v.op.args[1])
        return False

    def _multiple(self, v: ir.Value) -> bool:
        return isinstance(v.op, ir.Full) and isinstance(v.op.value, int) and v.op.value % self.blocks == 0
