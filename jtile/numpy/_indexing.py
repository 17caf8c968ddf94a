"""Indices that are arrays: copies when they are read, as NumPy's are."""

from __future__ import annotations

import contextlib
from typing import Any

import jax.numpy as jnp
import numpy

from jtile.numpy._array import asarray, asnode, functions, hosted, ndarray, wrap
from jtile.numpy._calls import given_back
from jtile.numpy._casts import cast, text
from jtile.numpy._graph import Node, Op, Shape, interned
from jtile.numpy._now import SMALL, Later, now
from jtile.numpy._record import record, value_of
from jtile.numpy._views import basic_index


class _Plan:
    """An index by arrays.

    Attributes:
      static: its parts that are no arrays, with None in the places of arrays (a new axis is the text "new").
      arrays: the index arrays; shape: of what is read.
    """

    def __init__(self, static: tuple, arrays: list[Node], shape: Shape):
        self.static, self.arrays, self.shape = static, tuple(arrays), shape


def take_by(array: ndarray, index: tuple) -> Any:
    """`array[index]`, where something of the index is an array, a list or a bool."""
    with contextlib.suppress(Later):
        value = now(array)
        return given_back(value[now(index)], (value,))
    index = _looked_at(index)
    step = basic_index(index, array.shape)
    if step is not None:
        return array[index]
    if any(_mask(i) for i in index) or array.dtype.kind not in "biufc":
        return given_back(numpy.asarray(array)[hosted(index)])
    plan = _plan(array.shape, index)
    if plan is None:
        return given_back(numpy.asarray(array)[hosted(index)])
    static = plan.static
    make = lambda: Op("take by", lambda x, *a: x[_filled(static, a)], lambda x, *a: jnp.asarray(x)[_filled(static, a)])
    op = interned("take by", static, make)
    return wrap(record(op, (array._node(), *plan.arrays), plan.shape, array.dtype), scalar=not plan.shape)


def put_by(array: ndarray, index: tuple, value: Any) -> None:
    """`array[index] = value`."""
    index = _looked_at(index)
    step = basic_index(index, array.shape)
    if step is not None:
        array[index] = value
        return
    node = asnode(value, array.dtype)
    if len(index) == 1 and _mask(index[0]) and not node.shape and _fits(index[0], array.shape):
        _where(array, asnode(index[0]), cast(node, array.dtype))
        return
    if node.dtype.kind == "c" and array.dtype.kind != "c":
        raise TypeError("float() argument must be a string or a real number, not 'complex'")
    plan = None if any(_mask(i) for i in index) or array.dtype.kind not in "biufc" else _plan(array.shape, index)
    if plan is None or len(plan.arrays) == 0:
        _at_once(array, hosted(index), node)
        return
    _check_broadcast(node.shape, plan.shape)
    static = plan.static

    def host(x, v, *a):
        x[_filled(static, a)] = v
        return x

    # Elements that are written twice keep the last value in NumPy, and any of them on a device.
    unique = len(plan.arrays) == 1 and _distinct(plan.arrays[0], array.shape)
    device = (lambda x, v, *a: x.at[_filled(static, a)].set(v)) if unique else None
    op = interned("put by", (static, unique), lambda: Op("put by", host, device, 4.0, True))
    array._write(record(op, (array._node(), cast(node, array.dtype), *plan.arrays), array.shape, array.dtype))


def _where(array: ndarray, mask: Node, value: Node) -> None:
    """Assign a number where a mask is true, without looking at either."""
    extra = (None,) * (array.ndim - len(mask.shape))

    def host(x, v, m):
        x[m] = v
        return x

    op = interned(
        "put where",
        len(extra),
        lambda: Op("put where", host, lambda x, v, m: jnp.where(m[(..., *extra)], v, x), 1.0, True),
    )
    array._write(record(op, (array._node(), value, mask), array.shape, array.dtype))


def _at_once(array: ndarray, index: tuple, node: Node) -> None:
    value = numpy.array(array)
    value[index] = value_of(node)
    array[...] = value


def _looked_at(index: tuple) -> tuple:
    """The index with the values of integers of no dimension: they select an element, and are no index arrays."""
    out = []
    for i in index:
        if isinstance(i, slice):
            i = slice(*(hosted(part) for part in (i.start, i.stop, i.step)))
        elif isinstance(i, ndarray | numpy.ndarray) and not i.shape and i.dtype.kind in "iu":
            i = int(i)
        elif isinstance(i, list | tuple):
            i = numpy.array(hosted(list(i))) if len(i) else numpy.zeros(0, numpy.intp)
        out.append(i)
    return tuple(out)


def _mask(i: Any) -> bool:
    return isinstance(i, bool | numpy.bool) or (isinstance(i, ndarray | numpy.ndarray) and i.dtype == bool)


def _fits(mask: Any, shape: Shape) -> bool:
    return isinstance(mask, ndarray | numpy.ndarray) and mask.ndim > 0 and mask.shape == shape[: mask.ndim]


def _plan(shape: Shape, index: tuple) -> _Plan | None:
    """The plan of an index, whose arrays are in bounds and not negative then; None where NumPy has to do the access."""
    count = sum(i is not None and i is not Ellipsis for i in index)
    if count > len(shape) or sum(i is Ellipsis for i in index) > 1:
        return None
    full = index if Ellipsis in [i if i is Ellipsis else None for i in index] else (*index, Ellipsis)
    static: list[Any] = []
    arrays: list[Node] = []
    axis = 0
    for i in full:
        if i is Ellipsis:
            axis += len(shape) - count
            static.append("...")
        elif i is None:
            static.append("new")
        elif isinstance(i, slice):
            static.append(("slice", i.start, i.stop, i.step))
            axis += 1
        elif isinstance(i, ndarray | numpy.ndarray | int | numpy.integer):
            if isinstance(i, ndarray | numpy.ndarray) and i.dtype.kind not in "iu":
                raise IndexError("arrays used as indices must be of integer (or boolean) type")
            arrays.append(_in_bounds(i, axis, shape[axis]))
            static.append(None)
            axis += 1
        else:
            return None
    return _Plan(tuple(static), arrays, _picked_shape(shape, static, arrays))


def _picked_shape(shape: Shape, static: list, arrays: list[Node]) -> Shape:
    """The shape of what an index picks: that of its arrays together stands where they are side by side, else first."""
    try:
        together = numpy.broadcast_shapes(*[a.shape for a in arrays])
    except ValueError:
        shapes = " ".join(text(a.shape) for a in arrays)
        raise IndexError(
            f"shape mismatch: indexing arrays could not be broadcast together with shapes {shapes} "
        ) from None
    named = sum(part != "new" and part != "..." for part in static)
    out: list[int] = []
    axis, place, last = 0, 0, None
    for k, part in enumerate(static):
        if part == "new":
            out.append(1)
        elif part == "...":
            rest = len(shape) - named
            out += shape[axis : axis + rest]
            axis += rest
        elif part is not None:
            out.append(len(range(*slice(*part[1:]).indices(shape[axis]))))
            axis += 1
        else:
            place = len(out) if last is None else place if last == k - 1 else 0
            last, axis = k, axis + 1
    return (*out[:place], *together, *out[place:])


def _in_bounds(index: Any, axis: int, size: int) -> Node:
    """An index array, counted from the front.

    Raises:
      IndexError: NumPy's, where one of it is out of bounds.
    """
    array = asarray(index)
    if not array.size:
        return cast(array._node(), numpy.dtype(numpy.int64))
    low, high = _ends(array)
    if low < -size or high >= size:
        bad = low if low < -size else high
        raise IndexError(f"index {bad} is out of bounds for axis {axis} with size {size}")
    if low >= 0:
        return array._node()
    array = array.astype(numpy.int64)
    return functions["where"](array < 0, array + size, array)._node()


def _ends(array: ndarray) -> tuple[int, int]:
    """The least and the largest of some integers; those of pending ones are computed with these, by one program."""
    node = array._node()
    if node.op is not None and node.size > SMALL:
        ends = functions["min"](array), functions["max"](array)
        return int(ends[0]), int(ends[1])
    value = value_of(node)
    return int(value.min()), int(value.max())


def _distinct(index: Node, shape: Shape) -> bool:
    value = value_of(index)
    return value.ndim <= 1 and len(numpy.unique(value)) == value.size


def _filled(static: tuple, arrays: Any) -> tuple:
    arrays = iter(arrays)
    out: list[Any] = []
    for part in static:
        if part is None:
            out.append(next(arrays))
        elif part == "new":
            out.append(None)
        else:
            out.append(Ellipsis if part == "..." else slice(*part[1:]))
    return tuple(out)


def _check_broadcast(shape: Shape, into: Shape) -> None:
    try:
        fits = numpy.broadcast_shapes(shape, into) == into
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"shape mismatch: value array of shape {shape} could not be broadcast to indexing result of shape {into}"
        )


functions["take_by"] = take_by
functions["put_by"] = put_by
