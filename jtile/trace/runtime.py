"""What rewritten source calls: loops, branches and logic that look at run time whether their condition is traced.

Over Python values they do what Python does. Over traced values they become `lax` control flow. The statements of a
loop or branch are functions whose assigned names are `nonlocal`; their cells are read and set here.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from jtile._errors import JtileError, KernelSyntaxError, KernelTypeError
from jtile.language._level import giver
from jtile.language.control import Range, _adapts, checked_carry, counted, scalar_condition, spell
from jtile.language.refs import Ref, TileView
from jtile.language.shared import Barrier, BarrierRound, BarrierSlot, Shared

Place = tuple[str, int, int]  # file, line, column


class _Unbound:
    """The value of a name that is not bound."""

    def __repr__(self) -> str:
        return "unbound"


UNBOUND = _Unbound()


def is_traced(x: Any) -> bool:
    return isinstance(x, core.Tracer)


def _error(message: str, place: Place, kind: type[JtileError] = KernelSyntaxError) -> JtileError:
    return kind(message, place[:2], place[2])


# -- names as carry ------------------------------------------------------------------------------------------------


class Cells:
    """The variables behind names, by the closures of the functions that assign them."""

    def __init__(self, *fns: Callable[..., Any]):
        self.cells: dict[str, types.CellType] = {}
        for fn in fns:
            self.cells.update(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))

    def get(self, name: str) -> Any:
        try:
            return self.cells[name].cell_contents
        except ValueError:
            return UNBOUND

    def set(self, name: str, value: Any) -> None:
        if value is UNBOUND:
            self.unset(name)
        else:
            self.cells[name].cell_contents = value

    def unset(self, name: str) -> None:
        if self.get(name) is not UNBOUND:
            del self.cells[name].cell_contents


_OBJECTS = (Ref, TileView, Range, Shared, Barrier, BarrierSlot, BarrierRound)  # what is no array and does not change


def _is_leaf(v: Any) -> bool:
    return isinstance(v, (*_OBJECTS, np.ndarray)) or v is UNBOUND


@dataclasses.dataclass
class Packed:
    """The values of names, taken apart: arrays (`arrays`, each of name `owners[k]`) and the rest (`skeleton`)."""

    names: tuple[str, ...]
    arrays: list[Any]
    owners: list[str]
    skeleton: list[tuple[Any, list[Any]]]  # per name: treedef, and leaves with arrays replaced by `_SLOT`

    def unpack(self, arrays: Iterable[Any]) -> list[Any]:
        it = iter(arrays)
        return [tree.unflatten([next(it) if v is _SLOT else v for v in leaves]) for tree, leaves in self.skeleton]


class _Slot:
    """The place of an array in a skeleton."""


_SLOT = _Slot()


def _is_number(x: Any) -> bool:
    if isinstance(x, _OBJECTS):
        return False
    return isinstance(x, bool | int | float | np.generic | np.ndarray) or (
        isinstance(x, jax.Array) and not isinstance(x, jax.Ref)
    )


def pack(names: Iterable[str], values: Iterable[Any]) -> Packed:
    out = Packed(tuple(names), [], [], [])
    for name, value in zip(out.names, values, strict=True):
        leaves, tree = jax.tree.flatten(value, is_leaf=_is_leaf)
        kept = []
        for v in leaves:
            if _is_number(v):
                out.arrays.append(
                    v if jax.dtypes.issubdtype(getattr(v, "dtype", None), jax.dtypes.extended) else jnp.asarray(v)
                )
                out.owners.append(name)
                v = _SLOT
            kept.append(v)
        out.skeleton.append((tree, kept))
    return out


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Ref) and isinstance(b, Ref):
        return a.tracer is b.tracer
    if isinstance(a, TileView) and isinstance(b, TileView):
        return a.ref.tracer is b.ref.tracer and (a.sizes, a.steps, a.pad) == (b.sizes, b.steps, b.pad)
    return a is b or (type(a) is type(b) and not isinstance(a, Ref | TileView) and bool(a == b))


def _differs(a: Packed, b: Packed) -> str | None:
    """The first name whose structure (anything but the arrays) is not the same."""
    for name, (ta, la), (tb, lb) in zip(a.names, a.skeleton, b.skeleton, strict=True):
        if ta != tb or not all(map(_same_leaf, la, lb)):
            return name
    return None


# -- loops ---------------------------------------------------------------------------------------------------------


def for_loop(
    it: Any, body: Callable[[Any], None], carry: tuple[str, ...], assigned: tuple[str, ...], place: Place
) -> None:
    """`for target in it: body`. `carry` are the assigned names that the next round or the code after the loop reads."""
    if not isinstance(it, Range):
        for x in it:
            body(x)
        return
    cells = Cells(body)
    start = _start(cells, carry, place, "loop")

    def step(k, arrays):
        _load(cells, start, arrays, assigned)
        body(k)
        return _next(cells, start, arrays, place)

    arrays = counted(it, step, start.arrays)
    _load(cells, start, arrays, assigned)


def while_loop(
    cond: Callable[[], Any], body: Callable[[], None], carry: tuple[str, ...], assigned: tuple[str, ...], place: Place
) -> None:
    """`while cond: body`; from the round on whose condition is traced it runs on the device."""
    while True:
        test = cond()
        if is_traced(test):
            break
        if not test:
            return
        body()
    cells = Cells(body, cond)
    start = _start(cells, carry, place, "loop")

    def keep_going(arrays):
        _load(cells, start, arrays, assigned)
        return scalar_condition(jnp.asarray(cond()), place[:2], "while")

    def step(arrays):
        _load(cells, start, arrays, assigned)
        body()
        return tuple(_next(cells, start, arrays, place))

    arrays = lax.while_loop(keep_going, step, tuple(start.arrays))
    _load(cells, start, arrays, assigned)


def _start(cells: Cells, carry: tuple[str, ...], place: Place, what: str) -> Packed:
    values = [cells.get(n) for n in carry]
    for name, v in zip(carry, values, strict=True):
        if v is UNBOUND:
            raise _error(
                f"{name!r} gets its value only inside this {what}, which may run no round, and is read after it or "
                "before it is "
                f"assigned: give {name!r} a value of the same shape and dtype before the {what}",
                place,
            )
        roles = giver(v)
        if roles is not None:
            raise _error(
                f"this {what} of role {roles[0]!r} goes on with the value that role {roles[1]!r} gave to {name!r}; "
                f"roles share buffers and barriers only: give {name!r} a value in this role before the {what}",
                place,
            )
    return pack(carry, values)


def _load(cells: Cells, start: Packed, arrays: Iterable[Any], assigned: tuple[str, ...]) -> None:
    """Give the carried names their values; the other assigned ones have none between rounds."""
    for name in assigned:
        if name not in start.names:
            cells.unset(name)
    for name, value in zip(start.names, start.unpack(arrays), strict=True):
        cells.set(name, value)


def _next(cells: Cells, start: Packed, arrays: Iterable[Any], place: Place) -> list[Any]:
    """The carry after a round, checked against the one before."""
    values = [cells.get(n) for n in start.names]
    for name, v in zip(start.names, values, strict=True):
        if v is UNBOUND:
            raise _error(f"{name!r} is deleted in this loop, but read later", place)
    new = pack(start.names, values)
    name = _differs(start, new)
    if name is not None:
        old_value, new_value = start.unpack(arrays)[start.names.index(name)], values[start.names.index(name)]
        raise _error(
            f"{name!r} changes its kind in this loop: it was {_show(old_value)} and becomes {_show(new_value)}; "
            "only arrays and numbers "
            "can change from round to round",
            place,
            KernelTypeError,
        )
    out = []
    for name, old, v in zip(start.owners, arrays, new.arrays, strict=True):
        if not jax.dtypes.issubdtype(v.dtype, jax.dtypes.extended):
            v = checked_carry(repr(name), old, v, place[:2])
        out.append(v)
    return out


def _show(v: Any) -> str:
    if isinstance(v, jax.Array):
        return spell(v)
    if isinstance(v, tuple | list):
        return "(" + ", ".join(map(_show, v)) + ")"
    return "unbound" if v is UNBOUND else repr(v) if isinstance(v, (*_OBJECTS, int, float, str)) else type(v).__name__


# -- branches ------------------------------------------------------------------------------------------------------


def if_(
    test: Any,
    then: Callable[[], None],
    other: Callable[[], None],
    live: tuple[str, ...],
    assigned: tuple[str, ...],
    place: Place,
) -> None:
    """`if test: then() else: other()`. `live` are the assigned names that are read later."""
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

    values = choose(scalar_condition(test, place[:2], "if"), branch(then), branch(other), live, place)
    for n in assigned:
        cells.unset(n)
    for n, v in zip(live, values, strict=True):
        cells.set(n, v)


def _copied(value: Any) -> Any:
    """The same leaves in containers of their own: a branch may set elements of a list or dict."""
    return jax.tree.map(lambda v: v, value, is_leaf=_is_leaf)


class _RetryError(Exception):
    """The first branch must be traced again with dtypes that the second one asks for."""


def choose(
    pred: Any, then: Callable[[], list[Any]], other: Callable[[], list[Any]], names: tuple[str, ...], place: Place
):
    """`lax.cond` whose branches give the values of `names`; Python numbers take the dtype of the other branch."""
    state: dict[str, Any] = {
        "dtypes": None,
        "first": None,
        "packed": None,
    }  # what the branch that was traced first gave

    def traced(fn):
        def run():
            packed = pack(names, fn())
            if state["first"] in (None, fn):
                state["first"], state["packed"] = fn, packed
                arrays = _converted(packed.arrays, state["dtypes"])
            else:
                arrays = _joined(state, packed, place)
            return tuple(arrays)

        return run

    try:
        arrays = lax.cond(pred, traced(then), traced(other))
    except _RetryError:
        state["first"] = None
        arrays = lax.cond(pred, traced(then), traced(other))
    packed: Packed = state["packed"]
    return packed.unpack(arrays)


def _joined(state: dict[str, Any], second: Packed, place: Place) -> list[Any]:
    """The arrays of the second branch, of the types of the first; asks for a retry where the first must give way."""
    first: Packed = state["packed"]
    name = _differs(first, second)
    if name is not None:
        k = first.names.index(name)
        a, b = first.skeleton[k], second.skeleton[k]
        if UNBOUND in (*_objects(a), *_objects(b)):
            raise _error(
                f"{name!r} is bound in one branch only, and read later: give it a value in both branches, or before "
                "the if",
                place,
            )
        raise _error(
            f"{name!r} is not of one kind in both branches; only arrays and numbers can depend on a traced condition",
            place,
            KernelTypeError,
        )
    wanted = [_common(n, a, b, place) for n, a, b in zip(first.owners, first.arrays, second.arrays, strict=True)]
    if state["dtypes"] is None and any(
        d is not None and a.dtype != d for a, d in zip(first.arrays, wanted, strict=True)
    ):
        state["dtypes"] = wanted
        raise _RetryError
    return _converted(second.arrays, wanted)


def _objects(skeleton: tuple[Any, list[Any]]) -> list[Any]:
    return [v for v in skeleton[1] if v is UNBOUND]


def _converted(arrays: list[Any], dtypes: list[Any] | None) -> list[Any]:
    if dtypes is None:
        return arrays
    return [a if d is None else lax.convert_element_type(a, d) for a, d in zip(arrays, dtypes, strict=True)]


def _common(name: str, a: Any, b: Any, place: Place) -> Any:
    """The dtype that both branches give `name` (None: nothing to convert)."""
    if a.shape == b.shape and a.dtype == b.dtype:
        return None if a.weak_type == b.weak_type else a.dtype
    if a.shape == b.shape:
        if a.weak_type and _adapts(a.dtype, b.dtype):
            return b.dtype
        if b.weak_type and _adapts(b.dtype, a.dtype):
            return a.dtype
    raise _error(
        f"{name!r} has another type in each branch: {spell(a)} and {spell(b)}; give both the same shape and dtype",
        place,
        KernelTypeError,
    )


# -- expressions ---------------------------------------------------------------------------------------------------


def if_expression(test: Any, then: Callable[[], Any], other: Callable[[], Any], place: Place) -> Any:
    """`then if test else other`."""
    if not is_traced(test):
        return then() if test else other()
    pred = scalar_condition(test, place[:2], "if")
    (out,) = choose(pred, lambda: [then()], lambda: [other()], ("the value of this expression",), place)
    return out


def and_(first: Any, rest: Callable[[], Any], place: Place) -> Any:
    """`first and rest`; bools if either is traced."""
    if not is_traced(first):
        return first and rest()
    return _logic(lax.bitwise_and, first, rest(), "and", place)


def or_(first: Any, rest: Callable[[], Any], place: Place) -> Any:
    """`first or rest`; bools if either is traced."""
    if not is_traced(first):
        return first or rest()
    return _logic(lax.bitwise_or, first, rest(), "or", place)


def not_(x: Any, place: Place) -> Any:
    """`not x`."""
    return lax.bitwise_not(scalar_condition(x, place[:2], "not")) if is_traced(x) else not x


def _logic(fn, a: Any, b: Any, word: str, place: Place) -> Any:
    a, b = (scalar_condition(jnp.asarray(v), place[:2], f"{word!r} (for tiles write & or |)") for v in (a, b))
    return fn(a, b)


# -- what cannot be rewritten ------------------------------------------------------------------------------------------


def plain_iter(it: Any, word: str, place: Place) -> Any:
    """The iterable of a loop that stays Python's because `word` stands in it."""
    if isinstance(it, Range):
        raise _error(f"{word!r} cannot stand in a jt.range loop, whose rounds all run: {_INSTEAD[word]}", place)
    return it


def plain_test(test: Any, word: str, place: Place) -> Any:
    """The condition of an `if` or `while` that stays Python's because `word` stands in it."""
    if is_traced(test):
        raise _error(f"{word!r} cannot depend on a traced condition: {_INSTEAD[word]}", place)
    return test


_INSTEAD = {
    "break": "loop with `while` and put the condition there",
    "continue": "put the rest of the body under an `if`",
    "return": "put the rest of the body under an `if`, or return after the loop",
    "raise": "write jt.assert_(condition, message)",
    "global": "a kernel assigns no global names",
}
