"""Gathers in groups: what an index picks along one axis of an array is loaded where the group needs it.

The array that is picked from, the table, is no tile: a program reads the elements that its tile of indices names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .steps import Node, Operand, Step, Value, is_tile, nodes_of

# By the name of a scatter that a group may have: how two numbers of one element become one.
JOINS = {f"scatter{sign}{name}": how for sign in "-_" for name, how in (("add", "sum"), ("max", "max"), ("min", "min"))}


def is_gather(step: Step) -> bool:
    """Whether an equation picks along one axis of an array, for which a group can load elements."""
    if step.name != "gather" or not all(isinstance(x, Value) and is_tile(x) for x in step.ins):
        return False
    (table, index), numbers = step.ins, step.params["dimension_numbers"]
    if 0 in table.shape or index.shape[-1] != 1 or len(numbers.start_index_map) != 1:
        return False
    along = _along(step)
    batch = set(numbers.operand_batching_dims)
    sizes = tuple(1 if d == along or d in batch else n for d, n in enumerate(table.shape))
    modes = ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")
    if tuple(numbers.collapsed_slice_dims) != (along,) or step.params["mode"].name not in modes:
        return False
    return tuple(step.params["slice_sizes"]) == sizes


def with_flat_indices(nodes: Sequence[Node], outputs: Collection[Operand]) -> list[Node]:
    """The nodes of a program in which one index picks where several did, along axes side by side (`x[i, j]`): along one
    axis that is made of those. outputs: of the program."""
    made = {node.outs[0]: node for node in nodes if node.name == "concatenate"}
    found, flat = [], set()
    for node in nodes:
        index = made.get(node.ins[1]) if node.name == "gather" else None  # type: ignore[arg-type]
        if index is not None and _is_flat(node.eqn, index):
            found += _flattened(node.eqn, index.ins)
            flat.add(index)
        else:
            found.append(node)
    used = {x for node in found for x in node.ins} | {*outputs}
    return [node for node in found if node not in flat or not used.isdisjoint(node.outs)]


def _is_flat(step: Step, index: Node) -> bool:
    """Whether the indices that were put together for a gather can be one, which lies in 32 bits."""
    (table, _), numbers = step.ins, step.params["dimension_numbers"]
    picked = numbers.start_index_map
    if not picked or picked != tuple(range(picked[0], picked[0] + len(picked))) or numbers.operand_batching_dims:
        return False
    sizes = tuple(1 if d in picked else n for d, n in enumerate(table.shape))
    apart = len(index.ins) == len(picked) and all(isinstance(x, Value) and x.shape[-1] == 1 for x in index.ins)
    whole = numbers.collapsed_slice_dims == picked and tuple(step.params["slice_sizes"]) == sizes
    return apart and whole and 0 < math.prod(table.shape[d] for d in picked) < 2**31


def _flattened(step: Step, indices: Sequence[Operand]) -> list[Node]:
    """The nodes that stand for a gather by several indices [..., 1]."""
    numbers, (table, _) = step.params["dimension_numbers"], step.ins
    first, behind = numbers.start_index_map[0], numbers.start_index_map[-1] + 1
    one = jax.lax.GatherDimensionNumbers(numbers.offset_dims, (first,), (first,))
    kept = {name: step.params[name] for name in ("mode", "fill_value", "unique_indices")}

    def pick(table, *indices):
        number, all_inside = jnp.zeros(indices[0].shape, jnp.int32), jnp.ones(indices[0].shape, bool)
        for row, size in zip(indices, table.shape[first:behind], strict=True):
            row, inside = clipped(row, size)
            number, all_inside = number * size + row, all_inside & inside
        if kept["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP:
            number = jnp.where(all_inside, number, jnp.full_like(number, -1))
        flat = table.reshape(*table.shape[:first], -1, *table.shape[behind:])
        sizes = [1 if d == first else n for d, n in enumerate(flat.shape)]
        return jax.lax.gather(flat, number, one, sizes, **kept)

    return nodes_of(pick, step, (table, *indices))


def tiles_of(step: Step) -> tuple[Operand, ...]:
    """The operands of a step that are tiles: all but the table of a gather or scatter."""
    return step.ins[1:] if step.name == "gather" or step.name in JOINS else step.ins


def _along(step: Step) -> int:
    (along,) = step.params["dimension_numbers"].start_index_map
    return int(along)


def index_dimensions(step: Step) -> list[int]:
    """The dimensions of what a gather gives that its index has, in their order."""
    offsets = step.params["dimension_numbers"].offset_dims
    return [i for i in range(len(step.outs[0].shape)) if i not in offsets]


def table_dimensions(step: Step) -> tuple[list[int], list[int]]:
    """The dimensions of what a gather gives that those of its table in front of the picked one are, and those behind
    it; without those of one element."""
    numbers, of_index = step.params["dimension_numbers"], index_dimensions(step)
    batch = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    rest, along = iter(numbers.offset_dims), _along(step)
    sides: tuple[list[int], list[int]] = ([], [])
    for d, n in enumerate(step.ins[0].shape):
        if d != along:
            at = of_index[batch[d]] if d in batch else next(rest)
            if n != 1:
                sides[d > along].append(at)
    return sides


def table_axes(step: Step, layout: Any) -> tuple[list[int], list[int]]:
    """The axes of a layout that the table of a gather has in front of the picked dimension, and those behind it."""
    (out,) = step.outs
    long = [i for i, n in enumerate(out.shape) if n != 1]
    owner, left, own = {}, 1, iter(layout.axes[out])
    for i in long:
        if left <= 1:
            axis = next(own)
            left = layout.sizes[axis]
        owner[i] = axis
        left //= out.shape[i]
    front, behind = table_dimensions(step)
    return [*dict.fromkeys(owner[i] for i in front)], [*dict.fromkeys(owner[i] for i in behind)]


def table_shape(step: Step, layout: Any) -> tuple[int, ...]:
    """The shape of the array that stands for the table of a gather."""
    front, behind = table_axes(step, layout)
    rows = step.ins[0].shape[_along(step)]
    return (*(layout.sizes[a] for a in front), rows, *(layout.sizes[a] for a in behind))


def fill_of(step: Step) -> Any:
    """What stands for elements outside of the table; None where indices are clipped."""
    if step.params["mode"].name != "FILL_OR_DROP":
        return None
    given, dtype = step.params["fill_value"], np.dtype(step.outs[0].dtype)
    if given is not None:
        return given
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
    return True if dtype.kind == "b" else np.nan


def clipped(row: Any, rows: int) -> tuple[Any, Any]:
    """(indices that all lie in 0 to rows - 1, whether the ones given did), for indices of any integer type."""
    if row.dtype.itemsize < 4:
        row = row.astype(jnp.int32)
    last = jnp.full(row.shape, rows - 1, row.dtype)
    inside = row <= last
    row = jnp.minimum(row, last)
    if jnp.issubdtype(row.dtype, jnp.signedinteger):
        none = jnp.zeros_like(row)
        inside = inside & (row >= none)
        row = jnp.maximum(row, none)
    return row.astype(jnp.int32), inside
