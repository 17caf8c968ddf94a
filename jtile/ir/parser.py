"""Reads the text that `printer.py` writes. Comments start with `//`; line breaks matter only before operands."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

from jtile._errors import JtileError, ParseError

from .block import Roles
from .builder import build
from .control import For, If, While
from .core import NOWHERE, OPS, At, Block, Dim, Kernel, Loc, Op, Span, Take, Tile, Value
from .elementwise import ELEMENTWISE, Map
from .extents import Extent, Size, parse_size
from .printer import Layout, layout
from .types import BY_SHORT, ROLES, BarrierType, RefType, SharedType, TileType, Type

_TOKENS = re.compile(
    r"""(?P<space>[ \t\r\n]+|//[^\n]*)
      | (?P<type>(?:tile|ref|shared|barrier)<[^>\n]*>)
      | (?P<size>\{(?=[\w-])[^{}%\n]*\})
      | (?P<value>%[A-Za-z0-9_]+)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<number>-?(?:inf\b|nan\b|(?:\d+\.(?!\.)\d*|\d+)(?:[eE][+-]?\d+)?))
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<punct>\.\.|:\+|->|<-|[@(){}\[\],:=])""",
    re.VERBOSE,
)
_SIZE = re.compile(r"\d+|\{[^{}]*\}")


@dataclasses.dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int
    column: int


def parse_kernel(text: str) -> Kernel:
    """The kernel that `text` spells.

    Raises:
      ParseError: the text breaks the grammar, names an unknown op, value or type, or an op does not fit its operands.
        The message shows line, column and a caret; `.line` and `.column` (both from 1) hold them.
    """
    return _Parser(text).kernel()


class _Parser:
    def __init__(self, text: str):
        self.source = text.split("\n")
        self.tokens = self._tokens(text)
        self.at = 0
        self.values: dict[str, Value] = {}

    # -- tokens -------------------------------------------------------------------------------------------------
    def _tokens(self, text: str) -> list[Token]:
        out, pos, line, start = [], 0, 1, 0
        while pos < len(text):
            m = _TOKENS.match(text, pos)
            if m is None:
                raise self.error(f"unexpected character {text[pos]!r}", Token("", "", line, pos - start + 1))
            kind = m.lastgroup or ""
            if kind != "space":
                out.append(Token(kind, m.group(), line, pos - start + 1))
            elif "\n" in m.group():
                line += m.group().count("\n")
                start = pos + m.group().rindex("\n") + 1
            pos = m.end()
        out.append(Token("end", "", line, pos - start + 1))
        return out

    def error(self, message: str, token: Token | None = None) -> ParseError:
        t = token or self.peek
        shown = self.source[t.line - 1] if t.line <= len(self.source) else ""
        e = ParseError(f"{message}\n  at line {t.line}, column {t.column}\n    {shown}\n    {' ' * (t.column - 1)}^")
        e.line, e.column = t.line, t.column  # type: ignore[attr-defined]
        return e

    @property
    def peek(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        t = self.peek
        self.at += t.kind != "end"
        return t

    def take(self, text: str) -> bool:
        """Consume `text` if it comes next."""
        if self.peek.text != text or self.peek.kind in ("string", "end"):
            return False
        self.at += 1
        return True

    def expect(self, text: str) -> Token:
        t = self.peek
        if not self.take(text):
            raise self.error(f"expected {text!r}, got {t.text or 'the end of the text'!r}")
        return t

    def kind(self, kind: str, what: str) -> Token:
        if self.peek.kind != kind:
            raise self.error(f"expected {what}, got {self.peek.text or 'the end of the text'!r}")
        return self.next()

    def integer(self) -> int:
        t = self.kind("number", "a whole number")
        if not re.fullmatch(r"-?\d+", t.text):
            raise self.error(f"expected a whole number, got {t.text}", t)
        return int(t.text)

    def listed(self, item, close: str) -> list:
        """Parse `item, item, ... close`; the opening bracket is already consumed."""
        out = []
        while not self.take(close):
            if out:
                self.expect(",")
            out.append(item())
        return out

    # -- pieces -------------------------------------------------------------------------------------------------
    def use(self) -> Value:
        t = self.kind("value", "a value")
        if t.text not in self.values:
            raise self.error(f"{t.text} is not defined here", t)
        return self.values[t.text]

    def defined(self) -> Token:
        t = self.kind("value", "the name of a new value")
        if t.text in self.values:
            raise self.error(f"{t.text} is defined twice", t)
        return t

    def define(self, t: Token, v: Value) -> Value:
        if t.text in self.values:
            raise self.error(f"{t.text} is defined twice", t)
        v.name = "" if t.text[1:].isdigit() else t.text[1:]
        self.values[t.text] = v
        return v

    def type(self) -> Type:
        t = self.next()
        if t.text.startswith("barrier<"):
            return self._barrier(t)
        body = t.text[t.text.index("<") + 1 : -1] if t.kind == "type" else t.text
        dims, extra = (s.strip() for s in [*re.split(r",(?![^{]*\})", body, maxsplit=1), ""][:2])
        *shape, short = re.split(r"x(?![^{]*\})", dims)
        word = t.text.split("<")[0]
        fits = {"ref": extra in ("", *ROLES), "shared": re.fullmatch(r"(slots \d+)?", extra)}.get(word, not extra)
        if short not in BY_SHORT or not all(map(_SIZE.fullmatch, shape)) or t.kind not in ("type", "word") or not fits:
            want = "tile<8x4xf32>, f32, ref<8xf32, out>, shared<8x4xf32, slots 2> or barrier<2, arrivals 1>"
            raise self.error(f"expected a type such as {want}, got {t.text!r}", t)
        size, dtype = tuple(self._size(n, t) for n in shape), BY_SHORT[short].name
        if word == "shared":
            if any(isinstance(n, Extent) for n in size):
                raise self.error(f"memory of a block has a static shape, got {t.text!r}", t)
            return SharedType(size, dtype, int(extra.split()[1]) if extra else None)
        return RefType(size, dtype, extra or "in") if word == "ref" else TileType(size, dtype)

    def _barrier(self, t: Token) -> BarrierType:
        """Parse a type of barriers, such as `barrier<4, arrivals 2>`; without a number of arrivals, it is 1."""
        m = re.fullmatch(r"barrier<\s*(\d+)\s*(?:,\s*arrivals (\d+)\s*)?>", t.text)
        if not m:
            raise self.error(f"expected barriers such as barrier<4, arrivals 2>, got {t.text!r}", t)
        return BarrierType(int(m[1]), int(m[2] or 1))

    def _size(self, text: str, token: Token) -> Size:
        """Parse a size, such as `128` or `{cdiv(n, 128)}`."""
        try:
            return parse_size(text.strip("{}"))
        except ValueError as e:
            raise self.error(str(e), token) from e

    def side(self) -> Size:
        """The number of programs of a grid axis."""
        return self._size(self.peek.text, self.next()) if self.peek.kind == "size" else self.integer()

    def literal(self) -> Any:
        t = self.next()
        if t.kind == "number":
            return int(t.text) if re.fullmatch(r"-?\d+", t.text) else float(t.text)
        if t.kind == "string":
            return json.loads(t.text)
        if t.kind == "size":
            return self._size(t.text, t)
        if t.text in ("inf", "nan"):
            return math.inf if t.text == "inf" else math.nan
        if t.text in ("true", "false", "none"):
            return {"true": True, "false": False, "none": None}[t.text]
        if t.text == "(":
            return tuple(self.listed(self.literal, ")"))
        if t.kind == "word":
            return t.text
        raise self.error(f"expected a number, a text or a tuple, got {t.text or 'the end of the text'!r}", t)

    def location(self) -> Loc:
        if not self.take("@"):
            return NOWHERE
        file = json.loads(self.kind("string", "a file name").text)
        self.expect(":")
        return Loc(file, self.integer())

    def dim(self) -> Dim:
        for word, one in (("tile", self._tile), ("take", lambda: Take(self.use()))):
            if self.take(word):
                self.expect("(")
                d = one()
                self.expect(")")
                return d
        v = self.use()
        if not self.take(":+"):
            return At(v)
        size = self.integer()
        return Span(v, size, self.integer() if self.take(":") else 1)

    def _tile(self) -> Tile:
        v = self.use()
        self.expect(",")
        size = step = self.integer()
        if self.take(","):
            self.expect("step")
            self.expect("=")
            step = self.integer()
        return Tile(v, size, step)

    # -- kernel and blocks --------------------------------------------------------------------------------------
    def kernel(self) -> Kernel:
        self.expect("kernel")
        self.expect("@")
        name = self.next()
        self.expect("(")
        params = tuple(self.define(t, Value(type)) for t, type in self.listed(self.parameter, ")"))
        k = Kernel(json.loads(name.text) if name.kind == "string" else name.text, params, (), Block())
        inits: dict[int, Any] = {}
        while self.peek.text in ("grid", "lanes", "devices", "alias", "init"):
            clause = self.next().text
            self.expect("(")
            if clause == "grid":
                k.grid = tuple(self.listed(self.side, ")"))
            elif clause == "lanes":
                k.lanes = self.integer()
                self.expect(")")
            elif clause == "devices":
                k.devices = tuple(self.listed(self._axis, ")"))
            elif clause == "alias":
                pair = lambda: (self._position(k.inputs), self.expect("=") and self._position(k.outputs))
                k.aliases = tuple(self.listed(pair, ")"))
            else:
                inits = dict(self.listed(lambda: (self._position(k.outputs), self.expect("=") and self.literal()), ")"))
        k.inits = tuple(inits.get(i) for i in range(len(k.outputs)))
        k.loc = self.location()
        k.body = self.block([])
        if self.peek.kind != "end":
            raise self.error(f"expected the end of the text, got {self.peek.text!r}")
        return k

    def _axis(self) -> tuple[str, int]:
        """Parse an axis of the mesh and its number of devices, `x=4`."""
        name = self.next()
        self.expect("=")
        return json.loads(name.text) if name.kind == "string" else name.text, self.integer()

    def _position(self, refs: list[Value]) -> int:
        t = self.peek
        v = self.use()
        if v not in refs:
            raise self.error(f"{t.text} is no Ref of the role that belongs here", t)
        return refs.index(v)

    def parameter(self) -> tuple[Token, Type]:
        t = self.kind("value", "the name of a parameter")
        self.expect(":")
        return t, self.type()

    def block(self, params: list[tuple[Token, Type]]) -> Block:
        """Parse a block, `{ ops yield ... }`; names of parameters and those defined inside are unknown outside."""
        outside, self.values = self.values, dict(self.values)
        b = Block(tuple(self.define(t, Value(type)) for t, type in params))
        self.expect("{")
        while not self.take("}"):
            if self.take("yield"):
                b.yields = tuple(self._some_values())
                self.expect("}")
                break
            b.ops.append(self.op())
        self.values = outside
        return b

    def _some_values(self) -> list[Value]:
        out = [self.use()]
        while self.take(","):
            out.append(self.use())
        return out

    # -- ops ----------------------------------------------------------------------------------------------------
    def op(self) -> Op:
        names = []
        if self.peek.kind == "value":
            names.append(self.defined())
            while self.take(","):
                names.append(self.defined())
            self.expect("=")
        word = self.kind("word", "an op")
        forms = {"for": self._for, "while": self._while, "if": self._if, "roles": self._roles}
        special = forms.get(word.text)
        if special:
            op, types = special(word), []
        else:
            op, types = self._plain(word)
        op = self._built(op, word)
        if types and tuple(types) != tuple(r.type for r in op.results):
            got = ", ".join(str(r.type) for r in op.results)
            raise self.error(f"{word.text} gives {got or 'nothing'}, the text says {', '.join(map(str, types))}", word)
        if len(names) != len(op.results):
            raise self.error(f"{word.text} has {len(op.results)} results, the text names {len(names)}", word)
        for t, v in zip(names, op.results, strict=True):
            self.define(t, v)
        return op

    def _built(self, op: Op, word: Token) -> Op:
        try:
            return build(op, op.loc)
        except JtileError as e:
            raise self.error(e.message, word) from e
        except (KeyError, IndexError, ValueError, TypeError) as e:
            raise self.error(f"{word.text}: {e}", word) from e

    def _plain(self, word: Token) -> tuple[Op, list[Type]]:
        card = Map if word.text in ELEMENTWISE else OPS.get(word.text)
        if card is None or (card is Map and word.text == "map"):
            raise self.error(f"there is no op {word.text!r}", word)
        form = layout(card)
        kw: dict[str, Any] = {"fn": word.text} if card is Map else {}
        kw |= {n: self.literal() for n in form.bare}
        self._positional(card, form, kw, word)
        self._named(form, kw)
        types: list[Type] = []
        if self.take(":"):
            types = [self.type()]
            while self.take(","):
                types.append(self.type())
        if form.typed:
            if not types:
                raise self.error(f"{word.text} needs its result type: the shape or the dtype stands there", word)
            kw |= {n: getattr(types[0], n) for n in form.typed if hasattr(types[0], n)}
        loc = self.location()
        for n in form.blocks:
            self.expect(n)
            self.expect("(")
            kw[n] = self.block(self.listed(self.parameter, ")"))
        missing = [f.name for f in dataclasses.fields(card) if f.name not in kw and f.default is dataclasses.MISSING]
        if missing:
            raise self.error(f"{word.text} needs {', '.join(missing)}", word)
        op = card(**kw)
        op.loc = loc
        return op, types

    def _positional(self, card: type[Op], form: Layout, kw: dict[str, Any], word: Token) -> None:
        for n, kind in form.positional:
            if kind == "operands" and form.single_list:
                here = self.peek.kind == "value" and self.peek.line == word.line
                kw[n] = tuple(self._some_values()) if here else ()
                continue
            if form.before[n]:
                self.expect(form.before[n].strip())
            if kind == "operands":
                self.expect("[")
                kw[n] = tuple(self.listed(self.use, "]"))
                continue
            kw[n] = self.use()
            if n in form.indexed:
                self.expect("[")
                kw[form.indexed[n]] = tuple(self.listed(self.dim, "]"))
            if n in form.numbered:
                self.expect("[")
                kw[form.numbered[n]] = self.use()
                self.expect("]")
        kw |= dict.fromkeys(form.optional)

    def _named(self, form: Layout, kw: dict[str, Any]) -> None:
        while self.peek.kind == "word" and self.tokens[self.at + 1].text == "=":
            t = self.next()
            self.expect("=")
            if t.text in form.optional:
                kw[t.text] = self.use()
            elif t.text in form.named:
                kw[t.text] = self.literal()
            else:
                known = ", ".join((*form.optional, *form.named)) or "none"
                raise self.error(f"unknown attribute {t.text!r}; known are {known}", t)

    def _for(self, word: Token) -> Op:
        k = self.defined()
        self.expect("in")
        lo = self.use()
        self.expect("..")
        hi = self.use()
        self.expect("step")
        step = self.use()
        kw: dict[str, Any] = {}
        self._named(layout(For), kw)
        carry, inits = self._carry() if self.take("carry") else ([], ())
        loc = self.location()
        op = For(lo, hi, step, inits, self.block([(k, lo.type), *carry]), **kw)
        op.loc = loc
        return op

    def _carry(self) -> tuple[list[tuple[Token, Type]], tuple[Value, ...]]:
        """Parse the parameters of a region and what they start from, `(%acc = %z, ...)`."""
        self.expect("(")
        pairs = self.listed(lambda: (self.defined(), self.expect("=") and self.use()), ")")
        return [(t, v.type) for t, v in pairs], tuple(v for _, v in pairs)

    def _while(self, word: Token) -> Op:
        carry, inits = self._carry()
        loc = self.location()
        cond = self.block(carry)
        self.expect("do")
        self.expect("(")
        names = self.listed(self.defined, ")")
        if len(names) != len(inits):
            raise self.error(f"this while carries {len(inits)} values, its body takes {len(names)}", word)
        op = While(inits, cond, self.block([(t, v.type) for t, v in zip(names, inits, strict=True)]))
        op.loc = loc
        return op

    def _if(self, word: Token) -> Op:
        cond = self.use()
        loc = self.location()
        then = self.block([])
        op = If(cond, then, self.block([]) if self.take("else") else Block())
        op.loc = loc
        return op

    def _roles(self, word: Token) -> Op:
        """Parse roles, `{ role name warps=4 registers=240 { ... } ... }`."""
        loc = self.location()
        self.expect("{")
        heads, bodies = [], []
        while not self.take("}"):
            self.expect("role")
            heads.append(self._role_head())
            bodies.append(self.block([]))
        names, warps, registers, early = (tuple(h[i] for h in heads) for i in range(4))
        op = Roles(names, warps, registers, tuple(bodies), early if any(early) else ())
        op.loc = loc
        return op

    def _role_head(self) -> tuple[str, int, int, bool]:
        name = self.next()
        if name.kind not in ("word", "string"):
            raise self.error(f"expected the name of a role, got {name.text or 'the end of the text'!r}", name)
        counts = {"warps": -1, "registers": 0}
        while self.peek.text in counts:
            key = self.next().text
            self.expect("=")
            counts[key] = self.integer()
        if counts["warps"] < 0:
            raise self.error("a role needs its number of warps: role name warps=4 { ... }", name)
        text = json.loads(name.text) if name.kind == "string" else name.text
        return text, counts["warps"], counts["registers"], self.take("early")
