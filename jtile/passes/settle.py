"""Plain stores for accumulations that cannot meet: proves from index maps that different programs touch different
elements, and then reads, adds and writes, or where nothing was added before only writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jtile.ir import Atomic, For, Kernel, Load, Map, RefType, Store, Take, Value

from .affine import Forms, Lane, Site, Var
from .rewrite import Rewriter, Rules

NO_COLOURS: Mapping[int, int] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Digit:
    """One variable of an index dimension: its coefficient (without sign) and how many values it takes.

    Attributes:
      var: a grid axis, a loop index, or the lanes.
      falls: whether the coefficient of a grid axis is negative.
    """

    size: int
    count: int
    var: Var | Lane
    falls: bool = False


def digits(forms: Forms, site: Site, dim: int) -> tuple[int, list[Digit]] | None:
    """The smallest element and the digits of one dimension of an index, smaller coefficients first; None where it is
    not affine. Scalars that are the same everywhere have count 0."""
    d = site.op.index[dim]
    form = forms.start(d)
    if form is None:
        return None
    const, out = form.const, []
    for v, c in form.terms:
        if not isinstance(v, int) and v not in forms.loops:
            out.append(Digit(c, 0, v))
            continue
        first, step, count = forms.steps(v)
        const += c * (first if c > 0 else first + step * (count - 1))
        out.append(Digit(abs(c) * step, count, v, c < 0 and isinstance(v, int)))
    out += [Digit(distance, n, lane) for distance, n, lane in forms.lanes(d)]
    return const, sorted(out, key=_size)


def _symbol(digit: Digit) -> bool:
    """Whether the variable of a digit is a scalar that is the same in all programs."""
    return digit.count == 0 and not isinstance(digit.var, Lane)


def decoded(number: Sequence[Digit], gap: int, wanted: type) -> set[Any]:
    """Variables of type `wanted` (grid axes, loop indices, lanes) that the element determines, where elements that
    differ by up to `gap` are not told apart; empty where one of them is not determined.

    An element's number is the sum of its digits, smaller ones first: one is told from the value of the sum where it
    counts in larger steps than all smaller ones reach together, as the tens of a number are told from its ones.
    """
    reach = gap  # how far the sum of the smaller digits reaches
    found: set[Any] = set()
    for digit in number:
        if digit.count == 1 or _symbol(digit):
            continue
        apart = digit.size > reach
        asked = isinstance(digit.var, wanted)
        if (asked and not apart) or (not apart and found):
            return set()
        if asked:
            found.add(digit.var)
        reach += digit.size * max(digit.count - 1, 0)
    return found


def told_apart(forms: Forms, where: Sequence[Site], colours: Mapping[int, int] = NO_COLOURS) -> set[int]:
    """Grid axes along which different programs surely touch different elements, whatever the site.

    `colours`: of these axes only programs are compared whose ids are equal modulo the number given.
    """
    grid = forms.kernel.grid
    found = {a for a, n in colours.items() if isinstance(grid[a], int) and grid[a] <= n}
    while True:  # an axis that one dimension tells is known to the others, which may tell more
        more = set().union(*(_told(forms, where, dim, found, colours) for dim in range(len(where[0].op.index))))
        if more <= found:
            return found
        found |= more


def _told(forms: Forms, where: Sequence[Site], dim: int, known: set[int], colours: Mapping[int, int]) -> set[int]:
    """Grid axes that one dimension of the index tells, where those `known` are equal."""
    numbers = [found for site in where if (found := digits(forms, site, dim)) is not None]  # (smallest element, digits)
    of_programs = [[d for d in number if isinstance(d.var, int)] for _, number in numbers]
    of_one = [[(d.size, d.count) for d in number if not isinstance(d.var, int) and d.count] for _, number in numbers]
    symbols = [{d for d in number if _symbol(d)} for _, number in numbers]
    if (
        len(numbers) < len(where)
        or any(set(one) != set(of_programs[0]) for one in of_programs)
        or any(one != symbols[0] for one in symbols)
    ):
        return set()
    low = min(first for first, _ in numbers)
    if all(one == of_one[0] for one in of_one):
        gap, number = max(first for first, _ in numbers) - low, numbers[0][1]
    else:  # all elements that one program touches count as one window
        reach = [sum(size * (count - 1) for size, count in one) for one in of_one]
        gap = max(first + far for (first, _), far in zip(numbers, reach, strict=True)) - low
        number = of_programs[0]
    left = [
        _coloured(digit, colours.get(digit.var, 1)) if isinstance(digit.var, int) else digit
        for digit in number
        if digit.var not in known
    ]
    return {axis for axis in decoded(sorted(left, key=_size), gap, int) if isinstance(axis, int)}


def _coloured(digit: Digit, colours: int) -> Digit:
    """The digit where only programs are compared whose ids are equal modulo `colours`."""
    return dataclasses.replace(digit, size=digit.size * colours, count=-(-digit.count // colours))


def distinct(forms: Forms, site: Site) -> bool:
    """Whether no two lanes of an access are one element; gathers may name one twice."""
    takes = [d for d in site.op.index if isinstance(d, Take)]
    found: set[Lane] = set()
    for d in takes:
        if forms.start(d) is not None:
            found |= decoded(sorted((Digit(n, count, lane) for n, count, lane in forms.lanes(d)), key=_size), 0, Lane)
    return not takes or {Lane(a) for a, n in enumerate(takes[0].indices.shape) if n > 1} <= found


def _size(d: Digit) -> int:
    return d.size


def disjoint(forms: Forms, where: Sequence[Site]) -> bool:
    """Whether no two programs touch one element, and no site names an element twice."""
    if not all(distinct(forms, s) for s in where):
        return False
    wide = {axis for axis, n in enumerate(forms.kernel.grid) if n != 1}
    return wide <= told_apart(forms, where)


def once(forms: Forms, site: Site) -> bool:
    """Whether a program touches every element at most once at this site."""
    if not site.plain:
        return False
    found: set[Var] = set()
    for dim in range(len(site.op.index)):
        part = digits(forms, site, dim)
        if part is not None:
            found |= decoded([d for d in part[1] if not isinstance(d.var, int)], 0, Value)
    return all(loop.body.params[0] in found for loop in site.loops if forms.steps(loop.body.params[0])[2] > 1)


def covers(forms: Forms, site: Site) -> bool:
    """Whether all programs together surely touch every element at this site."""
    op = site.op
    if 0 in op.ref.shape:
        return True
    if not all(isinstance(n, int) for n in (*op.ref.shape, *forms.kernel.grid)):
        return False
    if op.mask is not None or any(not (isinstance(x, For) and forms.static(x)) for x in site.path):
        return False
    seen: list[Var | Lane] = []
    for dim, length in enumerate(op.ref.shape):
        found = digits(forms, site, dim)
        if found is None or found[0] != 0 or any(map(_symbol, found[1])):
            return False
        reach = 0  # every element up to here is touched by the digits so far
        for digit in found[1]:
            if digit.size > reach + 1 and digit.count > 1:
                return False
            if digit.count == 0:
                return False
            reach += digit.size * (digit.count - 1)
            seen += [digit.var] if digit.var != Lane() else []
        if reach < length - 1:
            return False
    return len(seen) == len(set(seen)) and 0 not in forms.kernel.grid


# -- the rewrite ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settled:
    """A kernel, which of its accumulators are still atomic, and the Refs that stand for them now."""

    kernel: Kernel
    atomic: frozenset[int]


def settle(kernel: Kernel, where: dict[Value, list[Site]], narrow: dict[Value, str], covered: set[Value]) -> Settled:
    """Replaces atomic additions by stores where programs cannot meet.

    Args:
      kernel: the kernel that `where` was found in.
      where: the sites of every accumulator.
      narrow: the dtype an output is rounded to in the end.
      covered: accumulators of which every element is known to be touched.
    Returns:
      The kernel, and the positions of the outputs that stay atomic.
    """
    forms = Forms(kernel)
    plans = {ref: _plan(forms, ref, found, narrow.get(ref), ref in covered) for ref, found in where.items()}
    rules = Rules()

    @rules(Atomic)
    def _(op: Atomic, rw: Rewriter):
        plan = plans.get(op.ref)
        if plan is None or plan.atomic:
            return None
        plan.met += 1
        value = op.value
        if plan.met > plan.plain:
            old = rw.b.value(Load(op.ref, op.index, op.mask, 0.0))
            value = rw.b.value(Map("add", (old, value)))
        value = rw.b.cast(value, plan.ref.dtype)
        rw.b.add(Store(plan.ref, op.index, value, op.mask))
        return op.value

    body = Rewriter(kernel, rules).run().body
    params = tuple(plans[p].ref if p in plans else p for p in kernel.params)
    inits = list(kernel.inits)
    for k, ref in enumerate(kernel.outputs):
        if ref in plans and plans[ref].drops:
            inits[k] = None
    atomic = frozenset(k for k, ref in enumerate(kernel.outputs) if ref in plans and plans[ref].atomic)
    new = dataclasses.replace(kernel, body=body, params=params, inits=tuple(inits))
    return Settled(new, atomic)


@dataclasses.dataclass
class _Plan:
    """What becomes of an output: `plain` of its sites (the first ones) store, the others add to what is there."""

    ref: Value
    atomic: bool
    plain: int = 0
    drops: bool = False
    met: int = 0


def _plan(forms: Forms, ref: Value, found: list[Site], narrow: str | None, covered: bool) -> _Plan:
    if not disjoint(forms, found):
        return _Plan(ref, True)
    first = found[0]
    covered = covered or covers(forms, first)
    if len(found) == 1:
        plain = once(forms, first)
        if plain and narrow is not None and narrow != ref.dtype:
            ref = Value(RefType(ref.shape, narrow, "out"), ref.name)
        return _Plan(ref, False, int(plain), covered and plain)
    # A site in a loop may come after another one of the round before.
    plain = not first.path
    return _Plan(ref, False, int(plain), plain and covers(forms, first))
