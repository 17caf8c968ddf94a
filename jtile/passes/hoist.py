"""Loop-invariant code: ops of a `for` body that depend on nothing inside it move in front of the loop."""

from __future__ import annotations

import math

from jtile.ir import Block, Broadcast, For, Full, Gather, Iota, Kernel, Load, Op, ProgramId, Reshape, Value, root
from jtile.ir.block import level_of
from jtile.ir.shapes import full_array

from .pipeline import Pass
from .rewrite import Copier, buffers, free_values, is_pure, written

# Tiles that cost nothing to make where they are used, and registers to keep: they move only with what needs them.
FREE = (Full, Iota, Broadcast, Reshape)


def run(kernel: Kernel) -> Kernel:
    if level_of(kernel) == "block":  # where things stand there is the schedule, and registers are budgeted
        return kernel
    loops = any(isinstance(op, For) for op in kernel.body.walk())
    return _Hoister(kernel).whole(kernel) if loops else kernel


def small(kernel: Kernel, most: int) -> Kernel:
    """The kernel with invariant tiles of at most `most` elements hoisted, whose registers count for little."""
    return _Hoister(kernel, most).whole(kernel)


class _Hoister(Copier):
    """Copies a kernel whose loops give up their invariant ops. `most`: elements of a tile that may move; None: any
    number."""

    def __init__(self, kernel: Kernel, most: int | None = None):
        super().__init__()
        self.roots, self.most = buffers(kernel), most
        self.grid = kernel.grid

    def put(self, op: Op) -> Op:
        new = super().put(op)
        if isinstance(new, For):
            moved = self.invariant(new)
            gone = set(moved)
            new.body.ops = [x for x in new.body.ops if x not in gone]
            self.b.block.ops[-1:] = [*moved, new]
        return new

    def invariant(self, loop: For) -> list[Op]:
        """The ops of the loop's body that can stand in front of it, in order."""
        inside = set(loop.body.params)
        for op in loop.body.walk():
            inside.update(op.results)
            for b in op.blocks():
                inside.update(b.params)
        wrote = written(loop.body, self.roots)
        runs = trips(loop) or self.first_runs(loop)
        candidates: list[Op] = []
        for op in loop.body.ops:
            # Loads and gathers can leave their array: they move only where the loop would have run them.
            still = is_pure(op) and (runs or not any(isinstance(x, Gather) for x in Block((), [op]).walk()))
            load = isinstance(op, Load) and runs and root(op.ref, self.roots) not in wrote
            if self.most is not None and any(math.prod(r.shape) > self.most for r in op.results):
                continue
            if (still or load) and not any(v in inside for v in free_values(op)):
                candidates.append(op)
                inside.difference_update(op.results)
        return _worth(candidates)

    def first_runs(self, loop: For) -> bool:
        """Whether a loop over the tiles of a program, from its own number on, surely makes a round."""
        lo, hi, step = loop.lo.op, loop.hi.op, loop.step.op
        if not isinstance(lo, ProgramId) or not isinstance(hi, Full) or not isinstance(step, Full):
            return False
        programs = self.grid[lo.axis] if lo.axis < len(self.grid) else 1
        return isinstance(programs, int) and programs <= hi.value and step.value > 0


def _worth(candidates: list[Op]) -> list[Op]:
    """The candidates without the free tiles that no other moving op uses."""
    needed: set[Value] = set()
    keep: list[Op] = []
    for op in reversed(candidates):
        free = isinstance(op, FREE) and op.result.shape
        if not free or op.result in needed:
            keep.append(op)
            needed.update(free_values(op))
    return keep[::-1]


def trips(loop: For) -> int:
    """How often a loop surely runs: its trip count where the bounds are constants, else 0."""
    bounds = [v.op for v in (loop.lo, loop.hi, loop.step)]
    numbers = [int(full_array(b.value, (), b.dtype)) for b in bounds if isinstance(b, Full)]
    if len(numbers) != 3 or numbers[2] == 0:
        return 0
    return len(range(*numbers))


hoist = Pass("hoist", "No op of a for loop, but tiles that cost nothing, depends on values from outside it alone.", run)
