"""Which names of a function surely have a value wherever they are read: definite assignment, in the sense of Java.

After jumps have become flags, a name that every path assigns before it is read may still have no value on a path that
a flag keeps from reading it. Such a name may be filled with anything there; one that a path really reads too early may
not. The walk goes forwards over the source as the user wrote it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from jtile.trace.names import (
    NONE,
    Names,
    assigned,
    declared,
    free_reads,
    inside,
    parameters,
)

State = Names | None  # the names that surely have a value; None where no path comes


def always_bound(fn: ast.FunctionDef) -> Names:
    """The local names of `fn`, less its parameters, that every path assigns before it reads them."""
    walk = _Walk()
    walk.block(fn.body, parameters(fn))
    theirs = declared(fn.body, ast.Nonlocal) | declared(fn.body, ast.Global)
    deleted = {n.id for n in inside(fn.body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Del)}
    return assigned(fn.body) - parameters(fn) - theirs - walk.unsure - deleted


def endless(s: ast.While) -> bool:
    """Whether only a jump ends this loop: `while True`."""
    return isinstance(s.test, ast.Constant) and bool(s.test.value)


def irrefutable(case: ast.match_case) -> bool:
    """Whether a case takes everything: `case _:`."""
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def _meet(states: Iterable[State]) -> State:
    reached = [s for s in states if s is not None]
    return frozenset.intersection(*reached) if reached else None


class _Walk:
    """The names surely assigned after each statement; `unsure` collects those that are read without being so."""

    def __init__(self) -> None:
        self.unsure: Names = NONE
        self._breaks: list[list[State]] = []  # for each loop around, the states at its breaks

    def read(self, state: Names, *nodes: ast.AST | None) -> None:
        for n in nodes:
            if n is not None:
                self.unsure |= free_reads(n) - state

    def block(self, stmts: Sequence[ast.stmt], state: State) -> State:
        for s in stmts:
            if state is None:
                return None
            state = self.statement(s, state)
        return state

    def statement(self, s: ast.stmt, state: Names) -> State:
        match s:
            case ast.If():
                self.read(state, s.test)
                known = state | assigned([s.test])
                return _meet([self.block(s.body, known), self.block(s.orelse, known)])
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(s, state)
            case ast.With() | ast.AsyncWith():
                self.read(state, *s.items)
                return self.block(s.body, state | assigned(s.items))
            case ast.Try() | ast.TryStar():
                return self._try(s, state)
            case ast.Match():
                return self._match(s, state)
            case ast.Return() | ast.Raise():
                self.read(state, s)
                return None
            case ast.Break():
                if self._breaks:
                    self._breaks[-1].append(state)
                return None
            case ast.Continue():
                return None
            case ast.AugAssign():
                self.read(state, s)
                self.unsure |= assigned([s.target]) - state
                return state | assigned([s.target])
        self.read(state, s)
        return state | assigned([s])

    def _loop(self, s: ast.For | ast.AsyncFor | ast.While, state: Names) -> State:
        """The state after a loop. It unassigns nothing (`del` is set apart): what holds before it holds throughout."""
        self._breaks.append([])
        if isinstance(s, ast.While):
            self.read(state, s.test)
            state |= assigned([s.test])
            self.block(s.body, state)
        else:
            self.read(state, s.iter)
            self.block(s.body, state | assigned([s.target]))
        done = None if isinstance(s, ast.While) and endless(s) else state
        return _meet([*self._breaks.pop(), self.block(s.orelse, done)])

    def _try(self, s: ast.Try | ast.TryStar, state: Names) -> State:
        ends = [self.block(s.orelse, self.block(s.body, state))]
        for h in s.handlers:
            self.read(state, h.type)
            ends.append(self.block(h.body, state | ({h.name} if h.name else NONE)))
        last = self.block(s.finalbody, state)
        out = _meet(ends)
        return None if out is None or last is None else out | last

    def _match(self, s: ast.Match, state: Names) -> State:
        self.read(state, s.subject)
        ends: list[State] = [] if s.cases and irrefutable(s.cases[-1]) else [state]
        for case in s.cases:
            known = state | assigned([case.pattern])
            self.read(known, case.guard)
            ends.append(self.block(case.body, known))
        return _meet(ends)
