"""HIVM text, as `bishengir-compile` writes it, to functions, blocks and ops: the lines of MLIR's own printer.

One op stands on one line; a line that ends in `{` opens a region. Nothing but what the checker asks for is understood:
operands and types stay text until `scalars.py` or `effects.py` looks at them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from jtile._errors import ParseError


@dataclasses.dataclass(eq=False)
class Op:
    """An op, written `results = name text`, and its line (from 1). `results`: (name, number of values) of each."""

    name: str
    results: tuple[tuple[str, int], ...]
    text: str
    line: int
    blocks: list[Block] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        shown = f"{self.name}{self.text}"
        shown = shown if len(shown) <= 100 else shown[:97] + "..."
        return f"line {self.line}: {shown}"


@dataclasses.dataclass(eq=False)
class Block:
    args: tuple[str, ...] = ()
    ops: list[Op] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Function:
    """A function of the module. `args`: (name, type) of each argument."""

    name: str
    args: tuple[tuple[str, str], ...]
    attributes: str
    body: Block
    line: int


@dataclasses.dataclass(eq=False)
class Module:
    """`attributes`: those of the module; `maps`: text of each affine map; `shadows`: functions of which only the first
    of two vector cores stores anything: the second repeats its work, for the flags alone."""

    functions: dict[str, Function]
    maps: dict[str, str]
    attributes: str
    shadows: set[str] = dataclasses.field(default_factory=set)


_OP = re.compile(r"(?:(%[\w:, %#-]+?) = )?\"?([a-z_]\w*(?:\.\w+)*)\"?(.*)")
_FUNC = re.compile(r"func\.func (?:\w+ )?@([\w.$-]+)\(")
_MAP = re.compile(r"(#\w+) = affine_map<(.*)>$")
_ARG = re.compile(r"(%[\w-]+): ([^%]*?)(?:,\s*$|$)")


def read(text: str) -> Module:
    """Read a module; ParseError for text that is not one."""
    module, stack = Module({}, {}, ""), []  # the stack has pairs (op or function or None, its block)
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("//"):
            continue
        if found := _MAP.match(line):
            module.maps[found[1]] = found[2]
        elif line.startswith("module"):
            module.attributes = line
            stack.append((None, None))
        elif line.startswith("func.func"):
            _function(module, stack, line, number)
        elif line.startswith("}"):
            if "limit_sub_block_id0" in line:
                module.shadows |= {f.name for f, _ in stack if isinstance(f, Function)}
            _close(stack, line, number)
        elif line.startswith("^"):
            stack[-1][1].args = tuple(re.findall(r"(%[\w-]+):", line))
        elif not line.startswith("#"):
            _op(stack, line, number)
    if stack or not module.functions:
        raise ParseError("this is no HIVM text: " + ("a region is not closed" if stack else "it has no function"))
    return module


def _function(module: Module, stack: list, line: str, number: int) -> None:
    found = _FUNC.match(line)
    if found is None:
        raise ParseError(f"line {number}: cannot read the function {line[:80]!r}")
    if not line.endswith("{"):  # a function of the vendor's library is declared only
        return
    inside, rest = _parenthesised(line, found.end() - 1)
    args = tuple(_typed(one) for one in split(inside))
    function = Function(found[1], args, rest, Block(tuple(a for a, _ in args)), number)
    module.functions[found[1]] = function
    stack.append((function, function.body))


def _typed(argument: str) -> tuple[str, str]:
    name, _, kind = argument.partition(":")
    return name.strip(), kind.strip()


def _close(stack: list, line: str, number: int) -> None:
    if not stack:
        raise ParseError(f"line {number}: a region ends that does not begin")
    owner, _ = stack.pop()
    if line.endswith("{") and isinstance(owner, Op):  # `} else {` or `} do {` begins another region of the op
        owner.blocks.append(Block())
        stack.append((owner, owner.blocks[-1]))


def _op(stack: list, line: str, number: int) -> None:
    found = _OP.match(line)
    if found is None or not stack or stack[-1][1] is None:
        raise ParseError(f"line {number}: cannot read {line[:80]!r}")
    results = []
    for name in (found[1] or "").split(","):
        name, _, count = name.strip().partition(":")
        results += [(name, int(count or 1))] if name else []
    op = Op(found[2], tuple(results), found[3], number)
    stack[-1][1].ops.append(op)
    if line.endswith("{"):
        op.blocks.append(Block(tuple(_block_args(op))))
        stack.append((op, op.blocks[0]))


def _block_args(op: Op) -> Iterator[str]:
    """The values that a loop's region begins with: they stand in the loop's own line."""
    if op.name == "scf.for":
        yield re.match(r"\s*(?:unsigned )?(%[\w-]+) =", op.text)[1]  # pyright: ignore[reportOptionalSubscript]
    carried = re.search(r"iter_args\(([^)]*)\)", op.text)
    if op.name == "scf.while":
        carried = re.match(r"\s*\(([^)]*)\)", op.text)
    for pair in split(carried[1]) if carried else ():
        yield pair.split("=")[0].strip()


def split(text: str) -> list[str]:
    """The parts of a text between the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for k, c in enumerate(text):
        if c in "([{<":
            depth += 1
        elif c in ")]}" or (c == ">" and text[k - 1] != "-"):
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:k].strip())
            start = k + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _parenthesised(line: str, start: int) -> tuple[str, str]:
    """The text that the parenthesis at `start` encloses, and the text behind it."""
    depth = 0
    for k in range(start, len(line)):
        depth += (line[k] == "(") - (line[k] == ")")
        if depth == 0:
            return line[start + 1 : k], line[k + 1 :]
    raise ParseError(f"a parenthesis is not closed: {line[:80]!r}")


# -- types ----------------------------------------------------------------------------------------------------------

_MEMREF = re.compile(r"memref<((?:[\d?]+x)*)(\w+)(?:, strided<\[([^\]]*)\](?:, offset: [?\d]+)?>)?"
                     r"(?:, (?:#hivm\.address_space<(\w+)>|#(\w+)))?[^>]*>")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MemRef:
    """A memref type: `sizes` and `strides` in elements, None where the type does not say; `bits` of an element; a type
    that names no space is of "gm"."""

    sizes: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    bits: int
    space: str


def memref(text: str) -> MemRef | None:
    """The first memref type in a text."""
    found = _MEMREF.search(text)
    if found is None:
        return None
    sizes = tuple(None if n == "?" else int(n) for n in found[1].split("x")[:-1])
    if found[3] is not None:
        strides = tuple(None if n.strip() == "?" else int(n) for n in found[3].split(",") if n.strip())
    else:
        strides = contiguous(sizes)
    return MemRef(sizes, strides, bits(found[2]), found[4] or found[5] or "gm")


def contiguous(sizes: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The strides of an array whose rows follow each other without gaps."""
    out, step = [], 1
    for n in reversed(sizes):
        out.append(step)
        step = None if n is None or step is None else step * n
    return tuple(reversed(out))


def bits(kind: str) -> int:
    """Bits of an element in memory: "f32", "i8", "bf16"; an i1 is one bit."""
    found = re.search(r"\d+", kind)
    return int(found[0]) if found else 64  # a type without a width is `index`, of 64 bits
