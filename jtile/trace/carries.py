"""The values that names have, taken apart into arrays and the rest: the carry of loops, the results of branches.

A name that a jump leaves without a value in one branch, or that has none before a loop, is filled with zeros of the
type that it has elsewhere: `definite` knows that nobody reads them.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from jtile._errors import JtileError, KernelSyntaxError, KernelTypeError
from jtile.language._level import giver
from jtile.language.control import Range, _adapts, checked_carry, spell
from jtile.language.refs import Ref, TileView
from jtile.language.shared import Barrier, BarrierRound, BarrierSlot, Shared
from jtile.trace.jumps import RESULT

Place = tuple[str, int, int]  # file, line, column


class _Unbound:
    """The value of a name that is not bound."""

    def __repr__(self) -> str:
        return "unbound"


UNBOUND = _Unbound()


def is_traced(x: Any) -> bool:
    return isinstance(x, core.Tracer)


def error_at(message: str, place: Place, kind: type[JtileError] = KernelSyntaxError) -> JtileError:
    return kind(message, place[:2], place[2])


def _called(name: str) -> str:
    """The name by which errors call a variable."""
    return "the value that this function returns" if name == RESULT else repr(name)


# -- names ---------------------------------------------------------------------------------------------------------


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


_OBJECTS = (Ref, TileView, Range, Shared, Barrier, BarrierSlot, BarrierRound)  # no arrays, and they never change


def is_leaf(v: Any) -> bool:
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

    def is_bound(self, name: str) -> bool:
        return not any(v is UNBOUND for v in self.skeleton[self.names.index(name)][1])

    def filler(self, name: str) -> Any:
        """A value of the structure and the types that `name` has here, whose arrays are zeros."""
        tree, leaves = self.skeleton[self.names.index(name)]
        zeros = iter([_zeros(a) for a, owner in zip(self.arrays, self.owners, strict=True) if owner == name])
        return tree.unflatten([next(zeros) if v is _SLOT else v for v in leaves])


def _zeros(like: Any) -> Any:
    """Zeros of the type of an array, which may be one of a trace that is over."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.extended):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(like.shape, like.dtype))
        return jax.random.wrap_key_data(jnp.zeros(words.shape, words.dtype), impl=jax.random.key_impl(like))
    number = jnp.asarray(np.zeros((), like.dtype).item()) if like.weak_type else None
    if number is not None and number.dtype == like.dtype:
        return jnp.broadcast_to(number, like.shape)
    return jnp.zeros(like.shape, like.dtype)


class _Slot:
    """The place of an array in a skeleton."""


_SLOT = _Slot()


def _is_number(x: Any) -> bool:
    if isinstance(x, _OBJECTS):
        return False
    return isinstance(x, bool | int | float | complex | np.generic | np.ndarray) or (
        isinstance(x, jax.Array) and not isinstance(x, jax.Ref)
    )


def pack(names: Iterable[str], values: Iterable[Any]) -> Packed:
    out = Packed(tuple(names), [], [], [])
    for name, value in zip(out.names, values, strict=True):
        leaves, tree = jax.tree.flatten(value, is_leaf=is_leaf)
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


def differs(a: Packed, b: Packed) -> str | None:
    """The first name whose structure (anything but the arrays) is not the same."""
    for name, (ta, la), (tb, lb) in zip(a.names, a.skeleton, b.skeleton, strict=True):
        if ta != tb or not all(map(_same_leaf, la, lb)):
            return name
    return None


# -- the carry of a loop ----------------------------------------------------------------------------------------------


def begin(
    cells: Cells,
    carry: tuple[str, ...],
    fill: tuple[str, ...],
    place: Place,
    run: Callable[[Packed, Callable[[], None]], Any],
) -> Packed:
    """The carry before the first round.

    Args:
      fill: names that need no value before the loop.
      run: `(start, seen)` traces the loop, and calls `seen` after a round: shows what the names in `fill` become.
    """
    values = {n: cells.get(n) for n in carry}
    missing = [n for n, v in values.items() if v is UNBOUND]
    for name, v in values.items():
        _check_start(name, v, name in fill, place)
    start = pack(*_apart({n: v for n, v in values.items() if n not in missing}))
    if not missing:
        return start
    found: dict[str, Any] = {}

    def seen() -> None:
        got = {n: cells.get(n) for n in missing}
        made = pack(*_apart({n: v for n, v in got.items() if v is not UNBOUND}))
        found.update(dict.fromkeys(made.names, made))

    def once(*arrays):
        run(dataclasses.replace(start, arrays=list(arrays)), seen)
        return ()

    jax.make_jaxpr(once)(*start.arrays)
    for n, made in found.items():
        values[n] = made.filler(n)
    return pack(*_apart({n: v for n, v in values.items() if v is not UNBOUND}))


def _apart(values: dict[str, Any]) -> tuple[tuple[str, ...], list[Any]]:
    return tuple(values), list(values.values())


def _check_start(name: str, value: Any, may_fill: bool, place: Place) -> None:
    if value is UNBOUND and not may_fill:
        raise error_at(
            f"{_called(name)} gets its value only inside this loop, which may run no round, and is read after it or "
            f"before it is assigned: give {_called(name)} a value of the same shape and dtype before the loop",
            place,
        )
    roles = giver(value)
    if roles is not None:
        raise error_at(
            f"this loop of role {roles[0]!r} goes on with the value that role {roles[1]!r} gave to {_called(name)}; "
            f"roles share buffers and barriers only: give {_called(name)} a value in this role before the loop",
            place,
        )


def load(cells: Cells, start: Packed, arrays: Iterable[Any], assigned: tuple[str, ...]) -> None:
    """Give the carried names their values; the other assigned ones have none between rounds."""
    for name in assigned:
        if name not in start.names:
            cells.unset(name)
    for name, value in zip(start.names, start.unpack(arrays), strict=True):
        cells.set(name, value)


def following(cells: Cells, start: Packed, arrays: Iterable[Any], place: Place) -> list[Any]:
    """The carry after a round, checked against the one before."""
    values = [cells.get(n) for n in start.names]
    for name, v in zip(start.names, values, strict=True):
        if v is UNBOUND:
            raise error_at(f"{_called(name)} is deleted in this loop, but read later", place)
    new = pack(start.names, values)
    name = differs(start, new)
    if name is not None:
        old_value, new_value = start.unpack(arrays)[start.names.index(name)], values[start.names.index(name)]
        raise error_at(
            f"{_called(name)} changes its kind in this loop: it was {_show(old_value)} and becomes {_show(new_value)}; "
            "only arrays and numbers "
            "can change from round to round",
            place,
            KernelTypeError,
        )
    out = []
    for name, old, v in zip(start.owners, arrays, new.arrays, strict=True):
        if not jax.dtypes.issubdtype(v.dtype, jax.dtypes.extended):
            v = checked_carry(_called(name), old, v, place[:2])
        out.append(v)
    return out


def _show(v: Any) -> str:
    if isinstance(v, jax.Array):
        return spell(v)
    if isinstance(v, tuple | list):
        return "(" + ", ".join(map(_show, v)) + ")"
    return "unbound" if v is UNBOUND else repr(v) if isinstance(v, (*_OBJECTS, int, float, str)) else type(v).__name__


# -- branches ------------------------------------------------------------------------------------------------------


class _RetryError(Exception):
    """The first branch must be traced again with what the second one asks for."""


def choose(
    pred: Any,
    then: Callable[[], list[Any]],
    other: Callable[[], list[Any]],
    names: tuple[str, ...],
    place: Place,
    fill: Collection[str] = (),
):
    """`lax.cond` whose branches give the values of `names`; Python numbers take the dtype of the other branch, and what
    is in `fill` and unbound in one branch is zeros there."""
    joint = _Joint(names, place, fill)

    def traced(fn):
        return lambda: tuple(joint.arrays(fn, fn()))

    while True:
        try:
            arrays = lax.cond(pred, traced(then), traced(other))
            break
        except _RetryError:
            joint.first = None
    assert joint.packed is not None
    return joint.packed.unpack(arrays)


@dataclasses.dataclass
class _Joint:
    """The results of two branches, brought to one type.

    Attributes:
      first: the branch that was traced first, and what it gave (`packed`).
      dtypes: what its arrays are converted to, once the second branch has been seen.
      likes: for names that are filled, where their type is seen.
    """

    names: tuple[str, ...]
    place: Place
    fill: Collection[str]
    first: Any = None
    packed: Packed | None = None
    dtypes: list[Any] | None = None
    likes: dict[str, Packed] = dataclasses.field(default_factory=dict)

    def arrays(self, fn: Callable[[], Any], values: list[Any]) -> list[Any]:
        """The arrays of branch `fn`."""
        packed = self._filled(pack(self.names, values), values)
        if self.first in (None, fn):
            self.first, self.packed = fn, packed
            return _converted(packed.arrays, self.dtypes)
        assert self.packed is not None
        missing = [n for n in self.fill if packed.is_bound(n) and not self.packed.is_bound(n)]
        if missing:
            self.likes |= dict.fromkeys(missing, packed)
            raise _RetryError
        self.likes |= {n: self.packed for n in self.fill if self.packed.is_bound(n)}
        return self._joined(self._filled(packed, values))

    def _filled(self, packed: Packed, values: list[Any]) -> Packed:
        missing = [n for n in self.likes if not packed.is_bound(n)]
        if not missing:
            return packed
        given = dict(zip(self.names, values, strict=True)) | {n: self.likes[n].filler(n) for n in missing}
        return pack(self.names, [given[n] for n in self.names])

    def _joined(self, second: Packed) -> list[Any]:
        """The arrays of the second branch, of the types of the first; asks for a retry where it must give way."""
        first = self.packed
        assert first is not None
        self._check_kinds(first, second)
        pairs = list(zip(first.owners, first.arrays, second.arrays, strict=True))
        wanted = [_common(n, a, b, self.place) for n, a, b in pairs]
        if self.dtypes is None and any(
            d is not None and a.dtype != d for a, d in zip(first.arrays, wanted, strict=True)
        ):
            self.dtypes = wanted
            raise _RetryError
        return _converted(second.arrays, wanted)

    def _check_kinds(self, first: Packed, second: Packed) -> None:
        name = differs(first, second)
        if name is None:
            return
        if not (first.is_bound(name) and second.is_bound(name)):
            raise error_at(
                f"{_called(name)} is bound in one branch only, and read later: give it a value in both branches, or "
                "before the if",
                self.place,
            )
        if name == RESULT:
            raise error_at(
                "this function returns values of different kinds (or a value here and None there, where it ends "
                "without a return), and a traced condition says which; every return gives the same structure of arrays "
                "and numbers",
                self.place,
                KernelTypeError,
            )
        raise error_at(
            f"{name!r} is not of one kind in both branches; only arrays and numbers can depend on a traced condition",
            self.place,
            KernelTypeError,
        )


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
    raise error_at(
        f"{_called(name)} has another type in each branch: {spell(a)} and {spell(b)}; give both the same shape "
        "and dtype",
        place,
        KernelTypeError,
    )
