"""Products of matrices with the elementwise functions behind them, as one kernel each: what the product gives is in no
memory, unless something else needs it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.matmul import tiles

from .choices import Tunable, digest_of, points_of
from .costs import product_worth
from .frames import ROUNDED, WideFrame, wide
from .layout import Axes, Layout, relate
from .steps import ELEMENTWISE, MOVES, Node, Step, Value
from .tilings import Tiling
from .units import COLUMNS, ROWS, Group, Product

MOST = 2  # products in one kernel


def product_of(nodes: Sequence[Node], group: Group, outputs: Sequence[Value], turned: Sequence[Node]) -> Product | None:
    """Products with a group behind them as one kernel, which writes `outputs`; None if it cannot be one, or is not
    worth it. turned: the nodes that transpose what the products read, if any do."""
    products = [node.eqn for node in nodes]
    if not 1 <= len(products) <= MOST or not all(map(_is_plain, products)):
        return None
    if any(step.name not in ELEMENTWISE - ROUNDED | MOVES - {"iota", "transpose"} for step in group.steps):
        return None
    before = {node.outs[0]: node.ins[0] for node in turned}
    left, made = products[0].ins[0], [step.outs[0] for step in products]
    rights = [before.get(step.ins[1], step.ins[1]) for step in products]  # type: ignore[arg-type]
    lies = {_over(step) != (step.ins[1] in before) for step in products}
    if any(step.ins[0] is not left for step in products) or len({x.shape for x in rights}) > 1 or len(lies) > 1:
        return None
    layout = _layout_of(made[0], group, outputs)
    if layout is None:
        return None
    inputs: Any = [left, *rights, *(v for v in group.inputs if v not in made)]
    all_nodes = [*turned, *nodes, *group.nodes]
    found = Product(all_nodes, inputs, list(outputs), products, group.steps, layout, lies.pop())
    return found if product_worth(*found.sizes, left.dtype, found.steps) else None


def _is_plain(step: Step) -> bool:
    """Whether an equation is a product of the rows of an array with a matrix, of floats of one dtype."""
    if not all(isinstance(x, Value) and 0 not in x.shape for x in step.ins):
        return False
    (x, y), (out,) = step.ins, step.outs
    (over_x, _), batch = step.params["dimension_numbers"]
    rows = len(over_x) == 1 and over_x[0] == len(x.shape) - 1 and len(x.shape) > 1
    if any(batch) or not rows or len(y.shape) != 2 or {x.dtype, y.dtype, out.dtype} != {x.dtype}:
        return False
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return False
    # Kernels multiply floats as they are, which is as precise as a program can ask for, unless it names an algorithm.
    asked = step.params["precision"]
    return asked is None or (isinstance(asked, tuple) and all(isinstance(p, jax.lax.Precision) for p in asked))


def _over(step: Step) -> bool:
    """Whether the sums of a product go along the last axis of its right operand."""
    return step.params["dimension_numbers"][0][1] == (1,)


def _layout_of(product: Value, group: Group, outputs: Sequence[Value]) -> Layout | None:
    """The layout of a group over the rows and columns of a product; None where a value has some of the dimensions that
    make a row, and not all, or lacks an axis as an output."""
    axes = Axes()
    for step in group.steps:
        relate(step, axes)
    of = lambda v: [axes.find((v, i)) for i, n in enumerate(v.shape) if n != 1]
    *rows, column = (axes.find((product, i)) for i in range(len(product.shape)))
    rows = [root for i, root in enumerate(rows) if product.shape[i] != 1]
    if not rows or product.shape[-1] == 1:
        return None
    known: dict[Value, tuple[int, ...]] = {}
    for v in (*group.inputs, *(out for step in group.steps for out in step.outs), *outputs):
        roots = of(v)
        own = (ROWS,) * (roots[: len(rows)] == rows) + (COLUMNS,) * (roots[-1:] == [column])
        if len(roots) != len(rows) * (ROWS in own) + (COLUMNS in own) or (v in outputs and own != (ROWS, COLUMNS)):
            return None
        known[v] = own
    known[product] = (ROWS, COLUMNS)
    return Layout((math.prod(product.shape[:-1]), product.shape[-1]), frozenset(), known)


class ProductKernel:
    """The kernel of a product. Its arrays have a dimension for rows, if they have rows, and one for columns.

    Attributes:
      kernel: the kernel.
    """

    def __init__(self, product: Product):
        self.product, layout = product, product.layout
        m, n, k = product.sizes
        wide, gates = product.inputs[0].dtype.itemsize, len(product.products)
        sides = tiles(m, n, k, wide, gates, transposed=product.transposed)
        self._depth = min(sides["bk"] or k, k)
        tiling = Tiling(layout, (sides["bm"], sides["bn"]))
        types = [jax.ShapeDtypeStruct(layout.shape_of(v), v.dtype) for v in product.outputs]
        name = "_".join(["product", *dict.fromkeys(s.name for s in product.steps if s.name not in MOVES)][:5])
        key = digest_of([*product.products, *product.steps], product.outputs, product.transposed)
        self._tunable = Tunable(
            self._body, types, tiling, name=name, key=key, points=self._points, defaults=self._options(*tiling.sides)
        )
        self.kernel = self._tunable.kernel

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The outputs for the inputs."""
        return self._unpacked(self._tunable(*self._packed(args)))

    @functools.cached_property
    def choice(self) -> tuple[Tiling, str]:
        """How its programs share the elements, and who chose that."""
        shapes = self._shapes()
        return self._tunable.choice(
            [jax.ShapeDtypeStruct(n, v.dtype) for v, n in zip(self.product.inputs, shapes, strict=True)]
        )

    @property
    def tiling(self) -> Tiling:
        return self.choice[0]

    def _options(self, bm: int, bn: int) -> dict[str, int]:
        """What the compiler of a GPU is told for such tiles."""
        wide, gates = self.product.inputs[0].dtype.itemsize, len(self.product.products)
        return gpu_tiles.product_options(bm, bn, wide, gates) if gpu_tiles.measured_warps() else {}

    def _points(self) -> list[dict[str, Any]]:
        """The search space: tiles, with the warps that suit them, and both orders of programs."""
        found = points_of(self._tunable.model)
        return [{**self._options(*point["tile"]), **point} for point in found if "num_warps" not in point]

    def interpret(self, args: Sequence[Any], **choice: Any) -> list[Any]:
        """The same by the interpreter; `choice`: a tile, and an order of programs."""
        return self._unpacked(self.kernel.interpret(*self._packed(args), **choice))

    def _shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the arrays that the kernel reads."""
        count, (m, _, k) = len(self.product.products) + 1, self.product.sizes
        rights = self.product.inputs[1:count]
        more = [self.product.layout.shape_of(v) for v in self.product.inputs[count:]]
        return [(m, k), *(v.shape for v in rights), *more]

    def _packed(self, args: Sequence[Any]) -> list[Any]:
        return [x.reshape(shape) for x, shape in zip(args, self._shapes(), strict=True)]

    def _unpacked(self, outs: Sequence[Any]) -> list[Any]:
        return [y.reshape(v.shape) for v, y in zip(self.product.outputs, outs, strict=True)]

    def _body(self, tiling: Tiling, given: Sequence[Any]) -> None:
        product, frame, (x, *refs) = self.product, tiling.frame(WideFrame), given
        (bm, bn), bk, (i, j) = tiling.sides, self._depth, (frame.ids[ROWS], frame.ids[COLUMNS])
        count = len(product.products)
        rights, rest = refs[:count], refs[count:]
        transposed, k = product.transposed, x.shape[1]

        def right(ref, p):
            return ref.tiles(bn, bk)[j, p].T if transposed else ref.tiles(bk, bn)[p, j]

        def more(p, totals):
            rows = x.tiles(bm, bk)[i, p]
            return [jt.dot(rows, right(ref, p), total) for ref, total in zip(rights, totals, strict=True)]

        zeros = [jnp.zeros((bm, bn), jnp.promote_types(x.dtype, jnp.float32))] * count
        totals = jt.fori(jt.cdiv(k, bk), more, zeros, stages=3)
        for step, total in zip(product.products, totals, strict=True):
            frame.tiles[step.outs[0]] = total.astype(wide(x.dtype))
        for value, ref in zip(product.inputs[count + 1 :], rest):
            frame.load(value, ref)
        for step in product.steps:
            frame.run(step)
        for value, ref in zip(product.outputs, rest[len(product.inputs) - count - 1 :], strict=True):
            frame.store(value, ref)
