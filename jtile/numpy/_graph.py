"""What is recorded of NumPy's calls: nodes of a graph, whose values are computed when somebody looks at one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy

from jtile._memo import Recent

type Shape = tuple[int, ...]


class Op:
    """One operation with all of its arguments that are no arrays.

    Attributes:
      name: NumPy's name of it.
      host: the operation by NumPy itself, of NumPy's arrays. Where `writes`, its first argument is what it writes
        into, which it owns.
      device: the same by JAX; None where JAX has nothing like it.
      cost: nanoseconds that NumPy takes for an element, roughly.
      writes: the operation changes a few elements of its first argument.
    """

    __slots__ = ("cost", "device", "host", "name", "writes")

    def __init__(self, name: str, host: Callable, device: Callable | None, cost: float = 1.0, writes: bool = False):
        self.name, self.host, self.device, self.cost, self.writes = name, host, device, cost, writes

    def __repr__(self) -> str:
        return f"Op({self.name})"


class Node:
    """An array of the graph. It is pending while it has an op, and has a value afterwards.

    Attributes:
      inputs: the nodes that the op reads.
      dtype: NumPy's; None for an op of several results, whose value is a tuple.
      value: an array of NumPy or of JAX.
    """

    __slots__ = ("__weakref__", "dtype", "inputs", "op", "shape", "value")

    def __init__(self, op: Op | None, inputs: tuple[Node, ...], shape: Shape, dtype: Any, value: Any = None):
        self.op, self.inputs, self.shape, self.dtype, self.value = op, inputs, shape, dtype, value

    @property
    def size(self) -> int:
        out = 1
        for n in self.shape:
            out *= n
        return out


class Constant(Node):
    """A number of the script. Programs are the same for all values of it, once they have seen two."""

    __slots__ = ()

    def __init__(self, value: Any):
        array = numpy.asarray(value)
        super().__init__(None, (), (), array.dtype, array[()])


_OPS: Recent[Hashable, Op] = Recent(8192)


def interned(name: str, static: Hashable, make: Callable[[], Op]) -> Op:
    """The op of this name and static part; the same object each time, since programs are compared by it."""
    key = (name, static)
    return _OPS.get(key) or _OPS.put(key, make())


def alive(references: list[weakref.ref[Node]]) -> list[Node]:
    """The nodes that still exist and are pending."""
    nodes = (reference() for reference in references)
    return [node for node in nodes if node is not None and node.op is not None]
