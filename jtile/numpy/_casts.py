"""The same elements in another dtype or shape, and NumPy's errors where that cannot be."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import jax
import numpy

from jtile.numpy._graph import Constant, Node, Op, Shape, interned
from jtile.numpy._record import record


def cast(node: Node, dtype: Any) -> Node:
    """The elements in another dtype."""
    if node.dtype == dtype:
        return node
    if isinstance(node, Constant):
        with numpy.errstate(all="ignore"):
            return Constant(node.value.astype(dtype))
    real = node.dtype.kind == "c" and dtype.kind != "c"

    def device(x: Any) -> Any:
        x = x.real if real and dtype.kind != "b" else x
        return (x != 0) if dtype.kind == "b" else jax.lax.convert_element_type(x, dtype)

    make = lambda: Op("astype", lambda x: x.astype(dtype), device)
    return record(interned("astype", (real, dtype), make), (node,), node.shape, dtype)


def broadcast(node: Node, shape: Shape) -> Node:
    """The elements in a larger shape, to be assigned."""
    try:
        fits = numpy.broadcast_shapes(node.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"could not broadcast input array from shape {text(node.shape)} into shape {text(shape)}")
    host, device = lambda x: numpy.broadcast_to(x, shape), lambda x: jax.numpy.broadcast_to(x, shape)
    op = interned("broadcast", shape, lambda: Op("broadcast", host, device, 0.0))
    return record(op, (node,), shape, node.dtype)


def sizes(shape: Any) -> Shape:
    """A shape as it is given, an int or several."""
    return tuple(map(operator.index, shape)) if isinstance(shape, Iterable) else (operator.index(shape),)


def text(shape: Shape) -> str:
    """A shape as NumPy writes it in errors."""
    return "(" + ",".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def full_shape(shape: Any, old: Shape) -> Shape:
    """A shape with -1 filled in.

    Raises:
      ValueError: NumPy's, where the sizes differ.
    """
    wanted = sizes(shape)
    size = 1
    for n in old:
        size *= n
    known = 1
    for n in wanted:
        known *= n if n != -1 else 1
    unknown = wanted.count(-1)
    if unknown > 1:
        raise ValueError("can only specify one unknown dimension")
    if (unknown and (known == 0 or size % known)) or (not unknown and known != size):
        raise ValueError(f"cannot reshape array of size {size} into shape {text(wanted).replace('-1', 'newaxis')}")
    return tuple(size // known if n == -1 else n for n in wanted)
