"""What the program calls its values: the names to which its source assigns them."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax

from jtile.fusion.steps import Value

Position = tuple[str, int, int, int, int]  # a file, and where an expression begins and ends in it


def names_of(makers: Mapping[Value, Any]) -> dict[Value, str]:
    """The names that the source gives to values: each that of an assignment whose right side the value's equation is
    the last one of."""
    last: dict[Position, Value] = {}
    for value, eqn in makers.items():
        at = _position(eqn.source_info.traceback)
        # An equation of a gradient has the place of the line that it is derived from, but other values.
        if at is not None and "transpose(" not in str(eqn.source_info.name_stack):
            last[at] = value
    return {v: name for at, v in last.items() if (name := _assigned(at[0]).get(at[1:]))}


def _position(trace: Any) -> Position | None:
    """The position of the innermost frame that is the user's; None if there is none."""
    if trace is None:
        return None
    for code, address in zip(*trace.raw_frames(), strict=True):
        if not code.co_filename.startswith(_own()):
            first, column, last, end = trace.code_addr2location(code, address)
            return code.co_filename, first, column, last, end
    return None


@functools.cache
def _own() -> tuple[str, ...]:
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.path.dirname(jax.__file__) + os.sep, here + os.sep, "<frozen", os.path.join(sys.prefix, "lib")


@functools.cache
def _assigned(file: str) -> dict[tuple[int, int, int, int], str]:
    """The name to which each expression of a file is assigned, by the expression's place."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found: dict[tuple[int, int, int, int], str] = {}
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs += zip(target.elts, value.elts)
            pairs.append((target, value))
        elif isinstance(node, ast.AugAssign):
            pairs.append((node.target, node))  # type: ignore[arg-type]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            pairs.append((node.target, node.value))
        for target, value in pairs:
            if isinstance(target, ast.Name) and value is not None and value.end_lineno and value.end_col_offset:
                found[value.lineno, value.col_offset, value.end_lineno, value.end_col_offset] = target.id
    return found
