"""The source rewrite: `for ... in jt.range(...)`, `while`, `if`, `and`, `or`, `not` of a kernel become calls of
`runtime`, after `patterns` has made branches of `match` and `jumps` has made flags of `break`, `continue` and `return`.

    for k in jt.range(n):                 def for_line_7(target):
        acc = jt.dot(A[i, k], B, acc)         nonlocal k, acc
                                              k = target
                                              acc = jt.dot(A[i, k], B, acc)
                                          runtime.for_loop(jt.range(n), for_line_7, ("acc",), ("acc", "k"), place)

The runtime decides whether anything is traced; over Python values it does what Python does. Lines, globals, closure and
defaults of the function are kept, so tracebacks and source locations show the user's file.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import types
from collections.abc import Callable
from typing import Any

from jtile.trace import runtime
from jtile.trace.definite import always_bound
from jtile.trace.jumps import RESULT, Jumps, placed
from jtile.trace.marks import with_marks
from jtile.trace.names import (
    NONE,
    Liveness,
    Names,
    assigned,
    declared,
    inside,
    parameters,
    touched,
)
from jtile.trace.patterns import Patterns, reason_to_stay
from jtile.trace.source import compiled, definition, lines_of, parsed, strip_annotations

_RUNTIME = "__jtile_runtime__"
_MARK = "__jtile_rewritten__"
_KINDS = (ast.For, ast.While, ast.If, ast.Match, ast.IfExp, ast.BoolOp, ast.Not)


def rewrite_loops(fn: Callable[..., Any], lines: list[str] | None = None, named: bool = False) -> Callable[..., Any]:
    """`fn` with its loops and branches over traced values turned into `lax` control flow; `fn` itself where there
    is nothing to rewrite, or no source (REPL, lambda, exec): there `jt.range` raises and `jt.fori` is the way.

    `lines` is the text of its file as it was when the function was defined; default: what is there now. With `named`,
    traced values are marked with the names that they are assigned to, for the debugger.
    """
    if isinstance(fn, functools.partial):
        return functools.partial(rewrite_loops(fn.func, lines, named), *fn.args, **fn.keywords)
    if isinstance(fn, types.MethodType):
        return types.MethodType(rewrite_loops(fn.__func__, lines, named), fn.__self__)
    if _done(fn):
        return fn
    file = fn.__code__.co_filename
    lines = lines_of(fn) if lines is None else lines
    code = _rewritten_code(fn.__code__, file, _Lines(lines), named)
    if code is None:
        return fn
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    cells[_RUNTIME] = types.CellType(runtime)
    new = types.FunctionType(
        code, fn.__globals__, fn.__name__, fn.__defaults__, tuple(cells[n] for n in code.co_freevars)
    )
    new.__kwdefaults__ = fn.__kwdefaults__
    functools.update_wrapper(new, fn)
    setattr(new, _MARK, True)
    return new


def _done(fn: Any) -> bool:
    """Whether there is nothing to rewrite, or it has been: a function in a rewritten one was rewritten with it."""
    return not isinstance(fn, types.FunctionType) or getattr(fn, _MARK, False) or _RUNTIME in fn.__code__.co_freevars


def function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a helper function of kernels that contains loops with `jt.range`, or branches over computed values.

    Other helpers need no decorator.

    Args:
      fn: the helper; its source has to be available.

    Returns:
      A function with the same parameters, to be called in kernels.
    """
    if _done(fn):
        return rewrite_loops(fn)
    lines = lines_of(fn)  # the lines as they are now; they are parsed at the first call, so that an import is cheap

    @functools.cache
    def rewritten() -> Callable[..., Any]:
        return rewrite_loops(fn, lines)

    @functools.wraps(fn)
    def helper(*args, **kwargs):
        return rewritten()(*args, **kwargs)

    setattr(helper, _MARK, True)
    return helper


NO_SOURCE = (
    "jtile reads the source of a function to make tile loops and branches of its `for`, `while` and `if`, and this one "
    "has none (it comes from exec or a REPL): write it to a file and import it, or register its text with linecache "
    "under the file name that it is compiled with"
)


def why_plain(code: types.CodeType, line: int) -> str | None:
    """Why the control flow at a line of a function over traced values stays Python's; None where it does not, or there
    is none."""
    text = linecache.getlines(code.co_filename)
    tree = parsed("".join(text))
    for s in ast.walk(tree) if tree is not None else ():  # the statements of a loop are a function that no text has
        if isinstance(s, ast.Match) and any(_covers(c.pattern, line) or _covers(c.guard, line) for c in s.cases):
            why = reason_to_stay(s)
            if why is not None:
                return (
                    f"this `match` stays Python's because of {why}: match what is traced in a `match` of its own, "
                    "whose patterns are values, or write `if`"
                )
    if _RUNTIME in code.co_freevars:
        return None
    if not text:
        return NO_SOURCE
    node = definition("".join(text), code.co_name, code.co_firstlineno)
    if node is None or not any(map(_matters, ast.walk(node))):
        return None
    return f"or decorate {code.co_name} with @jt.function, so that its `if`, `while` and `and` take traced values"


def _covers(n: Any, line: int) -> bool:
    """Whether a part of a text, if it is there, reaches over a line."""
    return n is not None and n.lineno <= line <= n.end_lineno


class _Lines:
    """The text of a function's file, out of the cache key: equal code has equal text."""

    def __init__(self, value: list[str]):
        self.value = value

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Lines)


# The file is in the key because equal code on the same line of two files compares equal.
@functools.lru_cache(maxsize=1024)
def _rewritten_code(code: types.CodeType, file: str, lines: _Lines, named: bool) -> types.CodeType | None:
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return None
    node = definition("".join(lines.value), code.co_name, code.co_firstlineno) if lines.value else None
    if node is None or not (named or any(map(_matters, ast.walk(node)))):
        return None
    if named:
        node.body = with_marks(node.body, lambda s, name: placed(s, _mark(name)))
    node = _Rewriter(file).function(node)
    node.decorator_list = []
    strip_annotations(node)
    return compiled(node, code, file, _RUNTIME)


def _mark(name: str) -> ast.stmt:
    """The statement `name = runtime.named(name, "name")`."""
    call = ast.Call(
        ast.Attribute(ast.Name(_RUNTIME, ast.Load()), "named", ast.Load()),
        [ast.Name(name, ast.Load()), ast.Constant(name)],
        [],
    )
    return ast.Assign([ast.Name(name, ast.Store())], call)


def _matters(n: ast.AST) -> bool:
    """Whether a node is something to rewrite."""
    match n:
        case ast.Compare():
            return len(n.ops) > 1
        case ast.Name():
            return n.id in runtime.BUILTINS
    return isinstance(n, _KINDS)


class _Rewriter:
    """Rewrites one function and the functions inside of it."""

    def __init__(self, file: str):
        self.file = file
        self.count = 0
        self.numbers = itertools.count(1)  # numbers of the names that are made
        self.stops: dict[ast.stmt, str] = {}

    # -- scopes ----------------------------------------------------------------------------------------------------
    def function(self, fn: ast.FunctionDef) -> ast.FunctionDef:
        if any(isinstance(n, ast.Yield | ast.YieldFrom) for n in inside(fn.body)):
            return fn  # a generator stays as it is: its loops cannot move into other functions
        theirs = assigned(fn.body)
        Patterns(self._call, self.numbers).generic_visit(fn)
        jumps = Jumps(fn, lambda s: self._call("truth", s, s.test, self._place(s)), self.numbers)
        fillable = always_bound(fn) if jumps.matter else NONE
        jumps.run()
        self.stops |= jumps.stops
        live = Liveness(fn.body)
        outer = declared(fn.body, ast.Nonlocal)
        globals_ = declared(fn.body, ast.Global)
        local = (theirs | assigned(fn.body) | parameters(fn)) - outer - globals_
        scope = _Scope(live, local, outer, globals_, fillable | ({RESULT} & local))
        own = sorted(scope.local - parameters(fn))
        has_doc = bool(fn.body) and isinstance(fn.body[0], ast.Expr) and isinstance(fn.body[0].value, ast.Constant)
        head = fn.body[:1] if has_doc else []
        body = self.block(fn.body[len(head) :], scope)
        fn.body = [*head, *self._bindings(own, fn), *body]
        return fn

    def _bindings(self, names: list[str], at: ast.AST) -> list[ast.stmt]:
        """The statement `if False: a = b = None`: it makes names local to the function, so a moved body can call them
        nonlocal."""
        if not names:
            return []
        bind = ast.Assign([ast.Name(n, ast.Store()) for n in names], ast.Constant(None))
        return [placed(at, ast.If(ast.Constant(False), [placed(at, bind)], []))]

    def block(self, stmts: list[ast.stmt], scope: _Scope) -> list[ast.stmt]:
        return [new for s in stmts for new in self.statement(s, scope)]

    # -- statements ------------------------------------------------------------------------------------------------
    def statement(self, s: ast.stmt, scope: _Scope) -> list[ast.stmt]:
        match s:
            case ast.FunctionDef():
                s.decorator_list = [self.expression(d) for d in s.decorator_list]
                return [self.function(s)]
            case ast.AsyncFunctionDef() | ast.ClassDef():
                return [s]
            case ast.For():
                return self._for(s, scope)
            case ast.While():
                return self._while(s, scope)
            case ast.If():
                return self._if(s, scope)
        for name in ("body", "orelse", "finalbody"):
            if isinstance(getattr(s, name, None), list):
                setattr(s, name, self.block(getattr(s, name), scope))
        for part in (*getattr(s, "handlers", ()), *getattr(s, "cases", ())):
            part.body = self.block(part.body, scope)
        return [_Expressions(self).shallow(s)]

    def expression(self, e: ast.expr) -> ast.expr:
        return _Expressions(self).visit(e)

    def _for(self, s: ast.For, scope: _Scope) -> list[ast.stmt]:
        it = self.expression(s.iter)
        stuck = _stuck([*s.body, *s.orelse])
        if stuck:
            s.iter = self._call("plain_iter", s, it, ast.Constant(stuck[0]), self._place(stuck[1]))
            s.body, s.orelse = self.block(s.body, scope), self.block(s.orelse, scope)
            if s in self.stops:
                s.body.append(self._leave(s))
            return [s]
        names = scope.variables(s.target, *s.body)
        carry = names & (scope.live.head[s] | _read_behind(s, scope))
        unpack = placed(s, ast.Assign([s.target], ast.Name("__target__", ast.Load())))
        moved = touched([s.target, *s.body])
        fn = self._function("for", s, ["__target__"], moved, [unpack, *self.block(s.body, scope)], scope)
        stop = ast.Constant(self.stops.get(s))
        run = self._call("for_loop", s, it, _name(fn), *self._names(carry, names, scope), stop, self._place(s))
        return [fn, placed(s, ast.Expr(run)), *self.block(s.orelse, scope)]

    def _while(self, s: ast.While, scope: _Scope) -> list[ast.stmt]:
        test = self.expression(s.test)
        stuck = _stuck([*s.body, *s.orelse])
        if stuck:
            s.test = self._call("plain_test", s, test, ast.Constant(stuck[0]), self._place(stuck[1]))
            s.body, s.orelse = self.block(s.body, scope), self.block(s.orelse, scope)
            return [s]
        names = scope.variables(s.test, *s.body)
        carry = names & (scope.live.head[s] | _read_behind(s, scope))
        cond = self._function("while", s, [], assigned([s.test]), [placed(s.test, ast.Return(test))], scope)
        body = self._function("body", s, [], touched(s.body), self.block(s.body, scope), scope)
        every = self._names(carry, names, scope)
        run = self._call("while_loop", s, _name(cond), _name(body), *every, self._place(s))
        return [cond, body, placed(s, ast.Expr(run)), *self.block(s.orelse, scope)]

    def _if(self, s: ast.If, scope: _Scope) -> list[ast.stmt]:
        test = self.expression(s.test)
        stuck = _stuck([*s.body, *s.orelse])
        if stuck:
            s.test = self._call("plain_test", s, test, ast.Constant(stuck[0]), self._place(stuck[1]))
            s.body, s.orelse = self.block(s.body, scope), self.block(s.orelse, scope)
            return [s]
        names = scope.variables(*s.body, *s.orelse)
        sides = touched(s.body), touched(s.orelse)
        then = self._function("then", s, [], sides[0], self.block(s.body, scope), scope)
        other = self._function("else", s, [], sides[1], self.block(s.orelse, scope), scope)
        live = names & scope.live.after[s]
        every = self._names(live, names, scope)
        run = self._call("if_", s, test, _name(then), _name(other), *every, self._place(s))
        return [then, other, placed(s, ast.Expr(run))]

    # -- pieces ----------------------------------------------------------------------------------------------------
    def _names(self, live: Names, names: Names, scope: _Scope) -> list[ast.expr]:
        """What the runtime is told of names: those that go on, those that are assigned, those that may be filled."""
        return [_strings(live), _strings(names), _strings(live & scope.fillable)]

    def _leave(self, s: ast.stmt) -> ast.stmt:
        """The statement `if stopped: break` at the end of a loop that stays Python's."""
        test = self._call("is_stopped", s, ast.Name(self.stops[s], ast.Load()))
        return placed(s, ast.If(test, [placed(s, ast.Break())], []))

    def _function(self, kind: str, at: ast.stmt, params, names, body, scope: _Scope) -> ast.FunctionDef:
        """A nested function of moved statements, whose assigned names are the enclosing function's."""
        self.count += 1
        ours = sorted(n for n in names if n in scope.local or n in scope.outer)
        theirs = sorted(n for n in names if n in scope.globals)
        head = [placed(at, ast.Nonlocal(ours))] if ours else []
        head += [placed(at, ast.Global(theirs))] if theirs else []
        args = ast.arguments([], [ast.arg(p) for p in params], None, [], [], None, [])
        body = [*head, *body] or [placed(at, ast.Pass())]
        return placed(at, ast.FunctionDef(f"__{kind}_line_{at.lineno}_{self.count}__", args, body, [], type_params=[]))

    def _call(self, fn: str, at: ast.AST, *args: ast.expr) -> ast.Call:
        return placed(at, ast.Call(ast.Attribute(ast.Name(_RUNTIME, ast.Load()), fn, ast.Load()), list(args), []))

    def _place(self, at: Any) -> ast.expr:
        return ast.Tuple([ast.Constant(v) for v in (self.file, at.lineno, at.col_offset)], ast.Load())


class _Scope:
    """One function: its liveness, its own names, those that it declares nonlocal or global, and those that may be
    filled where a jump leaves them without a value."""

    def __init__(self, live: Liveness, local: Names, outer: Names, globals_: Names, fillable: Names):
        self.live, self.local, self.outer, self.globals, self.fillable = live, local, outer, globals_, fillable

    def variables(self, *nodes: ast.AST):
        """The names that these nodes change and that have a cell: all but globals."""
        return touched(nodes) & (self.local | self.outer)


def _read_behind(s: ast.For | ast.While, scope: _Scope) -> Names:
    """Names alive where a loop has run all of its rounds: at the start of its `else`, if it has one."""
    if not s.orelse:
        return scope.live.after[s]
    return scope.live.statement(s.orelse[0], scope.live.after[s.orelse[0]])


def _stuck(stmts: list[ast.stmt]) -> tuple[str, ast.AST] | None:
    """What keeps these statements from moving into a function: `raise` and `global` right among them, and the jumps
    that `Jumps` leaves alone, such as one in a `finally`.

    A `raise` under a further `if` keeps that one in Python, and not what is around it.
    """
    for s in stmts:
        match s:
            case ast.Return() | ast.Raise() | ast.Global() | ast.Break() | ast.Continue():
                return type(s).__name__.lower(), s
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
        own = isinstance(s, ast.For | ast.While | ast.If)
        for inner, loop in _inner(s):
            found = _stuck(inner)
            jump = {"return", "break", "continue"} - ({"break", "continue"} if loop else set())
            if found and (not own or found[0] in jump or found[0] == "global"):
                return found
    return None


def _inner(s: Any) -> list[tuple[list[ast.stmt], bool]]:
    """The statement lists inside a statement, and whether a `break` in them belongs to `s`."""
    is_loop = isinstance(s, ast.For | ast.While)
    out = [(s.body, is_loop)] if isinstance(getattr(s, "body", None), list) else []
    out += [(getattr(s, n), False) for n in ("orelse", "finalbody") if isinstance(getattr(s, n, None), list)]
    return out + [(p.body, False) for p in (*getattr(s, "handlers", ()), *getattr(s, "cases", ()))]


class _Expressions(ast.NodeTransformer):
    """Turns `a and b`, `a or b`, `not a`, `a if c else b`, `a < b < c`, `max(a, b)` into calls of the runtime."""

    def __init__(self, rewriter: _Rewriter):
        self.r = rewriter

    def shallow(self, s: ast.stmt) -> ast.stmt:
        """The expressions of a statement, not those of the statements inside it."""
        for name, value in ast.iter_fields(s):
            if isinstance(value, ast.expr):
                setattr(s, name, self.visit(value))
            elif isinstance(value, list) and value and isinstance(value[0], ast.expr | ast.withitem | ast.keyword):
                setattr(s, name, [self.visit(v) for v in value])
        return s

    def visit_BoolOp(self, n: ast.BoolOp):
        self.generic_visit(n)
        if _binds_or_waits(n):
            return n
        fn = "and_" if isinstance(n.op, ast.And) else "or_"
        out = n.values[-1]
        for v in reversed(n.values[:-1]):
            out = self.r._call(fn, n, v, _thunk(out), self.r._place(n))
        return out

    def visit_UnaryOp(self, n: ast.UnaryOp):
        self.generic_visit(n)
        return self.r._call("not_", n, n.operand, self.r._place(n)) if isinstance(n.op, ast.Not) else n

    def visit_IfExp(self, n: ast.IfExp):
        self.generic_visit(n)
        if _binds_or_waits(n.body) or _binds_or_waits(n.orelse):
            return n
        return self.r._call("if_expression", n, n.test, _thunk(n.body), _thunk(n.orelse), self.r._place(n))

    def visit_Compare(self, n: ast.Compare):
        self.generic_visit(n)
        if len(n.ops) == 1 or _binds_or_waits(n):
            return n
        rest: list[ast.expr] = [
            ast.Tuple([ast.Constant(type(op).__name__), _thunk(right)], ast.Load())
            for op, right in zip(n.ops, n.comparators, strict=True)
        ]
        return self.r._call("compare", n, n.left, ast.Tuple(rest, ast.Load()), self.r._place(n))

    def visit_Name(self, n: ast.Name):
        if n.id not in runtime.BUILTINS or not isinstance(n.ctx, ast.Load):
            return n
        return self.r._call("builtin", n, n, self.r._place(n))


def _binds_or_waits(n: ast.AST) -> bool:
    return any(isinstance(k, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for k in ast.walk(n))


def _thunk(e: ast.expr) -> ast.expr:
    return placed(e, ast.Lambda(ast.arguments([], [], None, [], [], None, []), e))


def _name(fn: ast.FunctionDef) -> ast.expr:
    return ast.Name(fn.name, ast.Load())


def _strings(names) -> ast.expr:
    return ast.Tuple([ast.Constant(n) for n in sorted(names)], ast.Load())
