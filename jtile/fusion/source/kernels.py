"""The kernel of a group or a loop as text."""

from __future__ import annotations

import abc
import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jtile.fusion.layout import Layout
from jtile.fusion.loops import Loop
from jtile.fusion.steps import Constant, Step, Value
from jtile.fusion.sums import dtype_of_sums, neutral
from jtile.fusion.tilings import Tiling
from jtile.fusion.units import Group

from .expressions import Body, Names, Text, constant, dtype_text, number
from .frames import TileText

TOGETHER = {"reduce_sum": " + ", "reduce_prod": " * ", "reduce_and": " & ", "reduce_or": " | "}
LETTERS = "ijklmn"


class KernelText(abc.ABC):
    """What the texts of all kernels have: names, a head, and a frame.

    Attributes:
      refs: the names of the kernel's inputs. outs: the names of its outputs.
      metas: the meta-parameters, and their values. grid: the text of each axis of the grid.
    """

    def __init__(self, name: str, inputs: Sequence[Value], outputs: Sequence[Value], called: dict[Value, str]):
        self.name, self.inputs, self.outputs, self.called = name, [*inputs], [*outputs], called
        self.names = Names()
        self.refs = {v: self.names.new(called.get(v, "x")) for v in inputs}
        wanted = ["out"] if len(outputs) == 1 else [f"{called[v]}_out" if v in called else "out" for v in outputs]
        self.outs = {v: self.names.new(n) for v, n in zip(outputs, wanted, strict=True)}
        self.metas: dict[str, int] = {}
        self.grid: list[str] = []
        self.types: dict[Value, str] = {}

    def size(self, layout: Layout, axis: int, outs: bool = True) -> str:
        """The text of an axis' size: that of an array which has it."""
        for group in (self.refs, self.outs if outs else {}):
            for v, ref in group.items():
                if axis in layout.axes.get(v, ()) and self.dims(v).count(axis):
                    return f"{ref}.shape[{self.dims(v).index(axis)}]"
        return str(layout.sizes[axis])

    @abc.abstractmethod
    def dims(self, value: Value) -> list[Any]:
        """The axis of each dimension of an array."""

    def type_of(self, value: Value, shape: Sequence[str], dtype: Any, axes: Sequence[Any]) -> str:
        """The type of an output of such dimensions: like an input, if one has them."""
        for v, ref in self.refs.items():
            if v.dtype == dtype and self.dims(v) == [*axes]:
                return f"jt.like({ref})"
        return f"jax.ShapeDtypeStruct(({', '.join(shape)}{',' * (len(shape) == 1)}), {dtype_text(dtype)})"

    def head(self) -> list[str]:
        """The decorator and the first line."""
        types = [self.types[v] for v in self.outputs]
        out = types[0] if len(types) == 1 else f"({', '.join(types)})"
        grid = self.grid[0] if len(self.grid) == 1 else f"({', '.join(self.grid)})"
        given = ", ".join(self.refs.values())
        params = [*self.refs.values(), *self.outs.values()]
        metas = [f"{n}={v}" for n, v in self.metas.items()]
        return [
            "@jt.kernel(",
            f"    out_type={self._function(given, out)},",
            f"    grid={self._function(given, grid) if self.grid else 1},",
            ")",
            f"def {self.name}({', '.join([*params, *(['*'] if metas else []), *metas])}):",
        ]

    def _function(self, given: str, result: str) -> str:
        """A function of the arrays and the meta-parameters that the result needs."""
        needs = [n for n in self.metas if n in result.replace("(", " ").replace(")", " ").replace(",", " ").split()]
        params = [p for p in [given, ", ".join(["*", *needs]) if needs else ""] if p]
        return f"lambda {', '.join(params)}: {result}"


class GroupText(KernelText):
    """The text of a group's kernel."""

    def __init__(self, name: str, group: Group, tiling: Tiling, called: dict[Value, str]):
        order = [*called]  # the arguments of the program, in their order, and then what the program computes
        inputs = sorted(group.inputs, key=lambda v: order.index(v) if v in called else len(order))
        super().__init__(name, inputs, group.outputs, called)
        self.tiling, self.layout = tiling, group.layout
        self.steps, self._same = distinct(group.steps, {*group.last}, group.layout)
        self.last = {step.outs[0]: step for step in self.steps if step.outs[0] in {s.outs[0] for s in group.last}}

    def dims(self, value: Value) -> list[Any]:
        own = [*self.layout.axes[value]]
        return ["share", *own] if value in self.last and value in self.outs else own

    def lines(self) -> list[str]:
        """The whole kernel."""
        layout, sides = self.layout, self.tiling.sides
        shared = layout.whole | layout.late
        order = [a for a in range(len(sides)) if len(sides) < 3 or a in shared or sides[a] > 1]
        frame = self._frame(order)
        body, locals_ = frame.body, []
        blocked = [a for a in range(len(sides)) if a not in shared]
        if layout.late:
            self.metas["shares"] = self.tiling.shares
            self.grid.append("shares")
            locals_.append((self._new("share"), "jt.program_id(0)"))
        for a in blocked:
            frame.places[a] = self._new(LETTERS[len(self.grid)])
            locals_.append((frame.places[a], f"jt.program_id({len(self.grid)})"))
            size = self.size(layout, a, outs=False)
            self.grid.append(f"jt.cdiv({size}, {frame.sides[a]})" if a in order else size)
        for a in sorted(layout.whole):
            locals_.append((frame.sides[a], self.size(layout, a)))
        for v in self.outputs:
            self._type(v, blocked)
        if layout.late:
            self._sums(frame)
        else:
            for v, ref in self.refs.items():
                frame.load(v, ref, f"{ref}_tile")
            for step in self.steps:
                frame.run(step)
            for v, ref in self.outs.items():
                frame.store(v, ref, None, body.read(self._same.get(v, v)))
        return [*self.head(), *without_unused(body.lines, locals_)]

    def _new(self, wanted: str) -> str:
        return self.names.new(wanted)

    def _frame(self, order: list[int]) -> TileText:
        names = {1: ["block"], 2: ["rows", "columns"]}.get(len(order), [f"side_{k}" for k in range(len(order))])
        sides = {a: self._new(n) for a, n in zip(order, names, strict=True)}
        for a in order:
            if a not in self.layout.whole:
                self.metas[sides[a]] = self.tiling.sides[a]
        uses = collections.Counter(x for step in self.steps for x in step.ins if isinstance(x, Value))
        uses.update(self._same.get(v, v) for v in self.outputs)
        own = {v: n for v, n in self.called.items() if v not in self.refs}
        return TileText(self.layout, tuple(order), sides, {}, Body(self.names, own, uses))

    def _type(self, value: Value, blocked: Sequence[int]) -> None:
        shape = [self.size(self.layout, a, outs=False) for a in self.layout.axes[value]]
        if value in self.last:
            dtype = dtype_of_sums(self.last[value])
            self.types[value] = self.type_of(value, ["shares", *shape], dtype, self.dims(value))
        else:
            self.types[value] = self.type_of(value, shape, value.dtype, self.dims(value))

    def _sums(self, frame: TileText) -> None:
        """A loop over the tiles of this program, which adds up."""
        layout, body, late = self.layout, frame.body, sorted(self.layout.late)
        for v, ref in self.refs.items():
            if not layout.late & {*layout.axes[v]}:
                frame.load(v, ref, f"{ref}_tile")
        counts = [f"jt.cdiv({self.size(layout, a)}, {frame.sides[a]})" for a in late]
        blocks, each, block = self._new("blocks"), self._new("each"), self._new("number")
        body.line(f"{blocks} = {' * '.join(counts)}  # tiles, which the programs share")
        body.line(f"{each} = jt.cdiv({blocks}, shares)")
        sums = [(step, self._new(self.called.get(step.outs[0], "total"))) for step in self.last.values()]
        for step, name in sums:
            dtype = dtype_of_sums(step)
            start = number(np.asarray(neutral(step, dtype), dtype)[()], dtype)
            shape = frame.shape_text(frame.shape_of(step.ins[0]))
            body.line(f"{name} = jnp.full({shape}, {start}, {dtype_text(dtype)})")
        body.line(f"for {block} in jt.range(share * {each}, jnp.minimum((share + 1) * {each}, {blocks})):")
        body.indent += 1
        self._places(frame, late, counts, block)
        for v, ref in self.refs.items():
            if v not in body.texts:
                frame.load(v, ref, f"{ref}_tile")
        for step in self.steps:
            if step.outs[0] not in self.last:
                frame.run(step)
        for v, ref in self.outs.items():
            if v not in self.last:
                frame.store(v, ref, None, body.read(self._same.get(v, v)))
        for step, name in sums:
            self._add(frame, step, name)
        body.indent -= 1
        for step, name in sums:
            (out,) = step.outs
            (x,) = step.ins
            assert isinstance(x, Value)
            body.texts[x] = Text(name, shape=frame.shape_of(x))
            frame.store(out, self.outs[out], "share", frame.total(step))

    def _places(self, frame: TileText, late: list[int], counts: list[str], block: str) -> None:
        """Write where a tile lies along each of the axes that programs share."""
        if len(late) == 1:
            frame.places[late[0]] = block
            return
        left = block
        for k in reversed(range(len(late))):
            name = self._new(f"place_{k}")
            frame.places[late[k]] = name
            frame.body.line(f"{name} = {left} % ({counts[k]})" if k else f"{name} = {left}")
            if k:
                rest = self._new("rest")
                frame.body.line(f"{rest} = {left} // ({counts[k]})")
                left = rest

    def _add(self, frame: TileText, step: Step, name: str) -> None:
        """Adds what one more tile has; elements behind the end of an axis change nothing."""
        (x,), dtype = step.ins, dtype_of_sums(step)
        text, shape = frame.body.read(x), frame.shape_of(x)
        made = (
            frame.spread(text, shape) if text.constant is None else f"jnp.full({frame.shape_text(shape)}, {text.text})"
        )
        if x.dtype != dtype:
            made = f"({made}).astype({dtype_text(dtype)})" if text.level < 9 else f"{made}.astype({dtype_text(dtype)})"
        none = number(np.asarray(neutral(step, dtype), dtype)[()], dtype)
        for a in sorted(self.layout.late):
            if self.layout.sizes[a] % self.tiling.sides[a]:
                made = f"jnp.where({frame.numbers(a).text} < {self.size(self.layout, a)}, {made}, {none})"
        sign = TOGETHER.get(step.name)
        if sign:
            plain = text.level >= 6 or made != text.text
            frame.body.line(f"{name} = {name}{sign}{made if plain else f'({made})'}")
        else:
            frame.body.line(f"{name} = jnp.{'maximum' if step.name == 'reduce_max' else 'minimum'}({name}, {made})")


class LoopText(KernelText):
    """The text of a loop's kernel."""

    def __init__(self, name: str, loop: Loop, tiling: Tiling, called: dict[Value, str]):
        read = [x for x in loop.nodes[0].ins if isinstance(x, Value)]
        values = [*loop.constants, *loop.carry, *loop.elements]
        self.of = [v for v, x in zip(values, loop.nodes[0].ins, strict=True) if isinstance(x, Value)]
        inner = {v: called[x] for v, x in zip(self.of, read, strict=True) if x in called}
        super().__init__(name, self.of, loop.outputs, inner)
        self.loop, self.tiling, self.layout, self.program = loop, tiling, loop.layout, called
        self.written = dict(zip(loop.outputs, loop.written, strict=True))

    def dims(self, value: Value) -> list[Any]:
        written = self.written.get(value)
        if isinstance(written, int):
            return [*self.layout.axes[self.loop.carry[written]]]
        own = [*self.layout.axes[value if written is None else written]]
        rounds = written is not None or any(value is v for v in self.loop.elements)
        return ["round", *own] if rounds else own

    def size(self, layout: Layout, axis: int, outs: bool = True) -> str:
        for v, ref in self.refs.items():
            if axis in self.dims(v):
                return f"{ref}.shape[{self.dims(v).index(axis)}]"
        return str(layout.sizes[axis])

    def lines(self) -> list[str]:
        """The whole kernel."""
        loop, layout, sides = self.loop, self.layout, self.tiling.sides
        order = [a for a in range(len(sides)) if len(sides) < 3 or a in layout.whole or sides[a] > 1]
        names = {1: ["block"], 2: ["rows", "columns"]}.get(len(order), [f"side_{k}" for k in range(len(order))])
        texts = {a: self.names.new(n) for a, n in zip(order, names, strict=True)}
        uses = collections.Counter(x for step in loop.steps for x in step.ins if isinstance(x, Value))
        uses.update([*loop.next, *(w for w in loop.written if not isinstance(w, int))])  # type: ignore[arg-type]
        own = {v: n for v, n in self.program.items() if v not in self.refs}
        body = Body(self.names, own, uses)
        frame, locals_ = TileText(layout, tuple(order), texts, {}, body), []
        for a in range(len(sides)):
            if a in layout.whole:
                locals_.append((texts[a], self.size(layout, a)))
                continue
            frame.places[a] = self.names.new(LETTERS[len(self.grid)])
            locals_.append((frame.places[a], f"jt.program_id({len(self.grid)})"))
            size = self.size(layout, a)
            self.grid.append(f"jt.cdiv({size}, {texts[a]})" if a in order else size)
            if a in order:
                self.metas[texts[a]] = sides[a]
        rounds = self._rounds()
        for v in self.outputs:
            shape = [rounds if d == "round" else self.size(layout, d) for d in self.dims(v)]
            self.types[v] = self.type_of(v, shape, v.dtype, self.dims(v))
        self._run(frame, rounds)
        return [*self.head(), *without_unused(body.lines, locals_)]

    def _rounds(self) -> str:
        """How many rounds there are."""
        ref = next((self.refs[v] for v in self.loop.elements if v in self.refs), None)
        return str(self.loop.length) if ref is None else f"{ref}.shape[0]"

    def _run(self, frame: TileText, rounds: str) -> None:
        loop, body = self.loop, frame.body
        for v, x in zip(loop.constants, loop.nodes[0].ins):
            self._given(frame, v, x, None)
        starts = loop.nodes[0].ins[len(loop.constants) :]
        carry = [self._start(frame, v, x) for v, x in zip(loop.carry, starts)]
        at = self.names.new("t")
        body.line(f"for {at} in jt.range({rounds}):")
        body.indent += 1
        if loop.reverse:
            back = self.names.new("back")
            body.line(f"{back} = {rounds} - 1 - {at}")
            at = back
        for v, x in zip(loop.elements, loop.nodes[0].ins[len(loop.constants) + len(loop.carry) :]):
            self._given(frame, v, x, at)
        for step in loop.steps:
            frame.run(step)
        for v, w in self.written.items():
            if not isinstance(w, int):
                frame.store(w, self.outs[v], at)
        new = [
            self._carried(frame, x, of)
            for x, of, name in zip(loop.next, loop.carry, carry, strict=True)
        ]  # fmt: skip
        changed = [(n, t) for n, t in zip(carry, new, strict=True) if n != t]
        if changed:
            body.line(f"{', '.join(n for n, _ in changed)} = {', '.join(t for _, t in changed)}")
        body.indent -= 1
        for v, w in self.written.items():
            if isinstance(w, int):
                of = loop.carry[w]
                frame.store(of, self.outs[v], None, Text(carry[w], shape=frame.shape_of(of)))

    def _given(self, frame: TileText, v: Value, x: Any, at: str | None) -> None:
        """Write what a round reads besides its carries."""
        if isinstance(x, Value):
            frame.load(v, self.refs[v], f"{self.refs[v]}_tile", at)
        else:
            frame.body.texts[v] = constant(np.asarray(x.value).flat[0], x.dtype)

    def _start(self, frame: TileText, v: Value, x: Any) -> str:
        """The name of a carry, which gets its value before the first round."""
        body, wanted = frame.body, f"{self.refs[v]}_now" if v in self.refs else "state"
        if v in self.refs:
            frame.load(v, self.refs[v], wanted)
            if not body.texts[v].text.isidentifier():
                body.texts[v] = body.name(body.texts[v], wanted)
        else:
            shape = frame.shape_text(frame.shape_of(v)) if frame.shape_of(v) else "()"
            start = number(np.asarray(x.value).flat[0], x.dtype)
            text = Text(f"jnp.full({shape}, {start}, {dtype_text(x.dtype)})", shape=frame.shape_of(v))
            body.texts[v] = body.name(text, wanted)
        return body.texts[v].text

    def _carried(self, frame: TileText, x: Any, of: Value) -> str:
        """The text of the value that the next round gets for a carry."""
        text, shape = frame.body.read(x), frame.shape_of(of)
        if text.constant is not None:
            return f"jnp.full({frame.shape_text(shape) if shape else '()'}, {text.text}, {dtype_text(of.dtype)})"
        return frame.spread(text, shape)


def without_unused(lines: list[str], given: list[tuple[str, str]]) -> list[str]:
    """The lines behind one that gives the names of `given` that they use their values."""
    words = set(re.findall(r"\w+", "\n".join(lines)))
    used = [(name, text) for name, text in given if name in words]
    first = [f"    {', '.join(n for n, _ in used)} = {', '.join(t for _, t in used)}"] if used else []
    return first + lines


def distinct(steps: Sequence[Step], kept: set[Step], layout: Layout) -> tuple[list[Step], dict[Value, Value]]:
    """The steps without those that compute what an earlier one does, and what stands for their values; all of `kept`
    stay."""
    same: dict[Value, Value] = {}
    seen: dict[Any, Value] = {}
    found = []
    of = lambda x: same.get(x, x) if isinstance(x, Value) else x
    for step in steps:
        step = dataclasses.replace(step, ins=tuple(of(x) for x in step.ins)) if step not in kept else step
        if step in kept:
            found.append(dataclasses.replace(step, ins=tuple(of(x) for x in step.ins)))
            continue
        ins = tuple((str(x.value), str(x.dtype)) if isinstance(x, Constant) else x for x in step.ins)
        key = step.name, ins, str(step.params), step.outs[0].shape, layout.axes[step.outs[0]]
        if key in seen:
            same[step.outs[0]] = seen[key]
            continue
        seen[key] = step.outs[0]
        found.append(step)
    return found, same
