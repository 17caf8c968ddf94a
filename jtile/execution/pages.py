"""Which tiles come to the blocks of a launch through pages of shared memory, in which order, and where they lie there.

`lowering/triton/task_pages.py` says what the words mean, and which loads of a kernel come this way.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from jtile import ir, passes
from jtile._memo import memo
from jtile.lowering import starts
from jtile.lowering.targets import Target
from jtile.lowering.triton.emit_tasks import UNIT
from jtile.lowering.triton.targets import features_of
from jtile.lowering.triton.task_pages import (
    BARRIERS,
    COPIES,
    PAGE,
    RING,
    ROWS,
    SIZES,
    Paged,
    Pages,
    Round,
    copies,
    loads,
    paged,
)

from .schedule import Schedule

LEFT = 64 << 10  # bytes of shared memory besides the ring, for its table and for kernels
WORTH = 16 << 10  # bytes of the copies of a launch on average, at least: smaller tiles are quicker in registers


@dataclasses.dataclass(frozen=True)
class Copy:
    """A tile on its way: the number of its array, the first byte of it there, its bytes, and those that are read."""

    array: int
    offset: int
    bytes: int
    span: int


@memo()
def behind_passes(kernel: ir.Kernel) -> ir.Kernel:
    """A kernel as it is emitted."""
    return passes.run_pipeline(starts.without_idle_aliases(kernel), passes.TILE)


@memo()
def _paged(kernel: ir.Kernel, fixed: tuple[int, ...]) -> tuple[Paged | Round, ...]:
    return paged(behind_passes(kernel), fixed)


@memo(entries=1 << 16)
def _copies(kernel: ir.Kernel, fixed: tuple[int, ...], program: int) -> list[tuple[int, int, int, int]]:
    """(input, first byte, bytes, span) of the copies of a program."""
    found = copies(behind_passes(kernel), _paged(kernel, fixed), program)
    return [(load.input, first * load.itemsize, n * load.itemsize, load.span) for load, first, n in found]


def room_for_pages(target: Target) -> bool:
    """Whether blocks of a target copy in bulk, and have shared memory for a ring and for what their kernels take."""
    f = features_of(target)
    return f.tma and f.shared >= RING + LEFT


def inputs_in_pages(kernel: ir.Kernel, fixed: tuple[int, ...]) -> set[int]:
    """The inputs of a kernel of which tiles come in pages."""
    return {load.input for load in loads(_paged(kernel, fixed))}


def lists(schedule: Schedule, entry: Sequence[int], fixed: dict[Any, tuple[int, ...]]) -> list[list[Copy]]:
    """For each block its copies in the order of its bands.

    Args:
      entry: for each memory of the graph its number in the table of arrays.
      fixed: for the source of each task the inputs of its kernel that no band in front of its bands writes.
    """
    out: list[list[Copy]] = [[] for _ in range(schedule.graph.cores)]
    for b in schedule.order:
        band = schedule.graph.bands[b]
        task = schedule.graph.tasks[band.task]
        own = fixed[task.source]
        if not _paged(task.kernel, own):
            continue
        for program in range(band.begin, band.end):
            found = _copies(task.kernel, own, program)
            out[schedule.core[b]] += [Copy(entry[task.memories[k]], *rest) for k, *rest in found]
    return out


def pages_for(found: Sequence[Sequence[Copy]]) -> Pages | None:
    """The pages of a launch with these copies; None: there are none, more than a table has room for, or small ones."""
    most, sizes = max(map(len, found)), [copy.bytes for own in found for copy in own]
    if not 0 < most < COPIES or sum(sizes) < WORTH * len(sizes):
        return None
    return Pages(-(-(most + 1) // ROWS) * ROWS, RING)


def rows(own: Sequence[Copy], pages: Pages) -> list[int]:
    """The words of the rows of a block: a copy each, and one more, which says what starts when all are read.

    A copy starts when those that lay in its pages are read, and so is the one that had its barrier.
    """
    free = _free(own, pages)
    starts, begun = [], 0
    for read in range(len(own) + 1):
        first = begun
        while begun < len(own) and free[begun][0] <= read:
            begun += 1
        starts.append(first | begun << 16)
    out: list[int] = []
    for copy, (_, place), start in zip(own, free, starts, strict=False):
        out += [copy.array, copy.offset // UNIT, copy.bytes | place // PAGE << SIZES, start]
    return [_signed(word) for word in [*out, 0, 0, 0, starts[-1]]]


def _free(own: Sequence[Copy], pages: Pages) -> list[tuple[int, int]]:
    """(how many copies must be read before a copy starts, byte where it lies) for each copy."""
    out: list[tuple[int, int]] = []
    here: collections.deque[tuple[int, int, int]] = collections.deque()  # (begin, end, copy) of what lies in the ring
    head, needed = 0, 0
    for k, copy in enumerate(own):
        if head + max(copy.span, copy.bytes) > pages.ring:
            head = 0
        end = head + -(-max(copy.bytes, 1) // PAGE) * PAGE
        for _, _, other in [part for part in here if part[0] < end and head < part[1]]:
            needed = max(needed, other + 1)
        needed = max(needed, k - BARRIERS + 1)
        while here and here[0][2] < needed:
            here.popleft()
        here.append((head, end, k))
        out.append((needed, pages.first + head))
        head = end
    return out


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
