"""Tile IR as text. The layout of an op follows from the fields of its card; `parser.py` reads the same layout.

    %r0, %r1 = mnemonic BARE %operand[index], [%list, %of], ... name=value ... : type, type

BARE are the attributes that say what the op is: `fn`, `format`, or the first attribute of a card without operands. The
attributes `shape` and `dtype` stand in the result type, and so do `slots`, `count` and `arrivals` of memory. Attributes
that have their default are left out. An operand called `at` says which one of those of the operand before it:
`%full[%s]`. Behind the place of an asynchronous copy an arrow says which way it goes. Loops, branches and roles have a
form of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .block import AsyncLoad, AsyncStore, Prefetch, Roles
from .control import For, If, While
from .core import NOWHERE, At, Block, Dim, Index, Kernel, Loc, Op, Span, Take, Tile, Value
from .elementwise import Map
from .extents import Extent
from .shapes import Full
from .types import spell_size

WIDTH = 120
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def print_kernel(kernel: Kernel, locations: bool = False, note: Callable[[Op], str] | None = None) -> str:
    """The kernel as text that `parse_kernel` reads back; `note` gives a comment behind an op, or "".

    The text is canonical: it depends on the kernel alone (ops, types, attributes, name hints), not on the process.
    With `locations`, every op that has one ends in its source location `@"file":line`.
    """
    p = _Printer(locations, note)
    params = [f"{p.name(v)}: {v.type}" for v in kernel.params]
    tail = ""
    if kernel.grid:
        tail += f" grid({', '.join(map(spell_size, kernel.grid))})"
    if kernel.lanes:
        tail += f" lanes({kernel.lanes})"
    if kernel.devices:
        tail += f" devices({', '.join(f'{literal(axis, bare=True)}={n}' for axis, n in kernel.devices)})"
    if kernel.aliases:
        pairs = (f"{p.name(kernel.inputs[i])} = {p.name(kernel.outputs[o])}" for i, o in kernel.aliases)
        tail += f" alias({', '.join(pairs)})"
    inits = [f"{p.name(v)} = {literal(x)}" for v, x in zip(kernel.outputs, kernel.inits, strict=False) if x is not None]
    if inits:
        tail += f" init({', '.join(inits)})"
    tail += p.location(kernel.loc) + " {"
    head = f"kernel @{kernel.name if _IDENTIFIER.match(kernel.name) else json.dumps(kernel.name)}("
    one = head + ", ".join(params) + ")" + tail
    if len(one) > WIDTH:
        one = head + "\n    " + ",\n    ".join(params) + ")" + tail
    p.lines.append(one)
    p.block(kernel.body, 1)
    p.lines.append("}")
    return "\n".join(p.lines) + "\n"


def print_op(op: Op) -> str:
    """One op (with its regions) alone, for error messages; values keep their hints where these are unique."""
    p = _Printer(False)
    p.op(op, 0)
    return "\n".join(p.lines)


class Namer:
    """Gives every value its name: the hint, made unique, or the next number."""

    def __init__(self) -> None:
        self.names: dict[Value, str] = {}
        self.used: set[str] = set()
        self.unnamed = 0

    def __call__(self, v: Value) -> str:
        name = self.names.get(v)
        if name is None:
            name = self.names[v] = "%" + self._fresh(_hint(v))
        return name

    def _fresh(self, hint: str) -> str:
        if not hint:
            self.unnamed += 1
            return str(self.unnamed - 1)
        name, k = hint, 0
        while name in self.used:
            k += 1
            name = f"{hint}_{k}"
        self.used.add(name)
        return name


def _hint(v: Value) -> str:
    name = re.sub(r"[^A-Za-z0-9_]", "_", v.name) if v.name else ""
    if not name or not name.strip("0123456789_"):  # numbers are the printer's own names
        name = ""
    if not name and isinstance(v.op, Full) and v.op.shape == () and not isinstance(v.op.value, float):
        return f"c{v.op.value}".replace("-", "m").lower()
    return f"v{name}" if name[:1].isdigit() else name


class _Printer:
    def __init__(self, locations: bool, note: Callable[[Op], str] | None = None):
        self.locations, self.note = locations, note
        self.lines: list[str] = []
        self.name = Namer()

    def location(self, loc: Loc) -> str:
        return f" @{json.dumps(loc.file)}:{loc.line}" if self.locations and loc != NOWHERE else ""

    def values(self, vs: Iterable[Value]) -> str:
        return ", ".join(map(self.name, vs))

    def carry(self, params: Sequence[Value], inits: Sequence[Value]) -> str:
        return "(" + ", ".join(f"{self.name(p)} = {self.name(v)}" for p, v in zip(params, inits, strict=True)) + ")"

    def block(self, b: Block, depth: int) -> None:
        for op in b.ops:
            self.op(op, depth)
        if b.yields:
            self.line(depth, f"yield {self.values(b.yields)}")

    def line(self, depth: int, text: str) -> None:
        self.lines.append("  " * depth + text)

    def op(self, op: Op, depth: int) -> None:
        form, first = _FORMS.get(type(op)), len(self.lines)
        if form:
            # Results stand in front of the body in the text, so they are named here, before the values of the body.
            form(self, op, f"{self.values(op.results)} = " if op.results else "", depth)
        else:
            self._plain(op, depth)
        if self.note and (text := self.note(op)):
            self.lines[first] += f"  // {text}"

    def _for(self, op: For, results: str, depth: int) -> None:
        k, *carry = op.body.params
        text = f"{results}for {self.name(k)} in {self.name(op.lo)}..{self.name(op.hi)} step {self.name(op.step)}"
        text += "".join(f" {n}={literal(v)}" for n, v in shown_attributes(op))
        text += f" carry {self.carry(carry, op.inits)}" if carry else ""
        self.line(depth, text + self.location(op.loc) + " {")
        self.block(op.body, depth + 1)
        self.line(depth, "}")

    def _while(self, op: While, results: str, depth: int) -> None:
        self.line(depth, f"{results}while {self.carry(op.cond.params, op.inits)}{self.location(op.loc)} {{")
        self.block(op.cond, depth + 1)
        self.line(depth, f"}} do ({self.values(op.body.params)}) {{")
        self.block(op.body, depth + 1)
        self.line(depth, "}")

    def _if(self, op: If, results: str, depth: int) -> None:
        self.line(depth, f"{results}if {self.name(op.cond)}{self.location(op.loc)} {{")
        self.block(op.then, depth + 1)
        if op.orelse.ops or op.orelse.yields:
            self.line(depth, "} else {")
            self.block(op.orelse, depth + 1)
        self.line(depth, "}")

    def _roles(self, op: Roles, results: str, depth: int) -> None:
        self.line(depth, f"roles{self.location(op.loc)} {{")
        early = op.early or (False,) * len(op.names)
        for name, warps, registers, b, e in zip(op.names, op.warps, op.registers, op.bodies, early, strict=True):
            text = f"role {literal(name, bare=True)} warps={warps}" + (f" registers={registers}" if registers else "")
            text += " early" if e else ""
            self.line(depth + 1, text + " {")
            self.block(b, depth + 2)
            self.line(depth + 1, "}")
        self.line(depth, "}")

    def _plain(self, op: Op, depth: int) -> None:
        form = layout(type(op))
        results = f"{self.values(op.results)} = " if op.results else ""
        words = [op.fn if isinstance(op, Map) else op.mnemonic]
        words += [literal(getattr(op, n), bare=n == "fn") for n in form.bare]
        operands = "".join(form.before[n] + self._operand(op, n, kind, form) for n, kind in form.positional)
        words += [operands] if operands else []
        words += [f"{n}={self.name(getattr(op, n))}" for n in form.optional if getattr(op, n) is not None]
        words += [f"{n}={literal(v)}" for n, v in shown_attributes(op)]
        words += [": " + ", ".join(str(r.type) for r in op.results)] if op.results else []
        text = results + " ".join(words) + self.location(op.loc)
        for n in form.blocks:
            b = getattr(op, n)
            params = ", ".join(f"{self.name(v)}: {v.type}" for v in b.params)
            self.line(depth, f"{text} {n}({params}) {{")
            self.block(b, depth + 1)
            text = "}"
        self.line(depth, text)

    def _operand(self, op: Op, field: str, kind: str, form: Layout) -> str:
        v = getattr(op, field)
        if kind == "operands":
            return self.values(v) if form.single_list else f"[{self.values(v)}]"
        index, at = form.indexed.get(field), form.numbered.get(field)
        text = self.name(v) + (self.index(getattr(op, index)) if index else "")
        return text + (f"[{self.name(getattr(op, at))}]" if at else "")

    def index(self, index: Index) -> str:
        return "[" + ", ".join(map(self.dim, index)) + "]"

    def dim(self, d: Dim) -> str:
        match d:
            case At(v):
                return self.name(v)
            case Span(v, size, stride):
                return f"{self.name(v)}:+{size}" + (f":{stride}" if stride != 1 else "")
            case Tile(v, size, step):
                return f"tile({self.name(v)}, {size}" + (f", step={step})" if step != size else ")")
            case Take(v):
                return f"take({self.name(v)})"


_FORMS: dict[type[Op], Callable[[_Printer, Any, str, int], None]] = {
    For: _Printer._for,
    While: _Printer._while,
    If: _Printer._if,
    Roles: _Printer._roles,
}

# -- the layout of a card, shared with the parser -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the fields of one card stand in its text."""

    bare: tuple[str, ...]
    positional: tuple[tuple[str, str], ...]  # (field, "operand" | "operands")
    before: dict[str, str]  # field of `positional` -> what stands before it: nothing, a comma, an arrow
    indexed: dict[str, str]  # Ref operand -> the index field that is printed behind it
    numbered: dict[str, str]  # operand -> the operand `at` that is printed behind it
    optional: tuple[str, ...]
    named: tuple[str, ...]
    typed: tuple[str, ...]  # shape, dtype, slots, count, arrivals: read off the result type
    blocks: tuple[str, ...]
    single_list: bool  # a list of operands alone needs no brackets


ARROWS = {AsyncLoad: " -> ", AsyncStore: " <- ", Prefetch: " -> "}


@functools.cache
def layout(card: type[Op]) -> Layout:
    """The layout of a card, derived from its fields."""
    fields = card.fields
    names = list(fields)
    attrs = [n for n, k in fields.items() if k == "attr"]
    indexed = {names[i - 1]: n for i, n in enumerate(names) if fields[n] == "index"}
    numbered = {names[i - 1]: n for i, n in enumerate(names) if n == "at" and fields[n] == "operand"}
    positional = [(n, k) for n, k in fields.items() if k in ("operand", "operands") and n not in numbered.values()]
    typed = [n for n in attrs if n in ("shape", "dtype") or (n in ("slots", "count", "arrivals") and not positional)]
    rest = [n for n in attrs if n not in typed]
    bare = [n for n in rest if n in ("fn", "format") and n not in _defaults(card)] if card is not Map else []
    if not positional and not bare:
        bare = [n for n in rest[:1] if _defaults(card).get(n) not in ("false", "true")]
    before = {n: ", " if i else "" for i, (n, _) in enumerate(positional)}
    if card in ARROWS:
        before[positional[1][0]] = ARROWS[card]
    return Layout(
        bare=tuple(bare),
        positional=tuple(positional),
        before=before,
        indexed=indexed,
        numbered=numbered,
        optional=tuple(n for n, k in fields.items() if k == "optional"),
        named=tuple(n for n in rest if n not in bare and not (card is Map and n == "fn")),
        typed=tuple(typed),
        blocks=tuple(n for n, k in fields.items() if k == "block"),
        single_list=len(positional) == 1 and positional[0][1] == "operands",
    )


@functools.cache
def _defaults(card: type[Op]) -> dict[str, str]:
    with_default = [f for f in dataclasses.fields(card) if f.default is not dataclasses.MISSING]
    return {f.name: literal(f.default) for f in with_default if card.fields[f.name] == "attr"}


def shown_attributes(op: Op) -> list[tuple[str, Any]]:
    """Named attributes that differ from their default."""
    named = layout(type(op)).named
    if not named:
        return []
    defaults = _defaults(type(op))
    shown = [(n, getattr(op, n)) for n in named]
    return [(n, v) for n, v in shown if literal(v) != defaults.get(n)]


def literal(v: Any, bare: bool = False) -> str:
    """A static attribute as text: numbers, strings (JSON), tuples, `none`, `true`, `false`."""
    if type(v) is int:  # as most
        return repr(v)
    if isinstance(v, np.generic):
        v = v.item()
    if v is None or isinstance(v, bool):
        return {None: "none", True: "true", False: "false"}[v]
    if isinstance(v, str):
        return v if bare and _IDENTIFIER.match(v) else json.dumps(v)
    if isinstance(v, tuple | list):
        return "(" + ", ".join(literal(x) for x in v) + ")"
    if isinstance(v, int | float):
        return repr(v)
    if isinstance(v, Extent):
        return spell_size(v)
    raise TypeError(f"an attribute of Tile IR is a number, a text, a tuple or None, got {type(v).__name__}")
