"""Products of matrices as text, with what is computed of their results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jtile.fusion.layout import Layout, layout_of
from jtile.fusion.steps import Node, Value
from jtile.fusion.tilings import Tiling
from jtile.fusion.units import Group, Plan

from .expressions import Text, dtype_text
from .frames import Shape
from .glue import precision_text
from .kernels import GroupText, without_unused

SIDE = 64  # the side of a tile, at most


def is_product(node: Node) -> bool:
    """Whether an equation is a product of two matrices that a kernel takes."""
    if node.name != "dot_general" or not all(isinstance(x, Value) and len(x.shape) == 2 for x in node.ins):
        return False
    (x, y), (out,) = node.ins, node.outs
    (over_x, _), batch = node.eqn.params["dimension_numbers"]
    kinds = [jnp.issubdtype(v.dtype, jnp.floating) for v in (x, y, out)]
    exact = x.dtype == y.dtype and str(x.dtype) in ("int8", "uint8") and str(out.dtype) == "int32"
    if len(over_x) != 1 or any(batch) or 1 in (*x.shape, *y.shape) or 0 in (*x.shape, *y.shape):
        return False
    return exact or (all(kinds) and x.dtype == y.dtype and precision_text(node.eqn.params["precision"]) is not None)


def products_of(plan: Plan) -> tuple[dict[int, Group], dict[int, int]]:
    """(by the number of each product the group of its kernel; of those kernels that do more than the product the places
    in the plan's order where they run)."""
    program, found, places = plan.program, {}, {}
    results = {v for v in program.outputs if isinstance(v, Value)}
    taken: set[Group] = set()
    for k in (u for u in plan.order if isinstance(u, int) and is_product(program.nodes[u])):
        (out,) = program.nodes[k].outs
        users = [at for at, u in enumerate(plan.order) if out in _read(plan, u)]
        group = plan.order[users[0]] if len(users) == 1 else None
        over = _over(group, out) if isinstance(group, Group) and group not in taken and out not in results else None
        if over is not None:
            found[k], places[k] = over, users[0]
            taken.add(group)  # type: ignore[arg-type]
        else:
            layout = Layout(tuple(out.shape), frozenset(), {out: (0, 1)})
            found[k] = Group([], [out], [out], layout, [])
    return found, places


def _read(plan: Plan, unit: Any) -> Any:
    return plan.program.nodes[unit].ins if isinstance(unit, int) else unit.inputs


def _over(group: Group, out: Value) -> Group | None:
    """A group over the rows and columns of a product, if it is elementwise over its tiles; else None."""
    layout = layout_of(group.steps, [*group.inputs, *group.outputs], apart=[(out, 0), (out, 1)])
    if layout is None or layout.sizes != tuple(out.shape) or layout.axes[out] != (0, 1) or layout.whole | layout.late:
        return None
    return dataclasses.replace(group, layout=layout)


class ProductText(GroupText):
    """The text of a product's kernel. Its first two inputs stand for the operands, which may be others of its inputs,
    too.

    Attributes:
      operands: the values that the first two inputs stand for.
    """

    def __init__(self, name: str, node: Node, group: Group, called: dict[Value, str]):
        (self.product,), self.node = node.outs, node
        self.operands = {Value(x.aval): x for x in node.ins if isinstance(x, Value)}
        (over_x,), (over_y,) = node.eqn.params["dimension_numbers"][0]
        x, y = self.operands
        self._dims = {x: ["k", 0] if over_x == 0 else [0, "k"], y: ["k", 1] if over_y == 0 else [1, "k"]}
        names = {v: called.get(of, "xy"[n]) for n, (v, of) in enumerate(self.operands.items())}
        inputs = [x, y, *(v for v in group.inputs if v is not self.product)]
        sides = tuple(min(n, SIDE) for n in group.layout.sizes)
        given = Group(group.nodes, inputs, group.outputs, group.layout, [])
        super().__init__(name, given, Tiling(group.layout, sides), {**names, **called})

    def dims(self, value: Value) -> list[Any]:
        return self._dims[value] if value in self._dims else super().dims(value)

    def size(self, layout: Layout, axis: Any, outs: bool = True) -> str:
        found = (f"{ref}.shape[{self.dims(v).index(axis)}]" for v, ref in self.refs.items() if axis in self.dims(v))
        return next(found)

    def lines(self) -> list[str]:
        """The whole kernel."""
        frame = self._frame([0, 1])
        body, depth = frame.body, self.names.new("depth")
        (x, y), out = self.operands, self.product
        self.metas[depth] = min(x.shape[self.dims(x).index("k")], SIDE)
        for a, letter in enumerate("ij"):
            frame.places[a] = self.names.new(letter)
            self.grid.append(f"jt.cdiv({self.size(self.layout, a)}, {frame.sides[a]})")
        for v in self.outputs:
            self._type(v, [0, 1])
        places = {0: frame.places[0], 1: frame.places[1], "k": self.names.new("k")}
        sides = {0: frame.sides[0], 1: frame.sides[1], "k": depth}
        total = self.names.new("total")
        wide = np.dtype(np.int32) if out.dtype.kind == "i" else jnp.promote_types(out.dtype, jnp.float32)
        body.line(f"{total} = jnp.zeros(({sides[0]}, {sides[1]}), {dtype_text(wide)})")
        body.line(f"for {places['k']} in jt.range(jt.cdiv({self.size(self.layout, 'k')}, {depth})):")
        tiles = []
        for v, first in ((x, 0), (y, "k")):
            own = self.dims(v)
            text = f"{self.refs[v]}.tiles({', '.join(sides[d] for d in own)})[{', '.join(places[d] for d in own)}]"
            tiles.append(text if own[0] == first else f"{text}.T")
        precision = precision_text(self.node.eqn.params["precision"])
        body.line(f"    {total} = jt.dot({', '.join(tiles)}, {total}{precision})")
        made = Text(total if wide == out.dtype else f"{total}.astype({dtype_text(out.dtype)})", shape=Shape([0, 1]))
        body.give(out, made, self.called.get(out, "product"))
        for v, ref in self.refs.items():
            if v not in self.operands:
                frame.load(v, ref, f"{ref}_tile")
        for step in self.steps:
            frame.run(step)
        for v, ref in self.outs.items():
            frame.store(v, ref, None, body.read(self._same.get(v, v)))
        locals_ = [(frame.places[a], f"jt.program_id({a})") for a in (0, 1)]
        return [*self.head(), *without_unused(body.lines, locals_)]
