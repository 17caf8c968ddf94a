"""Tables of emitters: what a back end has for each op card."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jtile import ir


def into(table: dict[type[ir.Op], Any]) -> Callable[..., Callable[[Any], Any]]:
    """The decorator `@emits(card, ...)` of a back end: it puts an emitter into `table`."""

    def emits(*cards: type[ir.Op]) -> Callable[[Any], Any]:
        def add(fn: Any) -> Any:
            table.update(dict.fromkeys(cards, fn))
            return fn

        return add

    return emits


class Marks:
    """Comments behind the lines of an emitted text that say which place of the user's source a line comes from. An
    emitter that is given none writes none; a compiler does not read them, and numbers lines as it would without.

    Attributes:
      comment: what begins a comment in the text: `//` in MLIR, `;` in LLVM IR.
    """

    def __init__(self, comment: str):
        self.comment = comment
        self._numbers: dict[ir.Loc, int] = {}

    def __call__(self, loc: ir.Loc) -> str:
        """The comment behind the lines of an op at `loc`; an empty text where the op has no place."""
        return f" {self.comment} @{self._numbers.setdefault(loc, len(self._numbers))}" if loc.file else ""

    def places(self, text: str) -> list[ir.Loc]:
        """The place in the source that each line of a text comes from (`ir.NOWHERE`: that is not known)."""
        every, mark = [*self._numbers], re.compile(rf" {self.comment} @(\d+)$")
        found = map(mark.search, text.splitlines())
        return [every[int(m[1])] if m else ir.NOWHERE for m in found]
