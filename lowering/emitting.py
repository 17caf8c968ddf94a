"""Tables of emitters: what a back end has for each op card."""

from __future__ import annotations

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
