"""Rows of zeros with one element each, which JAX scatters: what picks an element of every row has such a gradient. They
are a choice by the numbers of the columns, an elementwise function, so that they need not be in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .gathers import clipped
from .steps import Constant, Node, Value, is_tile, nodes_of


def with_one_hot_rows(nodes: Sequence[Node]) -> list[Node]:
    """The nodes of a program in which such a scatter is a choice: for x the gradient of
    `jnp.take_along_axis(x, i[:, None], 1)`, as in a cross entropy."""
    made = {node.outs[0]: node for node in nodes if node.name == "broadcast_in_dim"}
    return [new for node in nodes for new in (_chosen(node) if _is_one_hot(node, made) else [node])]


def _is_one_hot(node: Node, made: dict[Any, Node]) -> bool:
    """Whether an equation adds one number to each row of an array of zeros, at the place that an index names."""
    if node.name not in ("scatter-add", "scatter_add"):
        return False
    (table, index, updates), numbers = node.ins, node.eqn.params["dimension_numbers"]
    zeros = made.get(table)
    if not all(isinstance(x, Value) and is_tile(x) and 0 not in x.shape for x in node.ins) or table.dtype == bool:
        return False
    if zeros is None or not isinstance(zeros.ins[0], Constant) or not _is_plus_zero(zeros.ins[0].value):
        return False
    along, rows = tuple(numbers.scatter_dims_to_operand_dims), tuple(numbers.operand_batching_dims)
    others = tuple(d for d in range(len(table.shape)) if d not in along)
    if len(along) != 1 or tuple(numbers.inserted_window_dims) != along or numbers.update_window_dims:
        return False
    behind = (*(table.shape[d] for d in others), 1)  # the indices and updates of the rows, one of each
    in_order = rows == others and tuple(numbers.scatter_indices_batching_dims) == tuple(range(len(others)))
    return in_order and updates.shape == behind and index.shape == (*behind, 1)


def _is_plus_zero(x: Any) -> bool:
    """Whether a number is 0, and not -0, which the places without an element would keep."""
    number = np.asarray(x)
    return not np.any(number) and not np.any(np.signbit(number.astype(np.float64)))


def _chosen(node: Node) -> list[Node]:
    """The nodes that stand for it."""
    table, index, updates = node.ins
    (along,) = node.eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    clips = node.eqn.params["mode"].name == "CLIP"

    def choose(index, updates):
        column, value = (
            x.reshape(tuple(1 if d == along else n for d, n in enumerate(table.shape))) for x in (index, updates)
        )
        if column.dtype.itemsize < 4:
            column = column.astype(jnp.int32)
        if clips:
            column = clipped(column, table.shape[along])[0]
        here = jax.lax.broadcasted_iota(column.dtype, table.shape, along) == column  # nowhere, if it is outside
        return jnp.where(here, value + jnp.zeros_like(value), jnp.zeros((), table.dtype))  # -0 is added to 0

    return nodes_of(choose, node.eqn, (index, updates))
