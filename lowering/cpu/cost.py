"""A rough estimate of how long one program runs: what the host needs to decide whether to use more than one thread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jtile import ir
from jtile._compat import is_symbolic

from . import plan

ELEMENTS_PER_NS = 8.0  # one elementwise instruction, vectorised
FLOPS_PER_NS = 200.0
BYTES_PER_NS = 16.0
DEFAULT_TRIPS = 8


def program_cost_ns(kernel: ir.Kernel) -> int:
    """Estimated nanoseconds of one program of a kernel."""
    return max(1, int(_block(kernel.body)))


def predicted_us(kernel: ir.Kernel) -> float:
    """A rough time of all programs on the cores of this machine; 0 where loops are as long as data says."""
    from .targets import cpu_target

    loops = [op for op in kernel.body.walk() if isinstance(op, ir.For)]
    if not all(isinstance(v.op, ir.Full) for op in loops for v in (op.lo, op.hi, op.step)):
        return 0.0
    cores = cpu_target(None).units("device") or 1
    programs = max(math.prod(kernel.grid), 1)
    return program_cost_ns(kernel) * -(-programs // cores) / 1e3


def cost_of_call(kernel: ir.Kernel, values: Mapping[str, Any]) -> dict[str, int]:
    """What one program costs at the sizes of a call, where they are known; the image of a kernel with dynamic sizes has
    a guess only."""
    if not values or any(is_symbolic(n) for n in values.values()) or not ir.is_dynamic(kernel):
        return {}
    return {"cost": program_cost_ns(ir.concrete(kernel, values))}


def _block(block: ir.Block) -> float:
    return sum(_op(op) for op in block.ops)


def _op(op: ir.Op) -> float:
    match op:
        case ir.For():
            return _trips(op) * _block(op.body)
        case ir.While():
            return DEFAULT_TRIPS * (_block(op.body) + _block(op.cond))
        case ir.If():
            return max(_block(op.then), _block(op.orelse))
        case ir.Dot():
            batch, m, n, k = op.sizes()
            return 2.0 * math.prod(batch) * m * n * k / FLOPS_PER_NS
        case ir.DotScaled():
            return 2.0 * math.prod(op.result.shape) * op.a.shape[1] / FLOPS_PER_NS
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


def _trips(op: ir.For) -> float:
    ends = [v.op.value if isinstance(v.op, ir.Full) else None for v in (op.lo, op.hi, op.step)]
    if None in ends or ends[2] == 0:
        return DEFAULT_TRIPS
    return len(range(int(ends[0]), int(ends[1]), int(ends[2])))
