"""Loops whose rounds do nothing at their beginning or end: a condition that holds from some round on, or up to one, is
a bound of the loop, as far as it is a comparison with a floor of multiples of the index.

Example: `for i in 0..32 { if j < (i * 128 + 255) div 128 { f(i) } }` starts at the first `i` for which that holds.
"""

from __future__ import annotations

import dataclasses

from jtile.ir import Block, For, If, Kernel, Map, Op, Value

from .affine import ranges
from .fold import number
from .intervals import Interval, Intervals
from .rewrite import Rewriter, Rules, reads_only


def fewer_rounds(kernel: Kernel) -> Kernel:
    """The kernel, whose loops without carries start and end where a condition around all that they do holds first and
    last."""
    known = ranges(kernel)
    rules = Rules()
    rules(For)(lambda op, rw: _bounded(op, known, rw))
    return Rewriter(kernel, rules).run()


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A condition `i >= ceil((times * (x + plus) + add) / by)`, or with `last` `i < floor(...)`, of a loop index i."""

    x: Value
    plus: int
    times: int
    add: int
    by: int
    last: bool


def _bounded(op: For, known: Intervals, rw: Rewriter) -> tuple[Value, ...] | None:
    doing = [x for x in op.body.ops if not reads_only(x)]
    if op.inits or number(op.step) != 1 or len(doing) != 1 or not isinstance(doing[0], If):
        return None
    branch = doing[0]
    if branch.orelse.ops or branch.results:
        return None
    index = op.body.params[0]
    inside = {index} | {r for x in op.body.walk() for r in x.results}
    bounds, left = [], []
    for cond in _conditions(branch.cond):
        found = _bound(cond, index, inside, known)
        if found is None:
            left.append(cond)
        else:
            bounds.append(found)
    if not bounds:
        return None
    lo, hi = rw.look(op.lo), rw.look(op.hi)
    for b in bounds:
        edge = _edge(b, known, rw)
        if b.last:
            hi = rw.b.map("min", hi, edge)
        else:
            lo = edge if number(lo) == 0 else rw.b.map("max", lo, edge)
    return _loop(op, branch, lo, hi, left, rw)


def _loop(op: For, branch: If, lo: Value, hi: Value, left: list[Value], rw: Rewriter) -> tuple[Value, ...]:
    b = rw.b
    with b.region([lo.type], (op.body.params[0].name,)) as body:
        rw.replace(op.body.params, body.params)
        for x in op.body.ops:
            if x is not branch:
                rw.op(x)
            elif left:
                cond = rw.look(left[0])
                for other in left[1:]:
                    cond = b.map("and", cond, rw.look(other))
                then = rw.block(branch.then)
                rw.b.add(If(cond, then, Block()))
            else:
                rw.inline(branch.then)
    return rw.region_op(For(lo, hi, rw.look(op.step), (), body, op.stages, op.unroll), op, ())


def _conditions(cond: Value) -> list[Value]:
    if isinstance(cond.op, Map) and cond.op.fn == "and":
        return [x for arg in cond.op.args for x in _conditions(arg)]
    return [cond]


def _bound(cond: Value, index: Value, inside: set[Value], known: Intervals) -> _Bound | None:
    op = cond.op
    if not isinstance(op, Map) or op.fn not in ("lt", "ge", "gt", "le") or op.args[0].shape:
        return None
    x, y = op.args
    fn = op.fn
    if x in inside and y not in inside:  # the index stands on the right
        x, y, fn = y, x, {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}[fn]
    if x in inside:
        return None
    floor = _floor(y, known(x), index, known, equal=fn in ("le", "gt"))
    if floor is None:
        return None
    a, b, c = floor  # y = (a * index + b) div c
    # x < y: c (x + 1) <= a i + b; x <= y: c x <= a i + b; and the opposite of both, up to which rounds go
    return _Bound(x, int(fn in ("lt", "ge")), c, -b, a, last=fn in ("ge", "gt"))


def _floor(
    v: Value, compared: Interval | None, index: Value, known: Intervals, *, equal: bool
) -> tuple[int, int, int] | None:
    """v = (a * index + b) div c, with a > 0 and no negative dividend, where limits of v decide nothing about whether
    what it is compared with is below (`equal`: or is v)."""
    op = v.op
    if isinstance(op, Map) and op.fn in ("min", "max"):
        x, limit = op.args[0], number(op.args[1])
        if limit is None or compared is None:
            return None
        # y < max(x, n) is y < x where y >= n, y <= max(x, n) is y <= x where y > n; and so with min, >= and >
        if op.fn == "max":
            beside = compared.lo > limit if equal else compared.lo >= limit
        else:
            beside = compared.hi <= limit if equal else compared.hi < limit
        return _floor(x, compared, index, known, equal=equal) if beside else None
    c = 1
    if isinstance(op, Map) and op.fn == "div":
        by = number(op.args[1])
        low = known(op.args[0])
        if by is None or by <= 0 or low is None or low.lo < 0:
            return None
        c, v = int(by), op.args[0]
    line = _line(v, index)
    return None if line is None or line[0] <= 0 else (*line, c)


def _line(v: Value, index: Value) -> tuple[int, int] | None:
    """The numbers (a, b) of v = a * index + b; None if v has not this form."""
    if v is index:
        return 1, 0
    if (n := number(v)) is not None:
        return 0, int(n)
    op: Op | None = v.op
    if not isinstance(op, Map) or len(op.args) != 2 or op.fn not in ("add", "sub", "mul"):
        return None
    x, y = (_line(arg, index) for arg in op.args)
    if x is None or y is None:
        return None
    if op.fn == "mul":
        x, y = (y, x) if x[0] == 0 else (x, y)
        return (x[0] * y[1], x[1] * y[1]) if y[0] == 0 else None
    sign = 1 if op.fn == "add" else -1
    return x[0] + sign * y[0], x[1] + sign * y[1]


def _edge(b: _Bound, known: Intervals, rw: Rewriter) -> Value:
    """Compute the bound ceil((times * (x + plus) + add) / by), at least 0."""
    new, x, interval = rw.b, rw.look(b.x), known(b.x)
    number_of = lambda n: new.full(n, (), x.dtype)
    rest = b.times * b.plus + b.add
    whole = b.times % b.by == 0
    times, rest = (b.times // b.by, -(-rest // b.by)) if whole else (b.times, rest + b.by - 1)
    v = x if times == 1 else new.map("mul", x, number_of(times))
    v = v if rest == 0 else new.map("add", v, number_of(rest))
    if interval is None or interval.lo * times + rest < 0:
        v = new.map("max", v, number_of(0))
    return v if whole else new.map("div", v, number_of(b.by))
