"""Upper bounds of integers in terms of sizes that are known only when a kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jtile.ir import (
    DTYPES,
    At,
    Block,
    Broadcast,
    Cast,
    Extent,
    For,
    Full,
    Iota,
    Kernel,
    Map,
    NumPrograms,
    ProgramId,
    Reshape,
    Size,
    SizeOf,
    Span,
    Take,
    Tile,
    Transpose,
    Value,
    at_least,
)
from jtile.ir.shapes import full_array

DEPTH = 16  # longer chains of arithmetic are not followed


class UpperBounds:
    """For a value the largest number that it can be, as a size: exact enough that `grid = cdiv(n, b)` with `b | n`
    bounds tile `i` of `n`. `interval` gives what else is known of a value, among it the lower end."""

    def __init__(self, kernel: Kernel, interval: Callable[[Value], Any]):
        self.kernel, self.interval = kernel, interval
        self.sides = int32_sizes(kernel)
        self.loops: dict[Value, For] = {}
        self._loops(kernel.body)

    def _loops(self, b: Block) -> None:
        for op in b.ops:
            if isinstance(op, For):
                self.loops[op.body.params[0]] = op
            for inner in op.blocks():
                self._loops(inner)

    def __call__(self, v: Value, depth: int = 0) -> Size | None:
        """The bound of a value; None if nothing is known, or if the arithmetic might leave the dtype."""
        if depth > DEPTH or DTYPES[v.dtype].kind not in "iu":
            return None
        out = self._bound(v, depth + 1)
        return out if out is not None and self._fits(out, v) else None

    def _fits(self, bound: Size, v: Value) -> bool:
        """Whether a bound fits the dtype; what is at most a dimension does, since none has over 2**31 - 1 elements."""
        bits = DTYPES[v.dtype].bits - (DTYPES[v.dtype].kind == "i")
        if isinstance(bound, int):
            return bound < 1 << bits
        return bits >= 31 and any(at_least(n, bound) for n in self.sides)

    def _bound(self, v: Value, depth: int) -> Size | None:
        if v in self.loops:
            loop = self.loops[v]
            step = self.interval(loop.step)
            return _less_one(self(loop.hi, depth)) if step is not None and step.lo > 0 else None
        op, grid = v.op, self.kernel.grid
        match op:
            case ProgramId() if op.axis < len(grid):
                return grid[op.axis] - 1
            case NumPrograms() if op.axis < len(grid):
                return grid[op.axis]
            case SizeOf():
                return op.size
            case Full():
                return int(full_array(op.value, (), op.dtype))
            case Iota():
                return op.shape[op.axis] - 1
            case Broadcast() | Reshape() | Transpose():
                return self(op.x, depth)
            case Cast() if DTYPES[op.x.dtype].kind in "iu":
                return self(op.x, depth)
            case Map():
                return self._map(op, depth)
        return None

    def _map(self, op: Map, depth: int) -> Size | None:
        uppers = [u for a in op.args if (u := self(a, depth)) is not None]
        if op.fn == "min":
            return uppers[0] if uppers else None
        lowers = [i.lo for a in op.args if (i := self.interval(a)) is not None]
        if len(uppers) < 2 or len(lowers) < 2:
            return None
        match op.fn:
            case "add" if min(lowers) >= 0:
                return uppers[0] + uppers[1]
            case "sub" if lowers[1] >= 0:
                return uppers[0] - lowers[1]
            case "mul" if min(lowers) >= 0:
                return uppers[0] * uppers[1]
        return None

    def inside(self, d: At | Span | Tile | Take, n: Size, value: Value) -> bool:
        """Whether an index entry, whose numbers are not negative, stays in a dimension of n elements."""
        last = self(value)
        if last is None:
            return False
        match d:
            case At() | Take():
                return at_least(n, last + 1)
            case Span(_, size, stride):
                return at_least(n, last + 1 + (size - 1) * stride if size else last)
            case Tile(_, size, step):
                return at_least(n, last * step + size)
        return False


def int32_sizes(kernel: Kernel) -> list[Extent]:
    """Sizes that are checked to fit an int32 before a kernel runs: its dynamic dimensions and grid axes."""
    sizes = [n for v in kernel.params for n in v.shape]
    return [n for n in dict.fromkeys([*sizes, *kernel.grid]) if isinstance(n, Extent)]


def _less_one(x: Size | None) -> Size | None:
    return None if x is None else x - 1
