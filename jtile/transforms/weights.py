"""How values of a kernel's jaxpr change when a number is added to others: by a factor, by a sum, or not at all.

A *symbol* stands for such numbers, one for each element of the value that it belongs to. A value that is multiplied by
`exp(w t)` where the symbol is `t` has the weight `w` and the kind `times`, one to which `w t` is added the kind `plus`.
So with `m` of weight 1 (plus), `exp(s - m)` has the weight -1 (times), and `log` of its sum the weight -1 (plus), which
is none any more when `m` is added. `rescaling` proves by it that running maxima have no effect on results.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import dtypes

from jtile.passes.axes import regroup
from jtile.transforms.activity import is_literal, is_ref
from jtile.transforms.evaluate import as_loop

Symbol = int
CLOSE = 1e-6  # how far apart equal weights may be: those of base 2 are rounded


@dataclasses.dataclass(frozen=True)
class Weight:
    """How one value changes.

    Attributes:
      of: symbol -> its weight, none 0; empty: the value does not change.
      kind: "times" or "plus".
      axes: the axes of the value along which the elements of the symbols lie.
      constant: the number that all elements are, where that is 0 or -inf.
    """

    of: tuple[tuple[Symbol, float], ...] = ()
    kind: str = "times"
    axes: tuple[int, ...] = ()
    constant: float | None = None

    def at(self, axes: Sequence[int | None]) -> Weight | None:
        """The weight where axis k lies at `axes[k]`; None where an axis of the symbols is gone."""
        new = [axes[a] for a in self.axes]
        return None if None in new else dataclasses.replace(self, axes=tuple(a for a in new if a is not None))


FIXED, ZERO, LOW = Weight(), Weight(constant=0.0), Weight(kind="plus", constant=-math.inf)


def made(kind: str, of: Mapping[Symbol, float], axes: Sequence[int]) -> Weight:
    kept = tuple(sorted((s, w) for s, w in of.items() if abs(w) > CLOSE))
    return Weight(kept, kind, tuple(axes)) if kept else FIXED


def same(a: Weight, b: Weight) -> bool:
    if not a.of or not b.of:
        return not a.of and not b.of
    close = [s for s, _ in a.of] == [s for s, _ in b.of] and all(
        abs(x - y) <= CLOSE * max(1.0, abs(x)) for (_, x), (_, y) in zip(a.of, b.of)
    )
    return close and a.kind == b.kind and a.axes == b.axes


class UnknownError(Exception):
    """An op that does more with a changing value than weights can say."""


def either(values: Sequence[Weight]) -> Weight:
    """The weight of a value that is one of several."""
    left = [v for v in values if v.of or v.constant is None]
    if not left:
        return values[0] if all(v == values[0] for v in values) else FIXED
    first = next((v for v in left if v.of), left[0])
    if not all(same(v, first) for v in left):
        raise UnknownError
    odd = 0.0 if first.kind == "plus" else -math.inf  # zeros scale, and -inf stays when numbers are added
    if first.of and any(v.constant == odd for v in values):
        raise UnknownError
    return first


def _sum(a: Weight, b: Weight, sign: float) -> Weight:
    """The weight of a + sign * b."""
    if a.constant == b.constant == 0:
        return ZERO
    if LOW in (a, b):
        return LOW if b != LOW or sign > 0 else FIXED
    for x, y in ((a, b), (b, a)):
        if x.constant == 0:
            return y if y is a or sign > 0 or y.kind == "times" or not y.of else _scaled(y, -1.0)
    if "times" in [x.kind for x in (a, b) if x.of]:
        return either((a, b))
    return _plus("plus", a, b, sign)


def _plus(kind: str, a: Weight, b: Weight, sign: float) -> Weight:
    """The sum of two weights of one kind."""
    if any(x.of and x.kind != kind for x in (a, b)):
        raise UnknownError
    if a.of and b.of and a.axes != b.axes:
        raise UnknownError
    out = dict(a.of)
    for s, w in b.of:
        out[s] = out.get(s, 0.0) + sign * w
    return made(kind, out, a.axes if a.of else b.axes)


def _scaled(a: Weight, by: float, kind: str | None = None) -> Weight:
    return made(kind or a.kind, {s: w * by for s, w in a.of}, a.axes)


def _product(eqn: Any, a: Weight, b: Weight) -> Weight:
    if ZERO in (a, b):
        return ZERO
    sign = 1.0 if eqn.primitive.name == "mul" else -1.0
    for x, v, y in ((a, eqn.invars[1], b), (b, eqn.invars[0], a)):
        if x.of and x.kind == "plus" and not y.of and is_literal(v) and (x is a or sign > 0):
            return _scaled(x, float(v.val) ** sign)
    return _plus("times", a, b, sign)


def _function(kind: str, to: str, by: float) -> Callable[[Any, Weight], Weight]:
    """A function of one value of `kind`, whose result is of the kind `to` with `by` times the weight."""

    def rule(eqn: Any, a: Weight) -> Weight:
        if a.of and a.kind != kind:
            raise UnknownError
        if a == LOW and eqn.primitive.name in ("exp", "exp2"):
            return ZERO
        return _scaled(a, by, to) if a.of else FIXED

    return rule


def _kept(eqn: Any, a: Weight) -> Weight:
    if a.of and not dtypes.issubdtype(eqn.outvars[0].aval.dtype, np.inexact):
        raise UnknownError
    return a


def _compared(eqn: Any, a: Weight, b: Weight) -> Weight:
    """Comparisons of what changes alike, with 0 of what is scaled, and with -inf of what is added to."""
    either((a, b))
    return FIXED


def _broadcast(eqn: Any, a: Weight, *_: Weight) -> Weight:
    return a.at(eqn.params["broadcast_dimensions"]) or FIXED if a.of else a


def _transposed(eqn: Any, a: Weight) -> Weight:
    perm = list(eqn.params["permutation"])
    return _at(a, [perm.index(k) for k in range(len(perm))])


def _reshaped(eqn: Any, a: Weight, *_: Weight) -> Weight:
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes: list[int | None] = [None] * len(old)
    for x, y in regroup(old, new):
        if len(x) == len(y) == 1:
            axes[x[0]] = y[0]
    return _at(a, axes)


def _squeezed(eqn: Any, a: Weight) -> Weight:
    gone = [d % len(eqn.invars[0].aval.shape) for d in eqn.params["dimensions"]]
    return _at(a, _without(len(eqn.invars[0].aval.shape), gone))


def _without(rank: int, gone: Sequence[int]) -> list[int | None]:
    left = [k for k in range(rank) if k not in gone]
    return [left.index(k) if k in left else None for k in range(rank)]


def _at(a: Weight, axes: Sequence[int | None]) -> Weight:
    found = a.at(axes)
    if found is None:
        raise UnknownError
    return found


def _summed(eqn: Any, a: Weight) -> Weight:
    if a.of and a.kind == "plus":
        raise UnknownError
    return _reduced(eqn, a)


def _reduced(eqn: Any, a: Weight) -> Weight:
    return _at(a, _without(len(eqn.invars[0].aval.shape), eqn.params["axes"]))


def _dot(eqn: Any, a: Weight, b: Weight, acc: Weight = ZERO) -> Weight:
    if ZERO in (a, b):
        return acc
    if any(x.of and x.kind == "plus" for x in (a, b)):
        raise UnknownError
    rank = len(eqn.invars[0].aval.shape)
    if rank - 1 in a.axes or rank - 2 in b.axes:  # along the terms: each is scaled by its own factor, or not at all
        turned = [*range(rank - 2), rank - 1, rank - 2]
        if _plus("times", a, _at(b, turned), 1.0).of:
            raise UnknownError
        return _sum(FIXED, acc, 1.0)
    return _sum(_plus("times", a, b, 1.0), acc, 1.0)


def _power(eqn: Any, a: Weight) -> Weight:
    if a.of and a.kind == "plus":
        raise UnknownError
    return _scaled(a, float(eqn.params["y"]))


LN2 = math.log(2.0)
RULES: dict[str, Callable[..., Weight]] = {
    "exp": _function("plus", "times", 1.0), "exp2": _function("plus", "times", LN2),
    "log": _function("times", "plus", 1.0), "log2": _function("times", "plus", 1 / LN2),
    "square": _function("times", "times", 2.0), "sqrt": _function("times", "times", 0.5),
    "rsqrt": _function("times", "times", -0.5), "abs": _function("times", "times", 1.0), "integer_pow": _power,
    "neg": lambda eqn, a: _scaled(a, -1.0) if a.kind == "plus" and a.of else (a if a == ZERO else _scaled(a, 1.0)),
    "mul": _product, "div": _product, "convert_element_type": _kept, "copy": _kept,
    "add": lambda eqn, a, b: _sum(a, b, 1.0), "add_any": lambda eqn, a, b: _sum(a, b, 1.0),
    "sub": lambda eqn, a, b: _sum(a, b, -1.0),
    "max": lambda eqn, a, b: either((a, b)), "min": lambda eqn, a, b: either((a, b)),
    "broadcast_in_dim": _broadcast, "reshape": _reshaped, "squeeze": _squeezed, "transpose": _transposed,
    "reduce_sum": _summed, "reduce_max": _reduced, "reduce_min": _reduced, "jtile_dot": _dot,
    "is_finite": lambda eqn, a: FIXED,
}  # fmt: skip
RULES |= dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _compared)


class Weights:
    """The weights of the values of a jaxpr.

    Args:
      symbols: gives the weights of the results of a loop that are symbols of their own, or None for any other.
    Attributes:
      bad: symbols of which an effect remains where weights cannot say which.
    """

    def __init__(self, symbols: Callable[[Any, Sequence[Weight]], Sequence[Weight] | None] = lambda *_: None):
        self.symbols = symbols
        self.bad: set[Symbol] = set()

    def run(self, jaxpr: Any, args: Sequence[Weight], given: Mapping[Any, Weight] | None = None) -> list[Weight]:
        """The weights of a jaxpr's results; `given`: variables of known weights, whatever they are computed from."""
        env: dict[Any, Weight] = dict.fromkeys(jaxpr.constvars, FIXED)
        env.update(zip(jaxpr.invars, args, strict=True))
        by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        for eqn in jaxpr.eqns:
            if given and eqn.outvars and all(v in given for v in eqn.outvars):
                env.update((v, given[v]) for v in eqn.outvars)
                continue
            ins = [literal(v) if is_literal(v) else env[v] for v in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, ins, by), strict=True))
        return [literal(v) if is_literal(v) else env[v] for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: Sequence[Weight], by: Mapping[Any, Any]) -> Sequence[Weight]:
        name = eqn.primitive.name
        try:
            if name in ("scan", "while"):
                return self._loop(eqn, ins)
            if name == "cond":
                return self._cond(eqn, ins)
            if name == "select_n":
                return [self._select(ins, guarded(eqn, by))]
            if name in RULES:
                return [RULES[name](eqn, *ins)]
        except UnknownError:
            pass
        else:
            if not any(x.of for x in ins):
                return [FIXED] * len(eqn.outvars)
        self.drop(ins)
        return [FIXED] * len(eqn.outvars)

    def drop(self, values: Sequence[Weight]) -> None:
        """Note that the symbols of these values have an effect."""
        self.bad |= {s for v in values for s, _ in v.of}

    def _select(self, ins: Sequence[Weight], guarded: int | None) -> Weight:
        which, *cases = ins
        if which.of:
            raise UnknownError
        return either(cases) if guarded is None or cases[1 - guarded].of else cases[guarded]

    def _cond(self, eqn: Any, ins: Sequence[Weight]) -> Sequence[Weight]:
        outs = [self.run(b.jaxpr, ins[1:]) for b in eqn.params["branches"]]
        return [either(column) for column in zip(*outs, strict=True)]

    def _loop(self, eqn: Any, ins: Sequence[Weight]) -> Sequence[Weight]:
        own = self.symbols(eqn, ins)
        if own is not None:
            return own
        loop = as_loop(eqn)
        if loop is None:
            raise UnknownError
        at = dict(zip((id(v) for v in eqn.invars), ins, strict=True))
        of = lambda variables: [literal(v) if is_literal(v) else at[id(v)] for v in variables]
        consts, start, xs = of(loop.consts), of(loop.init), of(loop.xs)
        if any(x.of for x in xs):
            raise UnknownError
        carry = start
        for _ in range(3):
            outs = self.run(loop.body, [*consts, *carry, *xs])
            after = [either(pair) for pair in zip(carry, outs[: len(carry)], strict=True)]
            if all(same(a, b) and a.constant == b.constant for a, b in zip(carry, after, strict=True)):
                break
            carry = after
        else:
            raise UnknownError
        if any(y.of for y in outs[len(carry) :]):
            raise UnknownError
        return [*carry, *outs[len(carry) :]]  # the carry also counts as it was, since there may be no round at all


def guarded(eqn: Any, by: Mapping[Any, Any]) -> int | None:
    """Which case of a `select_n` is a value that the other stands for where it is 0 or -inf, as people write in front
    of a division or a difference; None where that is not what it says. What is 0 stays so when it is scaled, and -inf
    when something is added: rows of which a mask leaves nothing, whose sums are all 0."""
    which, *cases = eqn.invars
    test = by.get(which) if not is_literal(which) else None
    if len(cases) != 2 or test is None or test.primitive.name not in ("eq", "ne"):
        return None
    value, limit = test.invars
    case = 0 if test.primitive.name == "eq" else 1  # the first is taken where the comparison fails
    same_value = value is cases[case] and not is_literal(value)
    return case if same_value and _number(limit, by) in (0.0, -math.inf) else None


def _number(v: Any, by: Mapping[Any, Any]) -> float | None:
    """The number that all elements of a variable are; None if it is not known, or if they differ."""
    while not is_literal(v) and v in by and by[v].primitive.name in ("broadcast_in_dim", "convert_element_type"):
        v = by[v].invars[0]
    return float(v.val) if is_literal(v) and not np.ndim(v.val) else None


def literal(v: Any) -> Weight:
    """The weight of a literal of a jaxpr."""
    if is_ref(v) or np.ndim(v.val) or not dtypes.issubdtype(v.aval.dtype, np.inexact):
        return FIXED
    return {0.0: ZERO, -math.inf: LOW}.get(float(v.val), FIXED)
