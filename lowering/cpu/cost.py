"""A rough estimate of how long one program runs: what the host needs to decide whether to use more than one thread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jtile import ir
from jtile._compat import is_symbolic

from . import plan, rates
from .isa import Isa

ELEMENTS_PER_NS = 8.0  # one elementwise instruction, vectorised
BYTES_PER_NS = 16.0
UNPACKED_PER_NS = 64.0  # codes of weights that become the lanes of vectors, for however many rows
DEFAULT_TRIPS = 8
COMPUTED = (ir.Full, ir.Map, ir.Cast, ir.Select)  # ops of which scalars are followed


def program_cost_ns(kernel: ir.Kernel, isa: Isa | None = None) -> int:
    """Estimated nanoseconds of one program of a kernel; `isa`: the instruction set, None for this machine's."""
    return max(1, int(_Program(kernel, isa or _host()).block(kernel.body)))


def _host() -> Isa:
    from .targets import cpu_target, parse_isa

    return parse_isa(cpu_target(None).arch)


def predicted_us(kernel: ir.Kernel) -> float:
    """A rough time of all programs on the cores of this machine; 0 where loops are as long as data says."""
    from .targets import cpu_target

    loops = [op for op in kernel.body.walk() if isinstance(op, ir.For)]
    if not all(isinstance(v.op, ir.Full) for op in loops for v in (op.lo, op.hi, op.step)):
        return 0.0
    cores = cpu_target(None).programs_at_once
    programs = max(math.prod(kernel.grid), 1)
    return program_cost_ns(kernel) * -(-programs // cores) / 1e3


def cost_of_call(kernel: ir.Kernel, values: Mapping[str, Any]) -> dict[str, int]:
    """What one program costs at the sizes of a call, where they are known; the image of a kernel with dynamic sizes has
    a guess only."""
    if not values or any(is_symbolic(n) for n in values.values()) or not ir.is_dynamic(kernel):
        return {}
    return {"cost": program_cost_ns(ir.concrete(kernel, values))}


class _Program:
    """The program in the middle of the grid, whose loops stand for those of all programs."""

    def __init__(self, kernel: ir.Kernel, isa: Isa):
        self.grid, self.isa = kernel.grid, isa
        self.known: dict[ir.Value, np.ndarray | None] = {}

    def block(self, block: ir.Block) -> float:
        return sum(map(self.op, block.ops))

    def op(self, op: ir.Op) -> float:
        match op:
            case ir.For():
                return self.trips(op) * self.block(op.body)
            case ir.While():
                return DEFAULT_TRIPS * (self.block(op.body) + self.block(op.cond))
            case ir.If():
                return max(self.block(op.then), self.block(op.orelse))
        return _alone(op, self.isa)

    def trips(self, op: ir.For) -> float:
        """How often a loop runs, in whose body its index is that of the round in the middle."""
        lo, hi, step = map(self.number, (op.lo, op.hi, op.step))
        if lo is None or hi is None or step is None or step == 0:
            return DEFAULT_TRIPS
        rounds = range(int(lo), int(hi), int(step))
        if rounds:
            self.known[op.body.params[0]] = np.asarray(rounds[len(rounds) // 2], lo.dtype)
        return len(rounds)

    def number(self, v: ir.Value) -> np.ndarray | None:
        """The number that a scalar is in this program; None where memory decides it."""
        waiting = [v]
        while waiting:  # a recursion would be as deep as the longest chain of scalars
            first = waiting[-1]
            there = first in self.known or first.type.rank or not isinstance(first.op, COMPUTED)
            unknown = [] if there else [x for x in first.op.operands() if x not in self.known]
            if not unknown:
                self.known.setdefault(first, self._number(first))
                waiting.pop()
            waiting += unknown
        return self.known[v]

    def _number(self, v: ir.Value) -> np.ndarray | None:
        """`number` of a scalar whose op has operands with known numbers."""
        op = v.op
        if isinstance(op, ir.ProgramId | ir.NumPrograms):
            side = self.grid[op.axis] if op.axis < len(self.grid) else 1
            if not isinstance(side, int):
                return None
            return np.asarray(side if isinstance(op, ir.NumPrograms) else side // 2, np.int32)
        if v.type.rank or not isinstance(op, COMPUTED):
            return None
        values = [self.known[x] for x in op.operands()]
        return None if any(x is None for x in values) else np.asarray(op.reference(*values))


def _alone(op: ir.Op, isa: Isa) -> float:
    """What an op without blocks costs."""
    match op:
        case ir.Dot():
            return rates.dot_ns(isa, op)
        case ir.DotScaled():
            unpacked = op.b.type.size / UNPACKED_PER_NS if op.a.dtype == "int16" else 0.0
            return rates.scaled_ns(isa, op) + unpacked
        case ir.Load() | ir.Store() | ir.Atomic():
            size = math.prod(ir.index_shape(op.index))
            slow = 8 if isinstance(op, ir.Atomic) or any(isinstance(d, ir.Take) for d in op.index) else 1
            return 1 + slow * size * ir.DTYPES[op.ref.dtype].bits / 8 / BYTES_PER_NS
        case ir.Sort():
            n = max(op.xs[0].type.size, 2)
            return 4.0 * n * math.log2(n)
    size = max((v.type.size for v in (*op.results, *op.operands()) if isinstance(v.type, ir.TileType)), default=1)
    heavy = (
        8 if isinstance(op, ir.Cumulative | ir.UserScan | ir.UserReduce | ir.Scatter) else max(plan.op_cost(op), 0.5)
    )
    return size * heavy / ELEMENTS_PER_NS
