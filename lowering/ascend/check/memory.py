"""Keeps track of who touched which bits last, to find races between pipes and buffers overwritten while they live."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .read import Op
from .regions import LOCAL, Region

_PAGE = 8 << 12  # bits of a page: accesses of one page are compared with each other


@dataclasses.dataclass(frozen=True)
class Access:
    """One op on one run of bits.

    Attributes:
      pipe: the number of the pipe; index: the number of the op among those of its pipe, from 1.
      temporary: the op writes what only it reads, so that another of its pipe may do so without a barrier.
    """

    first: int
    end: int
    write: bool
    pipe: int
    index: int
    op: Op
    temporary: bool = False


class Memory:
    """All memories of one run.

    Args:
      report: takes (kind, message): "race", or "overlap".
      name: gives the name of a pipe, for messages.
    """

    def __init__(self, report: Callable[[str, str], None], name: Callable[[int], str]):
        self._report, self._name = report, name
        self._pages: dict[Any, list[Access]] = {}  # (memory, page of it) -> the last accesses
        self._written: dict[Any, list[tuple[int, int, Any, Op]]] = {}  # (memory) -> each run of bits, and who wrote it
        self._lost: dict[Any, list[tuple[int, int, Op]]] = {}  # buffer -> its runs that others overwrote

    def access(self, core: str, region: Region, write: bool | str, pipe: int, index: int, known: Sequence[int], op: Op):
        """Note that an op reads or writes a region (or, "temporary", uses it for itself), which begins when `known[p]`
        ops of each pipe p are done."""
        local = region.space in LOCAL
        space = (core, region.space) if local else region.base
        runs, exact = region.runs()
        if not exact and not local:
            return  # an unknown part of an array: nothing can be said
        for first, end in runs:
            self._race(
                space, Access(first, end, bool(write), pipe, index, op, write == "temporary"), known, region.space
            )
            if local:
                self._life(space, first, end, bool(write), region.base, op)

    def _race(self, space: Any, new: Access, known: Sequence[int], what: str) -> None:
        for page in range(new.first // _PAGE, -(-new.end // _PAGE)):
            self._pages[(space, page)] = self._kept(self._pages.get((space, page), ()), new, known, what)

    def _kept(self, olds: Sequence[Access], new: Access, known: Sequence[int], what: str) -> list[Access]:
        """The accesses of a page that later ones have to be compared with, after they were compared with a new one."""
        kept = []
        for old in olds:
            apart = old.end <= new.first or new.end <= old.first
            if apart or not (old.write or new.write):
                if apart or old.pipe != new.pipe or (old.first, old.end) != (new.first, new.end):
                    kept.append(old)
                continue
            harmless = old.pipe == new.pipe and (not old.write or (old.temporary and new.temporary))
            if old.index > known[old.pipe] and not harmless:
                self._report("race", self._message(old, new, what))
            if not (new.write and new.first <= old.first and old.end <= new.end):
                kept.append(old)
        kept.append(new)
        return kept

    def _message(self, old: Access, new: Access, what: str) -> str:
        first, end = max(old.first, new.first) // 8, -(-min(old.end, new.end) // 8)
        verb = {True: "writes", False: "reads"}
        missing = (
            f"a pipe_barrier of {self._name(new.pipe)} between them is missing"
            if old.pipe == new.pipe
            else f"no flag from {self._name(old.pipe)} to {self._name(new.pipe)} orders them"
        )
        return (
            f"{new.op} {verb[new.write]} bytes {first} to {end} of {LOCAL.get(what, 'global memory')} on "
            f"{self._name(new.pipe)}, which {old.op} {verb[old.write]} on {self._name(old.pipe)}: {missing}"
        )

    def _life(self, space: Any, first: int, end: int, write: bool, base: Any, op: Op) -> None:
        if not write:
            for lo, hi, by in self._lost.get((space, base), ()):
                if lo < end and first < hi:
                    self._report("overlap", (
                        f"{op} reads the buffer of line {base} at byte {lo // 8} of {LOCAL[space[1]]}, but {by} has "
                        "written another buffer over it: two buffers that live at the same time overlap"))  # fmt: skip
                    return
            return
        self._lost.pop((space, base), None)
        rest: list[tuple[int, int, Any, Op]] = []
        for lo, hi, owner, by in self._written.get(space, ()):
            if hi <= first or end <= lo:
                rest.append((lo, hi, owner, by))
                continue
            if owner != base:
                self._lost.setdefault((space, owner), []).append((max(lo, first), min(hi, end), op))
            rest += [(lo, first, owner, by)] if lo < first else []
            rest += [(end, hi, owner, by)] if end < hi else []
        self._written[space] = [*rest, (first, end, base, op)]


def extents(regions: Sequence[Region]) -> Iterator[tuple[Region, int, int]]:
    """(buffer, first byte, last byte + 1) of each region."""
    for region in regions:
        if region.whole and region.whole[0] < region.whole[1]:
            yield region, region.whole[0] // 8, -(-region.whole[1] // 8)
