"""From the sizes of Tile IR, which may have symbols, to those of the arrays of a call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import core

from jtile import ir


def values_of(kernel: ir.Kernel, shapes: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The values of a kernel's symbols for operands of these shapes, which may have leading dimensions of vmap; ints,
    or symbolic dimensions of JAX's where the shapes have these."""
    out = {}
    for name, (first, *_) in ir.sources(kernel).items():
        n = shapes[first.operand][first.axis - len(kernel.inputs[first.operand].shape)]
        out[name] = n // first.multiple
    return out


def sized(n: Any, values: Mapping[str, Any]) -> Any:
    """A size of Tile IR with the values of its symbols: an int, or a symbolic dimension of JAX's."""
    return ir.evaluate(n, values, _FUNCTIONS)


_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "cdiv": lambda a, b: -(-a // b),
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": lambda a, b: max(a, b) if isinstance(a, int) and isinstance(b, int) else core.max_dim(a, b),
    "min": lambda a, b: min(a, b) if isinstance(a, int) and isinstance(b, int) else core.min_dim(a, b),
}
