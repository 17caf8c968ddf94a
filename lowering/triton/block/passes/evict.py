"""What the second-level cache should keep of the operands of a matrix product."""

from __future__ import annotations

import math

from jtile.ir import Dot, Kernel, Load, Value
from jtile.passes.order import axes_of

from .persist import bands
from .plan import Machine
from .uneven import array_bytes, uneven

KEPT = 0.55  # the largest share of what the cache has for operands that rows of a band take; more was not measured


def copy_hints(kernel: Kernel, blocks: int, machine: Machine) -> dict[int, str]:
    """Position of a parameter of a tile-level product -> "last" or "first": how soon the second-level cache should
    forget what `blocks` blocks, which take several tiles each, read of it. Empty where that is left to the cache.

    All waves of blocks of a band of tiles read the same rows of the left operand, and each of them columns of its own
    of the right ones. Where the rows of a band are half of what the cache has for operands, or not much more, they stay
    if the columns, which nobody reads again before the next band, go first. Operands that fit as a whole stay by
    themselves.
    That gains where several products have one left operand, a gated layer (docs/notes/tiles.md); single ones lose or
    gain as little as runs differ, and those with scales of blocks lose.
    """
    plain = blocks < math.prod(kernel.grid) and not uneven(kernel, machine.cache)
    order = bands(kernel, blocks) if plain else None
    dots = [op for op in kernel.body.walk() if isinstance(op, Dot)]
    if order is None or kernel.grid[order.i] <= order.rows or len({op.a for op in dots}) == len(dots):
        return {}
    moves: dict[Value, set[int]] = {}
    for op in kernel.body.walk():
        if isinstance(op, Load):
            moves.setdefault(op.ref, set()).update(axes_of(op) & {order.i, order.j})
    rows = [r for r, axes in moves.items() if axes == {order.i}]
    columns = [r for r, axes in moves.items() if axes == {order.j}]
    lanes = math.prod(kernel.grid[: order.i])  # products, one after the other
    band = sum(map(array_bytes, rows)) * order.rows // kernel.grid[order.i] // lanes
    whole = sum(map(array_bytes, rows + columns)) // lanes
    if band > KEPT * machine.cache or whole <= machine.cache:
        return {}
    position = {r: k for k, r in enumerate(kernel.params)}
    hints = dict.fromkeys(rows, "last") | dict.fromkeys(columns, "first")
    return {position[r]: hint for r, hint in hints.items() if r in position}
