"""The tensor level: a jaxpr as nodes, of which some are steps that a tile kernel can take.

Calls of `jax.jit` are opened. A function with a derivative rule of its own (`jax.custom_jvp`, `jax.custom_vjp`) stays
one node, whose steps are those inside: a kernel computes them, and a derivative goes by the rule.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtile.language._equations import place
from jtile.trace.rules.elementwise import RENAMED, SAME

ELEMENTWISE = frozenset(
    [*SAME.split(), *RENAMED, "abs", "round", "clamp", "integer_pow", "pow", "convert_element_type", "select_n", "copy",
     "copy_p", "stop_gradient", "shift_right_arithmetic", "one_minus_square", "reduce_precision"]
)  # fmt: skip
REDUCTIONS = frozenset(f"reduce_{of}" for of in ("sum", "max", "min", "prod", "and", "or"))
PLACES = frozenset(["argmax", "argmin"])
RUNNING = frozenset(f"cum{of}" for of in ("sum", "max", "min", "prod", "logsumexp"))
MOVES = frozenset(["broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "iota"])
FUSABLE = ELEMENTWISE | REDUCTIONS | PLACES | RUNNING | MOVES
DTYPES = frozenset(
    [
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "bool",
        *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)),
    ]
)
OPENED = frozenset(["jit", "pjit", "closed_call", "core_call"])
MOST_FREE = 32  # steps that are made anew for an operand, at most
WITH_RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


# These four are never changed once they are made. They are read so often while a program is cut that what they say of
# their types and equations is kept beside these, and that they are not `frozen`, which makes each one cost twice.


@dataclasses.dataclass(eq=False)
class Value:
    """What a step gives, or an input of the program. What has no elements, such as a token, has no shape."""

    aval: Any
    shape: tuple[int, ...] = dataclasses.field(init=False)
    dtype: np.dtype = dataclasses.field(init=False)

    def __post_init__(self):
        self.shape, self.dtype = getattr(self.aval, "shape", None), getattr(self.aval, "dtype", None)


@dataclasses.dataclass(eq=False)
class Constant:
    """A number in the text of the program."""

    value: Any
    aval: Any
    shape: tuple[int, ...] = dataclasses.field(init=False)
    dtype: np.dtype = dataclasses.field(init=False)

    def __post_init__(self):
        self.shape, self.dtype = self.aval.shape, self.aval.dtype


Operand = Value | Constant


@dataclasses.dataclass(eq=False)
class Step:
    """One equation of a jaxpr; its primitive's name and its parameters."""

    eqn: Any
    ins: tuple[Operand, ...]
    outs: tuple[Value, ...]
    name: str = dataclasses.field(init=False)
    params: Mapping[str, Any] = dataclasses.field(init=False)

    def __post_init__(self):
        self.name, self.params = self.eqn.primitive.name, self.eqn.params

    def run(self, args: Sequence[Any], **params: Any) -> Sequence[Any]:
        """The equation on other operands, with other `params`; errors name the line that it comes from."""
        with place(self.eqn):
            out = self.eqn.primitive.bind(*args, **self.eqn.primitive.get_bind_params({**self.params, **params}))
        return out if self.eqn.primitive.multiple_results else [out]


@dataclasses.dataclass(eq=False)
class Node:
    """An equation: a step, a function with a rule whose `steps` are inside, or what no kernel takes, without steps; the
    name, operands and results of the equation."""

    eqn: Step
    steps: tuple[Step, ...]
    free: bool = False  # whether it depends on no input; every group that needs such a node makes it anew
    name: str = dataclasses.field(init=False)
    ins: tuple[Operand, ...] = dataclasses.field(init=False)
    outs: tuple[Value, ...] = dataclasses.field(init=False)

    def __post_init__(self):
        self.name, self.ins, self.outs = self.eqn.name, self.eqn.ins, self.eqn.outs

    @property
    def ruled(self) -> bool:
        return self.name in WITH_RULES

    def run(self, args: Sequence[Any]) -> Sequence[Any]:
        """The equation itself, on arrays or tracers."""
        return self.eqn.run(args)


@dataclasses.dataclass
class Program:
    """The jaxpr `closed`: its inputs, the constants that it closes over, its nodes in order, its outputs; of the values
    that equations of its own give, not those of functions that they call, these equations."""

    inputs: list[Value]
    constants: dict[Value, Any]
    nodes: list[Node]
    outputs: list[Operand]
    makers: dict[Value, Any]
    closed: Any


def program_of(closed: Any) -> Program:
    """The program of a closed jaxpr."""
    opener = _Opener()
    names: dict[Any, Operand] = {var: Value(var.aval) for var in closed.jaxpr.invars}
    inputs = [names[var] for var in closed.jaxpr.invars]
    opener.open(closed, names)
    outputs = [_operand(names, v) for v in closed.jaxpr.outvars]
    makers = {v: eqn for eqn in closed.jaxpr.eqns for x in eqn.outvars if isinstance(v := names.get(x), Value)}
    inputs = [v for v in inputs if isinstance(v, Value)]
    return Program(inputs, opener.constants, opener.needed(outputs), outputs, makers, closed)


def _operand(names: Mapping[Any, Operand], v: Any) -> Operand:
    return Constant(v.val, v.aval) if hasattr(v, "val") else names[v]


class _Opener:
    """Makes nodes of equations. What depends on no input is made anew for each operand that it is: the numbers of rows
    and of columns of a mask are often one value, which then stands for two axes."""

    def __init__(self, more: Callable[[Step], bool] = lambda step: False):
        self.nodes: list[Node] = []
        self.constants: dict[Value, Any] = {}
        self._more = more  # what a kernel can take besides
        self._free: dict[Value, list[Node]] = {}  # the nodes that make a value without any input

    def open(self, closed: Any, names: dict[Any, Operand]) -> None:
        """Adds the equations of a jaxpr; `names` has its inputs, and gets its other values."""
        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            names[var] = value = Value(var.aval)
            self.constants[value] = const
        for eqn in closed.jaxpr.eqns:
            inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if eqn.primitive.name in OPENED and hasattr(inner, "consts") and _is_plain(eqn.params):
                ins = tuple(_operand(names, v) for v in eqn.invars)
                own = dict(zip(inner.jaxpr.invars, ins, strict=True))
                self.open(inner, own)
                names.update(zip(eqn.outvars, (_operand(own, v) for v in inner.jaxpr.outvars), strict=True))
                continue
            ins = tuple(self._anew(_operand(names, v)) for v in eqn.invars)
            outs = tuple(Value(v.aval) for v in eqn.outvars)
            names.update(zip(eqn.outvars, outs, strict=True))
            self._add(Step(eqn, ins, outs), eqn.effects)

    def _add(self, step: Step, effects: Any) -> None:
        steps = _steps(step, effects) or ((step,) if not effects and self._more(step) else ())
        trees = [self._free.get(x) for x in step.ins if isinstance(x, Value)]
        simple = bool(steps) and all(s.name in MOVES | ELEMENTWISE for s in steps)
        free = simple and None not in trees and sum(map(len, trees)) < MOST_FREE  # type: ignore[arg-type]
        node = Node(step, steps, free)
        self.nodes.append(node)
        if free:
            self._free[step.outs[0]] = [*(n for tree in trees for n in tree or ()), node]

    def _anew(self, x: Operand) -> Operand:
        if not isinstance(x, Value) or x not in self._free:
            return x
        other: dict[Operand, Value] = {}
        made = []
        for node in self._free[x]:
            other[node.outs[0]] = Value(node.outs[0].aval)
            step = Step(node.eqn.eqn, tuple(other.get(y, y) for y in node.ins), (other[node.outs[0]],))
            made.append(Node(step, _steps(step), True))
        self.nodes += made
        self._free[other[x]] = made
        return other[x]

    def needed(self, outputs: Sequence[Operand]) -> list[Node]:
        """The nodes without those that nobody reads."""
        read, kept = {x for x in outputs if isinstance(x, Value)}, []
        for node in reversed(self.nodes):
            if node.eqn.eqn.effects or any(v in read for v in node.outs):
                kept.append(node)
                read.update(x for x in node.ins if isinstance(x, Value))
        return kept[::-1]


def _is_plain(params: Mapping[str, Any]) -> bool:
    """Whether a call of `jax.jit` asks for nothing besides its function: no shardings, nothing to be donated."""
    asked = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    return not any(params.get("donated_invars", ())) and all(type(s).__name__ == "UnspecifiedValue" for s in asked)


def _steps(step: Step, effects: Any = ()) -> tuple[Step, ...]:
    """The steps of an equation that a kernel can take; () for others."""
    if effects:
        return ()
    if step.name not in WITH_RULES:
        return (step,) if is_fusable(step) else ()
    inner = step.params[WITH_RULES[step.name]]
    return () if not hasattr(inner, "consts") or inner.consts else steps_of(inner, step)


def steps_of(inner: Any, step: Step, more: Callable[[Step], bool] = lambda step: False) -> tuple[Step, ...]:
    """The steps of a closed jaxpr that stands for an equation; () where a kernel cannot take one of them. `more`: which
    steps it can take besides those of `is_fusable`."""
    names: dict[Any, Operand] = dict(zip(inner.jaxpr.invars, step.ins, strict=True))
    opener = _Opener(more)
    opener.open(inner, names)
    results = [_operand(names, v) for v in inner.jaxpr.outvars]
    nodes = opener.needed(results)
    made = {v for node in nodes for v in node.outs}
    if any(not node.steps for node in nodes) or any(v not in made for v in results) or len(set(results)) < len(results):
        return ()
    renamed = dict(zip(results, step.outs, strict=True))
    return tuple(
        dataclasses.replace(
            s,
            ins=tuple(renamed.get(x, x) if isinstance(x, Value) else x for x in s.ins),
            outs=tuple(renamed.get(x, x) for x in s.outs),
        )
        for node in nodes
        for s in node.steps
    )


def nodes_of(fun: Callable[..., Any], step: Step, args: Sequence[Operand]) -> list[Node]:
    """The nodes of a function of values that stands for an equation; errors name the line of the equation."""
    with place(step.eqn):
        closed = jax.make_jaxpr(fun)(*(x.aval for x in args))
    names: dict[Any, Operand] = dict(zip(closed.jaxpr.invars, args, strict=True))
    opener = _Opener()
    opener.open(closed, names)
    (result,) = (_operand(names, v) for v in closed.jaxpr.outvars)
    *others, last = opener.needed([result])
    assert last.outs == (result,)
    eqn = dataclasses.replace(last.eqn, outs=step.outs)
    return [*others, dataclasses.replace(last, eqn=eqn, steps=tuple(eqn if s is last.eqn else s for s in last.steps))]


def is_fusable(step: Step) -> bool:
    """Whether steps of a kernel can stand for a primitive with these operands."""
    values = [*step.ins, *step.outs]
    if step.name not in FUSABLE or not all(is_tile(v) for v in values):
        return False
    if any(isinstance(x, Constant) and x.shape for x in step.ins):
        return False
    if step.name in ELEMENTWISE:
        (out,) = step.outs
        return all(not x.shape or _broadcasts(x.shape, out.shape) for x in step.ins)
    if step.name == "reshape":
        return step.params.get("dimensions") is None and _long(step.ins[0].shape) == _long(step.outs[0].shape)
    return len(step.outs) == 1 and len(step.ins) == (step.name != "iota")


def applies(step: Step) -> bool:
    """Whether a scatter computes its elements from those that are there, `x.at[...].apply(f)`, and not from updates."""
    return step.name == "scatter" and bool(getattr(step.params.get("update_jaxpr"), "eqns", ()))


def is_tile(v: Operand) -> bool:
    """Whether a value has a dtype and a shape that tiles can have."""
    shape = getattr(v.aval, "shape", None)
    return shape is not None and all(isinstance(n, int) for n in shape) and _is_of_tiles(v.dtype)


@functools.cache
def _is_of_tiles(dtype: Any) -> bool:
    return str(dtype) in DTYPES


def _broadcasts(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    return len(shape) == len(out) and all(n in (1, m) for n, m in zip(shape, out, strict=True))


def _long(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n != 1]


def size_of(v: Operand) -> int:
    return math.prod(v.shape)
