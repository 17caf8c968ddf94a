"""Canonical forms: identities of arithmetic and logic that hold bit for bit (NaN payloads aside)."""

from __future__ import annotations

import math
from typing import Any

from jtile.ir import Cast, Dot, Full, Map, Select, Value
from jtile.ir.types import DTYPES, DType

from .fold import number
from .rewrite import Rewriter, Rules

rules = Rules()
COMMUTATIVE = frozenset({"add", "mul", "and", "or", "xor", "eq", "ne"})
SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _is(v: Value, n: float) -> bool:
    """Whether `v` is the number `n` everywhere, the sign of a zero included."""
    x = number(v)
    return x is not None and x == n and math.copysign(1, x) == math.copysign(1, n)


def _ones(v: Value) -> bool:
    """Whether all bits of a value are set (bool: whether it is true)."""
    d = DTYPES[v.dtype]
    return number(v) == (True if d.kind == "b" else -1 if d.kind == "i" else (1 << d.bits) - 1)


def _full_like(v: Value, value: Any, rw: Rewriter, dtype: str | None = None) -> Value:
    return rw.new(Full(value, v.shape, dtype or v.dtype))


@rules(Map)
def _constant_right(op: Map, rw: Rewriter):
    """Put the constant operand of a commutative function on the right."""
    if len(op.args) != 2 or not isinstance(op.args[0].op, Full) or isinstance(op.args[1].op, Full):
        return None
    a, b = op.args
    if op.fn in COMMUTATIVE:
        return rw.new(Map(op.fn, (b, a)))
    return rw.new(Map(SWAPPED[op.fn], (b, a))) if op.fn in SWAPPED else None


@rules(Map)
def _neutral(op: Map, rw: Rewriter):
    """x + 0, x * 1, x & ones, ...: x. For floats the zero that changes nothing is -0 in a sum, +0 in a difference."""
    if len(op.args) != 2:
        return None
    x, c = op.args
    kind = DTYPES[x.dtype].kind
    match op.fn:
        case "add":
            keep = _is(c, -0.0) if kind == "f" else number(c) == 0
        case "sub":
            keep = _is(c, 0.0) if kind == "f" else number(c) == 0
        case "mul" | "div":
            keep = number(c) == 1
        case "and":
            keep = _ones(c)
        case "or" | "xor" | "shl" | "shr" | "shr_logical":
            keep = number(c) is not None and number(c) == 0
        case _:
            keep = False
    return x if keep else None


@rules(Map)
def _absorbing(op: Map, rw: Rewriter):
    """x * 0, x & 0, x | ones, x rem 1 on whole numbers and bools are constants."""
    if len(op.args) != 2 or DTYPES[op.args[0].dtype].kind == "f":
        return None
    x, c = op.args
    if (op.fn in ("mul", "and") and number(c) == 0 and number(c) is not None) or (op.fn == "or" and _ones(c)):
        return c
    return _full_like(x, 0, rw) if op.fn == "rem" and number(c) == 1 else None


@rules(Map)
def _twice_the_same(op: Map, rw: Rewriter):
    """x & x and max(x, x) are x; x - x and x == x are constants."""
    if len(op.args) != 2 or op.args[0] is not op.args[1]:
        return None
    x = op.args[0]
    if op.fn in ("and", "or", "max", "min"):
        return x
    if DTYPES[x.dtype].kind == "f":
        return None
    if op.fn in ("sub", "xor"):
        return _full_like(x, 0, rw)
    if op.fn in ("eq", "le", "ge", "ne", "lt", "gt"):
        return _full_like(x, op.fn in ("eq", "le", "ge"), rw, "bool")
    return None


@rules(Map)
def _undone(op: Map, rw: Rewriter):
    """not not x and - - x are x; not of a comparison is the comparison that says the opposite."""
    if len(op.args) != 1 or not isinstance(op.args[0].op, Map):
        return None
    inner = op.args[0].op
    if op.fn == inner.fn and op.fn in ("not", "neg"):
        return inner.args[0]
    if op.fn != "not" or inner.fn not in NEGATED:
        return None
    exact = DTYPES[inner.args[0].dtype].kind != "f" or inner.fn in ("eq", "ne")  # NaN is neither less nor not less
    return rw.new(Map(NEGATED[inner.fn], inner.args)) if exact else None


@rules(Map)
def _reassociated(op: Map, rw: Rewriter):
    """(x + c) + d = x + (c + d) on whole numbers, which wrap; likewise `mul and or xor`, and x - c = x + (-c)."""
    if len(op.args) != 2 or DTYPES[op.args[0].dtype].kind == "f" or not isinstance(op.args[1].op, Full):
        return None
    x, c = op.args
    if op.fn == "sub" and DTYPES[x.dtype].kind == "i":
        return rw.new(Map("add", (x, rw.new(Map("neg", (c,))))))
    inner = x.op
    same = isinstance(inner, Map) and inner.fn == op.fn and op.fn in ("add", "mul", "and", "or", "xor")
    if not same or not isinstance(inner, Map) or not isinstance(inner.args[1].op, Full):
        return None
    return rw.new(Map(op.fn, (inner.args[0], rw.new(Map(op.fn, (inner.args[1], c))))))


@rules(Map)
def _sign_of_constant(op: Map, rw: Rewriter):
    """(-x) * c = x * (-c), and likewise a quotient, of floats."""
    if op.fn not in ("mul", "div") or DTYPES[op.args[0].dtype].kind != "f" or not isinstance(op.args[1].op, Full):
        return None
    x, c = op.args
    if not isinstance(x.op, Map) or x.op.fn != "neg":
        return None
    return rw.new(Map(op.fn, (x.op.args[0], rw.new(Map("neg", (c,))))))


@rules(Select)
def _select(op: Select, rw: Rewriter):
    if op.a is op.b:
        return op.a
    if number(op.cond) is not None:
        return op.a if number(op.cond) else op.b
    if isinstance(op.cond.op, Map) and op.cond.op.fn == "not":
        return rw.new(Select(op.cond.op.args[0], op.b, op.a))
    if op.a.dtype == "bool" and number(op.a) is True and number(op.b) is False:
        return op.cond
    return None


# -- casts ------------------------------------------------------------------------------------------------------------

_BYTES = {
    "float8_e4m3fn": 4, "float8_e5m2": 3, "float8_e4m3": 4, "float8_e3m4": 5, "float8_e4m3fnuz": 4,
    "float8_e5m2fnuz": 3, "float8_e4m3b11fnuz": 4,
}  # fmt: skip
_SIGNIFICAND = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, **_BYTES}
_EXACT_IN = {
    **dict.fromkeys(_BYTES, ("float16", "bfloat16", "float32", "float64")),
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}


def exact(src: str, dst: str) -> bool:
    """Whether every number of `src` is one of `dst`."""
    a, b = DTYPES[src], DTYPES[dst]
    if src == dst or b.name in _EXACT_IN.get(src, ()):
        return True
    if a.kind == "f" or b.kind == "b":
        return False
    if b.kind == "f":
        # float16 and wider hold bytes; the range of float16 ends at 65504, which only matters for 16-bit integers.
        return a.bits - (a.kind == "i") <= _SIGNIFICAND.get(dst, 0) and (dst != "float16" or a.bits <= 8) and a.bits > 1
    return a.kind == "b" or _holds(b, a)


def _holds(big: DType, small: DType) -> bool:
    if big.kind == small.kind:
        return big.bits >= small.bits
    return big.kind == "i" and big.bits > small.bits


@rules(Cast)
def _cast(op: Cast, rw: Rewriter):
    """Drop a cast to the dtype that the operand has, and the first of two casts where it loses nothing."""
    x, dtype = op.x, op.dtype
    if x.dtype == dtype:
        return x
    if not isinstance(x.op, Cast) or not exact(x.op.x.dtype, x.dtype):
        return None
    first = x.op.x
    # Whole numbers wrap into integers but saturate out of floats.
    by_float = DTYPES[first.dtype].kind in "iu" and DTYPES[x.dtype].kind == "f" and DTYPES[dtype].kind in "iu"
    return None if by_float and not exact(first.dtype, dtype) else rw.new(Cast(first, dtype))


# -- dots -------------------------------------------------------------------------------------------------------------


@rules(Map)
def _accumulate(op: Map, rw: Rewriter):
    """A product, or a sum of several, plus a tile is a sum that starts from the tile; the order of the sum is the dot's
    own anyway."""
    if op.fn != "add":
        return None
    for product, total in (op.args, op.args[::-1]):
        dots: list[Dot] = []
        while product is not None and isinstance(product.op, Dot) and rw.uses(product) == 1:
            dots.append(product.op)
            product = product.op.acc
        if dots and product is None:
            for d in reversed(dots):
                total = rw.new(Dot(d.a, d.b, total, d.trans_a, d.trans_b, d.precision))
            return total
    return None
