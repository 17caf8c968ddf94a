"""The scalar ops of HIVM text: numbers and views of memory, as far as they are known without the data of a call.

A number that depends on data, and every float, is None. Each function takes (op, operand values) and gives the value.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from jtile._errors import ParseError, UnsupportedError

from . import regions
from .read import Op, memref, split
from .regions import Region

Values = Callable[[str], Any]


def value(op: Op, get: Values, maps: dict[str, str]) -> Any:
    """The value of an op without regions; None where it is not known."""
    dialect, _, name = op.name.partition(".")
    if name == "constant":
        return _constant(op)
    if dialect == "memref":
        return _MEMORY[name](op, get) if name in _MEMORY else None
    if dialect == "affine":
        return _affine(op, get, maps)
    if op.name == "hivm.hir.bitcast":
        return regions.view(get(_first(op)), 0, memref(op.text.split("->")[1]))  # pyright: ignore
    if dialect != "arith":
        return None
    if name == "select":
        chosen, yes, no = (get(v) for v in names(op))
        if chosen is None and isinstance(yes, Region):
            raise UnsupportedError(f"the checker of HIVM cannot tell which buffer {op} chooses: that depends on data")
        return None if chosen is None else yes if chosen else no
    if name == "cmpi":
        how = op.text.split(",")[0].strip()
        return _apply(_COMPARE[how.removeprefix("u") if how[0] == "u" else how], op, get, how[0] == "u")
    if name in _CASTS:
        return _cast(op, get)
    if name in _INTEGER:
        return _apply(_INTEGER[name], op, get, name.endswith("ui"))
    return None


def names(op: Op) -> list[str]:
    """The values in front of an op's types."""
    return re.findall(r"%[\w#-]+", op.text.split(" : ")[0])


def _first(op: Op) -> str:
    return names(op)[0]


def _constant(op: Op) -> int | None:
    text = op.text.strip().split(" : ")[0]
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _apply(function: Callable[[int, int], Any], op: Op, get: Values, unsigned: bool) -> int | None:
    a, b = (get(v) for v in names(op))
    if a is None or b is None or isinstance(a, Region):
        return None
    if unsigned:
        mask = (1 << _bits(op.text.rsplit(" : ", 1)[1])) - 1
        a, b = a & mask, b & mask
    try:
        return int(function(a, b))
    except ZeroDivisionError:
        return None


def _bits(kind: str) -> int:
    found = re.fullmatch(r"i(\d+)", kind.strip())
    return int(found[1]) if found else 64


def _cast(op: Op, get: Values) -> int | None:
    number = get(_first(op))
    if number is None:
        return None
    kinds = op.text.rsplit(" : ", 1)[1].split(" to ")
    if op.name in ("arith.extui", "arith.index_castui"):
        number &= (1 << _bits(kinds[0])) - 1
    width = _bits(kinds[1])
    if width == 1:
        return number & 1
    number &= (1 << width) - 1
    return number - (1 << width) if number >> (width - 1) else number


def _toward_zero(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


_CASTS = ("index_cast", "index_castui", "trunci", "extsi", "extui")
_COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "slt": operator.lt, "sle": operator.le, "sgt": operator.gt,
    "sge": operator.ge, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_INTEGER: dict[str, Callable[[int, int], int]] = {
    "addi": operator.add, "subi": operator.sub, "muli": operator.mul, "andi": operator.and_, "ori": operator.or_,
    "xori": operator.xor, "divsi": _toward_zero, "divui": operator.floordiv, "remui": operator.mod,
    "remsi": lambda a, b: a - _toward_zero(a, b) * b, "floordivsi": operator.floordiv,
    "ceildivsi": lambda a, b: -(-a // b), "ceildivui": lambda a, b: -(-a // b),
    "minsi": min, "maxsi": max, "minui": min, "maxui": max,
    "shli": operator.lshift, "shrui": operator.rshift, "shrsi": operator.rshift,
}  # fmt: skip

# -- affine maps ----------------------------------------------------------------------------------------------------

_BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.MatMult: lambda a, b: -(-a // b),
}  # fmt: skip


def _affine(op: Op, get: Values, maps: dict[str, str]) -> int | None:
    """The value of an `affine.apply #map(%d)[%s]`, `affine.min` or `affine.max`."""
    found = re.match(r"\s*(#\w+|affine_map<.*?>)\(([^)]*)\)(?:\[([^\]]*)\])?", op.text)
    if found is None:
        raise ParseError(f"cannot read {op}")
    text = maps[found[1]] if found[1].startswith("#") else found[1].removeprefix("affine_map<").removesuffix(">")
    params, _, results = text.partition("->")
    numbers = [get(v) for part in (found[2], found[3] or "") for v in split(part)]
    if None in numbers:
        return None
    known = dict(zip(re.findall(r"[ds]\d+", params), numbers, strict=True))
    results = results.replace("ceildiv", "@").replace("floordiv", "//").replace("mod", "%")
    values = [_number(ast.parse(r, mode="eval").body, known) for r in split(results.strip()[1:-1])]
    return max(values) if op.name == "affine.max" else min(values)


def _number(node: ast.expr, known: dict[str, int]) -> int:
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_number(node.left, known), _number(node.right, known))
    if isinstance(node, ast.UnaryOp):
        return -_number(node.operand, known)
    return known[node.id] if isinstance(node, ast.Name) else int(node.value)  # pyright: ignore


# -- views of memory ------------------------------------------------------------------------------------------------


def _list(text: str, get: Values) -> list[int | None]:
    return [get(v) if v.startswith("%") else int(v) for v in split(text)]


def _reinterpret(op: Op, get: Values) -> Region:
    found = re.search(r"offset: \[([^\]]*)\], sizes: \[([^\]]*)\], strides: \[([^\]]*)\]", op.text)
    offset, sizes, strides = (_list(t, get) for t in found.groups())  # pyright: ignore[reportOptionalMemberAccess]
    source: Region = get(_first(op))
    first = source.whole[0] if source.whole else 0
    start = None if offset[0] is None else first + offset[0] * source.bits
    return Region(
        source.space, source.base, start, tuple(sizes), tuple(strides), source.bits, source.whole
    )  # the op's offset counts from the base of the buffer


def _subview(op: Op, get: Values) -> Region:
    lists = re.findall(r"\[([^\]]*)\]", op.text.split(" : ")[0])[:3]
    kind = memref(op.text.rsplit(" to ", 1)[1])
    return regions.subview(get(_first(op)), *(_list(t, get) for t in lists), kind)  # pyright: ignore


def _expand(op: Op, get: Values) -> Region:
    shape = re.search(r"output_shape \[([^\]]*)\]", op.text)
    sizes = _list(shape[1], get) if shape else list(memref(op.text.rsplit(" into ", 1)[1]).sizes)  # pyright: ignore
    return regions.expand(get(_first(op)), regions.groups_of(op.text), sizes)


def _view(op: Op, get: Values) -> Region:
    (shift,) = _list(re.search(r"\[([^\]]*)\]", op.text)[1], get)  # pyright: ignore[reportOptionalSubscript]
    return regions.view(get(_first(op)), shift, memref(op.text.rsplit(" to ", 1)[1]))  # pyright: ignore


def _same(op: Op, get: Values) -> Any:
    return get(_first(op))


def element(op: Op, get: Values) -> Region:
    """The element that a `memref.load` or `memref.store` touches."""
    found = re.search(r"(%[\w#-]+)\[([^\]]*)\]", op.text)
    return regions.at(get(found[1]), tuple(_list(found[2], get)))  # pyright: ignore[reportOptionalSubscript]


def metadata(op: Op, get: Values) -> list[Any]:
    """The results of `memref.extract_strided_metadata`: the base, the offset in it, sizes and strides."""
    source: Region = get(_first(op))
    first = source.whole[0] if source.whole else 0
    offset = None if source.start is None else (source.start - first) // source.bits
    return [source, offset, *source.sizes, *source.strides]


def _dim(op: Op, get: Values) -> int | None:
    source, axis = (get(v) for v in names(op))
    return None if axis is None else source.sizes[axis]


_MEMORY: dict[str, Callable[[Op, Values], Any]] = {
    "cast": _same, "memory_space_cast": _same, "reinterpret_cast": _reinterpret, "subview": _subview,
    "collapse_shape": lambda op, get: regions.collapse(get(_first(op)), regions.groups_of(op.text)),
    "expand_shape": _expand, "view": _view, "dim": _dim,
}  # fmt: skip


def operands(op: Op) -> list[str]:
    """The arguments of a call."""
    found = re.search(r"@[\w.$-]+\(([^)]*)\) : \((.*)\) ->", op.text)
    return split(found[1]) if found else []
