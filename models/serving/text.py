"""The text of an answer as its tokens come: whole characters, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns ids into text, as `tokenizer.TextStream` does."""

    def push(self, token: int) -> str: ...


class StopText:
    """Text that ends before the first of the strings `stops`. Text that may begin one of them is held back until
    it is known not to.

    Attributes:
      stops: the strings. stop: the one that was found, None before.
    """

    def __init__(self, decoder: Decoder | None, stops: Sequence[str] = ()):
        self._decoder, self.stops = decoder, tuple(stops)
        self._held = ""
        self.stop: str | None = None

    def push(self, token: int) -> str:
        """The text that can be given out after this token."""
        if self._decoder is None:
            return ""
        text = self._held + self._decoder.push(token)
        if not self.stops:
            return text
        found = [(text.find(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if found:
            at, _, self.stop = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back, at the end of the answer."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text begin a stop string, without being all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
