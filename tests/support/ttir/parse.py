"""TTIR text -> a tree of statements. Lines end statements; a line that ends in `{` opens a region."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from .types import TtirError, Type, parse_type


@dataclasses.dataclass
class Region:
    """Statements with parameters."""

    params: list[tuple[str, Type]] = dataclasses.field(default_factory=list)
    body: list[Stmt] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Stmt:
    """One op as spelled: `ins` and `outs` are the types before and after the arrow."""

    line: int
    text: str
    name: str
    results: list[str]
    args: list[str] = dataclasses.field(default_factory=list)
    words: list[str] = dataclasses.field(default_factory=list)
    attrs: dict[str, Any] = dataclasses.field(default_factory=dict)
    ins: list[Type] = dataclasses.field(default_factory=list)
    outs: list[Type] = dataclasses.field(default_factory=list)
    arrow: bool = False
    generic: bool = False
    regions: list[Region] = dataclasses.field(default_factory=list)
    head: str = ""
    arg_types: list[Type] = dataclasses.field(default_factory=list)  # found by `check`
    types: list[Type] = dataclasses.field(default_factory=list)
    number: int = 0

    def error(self, message: str) -> TtirError:
        return TtirError(f"line {self.line}: {message}\n  {self.text}")


@dataclasses.dataclass
class Function:
    name: str
    params: list[tuple[str, Type]]
    attrs: list[dict[str, Any]]
    body: list[Stmt]
    results: list[Type]


_NESTING = re.compile(r'["()\[\]{}<>]')


@functools.cache
def _marks(separators: tuple[str, ...]) -> re.Pattern:
    """Strings, arrows, brackets, and the separators, which come first."""
    words = "|".join(re.escape(s) for s in separators)
    return re.compile(rf'(?P<sep>{words})|(?P<skip>"(?:[^"\\]|\\.)*"|->)|(?P<open>[(\[{{<])|(?P<close>[)\]}}>])')


def split(text: str, *separators: str) -> list[str]:
    """Parts between separators that stand outside brackets and strings."""
    if len(separators) == 1 and not _NESTING.search(text):
        return [part.strip() for part in text.split(separators[0])]
    parts, depth, start = [], 0, 0
    for found in _marks(separators).finditer(text):
        kind = found.lastgroup
        if kind == "sep" and depth == 0:
            parts.append(text[start : found.start()].strip())
            start = found.end()
        elif kind in ("open", "close"):
            depth += 1 if kind == "open" else -1
    parts.append(text[start:].strip())
    return parts


def _string_end(text: str, i: int) -> int:
    j = i + 1
    while text[j] != '"':
        j += 2 if text[j] == "\\" else 1
    return j + 1


def parse_attrs(text: str) -> dict[str, Any]:
    """`axis = 0 : i32, order = array<i32: 1, 0>` as numbers, lists, strings and words."""
    out: dict[str, Any] = {}
    for part in split(text, ",") if text.strip() else []:
        key, *value = split(part, "=")
        out[key.strip('"')] = _attr(value[0]) if value else True
    return out


def _attr(text: str) -> Any:
    text = split(text, ":")[0] if not text.startswith("array<") else text
    if text.startswith("array<"):
        inner = text[len("array<") : -1].partition(":")[2]
        return [_attr(x.strip()) for x in inner.split(",") if x.strip()]
    if text.startswith('"'):
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def types_of(text: str) -> list[Type]:
    """The types of a list, in parentheses or not."""
    return list(_types(text.strip()))


@functools.lru_cache(4096)
def _types(text: str) -> tuple[Type, ...]:
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return tuple(parse_type(p) for p in split(text, ",", " * ")) if text.strip() else ()


class _Lines:
    def __init__(self, text: str):
        self.lines: list[tuple[int, str]] = []
        for number, line in enumerate(text.splitlines(), 1):
            opened = re.sub(r"\(\{\s*(?=\^)", "({\n", line).split("\n") if "({" in line else [line]
            for part in opened:
                part = (re.sub(r"\s+//.*$", "", part) if "//" in part else part).strip()
                if part and not part.startswith("#loc"):
                    self.lines.append((number, part))
        self.at = 0

    def next(self) -> tuple[int, str]:
        if self.at >= len(self.lines):
            raise TtirError("the text ends inside a region")
        self.at += 1
        return self.lines[self.at - 1]


def parse(text: str) -> dict[str, Function]:
    """The functions of a module by name."""
    lines, out = _Lines(text), {}
    number, first = lines.next()
    if not (first.startswith("module") and first.endswith("{")):
        raise TtirError(f"line {number}: expected a module: {first}")
    while True:
        number, line = lines.next()
        if line == "}":
            return out
        found = re.fullmatch(
            r"tt\.func (?:public |private )?@([\w.$]+)\((.*?)\)\s*(?:-> (.*?) )?(?:attributes .*)?{", line
        )
        if not found:
            raise TtirError(f"line {number}: expected a function: {line}")
        params, attrs = [], []
        for p in split(found[2], ",") if found[2] else []:
            name, _, rest = p.partition(":")
            kind, *extra = split(rest, " {") if " {" in rest else [rest]
            params.append((name.strip(), parse_type(kind)))
            attrs.append(parse_attrs(extra[0].rstrip("}")) if extra else {})
        body, end = _block(lines)
        if end[1] != "}":
            raise TtirError(f"line {end[0]}: expected the end of the function: {end[1]}")
        out[found[1]] = Function(found[1], params, attrs, body.body, types_of(found[3] or ""))


def _block(lines: _Lines) -> tuple[Region, tuple[int, str]]:
    """Statements up to the line that closes the region, and that line."""
    region = Region()
    while True:
        number, line = lines.next()
        if line.startswith("}"):
            return region, (number, line)
        label = line.startswith("^") and re.fullmatch(r"\^\w+(?:\((.*)\))?:", line)
        if label:
            if region.body:
                raise TtirError(f"line {number}: a second block in a region")
            for p in split(label[1] or "", ",") if label[1] else []:
                name, _, kind = p.partition(":")
                region.params.append((name.strip(), parse_type(kind)))
            continue
        try:
            region.body.append(_statement(number, line, lines))
        except TtirError as e:
            raise e if str(e).startswith("line ") else TtirError(f"line {number}: {e}\n  {line}") from e


_OP = re.compile(r'("?)([a-z_]+(?:\.[a-z_0-9]+)+)\1(.*)$')


def _statement(number: int, line: str, lines: _Lines) -> Stmt:
    names, _, op = line.partition(" = ") if line.startswith("%") else ("", "", line)
    found = _OP.match(op)
    if not found:
        raise TtirError(f"cannot read this statement: {line}")
    stmt = Stmt(number, line, found[2], _results(names), generic=bool(found[1]))
    rest, regions = found[3].strip(), []
    if rest.endswith("({"):
        rest = rest[:-2]
        while True:
            region, (_, close) = _block(lines)
            regions.append(region)
            if close.startswith("})"):
                break
            if close != "}, {":
                raise TtirError(f"expected the end of a region: {close}")
        rest += close[2:]
    elif rest.endswith("{"):
        rest = rest[:-1].strip()
        region, (_, close) = _block(lines)
        regions.append(region)
        while re.fullmatch(r"} (else|do) {", close):
            region, (_, close) = _block(lines)
            regions.append(region)
        if close != "}":
            stmt.attrs.update(parse_attrs(re.fullmatch(r"} (?:attributes )?{(.*)}", close)[1]))  # type: ignore[index]
    stmt.regions = regions
    _operands(stmt, rest)
    return stmt


def _results(text: str) -> list[str]:
    if "," not in text and ":" not in text:
        return [text] if text else []
    out: list[str] = []
    for part in split(text, ","):
        name, _, count = part.partition(":")
        out += [f"{name}#{k}" for k in range(int(count))] if count else [name]
    return out


def _operands(stmt: Stmt, rest: str) -> None:
    """What stands between the name of an op and the end: operands, attributes, words, types."""
    if stmt.name == "arith.constant":
        head, _, kinds = rest.rpartition(" : ") if " : " in rest else (rest, "", "i1")
        stmt.head, stmt.outs = head, [parse_type(kinds)]
        return
    if stmt.name in ("scf.for", "scf.while"):  # `ops_control.control_head` reads them
        stmt.head = rest
        return
    if '"' in rest:  # strings may say anything
        stmt.args, tail = _VALUE.findall(re.sub(_STRING, " ", rest)), _tail(stmt.name, rest)
        stmt.head = tail.head
    else:
        stmt.args, tail = _VALUE.findall(rest), _tail(stmt.name, _VALUE.sub("%", rest))
        first, *between = tail.head.split("%")
        stmt.head = first + "".join(map(str.__add__, stmt.args, between))
    stmt.attrs.update(tail.attrs)
    stmt.words, stmt.arrow, stmt.ins, stmt.outs = list(tail.words), tail.arrow, list(tail.ins), list(tail.outs)


_STRING, _VALUE = r'"(?:[^"\\]|\\.)*"', re.compile(r"%[\w$.]+(?:#\d+)?")


@dataclasses.dataclass(frozen=True)
class _Tail:
    """What a statement says behind the name of its op, but for the names of its operands."""

    head: str
    attrs: dict[str, Any]
    words: list[str]
    arrow: bool
    ins: list[Type]
    outs: list[Type]


@functools.lru_cache(4096)
def _tail(name: str, rest: str) -> _Tail:
    """The tail of the op `name`; most differ in the names of values alone, which are `%` in `rest`."""
    parts = split(rest, " : ", ": ")
    head, kinds = (parts[0], parts[-1]) if len(parts) > 1 else (rest, "")
    if name == "tt.print" and len(parts) > 2:
        head = f"{parts[0]} {parts[1]}"
    attrs: dict[str, Any] = {}
    for body in _braces(head):
        attrs.update(parse_attrs(body[1]))
        head = head.replace(body[0], " ", 1)
    whole = head.strip()
    words = re.findall(_STRING, head)
    head = re.sub(_STRING, " ", head)
    attrs |= {key: _attr(value) for key, value in re.findall(r"\b(\w+) = (\w+)", head)}
    head = re.sub(r"\b(\w+) = (\w+)", " ", head)
    head = re.sub(r"\bfastmath<\w+>|\boverflow<[\w, ]+>", " ", head)
    words += re.findall(r"(?<![%\w.#])[a-z_]\w*", head)
    sides = split(kinds, "->", " to ", " into ") if kinds else split(head, "->")  # scf.if %c -> (types)
    arrow = len(sides) > 1
    ins, outs = types_of(sides[0]) if kinds else [], types_of(sides[1]) if arrow else []
    return _Tail(whole, attrs, words, arrow and bool(kinds), ins, outs)


def _braces(head: str) -> list[tuple[str, str]]:
    """Attribute dictionaries `{...}` and `<{...}>`: whole, and what is inside."""
    out, i = [], 0
    while i < len(head):
        if head[i] == '"':
            i = _string_end(head, i)
            continue
        if head[i] == "{":
            depth, j = 1, i + 1
            while depth:
                if head[j] == '"':
                    j = _string_end(head, j)
                    continue
                depth += (head[j] == "{") - (head[j] == "}")
                j += 1
            whole = (i - 1, j + 1) if i and head[i - 1] == "<" else (i, j)
            out.append((head[slice(*whole)], head[i + 1 : j - 1]))
            i = j
            continue
        i += 1
    return out
