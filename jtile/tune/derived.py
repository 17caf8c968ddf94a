"""Tiles of the reverse mode of a kernel that has `jt.auto`: what is a side of its result is what a cotangent sums over,
so that other tiles than its own are best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jtile import ir, passes
from jtile.primitive.lowering import pieces_of
from jtile.tune import guesses, nature, warpgroups
from jtile.tune.auto import Asked, has_plan
from jtile.tune.guesses import Sides
from jtile.tune.nature import COLUMNS, ROWS, TERMS, Whole
from jtile.tune.warpgroups import LINE, Form

VALUES = 64, 128, 256
TRIED = 4  # candidates, the best by the model, for which a plan is sought


def choose(asked: Asked, target: Any, make: Callable[[Any], Any]) -> tuple[dict[str, int], float] | None:
    """The values with the shortest time that the model expects of all kernels of `make(program)` together, and that
    time in microseconds; None where one of them is no product of arrays in such tiles, or has no plan for roles."""
    start = dict.fromkeys(asked.names, VALUES[0])
    pieces = lambda config: _pieces(asked, config, make)
    base = pieces(start)
    moved = {name: pieces({**start, name: 2 * VALUES[0]}) for name in asked.names}
    if base is None or any(other is None or len(other) != len(base) for other in moved.values()):
        return None
    of = [_read(k, {n: other[i] for n, other in moved.items()}, start) for i, k in enumerate(base)]
    if any(found is None for found in of):
        return None
    points = [dict(zip(asked.names, values)) for values in itertools.product(VALUES, repeat=len(asked.names))]
    times = [(_predicted_us([found for found in of if found], point, target), point) for point in points]
    ranked = sorted((us, tuple(p.values())) for us, p in times if us is not None)
    for us, values in ranked[:TRIED]:
        point = dict(zip(asked.names, values))
        kernels = pieces(point)
        if kernels and all(has_plan(k, target, asked.options) for k in kernels):
            return point, us
    return None


def _pieces(asked: Asked, config: Mapping[str, int], make: Callable[[Any], Any]) -> Sequence[ir.Kernel] | None:
    """The kernels that run for the derivative with these values."""
    program = asked.program(config)
    return program and [passes.run_pipeline(k, passes.TILE) for k in pieces_of(make(program)).kernels]


def _read(kernel: ir.Kernel, others: Mapping[str, ir.Kernel], start: Mapping[str, int]) -> tuple[Whole, Sides] | None:
    """What a kernel multiplies, and the sides of its tiles."""
    whole = nature.whole_product(kernel)
    if whole is None:
        return None
    sides = guesses.sides_of({n: nature.moved(kernel, other) for n, other in others.items()}, start, kernel)
    return None if sides is None else (whole, sides)


def _predicted_us(found: Sequence[tuple[Whole, Sides]], point: Mapping[str, int], target: Any) -> float | None:
    """Predicted microseconds of all products one after the other; None where one does not take such tiles."""
    total, on = 0.0, warpgroups.gpu(target)
    for whole, sides in found:
        names = [sides.names[place] for place in (ROWS, COLUMNS, TERMS)]
        rows, columns, terms = (point[n] if n else size for n, size in zip(names, whole.tile))
        lines, rest = divmod(terms * whole.product.itemsize, LINE)
        if (rows, columns) not in warpgroups.candidates(whole.product) or rest or lines not in (1, 2):
            return None
        total += warpgroups.predicted_us(whole.product, Form(1, rows, columns), on)
    return total
