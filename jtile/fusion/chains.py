"""Product, softmax, product: attention that `jnp` spells out becomes `ops.attention`, whose scores stay in the kernel.

What happens to the scores in between (scales, masks, biases) becomes a function of a tile of scores and of the numbers
of its rows and columns. Dimensions of one element are left out everywhere here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile import ops

from .layout import Axes, relate
from .steps import ELEMENTWISE, MOVES, Constant, Node, Operand, Step, Value

LONGEST_HEAD = 256
NOWHERE = -1e9  # scores of at most this have no weight left
PASSED = MOVES | {"stop_gradient", "copy", "convert_element_type"}  # functions that leave the values as they are
BACKWARDS = {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt"}  # the name of a comparison with its operands exchanged

Axis = tuple[Value, int]


@dataclasses.dataclass(frozen=True)
class Names:
    """The axes of an attention: those that queries, keys and values share, of which the last one is the heads' and the
    others are the batch; that of the queries of one head of keys, if there are several; of queries, keys, and the
    elements of a head."""

    shared: tuple[Axis, ...]
    group: tuple[Axis, ...]
    queries: Axis
    keys: Axis

    @property
    def batch(self) -> tuple[Axis, ...]:
        return self.shared[:-1]

    @property
    def heads(self) -> tuple[Axis, ...]:
        return self.shared[-1:]


def size(axes: Sequence[Axis]) -> int:
    return math.prod(value.shape[i] for value, i in axes)


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """An attention in a program.

    Attributes:
      nodes: the first product, those of the group between, and the second product.
      inputs: queries, keys, values, and what the scores' function reads. outputs: the one value that it gives.
      score: the steps from the first product's value `start` to the softmax's operand `end`.
      scale, causal: what is known of these steps; score is empty where it is all.
    """

    nodes: list[Node]
    inputs: list[Value]
    outputs: list[Value]
    score: list[Step]
    start: Value
    end: Value
    scale: float
    causal: bool
    names: Names
    of: Mapping[Value, tuple[Axis, ...]]

    @property
    def by_equations(self) -> bool:
        return any(node.ruled for node in self.nodes)

    @property
    def precision(self) -> str | None:
        """ "fast" where the program leaves the precision of both float32 products to a GPU: XLA's are of tf32, too."""
        asked = {self.nodes[k].eqn.params["precision"] for k in (0, -1)}
        left = asked <= {None, (jax.lax.Precision.DEFAULT,) * 2} and self.inputs[0].dtype == jnp.float32
        return "fast" if left and "warps" in jt.target().features else None

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The output for the inputs."""
        n, (q, k, v) = self.names, self.inputs[:3]
        extras = tuple(x.reshape(_long(x.shape)) for x in args[3:])
        y = ops.attention(
            self._rows(args[0], q, n.queries, n.group),
            self._rows(args[1], k, n.keys, ()),
            self._rows(args[2], v, n.keys, ()),
            scale=self.scale,
            causal=self.causal,
            score=self._function() if self.score else None,
            extras=extras if self.score else (),
            precision=self.precision,
        )
        (out,) = self.outputs
        (depth,) = set(self.of[v]) - {*n.shared, n.keys}
        order = [*n.batch, n.queries, *n.heads, *n.group, depth]
        y = y.reshape([size([axis]) for axis in order])
        return [jnp.transpose(y, [order.index(axis) for axis in self.of[out]]).reshape(out.shape)]

    def _rows(self, x: Any, value: Value, rows: Axis, group: tuple[Axis, ...]) -> Any:
        """An operand as [batch, rows, heads, elements]."""
        own, n = self.of[value], self.names
        (depth,) = set(own) - {*n.shared, rows, *group}
        order = [*n.batch, rows, *n.heads, *group, depth]
        x = jnp.transpose(x.reshape(_long(x.shape)), [own.index(axis) for axis in order])
        return x.reshape(size(n.batch), size([rows]), size([*n.heads, *group]), size([depth]))

    def _function(self) -> Callable[..., Any]:
        """The score function for `ops.attention`."""
        n, read = self.names, self.inputs[3:]

        def score(s, b, h, i, j, *extras):
            places = {n.queries: i, n.keys: j}
            for axes, number in ((n.batch, b), ((*n.heads, *n.group), h)):
                for axis in reversed(axes):
                    places[axis], number = number % size([axis]), number // size([axis])
            tiles: dict[Operand, Any] = {self.start: s.astype(self.start.dtype)}
            for value, extra in zip(read, extras, strict=True):
                tiles[value] = extra[tuple(places[axis] for axis in self.of[value]) or ...]
            for step in self.score:
                self._take(step, tiles, places)
            return tiles[self.end].astype(s.dtype)

        return score

    def _take(self, step: Step, tiles: dict[Operand, Any], places: Mapping[Axis, Any]) -> None:
        (out,) = step.outs
        values = [jnp.full((), x.value, x.dtype) if isinstance(x, Constant) else tiles[x] for x in step.ins]
        if step.name == "iota":
            own = out.shape[step.params["dimension"]] != 1
            at = _long(out.shape[: step.params["dimension"]])
            tiles[out] = jnp.asarray(places[self.of[out][len(at)]] if own else 0).astype(out.dtype)
        elif step.name in ELEMENTWISE:
            shape = jnp.broadcast_shapes(*(x.shape for x in values))
            tiles[out] = step.run([jnp.broadcast_to(x, shape) for x in values])[0]
        else:
            tiles[out] = values[0]


def _long(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


def chain_of(first: Node, nodes: Sequence[Node], second: Node, start: Value, end: Value) -> Chain | None:
    """The attention of two products and the nodes between, which make the weights `end` of the scores `start`; None if
    they are none."""
    steps = {v: step for node in nodes for step in node.steps for v in step.outs}
    softmax = _softmax_of(end, steps)
    if softmax is None:
        return None
    scored, along, own = softmax
    inner = _between(scored, steps, {start})
    if any(step not in own and step not in inner for step in steps.values()) or not _is_pointwise(inner):
        return None
    axes = Axes()
    for step in (first.eqn, *steps.values(), second.eqn):
        relate(step, axes)
    values = {v for step in (first.eqn, *steps.values(), second.eqn) for v in (*step.ins, *step.outs)}
    of = {v: tuple(axes.find((v, i)) for i, n in enumerate(v.shape) if n != 1) for v in values if isinstance(v, Value)}
    operands = _operands(first, second, end, axes.find((scored, along)), of)
    if operands is None:
        return None
    *qkv, names = operands
    scale, causal, left = _known(inner, start, scored, names, of)
    made = {v for step in left for v in step.outs}
    extras = dict.fromkeys(
        x for step in left for x in step.ins if isinstance(x, Value) and x not in made and x != start
    )
    within = {*names.shared, *names.group, names.queries, names.keys}
    if any(not within.issuperset(of[x]) for x in extras):
        return None
    inputs, outputs = [*qkv, *extras], list(second.outs)
    chain = functools.partial(Chain, [first, *nodes, second], inputs, outputs)
    return chain(left, start, scored, scale, causal, names, of)


def _strip(v: Operand, steps: Mapping[Value, Step]) -> Operand:
    """The value from which this one comes without change: functions that keep values (`PASSED`) are skipped."""
    while isinstance(v, Value) and v in steps and steps[v].name in PASSED and steps[v].ins:
        v = steps[v].ins[0]
    return v


def _made(v: Operand, name: str, steps: Mapping[Value, Step]) -> Step | None:
    v = _strip(v, steps)
    return steps[v] if isinstance(v, Value) and v in steps and steps[v].name == name else None


def _softmax_of(end: Value, steps: Mapping[Value, Step]) -> tuple[Value, int, set[Step]] | None:
    """(its operand, the axis, its steps) of the softmax that makes a value: exp(s - max s) / sum exp(s - max s)."""
    quotient = _made(end, "div", steps)
    power = quotient and _made(quotient.ins[0], "exp", steps)
    total = quotient and _made(quotient.ins[1], "reduce_sum", steps)
    apart = power and _made(power.ins[0], "sub", steps)
    if not (quotient and power and total and apart) or _strip(total.ins[0], steps) is not power.outs[0]:
        return None
    scored, top = apart.ins
    while (bounded := _made(top, "max", steps)) and any(_is_below(x, steps) for x in bounded.ins):
        top = next(x for x in bounded.ins if not _is_below(x, steps))
    most = _made(top, "reduce_max", steps)
    if most is None or not isinstance(scored, Value) or _strip(most.ins[0], steps) is not _strip(scored, steps):
        return None
    if len(most.params["axes"]) != 1 or most.params["axes"] != total.params["axes"]:
        return None
    return scored, most.params["axes"][0], set(_between(end, steps, {scored}))


def _is_below(x: Operand, steps: Mapping[Value, Step]) -> bool:
    """Whether an operand is the constant -inf."""
    x = _strip(x, steps)
    return isinstance(x, Constant) and float(x.value) == -math.inf


def _between(end: Value, steps: Mapping[Value, Step], starts: set[Value]) -> list[Step]:
    """The steps that a value is made by, in order, up to `starts`."""
    found: set[Value] = set()
    todo = [end]
    while todo:
        v = todo.pop()
        if v in steps and v not in found and v not in starts:
            found.add(v)
            todo += [x for x in steps[v].ins if isinstance(x, Value)]
    return [step for v, step in steps.items() if v in found]


def _is_pointwise(steps: Sequence[Step]) -> bool:
    return all(step.name in ELEMENTWISE | MOVES for step in steps)


def _operands(
    first: Node, second: Node, end: Value, keys: Axis, of: Mapping[Value, tuple[Axis, ...]]
) -> tuple[Value, Value, Value, Names] | None:
    """(queries, keys, values, the names of the axes) of the two products."""
    pair, others = list(first.ins), [x for x in second.ins if x is not end]
    if len(others) != 1 or not all(isinstance(x, Value) for x in (*pair, *others)):
        return None
    (v,) = others
    assert isinstance(v, Value)
    k = next((x for x in pair if isinstance(x, Value) and keys in of[x]), None)
    q = next((x for x in pair if x is not k), None)
    if not isinstance(k, Value) or not isinstance(q, Value) or keys in of[q] or keys not in of[v]:
        return None
    shared = tuple(axis for axis in of[end] if axis in of[q] and axis in of[k] and axis in of[v])
    free = sorted((axis for axis in of[q] if axis in of[end] and axis not in shared), key=lambda axis: -size([axis]))
    depths = [[axis for axis in of[x] if axis not in (*shared, *free, keys)] for x in (q, k, v)]
    if not 1 <= len(free) <= 2 or any(len(d) != 1 for d in depths) or len({size(d) for d in depths}) > 1:
        return None
    if size(depths[0]) > LONGEST_HEAD or len({x.dtype for x in (q, k, v, *second.outs)}) > 1:
        return None
    names = Names(shared, tuple(free[1:]), free[0], keys)
    covered = {*shared, *free, keys}
    if set(of[end]) != covered or str(q.dtype) not in ("float32", "bfloat16", "float16", "float64"):
        return None
    return q, k, v, names


def _known(
    steps: list[Step], start: Value, end: Value, names: Names, of: Mapping[Value, tuple[Axis, ...]]
) -> tuple[float, bool, list[Step]]:
    """(the scale, whether it is causal, the steps that are left for a function) of what happens to scores: all is known
    of factors under a causal mask."""
    by = {v: step for step in steps for v in step.outs}
    at, scale, causal = _strip(end, by), 1.0, False
    while isinstance(at, Value) and at is not start:
        step = by.get(at)
        if step is None:
            return 1.0, False, steps
        if step.name == "select_n" and not causal and (inner := _under_causal_mask(step, by, names, of)) is not None:
            at, causal = _strip(inner, by), True
        elif step.name in ("mul", "div") and (factor := _strip(step.ins[1], by)) and isinstance(factor, Constant):
            number = float(np.asarray(factor.value))
            scale *= number if step.name == "mul" else 1 / number if number else math.nan
            at = _strip(step.ins[0], by)
        elif step.name == "mul" and isinstance(factor := _strip(step.ins[0], by), Constant):
            scale *= float(np.asarray(factor.value))
            at = _strip(step.ins[1], by)
        else:
            return 1.0, False, steps
    return (scale, causal, []) if at is start and math.isfinite(scale) and scale > 0 else (1.0, False, steps)


def _under_causal_mask(
    step: Step, by: Mapping[Value, Step], names: Names, of: Mapping[Value, tuple[Axis, ...]]
) -> Operand | None:
    """The scores of a choice between them and -inf by query >= key; None if it is another one."""
    which, no, yes = step.ins if len(step.ins) == 3 else (step.ins[0], None, None)
    which = _strip(which, by)
    made = by.get(which) if isinstance(which, Value) else None
    if made is None or made.name not in BACKWARDS or no is None or yes is None:
        return None
    rows = [_number_of(x, by, of) for x in made.ins]
    name = made.name if rows == [names.queries, names.keys] else BACKWARDS[made.name]
    if {*rows} != {names.queries, names.keys} or size([names.queries]) != size([names.keys]):
        return None
    masked, kept = {"ge": (no, yes), "lt": (yes, no)}.get(name, (None, None))
    masked = masked and _strip(masked, by)
    if not isinstance(masked, Constant) or not float(np.asarray(masked.value)) <= NOWHERE:
        return None
    return kept


def _number_of(x: Operand, by: Mapping[Value, Step], of: Mapping[Value, tuple[Axis, ...]]) -> Axis | None:
    """The axis whose numbers, from 0 on, a value holds."""
    while isinstance(x, Value) and x in by and by[x].name in PASSED and by[x].ins:
        x = by[x].ins[0]
    if not isinstance(x, Value) or x not in by or by[x].name != "iota" or len(of[x]) != 1:
        return None
    return of[x][0] if x.shape[by[x].params["dimension"]] != 1 else None
