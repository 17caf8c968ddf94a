"""Products of matrices with the elementwise functions before and behind them, as one kernel each: what these give is in
no memory, unless something else needs it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile._cores import cores_here
from jtile.ops import gpu_tiles
from jtile.ops._shapes import fit, machine
from jtile.ops.matmul import tiles

from .choices import Tunable, digest_of, points_of
from .costs import norm_worth, product_worth, prologue_worth
from .frames import ROUNDED, WideFrame, wide
from .layout import Axes, Layout, relate
from .operands import LEFT, RIGHT, Source, Tiles, source_of, source_of_rows
from .steps import ELEMENTWISE, MOVES, Node, Step, Value, size_of
from .tilings import Tiling
from .units import COLUMNS, ROWS, Group, Product

MOST = 2  # products in one kernel


def product_of(
    nodes: Sequence[Node],
    group: Group | None,
    outputs: Sequence[Value],
    turned: Sequence[Node],
    before: Sequence[Node] = (),
    constants: Sequence[Node] = (),
    norm: Group | None = None,
) -> Product | None:
    """Products with a group behind them, if there is one, as one kernel, which writes `outputs`; None if it cannot be
    one, or is not worth it. turned: the nodes that transpose what the products read, if any do; before: the nodes that
    compute what they read, with those that make constants for them; norm: a group among these that computes the rows of
    the left operand, and sums along them."""
    products, behind = [node.eqn for node in nodes], group.steps if group else []
    if not 1 <= len(products) <= MOST or not all(map(_is_plain, products)):
        return None
    if any(step.name not in ELEMENTWISE - ROUNDED | MOVES - {"iota", "transpose"} for step in behind):
        return None
    first, made = products[0], [step.outs[0] for step in products]
    if any(step.ins[0] is not first.ins[0] or step.outs[0].shape != made[0].shape for step in products):
        return None
    over = {node.outs[0]: node.ins[0] for node in turned}
    if norm is None:
        left = source_of(first, LEFT, before, constants) or _as_it_is(first, LEFT, {})
    elif (left := source_of_rows(first.ins[0], norm, first.ins[0].shape[-1])) is None:
        return None
    rights = [source_of(step, RIGHT, before, constants) or _as_it_is(step, RIGHT, over) for step in products]
    if len({source.transposed for source in rights if source.layout is None}) > 1:
        return None
    extras = [v for v in group.inputs if v not in made] if group else []
    layout = _layout_of(made[0], behind, extras, outputs)
    computed = {v for source in (left, *rights) for step in source.steps for v in step.outs}
    if layout is None or any(computed.isdisjoint(node.outs) for node in before if node.steps):
        return None
    inputs = [*left.inputs, *(v for source in rights for v in source.inputs), *extras]
    all_nodes = [*constants, *before, *turned, *nodes, *(group.nodes if group else ())]
    found = Product(all_nodes, inputs, list(outputs), products, behind, layout, [left, *rights])
    m, n, k = found.sizes
    if before:
        read = max((source.read for source in rights if source.layout is not None), default=None)
        worth = prologue_worth if norm is None else norm_worth
        return found if worth(m, n, k, first.ins[0].dtype, read) else None
    transposed, beside = any(source.transposed for source in rights), sum(size_of(v) == m * n for v in extras)
    how = {"gates": len(products), "transposed": transposed, "beside": beside}
    return found if product_worth(m, n, k, first.ins[0].dtype, found.steps, **how) else None


def _as_it_is(step: Step, side: int, over: Mapping[Value, Value]) -> Source:
    """The source of an operand that is in memory, maybe transposed there."""
    x = step.ins[side]
    assert isinstance(x, Value)
    value = over.get(x, x)
    return Source(value, [value], transposed=side == RIGHT and _over(step) != (x in over))


def _is_plain(step: Step) -> bool:
    """Whether an equation is a product of the rows of an array with a matrix, of floats of one dtype, whose sums are
    rounded to it or to float32, or of bytes, whose sums are of 32 bits."""
    if not all(isinstance(x, Value) and 0 not in x.shape for x in step.ins):
        return False
    (x, y), (out,) = step.ins, step.outs
    (over_x, _), batch = step.params["dimension_numbers"]
    rows = len(over_x) == 1 and over_x[0] == len(x.shape) - 1 and len(x.shape) > 1
    if any(batch) or not rows or len(y.shape) != 2 or x.dtype != y.dtype:
        return False
    if x.dtype.name in ("int8", "uint8"):
        return out.dtype == jnp.int32
    if not jnp.issubdtype(x.dtype, jnp.floating) or out.dtype not in (x.dtype, jnp.promote_types(x.dtype, jnp.float32)):
        return False
    # Kernels multiply floats as they are, which is as precise as a program can ask for, unless it names an algorithm.
    asked = step.params["precision"]
    return asked is None or (isinstance(asked, tuple) and all(isinstance(p, jax.lax.Precision) for p in asked))


def _over(step: Step) -> bool:
    """Whether the sums of a product go along the last axis of its right operand."""
    return step.params["dimension_numbers"][0][1] == (1,)


def _layout_of(
    product: Value, steps: Sequence[Step], inputs: Sequence[Value], outputs: Sequence[Value]
) -> Layout | None:
    """The layout of steps over the rows and columns of a product; None where a value has some of the dimensions that
    make a row, and not all, or lacks an axis as an output."""
    axes = Axes()
    for step in steps:
        relate(step, axes)
    of = lambda v: [axes.find((v, i)) for i, n in enumerate(v.shape) if n != 1]
    *rows, column = (axes.find((product, i)) for i in range(len(product.shape)))
    rows = [root for i, root in enumerate(rows) if product.shape[i] != 1]
    if not rows or product.shape[-1] == 1:
        return None
    known: dict[Value, tuple[int, ...]] = {}
    for v in (*inputs, *(out for step in steps for out in step.outs), *outputs):
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
        bm, bn, self._depth = _sides(product)
        tiling = Tiling(layout, (bm, bn))
        types = [jax.ShapeDtypeStruct(layout.shape_of(v), v.dtype) for v in product.outputs]
        name = "_".join(["product", *dict.fromkeys(s.name for s in product.steps if s.name not in MOVES)][:5])
        before = [step for source in product.sources for step in source.steps]
        how = [(source.inner, source.transposed) for source in product.sources]
        key = lambda: digest_of([*before, *product.products, *product.steps], product.outputs, how)
        rows = [jax.ShapeDtypeStruct((bm, product.sizes[2]), s.value.dtype) for s in product.sources if s.whole]
        options = self._options(*tiling.sides)
        self._tunable = Tunable(
            self._body, types, tiling, name=name, key=key, points=self._points, defaults=options, scratch=rows
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
        wide, gates = self.product.products[0].ins[0].dtype.itemsize, len(self.product.products)
        return gpu_tiles.product_options(bm, bn, wide, gates) if gpu_tiles.measured_warps() else {}

    def _points(self) -> list[dict[str, Any]]:
        """The search space: tiles, with the warps that suit them, and both orders of programs."""
        found = points_of(self._tunable.model)
        if any(source.whole for source in self.product.sources):  # which has room for so many rows
            found = [point for point in found if point["tile"][ROWS] == self._tunable.model.sides[ROWS]]
        return [{**self._options(*point["tile"]), **point} for point in found if "num_warps" not in point]

    def interpret(self, args: Sequence[Any], **choice: Any) -> list[Any]:
        """The same by the interpreter; `choice`: a tile, and an order of programs."""
        return self._unpacked(self.kernel.interpret(*self._packed(args), **choice))

    def _shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the arrays that the kernel reads."""
        product, (_, _, k) = self.product, self.product.sizes
        shapes = [shape for source in product.sources for shape in source.shapes(k)]
        return shapes + [product.layout.shape_of(v) for v in product.inputs[len(shapes) :]]

    def _packed(self, args: Sequence[Any]) -> list[Any]:
        return [x.reshape(shape) for x, shape in zip(args, self._shapes(), strict=True)]

    def _unpacked(self, outs: Sequence[Any]) -> list[Any]:
        return [y.reshape(v.shape) for v, y in zip(self.product.outputs, outs, strict=True)]

    def _body(self, tiling: Tiling, given: Sequence[Any]) -> None:
        product, frame, refs = self.product, tiling.frame(WideFrame), iter(given)
        (bm, bn), bk, (i, j) = tiling.sides, self._depth, (frame.ids[ROWS], frame.ids[COLUMNS])
        (_, _, k), dtype = product.sizes, product.products[0].ins[0].dtype
        left, *rights = [
            Tiles(source, [next(refs) for _ in source.inputs], side, place, outer, bk, k, given[-1])
            for source, (side, place, outer) in zip(product.sources, [(LEFT, i, bm)] + [(RIGHT, j, bn)] * MOST)
        ]

        def more(p, totals):
            rows = left.at(p)
            return [jt.dot(rows, right.at(p), total) for right, total in zip(rights, totals, strict=True)]

        wider = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else jnp.int32
        totals = jt.fori(jt.cdiv(k, bk), more, [jnp.zeros((bm, bn), wider)] * len(rights), stages=3)
        for step, total in zip(product.products, totals, strict=True):
            frame.tiles[step.outs[0]] = total.astype(wide(step.outs[0].dtype))
        for value in product.extras:
            frame.load(value, next(refs))
        for step in product.steps:
            frame.run(step)
        for value, ref in zip(product.outputs, refs):  # what is left then is the room of a source
            frame.store(value, ref)


FEW_ROWS = 16  # of which the sums of many columns stay in registers
WIDE_AND_FLAT, NARROW_AND_DEEP = (256, 64), (32, 512)  # columns and terms of a computed tile on CPUs
MOST_ROWS = 256  # of a tile with a computed operand


def _sides(product: Product) -> tuple[int, int, int]:
    """Rows and columns of a tile, and terms of a sum that a program takes at once."""
    m, n, k = product.sizes
    wide, gates, rights = product.products[0].ins[0].dtype.itemsize, len(product.products), product.sources[1:]
    inner = math.lcm(*(source.inner for source in product.sources))
    if machine().whole and inner * k and any(source.layout is not None for source in product.sources):
        bn, bk = WIDE_AND_FLAT if m <= FEW_ROWS else NARROW_AND_DEEP
        while bn > NARROW_AND_DEEP[0] and jt.cdiv(n, bn) < 2 * cores_here():
            bn //= 2
        return fit(m, MOST_ROWS), fit(n, bn), _even(k, bk, inner)
    sides = tiles(m, n, k, wide, gates, transposed=any(source.transposed for source in rights))
    depth = min(sides["bk"] or k, k)
    return sides["bm"], sides["bn"], jt.cdiv(depth, inner) * inner


def _even(k: int, most: int, inner: int) -> int:
    """How many of k terms a program takes at once: about `most`, a multiple of `inner`, and a divisor of k, if there is
    one that is not far smaller."""
    most = max(most, inner)
    even = [b for b in range(inner, min(most, k) + 1, inner) if k % b == 0]
    return even[-1] if even and 4 * even[-1] >= min(most, k) else min(most, k) // inner * inner
