"""`break`, `continue` and early `return` as flags, so that what stands around them can become `lax` control flow.

    for k in jt.range(n):            stop = False
        if x[k] > 3:                 for item in jt.range(n):
            break                        if not stop:
        s = s + x[k]                         k = item
                                             if x[k] > 3:
                                                 stop = True
                                             else:
                                                 s = s + x[k]

What follows a branch that always jumps goes into the other branch; what follows one that may jump goes under a test of
the flags. A counted loop stays counted: the rounds after a break do nothing. Flags of Python values are Python values,
so that jumps under Python conditions do what they do in Python.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jtile.trace.definite import endless, irrefutable
from jtile.trace.names import copy_tree, inside

RESULT = "__returned__"  # the value that an early return gives


@dataclasses.dataclass(frozen=True)
class Ends:
    """How statements may end: by running to their end, and by which jumps."""

    normal: bool
    jumps: frozenset[str] = frozenset()

    def __or__(self, other: Ends) -> Ends:
        return Ends(self.normal or other.normal, self.jumps | other.jumps)


def ends(stmts: Sequence[ast.stmt]) -> Ends:
    """How a list of statements may end, as far as the source says."""
    jumps: frozenset[str] = frozenset()
    for s in stmts:
        one = _ends(s)
        jumps |= one.jumps
        if not one.normal:
            return Ends(False, jumps)
    return Ends(True, jumps)


def _ends(s: ast.stmt) -> Ends:
    match s:
        case ast.Break() | ast.Continue() | ast.Return():
            return Ends(False, frozenset({type(s).__name__.lower()}))
        case ast.Raise():
            return Ends(False)
        case ast.If():
            return ends(s.body) | ends(s.orelse)
        case ast.For() | ast.AsyncFor() | ast.While():
            body, other = ends(s.body), ends(s.orelse)
            done = Ends(False) if isinstance(s, ast.While) and endless(s) else other
            return Ends(done.normal or "break" in body.jumps, (body.jumps & {"return"}) | done.jumps)
        case ast.With() | ast.AsyncWith():
            return ends(s.body)
        case ast.Try() | ast.TryStar():
            body, other = ends(s.body), ends(s.orelse)
            out = Ends(other.normal, body.jumps | other.jumps) if body.normal else body
            for h in s.handlers:
                out |= ends(h.body)
            last = ends(s.finalbody)
            return Ends(out.normal and last.normal, out.jumps | last.jumps)
        case ast.Match():
            out = Ends(not (s.cases and irrefutable(s.cases[-1])))
            for case in s.cases:
                out |= ends(case.body)
            return out
    return Ends(True)


@dataclasses.dataclass
class _Loop:
    """The flags of the loop around: `stop` ends it, `skip` ends its round."""

    stop: str
    skip: str


class Jumps:
    """Rewrites the jumps of one function.

    Args:
      truth: gives the expression for the truth of an `if`'s condition.

    Attributes:
      stops: for every loop that a jump may end, the name of its flag.
      matter: whether there are jumps to rewrite.
    """

    def __init__(self, fn: ast.FunctionDef, truth: Callable[[ast.If], ast.expr], numbers: Iterator[int]):
        self.fn = fn
        self._truth = truth
        self.stops: dict[ast.stmt, str] = {}
        self._numbers = numbers
        self._returned = "__has_returned__"
        self._loops: list[_Loop] = []
        self._early = any("return" in _ends(s).jumps and not isinstance(s, ast.Return) for s in fn.body)
        self.matter = self._early or any(isinstance(n, ast.Break | ast.Continue) for n in inside(fn.body))
        self._values = any(isinstance(n, ast.Return) and n.value is not None for n in inside(fn.body))

    def run(self) -> None:
        """Rewrite the body in place; without jumps that matter it stays as it is."""
        body = self.fn.body
        if not self._early:
            self.fn.body = self.block(body)
            return
        if self._values and ends(body).normal:
            body = [*body, placed(body[-1], ast.Return(ast.Constant(None)))]
        first = [placed(body[0], _assign(self._returned, ast.Constant(False)))]
        last = [placed(body[-1], ast.Return(_load(RESULT)))] if self._values else []
        head = 1 if ast.get_docstring(self.fn, clean=False) is not None else 0
        self.fn.body = [*body[:head], *first, *self.block(body[head:]), *last]

    # -- statements ------------------------------------------------------------------------------------------------
    def block(self, stmts: Sequence[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for k, s in enumerate(stmts):
            if isinstance(s, ast.Break | ast.Continue | ast.Return):
                return [*out, *self._jump(s)]
            found = _ends(s)
            if not found.normal:
                return [*out, *self.statement(s)]  # no path leads to the statements behind this one
            rest, jumps = list(stmts[k + 1 :]), self._visible(found)
            if jumps and rest and isinstance(s, ast.If):
                if not ends(s.body).normal:
                    return [*out, self._if(s, s.body, [*s.orelse, *rest])]
                if not ends(s.orelse).normal:
                    return [*out, self._if(s, [*s.body, *rest], s.orelse)]
            out += self.statement(s)
            if jumps and rest:
                return [*out, self._guard(rest[0], jumps, self.block(rest))]
        return out

    def _visible(self, found: Ends) -> frozenset[str]:
        """The jumps that end the statements around as well: a return that is not early ends nothing else."""
        return found.jumps if self._early else found.jumps - {"return"}

    def statement(self, s: ast.stmt) -> list[ast.stmt]:
        match s:
            case ast.If():
                return [self._if(s, s.body, s.orelse)]
            case ast.For() | ast.While():
                return self._loop(s)
            case ast.With() | ast.AsyncWith():
                s.body = self.block(s.body)
            case ast.Try() | ast.TryStar():
                jumps = self._visible(ends(s.body))
                s.body, other = self.block(s.body), self.block(s.orelse)
                s.orelse = [self._guard(other[0], jumps, other)] if jumps and other else other
                for h in s.handlers:
                    h.body = self.block(h.body)
            case ast.Match():
                for case in s.cases:
                    case.body = self.block(case.body)
        return [s]

    def _if(self, s: ast.If, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt]) -> ast.If:
        return placed(s, ast.If(s.test, self.block(body) or [placed(s, ast.Pass())], self.block(orelse)))

    def _jump(self, s: ast.stmt) -> list[ast.stmt]:
        flags: list[str] = []
        out: list[ast.stmt] = []
        if isinstance(s, ast.Return):
            if not self._early:
                return [s]
            if self._values:
                out = [placed(s, ast.Assign([ast.Name(RESULT, ast.Store())], s.value or ast.Constant(None)))]
            flags = [self._returned, *[loop.stop for loop in self._loops]]
        elif not self._loops:
            return [s]  # there is no loop around: Python raises its SyntaxError
        elif isinstance(s, ast.Break):
            flags = [self._loops[-1].stop]
        else:
            flags = [self._loops[-1].skip]
        return [*out, *[placed(s, _assign(flag, ast.Constant(True))) for flag in flags]]

    def _loop(self, s: ast.For | ast.While) -> list[ast.stmt]:
        if isinstance(s, ast.While) and (turn := _turning_point(s)) is not None:
            return self._turned(s, *turn)
        found = self._visible(ends(s.body))
        number = next(self._numbers)
        loop = _Loop(f"__stopped_{number}__", f"__skipped_{number}__")
        self._loops.append(loop)
        body = self.block(s.body)
        self._loops.pop()
        orelse = [] if isinstance(s, ast.While) and endless(s) else self.block(s.orelse)
        if "continue" in found:
            body = [placed(s, _assign(loop.skip, ast.Constant(False))), *body]
        if not found & {"break", "return"}:
            s.body, s.orelse = body, orelse
            return [s]
        going = placed(s, ast.UnaryOp(ast.Not(), _load(loop.stop)))
        if isinstance(s, ast.While):
            test = going if endless(s) else placed(s.test, ast.BoolOp(ast.And(), [going, s.test]))
            new: ast.stmt = placed(s, ast.While(test, body, []))
        else:
            item = f"__item_{number}__"
            unpack = placed(s, ast.Assign([s.target], _load(item)))
            body = [placed(s, ast.If(going, [unpack, *body], []))]
            new = placed(s, ast.For(ast.Name(item, ast.Store()), s.iter, body, []))
        self.stops[new] = loop.stop
        first = placed(s, _assign(loop.stop, ast.Constant(False)))
        last = [placed(orelse[0], ast.If(_not([loop.stop]), orelse, []))] if orelse else []
        return [first, new, *last]

    def _turned(self, s: ast.While, before: list[ast.stmt], way_out: ast.If, after: list[ast.stmt]) -> list[ast.stmt]:
        """`while True: before; if done: break; after` as `before; while not done: after; before`: no code but `before`
        is there twice, and what it assigns has values where the loop starts."""
        found = self._visible(ends(after))
        number = next(self._numbers)
        loop = _Loop(f"__stopped_{number}__", f"__skipped_{number}__")
        done = f"__done_{number}__"
        asked = placed(way_out, _assign(done, self._truth(way_out)))
        again = [*self.block(copy_tree(before)), copy_tree(asked)]
        first = [*self.block(before), asked]
        self._loops.append(loop)
        body = self.block(after)
        self._loops.pop()
        last = self.block(way_out.body[:-1])
        if "continue" in found:
            body = [placed(s, _assign(loop.skip, ast.Constant(False))), *body]
        if found & {"break", "return"}:
            first = [placed(s, _assign(loop.stop, ast.Constant(False))), *first]
            again = [placed(again[0], ast.If(_not([loop.stop]), again, []))]
            last = [placed(last[0], ast.If(_not([loop.stop]), last, []))] if last else []
        flags = [loop.stop, done] if found & {"break", "return"} else [done]
        new = placed(s, ast.While(_not(flags), [*body, *again], []))
        if len(flags) > 1:
            self.stops[new] = loop.stop
        return [*first, new, *last]

    def _guard(self, place: ast.stmt, jumps: frozenset[str], rest: list[ast.stmt]) -> ast.stmt:
        """The statement `if not flags: rest`."""
        flags = []
        if self._loops:
            flags += [self._loops[-1].stop] if jumps & {"break", "return"} else []
            flags += [self._loops[-1].skip] if "continue" in jumps else []
        elif "return" in jumps:
            flags = [self._returned]
        return placed(place, ast.If(_not(flags), rest or [placed(place, ast.Pass())], []))


def _turning_point(s: ast.While) -> tuple[list[ast.stmt], ast.If, list[ast.stmt]] | None:
    """For `while True`, the statements before its first `if`, that `if`, and those after it, where it is the first way
    out of the loop and does nothing but leave."""
    if not endless(s):
        return None
    for k, n in enumerate(s.body):
        found = _ends(n)
        if isinstance(n, ast.If) and isinstance(n.body[-1], ast.Break) and not ends(n.body[:-1]).jumps:
            return s.body[:k], n, [*n.orelse, *s.body[k + 1 :]]
        if found.jumps or not found.normal:
            return None
    return None


def _not(flags: Sequence[str]) -> ast.expr:
    """The expression that is true while no flag is set."""
    any_of = _load(flags[0]) if len(flags) == 1 else ast.BoolOp(ast.Or(), [_load(f) for f in flags])
    return ast.UnaryOp(ast.Not(), any_of)


def _load(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def placed(place: Any, node: Any) -> Any:
    """`node`, and what is new inside of it, at the start of `place`. It ends on the same line: of a call over several
    lines Python reports the last one."""
    column = place.col_offset
    for n in _new(node):
        if "lineno" not in n._attributes:
            continue
        n.lineno = n.end_lineno = place.lineno
        n.col_offset, n.end_col_offset = column, column + 1
    return node


def _new(node: ast.AST) -> Iterable[Any]:
    """The nodes below that have no place yet, without going below those that have one."""
    stack = [node]
    while stack:
        n = stack.pop()
        if n is node or not hasattr(n, "lineno"):
            yield n
            stack += ast.iter_child_nodes(n)
