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


def symbol_values(kernel: ir.Kernel, values: Mapping[str, Any]) -> list[Any]:
    """The values of a kernel's symbols, in the order in which launch records number them."""
    return [values[name] for name in ir.launch_symbols(kernel)]


def evaluate_expression(expression: Any, numbers: Sequence[Any]) -> Any:
    """A size in the postfix form of launch records: a number, or a list of numbers, `"s0"` for `numbers[0]`, and
    operators."""
    if not isinstance(expression, list):
        return expression
    stack: list[Any] = []
    for item in expression:
        if isinstance(item, str) and item in _OPERATORS:
            b, a = stack.pop(), stack.pop()
            stack.append(_OPERATORS[item](a, b))
        else:
            stack.append(numbers[int(item[1:])] if isinstance(item, str) else item)
    return stack.pop()


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = _FUNCTIONS | {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul,
}  # fmt: skip
