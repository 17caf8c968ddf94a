"""Which functions of float32 may be short: those whose results are rounded to 16 bits or less before anyone else sees
them."""

from __future__ import annotations

from collections import defaultdict

from jtile import ir

_SCALED = ("mul", "div", "neg", "abs")  # the relative error of a result is no larger than those of its operands
_KEPT = (ir.Map, ir.Select, ir.Broadcast, ir.Reshape, ir.Transpose, ir.Slice, ir.Concat)


def rounded(kernel: ir.Kernel) -> set[ir.Value]:
    """The float32 tiles of a kernel that reach casts to floats of 16 bits or less, and nothing else, by products and by
    moves of elements."""
    users: dict[ir.Value, list[ir.Op | None]] = defaultdict(list)
    for op in kernel.body.walk():
        for v in op.operands():
            users[v].append(op)
        for inner in op.blocks():
            for v in inner.yields:
                users[v].append(None)  # who uses it then is not asked
    known: dict[ir.Value, bool] = {}
    for op in reversed(list(kernel.body.walk())):  # users stand behind what they use, but in loops
        for r in op.results:
            if isinstance(r.type, ir.TileType) and r.dtype == "float32":
                known[r] = bool(users[r]) and all(_rounds(u, known) for u in users[r])
    return {v for v, yes in known.items() if yes}


def _rounds(op: ir.Op | None, known: dict[ir.Value, bool]) -> bool:
    if isinstance(op, ir.Cast):
        return ir.DTYPES[op.dtype].kind == "f" and ir.DTYPES[op.dtype].bits <= 16
    if isinstance(op, ir.Map) and op.fn not in _SCALED:
        return False
    return isinstance(op, _KEPT) and known.get(op.results[0], False)
