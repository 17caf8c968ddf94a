"""Ranges of the integers of a kernel's jaxpr, of a tile those of all its elements: what bounds the rounds of a loop
whose bounds are traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jtile._compat import is_symbolic
from jtile._sizes import bounds_of
from jtile.trace.rules.control import counters
from jtile.transforms.activity import is_literal
from jtile.transforms.evaluate import as_loop

Range = tuple[int, int]  # the smallest and the largest number
INT32_MAX = 2**31 - 1  # programs along an axis, at most


class Ranges:
    """Ranges of the variables of a pruned kernel jaxpr; `of` gives None where nothing is known."""

    def __init__(self, jaxpr: Any, grid: Sequence[int]):
        self.grid = grid
        self.known: dict[Any, Range] = {}
        self._visit(jaxpr)

    def of(self, v: Any) -> Range | None:
        if is_literal(v):
            return (int(v.val), int(v.val)) if np.ndim(v.val) == 0 and np.asarray(v.val).dtype.kind in "iub" else None
        return self.known.get(v)

    def within(self, v: Any) -> Range | None:
        """The range, or that of the dtype: what bounds a number that is read from memory is `jnp.minimum(n, 8)`."""
        dtype = np.dtype(v.aval.dtype)
        found = self.of(v)
        if found is None and dtype.kind in "iu":
            return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        return found

    def rounds(self, eqn: Any) -> int | None:
        """The most rounds that a counted loop can run."""
        loop = as_loop(eqn)
        if loop is None or loop.length is not None:
            return loop and loop.length
        lo, hi = self.of(loop.init[loop.counter]), self.of(loop.limit)
        most = INT32_MAX + 1 if lo is None or hi is None else max(0, -(-(hi[1] - lo[0]) // loop.step))
        return most if most <= INT32_MAX else None  # more than that is the range of a dtype, no bound

    def tested(self, eqn: Any) -> int | None:
        """The most rounds of a `while` that does not count them, where a test of a counter is one of its conditions, as
        in `while (error > eps) & (k < 20)`; None where none is."""
        cond, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        outer = dict(zip(cond.invars, [*eqn.invars[:n_cond], *eqn.invars[n_cond + n_body :]], strict=True))
        steps = {c.place: c.step for c in counters(body, body.invars[n_body:], body.outvars)}
        known = lambda v: self.of(v if is_literal(v) else outer.get(v))
        found = []
        for test in _conditions(cond):
            low, high = test.invars if test.primitive.name in ("lt", "le") else test.invars[::-1]
            place = next((k for k, v in enumerate(cond.invars[n_cond:]) if v is low), None)
            first, limit = known(low), known(high)
            moves = any(high is v and body.outvars[k] is not body.invars[n_body + k]
                        for k, v in enumerate(cond.invars[n_cond:]))  # fmt: skip
            if steps.get(place, 0) > 0 and first is not None and limit is not None and not moves:
                end = limit[1] + (test.primitive.name in ("le", "ge"))
                if _holds(low.aval.dtype, (first[0], end - 1 + steps[place])):  # else the counter may wrap around
                    found.append(max(0, -(-(end - first[0]) // steps[place])))
        return min((n for n in found if n <= INT32_MAX), default=None)

    def _visit(self, jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name in ("scan", "while"):
                self._loop(eqn)
            elif name == "cond":
                for branch in eqn.params["branches"]:
                    self._pass(eqn.invars[1:], branch.jaxpr.invars)
                    self._visit(branch.jaxpr)
            elif name == "jtile_program_id":
                self.known[eqn.outvars[0]] = (0, max(0, self._programs(eqn)[1] - 1))
            elif name == "jtile_num_programs":
                self.known[eqn.outvars[0]] = self._programs(eqn)
            elif name in _RULES:
                known = self.within if name in ("min", "max", "clamp", "and") else self.of
                operands = eqn.invars[name == "select_n" :]  # whichever case it takes
                out = _RULES[name](eqn.params, *[known(v) for v in operands])
                if out is not None and _holds(eqn.outvars[0].aval.dtype, out):
                    self.known[eqn.outvars[0]] = out

    def _programs(self, eqn: Any) -> Range:
        """The number of programs on the axis that an equation names."""
        n = self.grid[eqn.params["axis"]]
        return (0, INT32_MAX) if is_symbolic(n) else (n, n)

    def _pass(self, outer: Sequence[Any], inner: Sequence[Any]) -> None:
        for a, b in zip(outer, inner, strict=True):
            found = self.of(a)
            if found is not None and not is_literal(b):
                self.known[b] = found

    def _loop(self, eqn: Any) -> None:
        loop = as_loop(eqn)
        if loop is None:
            self._visit(eqn.params["cond_jaxpr"].jaxpr)
            self._visit(eqn.params["body_jaxpr"].jaxpr)
            return
        self._pass(loop.consts, loop.body.invars[: len(loop.consts)])
        for before, start, after in zip(loop.carries, loop.init, loop.body.outvars):
            if after is before:
                self._pass([start], [before])
        if loop.counter is not None:
            lo, n = self.of(loop.init[loop.counter]), self.rounds(eqn)
            if lo is not None and n is not None:
                self.known[loop.carries[loop.counter]] = (lo[0], lo[1] + max(0, n - 1) * loop.step)
        self._visit(loop.body)


def _conditions(cond: Any) -> list[Any]:
    """The comparisons of integer scalars all of which a condition takes to be true."""
    made = {v: e for e in cond.eqns for v in e.outvars}
    found, todo = [], list(cond.outvars)
    while todo:
        v = todo.pop()
        eqn = None if is_literal(v) else made.get(v)
        if eqn is None:
            continue
        if eqn.primitive.name in ("and", "convert_element_type"):
            todo += eqn.invars
        elif eqn.primitive.name in ("lt", "le", "gt", "ge") and np.dtype(eqn.invars[0].aval.dtype).kind in "iu":
            found.append(eqn)
    return found


def _holds(dtype: Any, found: Range) -> bool:
    """Whether an integer dtype has all of a range: what wraps around, and what floats round, is not known."""
    kind = np.dtype(dtype).kind
    return kind == "b" or (kind in "iu" and np.iinfo(dtype).min <= found[0] and found[1] <= np.iinfo(dtype).max)


def _hull(values: Sequence[int]) -> Range:
    return min(values), max(values)


_RULES: dict[str, Callable[..., Range | None]] = {}


def _rule(*names: str) -> Callable[[Callable[..., Range | None]], Callable[..., Range | None]]:
    def register(fn: Callable[..., Range | None]) -> Callable[..., Range | None]:
        for name in names:
            _RULES[name] = lambda params, *xs: None if None in xs else fn(params, *xs)
        return fn

    return register


@_rule("dim_as_value")
def _(params):
    least, most = bounds_of(params["dim"])
    return None if most is None else (least, most)


@_rule("add")
def _(_, a, b):
    return a[0] + b[0], a[1] + b[1]


@_rule("sub")
def _(_, a, b):
    return a[0] - b[1], a[1] - b[0]


@_rule("mul")
def _(_, a, b):
    return _hull([x * y for x in a for y in b])


@_rule("neg")
def _(_, a):
    return -a[1], -a[0]


@_rule("sign")
def _(_, a):
    return _hull([(x > 0) - (x < 0) for x in a])


@_rule("max")
def _(_, a, b):
    return max(a[0], b[0]), max(a[1], b[1])


@_rule("min")
def _(_, a, b):
    return min(a[0], b[0]), min(a[1], b[1])


@_rule("clamp")
def _(_, lo, x, hi):
    return min(max(x[0], lo[0]), hi[0]), min(max(x[1], lo[1]), hi[1])


@_rule("div")
def _(_, a, b):
    """The range of a division towards zero, known only for divisors of one sign."""
    if b[0] <= 0 <= b[1]:
        return -max(map(abs, a)), max(map(abs, a))
    cut = lambda x, y: abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    return _hull([cut(x, y) for x in a for y in b] + ([0] if a[0] < 0 < a[1] else []))


@_rule("rem")
def _(_, a, b):
    most = max(map(abs, b)) - 1
    return max(-most, min(a[0], 0)), min(most, max(a[1], 0))


@_rule("abs")
def _(_, a):
    return 0 if a[0] <= 0 <= a[1] else min(map(abs, a)), max(map(abs, a))


@_rule("and")
def _(_, a, b):
    """The range of bits that two integers share: no more than either of them, where one is not negative."""
    least = [x for x in (a, b) if x[0] >= 0]
    return (0, min(x[1] for x in least)) if least else None


@_rule("shift_right_arithmetic", "shift_right_logical")
def _(_, a, b):
    return (a[0] >> min(b[1], 63), a[1] >> b[0]) if a[0] >= 0 and b[0] >= 0 else None


@_rule("select_n", "concatenate")
def _(_, *cases):
    return min(c[0] for c in cases), max(c[1] for c in cases)


@_rule("convert_element_type", "jtile_loop_hint", "stop_gradient", "copy", "squeeze", "reshape", "expand_dims")
@_rule("broadcast_in_dim", "transpose", "slice", "rev", "reduce_max", "reduce_min")
def _(_, a):
    return a


@_rule("iota")
def _(params):
    return 0, max(0, params["shape"][params["dimension"]] - 1)


@_rule("eq", "ne", "lt", "le", "gt", "ge")
def _(*_):
    return 0, 1
