"""`match` whose patterns are values, sequences of them, `|`, captures and `_`, as a chain of `if`.

So the subject may be traced. What else a pattern may say (classes, mappings, stars) is about Python objects, and such a
`match` stays as it is: `reason_to_stay` says why.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jtile.trace.jumps import placed

Call = Callable[..., ast.expr]


@dataclasses.dataclass
class _Test:
    """The test that a pattern makes of a value (None: none), and the names that it gives to parts of the value."""

    test: ast.expr | None
    binds: list[tuple[str, ast.expr]]


_OBJECTS = {ast.MatchClass: "a class", ast.MatchMapping: "a dict", ast.MatchStar: "a starred name"}


def reason_to_stay(s: ast.Match) -> str | None:
    """What makes a `match` stay Python's; None where it becomes a chain of `if`."""
    for case in s.cases:
        for n in ast.walk(case.pattern):
            if type(n) in _OBJECTS:
                return f"{_OBJECTS[type(n)]} in a pattern"
            if isinstance(n, ast.MatchOr) and any(isinstance(k, ast.MatchAs) and k.name for k in ast.walk(n)):
                return "a name inside of `|`"
        if case.guard is not None and any(isinstance(k, _STATEMENTS) for k in ast.walk(case.guard)):
            return "a guard that assigns or waits"
    return None


_STATEMENTS = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


class Patterns(ast.NodeTransformer):
    """Rewrites the `match` statements of one function, not those of the functions inside it.

    Args:
      call: `(name, place, *args)`: the call of a function of the runtime.
    """

    def __init__(self, call: Call, numbers: Iterator[int]):
        self._call = call
        self._numbers = numbers

    def visit_FunctionDef(self, n: ast.FunctionDef) -> ast.AST:
        return n

    def visit_AsyncFunctionDef(self, n: ast.AsyncFunctionDef) -> ast.AST:
        return n

    def visit_ClassDef(self, n: ast.ClassDef) -> ast.AST:
        return n

    def visit_Lambda(self, n: ast.Lambda) -> ast.AST:
        return n

    def visit_Match(self, s: ast.Match) -> Any:
        self.generic_visit(s)
        name = f"__subject_{next(self._numbers)}__"
        subject = lambda: ast.Name(name, ast.Load())
        if reason_to_stay(s) is not None:
            return s
        tests = [self._pattern(c.pattern, subject) for c in s.cases]
        chain: list[ast.stmt] = []
        for case, found in zip(reversed(s.cases), reversed(tests), strict=True):
            chain = self._case(case, found, chain)
        return [placed(s, ast.Assign([ast.Name(name, ast.Store())], s.subject)), *chain]

    def _pattern(self, p: ast.pattern, value: Callable[[], ast.expr]) -> _Test:
        match p:
            case ast.MatchValue():
                return _Test(self._call("equals", p, value(), p.value), [])
            case ast.MatchSingleton():
                return _Test(self._call("is_singleton", p, value(), ast.Constant(p.value)), [])
            case ast.MatchAs():
                found = _Test(None, []) if p.pattern is None else self._pattern(p.pattern, value)
                return _Test(found.test, found.binds + ([(p.name, value())] if p.name else []))
            case ast.MatchOr():
                found = [self._pattern(q, value) for q in p.patterns]
                tests = [f.test for f in found if f.test is not None]
                return _Test(placed(p, ast.BoolOp(ast.Or(), tests)) if len(tests) == len(found) else None, [])
            case ast.MatchSequence():
                return self._sequence(p, value)
        raise AssertionError(p)

    def _sequence(self, p: ast.MatchSequence, value: Callable[[], ast.expr]) -> _Test:
        tests = [self._call("is_sequence", p, value(), ast.Constant(len(p.patterns)))]
        binds = []
        for k, q in enumerate(p.patterns):
            found = self._pattern(q, lambda k=k: ast.Subscript(value(), ast.Constant(k), ast.Load()))
            tests += [found.test] if found.test is not None else []
            binds += found.binds
        return _Test(tests[0] if len(tests) == 1 else placed(p, ast.BoolOp(ast.And(), tests)), binds)

    def _case(self, case: ast.match_case, found: _Test, others: list[ast.stmt]) -> list[ast.stmt]:
        """One case in front of the chain of the later ones. A guard that fails leaves the names bound, as in Python."""
        place, guard, test = case.pattern, case.guard, found.test
        binds = lambda: [placed(place, ast.Assign([ast.Name(n, ast.Store())], v)) for n, v in found.binds]
        if test is None:
            return [*binds(), *([placed(place, ast.If(guard, case.body, others))] if guard is not None else case.body)]
        first: list[ast.stmt] = []
        if guard is not None and found.binds:
            hit = f"__fits_{next(self._numbers)}__"
            first = [placed(place, ast.Assign([ast.Name(hit, ast.Store())], test))]
            first += [placed(place, ast.If(ast.Name(hit, ast.Load()), binds(), []))]
            test, guard = ast.Name(hit, ast.Load()), _with_names(guard, found.binds)
        if guard is not None:
            test = placed(place, ast.BoolOp(ast.And(), [test, guard]))
        return [*first, placed(place, ast.If(test, [*binds(), *case.body], others))]


def _with_names(guard: ast.expr, binds: list[tuple[str, ast.expr]]) -> ast.expr:
    """The guard of a case, in which its names stand for parts of the subject before they are bound."""
    args = ast.arguments([], [ast.arg(n) for n, _ in binds], None, [], [], None, [])
    return placed(guard, ast.Call(ast.Lambda(args, guard), [v for _, v in binds], []))
