"""Views: an array is a cell with the value of its base, and steps from there. What is read goes along the steps; what
is written goes back along them, and the cell gets a new value, which all views of it see."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy
from jax import lax

from jtile._memo import Recent
from jtile.numpy._graph import Constant, Node, Op, Shape, interned
from jtile.numpy._record import record


class Step(abc.ABC):
    """A step from an array to a view of it.

    Attributes:
      name, static: what it is; base: shape of the array; shape, dtype: those of the view (dtype None: the same).
      numbers: integers that are operands, so that a loop over them has one program.
      writable: whether NumPy lets one write through it.
    """

    writable = True
    numbers: tuple[Any, ...] = ()
    dtype: Any = None

    def __init__(self, name: str, static: Any, base: Shape, shape: Shape):
        self.name, self.static, self.base, self.shape = name, static, base, shape
        self._ops: dict[str, Op] = {}

    def same(self, other: Step) -> bool:
        mine, theirs = ((s.name, s.static, s.base, s.shape, s.numbers, s.dtype) for s in (self, other))
        return mine == theirs

    @abc.abstractmethod
    def host_read(self, x, *numbers):
        """The elements of an array of NumPy that the view has."""

    def device_read(self, x, *numbers):
        return self.host_read(x, *numbers)

    def host_write(self, x, value, *numbers):
        self.host_read(x, *numbers)[...] = value
        return x

    def device_write(self, x, value, *numbers):
        """JAX's array with other elements where the view is; views that have all of their base need none."""
        raise AssertionError(f"{self.name} has no write")

    def read(self, node: Node) -> Node:
        op = self._ops.get("") or self._op("", self.host_read, self.device_read, 0.0)
        numbers = [Constant(n) for n in self.numbers]
        return record(op, (node, *numbers), self.shape, self.dtype or node.dtype)

    def write(self, node: Node, value: Node) -> Node:
        """The array with other elements where the view is."""
        if self.covers():
            return self.back(value, node)
        op = self._ops.get("write ") or self._op("write ", self.host_write, self.device_write, 1.0, True)
        numbers = [Constant(n) for n in self.numbers]
        return record(op, (node, value, *numbers), self.base, node.dtype)

    def _op(self, kind: str, *how: Any) -> Op:
        """The op that reads or writes, which the step keeps."""
        name, key = kind + self.name, (self.static, self.base, self.shape, self.dtype)
        return self._ops.setdefault(kind, interned(name, key, lambda: Op(name, *how)))

    def covers(self) -> bool:
        """Whether the view has all elements of its base, so that `back` can turn its value into the base's."""
        return False

    def back(self, value: Node, node: Node) -> Node:
        """The value of the base whose view, which `covers` it, has this value."""
        raise AssertionError(f"{self.name} never has all elements of its base")


def put(node: Node, steps: Sequence[Step], value: Node) -> Node:
    """The value of a base after a view of it was written."""
    if not steps:
        return value
    inner = value if len(steps) == 1 else put(steps[0].read(node), steps[1:], value)
    return steps[0].write(node, inner)


def same_steps(steps: Sequence[Step], others: Sequence[Step]) -> bool:
    """Whether two views of one base are the same."""
    return len(steps) == len(others) and all(a is b or a.same(b) for a, b in zip(steps, others))


class Index(Step):
    """A basic index. `static` has for each axis of the base (length, step, kept, number of its start or None for 0),
    and the places of new axes."""

    def __init__(self, base: Shape, axes: list[tuple[int, int, int, bool]], new: tuple[int, ...]):
        numbers: list[int] = []
        described = []
        for size, (start, length, step, kept) in zip(base, axes):
            whole = kept and length == size and step == 1
            described.append((length, step, kept, None if whole or not length else len(numbers)))
            if not whole and length:
                numbers.append(start)
        shape = [length for length, _, kept, _ in described if kept]
        for place in new:
            shape.insert(place, 1)
        super().__init__("index", (tuple(described), new), base, tuple(shape))
        self.numbers = tuple(map(numpy.int64, numbers))
        plain = all(step == 1 and kept and start is None for _, step, kept, start in described)
        self._covers = not new and plain and self.shape == base

    def covers(self) -> bool:
        return self._covers

    def back(self, value: Node, node: Node) -> Node:
        return value

    def host_read(self, x, *numbers):
        axes, new = self.static
        index: list[Any] = []
        for length, step, kept, start in axes:
            first = 0 if start is None else int(numbers[start])
            if not kept:
                index.append(first)
                continue
            stop = first + length * step
            index.append(slice(first, stop if stop >= 0 else None, step) if length else slice(0, 0))
        return self._with_new(x, index, new)

    def _with_new(self, x, index, new):
        view = x[(*index, ...)]
        for place in new:
            view = view[(slice(None),) * place + (None,)]
        return view

    def _block(self, numbers):
        """For each axis the first element, and the number of elements from there to the last one."""
        lows, extents = [], []
        for length, step, _, start in self.static[0]:
            first = 0 if start is None else numbers[start]
            span = (length - 1) * step
            lows.append(first + span if step < 0 and length else first)
            extents.append(abs(span) + 1 if length else 0)
        return lows, extents

    def device_read(self, x, *numbers):
        if all(isinstance(n, numpy.generic) for n in numbers):
            return self.host_read(x, *numbers)
        lows, extents = self._block(numbers)
        x = lax.dynamic_slice(x, [jnp.asarray(n, "int64") for n in lows], extents)
        axes, new = self.static
        index = [slice(None, None, step) if kept else 0 for _, step, kept, _ in axes]
        return self._with_new(x, index, new)

    def device_write(self, x, value, *numbers):
        if not value.size:
            return x
        lows, extents = self._block(numbers)
        axes = self.static[0]
        value = value.reshape([length for length, *_ in axes])
        value = lax.rev(value, [k for k, (_, step, _, _) in enumerate(axes) if step < 0])
        steps = [abs(step) for _, step, _, _ in axes]
        if 8 * value.size > x.size and all(isinstance(n, numpy.generic) for n in numbers):
            return self._written_over(x, value, [int(n) for n in lows], extents, steps)
        lows = [jnp.asarray(n, "int64") for n in lows]
        if max(steps) > 1:
            block = lax.dynamic_slice(x, lows, extents)
            value = self._written_over(block, value, [0] * len(extents), extents, steps)
        return lax.dynamic_update_slice(x, value, lows)

    def _written_over(self, x, value, lows, extents, steps):
        """All elements of `x`, in one pass: those of `value` where it lies, and the others."""
        edges = [(low, n - low - extent, step - 1) for low, extent, step, n in zip(lows, extents, steps, x.shape)]
        own = _inside(x, lows, extents, steps)
        return jnp.where(own, lax.pad(value, jnp.zeros((), value.dtype), edges), x)

    def zeros_outside(self, x, *numbers):
        """JAX's array with zeros where the view is not: its sum is that of the view. The numbers are those of the
        script."""
        lows, extents = self._block([int(n) for n in numbers])
        own = _inside(x, lows, extents, [abs(step) for _, step, _, _ in self.static[0]])
        return jnp.where(own, x, jnp.zeros((), x.dtype))


def _inside(x, lows, extents, steps):
    """Which elements of an array are in a block of every few elements, each time along each axis."""
    own = jnp.ones((), bool)
    for k, (low, extent, step) in enumerate(zip(lows, extents, steps)):
        if extent == x.shape[k] and step == 1:
            continue
        at = lax.broadcasted_iota("int32" if x.size < 2**31 else "int64", x.shape, k) - low
        own = own & (at >= 0) & (at < extent) & (at % step == 0 if step > 1 else True)
    return own


_INDICES: Recent[tuple[tuple, Shape], Index] = Recent(4096)
_PARTS = frozenset((int, type(None)))


def basic_index(index: tuple, base: Shape) -> Index | None:
    """The step of an index of ints, slices, `...` and `None`; None for any other index.

    Raises:
      IndexError: NumPy's, where it is out of bounds.
    """
    for i in index:
        if i.__class__ is slice:
            if i.start.__class__ in _PARTS and i.stop.__class__ in _PARTS and i.step.__class__ in _PARTS:
                continue
        elif i is None or i is Ellipsis or i.__class__ is int:
            continue
        return _basic_index(index, base)
    key = index, base
    found = _INDICES.get(key)
    if found is None:
        found = _basic_index(index, base)
        assert found is not None
        _INDICES.put(key, found)
    return found


def _basic_index(index: tuple, base: Shape) -> Index | None:
    if not all(i is None or i is Ellipsis or isinstance(i, slice | int | numpy.integer) for i in index) or any(
        isinstance(i, bool | numpy.bool) for i in index
    ):
        return None
    count = sum(i is not None and i is not Ellipsis for i in index)
    if sum(i is Ellipsis for i in index) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if count > len(base):
        raise IndexError(f"too many indices for array: array is {len(base)}-dimensional, but {count} were indexed")
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    axes: list[tuple[int, int, int, bool]] = []
    new, out = [], 0
    for i in index:
        if i is None:
            new.append(out)
            out += 1
        elif i is Ellipsis:
            rest = len(base) - count
            axes += [(0, n, 1, True) for n in base[len(axes) : len(axes) + rest]]
            out += rest
        else:
            size = base[len(axes)]
            axes.append(_axis(i, size, len(axes)))
            out += axes[-1][3]
    return Index(base, axes, tuple(new))


def _axis(i: Any, size: int, axis: int) -> tuple[int, int, int, bool]:
    if isinstance(i, slice):
        start, stop, step = i.indices(size)
        return start, len(range(start, stop, step)), step, True
    i = int(i)
    if not -size <= i < size:
        raise IndexError(f"index {i} is out of bounds for axis {axis} with size {size}")
    return i % size, 1, 1, False


class Transpose(Step):
    def __init__(self, base: Shape, order: tuple[int, ...]):
        super().__init__("transpose", order, base, tuple(base[k] for k in order))

    def covers(self) -> bool:
        return True

    def back(self, value: Node, node: Node) -> Node:
        return Transpose(self.shape, tuple(int(k) for k in numpy.argsort(self.static))).read(value)

    def host_read(self, x):
        return x.transpose(self.static)


class Reshape(Step):
    """A reshape, made only where NumPy's is a view, or where nobody else sees the array."""

    def __init__(self, base: Shape, shape: Shape):
        super().__init__("reshape", None, base, shape)

    def covers(self) -> bool:
        return True

    def back(self, value: Node, node: Node) -> Node:
        return Reshape(self.shape, self.base).read(value)

    def host_read(self, x):
        return x.reshape(self.shape)


class Part(Step):
    """The real or the imaginary part of complex numbers."""

    def __init__(self, base: Shape, name: str, dtype: Any):
        super().__init__(name, None, base, base)
        self.dtype = numpy.empty(0, dtype).real.dtype

    def host_read(self, x):
        return x.real if self.name == "real" else x.imag

    def device_write(self, x, value):
        return lax.complex(value, x.imag) if self.name == "real" else lax.complex(x.real, value)


class Bits(Step):
    """The same bytes as elements of another dtype of the same size."""

    def __init__(self, base: Shape, old: Any, new: Any):
        super().__init__("bits", old, base, base)
        self.dtype = new

    def host_read(self, x):
        return x.view(self.dtype)

    def device_read(self, x):
        if "b" in (self.dtype.kind, self.static.kind):
            return lax.convert_element_type(x, self.dtype)
        return lax.bitcast_convert_type(x, self.dtype)

    def covers(self) -> bool:
        return True

    def back(self, value: Node, node: Node) -> Node:
        return Bits(self.base, self.dtype, self.static).read(value)


class Broadcast(Step):
    writable = False

    def __init__(self, base: Shape, shape: Shape):
        super().__init__("broadcast", None, base, shape)

    def host_read(self, x):
        return numpy.broadcast_to(x, self.shape)

    def device_read(self, x):
        return jnp.broadcast_to(x, self.shape)


class Diagonal(Step):
    writable = False

    def __init__(self, base: Shape, offset: int, axis1: int, axis2: int):
        shape = jax.eval_shape(
            lambda x: jnp.diagonal(x, offset, axis1, axis2), jax.ShapeDtypeStruct(base, "int8")
        ).shape
        super().__init__("diagonal", (offset, axis1, axis2), base, shape)

    def host_read(self, x):
        return x.diagonal(*self.static)


def geometry(base: Shape, dtype: Any, steps: Sequence[Step]) -> numpy.ndarray:
    """An array of NumPy with the shape and strides of a view. It has memory for one element: nobody reads it."""
    strides = tuple(math.prod(base[k + 1 :]) * dtype.itemsize for k in range(len(base)))
    one = numpy.zeros(1, dtype)
    out = numpy.lib.stride_tricks.as_strided(one, base, strides)
    for step in steps:
        if isinstance(step, Diagonal | Part | Bits | Transpose | Broadcast):
            out = step.host_read(out)
        elif isinstance(step, Reshape):
            out = viewed(out, step.shape)
            assert out is not None, "a reshape that copies is no step"
        else:
            out = step.host_read(out, *step.numbers)
    return out


def viewed(array: numpy.ndarray, shape: Shape) -> numpy.ndarray | None:
    """The array with another shape, where that is a view of it."""
    if array.size == 0 or array.size == 1:
        return numpy.lib.stride_tricks.as_strided(array, shape, (array.itemsize,) * len(shape))
    old = [(n, s) for n, s in zip(array.shape, array.strides) if n != 1]
    strides: list[int] = []
    new = [n for n in shape if n != 1]
    i = j = 0
    while i < len(old) and j < len(new):
        many, few, first, begin = old[i][0], new[j], i, j
        i, j = i + 1, j + 1
        while many != few:
            if many < few:
                if old[i - 1][1] != old[i][0] * old[i][1]:
                    return None
                many, i = many * old[i][0], i + 1
            else:
                few, j = few * new[j], j + 1
        inner = old[i - 1][1]
        if any(old[k][1] != old[k + 1][0] * old[k + 1][1] for k in range(first, i - 1)):
            return None
        strides += [inner * math.prod(new[k + 1 : j]) for k in range(begin, j)]
    rest = iter(strides)
    full = tuple(next(rest) if n != 1 else array.itemsize for n in shape)
    return numpy.lib.stride_tricks.as_strided(array, shape, full)
