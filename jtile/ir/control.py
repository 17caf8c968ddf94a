"""Structured control flow."""

from __future__ import annotations

import dataclasses

from .core import Block, Op, Value, tile
from .types import BOOL, TileType


def _same(what: str, want, got) -> None:
    if [v.type for v in want] != [v.type for v in got]:
        show = lambda vs: "(" + ", ".join(str(v.type) for v in vs) + ")"
        raise TypeError(f"{what}: wanted {show(want)}, got {show(got)}")


@dataclasses.dataclass(eq=False)
class For(Op):
    """`for k in range(lo, hi, step)` with carried tiles: `body(k, carry...) -> carry...`; results are the last carry.

    `stages` asks for software pipelining, `unroll` for unrolling; neither changes the meaning.
    """

    lo: Value
    hi: Value
    step: Value
    inits: tuple[Value, ...]
    body: Block
    stages: int | None = None
    unroll: int = 1

    mnemonic = "for"

    def infer(self):
        k, *carry = self.body.params
        if (
            not tile(self.lo) == tile(self.hi) == tile(self.step) == tile(k)
            or tile(k).rank
            or tile(k).info.kind not in "iu"
        ):
            raise TypeError(
                f"loop bounds and index are integer scalars of one dtype, got {self.lo.type}, {self.hi.type}, {k.type}"
            )
        _same("the carry of a loop keeps its type", self.inits, carry)
        _same("the body of a loop yields its carry", self.inits, self.body.yields)
        return tuple(v.type for v in self.inits)


@dataclasses.dataclass(eq=False)
class While(Op):
    """`while cond(carry...): carry = body(carry...)`."""

    inits: tuple[Value, ...]
    cond: Block
    body: Block

    mnemonic = "while"

    def infer(self):
        _same("the carry of a while keeps its type", self.inits, self.cond.params)
        _same("the carry of a while keeps its type", self.inits, self.body.params)
        _same("the body of a while yields its carry", self.inits, self.body.yields)
        if [v.type for v in self.cond.yields] != [BOOL]:
            raise TypeError("the condition of a while is one bool scalar")
        return tuple(v.type for v in self.inits)


@dataclasses.dataclass(eq=False)
class If(Op):
    """`cond ? then() : orelse()`; both regions take no parameters and yield the same types."""

    cond: Value
    then: Block
    orelse: Block

    mnemonic = "if"

    def infer(self):
        if tile(self.cond) != TileType((), "bool"):
            raise TypeError(f"the condition of an if is a bool scalar, got {self.cond.type}")
        _same("both branches of an if yield the same types", self.then.yields, self.orelse.yields)
        return tuple(v.type for v in self.then.yields)
