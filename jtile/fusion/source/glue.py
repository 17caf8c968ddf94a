"""What no kernel computes: equations of whole arrays as calls of `jax.numpy` and `jax.lax`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jtile._errors import UnsupportedError
from jtile.fusion.steps import ELEMENTWISE, Constant, Node, Operand, Value

from .expressions import ATOM, TEMPORARY, TIMES, Body, Text, constant, dtype_text, elementwise, no_text
from .frames import reduction

MOST_NUMBERS = 64  # numbers of an array that is written out, at most

_RESHAPED = re.compile(r"(\w+)\.reshape\([\d, ]*\)")
RULES: dict[str, Callable[..., str]] = {}


def rule(*names: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    def add(fun: Callable[..., str]) -> Callable[..., str]:
        RULES.update(dict.fromkeys(names, fun))
        return fun

    return add


def array_text(value: Any, dtype: Any, shape: Sequence[int] = ()) -> str:
    """An array as an expression.

    Raises:
      UnsupportedError: it has many elements.
    """
    found = np.asarray(value)
    if found.size > MOST_NUMBERS:
        raise UnsupportedError(
            f"the function closes over an array, {found.dtype.name}{list(found.shape)}, which is too large for a text: "
            "make it an argument"
        )
    text = np.array2string(found.astype(np.float64) if found.dtype.kind not in "iub" else found, separator=", ",
                           threshold=MOST_NUMBERS + 1, floatmode="unique", max_line_width=10**6)  # fmt: skip
    return f"jnp.asarray({text.replace('nan', 'jnp.nan').replace('inf', 'jnp.inf')}, {dtype_text(dtype)})"


def whole(body: Body, x: Operand) -> str:
    """An operand as an array of its own shape and dtype."""
    text = body.read(x)
    if text.constant is None:
        return text.at(ATOM)
    return f"jnp.full({tuple(x.shape)}, {text.text}, {dtype_text(x.dtype)})"


def reshaped(text: str, shape: Sequence[int], wanted: Sequence[int]) -> str:
    """An array of one shape in another one."""
    before = _RESHAPED.fullmatch(text)
    return text if tuple(shape) == tuple(wanted) else f"{before[1] if before else text}.reshape{_tuple(wanted)}"


def run(body: Body, node: Node) -> None:
    """The statements of an equation.

    Raises:
      UnsupportedError: there is no text for it.
    """
    for step in node.steps or [node.eqn]:
        name = step.name
        if name in ELEMENTWISE:
            shape = step.outs[0].shape
            spread = lambda x, s=step: (
                f"jnp.full({tuple(s.outs[0].shape)}, {x.text}, {dtype_text(s.ins[0].dtype)})"
                if x.constant is not None
                else x.text
            )
            text = elementwise(step, body.operands(step), spread, shape)
        elif name in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy") and (
            body.read(step.ins[0]).constant is not None
        ):
            text = body.read(step.ins[0])
        elif name in RULES:
            body.operands(step)
            args = [whole(body, x) for x in step.ins]
            text = Text(RULES[name](step, *args), shape=step.outs[0].shape)
            text = Text(
                text.text, TIMES if " @ " in text.text[:200] and text.text[-1] != ")" else ATOM, shape=text.shape
            )
        else:
            raise no_text(step)
        if len(step.outs) == 1:
            body.give(step.outs[0], text, TEMPORARY.get(name, name))
            continue
        names = [body.names.new(name) for _ in step.outs]
        body.line(f"{', '.join(names)} = {text.text}")
        body.texts.update((v, Text(n, shape=v.shape)) for v, n in zip(step.outs, names, strict=True))


@rule("broadcast_in_dim")
def _(step, x):
    (source,), (out,) = step.ins, step.outs
    own = dict(zip(step.params["broadcast_dimensions"], source.shape, strict=True))
    sides = tuple(own.get(d, 1) for d in range(len(out.shape)))
    x = reshaped(x, source.shape, sides)
    return x if sides == tuple(out.shape) else f"jnp.broadcast_to({x}, {tuple(out.shape)})"


def _tuple(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})" if shape else "(())"


@rule("reshape", "squeeze", "expand_dims")
def _(step, x):
    return reshaped(x, step.ins[0].shape, step.outs[0].shape)


@rule("transpose")
def _(step, x):
    p = step.params["permutation"]
    return f"{x}.T" if tuple(p) == (1, 0) else f"jnp.transpose({x}, {tuple(p)})"


@rule("iota")
def _(step):
    p = step.params
    return f"jax.lax.broadcasted_iota({dtype_text(p['dtype'])}, {tuple(p['shape'])}, {p['dimension']})"


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
def _(step, x):
    axes = tuple(step.params["axes"])
    text = reduction(step, x, str(axes[0] if len(axes) == 1 else axes), step.outs[0].dtype).text
    return text.replace(", keepdims=True", "").removeprefix("jnp.expand_dims(") if "expand_dims" not in text else (
        f"jax.lax.{step.name}({x}, axes={axes})"
    )  # fmt: skip


@rule("argmax", "argmin")
def _(step, x):
    (axis,) = step.params["axes"]
    return f"jnp.{step.name}({x}, axis={axis}).astype({dtype_text(step.outs[0].dtype)})"


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _(step, x):
    back = ", reverse=True" if step.params["reverse"] else ""
    return f"jax.lax.{step.name}({x}, axis={step.params['axis']}{back})"


@rule("dot_general")
def _(step, x, y):
    p, (a, b), (out,) = step.params, step.ins, step.outs
    (ca, cb), (ba, bb) = (tuple(tuple(map(int, d)) for d in dims) for dims in p["dimension_numbers"])
    plain = p["precision"] is None and out.dtype == a.dtype == b.dtype
    if plain and not ba and ca == (len(a.shape) - 1,) and cb == (0,) and len(a.shape) <= 2 and len(b.shape) <= 2:
        return f"{x} @ {y}"
    precision = precision_text(p["precision"])
    if precision is None:
        raise no_text(step)
    kind = f", preferred_element_type={dtype_text(out.dtype)}"
    return f"jax.lax.dot_general({x}, {y}, (({ca}, {cb}), ({ba}, {bb})){precision}{kind})"


def precision_text(given: Any) -> str | None:
    """The argument that asks for the precision of a product; None if it is another one for each operand."""
    if given is None:
        return ""
    given = given[0] if isinstance(given, tuple) and len({*given}) == 1 else given
    return f", precision=jax.lax.Precision.{given.name}" if isinstance(given, jax.lax.Precision) else None


@rule("slice")
def _(step, x):
    p = step.params
    steps = p["strides"] or (1,) * len(p["start_indices"])
    parts = []
    for n, a, b, s in zip(step.ins[0].shape, p["start_indices"], p["limit_indices"], steps, strict=True):
        parts.append(f"{a or ''}:{b if b != n else ''}" + f":{s}" * (s != 1))
    return f"{x}[{', '.join(parts)}]"


@rule("concatenate")
def _(step, *xs):
    return f"jnp.concatenate([{', '.join(xs)}], axis={step.params['dimension']})"


@rule("pad")
def _(step, x, value):
    return f"jax.lax.pad({x}, {value}, {tuple(map(tuple, step.params['padding_config']))})"


@rule("rev")
def _(step, x):
    return f"jnp.flip({x}, {tuple(step.params['dimensions'])})"


@rule("dynamic_slice")
def _(step, x, *starts):
    return f"jax.lax.dynamic_slice({x}, [{', '.join(starts)}], {tuple(step.params['slice_sizes'])})"


@rule("dynamic_update_slice")
def _(step, x, update, *starts):
    return f"jax.lax.dynamic_update_slice({x}, {update}, [{', '.join(starts)}])"


@rule("sort")
def _(step, *xs):
    p = step.params
    given = xs[0] if len(xs) == 1 else f"({', '.join(xs)})"
    kind = f"dimension={p['dimension']}, is_stable={p['is_stable']}, num_keys={p['num_keys']}"
    return f"jax.lax.sort({given}, {kind if len(xs) > 1 else kind.rpartition(',')[0]})"


@rule("top_k")
def _(step, x):
    return f"jax.lax.top_k({x}, {step.params['k']})"


@rule("gather")
def _(step, x, indices):
    p = step.params
    d, mode = p["dimension_numbers"], f"jax.lax.GatherScatterMode.{p['mode'].name}"
    given = p["fill_value"]
    fill = "" if given is None else f", fill_value={constant(given, np.asarray(given).dtype).text}"
    names = ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims")
    numbers = ", ".join(f"{n}={tuple(getattr(d, n))}" for n in (*names, "start_indices_batching_dims"))
    dims = f"jax.lax.GatherDimensionNumbers({numbers})"
    return f"jax.lax.gather({x}, {indices}, {dims}, {tuple(p['slice_sizes'])}, mode={mode}{fill})"


@rule("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter_add", "scatter_mul",
      "scatter_min", "scatter_max")  # fmt: skip
def _(step, x, indices, updates):
    p = step.params
    d, mode = p["dimension_numbers"], f"jax.lax.GatherScatterMode.{p['mode'].name}"
    names = ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims", "operand_batching_dims")
    numbers = ", ".join(f"{n}={tuple(getattr(d, n))}" for n in (*names, "scatter_indices_batching_dims"))
    dims = f"jax.lax.ScatterDimensionNumbers({numbers})"
    facts = f"unique_indices={p['unique_indices']}, indices_are_sorted={p['indices_are_sorted']}"
    name = step.name.replace("-", "_")
    return f"jax.lax.{name}({x}, {indices}, {updates}, {dims}, {facts}, mode={mode})"


__all__ = ["Constant", "Value", "array_text", "rule", "run", "whole"]
