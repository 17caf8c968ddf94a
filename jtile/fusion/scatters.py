"""Scatters out of groups: what a group computes is added to the elements of a table that indices name.

Each program has a table of its own, in memory that no other program sees, and adds to it one element after another; XLA
joins the few tables of the programs, and the array that was scattered into, so that results are the same on every run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

import jtile as jt

from .gathers import JOINS, clipped
from .steps import Node, Operand, Step, Value, is_tile

_ATOMIC = {"sum": jt.atomic_add, "max": jt.atomic_max, "min": jt.atomic_min}


def is_scatter(step: Step) -> bool:
    return step.name in JOINS


def scatter_of(node: Node, made: Mapping[Value, Node]) -> tuple[Step, list[Node]] | None:
    """A scatter as the step of a group: its operands are the table, a number along each dimension of the table that is
    picked, and the updates; with it the nodes that put the numbers together. None for those that no group takes. made:
    the node of each value."""
    if node.name not in JOINS or not all(isinstance(x, Value) and is_tile(x) for x in node.ins):
        return None
    (table, index, updates), numbers = node.ins, node.eqn.params["dimension_numbers"]
    picked = tuple(numbers.scatter_dims_to_operand_dims)
    if tuple(sorted(picked)) != tuple(numbers.inserted_window_dims) or numbers.operand_batching_dims:
        return None
    rest = [n for d, n in enumerate(table.shape) if d not in picked]
    whole = [updates.shape[i] for i in numbers.update_window_dims] == rest
    if not picked or not whole or 0 in (*table.shape, *updates.shape) or table.dtype == bool:
        return None
    parts: tuple[Operand, ...] = (index,)
    before: list[Node] = []
    if len(picked) > 1:
        maker = made.get(index)  # type: ignore[arg-type]
        if maker is None or maker.name != "concatenate" or len(maker.ins) != len(picked):
            return None
        parts, before = maker.ins, [maker]
    if any(not isinstance(x, Value) or not is_tile(x) or x.shape[-1:] != (1,) for x in parts):
        return None
    return dataclasses.replace(node.eqn, ins=(table, *parts, updates)), before


def add_tile(frame: Any, step: Step, ref: Any, ends: Any) -> None:
    """Adds the updates of a program's tile to its table. ends: which elements of the tile lie within the axes, or
    None for all."""
    numbers, (_, *parts, updates) = step.params["dimension_numbers"], step.ins
    picked, own = list(numbers.scatter_dims_to_operand_dims), iter(numbers.update_window_dims)
    shape = frame.shape_of(updates)
    place, inside = [], ends
    for d, n in enumerate(step.ins[0].shape):
        if d in picked:
            row, here = clipped(frame.read(parts[picked.index(d)]), n)
            place.append(row)
            if step.params["mode"].name != "CLIP":
                inside = here if inside is None else inside & here
        elif n == 1:
            next(own)
            place.append(jnp.zeros((1,) * len(shape), jnp.int32))
        else:
            place.append(frame.numbers(frame.axis_of(updates, next(own))))
    value = frame.spread(updates, updates).astype(ref.dtype)
    mask = None if inside is None else jnp.broadcast_to(inside, shape)
    _ATOMIC[JOINS[step.name]](ref, tuple(jnp.broadcast_to(p, shape) for p in place), value, mask)
