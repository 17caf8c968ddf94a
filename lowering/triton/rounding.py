"""Which functions of float32 may be short: those whose results are rounded to 16 bits or less before anyone else sees
them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from jtile import ir
from jtile.passes.fold import number

_SCALED = ("mul", "div", "neg", "abs")  # the relative error of a result is no larger than those of its operands
_KEPT = (ir.Map, ir.Select, ir.Broadcast, ir.Reshape, ir.Transpose, ir.Slice, ir.Concat)


_SUMMED = (*_SCALED, "add", "sub", "square")  # the absolute error is about as large, unless numbers cancel


def rounded(kernel: ir.Kernel, *, sums: bool = False) -> set[ir.Value]:
    """The float32 tiles of a kernel that reach casts to floats of 16 bits or less, and nothing else, by products and by
    moves of elements; with `sums` also by sums."""
    functions = _SUMMED if sums else _SCALED
    users: dict[ir.Value, list[ir.Op | None]] = defaultdict(list)
    for op in kernel.body.walk():
        for v in op.operands():
            users[v].append(op)
        for inner in op.blocks():
            for v in inner.yields:
                users[v].append(None)  # a value that leaves its block has unknown users
    known: dict[ir.Value, bool] = {}
    for op in reversed(list(kernel.body.walk())):  # users, which stand behind, are seen first, but in loops
        for r in op.results:
            if isinstance(r.type, ir.TileType) and r.dtype == "float32":
                known[r] = bool(users[r]) and all(_rounds(u, known, functions) for u in users[r])
    return {v for v, yes in known.items() if yes}


def _rounds(op: ir.Op | None, known: dict[ir.Value, bool], functions: Sequence[str]) -> bool:
    if isinstance(op, ir.Cast):
        return ir.DTYPES[op.dtype].kind == "f" and ir.DTYPES[op.dtype].bits <= 16
    if isinstance(op, ir.Map) and op.fn not in functions:
        return False
    return isinstance(op, _KEPT) and known.get(op.results[0], False)


def beside_one(kernel: ir.Kernel) -> set[ir.Value]:
    """The hyperbolic tangents in float32 that are added, as they are or squared, to a number of one at least, in a
    kernel whose results have 16 bits or less: only their absolute error counts, even for small results."""
    stored = [op.value for op in kernel.body.walk() if isinstance(op, ir.Store | ir.Atomic | ir.StoreShared)]
    if not stored or any(v.type.info.kind != "f" or v.type.info.bits > 16 for v in stored):
        return set()
    users: dict[ir.Value, list[ir.Op | None]] = defaultdict(list)
    found: list[ir.Value] = []
    for op in kernel.body.walk():
        for v in op.operands():
            users[v].append(op)
        for inner in op.blocks():
            for v in inner.yields:
                users[v].append(None)
        if isinstance(op, ir.Map) and op.fn == "tanh" and op.result.dtype == "float32":
            found.append(op.result)
    return {v for v in found if users[v] and all(_beside(u, v, users) for u in users[v])}


def _beside(op: ir.Op | None, v: ir.Value, users: Mapping[ir.Value, list[ir.Op | None]]) -> bool:
    if not isinstance(op, ir.Map):
        return False
    if op.fn == "square" or (op.fn == "mul" and op.args == (v, v)):
        r = op.result
        return bool(users[r]) and all(_beside(u, r, users) for u in users[r] if u is not op)
    numbers = [number(x) for x in op.args if x is not v]
    return op.fn in ("add", "sub") and len(numbers) == 1 and numbers[0] is not None and abs(numbers[0]) >= 1
