"""The source of functions: their text, the `def` that made a code object, and code objects made of another one."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import linecache
import types

from jtile.trace.names import copy_tree


def lines_of(fn: types.FunctionType) -> list[str]:
    """The lines of the file of a function, as they are now; none where there is no file."""
    file = fn.__code__.co_filename
    linecache.checkcache(file)
    return linecache.getlines(file, fn.__globals__)


@functools.lru_cache(maxsize=16)
def parsed(source: str) -> ast.Module | None:
    """The tree of a text; None where it is no Python."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def definition(source: str, name: str, first_line: int) -> ast.FunctionDef | None:
    """A copy of the `def` of this name that starts (with its decorators) on this line."""
    found = _definitions(source).get((name, first_line))
    return copy_tree(found) if found is not None else None


@functools.lru_cache(maxsize=16)
def _definitions(source: str) -> dict[tuple[str, int], ast.FunctionDef]:
    """Every `def` of a text by its name and each line that it may be said to start on; of several, the first."""
    out: dict[tuple[str, int], ast.FunctionDef] = {}
    tree = parsed(source)
    for n in ast.walk(tree) if tree is not None else ():
        if isinstance(n, ast.FunctionDef):
            for line in (n.lineno, *(d.lineno for d in n.decorator_list)):
                out.setdefault((n.name, line), n)
    return out


def strip_annotations(fn: ast.FunctionDef) -> None:
    fn.returns = None
    a = fn.args
    for p in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]:
        p.annotation = None


def compiled(node: ast.FunctionDef, code: types.CodeType, file: str, free: str) -> types.CodeType:
    """The code object of a function that was rewritten: the free names of the one that it was, and one more."""
    names = [ast.arg(n) for n in (*code.co_freevars, free)]  # parameters of a function around it
    # A helper at module level that calls itself finds itself among the globals, not in the function around it here.
    own = [] if node.name in code.co_freevars else [ast.Global([node.name])]
    body = [*own, node]
    outer = ast.FunctionDef("__outer__", ast.arguments([], names, None, [], [], None, []), body, [], type_params=[])
    tree = ast.fix_missing_locations(ast.Module([ast.copy_location(outer, node)], []))
    module = compile(tree, file, "exec", flags=code.co_flags & _future_mask(), dont_inherit=True)
    (outer_code,) = [k for k in module.co_consts if inspect.iscode(k)]
    (inner,) = [k for k in outer_code.co_consts if inspect.iscode(k) and k.co_name == code.co_name]
    return inner.replace(co_qualname=code.co_qualname)


def _future_mask() -> int:
    """The bits of a code object's flags that stand for its module's `from __future__` imports."""
    out = 0
    for name in __future__.all_feature_names:
        out |= getattr(__future__, name).compiler_flag
    return out
