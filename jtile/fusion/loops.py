"""Loops: a scan whose body is steps over axes that all of it has becomes one kernel. Its programs take some of the
elements each, keep their carry in registers, and run all rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtile.language._equations import scan_counts

from .costs import has_room, loop_worth
from .layout import Layout, layout_of
from .steps import Constant, Node, Operand, Step, Value, program_of


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A `jax.lax.scan` in a program.

    Attributes:
      nodes: the scan. inputs: what it reads. outputs: those of its values that something needs.
      steps: the steps of one round. layout: that of their values, which have no axis for the rounds.
      constants, carry, elements: what a round reads: the same in all rounds, from the one before, of its own.
      next: the carry for the round after. written: what `outputs` are of: a number of the carry, or a value of a round.
      length: how many rounds there are. reverse: whether the last one comes first.
      makers: the equations that give the values of the body.
    """

    nodes: list[Node]
    inputs: list[Value]
    outputs: list[Value]
    steps: list[Step]
    layout: Layout
    constants: list[Value]
    carry: list[Value]
    elements: list[Value]
    next: list[Operand]
    written: list[int | Value]
    length: int
    reverse: bool
    makers: dict[Value, Any]

    @property
    def by_equations(self) -> bool:
        """Whether a function with a derivative rule of its own is in its body."""
        inner = self.nodes[0].eqn.params["jaxpr"].jaxpr
        return any(eqn.primitive.name.startswith("custom_") for eqn in inner.eqns)

    def run(self, args: Sequence[Any]) -> Sequence[Any]:
        """The outputs by `jax.lax.scan`."""
        given = dict(zip(self.inputs, args, strict=True))
        values = self.nodes[0].run([given[x] if isinstance(x, Value) else constant(x) for x in self.nodes[0].ins])
        made = dict(zip(self.nodes[0].outs, values, strict=True))
        return [made[v] for v in self.outputs]


def constant(x: Constant) -> np.ndarray:
    return np.asarray(x.value, x.dtype)


def loop_of(node: Node, used: Collection[Value], *, everything: bool = False) -> Loop | None:
    """The loop of a scan; None if no kernel takes its body. `used`: its values that something needs; `everything`: a
    loop is a kernel, worth it or not."""
    if node.name != "scan" or not node.eqn.params["length"]:
        return None
    params, program = node.eqn.params, program_of(node.eqn.params["jaxpr"])
    first, carried = scan_counts(params)
    last = first + carried
    if program.constants or not program.nodes or any(not inner.steps for inner in program.nodes):
        return None
    carry, after = program.inputs[first:last], program.outputs[: last - first]
    results: list[int | Operand] = [*range(last - first), *program.outputs[last - first :]]
    written = [r for v, r in zip(node.outs, results, strict=True) if v in used]
    if any(isinstance(r, Constant) for r in written) or not all(map(_has_tiles, (*program.inputs, *after))):
        return None
    steps = [step for inner in program.nodes for step in inner.steps]
    ends = [x for x in (*program.inputs, *program.outputs) if isinstance(x, Value)]
    layout = layout_of(steps, ends, same=list(zip(carry, after, strict=True)))
    of_written = [carry[r] if isinstance(r, int) else r for r in written]
    if layout is None or not all(isinstance(v, Value) and layout.covers(v) for v in of_written):
        return None
    if not has_room(layout) or 0 in layout.sizes or not (everything or loop_worth(layout, params["length"], steps)):
        return None
    return Loop(
        [node],
        [x for x in dict.fromkeys(node.ins) if isinstance(x, Value)],
        [v for v in node.outs if v in used],
        steps,
        layout,
        program.inputs[:first],
        carry,
        program.inputs[last:],
        after,
        [r for r in written if not isinstance(r, Constant)],
        params["length"],
        params["reverse"],
        program.makers,
    )


def _has_tiles(x: Operand) -> bool:
    return x.dtype != jax.dtypes.float0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended) and x.dtype.kind != "c"
