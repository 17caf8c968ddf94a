"""Literal tiles of many numbers on GPUs: made explicit as operands of the call.

Code of a GPU has no tables (TTIR no constants but splats): a literal is a line of integers, or a selection for each run
of equal numbers. A literal of more runs is loaded like an array that the caller passed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jtile import ir
from jtile.passes.rewrite import Rewriter, Rules

Number = int | float | bool
MAX_RUNS = 1024  # runs of equal numbers that code makes by selections, at most


def as_inputs(kernel: ir.Kernel) -> tuple[ir.Kernel, tuple[np.ndarray, ...]]:
    """The kernel with a further input for each literal that code cannot make, behind those it has, and their arrays.
    Equal literals share one."""
    found: dict[tuple[str, tuple[int, ...], bytes], tuple[ir.Value, np.ndarray]] = {}
    rules = Rules()

    @rules(ir.Dense)
    def _loaded(op: ir.Dense, rw: Rewriter) -> ir.Value | None:
        x = op.reference()
        if x.size <= MAX_RUNS or not is_table(x.reshape(-1).tolist()):
            return None
        key = op.dtype, op.shape, x.tobytes()
        if key not in found:
            found[key] = ir.Value(ir.RefType(op.shape, op.dtype, "in"), f"literal{len(found)}"), x
        zero = rw.new(ir.Full(0, (), "int32"))
        return rw.new(ir.Load(found[key][0], tuple(ir.Span(zero, n) for n in op.shape)))

    new = Rewriter(kernel, rules).run()
    if not found:
        return kernel, ()
    rest = [p for p in kernel.params if p not in kernel.inputs]
    params = (*kernel.inputs, *(v for v, _ in found.values()), *rest)
    return dataclasses.replace(new, params=params), tuple(x for _, x in found.values())


def is_table(values: Sequence[Number]) -> bool:
    """Whether numbers need a table, as they are neither a line nor a few runs."""
    return not line_of(values) and len(runs(values)) > MAX_RUNS


def same(a: Number, b: Number) -> bool:
    """Whether two numbers are the same, with the sign of zero; two NaNs are."""
    return a == b and math.copysign(1, a) == math.copysign(1, b) if a == a else b != b


def line_of(values: Sequence[Number]) -> tuple[int, int] | None:
    """First and step of equidistant whole numbers that an i32 holds, and f32 exactly; None for others."""
    if len(values) < 2 or isinstance(values[0], bool):
        return None
    if not all(abs(n) < 1 << 24 and n == int(n) and math.copysign(1, n) == (1 if n >= 0 else -1) for n in values):
        return None
    first, step = int(values[0]), int(values[1] - values[0])
    return (first, step) if step != 0 and all(n == first + k * step for k, n in enumerate(values)) else None


def runs(values: Sequence[Number]) -> list[tuple[int, Number]]:
    """(start, number) of runs of equal numbers."""
    return [(k, n) for k, n in enumerate(values) if k == 0 or not same(n, values[k - 1])]
