"""How the CPU back end holds a Tile IR value while it emits code.

A scalar is an LLVM value (`Val`). A tile is a `Buffer` (elements in memory: the worker's arena, or the Ref itself where
the load is in bounds) or `LAZY` (nothing is emitted yet: its defining op is evaluated at the place of use, inside the
loops of whoever reads it). `Ix` says which element a vector lane stands for.
"""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

from .llvm import Val

_TOKEN = re.compile(r"@\{\d+\}@")  # the token of an offset that is not known yet


@dataclasses.dataclass(eq=False)
class Allocation:
    """A piece of the worker's arena; `first`/`last` are the emission clock of its life, `offset` is set at the end.

    `beside` is read wherever this one is: a padded copy stands beside the memory that is read when the tile lies
    inside.
    """

    size: int
    first: int
    last: int
    token: str
    offset: int = -1
    beside: Allocation | None = None


@dataclasses.dataclass(eq=False)
class Buffer:
    """Elements in memory at `ptr + sum(index * stride)`; strides count elements (ints, or i64 values known at run
    time).

    `owned` says that the kernel may overwrite it once its value is dead; a Ref's own memory is not owned.
    """

    ptr: Val
    shape: tuple[int, ...]
    strides: tuple[int | Val, ...]
    dtype: str
    alloc: Allocation | None = None
    owned: bool = True

    def contiguous(self) -> bool:
        return all(
            n <= 1 or s == d for n, s, d in zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Lazy:
    """A tile that is computed where it is read."""


LAZY = Lazy()
Rep = Val | Buffer | Lazy


@dataclasses.dataclass(frozen=True)
class Places:
    """Distances of the lanes of a vector from lane 0 that no one step leads through."""

    places: tuple[int, ...]

    def __mul__(self, n: int) -> Step:
        return step_through(tuple(n * k for k in self.places))

    def __neg__(self) -> Step:
        return self * -1

    def __add__(self, other: Step) -> Step:
        pairs = zip(self.places, places_of(other, len(self.places)), strict=True)
        return step_through(tuple(a + b for a, b in pairs))

    __rmul__, __radd__ = __mul__, __add__


Step = int | Places


def step_through(places: tuple[int, ...]) -> Step:
    """The distances of lanes from lane 0, as one step where they grow evenly."""
    step = places[1] - places[0]
    even = all(k == l * step for l, k in enumerate(places))
    return step if even else Places(places)


def places_of(step: Step, lanes: int) -> tuple[int, ...]:
    """The distance of each lane from lane 0."""
    return step.places if isinstance(step, Places) else tuple(range(0, lanes * step, step)) if step else (0,) * lanes


class Ix(NamedTuple):
    """Index along one axis: lane l stands for element `base + l * step`, or for `base + step.places[l]`."""

    base: Val
    step: Step = 0


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    out, acc = [], 1
    for n in reversed(shape):
        out.append(acc)
        acc *= n
    return tuple(reversed(out))


class Arena:
    """Assigns offsets in the workspace after emission, so that buffers whose lives do not overlap share memory.

    In the text an offset stands as a token (`@{3}@`) until `assign`.
    """

    ALIGN = 64

    def __init__(self):
        self.allocations: list[Allocation] = []
        self.clock = 0

    def new(self, size: int) -> Allocation:
        a = Allocation(
            -(-max(size, 1) // self.ALIGN) * self.ALIGN, self.clock, self.clock, f"@{{{len(self.allocations)}}}@"
        )
        self.allocations.append(a)
        return a

    def touch(self, a: Allocation | None) -> None:
        while a is not None:
            a.last = max(a.last, self.clock)
            a = a.beside

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def close_loop(self, start: int) -> None:
        """Let buffers that were alive before a loop and are used in it live until the loop ends."""
        for a in self.allocations:
            if a.first < start <= a.last:
                a.last = self.clock

    def assign(self) -> int:
        """Give every allocation its offset, by first fit, the largest first; returns the workspace size in bytes."""
        placed: list[Allocation] = []
        for a in sorted(self.allocations, key=lambda a: (-a.size, a.first)):
            busy = sorted((p.offset, p.offset + p.size) for p in placed if p.first <= a.last and a.first <= p.last)
            at = 0
            for lo, hi in busy:
                if at + a.size <= lo:
                    break
                at = max(at, hi)
            a.offset = at
            placed.append(a)
        return max((a.offset + a.size for a in placed), default=0)

    def patch(self, text: str) -> str:
        offsets = {a.token: str(a.offset) for a in self.allocations}
        return _TOKEN.sub(lambda found: offsets.get(found[0], found[0]), text)
