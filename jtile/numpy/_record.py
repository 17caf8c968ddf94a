"""Recording: a call of NumPy becomes a pending node, and what is pending stays bounded.

A loop that nobody looks into would make a graph of any length. It is cut where the script comes back to the place at
which the present graph began, so that each part has the same structure and is compiled once.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import numpy

from jtile.numpy._evaluate import evaluate, host_value
from jtile.numpy._graph import Node, Op, Shape, alive
from jtile.numpy._uses import use

FEW = 256  # nodes: with as many, a graph is cut at the next place that the script has come to before
MANY = 1024  # nodes: with as many, it is cut anywhere
BYTES = 1 << 28  # bytes of arrays that the script made and that nodes keep: with as many, a graph is cut, too


class _Pending(threading.local):
    """The calls that a thread has recorded and not evaluated yet."""

    def __init__(self) -> None:
        self.nodes: list[weakref.ref[Node]] = []
        self.bytes = 0
        self.head: Any = None
        self.seen: set[Any] = set()

    def end(self, wanted: Node | None = None) -> None:
        """Give values to all nodes that the script holds."""
        roots, self.nodes, self.bytes = alive(self.nodes), [], 0
        self.head, self.seen = None, set()
        if wanted is not None and all(node is not wanted for node in roots):  # another thread has recorded `wanted`
            roots.append(wanted)
        if roots:
            evaluate(roots, wanted)


_PENDING = _Pending()


def record(op: Op, inputs: tuple[Node, ...], shape: Shape, dtype: Any) -> Node:
    """Record an op on nodes; returns the pending node of its result."""
    pending = _PENDING
    nodes = pending.nodes
    count = len(nodes)
    if not FEW > count > 0:
        nodes = _bound(pending, count)
    for i in inputs:
        if i.origin is not None:
            use(i)
    node = Node(op, inputs, shape, dtype)
    nodes.append(_reference(node))
    return node


_reference = weakref.ref


def _bound(pending: _Pending, count: int) -> list[weakref.ref[Node]]:
    """Begins a graph, or ends it where it has grown long enough; gives the list of the nodes that are pending."""
    place = _place()
    if not count:
        pending.head = place
        return pending.nodes
    again = place == pending.head or (count >= 2 * FEW and place in pending.seen)
    pending.seen.add(place)
    if count >= MANY:
        pending.nodes = [weakref.ref(node) for node in alive(pending.nodes)]
        again = again or len(pending.nodes) >= MANY // 2
    if again:
        pending.end()
        pending.head = place
    return pending.nodes


def leaf(value: Any) -> Node:
    """A node with a value: an array of NumPy or JAX that nobody else changes."""
    pending = _PENDING
    pending.bytes += value.nbytes
    if pending.bytes > BYTES:
        pending.end()
        pending.bytes = value.nbytes
    return Node(None, (), tuple(value.shape), numpy.dtype(value.dtype), value)


def value_of(node: Node) -> Any:
    """The value of a node as NumPy's array, which the caller does not change; computes it."""
    _look(node)
    return host_value(node)


def device_value_of(node: Node) -> Any:
    """The value of a node as an array of NumPy or JAX, wherever it is; computes it."""
    _look(node)
    return node.value


def _look(node: Node) -> None:
    if node.origin is not None:
        use(node)
    if node.op is not None:
        _PENDING.end(node)


def _place() -> tuple[Any, int]:
    """The place in the script from which jtile was called."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("jtile.numpy"):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti
