"""Memory as the checker sees it: which bytes of which buffer a `memref` value names."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from .read import MemRef, contiguous

LOCAL = {"ub": "UB", "cbuf": "L1", "ca": "L0A", "cb": "L0B", "cc": "L0C"}
_MOST = 512  # runs of bytes that are told apart; more of them count as one, from the first to the last


@dataclasses.dataclass(frozen=True)
class Region:
    """A `memref` at run time.

    Attributes:
      space: "gm", or a key of `LOCAL`.
      base: the array or buffer that the region is a part of: the argument's name, or the line of its `pointer_cast`.
      start: address of element 0 in bits, from the base in "gm", from the memory's own begin elsewhere; None: unknown.
      sizes, strides: in elements; None: unknown.
      bits: bits of an element.
      whole: (first, last + 1) bit of the base, as far as that is known.
    """

    space: str
    base: Any
    start: int | None
    sizes: tuple[int | None, ...]
    strides: tuple[int | None, ...]
    bits: int
    whole: tuple[int, int] | None = None

    def runs(self) -> tuple[list[tuple[int, int]], bool]:
        """The bits that the region names, as pairs (first, last + 1), and whether it names all of them. No pairs where
        nothing is known, or the buffer is empty."""
        if 0 in self.sizes:
            return [], True
        sizes, strides = known(self.sizes), known(self.strides)
        if self.start is None or sizes is None or strides is None:
            return ([self.whole] if self.whole else []), False
        axes = sorted(((abs(t), n) for n, t in zip(sizes, strides, strict=True) if n != 1), reverse=True)
        width = 1
        while axes and axes[-1][0] <= width:  # rows that touch are one run
            step, n = axes.pop()
            width += (n - 1) * step
        if math.prod(n for _, n in axes) > _MOST:
            last = width + sum((n - 1) * step for step, n in axes)
            return [(self.start, self.start + last * self.bits)], False
        offsets = (sum(p) for p in itertools.product(*[range(0, n * step, step) for step, n in axes]))
        return [(self.start + o * self.bits, self.start + (o + width) * self.bits) for o in offsets], True


def known(numbers: Sequence[int | None]) -> list[int] | None:
    """The numbers, if all of them are known."""
    found = [n for n in numbers if n is not None]
    return found if len(found) == len(numbers) else None


def _moved(region: Region, steps: Sequence[int | None]) -> int | None:
    """Where a region starts after a move by so many elements along each axis."""
    found = known(steps)
    return None if region.start is None or found is None else region.start + sum(found) * region.bits


def planned(kind: MemRef, line: int, address: int) -> Region:
    """The buffer that `pointer_cast` makes of an address in bytes."""
    size = math.prod(n or 0 for n in kind.sizes) * kind.bits
    return Region(kind.space, line, address * 8, kind.sizes, kind.strides, kind.bits, (address * 8, address * 8 + size))


def argument(kind: MemRef, name: str) -> Region:
    """An array in global memory."""
    return Region(kind.space, name, 0, kind.sizes, kind.strides, kind.bits)


def at(region: Region, index: Sequence[int | None]) -> Region:
    """One element of a region; all of the region's buffer, where it is not known which element."""
    start = _moved(region, [None if i is None or t is None else i * t for i, t in zip(index, region.strides)])
    if start is None:
        return dataclasses.replace(region, start=None)
    return dataclasses.replace(region, start=start, sizes=(), strides=())


def subview(region: Region, offsets: list, sizes: list, steps: list, result: MemRef) -> Region:
    """A part of a region; axes of size one that the result type lacks are dropped."""
    start = _moved(region, [None if o is None or t is None else o * t for o, t in zip(offsets, region.strides)])
    sizes = [had if n is None else n for n, had in zip(sizes, region.sizes, strict=True)]
    strides = [None if t is None or s is None else t * s for t, s in zip(region.strides, steps, strict=True)]
    axes = list(zip(sizes, strides, strict=True))
    for k in range(len(axes) - 1, -1, -1):
        if len(axes) > len(result.sizes) and axes[k][0] == 1 and 1 not in result.sizes[k : k + 1]:
            del axes[k]
    return dataclasses.replace(region, start=start, sizes=tuple(n for n, _ in axes), strides=tuple(t for _, t in axes))


def collapse(region: Region, groups: list[list[int]]) -> Region:
    """A region each of whose groups of axes has become one axis."""
    sizes, strides = [], []
    for group in groups:
        inner = [(region.sizes[k], region.strides[k]) for k in group]
        whole = known([n for n, _ in inner])
        sizes.append(None if whole is None else math.prod(whole))
        strides.append(next((t for n, t in reversed(inner) if n != 1), inner[-1][1] if inner else 1))
    return dataclasses.replace(region, sizes=tuple(sizes), strides=tuple(strides))


def expand(region: Region, groups: list[list[int]], shape: list) -> Region:
    """A region each of whose axes has become a group of axes, with the sizes of `shape`."""
    strides = []
    for step, group in zip(region.strides, groups, strict=True):
        inner = contiguous(tuple(shape[k] for k in group))
        strides += [None if t is None or step is None else t * step for t in inner]
    return dataclasses.replace(region, sizes=tuple(shape), strides=tuple(strides))


def view(region: Region, shift: int | None, kind: MemRef) -> Region:
    """The bytes of a region from `shift` on, as an array of another type."""
    start = None if region.start is None or shift is None else region.start + shift * 8
    return dataclasses.replace(region, start=start, sizes=kind.sizes, strides=kind.strides, bits=kind.bits)


def groups_of(text: str) -> list[list[int]]:
    """The first list of lists in a text, such as `[[0, 1], [2]]`."""
    found = re.search(r"\[((?:\[[\d, ]*\](?:, )?)*)\]", text)
    return [[int(n) for n in re.findall(r"\d+", g)] for g in re.findall(r"\[([\d, ]*)\]", found[1])] if found else []
