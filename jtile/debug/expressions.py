"""Conditions and values that a user of the debugger writes: arithmetic on arrays by a walk over the syntax tree, in
which nothing else of Python can be said."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jtile._errors import KernelValueError

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Invert: operator.invert,
}  # fmt: skip
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "all": np.all, "any": np.any, "argmax": np.argmax, "argmin": np.argmin, "isfinite": np.isfinite,
    "isinf": np.isinf, "isnan": np.isnan, "len": len, "max": np.max, "mean": np.mean, "min": np.min, "sum": np.sum,
}  # fmt: skip
_METHODS = ("all", "any", "argmax", "argmin", "max", "mean", "min", "sum")
_FIELDS = ("shape", "dtype", "ndim", "size", "T")


def parsed(text: str) -> ast.expr:
    """The syntax tree of an expression, which may only have arithmetic on arrays.

    Raises:
      KernelValueError: it cannot be read, or says something else.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as e:
        raise KernelValueError(f"cannot read the expression {text!r}: {e.msg}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and not isinstance(node, _KNOWN):
            what = type(node).__name__
            raise KernelValueError(f"the expression {text!r} has a {what}: the debugger computes with arrays only")
    return tree


_KNOWN = (
    ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Subscript, ast.Slice, ast.Tuple,
    ast.Attribute, ast.Call,
)  # fmt: skip


def evaluate(text: str, look: Callable[[str], Any]) -> Any:
    """The value of an expression such as `acc.max() > 3` or `o[2, :4] - x[2, :4]`.

    Args:
      look: gives the value of a name.
    Raises:
      KernelValueError: it cannot be read, says something else than arithmetic on arrays, or fails.
    """
    tree = parsed(text)
    try:
        with np.errstate(all="ignore"):
            return _value(tree, look)
    except KernelValueError:
        raise
    except Exception as e:  # NumPy may raise anything for these operands
        raise KernelValueError(f"the expression {text!r} fails: {type(e).__name__}: {e}") from e


def _value(n: Any, look: Callable[[str], Any]) -> Any:
    of = lambda x: None if x is None else _value(x, look)
    match n:
        case ast.Name():
            return look(n.id)
        case ast.Constant():
            return n.value
        case ast.Tuple():
            return tuple(map(of, n.elts))
        case ast.Slice():
            return slice(of(n.lower), of(n.upper), of(n.step))
        case ast.Subscript():
            return of(n.value)[of(n.slice)]
        case ast.BinOp() if type(n.op) in _BINARY:
            return _BINARY[type(n.op)](of(n.left), of(n.right))
        case ast.UnaryOp():
            return _UNARY[type(n.op)](of(n.operand))
        case ast.BoolOp():
            for value in map(of, n.values):
                if bool(value) is isinstance(n.op, ast.Or):
                    break
            return value
        case ast.Compare() if all(type(op) in _COMPARE for op in n.ops):
            return _compared(of(n.left), [(_COMPARE[type(op)], of(x)) for op, x in zip(n.ops, n.comparators)])
        case ast.Attribute() if n.attr in _FIELDS:
            return getattr(of(n.value), n.attr)
        case ast.Call():
            return _called(n, of)
    raise KernelValueError(f"the debugger cannot compute {ast.unparse(n)!r}: it knows arithmetic and {_KNOWS}")


_KNOWS = ", ".join(_FUNCTIONS)


def _compared(left: Any, rest: Sequence[tuple[Callable[[Any, Any], Any], Any]]) -> Any:
    out: Any = True
    for compare, right in rest:
        out = compare(left, right) if out is True else np.logical_and(out, compare(left, right))
        left = right
    return out


def _called(n: ast.Call, of: Callable[[Any], Any]) -> Any:
    args = [of(a) for a in n.args]
    options = {k.arg: of(k.value) for k in n.keywords if k.arg in ("axis", "keepdims")}
    if isinstance(n.func, ast.Name) and n.func.id in _FUNCTIONS and len(options) == len(n.keywords):
        return _FUNCTIONS[n.func.id](*args, **options)
    if isinstance(n.func, ast.Attribute) and n.func.attr in _METHODS and len(options) == len(n.keywords):
        return _FUNCTIONS[n.func.attr](of(n.func.value), *args, **options)
    raise KernelValueError(f"the debugger cannot compute {ast.unparse(n)!r}: its functions are {_KNOWS}")
