"""The text of an answer as its tokens come: whole characters, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns ids into text, as `tokenizer.TextStream`."""

    def push(self, token: int) -> str: ...


class StopText:
    """Text that ends before the first of the strings `stops`. What may be the beginning of one of them is held back
    until it is known not to be."""

    def __init__(self, decoder: Decoder | None, stops: Sequence[str] = ()):
        self._decoder, self._stops = decoder, tuple(stops)
        self._held = ""
        self.stop: str | None = None  # the one that was found

    def push(self, token: int) -> str:
        """The text that a token sets free."""
        if self._decoder is None:
            return ""
        text = self._held + self._decoder.push(token)
        if not self._stops:
            return text
        found = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, _, self.stop = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters are the first ones of a stop string, not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
