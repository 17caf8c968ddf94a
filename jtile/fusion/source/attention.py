"""Attention as text: a call of `jt.ops.attention`, whose scores are changed by a function."""

from __future__ import annotations

import collections

from jtile.fusion.chains import Axis, Chain, size
from jtile.fusion.steps import ELEMENTWISE, Step, Value

from .expressions import ATOM, TEMPORARY, Body, Names, Text, dtype_text, elementwise
from .glue import whole


def attention_text(body: Body, chain: Chain) -> None:
    """The statements of an attention."""
    n, (q, k, v) = chain.names, chain.inputs[:3]
    rows = [_rows(body, chain, q, n.queries, n.group), _rows(body, chain, k, n.keys, ()),
            _rows(body, chain, v, n.keys, ())]  # fmt: skip
    options = [f"scale={chain.scale!r}"] if not chain.score else ["scale=1.0"]
    options += ["causal=True"] * chain.causal
    if chain.score:
        options.append(f"score={_score(body, chain)}")
        extras = [whole(body, x) for x in chain.inputs[3:]]
        long = [tuple(m for m in x.shape if m != 1) for x in chain.inputs[3:]]
        extras = [
            e if s == tuple(x.shape) else f"{e}.reshape({', '.join(map(str, s)) or '()'})"
            for e, s, x in zip(extras, long, chain.inputs[3:], strict=True)
        ]
        options.append(f"extras=({', '.join(extras)}{',' * (len(extras) == 1)})")
    called = zip(rows, ("queries", "keys", "values"), strict=True)
    names = [t if t.isidentifier() else body.name(Text(t), w).text for t, w in called]
    found = body.name(Text(f"jt.ops.attention({', '.join([*names, *options])})"), "attended").text
    (out,) = chain.outputs
    (depth,) = set(chain.of[v]) - {*n.shared, n.keys}
    order = [*n.batch, n.queries, *n.heads, *n.group, depth]
    text = found
    sides = tuple(size([a]) for a in order)
    text = f"{text}.reshape({', '.join(map(str, sides))})"
    to = tuple(order.index(a) for a in chain.of[out])
    if to != tuple(range(len(order))):
        text = f"jnp.transpose({text}, {to})"
    if tuple(sides[i] for i in to) != tuple(out.shape):
        text = f"{text}.reshape({', '.join(map(str, out.shape))})"
    body.give(out, Text(text, shape=out.shape), "attended")


def _rows(body: Body, chain: Chain, value: Value, rows: Axis, group: tuple[Axis, ...]) -> str:
    """An operand as [batch, rows, heads, elements]."""
    own, n = chain.of[value], chain.names
    (depth,) = set(own) - {*n.shared, rows, *group}
    order = [*n.batch, rows, *n.heads, *group, depth]
    text, shape = whole(body, value), tuple(value.shape)
    long = tuple(m for m in shape if m != 1)
    to = tuple(own.index(axis) for axis in order)
    if to != tuple(range(len(to))):
        text = text if shape == long else f"{text}.reshape({', '.join(map(str, long))})"
        text, shape = f"jnp.transpose({text}, {to})", tuple(long[i] for i in to)
    wanted = (size(n.batch), size([rows]), size([*n.heads, *group]), size([depth]))
    return text if shape == wanted else f"{text}.reshape({', '.join(map(str, wanted))})"


def _score(body: Body, chain: Chain) -> str:
    """Writes the function of scores; its name."""
    n, read = chain.names, chain.inputs[3:]
    name = body.names.new("score")
    inner = Names(["s", "b", "h", "i", "j", name])
    refs = [inner.new(body.read(x).text if body.read(x).text.isidentifier() else "extra") for x in read]
    uses = collections.Counter(x for step in chain.score for x in step.ins if isinstance(x, Value))
    own = Body(inner, {}, uses, body.indent + 1)
    places = {n.queries: "i", n.keys: "j"}
    for axes, number in ((n.batch, "b"), ((*n.heads, *n.group), "h")):
        after = 1
        for k, axis in reversed([*enumerate(axes)]):
            text = number if after == 1 else f"{number} // {after}"
            places[axis] = text if k == 0 else f"{text} % {size([axis])}"
            after *= size([axis])
    own.texts[chain.start] = Text(
        f"s.astype({dtype_text(chain.start.dtype)})" if chain.start.dtype != "float32" else "s"
    )
    for v, ref in zip(read, refs, strict=True):
        at = ", ".join(places[a] for a in chain.of[v])
        own.give(v, Text(f"{ref}[{at or '...'}]"), f"{ref}_part")
    body.line(f"def {', '.join([f'{name}(s', 'b', 'h', 'i', 'j', *refs])}):")
    for step in chain.score:
        own.give(step.outs[0], _take(own, chain, step, places), TEMPORARY.get(step.name, step.name))
    end = own.read(chain.end)
    own.line(f"return {end.text}" if chain.end.dtype == "float32" else f"return {end.at(ATOM)}.astype(s.dtype)")
    body.lines += own.lines
    return name


def _take(own: Body, chain: Chain, step: Step, places: dict[Axis, str]) -> Text:
    (out,) = step.outs
    if step.name == "iota":
        at = sum(m != 1 for m in out.shape[: step.params["dimension"]])
        number = out.shape[step.params["dimension"]] != 1
        text = places[chain.of[out][at]] if number else "0"
        text = text if text.isidentifier() else f"({text})"
        return Text(text if out.dtype.name == "int32" else f"{text}.astype({dtype_text(out.dtype)})")
    if step.name in ELEMENTWISE:
        spread = lambda x: f"jnp.broadcast_to({dtype_text(step.ins[0].dtype)}({x.text}), s.shape)" if (
            x.constant is not None
        ) else f"jnp.broadcast_to({x.text}, s.shape)"  # fmt: skip
        return elementwise(step, own.operands(step), spread, None)
    return own.read(step.ins[0])
