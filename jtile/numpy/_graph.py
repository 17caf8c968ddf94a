"""What is recorded of NumPy's calls: nodes of a graph, whose values are computed when somebody looks at one."""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy

from jtile._memo import Recent

type Shape = tuple[int, ...]

NANOSECONDS_A_NODE = 1000  # the time of a call of NumPy besides that for its elements
DEVICE_DTYPES = frozenset(
    numpy.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "complex64", "complex128", jax.dtypes.bfloat16,
    )
)  # fmt: skip


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
      origin: the structure that it was computed in and its place there, until the script uses it.
      place: its place in the graph that was made last of those that it is in.
    """

    __slots__ = ("__weakref__", "dtype", "inputs", "op", "origin", "place", "shape", "value")

    def __init__(self, op: Op | None, inputs: tuple[Node, ...], shape: Shape, dtype: Any, value: Any = None):
        self.op, self.inputs, self.shape, self.dtype, self.value = op, inputs, shape, dtype, value
        self.origin: Any = None
        self.place = 0

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
        if not isinstance(value, numpy.generic):
            value = numpy.asarray(value)[()]
        self.op, self.inputs, self.shape, self.dtype, self.value = None, (), (), value.dtype, value
        self.origin, self.place = None, 0


_OPS: Recent[Hashable, Op] = Recent(8192)


def interned(name: str, static: Hashable, make: Callable[[], Op]) -> Op:
    """The op of this name and static part; the same object each time, since programs are compared by it."""
    key = (name, static)
    return _OPS.get(key) or _OPS.put(key, make())


def alive(references: list[weakref.ref[Node]]) -> list[Node]:
    """The nodes that still exist and are pending."""
    nodes = (reference() for reference in references)
    return [node for node in nodes if node is not None and node.op is not None]


class Graph:
    """Pending nodes in an order in which they can run, with the operands in front of their users.

    Attributes:
      order: the nodes; inputs: the places of what each reads; uses: how often each is read.
    """

    def __init__(self, roots: list[Node]):
        self.order: list[Node] = []
        self.inputs: list[tuple[int, ...]] = []
        self.uses: list[int] = []
        order = self.order
        for node in roots:  # as a thread records them: behind what they read
            if node.place < len(order) and order[node.place] is node:
                continue
            for i in node.inputs:
                if i.op is not None and not (i.place < len(order) and order[i.place] is i):
                    self._add(i)  # of another thread, or left pending before
            self._append(node)

    def _append(self, node: Node) -> None:
        """Takes a node whose pending operands are there."""
        order, inputs, uses = self.order, self.inputs, self.uses
        places = []
        for i in node.inputs:
            place = i.place
            if place >= len(order) or order[place] is not i:
                i.place = place = len(order)
                order.append(i)
                inputs.append(())
                uses.append(0)
            uses[place] += 1
            places.append(place)
        node.place = len(order)
        order.append(node)
        inputs.append(tuple(places))
        uses.append(0)

    def _add(self, node: Node) -> None:
        """Takes a pending node, behind those that it needs."""
        order, stack = self.order, [node]
        while stack:
            node = stack[-1]
            missing = [i for i in node.inputs if i.op and not (i.place < len(order) and order[i.place] is i)]
            stack += missing
            if not missing:
                stack.pop()
                if not (node.place < len(order) and order[node.place] is node):
                    self._append(node)

    def held(self, listed: list[Node]) -> list[bool]:
        """Whether somebody besides this graph holds each node: an array of the script, or a pending node that is not in
        the graph. `listed`: nodes that the caller has in a list; nobody else in between has a variable."""
        known = [2 + count for count in self.uses]  # two references are the list of the graph and map's
        for node in listed:
            known[node.place] += 1
        node = None
        return [*map(operator.gt, map(sys.getrefcount, self.order), known)]

    def key(self, outputs: tuple[int, ...]) -> tuple:
        """The key of the structure: graphs of equal keys are served by one program."""
        return outputs, self._structure

    @functools.cached_property
    def _structure(self) -> tuple:
        parts: list[Any] = []
        for node, inputs in zip(self.order, self.inputs):
            if node.op is not None:
                parts.append((node.op, inputs))
            elif isinstance(node, Constant):
                parts.append(node.dtype)
            else:
                parts.append((node.shape, node.dtype))
        return tuple(parts)

    def nanoseconds(self) -> float:
        """The nanoseconds that NumPy takes, by the costs of the ops."""
        total = 0.0
        for node, inputs in zip(self.order, self.inputs):
            if node.op is None:
                continue
            sizes = [self.order[i].size for i in inputs] if not node.op.writes else [self.order[inputs[1]].size]
            if node.dtype is not None and not node.op.writes:
                sizes.append(node.size)
            total += NANOSECONDS_A_NODE + node.op.cost * max(sizes, default=0)
        return total

    def on_device(self) -> bool:
        """Whether JAX can run all nodes of the graph."""
        return all(
            (node.op is None or node.op.device is not None) and (node.dtype is None or node.dtype in DEVICE_DTYPES)
            for node in self.order
        )
