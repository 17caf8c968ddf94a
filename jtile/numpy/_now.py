"""Small arrays whose values are at hand: NumPy does their calls at once, as to record one takes longer than to do it.

They behave as NumPy's own then, with its warnings, and what is written into them is written where it lies.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import jax
import numpy

from jtile.numpy._graph import Node
from jtile.numpy._mode import MODE

SMALL = 32768  # elements: to record a call takes some 15 µs, as long as NumPy takes for cheap ones of so many
_AS_THEY_ARE = frozenset((bool, int, float, complex, str, type(None), type, slice, type(...)))


class Later(Exception):  # noqa: N818
    """An operand is large or pending, so that the call has to be recorded."""


def at_hand(array: Any) -> numpy.ndarray | None:
    """The value of a small array of ours, a view where ours is one; None of a large or a pending one."""
    value = array._cell.node.value
    if value.__class__ is not numpy.ndarray or math.prod(array._shape) > SMALL or MODE.get() != "auto":
        return None
    for step in array._steps:
        value = step.host_read(value, *step.numbers)
    return value


def now(value: Any) -> Any:
    """An argument as NumPy takes it.

    Raises:
      Later: it is not at hand.
    """
    kind = value.__class__
    if kind in _AS_THEY_ARE or isinstance(value, numpy.generic | numpy.dtype):
        return value
    if kind is numpy.ndarray:
        if value.size <= SMALL:
            return value
    elif kind is list or kind is tuple:
        return kind([now(v) for v in value]) if len(value) <= SMALL else _later()
    elif hasattr(kind, "_cell"):
        found = at_hand(value)
        if found is not None:
            return found[()] if value._scalar else found
    elif kind is dict:
        return {k: now(v) for k, v in value.items()}
    elif not isinstance(value, jax.Array | numpy.ndarray):
        return value
    return _later()


def _later() -> Any:
    raise Later


def small_result(values: Iterable[Any]) -> bool:
    """Whether what these broadcast to is small."""
    shapes = [v.shape for v in values if isinstance(v, numpy.ndarray)]
    if len(shapes) < 2 or shapes[0] == shapes[1]:
        return True
    if math.prod(map(math.prod, shapes)) <= SMALL:
        return True
    try:
        return math.prod(numpy.broadcast_shapes(*shapes)) <= SMALL
    except ValueError:
        return True  # the shapes do not fit: NumPy raises its error


def memory(array: Any, values: Iterable[Any] = ()) -> numpy.ndarray | None:
    """NumPy's array at the memory of ours, to be written into, where nobody else can see that; or None. `values`: what
    the caller has made of its operands, among which the array may be itself."""
    if array._locked or array._scalar or MODE.get() != "auto":
        return None
    cell = array._cell
    value = cell.node.value
    if value.__class__ is not numpy.ndarray or not (value.flags.owndata and value.flags.writeable):
        return None
    mine = 0
    for v in values:
        mine += v is value or getattr(v, "base", None) is value
    # Each has a reference where it lies and the argument of getrefcount; the value has a variable, too.
    if sys.getrefcount(cell.node) != 2 or sys.getrefcount(cell.node.value) != 3 + mine:
        return None
    for step in array._steps:
        view = step.host_read(value, *step.numbers)
        if view.size and not numpy.may_share_memory(view, value):
            return None
        value = view
    return value


def changed(array: Any) -> None:
    """The memory of an array was written: what views of it have seen is no longer so."""
    node = array._cell.node
    array._cell.node = Node(None, (), node.shape, node.dtype, node.value)
