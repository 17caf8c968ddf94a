"""The table of ops: how each is typed and spelled, and what it computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .parse import Stmt
from .types import Type

Types = Sequence[Type]
Rule = Callable[[Stmt, list[Type]], Types]
Form = Callable[[Types, Types], tuple[Types, Types]]
OPS: dict[str, Op] = {}


@dataclasses.dataclass(frozen=True)
class Op:
    """`rule` gives the result types, `form` the types that its text spells before and after the arrow."""

    rule: Rule
    form: Form
    run: Callable[..., Any]


def op(*names: str, rule: Rule, form: Form):
    """Register what runs for these ops: `(machine, stmt, *arrays) -> array, tuple of arrays, or None`."""

    def add(fn):
        OPS.update((name, Op(rule, form, fn)) for name in names)
        return fn

    return add


# -- forms: what is spelled --------------------------------------------------------------------------------------------


def one(args: Types, results: Types) -> tuple[Types, Types]:
    return args[:1], ()


def listed(args: Types, results: Types) -> tuple[Types, Types]:
    return args, ()


def arrow(args: Types, results: Types) -> tuple[Types, Types]:
    return args, results


def first_arrow(args: Types, results: Types) -> tuple[Types, Types]:
    return args[:1], results


def result(args: Types, results: Types) -> tuple[Types, Types]:
    return results, ()


# -- rules: what the results are ---------------------------------------------------------------------------------------


def demand(stmt: Stmt, holds: Any, what: str) -> None:
    if not holds:
        raise stmt.error(what)


def arity(stmt: Stmt, args: Types, low: int, high: int | None = None) -> None:
    demand(stmt, low <= len(args) <= (high or low), f"{stmt.name} takes {low} operands, not {len(args)}")


def same(n: int, *, ints: bool = False, floats: bool = False) -> Rule:
    """n operands of one type, which the result has too."""

    def rule(stmt: Stmt, args: list[Type]) -> Types:
        arity(stmt, args, n)
        demand(stmt, all(a == args[0] for a in args), f"operands of types {', '.join(map(str, args))}")
        demand(stmt, not ints or args[0].is_int, f"{stmt.name} of {args[0]}")
        demand(stmt, not floats or args[0].is_float, f"{stmt.name} of {args[0]}")
        return args[:1]

    return rule


def nothing(stmt: Stmt, args: list[Type]) -> Types:
    return ()


def spelled(stmt: Stmt, args: list[Type]) -> Types:
    """The results are what the text says."""
    return stmt.outs or stmt.ins
