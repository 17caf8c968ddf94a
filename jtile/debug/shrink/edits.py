"""What may be cut from a file: each edit of a syntax tree gives a smaller one, which may or may not still fail alike.

A pass is a function from a tree to a list of edits; an edit gives the changed tree when it is called. Trees share what
an edit leaves alone, so nobody writes to them.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Edit = Callable[[], ast.Module]
Pass = Callable[[ast.Module], list[Edit]]

_DTYPES = ("bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int64", "int16", "int8", "uint8")
_RANDOM = ("integers", "normal", "rand", "randint", "randn", "random", "standard_normal", "uniform")
_BODIES = ("body", "orelse", "finalbody")


def weight(tree: ast.AST) -> float:
    """How large a tree is: an edit must make that less, so that every search ends."""
    total = 0.0
    for node in ast.walk(tree):
        total += 4
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and math.isfinite(node.value):
            value = abs(float(node.value))
            total += math.log2(1 + value) + (0 if value == int(value) else 4)
        elif isinstance(node, ast.Attribute) and node.attr in _DTYPES:
            total += 1
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RANDOM:
            total += 24
    return total


def rebuilt(node: Any, swaps: Mapping[int, Any]) -> Any:
    """A node in which some, by `id`, are others; a list stands for several in a list, and an empty one for none."""
    if isinstance(node, list):
        out: list[Any] = []
        for item in node:
            new = rebuilt(item, swaps)
            out += new if isinstance(new, list) else [new]
        return out
    if not isinstance(node, ast.AST):
        return node
    if id(node) in swaps:
        return swaps[id(node)]
    fields = {name: rebuilt(value, swaps) for name, value in ast.iter_fields(node)}
    if all(fields[name] is value or fields[name] == value for name, value in ast.iter_fields(node)):
        return node
    if "body" in fields and fields["body"] == [] and not isinstance(node, ast.Module):
        fields["body"] = [ast.Pass()]
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, None if value == [] and not isinstance(getattr(node, name), list) else value)
    return new


def _swap(tree: ast.Module, swaps: Mapping[int, Any]) -> Edit:
    return lambda: rebuilt(tree, swaps)


def _lists(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """The blocks of statements, outer ones first."""
    for node in ast.walk(tree):
        for name in _BODIES:
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def statements(count: int, *, inside: bool = True) -> Pass:
    """Leave out so many statements that stand one behind the other; `inside`: of functions, too."""

    def edits(tree: ast.Module) -> list[Edit]:
        found = []
        for block in _lists(tree) if inside else [tree.body]:
            if count > 1 and len(block) < count:
                continue
            for start in range(0, len(block), count):
                gone = block[start : start + count]
                if not (len(block) == 1 and isinstance(block[0], ast.Pass)):
                    found.append(_swap(tree, {id(s): [] for s in gone}))
        return found

    return edits


def blocks(tree: ast.Module) -> list[Edit]:
    """Leave out what is around statements: an `if`, a `with`, a loop, of which the first round stays."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.If():
                found += [_swap(tree, {id(node): node.body}), _swap(tree, {id(node): node.orelse})]
            case ast.With() | ast.While() | ast.Try() | ast.FunctionDef():
                found.append(_swap(tree, {id(node): node.body}))
            case ast.For():
                first = ast.Assign([node.target], ast.Constant(0), lineno=0)
                found.append(_swap(tree, {id(node): [first, *node.body]}))
                found += [_swap(tree, {id(node.iter): call}) for call in _rounds(node.iter)]
    return found


def _rounds(loop: ast.expr) -> Iterator[ast.Call]:
    """The range of a loop, cut to one round and to two rounds."""
    if isinstance(loop, ast.Call) and loop.args:
        for count in (1, 2):
            yield ast.Call(loop.func, [ast.Constant(count)], loop.keywords)


def halves(tree: ast.Module) -> list[Edit]:
    """Halve all sizes at once: those above 2, above 8, above 32."""
    found = []
    for least in (2, 8, 32):
        sizes = [n for n in _numbers(tree) if isinstance(n.value, int) and n.value > least]
        if sizes:
            found.append(_swap(tree, {id(n): ast.Constant(max(n.value // 2, 1)) for n in sizes}))
    return found


def _numbers(tree: ast.AST) -> list[ast.Constant]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) in (int, float)]


def equal_numbers(tree: ast.Module) -> list[Edit]:
    """Make a number smaller wherever it stands, the largest ones first."""
    found = []
    places: dict[int, list[ast.Constant]] = {}
    for n in _numbers(tree):
        if isinstance(n.value, int) and abs(n.value) > 1:
            places.setdefault(n.value, []).append(n)
    for value in sorted(places, reverse=True):
        for new in _smaller(value)[1:]:
            found.append(_swap(tree, {id(n): ast.Constant(new) for n in places[value]}))
    return found


def numbers(tree: ast.Module) -> list[Edit]:
    """Make one number smaller."""
    return [_swap(tree, {id(n): ast.Constant(new)}) for n in _numbers(tree) for new in _smaller(n.value)]


def sizes(tree: ast.Module) -> list[Edit]:
    """Make numbers smaller that are no part of a formula, outside of functions or as defaults of their parameters."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inside |= {id(n) for s in node.body for n in ast.walk(s)}
        elif isinstance(node, ast.BinOp | ast.Compare):
            inside |= {id(n) for n in ast.walk(node)}
    free = [n for n in _numbers(tree) if id(n) not in inside and isinstance(n.value, int)]
    by_value: dict[int, list[ast.Constant]] = {}
    for n in free:
        by_value.setdefault(n.value, []).append(n)  # type: ignore[arg-type]
    found = [_swap(tree, {id(n): ast.Constant(max(n.value // 2, 1)) for n in free if n.value > 2})]  # type: ignore[operator]
    for value, places in sorted(by_value.items(), reverse=True):
        for new in _smaller(value):
            found.append(_swap(tree, {id(n): ast.Constant(new) for n in places}))
            if len(places) > 1:
                found += [_swap(tree, {id(n): ast.Constant(new)}) for n in places]
    return found


def _smaller(value: Any) -> list[Any]:
    """Numbers to try instead of one, the smallest first."""
    if isinstance(value, float):
        return [v for v in (0.0, 1.0, float(round(value)) if math.isfinite(value) else 1.0) if v != value]
    tries = [0, 1, 2, 3, value // 4, value // 2, value - 1 if abs(value) <= 16 else value * 3 // 4]
    return list(dict.fromkeys(v for v in tries if abs(v) < abs(value) and v * value >= 0))


def expressions(tree: ast.Module) -> list[Edit]:
    """Take a part of an expression for all of it, and leave out elements and arguments."""
    fixed = {id(n) for d in ast.walk(tree) for n in getattr(d, "decorator_list", ())}
    fixed |= {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in fixed:
            if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
                continue
            found += [_swap(tree, {id(node): part}) for part in _parts(node)]
        if isinstance(node, ast.Call):
            found += [_swap(tree, {id(x): []}) for x in (*node.keywords, *node.args)]
        elif isinstance(node, ast.Tuple | ast.List):
            found += [_swap(tree, {id(x): []}) for x in node.elts]
        elif isinstance(node, ast.Import | ast.ImportFrom) and len(node.names) > 1:
            found += [_swap(tree, {id(x): []}) for x in node.names]
    return found


def calls(tree: ast.Module) -> list[Edit]:
    """Take an argument of a call for its result, a value without its name, and one of several names that are assigned
    at once without the others."""
    found = []
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.Return | ast.Expr) and isinstance(value, ast.Call):
            found += [_swap(tree, {id(value): part}) for part in _parts(value)]
        if isinstance(node, ast.Assign):
            found.append(_swap(tree, {id(node): ast.Expr(node.value)}))
        match node:
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)) if len(names) == len(values):
                for k in range(len(names)):
                    left = [pair for j, pair in enumerate(zip(names, values, strict=True)) if j != k]
                    apart = [ast.Assign([name], value, lineno=0) for name, value in left]
                    found.append(_swap(tree, {id(node): apart}))
    return found


def _parts(node: ast.expr) -> Sequence[ast.expr]:
    match node:
        case ast.BinOp():
            return node.left, node.right
        case ast.UnaryOp():
            return (node.operand,)
        case ast.BoolOp():
            return node.values
        case ast.Compare():
            return ast.Constant(True), ast.Constant(False)
        case ast.IfExp():
            return node.body, node.orelse
        case ast.Subscript():
            return node.value, node.slice
        case ast.Call():
            receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return [*receiver, *node.args, *(k.value for k in node.keywords)]
        case ast.Tuple() | ast.List():
            return node.elts
    return ()


def inputs(tree: ast.Module) -> list[Edit]:
    """Ones and zeros in the place of random numbers; float32 in the place of other dtypes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RANDOM:
            names = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
            module = next((name for name in ("np", "jnp", "numpy") if name in names), None)
            shapes = [a for a in (*node.args, *(k.value for k in node.keywords)) if not isinstance(a, ast.Name)]
            for shape in shapes if module else ():
                dtype = ast.Attribute(ast.Name(module, ast.Load()), "float32", ast.Load())
                for name in ("ones", "zeros"):
                    call = ast.Call(ast.Attribute(ast.Name(module, ast.Load()), name, ast.Load()), [shape, dtype], [])
                    found.append(_swap(tree, {id(node): call}))
    odd = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in _DTYPES]
    plain = lambda n: ast.Attribute(n.value, "float32" if "float" in n.attr else "int32", n.ctx)
    if len(odd) > 1:
        found.append(_swap(tree, {id(n): plain(n) for n in odd}))
    return found + [_swap(tree, {id(n): plain(n)}) for n in odd]


def parameters(tree: ast.Module) -> list[Edit]:
    """Leave out a parameter of a function, with what calls give for it, and with that of its decorators' lambdas."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == function.name
        ]
        around = [n for d in function.decorator_list for n in ast.walk(d) if isinstance(n, ast.Lambda)]
        for k, parameter in enumerate(function.args.args):
            gone = [parameter, *(c.args[k] for c in calls if k < len(c.args))]
            gone += [n.args.args[k] for n in around if k < len(n.args.args)]
            found.append(_swap(tree, {id(n): [] for n in gone}))
        for parameter, default in zip(function.args.kwonlyargs, function.args.kw_defaults):
            gone = [parameter, *([default] if default is not None else [])]
            gone += [w for c in calls for w in c.keywords if w.arg == parameter.arg]
            gone += [p for n in around for p in n.args.kwonlyargs if p.arg == parameter.arg]
            found.append(_swap(tree, {id(n): [] for n in gone}))
    return found


STATEMENTS = tuple(statements(count) for count in (32, 16, 8, 4, 2, 1))
OUTSIDE = tuple(statements(count, inside=False) for count in (16, 8, 4, 2, 1))
EVERYTHING: tuple[Pass, ...] = (
    halves, *STATEMENTS, blocks, calls, parameters, inputs, equal_numbers, expressions, numbers,
)  # fmt: skip
SIZES: tuple[Pass, ...] = (sizes, *OUTSIDE, inputs)  # passes that leave formulas as they are
