"""Which names a piece of Python source assigns and reads, and which are alive after each statement.

A loop or branch over traced values becomes a function whose results are the names that it assigns and that are read
later; that is a question of liveness, answered here by the textbook backward walk over one function's statements.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Names = frozenset[str]
NONE: Names = frozenset()


def parameters(fn: Scope) -> Names:
    a = fn.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *([a.vararg] if a.vararg else []), *([a.kwarg] if a.kwarg else [])]
    return frozenset(p.arg for p in every)


def inside(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every node below, without going into nested functions and classes (but these themselves are given)."""
    stack = list(nodes)
    while stack:
        n = stack.pop()
        yield n
        if isinstance(n, SCOPES):
            stack += [*getattr(n, "decorator_list", []), *_defaults(n)]
        else:
            stack += _children(n)


def _children(n: ast.AST) -> list[ast.AST]:
    """The children of a node, as `ast.iter_child_nodes` in half of the time, but without the contexts of names."""
    out: list[ast.AST] = []
    if isinstance(n, ast.Name | ast.Constant):
        return out
    for field in n._fields:
        part = getattr(n, field, None)
        if isinstance(part, list):
            out += [k for k in part if isinstance(k, ast.AST)]
        elif isinstance(part, ast.AST) and field != "ctx":
            out.append(part)
    return out


def _defaults(n: ast.AST) -> list[ast.AST]:
    a = getattr(n, "args", None)
    return [d for d in [*a.defaults, *a.kw_defaults] if d is not None] if isinstance(a, ast.arguments) else []


def copy_tree(n: Any) -> Any:
    """A deep copy of a syntax tree."""
    if isinstance(n, list):
        return [copy_tree(k) for k in n]
    if not isinstance(n, ast.AST):
        return n
    new = type(n)(**{f: copy_tree(getattr(n, f)) for f in n._fields if hasattr(n, f)})
    return ast.copy_location(new, n) if hasattr(n, "lineno") else new


def assigned(nodes: Iterable[ast.AST]) -> Names:
    """Names that these statements bind in their own scope; loop variables of comprehensions stay inside of those."""
    out: set[str] = set()
    stack = list(nodes)
    while stack:
        n = stack.pop()
        if isinstance(n, _BINDERS):
            out |= _binds(n)
        if isinstance(n, SCOPES):
            continue
        if isinstance(n, COMPREHENSIONS):
            out |= {w.target.id for w in ast.walk(n) if isinstance(w, ast.NamedExpr)}
            continue
        stack += _children(n)
    return frozenset(out)


def touched(nodes: Iterable[ast.AST]) -> Names:
    """Names that these statements bind, and those whose elements they set: `a[i] = v` may change a list or dict `a`."""
    nodes = list(nodes)
    out: set[str] = set()
    for n in inside(nodes):
        if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store | ast.Del):
            base = n.value
            while isinstance(base, ast.Subscript):
                base = base.value
            out |= {base.id} if isinstance(base, ast.Name) else set()
    return assigned(nodes) | out


_BINDERS = (
    ast.Name, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.ExceptHandler,
    ast.MatchAs, ast.MatchStar, ast.MatchMapping,
)  # fmt: skip


def _binds(n: ast.AST) -> set[str]:
    match n:
        case ast.Name(ctx=ast.Store() | ast.Del()):
            return {n.id}
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {n.name}
        case ast.Import() | ast.ImportFrom():
            return {(a.asname or a.name).split(".")[0] for a in n.names}
        case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar():
            return {n.name} if n.name else set()
        case ast.MatchMapping():
            return {n.rest} if n.rest else set()
    return set()


def declared(nodes: Iterable[ast.AST], kind: type) -> Names:
    return frozenset(x for n in inside(nodes) if isinstance(n, kind) for x in getattr(n, "names", ()))


def free_reads(n: ast.AST) -> Names:
    """Names that a function, lambda or any expression below reads, at any depth, less the parameters of its
    functions."""
    if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        body = n.body if isinstance(n.body, list) else [n.body]
        own = parameters(n) | (assigned(body) - declared(body, ast.Nonlocal))
        outer = [*getattr(n, "decorator_list", []), *_defaults(n)]
        return (_all(body) - own) | _all(outer)
    if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load):
        return frozenset({n.id})
    if isinstance(n, COMPREHENSIONS):
        own = assigned([g.target for g in n.generators])
        return (_all(_children(n)) - own) | free_reads(n.generators[0].iter)
    return _all(_children(n))


def _all(nodes: Iterable[ast.AST]) -> Names:
    return frozenset().union(*[free_reads(k) for k in nodes])


class Liveness:
    """The names alive after each statement of one function: `after[stmt]`; and at the start of each loop body:
    `head[stmt]`.

    A nested function reads its free names where it stands and wherever its name is read.
    """

    def __init__(self, body: list[ast.stmt]):
        self.after: dict[ast.stmt, Names] = {}
        self.head: dict[ast.stmt, Names] = {}
        self.local_functions = self._functions(body)
        self._loops: list[tuple[Names, Names]] = []  # (alive at `continue`, alive at `break`) of the loops around
        self.block(body, NONE)

    @staticmethod
    def _functions(body) -> dict[str, Names]:
        out: dict[str, Names] = {}
        for n in inside(body):
            if isinstance(n, ast.FunctionDef):
                out[n.name] = out.get(n.name, NONE) | free_reads(n)
            elif isinstance(n, ast.Assign) and isinstance(n.value, ast.Lambda):
                for t in n.targets:
                    if isinstance(t, ast.Name):
                        out[t.id] = out.get(t.id, NONE) | free_reads(n.value)
        return out

    def reads(self, *nodes: ast.AST | None) -> Names:
        names = _all(n for n in nodes if n is not None)
        seen: Names = NONE
        while todo := names - seen:  # add what the functions named here read, transitively
            seen |= todo
            names |= frozenset().union(*[self.local_functions.get(n, NONE) for n in todo])
        return names

    def block(self, stmts: list[ast.stmt], out: Names) -> Names:
        for s in reversed(stmts):
            self.after[s] = out
            out = self.statement(s, out)
        return out

    def statement(self, s: ast.stmt, out: Names) -> Names:
        match s:
            case ast.If():
                return self.reads(s.test) | self.block(s.body, out) | self.block(s.orelse, out)
            case ast.For() | ast.AsyncFor():
                return self._loop(s, self.block(s.orelse, out), out, NONE, assigned([s.target])) | self.reads(s.iter)
            case ast.While():
                return self._loop(s, self.block(s.orelse, out), out, self.reads(s.test), NONE)
            case ast.With() | ast.AsyncWith():
                return (self.block(s.body, out) - assigned(s.items)) | self.reads(*s.items)
            case ast.Try() | ast.TryStar():
                return self._try(s, out)
            case ast.Match():
                cases = [self.block(c.body, out) | self.reads(c.guard) for c in s.cases]
                return out.union(*cases) | self.reads(s.subject)
            case ast.Return() | ast.Raise():
                return self.reads(s)
            case ast.Break() | ast.Continue():
                again, done = self._loops[-1] if self._loops else (out, out)
                return done if isinstance(s, ast.Break) else again
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return (out - {s.name}) | self.reads(s)
            case ast.AugAssign():
                return (out - assigned([s.target])) | self.reads(s) | assigned([s.target])
        return (out - assigned([s])) | self.reads(s)

    def _loop(self, s, end: Names, out: Names, test: Names, target: Names) -> Names:
        head = end | test
        while True:  # the set only grows, so this ends
            self._loops.append((head, out))
            start = self.block(s.body, head)
            self._loops.pop()
            new = head | (start - target)
            if new == head:
                break
            head = new
        self.head[s] = (start - target) | test
        return head

    def _try(self, s, out: Names) -> Names:
        end = self.block(s.finalbody, out)
        handlers = NONE.union(*[self.block(h.body, end) | self.reads(h.type) for h in s.handlers])
        body = self.block(s.body, self.block(s.orelse, end) | handlers)
        return body | handlers | end  # any statement may fail, so nothing in the body is surely written
