"""Bounds: proves from grid and loop bounds which accesses stay inside their array, and which masks cannot fail."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jtile.ir import (
    At,
    Dense,
    Extent,
    Full,
    Gather,
    Index,
    Iota,
    Kernel,
    Load,
    Op,
    Size,
    Span,
    Store,
    Take,
    Tile,
    Value,
    dim_value,
)

from .intervals import TRUE, Intervals, walk
from .pipeline import Pass
from .rewrite import Copier, Form


def run(kernel: Kernel) -> Kernel:
    plan = _Plan({}, {}, set())
    walk(kernel, plan.look_at)
    forms: dict[Op, Form] = {op: functools.partial(_constant, op, n) for op, n in plan.constants.items()}
    forms |= {op: functools.partial(plan.access, op) for op in plan.inside if plan.changes(op)}
    return Copier(forms).whole(kernel) if forms else kernel


@dataclasses.dataclass
class _Plan:
    """What the analysis found out about ops of the old kernel."""

    constants: dict[Op, int]
    inside: dict[Op, bool]
    unmasked: set[Op]

    def look_at(self, op: Op, known: Intervals) -> None:
        if isinstance(op, Load | Store):
            self.inside[op] = stays_inside(op.index, op.ref.shape, known)
            if op.mask is not None and known(op.mask) == TRUE:
                self.unmasked.add(op)
        elif _may_fold(op):
            i = known(op.result)
            if i is not None and i.single:
                self.constants[op] = i.lo

    def changes(self, op: Any) -> bool:
        """Whether a load or store needs no check any more, or no mask."""
        return op in self.unmasked or (op.checked and self.inside[op])

    def access(self, old: Op, copier: Copier) -> tuple[Value, ...]:
        new = copier.put(old)
        assert isinstance(new, Load | Store)
        new.checked = new.checked and not self.inside[old]
        new.mask = None if old in self.unmasked else new.mask
        return new.results


def _constant(op: Op, n: int, copier: Copier) -> tuple[Value, ...]:
    t = op.result.type
    return (copier.b.value(Full(bool(n) if t.dtype == "bool" else n, t.shape, t.dtype), op.result.name),)


def _may_fold(op: Op) -> bool:
    """Whether an op may become a constant: a pure one with one integer or bool result. A gather may leave its tile."""
    pure = op.effect == "none" and not op.blocks() and len(op.results) == 1
    return pure and not isinstance(op, Full | Dense | Iota | Gather)


def stays_inside(index: Index, shape: tuple[Size, ...], known: Intervals) -> bool:
    """Whether every lane of an access lies in the array, whatever the program and the trip of a loop."""
    return all(_inside(d, n, known) for d, n in zip(index, shape, strict=True))


def _inside(d: At | Span | Tile | Take, n: Size, known: Intervals) -> bool:
    i = known(dim_value(d))
    if i is None or i.lo < 0:
        return False
    if isinstance(n, Extent):
        return known.upper.inside(d, n, dim_value(d))
    match d:
        case At() | Take():
            return i.hi < n
        case Span(_, size, stride):
            return i.hi + max(size - 1, 0) * stride < n if size else i.hi <= n
        case Tile(_, size, step):
            return i.hi * step + size <= n
    return False


bounds = Pass(
    "bounds",
    "Accesses that provably stay inside their array are unchecked; masks and integers that cannot vary are constants.",
    run,
)
