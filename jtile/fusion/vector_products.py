"""Products of a computed matrix and a vector, as sums of a group's own values: the matrix is then in no memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .steps import ELEMENTWISE, MOVES, Node, Operand, Step, Value, size_of, steps_of

DTYPES = frozenset(["float32", "float64"])  # shorter floats are summed in another dtype than their own
KEEPS = frozenset(["copy", "copy_p", "stop_gradient"])


def matrix_of(step: Step) -> Value | None:
    """The matrix of a product in which the other operand is a vector, or several with batch axes; None for others."""
    if step.name != "dot_general" or not all(isinstance(x, Value) and 0 not in x.shape for x in step.ins):
        return None
    dtypes = {str(v.dtype) for v in (*step.ins, *step.outs)}
    if len(dtypes) > 1 or not dtypes <= DTYPES:
        return None
    x, y = step.ins
    vectors = [math.prod(v.shape[i] for i in _free(step, side)) == 1 for side, v in enumerate((x, y))]
    return {(True, False): y, (False, True): x}.get(tuple(vectors))  # type: ignore[return-value]


def _free(step: Step, side: int) -> list[int]:
    """The axes of an operand that the product has and the other operand has not."""
    sums, batch = (axes[side] for axes in step.params["dimension_numbers"])
    return [i for i in range(len(step.ins[side].shape)) if i not in (*sums, *batch)]


def is_computed(matrix: Operand | None, made: dict[Value, Node]) -> bool:
    """Whether elementwise functions make a matrix, possibly with moves behind them."""
    while isinstance(matrix, Value) and matrix in made:
        node = made[matrix]
        if not node.steps or node.free:
            return False
        if any(step.name in ELEMENTWISE - KEEPS for step in node.steps):
            return True
        if len(node.ins) != 1 or not all(step.name in MOVES | KEEPS for step in node.steps):
            return False
        (matrix,) = node.ins
    return False


def is_of_vectors(matrix: Operand | None, made: dict[Value, Node]) -> bool:
    """Whether a computed matrix is made of smaller arrays alone."""
    todo, seen = [matrix], set()
    while todo:
        v = todo.pop()
        if not isinstance(v, Value) or v in seen or size_of(v) < size_of(matrix):  # type: ignore[arg-type]
            continue
        seen.add(v)
        if v not in made or not made[v].steps:
            return False
        todo += made[v].ins
    return True


def sums_of(step: Step) -> Any:
    """A closed jaxpr that gives a product as a sum: the operands are spread over the axes of the product and of the
    sum, in this order."""
    (sum_x, sum_y), (batch_x, batch_y) = step.params["dimension_numbers"]
    free = [_free(step, side) for side in range(2)]
    count, rows, columns = len(batch_x), len(free[0]), len(free[1])
    whole = (*step.outs[0].shape, *(step.ins[0].shape[i] for i in sum_x))
    behind = range(count + rows + columns, len(whole))
    places = (
        [*range(count), *range(count, count + rows), *behind],
        [*range(count), *range(count + rows, behind.start), *behind],
    )

    def product(x, y):
        spread = []
        for value, order, place in zip(
            (x, y), ((*batch_x, *free[0], *sum_x), (*batch_y, *free[1], *sum_y)), places, strict=True
        ):
            value = value if list(order) == sorted(order) else lax.transpose(value, order)
            spread.append(lax.broadcast_in_dim(value, whole, place))
        return jnp.sum(spread[0] * spread[1], axis=tuple(behind))

    return jax.make_jaxpr(product)(*(x.aval for x in step.ins))


def with_sums(nodes: Sequence[Node], large: bool = True) -> list[Node]:
    """The nodes of a program, where such products have the steps of sums. large: also those of matrices that are
    computed from arrays as large, which are in memory."""
    made: dict[Value, Node] = {}
    found = []
    for node in nodes:
        matrix = None if node.steps else matrix_of(node.eqn)
        if is_computed(matrix, made) and (large or is_of_vectors(matrix, made)):
            node = dataclasses.replace(node, steps=steps_of(sums_of(node.eqn), node.eqn))
        made.update(dict.fromkeys(node.outs, node))
        found.append(node)
    return found
