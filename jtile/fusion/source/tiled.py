"""`jt.tile`: a function of arrays as the source of tile kernels."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import importlib.util
import inspect
import math
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jtile._errors import KernelTypeError, KernelValueError, UnsupportedError
from jtile.fusion.bodies import GroupKernel, LoopKernel, name_of
from jtile.fusion.chains import Chain
from jtile.fusion.fused import Fused, fuse
from jtile.fusion.loops import Loop
from jtile.fusion.steps import Constant, Node, Step, Value
from jtile.fusion.sums import dtype_of_sums
from jtile.fusion.units import Group, Plan, Unit

from . import glue
from .attention import attention_text
from .expressions import ATOM, Body, Names, Text, dtype_text
from .frames import reduction
from .gathers import gather_text, is_gather
from .kernels import GroupText, LoopText
from .names import names_of
from .products import ProductText, is_product, products_of

QUIET = frozenset(["convert_element_type", "stop_gradient", "neg"])  # steps that name no kernel


@dataclasses.dataclass(frozen=True)
class Tiled:
    """A module of tile kernels that does what a function does; `jt.tile` makes one. `print(tiled)` shows its text.

    Attributes:
      name: the function's name in the module. text: the module. kernels: the names of its kernels.
    """

    name: str
    text: str
    kernels: tuple[str, ...]

    def __str__(self) -> str:
        return self.text

    def save(self, path: str | Path) -> Path:
        """Writes the module to a file. One that is there already is left alone.

        Raises:
          KernelValueError: there is a file of that name.
        """
        path = Path(path)
        try:
            with path.open("x") as file:
                file.write(self.text)
        except FileExistsError:
            raise KernelValueError(f"{path} is there already: jt.tile writes over no file") from None
        return path

    def load(self, path: str | Path | None = None) -> Callable[..., Any]:
        """The function of the module, run from a file: `path`, which `save` has written, or a temporary one,
        which is removed when the process ends."""
        if path is None:
            with tempfile.NamedTemporaryFile(
                "w", suffix=".py", prefix=f"{self.name}_", dir=_folder(), delete=False
            ) as file:
                file.write(self.text)
            path = file.name
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return getattr(module, self.name)


@functools.cache
def _folder() -> str:
    """Where modules lie that are run without having been saved: kernels read their source lines while they live."""
    folder = tempfile.mkdtemp(prefix="jtile_modules_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def tile(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Tiled:
    """The source of tile kernels that do what a function of `jax.numpy` does, to be read, edited and kept.

    The function is cut into groups as by `jt.fuse`, but for what a kernel is worth: a group becomes one whatever its
    size. Products take up what is computed of their operands and results, gathers become loads.

    Args:
      fun: a function of arrays, and pytrees of them, or what `jt.fuse` made of one (with its static arguments).
      args, kwargs: its arguments: arrays, or `jax.ShapeDtypeStruct`s.
    Returns:
      A `Tiled`: its `text` is a module with the kernels, and a function of the name and the arguments of `fun`, which
      calls them. Numbers that `fun` computes of shapes are constants of the text.
    Raises:
      KernelTypeError: `fun` is no function.
      UnsupportedError: `fun` has no step that becomes a kernel, or one that no text is written for.
    """
    if not callable(fun):
        raise KernelTypeError(f"jt.tile takes a function of arrays, got {fun!r}")
    fused = fun if isinstance(fun, Fused) else fuse(fun)
    plan, tree, _ = fused.planned(args, kwargs, everything=True)
    nodes = [plan.program.nodes[u] for u in plan.order if isinstance(u, int)]
    if not plan.units and not any(is_product(node) or is_gather(node) for node in nodes):
        raise UnsupportedError("jt.tile: the function has no step that becomes a kernel")
    return _Module(fused, plan, tree, args, kwargs).made()


class _Module:
    def __init__(self, fused: Fused, plan: Plan, tree: Any, args: tuple, kwargs: dict):
        self.fused, self.plan, self.tree = fused, plan, tree
        self.program = plan.program
        self.name = Names().new(getattr(fused, "__name__", "function").replace("<lambda>", "function"))
        self.params, leaves, self.unpacked = _parameters(fused, args, kwargs)
        makers = dict(self.program.makers)
        for unit in plan.units:
            makers.update(unit.makers if isinstance(unit, Loop) else {})
        self.called = {**names_of(makers), **dict(zip(self.program.inputs, leaves, strict=True))}
        self.products, self.places = products_of(plan)
        self.kernel_names = Names([self.name])
        self.kernels: dict[str, list[str]] = {}
        uses = collections.Counter(v for unit in plan.order for v in self._read(unit))
        uses.update(v for v in self.program.outputs if isinstance(v, Value))
        taken = [self.name, *self.params, *leaves]
        inputs = set(self.program.inputs)
        called = {v: n for v, n in self.called.items() if v not in inputs}
        self.body = Body(Names(taken), called, uses)
        for v, n in zip(self.program.inputs, leaves, strict=True):
            self.body.texts[v] = Text(n, shape=v.shape)

    def _read(self, unit: Unit | int) -> list[Value]:
        if not isinstance(unit, int):
            return list(unit.inputs)
        node = self.program.nodes[unit]
        return [x for step in node.steps or [node.eqn] for x in step.ins if isinstance(x, Value)]

    def made(self) -> Tiled:
        for line in self.unpacked:
            self.body.line(line)
        for v, array in self.program.constants.items():
            self.body.texts[v] = self.body.name(Text(glue.array_text(array, v.dtype), shape=v.shape), "constant")
        into = {place: k for k, place in self.places.items()}
        for place, unit in enumerate(self.plan.order):
            if isinstance(unit, int) and unit in self.places:
                continue  # a part of a group's kernel
            number = into.get(place, unit)
            if isinstance(number, int) and number in self.products:
                self._call(self.products[number], self.program.nodes[number])
            elif isinstance(unit, int) and is_gather(self.program.nodes[unit]):
                self._gather(self.program.nodes[unit])
            elif isinstance(unit, int):
                glue.run(self.body, self.program.nodes[unit])
            elif isinstance(unit, Chain):
                attention_text(self.body, unit)
            else:
                self._call(unit)
        results = [
            glue.whole(self.body, x) if isinstance(x, Constant) or self.body.read(x).constant is not None
            else self.body.read(x).text
            for x in self.program.outputs
        ]  # fmt: skip
        result, lines = _tree_text(jax.tree.unflatten(self.tree, results)), self.body.lines
        if lines and lines[-1].startswith(f"    {result} = "):
            result = lines.pop().removeprefix(f"    {result} = ")
        self.body.line(f"return {result}")
        return Tiled(self.name, self._text(), tuple(self.kernels))

    def _text(self) -> str:
        types = ", ".join(
            f"{self.body.texts[v].text}: {v.dtype.name}[{', '.join(map(str, v.shape))}]" for v in self.program.inputs
        )
        about = f"{self.name}({types}) as tile kernels, written by jt.tile."
        head = [f'"""{_wrapped(about)}"""', "", "import jax", "import jax.numpy as jnp", "", "import jtile as jt"]
        parts = [line for lines in self.kernels.values() for line in ("", "", *lines)]
        entry = ["", "", f"def {self.name}({', '.join(self.params)}):", *self.body.lines]
        lines = [piece for line in [*parts, *entry] for piece in _broken(line)]
        return "\n".join([*head, *lines]) + "\n"

    def _call(self, unit: Group | Loop, product: Node | None = None) -> None:
        """Write the kernel of a unit, and its call."""
        body = self.body
        if isinstance(unit, Group) and product is not None:
            made = ProductText(self._name([product.eqn, *unit.steps]), product, unit, self.called)
            given = [made.operands.get(v, v) for v in made.inputs]
            shapes = [v.shape if v in made.operands else unit.layout.shape_of(v) for v in made.inputs]
            shown = [unit.layout.shape_of(v) for v in unit.outputs]
        elif isinstance(unit, Group):
            made = GroupText(self._name(unit.steps), unit, GroupKernel(unit).tiling, self.called)
            shapes, given = [unit.layout.shape_of(v) for v in made.inputs], made.inputs
            shown = [made.layout.shape_of(v) for v in unit.outputs]
        else:
            kernel = LoopKernel(unit)
            made = LoopText(self._name(unit.steps), unit, kernel.tiling, self.called)
            given = [x for x in unit.nodes[0].ins if isinstance(x, Value)]
            shapes = [
                tuple(unit.length if d == "round" else unit.layout.sizes[d] for d in made.dims(v)) for v in made.of
            ]
            shown = [tuple(t.shape) for t in kernel.types]
        self.kernels[made.name] = made.lines()
        args = []
        for v, shape in zip(given, shapes, strict=True):
            args.append(glue.reshaped(glue.whole(body, v), v.shape, shape))
        names = [body.names.new(self.called.get(v, "out")) for v in unit.outputs]
        body.line(f"{', '.join(names)} = {made.name}({', '.join(args)})")
        for v, name, shape in zip(unit.outputs, names, shown, strict=True):
            last = {step.outs[0]: step for step in unit.last} if isinstance(unit, Group) else {}
            text = Text(name, shape=v.shape)
            if v in last:
                text = self._finished(last[v], v, name)
            text = Text(glue.reshaped(text.at(ATOM), shape, v.shape), shape=v.shape)
            body.give(v, text, name) if not text.text.isidentifier() else body.texts.update({v: text})

    def _gather(self, node: Node) -> None:
        """Write the kernel that loads the rows that an index picks, and its call."""
        body, (source, index), (out,) = self.body, node.ins, node.outs
        names = Names(["out", "rows", "i", "columns", "row", "row_tile"])
        table = names.new(self.called.get(source, "table"))  # type: ignore[arg-type]
        name = self.kernel_names.new(f"{self.name}_rows")
        self.kernels[name] = gather_text(name, node, table, names.new("index"))
        shape = source.shape[0], math.prod(source.shape[1:])
        rows = math.prod(index.shape)
        args = glue.reshaped(glue.whole(body, source), source.shape, shape), glue.reshaped(
            glue.whole(body, index), index.shape, (rows,)
        )  # fmt: skip
        text = glue.reshaped(f"{name}({', '.join(args)})", (rows, shape[1]), out.shape)
        body.texts[out] = body.name(Text(text, shape=out.shape), self.called.get(out, "taken"))

    def _finished(self, step: Step, value: Value, name: str) -> Text:
        """The text that adds up the sums of all programs."""
        text = reduction(step, name, "0", dtype_of_sums(step)).text.replace(", keepdims=True", "")
        if "expand_dims" in text:
            text = f"jax.lax.{step.name}({name}, axes=(0,))"
        if (value.dtype.kind == "f" and value.dtype.itemsize < 4) or value.dtype.name == "bfloat16":
            text += f".astype({dtype_text(value.dtype)})"
        return Text(text, shape=value.shape)

    def _name(self, steps: Sequence[Step]) -> str:
        units = sum(isinstance(unit, (Group, Loop)) for unit in self.plan.units)
        if units + len(self.products) - len(self.places) == 1:
            return self.kernel_names.new(f"{self.name}_kernel")
        told = [s for s in steps if s.name not in QUIET] or steps
        return self.kernel_names.new(name_of(self.name, told[:3]).replace("dot_general", "product"))


def _wrapped(text: str, width: int = 116) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _broken(line: str, width: int = 120) -> list[str]:
    """A line in several, if it is long: the arguments of its widest brackets one a line."""
    if len(line) <= width:
        return [line]
    spans, opened = [], []
    for k, c in enumerate(line):
        if c in "([{":
            opened.append(k)
        elif c in ")]}" and opened:
            spans.append((k - opened[-1], opened.pop(), k))
    if not spans:
        return [line]
    _, first, last = max(spans)
    parts, depth, start = [], 0, first + 1
    for k in range(first + 1, last):
        depth += (line[k] in "([{") - (line[k] in ")]}")
        if line[k] == "," and depth == 0:
            parts.append(line[start : k + 1].strip())
            start = k + 1
    rest = line[start:last].strip()
    parts += [rest + "," * bool(parts)] if rest else []
    inner = " " * (len(line) - len(line.lstrip()) + 4)
    lines = [piece for part in parts for piece in _broken(inner + part, width)]
    return [line[: first + 1], *lines, " " * (len(inner) - 4) + line[last:]]


def _parameters(fused: Fused, args: tuple, kwargs: dict) -> tuple[list[str], list[str], list[str]]:
    """(the parameters of the function, the names of its arrays in their order, statements that take them apart)."""
    given, named = fused.arrays(args, kwargs)
    try:
        signature = inspect.signature(fused)
        bound = [*signature.bind(*args, **kwargs).signature.parameters.values()]
    except (TypeError, ValueError):
        bound = []
    names = Names()
    params, leaves, lines = [], [], []
    for key, value in [*sorted(given.items()), *sorted(named.items())]:
        name = key if isinstance(key, str) else f"x{key}"
        if isinstance(key, int) and key < len(bound) and bound[key].kind is not inspect.Parameter.VAR_POSITIONAL:
            name = bound[key].name
        name = names.new(name)
        params.append(name)
        count = len(jax.tree.leaves(value))
        if count == 1 and jax.tree.structure(value) == jax.tree.structure(0):
            leaves.append(name)
            continue
        own = [names.new(f"{name}_{k}") for k in range(count)]
        leaves += own
        if own:
            lines.append(f"{', '.join(own)}{',' * (len(own) == 1)} = jax.tree.leaves({name})")
    return params, leaves, lines


def _tree_text(tree: Any) -> str:
    if tree is None or isinstance(tree, str):
        return str(tree)
    if type(tree) is dict:
        return "{" + ", ".join(f"{k!r}: {_tree_text(v)}" for k, v in tree.items()) + "}"
    if type(tree) in (list, tuple):
        inner = ", ".join(map(_tree_text, tree))
        return f"[{inner}]" if type(tree) is list else f"({inner}{',' * (len(tree) == 1)})"
    raise UnsupportedError(f"jt.tile writes results of tuples, lists and dicts, got {type(tree).__name__}")
