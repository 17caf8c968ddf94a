"""What to compute where: which ops stay lazy, what they cost, when a value is used for the last time."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from jtile import ir

from .multiply_add import MultiplyAdd

LAZY_OPS = frozenset([
    ir.Map, MultiplyAdd, ir.Select, ir.Cast, ir.Bitcast, ir.Full, ir.Dense, ir.Iota, ir.Broadcast, ir.Reshape,
    ir.Transpose, ir.Slice, ir.Reverse, ir.DynamicSlice, ir.Gather,
])  # fmt: skip

_HEAVY = {"div": 4, "rem": 6, "sqrt": 4, "rsqrt": 5, "pow": 20, "atan2": 15}
_FREE = {"neg", "abs", "not", "and", "or"}


def op_cost(op: ir.Op) -> float:
    """Rough vector instructions to compute one vector of the op's own work."""
    match op:
        case ir.Map():
            if op.fn in _FREE:
                return 0.5
            exact = isinstance(op, MultiplyAdd) or ir.ELEMENTWISE[op.fn].exact
            return _HEAVY.get(op.fn, 1 if exact else 12)
        case ir.Select():
            return 0.5
        case ir.Cast():
            return 0.5
        case ir.Gather() | ir.DynamicSlice():
            return 8
        case ir.Load():
            return 0.5 if op.mask is None and not any(isinstance(d, ir.Take) for d in op.index) else 6
    return 0


def is_lazy(op: ir.Op | None) -> bool:
    return type(op) in LAZY_OPS


@dataclasses.dataclass
class BlockPlan:
    """Facts of one block: per value the positions of the ops that use it (regions included; `len(ops)`: yielded), and
    the set of values that are defined in it; `outer`: how many lazy ops make values from outside of it."""

    block: ir.Block
    uses: dict[ir.Value, list[int]]
    defined: set[ir.Value]
    outer: Mapping[ir.Value, int] = dataclasses.field(default_factory=dict)

    def last(self, v: ir.Value) -> int:
        return self.uses[v][-1] if v in self.uses else -1

    @functools.cached_property
    def depths(self) -> dict[ir.Value, int]:
        """For each result of the block at most how many lazy ops its value is made by, one behind the other; loads
        count, since one with a mask may wait for it."""
        deep: dict[ir.Value, int] = {}
        for op in self.block.ops:
            lazy = is_lazy(op) or isinstance(op, ir.Load)
            above = max((deep.get(a, self.outer.get(a, 0)) for a in op.operands()), default=0) if lazy else 0
            deep.update(dict.fromkeys(op.results, above + 1))
        return deep


def used_by(op: ir.Op) -> list[ir.Value]:
    """Values an op uses, regions included (values defined in the regions too)."""
    out = list(op.operands())
    for b in op.blocks():
        for inner in b.ops:
            out += used_by(inner)
        out += b.yields
    return out


def plan_block(block: ir.Block) -> BlockPlan:
    uses: dict[ir.Value, list[int]] = {}
    defined = set(block.params)
    for k, op in enumerate(block.ops):
        for v in used_by(op):
            uses.setdefault(v, []).append(k)
        defined.update(op.results)
    for v in block.yields:
        uses.setdefault(v, []).append(len(block.ops))
    return BlockPlan(block, uses, defined)


def written_refs(kernel: ir.Kernel) -> set[ir.Value]:
    """Refs that the kernel writes, the inputs that share a buffer with an output, and what other devices may write."""
    out: set[ir.Value] = set()
    for op in kernel.body.walk():
        if isinstance(op, ir.Store | ir.Atomic):
            out.add(op.ref)
        elif isinstance(op, ir.On):
            out.add(op.result)
    for i, o in kernel.aliases:
        out |= {kernel.inputs[i], kernel.outputs[o]}
    return out | set(kernel.shared)


def same_memory(kernel: ir.Kernel, ref: ir.Value) -> set[ir.Value]:
    """The parameters that share memory with `ref`, on this device or on another."""
    out = {ir.root(ref)}
    for i, o in kernel.aliases:
        pair = {kernel.inputs[i], kernel.outputs[o]}
        out |= pair if pair & out else set()
    return out


def loads_from(op: ir.Op, refs: set[ir.Value]) -> bool:
    """Whether an expression loads from one of the Refs, however far down."""
    todo, seen = [op], {op}
    while todo:
        at = todo.pop()
        if isinstance(at, ir.Load | ir.Atomic) and ir.root(at.ref) in refs:
            return True
        made = [v.op for v in at.operands() if v.op is not None and v.op not in seen]
        seen.update(made)
        todo += made
    return False


def amplifies(user: ir.Op, v: ir.Value) -> bool:
    """Does `user` read each element of `v` many times?"""
    return isinstance(user, ir.Broadcast) and math.prod(user.shape) > v.type.size


def register_bits(dtype: str) -> int:
    """Width of a value of this dtype while it is computed on."""
    d = ir.DTYPES[dtype]
    if d.kind == "b":
        return 8
    return max(d.bits, 32) if d.kind == "f" else max(d.bits, 8)
