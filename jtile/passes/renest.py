"""Re-nesting: the axes of an accumulator's index become the grid, and the grid axes that it misses become loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jtile.ir import Builder, For, If, Kernel, Load, ProgramId, SizeOf, Value

from .affine import Forms, Site, Var, accumulators, sites
from .fewer_rounds import fewer_rounds
from .fold import number
from .lift import lift
from .nests import Counted, keeps_state, nest, only, size_value, tidy
from .per_row import common_factors
from .rewrite import Rewriter, Rules
from .settle import disjoint
from .turned import turned
from .unscaled import unscaled

MOST = 1 << 24  # rounds of a loop that may become programs


@dataclasses.dataclass(frozen=True)
class _Axis:
    """An axis of the new grid: a grid axis of the old kernel, or loops with one common range of their index."""

    axis: int | None
    loops: tuple[For, ...]
    lo: int
    step: int
    count: Any  # an int, or an Extent
    whole: bool = False  # its loops do every round


def renest(kernel: Kernel, refs: Sequence[Value]) -> Kernel | None:
    """A kernel for some accumulators alone, whose programs do not meet: its grid is what the index of the accumulations
    counts, its loops are the rest. None where the index uses no loop or every grid axis, where memory or a carry ties
    the rounds of such a loop together, where the programs would meet all the same, or where the accumulators' indices
    do not count the same.

    Example: over grid (i, j), loop k, `dA[i, k] += f(i, j, k)` becomes grid (i, k), loop j.
    """
    alone = only(kernel, refs)
    if (
        alone is None
        or keeps_state(alone, refs)
        or any(op.ref in refs for op in alone.body.walk() if isinstance(op, Load))
    ):
        return None
    alone = tidy(alone)
    if not set(refs) <= set(accumulators(alone)):
        return None
    forms = Forms(alone)
    axes = _new_grid(forms, [s for found in sites(alone, lambda r: r in refs).values() for s in found])
    if axes is None:
        return None
    new = lift(tidy(fewer_rounds(tidy(_rebuilt(alone, axes)))), refs)
    new = tidy(common_factors(tidy(turned(unscaled(tidy(new))))))
    forms, where = Forms(new), sites(new, lambda r: r in refs)
    return new if all(disjoint(forms, where[r]) for r in refs) else None


def _new_grid(forms: Forms, where: list[Site]) -> list[_Axis] | None:
    """The axes in the order of the output's dimensions; one for each variable of the index."""
    orders = [_variables(forms, s) for s in where]
    if any(o is None or len(o) != len(orders[0] or ()) for o in orders):
        return None
    out: list[_Axis] = []
    for column in zip(*[o or [] for o in orders], strict=True):
        axis = _axis(forms, list(column), where)
        if axis is None:
            return None
        out.append(axis)
    kept = {a.axis for a in out}
    missing = [g for g, n in enumerate(forms.kernel.grid) if n != 1 and g not in kept]
    loops = {x for a in out for x in a.loops}
    for site, order in zip(where, orders, strict=True):
        # A loop that only another site counts by would have to stay a loop for this one.
        if loops.intersection(site.loops) != {forms.loops[v] for v in order or () if not isinstance(v, int)}:
            return None
    return out if missing and loops else None


def _variables(forms: Forms, site: Site) -> list[Var] | None:
    """The variables of an index, by dimension, large coefficients first; None where it is not affine."""
    out: list[Var] = []
    for d in site.op.index:
        form = forms.start(d)
        if form is None:
            return None
        for v, _ in sorted(form.terms, key=lambda t: -abs(t[1])):
            if v not in out and (isinstance(v, int) or v in forms.loops):
                out.append(v)
    return out


def _axis(forms: Forms, column: list[Var], where: list[Site]) -> _Axis | None:
    first = column[0]
    if isinstance(first, int):
        return _Axis(first, (), 0, 1, forms.kernel.grid[first]) if all(v == first for v in column) else None
    if any(isinstance(v, int) for v in column):
        return None
    loops = tuple(dict.fromkeys(forms.loops[v] for v in column if not isinstance(v, int)))
    if any(loop.inits for loop in loops):
        return None  # a carry ties the rounds of the loop together
    sizes = {loop.hi.op.size if isinstance(loop.hi.op, SizeOf) else None for loop in loops}
    if sizes != {None}:  # known when the kernel runs
        whole = len(sizes) == 1 and all((number(x.lo), number(x.step)) == (0, 1) for x in loops)
        return _Axis(None, loops, 0, 1, sizes.pop(), True) if whole else None
    steps = {forms.steps(loop.body.params[0])[:2] for loop in loops}
    if len(steps) > 1 or any(number(loop.step) is None for loop in loops):
        return None
    lo, step = steps.pop()
    if step != number(loops[0].step):
        return None
    count = max(forms.steps(loop.body.params[0])[2] for loop in loops)
    count = min(count, max(_reach(forms, s, loops, lo, step) for s in where))
    return _Axis(None, loops, lo, step, count) if 0 < count < MOST else None


def _reach(forms: Forms, site: Site, loops: tuple[For, ...], lo: int, step: int) -> int:
    """How many rounds can touch the output at all: an index that leaves it is an error."""
    counts = [MOST]
    for d, n in zip(site.op.index, site.op.ref.shape, strict=True):
        form = forms.start(d)
        if (
            form is None
            or not isinstance(n, int)
            or any(not isinstance(v, int) and v not in forms.loops for v, _ in form.terms)
        ):
            continue
        for v, c in form.terms:
            if not isinstance(v, int) and forms.loops[v] in loops and c > 0:
                least = form.const + c * lo + sum(_least(forms, w, k) for w, k in form.terms if w is not v)
                counts.append(max((n - 1 - least) // (c * step) + 1, 0))
    return min(counts)


def _least(forms: Forms, v: Var, c: int) -> int:
    """The smallest value of a term."""
    first, step, count = forms.steps(v)
    return c * (first if c > 0 else first + step * (count - 1))


def _rebuilt(kernel: Kernel, axes: list[_Axis]) -> Kernel:
    kept = {a.axis: k for k, a in enumerate(axes) if a.axis is not None}
    missing = [g for g in range(len(kernel.grid)) if g not in kept]
    values: dict[int, Value] = {}
    indices: dict[For, tuple[Value, bool]] = {}
    rules = Rules()

    @rules(ProgramId)
    def _(op: ProgramId, rw: Rewriter):
        return values[op.axis]

    @rules(For)
    def _(op: For, rw: Rewriter):
        return _round(op, *indices[op], rw) if op in indices else None

    rw = Rewriter(kernel, rules)
    b = rw.b
    names = {op.axis: op.result.name for op in kernel.body.walk() if isinstance(op, ProgramId)}
    swapped = [loop for a in axes for loop in a.loops]
    stages = max((loop.stages or 0 for loop in swapped), default=0) or None
    with b.region() as body:
        for k, a in enumerate(axes):
            pid = b.value(ProgramId(k), names.get(a.axis, "") if a.axis is not None else a.loops[0].body.params[0].name)
            if a.axis is not None:
                values[a.axis] = pid
            for loop in a.loops:
                indices[loop] = _scaled(b, b.cast(pid, loop.lo.dtype), a), a.whole
        loops = [Counted(b.index(0), size_value(b, kernel.grid[g]), names.get(g, "")) for g in missing]
        if loops:
            loops[-1] = dataclasses.replace(loops[-1], stages=stages)

        def inside(found: list[Value]) -> None:
            values.update(zip(missing, found, strict=True))
            rw.inline(kernel.body)

        nest(b, loops, inside)
    return dataclasses.replace(kernel, grid=tuple(a.count for a in axes), lanes=0, body=body)


def _scaled(b: Builder, pid: Value, a: _Axis) -> Value:
    """Index of a loop from the program id: lo + step * id."""
    dtype = pid.dtype
    v = pid if a.step == 1 else b.map("mul", pid, b.full(a.step, (), dtype))
    return v if a.lo == 0 else b.map("add", v, b.full(a.lo, (), dtype))


def _round(op: For, index: Value, whole: bool, rw: Rewriter) -> tuple[Value, ...]:
    """The one round of a loop that this program does, if the loop does it at all."""
    b = rw.b
    if whole:
        return rw.inline(op.body, (index,))
    lo, hi = rw.look(op.lo), rw.look(op.hi)
    late, early = b.map("ge", index, lo), b.map("lt", index, hi)
    with b.region() as then:
        rw.inline(op.body, (index,))
    with b.region() as orelse:
        pass
    b.add(If(b.map("and", late, early), then, orelse))
    return ()
