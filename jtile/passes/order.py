"""In which order the blocks of a GPU take the programs of a grid. The language leaves it open; caches do not."""

from __future__ import annotations

from jtile import ir

GROUP = 8  # rows of tiles that are worked on together: their operands stay in the second-level cache


def grouped_axes(kernel: ir.Kernel) -> tuple[int, int] | None:
    """The two last axes of a grid whose programs are best taken in bands: a matrix product, where some operands move
    with the one axis only and some with the other only. None: as they come."""
    if not all(isinstance(n, int) for n in kernel.grid):
        return None
    axes = [k for k, n in enumerate(kernel.grid) if n > 1]
    ops = list(kernel.body.walk())
    if len(axes) < 2 or not any(isinstance(op, ir.Dot | ir.DotScaled) for op in ops):
        return None
    i, j = axes[-2:]
    if j != len(kernel.grid) - 1 and any(n != 1 for n in kernel.grid[j + 1 :]):
        return None
    moves = [axes_of(op) & {i, j} for op in ops if isinstance(op, ir.Load)]
    return (i, j) if {i} in moves and {j} in moves else None


def axes_of(load: ir.Load) -> set[int]:
    """The grid axes that the place of a load moves with: not those that a search goes by (which group a row is of),
    whose result is the same for many programs."""
    found: set[int] = set()
    seen: set[ir.Value] = set()
    todo = [ir.dim_value(d) for d in load.index]
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        if isinstance(v.op, ir.ProgramId):
            found.add(v.op.axis)
        elif v.op is not None and not isinstance(v.op, ir.Load | ir.Reduce):
            todo += [a for a in v.op.operands() if isinstance(a.type, ir.TileType)]
    return found
