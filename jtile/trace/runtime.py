"""What rewritten source calls: loops, branches and logic that look at run time whether their condition is traced.

Over Python values they do what Python does. Over traced values they become `lax` control flow. The statements of a
loop or branch are functions whose assigned names are `nonlocal`; their cells are read and set in `carries`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jtile.language.control import Range, counted, scalar_condition
from jtile.trace.carries import (
    Cells,
    Packed,
    Place,
    begin,
    choose,
    error_at,
    following,
    is_leaf,
    is_traced,
    load,
)
from jtile.trace.expressions import (
    BUILTINS,
    and_,
    builtin,
    compare,
    equals,
    if_expression,
    is_sequence,
    is_singleton,
    not_,
    or_,
    truth,
)
from jtile.trace.marks import named

Names = tuple[str, ...]


# -- loops ---------------------------------------------------------------------------------------------------------


def for_loop(
    it: Any,
    body: Callable[[Any], None],
    carry: Names,
    assigned: Names,
    fill: Names,
    stop: str | None,
    place: Place,
) -> None:
    """Run `for target in it: body`.

    Args:
      carry: the assigned names that the next round or the code after the loop reads.
      fill: those that need no value before the loop.
      stop: the flag that a `break` sets; the rounds of `jt.range` test it themselves.
    """
    cells = Cells(body)
    if not isinstance(it, Range):
        for x in it:
            body(x)
            if stop is not None and is_stopped(cells.get(stop)):
                return
        return

    def run(start: Packed, seen: Callable[[], None] = _nothing):
        def step(k, arrays):
            load(cells, start, arrays, assigned)
            body(k)
            seen()
            return following(cells, start, arrays, place)

        return counted(it, step, start.arrays)

    start = begin(cells, carry, fill, place, run)
    load(cells, start, run(start), assigned)


def while_loop(
    cond: Callable[[], Any],
    body: Callable[[], None],
    carry: Names,
    assigned: Names,
    fill: Names,
    place: Place,
) -> None:
    """Run `while cond: body`; from the first round whose condition is traced, the loop runs on the device."""
    while True:
        test = cond()
        if is_traced(test):
            break
        if not test:
            return
        body()
    cells = Cells(body, cond)

    def run(start: Packed, seen: Callable[[], None] = _nothing):
        def keep_going(arrays):
            load(cells, start, arrays, assigned)
            return scalar_condition(jnp.asarray(cond()), place[:2], "while")

        def step(arrays):
            load(cells, start, arrays, assigned)
            body()
            seen()
            return tuple(following(cells, start, arrays, place))

        return lax.while_loop(keep_going, step, tuple(start.arrays))

    start = begin(cells, carry, fill, place, run)
    load(cells, start, run(start), assigned)


def _nothing() -> None:
    pass


def is_stopped(flag: Any) -> bool:
    """Whether a loop that runs while tracing ends here: its flag is Python's True."""
    return flag is True


# -- branches ------------------------------------------------------------------------------------------------------


def if_(
    test: Any,
    then: Callable[[], None],
    other: Callable[[], None],
    live: Names,
    assigned: Names,
    fill: Names,
    place: Place,
) -> None:
    """Run `if test: then() else: other()`. `live` are the assigned names that are read later, `fill` those that
    one branch may leave unbound."""
    if not is_traced(test):
        (then if test else other)()
        return
    cells = Cells(then, other)
    before = {n: cells.get(n) for n in assigned}

    def branch(fn):
        def run() -> list[Any]:
            for n, v in before.items():
                cells.set(n, _copied(v))
            fn()
            return [cells.get(n) for n in live]

        return run

    values = choose(scalar_condition(test, place[:2], "if"), branch(then), branch(other), live, place, fill)
    for n in assigned:
        cells.unset(n)
    for n, v in zip(live, values, strict=True):
        cells.set(n, v)


def _copied(value: Any) -> Any:
    """A copy of a value's containers around the same leaves: a branch may set elements of a list or dict."""
    return jax.tree.map(lambda v: v, value, is_leaf=is_leaf)


# -- what cannot be rewritten ------------------------------------------------------------------------------------------


def plain_iter(it: Any, word: str, place: Place) -> Any:
    """The iterable of a loop that stays Python's because `word` stands in it."""
    if isinstance(it, Range):
        raise error_at(f"{word!r} cannot stand in a jt.range loop, whose rounds all run: {_INSTEAD[word]}", place)
    return it


def plain_test(test: Any, word: str, place: Place) -> Any:
    """The condition of an `if` or `while` that stays Python's because `word` stands in it."""
    if is_traced(test):
        raise error_at(f"{word!r} cannot depend on a traced condition: {_INSTEAD[word]}", place)
    return test


_IN_FINALLY = "a jump in a `finally` stays Python's: put it behind the `try`"
_INSTEAD = {
    "break": _IN_FINALLY,
    "continue": _IN_FINALLY,
    "return": _IN_FINALLY,
    "raise": "write jt.assert_(condition, message)",
    "global": "a kernel assigns no global names",
}

__all__ = [
    "BUILTINS",
    "and_",
    "builtin",
    "compare",
    "equals",
    "for_loop",
    "if_",
    "if_expression",
    "is_sequence",
    "is_singleton",
    "is_stopped",
    "named",
    "not_",
    "or_",
    "plain_iter",
    "plain_test",
    "truth",
    "while_loop",
]
