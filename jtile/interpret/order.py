"""What happened before what, for memory that several programs touch.

Programs write and read in *spans*, which a buffer notes by number for each element. An order knows which spans are
over for whoever acts now: `Arrivals` by counters at which the last program learns of the others, `Clocks` (of devices
that signal each other) by vector clocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .memory import NOBODY


class Order[Span]:
    """Numbers for spans, and for groups of spans that touched one element, none after another."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.number: dict[Span, int] = {}
        self.several: list[frozenset[int]] = []

    # -- what an order says ---------------------------------------------------------------------------------------
    def span(self) -> Span:
        """The span of what happens now."""
        raise NotImplementedError

    def known(self) -> Any:
        """The knowledge of whoever acts now, which `before` is given."""
        raise NotImplementedError

    def before(self, span: int, known: Any) -> bool:
        """Whether a span is over for whoever acts now."""
        raise NotImplementedError

    def name(self, span: int) -> str:
        """The name in messages of whoever acted in a span."""
        raise NotImplementedError

    # -- accesses, for `Buffer.access` ----------------------------------------------------------------------------
    def now(self) -> int:
        """The number of the span of what happens now."""
        span = self.span()
        if span not in self.number:
            self.number[span] = len(self.spans)
            self.spans.append(span)
        return self.number[span]

    def unknown(self, others: np.ndarray) -> np.ndarray:
        """Which of these numbers stand for something that nothing orders before now."""
        numbers, inverse = np.unique(others, return_inverse=True)
        known = self.known()
        bad = [any(not self.before(k, known) for k in self._members(int(n))) for n in numbers]
        return np.array(bad, np.bool_)[inverse].reshape(others.shape)

    def joined(self, others: np.ndarray) -> np.ndarray:
        """What to note for elements that these touched, and now this span too."""
        me, known = self.now(), self.known()
        numbers, inverse = np.unique(others, return_inverse=True)
        out = np.empty(numbers.shape, others.dtype)
        for k, n in enumerate(numbers):
            left = {s for s in self._members(int(n)) if s != me and not self.before(s, known)}
            out[k] = self._group(frozenset(left | {me})) if left else me
        return out[inverse].reshape(others.shape)

    def stranger(self, number: int) -> int:
        """The span that a conflict is with."""
        known = self.known()
        return next(s for s in sorted(self._members(number)) if not self.before(s, known))

    def _members(self, number: int) -> Iterable[int]:
        return () if number == NOBODY else (number,) if number >= 0 else self.several[-3 - number]

    def _group(self, spans: frozenset[int]) -> int:
        if spans not in self.several:
            self.several.append(spans)
        return -3 - self.several.index(spans)
