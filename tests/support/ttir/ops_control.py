"""Loops and branches. Their own lines are read here: they name parameters, and types of what they carry."""

from __future__ import annotations

import re

import numpy as np

from .parse import Stmt, split, types_of
from .table import Types, demand, listed, nothing, op
from .types import Type

BOOL = Type((), "i1")


def control_head(s: Stmt) -> None:
    """Operands, carried types and region parameters of `scf.for` and `scf.while`."""
    if s.name == "scf.for":
        found = re.fullmatch(
            r"(?:unsigned )?(%\w+) = (%[\w#]+) to (%[\w#]+) step (%[\w#]+)"
            r"(?:\s*iter_args\((.*?)\) -> (\(.*?\)|\S+))?(?: : (\w+))?",
            s.head,
        )
        demand(s, found, "cannot read this loop")
        assert found
        counter = Type((), found[7] or "index")
        pairs = [p.split(" = ") for p in split(found[5], ",")] if found[5] else []
        s.outs = types_of(found[6] or "")
        s.args = [found[2], found[3], found[4], *(p[1] for p in pairs)]
        s.ins = [counter] * 3 + s.outs
        demand(s, len(pairs) == len(s.outs), "as many types as carried values")
        s.regions[0].params = [(found[1], counter), *((p[0], t) for p, t in zip(pairs, s.outs, strict=True))]
    else:
        found = re.fullmatch(r"(?:\((.*?)\))? ?: (\(.*\)|\S+) -> (\(.*\)|\S+)", s.head)
        demand(s, found, "cannot read this loop")
        assert found
        pairs = [p.split(" = ") for p in split(found[1], ",")] if found[1] else []
        s.ins, s.outs = types_of(found[2]), types_of(found[3])
        s.args = [p[1] for p in pairs]
        demand(s, len(pairs) == len(s.ins) and len(s.regions) == 2, "as many types as carried values, two regions")
        s.regions[0].params = [(p[0], t) for p, t in zip(pairs, s.ins, strict=True)]
        demand(s, [t for _, t in s.regions[1].params] == s.outs, "the parameters of the second region")


def ends(s: Stmt, region: int, name: str) -> Stmt | None:
    """The last statement of a region, which must be `name`; None in an empty region or where it may be left out."""
    body = s.regions[region].body
    return body[-1] if body and body[-1].name == name else None


def yielded(s: Stmt, region: int, want: Types, name: str = "scf.yield") -> None:
    """The region must yield these types."""
    last = ends(s, region, name)
    got = list(last.arg_types) if last else []
    got = got[1:] if name == "scf.condition" else got
    demand(s, got == list(want), f"yields {', '.join(map(str, got))} where {', '.join(map(str, want))} are carried")


def _for_rule(s: Stmt, args: list[Type]) -> Types:
    demand(s, args == s.ins, f"operands {', '.join(map(str, args))}, spelled {', '.join(map(str, s.ins))}")
    yielded(s, 0, s.outs)
    return s.outs


@op("scf.for", rule=_for_rule, form=lambda a, r: (a, r))
def _for(m, s: Stmt, lo, hi, step, *carry):
    demand(s, int(step) > 0, f"a step of {int(step)}")
    i, dtype = int(lo), lo.dtype
    m.memory.enter_loop(s.attrs.get("tt.num_stages") != 1)
    while i < int(hi):
        carry = m.region(s.regions[0], [np.asarray(i, dtype), *carry])
        i += int(step)
        demand(s, i <= np.iinfo(dtype).max, "the counter wraps around")
    m.memory.leave_loop()
    return tuple(carry)


def _while_rule(s: Stmt, args: list[Type]) -> Types:
    demand(s, args == s.ins, f"operands {', '.join(map(str, args))}, spelled {', '.join(map(str, s.ins))}")
    last = ends(s, 0, "scf.condition")
    demand(s, last and last.arg_types[:1] == [BOOL], "the first region ends in a condition")
    yielded(s, 0, s.outs, "scf.condition")
    yielded(s, 1, s.ins)
    return s.outs


@op("scf.while", rule=_while_rule, form=lambda a, r: (a, r))
def _while(m, s: Stmt, *carry):
    while True:
        go, *passed = m.region(s.regions[0], list(carry))
        if not go:
            return tuple(passed)
        carry = m.region(s.regions[1], passed)


def _if_rule(s: Stmt, args: list[Type]) -> Types:
    demand(s, args == [BOOL], f"a branch by {', '.join(map(str, args))}")
    demand(s, len(s.regions) == 2 or not s.outs, "a branch with results has two regions")
    for k in range(len(s.regions)):
        yielded(s, k, s.outs)
    return s.outs


@op("scf.if", rule=_if_rule, form=lambda a, r: ((), r))
def _if(m, s: Stmt, cond):
    k = 0 if cond else 1
    return tuple(m.region(s.regions[k], [])) if k < len(s.regions) else ()


@op(
    "scf.yield",
    "tt.reduce.return",
    "tt.scan.return",
    "tt.map_elementwise.return",
    "tt.return",
    rule=nothing,
    form=listed,
)
def _yield(m, s: Stmt, *args):
    m.yields = args


@op("scf.condition", rule=nothing, form=lambda a, r: (a[1:], ()))
def _condition(m, s: Stmt, *args):
    m.yields = args


def _call_rule(s: Stmt, args: list[Type]) -> Types:
    return s.outs


@op("tt.call", rule=_call_rule, form=lambda a, r: (a, r))
def _call(m, s: Stmt, *args):
    found = re.match(r"@([\w.$]+)", s.head)
    demand(s, found and found[1] in m.functions, "no such function")
    assert found
    return m.call(m.functions[found[1]], args)
