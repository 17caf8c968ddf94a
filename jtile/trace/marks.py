"""Marks of names: what the debugger calls the values of a kernel.

A body that is traced for the debugger has `x = named(x, "x")` behind each assignment of `x`. The mark is an operation
of JAX's that does nothing; in Tile IR it is a value of its own whose hint is the name, so that the debugger knows at
each op which value a name has.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jtile.ir import DTYPES
from jtile.language._level import at_tile_level
from jtile.trace.carries import is_traced

MARK = "jtile:"  # prefix of the names of marks; names without it are those of `jax.checkpoint`


def named(x: Any, name: str) -> Any:
    """Mark a traced tile with its name; anything else, and any value of the block level, stays as it is."""
    if not is_traced(x) or not at_tile_level() or not isinstance(x, jax.Array):
        return x
    return checkpoint_name(x, MARK + name) if str(x.dtype) in DTYPES else x


def with_marks(stmts: list[ast.stmt], mark: Callable[[ast.stmt, str], ast.stmt]) -> list[ast.stmt]:
    """The statements with a mark behind each that binds names; functions inside of the body stay as they are."""
    out: list[ast.stmt] = []
    for s in stmts:
        if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out.append(s)
            continue
        for field in ("body", "orelse", "finalbody"):
            if isinstance(getattr(s, field, None), list):
                setattr(s, field, with_marks(getattr(s, field), mark))
        for part in (*getattr(s, "handlers", ()), *getattr(s, "cases", ())):
            part.body = with_marks(part.body, mark)
        out += [s, *(mark(s, name) for name in _targets(s))]
    return out


def _targets(s: ast.stmt) -> list[str]:
    """The names that an assignment binds, in order."""
    match s:
        case ast.Assign():
            targets = s.targets
        case ast.AugAssign() | ast.AnnAssign() if s.value is not None:
            targets = [s.target]
        case _:
            return []
    nodes = [n for t in targets for n in ast.walk(t)]
    names = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return list(dict.fromkeys(names))
