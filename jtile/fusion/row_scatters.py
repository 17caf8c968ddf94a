"""Scatters of whole rows, `table.at[index].add(rows)` or `.set(rows)`, with the elementwise functions that compute the
rows, as one kernel each, which writes to the table in place.

On CPUs each program has some of the columns and goes through all rows in their order: no two programs meet, duplicates
in the index come one after another, and results are the same on every run. On GPUs programs have some of the rows and
add by atomic instructions, in any order, as XLA's code does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops._shapes import fit, machine

from .costs import rows_worth
from .frames import Frame
from .gathers import clipped
from .layout import Layout, layout_of
from .steps import Node, Step, Value, applies, is_tile

if TYPE_CHECKING:
    from .groups import Cutter

# By the name of a scatter: what becomes of the element that is there, and the one that comes.
_NEW: Mapping[str, Callable[[Any, Any], Any]] = {"scatter": lambda old, new: new} | {
    f"scatter{sign}{name}": how
    for sign in "-_"
    for name, how in (("add", jnp.add), ("mul", jnp.multiply), ("max", jnp.maximum), ("min", jnp.minimum))
}
ADDS = frozenset(["scatter-add", "scatter_add"])
N, D = 0, 1  # the axes of the rows that are scattered: rows, and elements of each
ROOM = 4096  # elements of the rows that a program of a CPU computes at once
MOST = 64  # of these rows
LANES = 16  # elements that a program of a CPU has of each row, at least


@dataclasses.dataclass(frozen=True, eq=False)
class RowScatter:
    """A scatter of rows, and what computes them.

    Attributes:
      nodes: the elementwise nodes that compute the rows, and the scatter.
      inputs: what the rows are computed from, or the rows; the index; the table. outputs: the new table.
      layout: the axes of the rows, which are computed by `steps`: their number, and their elements.
    """

    nodes: list[Node]
    inputs: list[Value]
    outputs: list[Value]
    steps: list[Step]
    layout: Layout

    by_equations = True  # the derivative gathers

    @property
    def scatter(self) -> Step:
        return self.nodes[-1].eqn


def is_of_rows(step: Step) -> bool:
    """Whether an equation scatters whole rows by one index along the first axis of a table."""
    if step.name not in _NEW or applies(step) or not all(isinstance(x, Value) and is_tile(x) for x in step.ins):
        return False
    (table, index, updates), numbers = step.ins, step.params["dimension_numbers"]
    if tuple(numbers.scatter_dims_to_operand_dims) != (0,) or tuple(numbers.inserted_window_dims) != (0,):
        return False
    if numbers.operand_batching_dims or 0 in (*table.shape, *updates.shape) or table.dtype == bool:
        return False
    first = len(updates.shape) - len(table.shape) + 1
    own = tuple(numbers.update_window_dims) == tuple(range(first, len(updates.shape)))
    return own and index.shape == (*updates.shape[:first], 1) and updates.shape[first:] == table.shape[1:]


def row_scatter_of(node: Node, before: Sequence[Node], constants: Sequence[Node] = ()) -> RowScatter | None:
    """The unit of a scatter of rows that nodes of `before` compute, with those that make constants for them; None if
    these have other axes than rows and their elements."""
    table, index, updates = node.ins
    assert isinstance(table, Value)
    assert isinstance(index, Value)
    assert isinstance(updates, Value)
    rows, row = index.shape[:-1], table.shape[1:]
    sizes = math.prod(rows), math.prod(row)
    if not before:
        layout = Layout(sizes, frozenset(), {updates: (N, D)})
        return RowScatter([node], [updates, index, table], [*node.outs], [], layout)
    steps = [step for one in (*constants, *before) for step in one.steps]
    made = {v for step in steps for v in step.outs}
    read = [*dict.fromkeys(x for step in steps for x in step.ins if isinstance(x, Value) and x not in made)]
    layout = layout_of(steps, [updates, *read], apart=[(updates, len(rows))])
    if layout is None or layout.whole or layout.sizes != sizes or layout.axes[updates] != (N, D):
        return None
    if not all(layout.axes[v] in ((), (N,), (D,), (N, D)) for v in read):
        return None
    return RowScatter([*constants, *before, node], [*read, index, table], [*node.outs], steps, layout)


class RowScatterKernel:
    """The kernel of a scatter of rows.

    Attributes:
      kernel: the kernel. programs: how many it has. share: what each of them does.
    """

    def __init__(self, unit: RowScatter):
        self.unit, (n, d) = unit, unit.layout.sizes
        self.sides = _sides(n, d)
        blocks = jt.cdiv(d, self.sides[D])
        grid = blocks if machine().whole else (jt.cdiv(n, self.sides[N]), blocks)
        (out,), last = unit.outputs, len(unit.inputs) - 1
        table = jax.ShapeDtypeStruct((out.shape[0], d), out.dtype)
        scratch = [jax.ShapeDtypeStruct(self.sides, out.dtype)] if machine().whole and unit.steps else None
        names = [s.name for s in unit.steps if s.name != "broadcast_in_dim"]
        name = "_".join([*dict.fromkeys(["rows", *names[:4], unit.scatter.name])]).replace("-", "_")
        body = self._one_after_another if machine().whole else self._at_once
        how = {"out_type": table, "grid": grid, "alias": {last: 0}, "scratch": scratch, "name": name}
        self.kernel = jt.call(lambda *refs: body(refs), **how)
        self.programs = math.prod(grid) if isinstance(grid, tuple) else grid
        rows, columns = self.sides
        self.share = f"each scatters {columns} elements of {'every row' if machine().whole else f'{rows} rows'}"

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The new table, for the inputs."""
        return [self.kernel(*self._packed(args)).reshape(self.unit.outputs[0].shape)]

    def interpret(self, args: Sequence[Any]) -> list[Any]:
        """The same by the interpreter."""
        return [self.kernel.interpret(*self._packed(args)).reshape(self.unit.outputs[0].shape)]

    def _packed(self, args: Sequence[Any]) -> list[Any]:
        *read, index, table = args
        shapes = map(self.unit.layout.shape_of, self.unit.inputs[: len(read)])
        of_rows = [x.reshape(shape) for x, shape in zip(read, shapes, strict=True)]
        return [*of_rows, index.reshape(-1), table.reshape(table.shape[0], -1)]

    def _rows(self, read: Sequence[Any], ids: dict[int, Any]) -> Any:
        """The tile of rows of these axes' blocks."""
        unit, updates = self.unit, self.unit.scatter.ins[-1]
        frame = Frame(unit.layout, self.sides, ids, {})
        for value, ref in zip(unit.inputs, read):
            frame.load(value, ref)
        for step in unit.steps:
            frame.run(step)
        return frame.spread(updates, updates).astype(unit.outputs[0].dtype)

    def _one_after_another(self, refs: Sequence[Any]) -> None:
        """The body for CPUs: all rows, some of the columns."""
        *read, index, _ = refs[: len(self.unit.inputs)]
        out, *scratch = refs[len(self.unit.inputs) :]
        (bn, bd), (n, _), j = self.sides, self.unit.layout.sizes, jt.program_id(0)
        new, clips = _NEW[self.unit.scatter.name], _clips(self.unit.scatter)
        olds = out.tiles(1, bd)

        def block(b, none):
            if scratch:
                scratch[0][...] = self._rows(read, {N: b, D: j})

            def row(r, none):
                at = b * bn + r
                i, inside = clipped(index[at], out.shape[0])
                more = scratch[0][jt.ds(r, 1), :] if scratch else read[0].tiles(1, bd)[at, j].astype(out.dtype)
                old = olds[i, j]
                more = new(old, more)
                olds[i, j] = more if clips else jnp.where(jnp.broadcast_to(inside, more.shape), more, old)
                return none

            return jt.fori(jnp.minimum(bn, n - b * bn), row, none)

        jt.fori(jt.cdiv(n, bn), block, jnp.int32(0))

    def _at_once(self, refs: Sequence[Any]) -> None:
        """The body for GPUs: some of the rows, some of the columns."""
        *read, index, _ = refs[: len(self.unit.inputs)]
        out, (bn, bd), (n, d) = refs[len(self.unit.inputs)], self.sides, self.unit.layout.sizes
        b, j = jt.program_id(0), jt.program_id(1)
        i, inside = clipped(index.tiles(bn)[b], out.shape[0])
        here = b * bn + jt.arange(bn) < n
        inside = here if _clips(self.unit.scatter) else here & inside
        columns = j * bd + jt.arange(bd)
        spread = lambda x: jnp.broadcast_to(x, (bn, bd))
        place = spread(i[:, None]), spread(columns[None])
        mask = spread(inside[:, None]) & spread((columns < d)[None])
        more = self._rows(read, {N: b, D: j})
        if self.unit.scatter.name in ADDS:
            jt.atomic_add(out, place, more, mask)
        else:
            jt.store(out, place, more, mask)


def _clips(step: Step) -> bool:
    return step.params["mode"].name == "CLIP"


def _sides(n: int, d: int) -> tuple[int, int]:
    """How many rows a program computes at once, and how many elements it has of each."""
    if not machine().whole:
        bd = fit(d, 1024)
        return fit(n, max(ROOM_GPU // bd, 1)), bd
    bd = min(jt.cdiv(jt.cdiv(d, machine().programs // 2), LANES) * LANES, d)
    return fit(n, max(min(ROOM // bd, MOST), 1)), bd


ROOM_GPU = 4096  # elements of the rows that a program of a GPU adds


def take_rows(cutter: Cutter, units: list[Any], taken: list[list[int]], left: list[tuple[int, list[int], str]]) -> None:
    """Makes kernels of scatters of rows, with the elementwise nodes that compute nothing but these rows: those of a
    kernel all together, or none."""
    for k, node in enumerate(cutter.nodes):
        if any(k in those for those in taken) or not is_of_rows(node.eqn):
            continue
        before = cutter.needed_for([k], 2)[1:]
        own = {k, *before}
        whole = all(own.isdisjoint(those) or own.issuperset(those) for those in taken)
        for some in ([before] if before and whole else []) + [[]]:
            found = row_scatter_of(node, [cutter.nodes[m] for m in some], cutter.constants_of(some))
            together = sorted([k, *some])
            kept = [u for u, those in enumerate(taken) if {*together}.isdisjoint(those)]
            if found is None or not cutter.is_convex(together):
                continue
            if cutter.sorted_order([together, *(taken[u] for u in kept)]) is None:
                continue
            if (why := rows_worth(node.eqn, found.steps)) is not None:
                left.append((k, [k], why))
                break
            units[:], taken[:] = [*(units[u] for u in kept), found], [*(taken[u] for u in kept), together]
            left[:] = [entry for entry in left if {*together}.isdisjoint(entry[1])]
            break
