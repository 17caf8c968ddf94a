"""The table of places of a record, and the sources that they are in."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import jtile
from jtile.explorer.links import Linked
from jtile.explorer.record import Source, Text
from jtile.ir import Loc

_OWN = tuple(str(Path(jtile.__file__).parent / part) + os.sep for part in ("transforms", "trace", "language"))
_AROUND = 12  # lines of a source above the first one and below the last one that are shown, up to an empty one
_APART = 40  # so many lines without any place are left out between two functions


class Places:
    """Numbers for places: the first that is asked for gets 1; 0 is no place."""

    def __init__(self):
        self._numbers: dict[Loc, int] = {}

    def number(self, loc: Loc) -> int:
        """The number of a place; 0 for those that are not the user's: what transforms add has lines of jtile's own."""
        if not loc.file or loc.line < 1 or loc.file.startswith(_OWN):
            return 0
        return self._numbers.setdefault(loc, len(self._numbers) + 1)

    def text(self, linked: Linked) -> Text:
        """A text with its places as a record has them."""
        return Text("\n".join(linked.lines), run_lengths([self.number(p) for p in linked.places]))

    def sources(self, wanted: Iterable[Loc] = ()) -> tuple[list[Source], list[list[int]]]:
        """The files of all places, and of each place the number of its source and its line."""
        for loc in wanted:
            self.number(loc)
        lines: dict[str, set[int]] = {}
        for loc in self._numbers:
            lines.setdefault(loc.file, set()).add(loc.line)
        sources: list[Source] = []
        where: dict[tuple[str, int], int] = {}
        for path, used in lines.items():
            text = [line.rstrip("\n") for line in linecache.getlines(path)]
            for low, high in _stretches(sorted(used), text):
                where |= {(path, line): len(sources) for line in range(low, high + 1)}
                sources.append(Source(path, os.path.basename(path), low, text[low - 1 : high]))
        places = [[-1, 0], *([where.get((p.file, p.line), -1), p.line] for p in self._numbers)]
        return sources, places


def _stretches(used: Sequence[int], text: Sequence[str]) -> list[tuple[int, int]]:
    """The parts of a file that hold these lines, each as far as its first and last paragraphs go."""
    out: list[tuple[int, int]] = []
    for line in used:
        if line > len(text):  # the file has changed since, or cannot be read
            continue
        low = high = line
        while low > 1 and line - low < _AROUND and text[low - 2].strip():
            low -= 1
        while high < len(text) and high - line < _AROUND and text[high].strip():
            high += 1
        if out and low - out[-1][1] <= _APART:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return out


def run_lengths(numbers: Sequence[int]) -> list[int]:
    """The run-length code of numbers: `[7, 7, 0]` becomes `[7, 2, 0, 1]`."""
    out: list[int] = []
    for n in numbers:
        if out and out[-2] == n:
            out[-1] += 1
        else:
            out += [n, 1]
    return out
