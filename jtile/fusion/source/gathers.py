"""Rows that an index array picks, as text: a kernel that loads them."""

from __future__ import annotations

import math

import numpy as np

from jtile.fusion.gathers import fill_of
from jtile.fusion.steps import Node, Value

from .expressions import number

ROWS = 4096  # elements of a tile, about


def is_gather(node: Node) -> bool:
    """Whether an equation picks rows of an array along its first dimension."""
    if node.name != "gather" or not all(isinstance(x, Value) for x in node.ins):
        return False
    (table, index), (out,) = node.ins, node.outs
    d, sizes = node.eqn.params["dimension_numbers"], node.eqn.params["slice_sizes"]
    rows = tuple(d.collapsed_slice_dims) == tuple(d.start_index_map) == (0,) and not d.operand_batching_dims
    last = tuple(range(len(index.shape) - 1, len(out.shape)))
    plain = tuple(d.offset_dims) == last and tuple(sizes) == (1, *table.shape[1:]) and index.shape[-1] == 1
    numbers = table.dtype.kind in "fiub" or table.dtype.name == "bfloat16"
    return rows and plain and numbers and 0 not in (*table.shape, *out.shape)


def gather_text(name: str, node: Node, table: str, index: str) -> list[str]:
    """The lines of a kernel that picks rows of an array [rows, elements] by an index [n]."""
    source = node.ins[0]
    width = math.prod(source.shape[1:])
    mode = node.eqn.params["mode"].name
    rows = max(1, min(ROWS // width, math.prod(node.outs[0].shape) // width))
    fills = mode == "FILL_OR_DROP"
    fill = number(fill_of(node.eqn), np.dtype(node.outs[0].dtype)) if fills else ""
    row = f"{index}.tiles(rows)[i][:, None]"
    return [
        "@jt.kernel(",
        f"    out_type=lambda {table}, {index}: jt.like({table}, shape=({index}.shape[0], {table}.shape[1])),",
        f"    grid=lambda {table}, {index}, *, rows: jt.cdiv({index}.shape[0], rows),",
        ")",
        f"def {name}({table}, {index}, out, *, rows={rows}):",
        f"    i, columns = jt.program_id(0), {table}.shape[1]",
        f"    row = {row if fills else f'jnp.clip({row}, 0, {table}.shape[0] - 1)'}",
        f"    row_tile = jt.load({table}, (row, jt.arange(columns)[None, :])"
        + (f", other={fill})  # rows that are not there" if fills else ")"),
        "    out.tiles(rows, columns)[i, 0] = row_tile",
    ]
