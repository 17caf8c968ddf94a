"""Shared memory and barriers of one block in the interpreter, and who may still be at work on them.

Order is kept by vector clocks. A clock counts, for each *line*, how much of it is known to have happened. A block of R
roles has these lines: what role i did (i), what it fenced (R + i), its products that ended (2R + i), its asynchronous
stores that have read their buffers (3R + i), one that nobody ever knows of (4R: writes to arrays by asynchronous
stores), and the ended phases of every barrier (from 4R + 1 on). An access is known to whoever has counted its line up
to its epoch; an asynchronous copy that is still under way has an epoch that no clock reaches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from jtile.ir import Op, SharedType, Value, print_op

from .memory import Handle, poison

UNDER_WAY = np.iinfo(np.int64).max
Box = tuple[tuple[int, int], ...]


def place(op: Op) -> str:
    """Where an op stands: its source line, or where it has none its text."""
    return str(op.loc) if op.loc.file else f"`{print_op(op).splitlines()[0]}`"


@dataclasses.dataclass(eq=False)
class Access:
    """One access to part of a buffer: known to a clock where `clock[line] >= epoch`; to asynchronous operations only
    where `clock[fence] >= epoch` too (plain stores; None for all others)."""

    line: int
    epoch: int
    box: Box
    op: Op
    role: str
    fence: int | None = None

    def known(self, clock: np.ndarray) -> bool:
        return self.epoch <= clock[self.line]

    def fenced(self, clock: np.ndarray) -> bool:
        return self.fence is None or self.epoch <= clock[self.fence]

    def meets(self, box: Box) -> bool:
        return all(a < d and c < b for (a, b), (c, d) in zip(self.box, box, strict=True))

    def within(self, box: Box) -> bool:
        return all(c <= a and b <= d for (a, b), (c, d) in zip(self.box, box, strict=True))


class Slot:
    """The accesses to one buffer that somebody may not know of yet."""

    def __init__(self):
        self.reads: list[Access] = []
        self.writes: list[Access] = []

    def against(self, box: Box, writes: bool) -> Iterator[Access]:
        """The accesses that one to `box` must come after."""
        for a in (*self.writes, *self.reads) if writes else self.writes:
            if a.meets(box):
                yield a

    def add(self, access: Access, writes: bool) -> None:
        """Remember an access that comes after all that `against` gave for it."""
        if writes:
            self.reads = [a for a in self.reads if not a.within(access.box)]
            self.writes = [a for a in self.writes if not a.within(access.box)]
            self.writes.append(access)
        else:
            self.reads = [a for a in self.reads if a.line != access.line or not a.within(access.box)]
            self.reads.append(access)


class Ring(Handle):
    """The buffers of one `alloc_shared`: data [slots, *shape] (poisoned), and which elements hold something."""

    def __init__(self, value: Value):
        assert isinstance(value.type, SharedType)
        self.value, self.many = value, value.type.slots is not None
        count = value.type.slots or 1
        self.data = poison((count, *value.type.shape), value.type.dtype)
        self.defined = np.zeros(self.data.shape, np.bool_)
        self.slots = [Slot() for _ in range(count)]
        box = tuple((0, n) for n in value.type.shape)
        self.views = [View(self, k, self.data[k], self.defined[k], box) for k in range(count)]

    def name(self, slot: int) -> str:
        own = self.value.name or "buffer"
        return f"{own}[{slot}]" if self.many else own


@dataclasses.dataclass(eq=False)
class View(Handle):
    """A buffer, or part of one, perhaps transposed. `box` is its place in the buffer, in the buffer's own axes."""

    ring: Ring
    at: int
    data: np.ndarray
    defined: np.ndarray
    box: Box
    flipped: bool = False

    @property
    def slot(self) -> Slot:
        return self.ring.slots[self.at]

    @property
    def name(self) -> str:
        return self.ring.name(self.at)

    def transposed(self) -> View:
        return dataclasses.replace(self, data=self.data.T, defined=self.defined.T, flipped=not self.flipped)

    def part(self, starts: tuple[int, ...], sizes: tuple[int, ...]) -> View:
        where = tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))
        own = [(s, s + n) for s, n in zip(starts, sizes, strict=True)]
        own = own[::-1] if self.flipped else own
        box = tuple((lo + a, lo + b) for (lo, _), (a, b) in zip(self.box, own, strict=True))
        return dataclasses.replace(self, data=self.data[where], defined=self.defined[where], box=box)

    def undefined(self) -> tuple[int, ...] | None:
        """An element that nobody filled, or None."""
        if self.defined.all():
            return None
        return tuple(int(i) for i in np.unravel_index(int(np.argmin(self.defined)), self.defined.shape))


class Barrier:
    """One mbarrier: `phase` phases have ended; the next ends when no arrival and no byte is missing.

    Attributes:
      pending: arrivals that are missing; `bytes`: bytes that are missing, negative where more came than announced.
      released: what is known to those who wait for an ended phase; `arriving`: what those who arrived since knew.
      line: the line of the vector clocks that counts the phases.
    """

    def __init__(self, owner: Barriers, at: int, line: int, lines: int):
        self.owner, self.at, self.line = owner, at, line
        self.phase, self.pending, self.bytes = 0, owner.arrivals, 0
        self.released, self.arriving = np.zeros(lines, np.int64), np.zeros(lines, np.int64)
        self.last: Access | None = None  # the copy that came last

    @property
    def name(self) -> str:
        return f"{self.owner.value.name or 'barrier'}[{self.at}]"

    def passes(self, parity: int) -> bool:
        """Whether the phase of this parity is the one that ended last."""
        return self.phase & 1 != parity

    def arrive(self, count: int, clock: np.ndarray) -> None:
        self.pending -= count
        np.maximum(self.arriving, clock, out=self.arriving)
        self._end()

    def receive(self, count: int, access: Access) -> None:
        """Bytes of a copy have come: they count for the phase that runs."""
        self.bytes -= count
        access.epoch, self.last = self.phase + 1, access
        self._end()

    def _end(self) -> None:
        if self.pending or self.bytes:
            return
        self.phase, self.pending = self.phase + 1, self.owner.arrivals
        self.arriving[self.line] = self.phase
        np.maximum(self.released, self.arriving, out=self.released)
        self.arriving[:] = 0


class Barriers(Handle):
    """The mbarriers of one `alloc_barriers`. One comes to be when it is first used: each has clocks as long as there
    are barriers."""

    def __init__(self, value: Value, count: int, arrivals: int):
        self.value, self.count, self.arrivals = value, count, arrivals
        self.used: dict[int, Barrier] = {}

    def start(self, line: int, lines: int) -> None:
        """The roles begin: the clocks have `lines` lines, those of these barriers from `line` on."""
        self.line, self.lines, self.used = line, lines, {}

    def one(self, at: int) -> Barrier:
        if at not in self.used:
            self.used[at] = Barrier(self, at, self.line + at, self.lines)
        return self.used[at]


_CONFLICTS = {"read": ("write", "atomic"), "write": ("write", "atomic", "read"), "atomic": ("write", "read")}
_DID = {"read": "read", "write": "wrote", "atomic": "updated atomically"}


class Elements:
    """Who wrote, updated atomically and read each element of an array last in one program: line and epoch."""

    def __init__(self, size: int):
        self.line = {kind: np.zeros(size, np.int32) for kind in _DID}
        self.epoch = {kind: np.zeros(size, np.int64) for kind in _DID}

    def touch(
        self, at: np.ndarray, kind: str, line: int, epoch: int, clock: np.ndarray, asynchronous: bool
    ) -> tuple[int, int, str] | None:
        """Record an access to the flat elements `at`. Returns None, or a conflict: element, line of the other, and what
        that one did. No order holds between what a program wrote to an array and its asynchronous copies later on: they
        take another way to memory, and no fence of this level reaches arrays."""
        for other in _CONFLICTS[kind]:
            lines = self.line[other][at]
            bad = self.epoch[other][at] > (0 if asynchronous and other != "read" else clock[lines])
            if bad.any():
                first = int(np.argmax(bad))
                return int(at[first]), int(lines[first]), _DID[other]
        self.line[kind][at], self.epoch[kind][at] = line, epoch
        return None
