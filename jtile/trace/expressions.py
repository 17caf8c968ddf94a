"""The functions that rewritten expressions call: `a and b`, `a < b < c`, `max(a, b)`, the patterns of `match`.

Over Python values they do what Python does.
"""

from __future__ import annotations

import builtins
import collections.abc
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile._errors import KernelTypeError
from jtile.language.control import scalar_condition
from jtile.trace.carries import Place, choose, error_at, is_traced

_EXPRESSION = ("the value of this expression",)


def if_expression(test: Any, then: Callable[[], Any], other: Callable[[], Any], place: Place) -> Any:
    """The value of `then if test else other`."""
    if not is_traced(test):
        return then() if test else other()
    pred = scalar_condition(test, place[:2], "if")
    (out,) = choose(pred, lambda: [then()], lambda: [other()], _EXPRESSION, place)
    return out


def truth(test: Any, place: Place) -> Any:
    """The condition of an `if` as a bool."""
    return scalar_condition(test, place[:2], "if") if is_traced(test) else bool(test)


# -- logic ----------------------------------------------------------------------------------------------------------


def and_(first: Any, rest: Callable[[], Any], place: Place) -> Any:
    """The value of `first and rest`; the logical one of bools if either is traced."""
    return _logic(first, rest, False, place) if is_traced(first) else first and rest()


def or_(first: Any, rest: Callable[[], Any], place: Place) -> Any:
    """The value of `first or rest`; the logical one of bools if either is traced."""
    return _logic(first, rest, True, place) if is_traced(first) else first or rest()


def not_(x: Any, place: Place) -> Any:
    """The value of `not x`."""
    return lax.bitwise_not(scalar_condition(x, place[:2], "not")) if is_traced(x) else not x


def _logic(first: Any, rest: Callable[[], Any], decides: bool, place: Place) -> Any:
    """`and`, which a first False decides, or `or`, which a first True decides. What is right of it is under a branch if
    it touches memory: `k < n and x[k] > 0` loads nothing out of bounds."""
    word = f"{'or' if decides else 'and'!r} (for tiles write & or |)"
    as_bool = lambda v: scalar_condition(jnp.asarray(v), place[:2], word)
    if not jnp.ndim(first) and _touches_memory(rest):
        run, skip = lambda: [as_bool(rest())], lambda: [jnp.asarray(decides)]
        (out,) = choose(as_bool(first), *((skip, run) if decides else (run, skip)), _EXPRESSION, place)
        return out
    a, b = map(as_bool, (first, rest()))
    return (lax.bitwise_or if decides else lax.bitwise_and)(a, b)


def _touches_memory(fn: Callable[[], Any]) -> bool:
    """Whether evaluating this loads, stores or prints."""

    def run():
        fn()
        return ()

    return bool(jax.make_jaxpr(run)().jaxpr.effects)


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Is": operator.is_,
    "IsNot": operator.is_not,
    "In": lambda a, b: a in b,
    "NotIn": lambda a, b: a not in b,
}


def compare(first: Any, rest: Sequence[tuple[str, Callable[[], Any]]], place: Place) -> Any:
    """`first < a <= b`: each operand is evaluated once, and none behind a Python comparison that is false. Comparisons
    of tiles chain lane by lane."""
    (name, operand), *others = rest
    right = operand()
    out = _COMPARE[name](first, right)
    if not others:
        return out
    later = lambda: compare(right, others, place)
    if not is_traced(out):
        return out and later()
    if not jnp.ndim(out) and _touches_memory(later):
        return and_(out, later, place)
    after = later()
    if jnp.ndim(out) or jnp.ndim(after):
        return jnp.logical_and(out, after)
    return and_(out, lambda: after, place)


# -- builtin functions ----------------------------------------------------------------------------------------------


def builtin(fn: Any, place: Place) -> Any:
    """What the name of a builtin function stands for: itself, or its meaning over traced values."""
    for known, meaning in _MEANINGS:
        if fn is known:
            return functools.partial(meaning, place)
    return fn


def _extremum(name: str, place: Place, *args: Any, **options: Any) -> Any:
    """`max` and `min`: of several values lane by lane, of one rank-1 tile its greatest or smallest element."""
    fn, pick, reduce = getattr(builtins, name), getattr(jnp, f"{name}imum"), getattr(jnp, name)
    if len(args) == 1 and is_traced(args[0]):
        return reduce(_row(args[0], name, place))
    items = [*args[0]] if len(args) == 1 else [*args]
    if not any(map(is_traced, items)):
        return fn(items, **options) if len(args) == 1 else fn(*items, **options)
    if options.get("key") is not None:
        raise error_at(
            f"{name} over traced values takes no key=; compare the keys with jnp.arg{name}, or with `if`",
            place,
            KernelTypeError,
        )
    return functools.reduce(pick, items)


def _quantifier(name: str, place: Place, values: Any) -> Any:
    """`any` and `all`."""
    decides = name == "any"
    if is_traced(values):
        return getattr(jnp, name)(_row(values, name, place))
    out = None
    for v in values:
        if is_traced(v):
            bit = scalar_condition(v, place[:2], name)
            out = bit if out is None else (lax.bitwise_or if decides else lax.bitwise_and)(out, bit)
        elif bool(v) is decides:
            return decides
    return not decides if out is None else out


def _row(tile: Any, name: str, place: Place) -> Any:
    if jnp.ndim(tile) != 1:
        raise error_at(
            f"{name} of one tile goes through its elements, so that it takes a tile of rank 1, got shape "
            f"{jnp.shape(tile)}; write jnp.{name}(tile)",
            place,
            KernelTypeError,
        )
    return tile


_MEANINGS = (
    (builtins.max, functools.partial(_extremum, "max")),
    (builtins.min, functools.partial(_extremum, "min")),
    (builtins.any, functools.partial(_quantifier, "any")),
    (builtins.all, functools.partial(_quantifier, "all")),
)
BUILTINS = frozenset({"max", "min", "any", "all"})


# -- patterns -------------------------------------------------------------------------------------------------------


def equals(subject: Any, value: Any) -> Any:
    """Whether the subject of a `match` is a value: what is no number is not equal to a traced one."""
    if is_traced(subject) and not isinstance(value, int | float | np.generic | jax.Array):
        return False
    return subject == value


def is_singleton(subject: Any, value: bool | None) -> Any:
    """Whether the subject of a `match` is None, True or False; a traced bool may be."""
    if not is_traced(subject):
        return subject is value
    if value is None or jnp.ndim(subject) or subject.dtype != np.bool_:
        return False
    return subject if value else lax.bitwise_not(subject)


def is_sequence(subject: Any, length: int) -> bool:
    """Whether a pattern of this many parts may fit the subject."""
    return (
        isinstance(subject, collections.abc.Sequence)
        and not isinstance(subject, str | bytes | bytearray)
        and len(subject) == length
    )
