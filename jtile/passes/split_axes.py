"""Splits grid axes and loops that a kernel takes apart itself by division: `(i div c, i rem c)` are two axes then."""

from __future__ import annotations

import dataclasses

from jtile.ir import For, Kernel, Map, Op, ProgramId, Select, Value
from jtile.ir.builder import build

from .affine import ranges
from .fold import number
from .nests import tidy
from .rewrite import Copier, Rewriter, Rules

ROUNDS = 16  # variables that are taken apart, at most, one in each round


def split_axes(kernel: Kernel) -> Kernel:
    """The kernel without `div` and `rem` of program ids and of loop indices by constants that divide their range; the
    same object where there are none."""
    whole = _whole_division(kernel)
    kernel = kernel if whole is kernel else tidy(whole)
    for _ in range(ROUNDS):
        found = _divided(kernel)
        if found is None:
            break
        variable, by = found
        split = _split_axis(kernel, variable, by) if isinstance(variable, int) else _split_loop(kernel, variable, by)
        kernel = tidy(split)
    return kernel


def _divided(kernel: Kernel) -> tuple[int | For, int] | None:
    """A grid axis or a loop from 0 in steps of 1 that some op divides, and by what."""
    loops = {op.body.params[0]: op for op in kernel.body.walk() if isinstance(op, For)}
    for op in kernel.body.walk():
        if not isinstance(op, Map) or op.fn not in ("div", "rem") or op.args[0].shape:
            continue
        x, by = op.args[0], number(op.args[1])
        size = 0
        if isinstance(x.op, ProgramId):
            variable: int | For = x.op.axis
            size = kernel.grid[variable]
        elif x in loops:
            variable = loops[x]
            bounds = [number(v) for v in (variable.lo, variable.hi, variable.step)]
            size = bounds[1] if bounds[0] == 0 and bounds[2] == 1 and bounds[1] else 0
        else:
            continue
        if by is not None and isinstance(size, int) and 1 < by < size and size % by == 0:
            return variable, by
    return None


class _Halves:
    """A variable `x = high * by + low`, and the rule for its division."""

    def __init__(self, by: int):
        self.by = by
        self.rules = Rules()
        self.high: Value | None = None
        self.low: Value | None = None
        self.whole: Value | None = None
        self.rules(Map)(self._division)

    def set(self, rw: Rewriter, high: Value, low: Value) -> Value:
        b = rw.b
        by = b.full(self.by, (), high.dtype)
        self.high, self.low = high, low
        self.whole = b.map("add", b.map("mul", high, by), low)
        return self.whole

    def _division(self, op: Map, rw: Rewriter):
        if op.fn not in ("div", "rem") or op.args[0] is not self.whole or number(op.args[1]) != self.by:
            return None
        return self.high if op.fn == "div" else self.low


def _split_axis(kernel: Kernel, axis: int, by: int) -> Kernel:
    halves = _Halves(by)

    @halves.rules(ProgramId)
    def _(op: ProgramId, rw: Rewriter):
        return halves.whole if op.axis == axis else rw.b.value(ProgramId(op.axis + (op.axis > axis)))

    rw = Rewriter(kernel, halves.rules)
    with rw.b.region() as body:
        halves.set(rw, rw.b.value(ProgramId(axis)), rw.b.value(ProgramId(axis + 1)))
        rw.inline(kernel.body)
    grid = (*kernel.grid[:axis], kernel.grid[axis] // by, by, *kernel.grid[axis + 1 :])
    return dataclasses.replace(kernel, grid=grid, lanes=0, body=body)


def _split_loop(kernel: Kernel, loop: For, by: int) -> Kernel:
    halves = _Halves(by)

    @halves.rules(For)
    def _(op: For, rw: Rewriter):
        return _two_loops(op, halves, rw) if op is loop else None

    return Rewriter(kernel, halves.rules).run()


def _two_loops(op: For, halves: _Halves, rw: Rewriter) -> tuple[Value, ...]:
    b, by, size = rw.b, halves.by, number(op.hi)
    types = [p.type for p in op.body.params]
    names = tuple(p.name for p in op.body.params)
    k = op.lo.dtype
    zero, one = b.full(0, (), k), b.full(1, (), k)
    with b.region(types, names) as outer:
        with b.region(types, names) as inner:
            index = halves.set(rw, outer.params[0], inner.params[0])
            inner.yields = rw.inline(op.body, (index, *inner.params[1:]))
        low = For(zero, b.full(by, (), k), one, outer.params[1:], inner, op.stages, op.unroll)
        b.block.ops.append(build(low, op.loc))
        outer.yields = low.results
    high = For(zero, b.full(size // by, (), k), one, tuple(map(rw.look, op.inits)), outer)
    b.block.ops.append(build(high, op.loc, tuple(r.name for r in op.results)))
    return high.results


# -- floor division of numbers that are not negative ------------------------------------------------------------------


def _whole_division(kernel: Kernel) -> Kernel:
    """`x // c` of numbers that are not negative is a division, without the correction for negative ones."""
    known = ranges(kernel)

    def plain(op: Op) -> bool:
        if not isinstance(op, Select) or not isinstance(op.b.op, Map) or op.b.op.fn != "div" or op.b.shape:
            return False
        x, c = op.b.op.args
        i, by = known(x), number(c)
        return i is not None and i.lo >= 0 and by is not None and by > 0 and _correction(op.cond, x, c)

    found = [op for op in kernel.body.walk() if plain(op)]
    return Copier({op: lambda copier, op=op: (copier.look(op.b),) for op in found}).whole(kernel) if found else kernel


def _correction(cond: Value, x: Value, c: Value) -> bool:
    """Whether `cond` says: x has another sign than the positive number c, and c does not divide x."""
    if not isinstance(cond.op, Map) or cond.op.fn != "and":
        return False
    sign = rest = False
    for part in cond.op.args:
        if not isinstance(part.op, Map) or part.op.fn != "ne" or not isinstance(part.op.args[0].op, Map):
            continue
        inner, to = part.op.args[0].op, number(part.op.args[1])
        sign |= inner.fn == "sign" and inner.args[0] is x and to == 1
        rest |= inner.fn == "rem" and inner.args[0] is x and inner.args[1] is c and to == 0
    return sign and rest
