"""What a page shows, as plain data: dataclasses of numbers, texts, lists and dicts of these, which JSON can hold.

A *place* is a number: the position in `Record.places` of a line of the user's source; 0 is no place. Where each line of
a text has one, the list is run-length coded: `[place, count, place, count, ...]`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

SCHEMA = 2  # the version of records; it grows where an older page would misread a record


@dataclasses.dataclass(frozen=True)
class Source:
    """A file that code comes from.

    Attributes:
      path: the path as Python knows it; `name`: the name of the file alone.
      first: the number of the first of `lines` in the file, from 1.
      lines: the text of the functions that the kernel is made of, and what stands between them.
    """

    path: str
    name: str
    first: int
    lines: list[str]


@dataclasses.dataclass(frozen=True)
class Text:
    """A text with the place of each line, see above."""

    text: str
    places: list[int]


@dataclasses.dataclass(frozen=True)
class Level:
    """One form of a kernel on its way to machine code.

    Attributes:
      name: the name in `Lowered.texts`; `title`: a name for people.
      about: one sentence: what this form is.
      linked: whether lines have places; where they have none, `about` says why.
    """

    name: str
    title: str
    about: str
    linked: bool
    body: Text


@dataclasses.dataclass(frozen=True)
class Step:
    """The kernel after a pass.

    Attributes:
      name: the name of the pass; `ensures`: what holds afterwards; `level`: `tile` or `block`.
      body: Tile IR; None where the pass changed nothing.
      diff: against the last step that has a body: `[kind, from, to, from, to]` of its lines and of these; kinds are
        `equal`, `insert`, `delete` and `replace`. Numbers of values do not count as differences.
    """

    name: str
    ensures: str
    level: str
    body: Text | None
    diff: list[list[Any]]


@dataclasses.dataclass(frozen=True)
class Access:
    """An op that touches an array.

    Attributes:
      ref: the number of the array in `Piece.refs`; `kind`: `read`, `write` or `atomic`.
      op: the name of the op in Tile IR; `place`: the place of its line.
      dims: for each dimension of the array the `kind` of index (`at`, `span`, `tile`, `take`: a gather) and `stride`.
    """

    ref: int
    kind: str
    op: str
    place: int
    dims: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which part of which array programs touch.

    Attributes:
      shape: programs along each axis. programs: the numbers of those that are shown, the last axis fastest.
      accesses: the ops that events are of.
      events: of each program that is shown, one list of numbers: for each access its op (the number in `accesses`), the
        round of loops that it is in (-1: all rounds in one box), how many lanes are masked, and start and size along
        each dimension of the array, as the index says them: they may hang over its end.
      notes: sentences about what is left out.
    """

    shape: list[int]
    programs: list[int]
    accesses: list[Access]
    events: list[list[int]]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast a kernel can be, and is.

    Attributes:
      read, written: bytes that must be moved: each element that is touched once. traffic: of all loads and stores.
      products: operations of matrix products by dtype. elements, special: operations on elements of tiles, and those of
        them that are exponentials and the like. exact: False where the length of a loop was guessed.
      limits: microseconds that `memory`, `products` and `elements` take at least.
      memory: bytes a second of the target's memory; peaks: operations a second of products by dtype; 0 or nothing where
        they are not known. measured: whether these are of this machine, and not of a data sheet.
      time_us: microseconds of one call on this machine; None where it was not measured.
      limit: what limits it, in words; advice: sentences about what to try.
      resources: registers, spills, shared memory, threads, blocks and occupancy, as a GPU's compiler tells them.
    """

    read: int
    written: int
    traffic: int
    products: dict[str, int]
    elements: int
    special: int
    exact: bool
    limits: dict[str, float]
    memory: float
    peaks: dict[str, float]
    measured: bool
    time_us: float | None
    limit: str
    advice: list[str]
    resources: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Roles:
    """The roles of a kernel at the block level, and what they share.

    Attributes:
      roles: `{name, warps, registers, place}`.
      rings: shared memory, `{name, slots, shape, dtype, bytes, place, writers, readers}`; the last two are numbers of
        roles, as in what follows.
      barriers: `{name, slots, arrivals, place, waits, arrives, expects}`.
      unit: the unit of the timeline: `ns` on a device, `steps` in the interpreter; "" without a timeline.
      kinds: what spans are: `wait full`, `product 64x256x64`, ...
      programs: those that were watched, `{number, length, busy, lanes}`, where `busy` is the share of the time in which
        a product was under way. A lane is `{name, kind, spans}` of a `role`, of `products` under way or of a `slot` of
        a ring; its spans are `[kind, place, from, to, ...]` in one list, after the start of the program.
      shares: sentences: how each role spent its time.
      notes: sentences about what is left out.
    """

    roles: list[dict[str, Any]]
    rings: list[dict[str, Any]]
    barriers: list[dict[str, Any]]
    unit: str
    kinds: list[str]
    programs: list[dict[str, Any]]
    shares: list[str]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Where the elements of tiles are.

    Attributes:
      lanes: threads of a warp.
      tiles: in registers, `{name, text, about, shape, dtypes, known, register, lane, warp, values, places}`; the three
        lists say how far each bit of such a number moves along each axis. values: results of ops that lie so.
      buffers: in shared memory, `{name, text, about, shape, dtype, bits, slots, bytes, known, along, pads, places}`;
        `along` says of each axis where each bit of a coordinate lies, in elements, combined by XOR; `pads` are pairs:
        after every so many elements so many are left free.
      accesses: `{kind, op, tile, buffer, known, how, width, offsets, together, wavefronts, least, times, places}`, of
        `read`, `write`, `product` or `copy`; tile, buffer: their numbers in the lists above, -1 for none. Of the first
        access of a warp: bytes of each thread (or of each row of a matrix), where they lie, how many of them one
        wavefront could serve, how many wavefronts it takes, and how many without bank conflicts.
      vectors: of a CPU, `{name, bytes, count, used, stack, rows}`: its widest vector registers, how many there are, how
        many are in use, how many instructions move one from or to the stack, and rows `{place, instructions,
        registers}` with how many instructions of a line name each; None for others.
      notes: sentences about what is left out.
    """

    lanes: int
    tiles: list[dict[str, Any]]
    buffers: list[dict[str, Any]]
    accesses: list[dict[str, Any]]
    vectors: dict[str, Any] | None
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Piece:
    """One kernel that runs.

    Attributes:
      name: the name of the kernel.
      group: `kernel`, or `gradient` for the kernels of reverse mode.
      calls: how often the function that is viewed calls it; 1 for the others.
      grid: the number of its programs along each axis.
      refs: its arrays: `{name, role, dtype, shape}`.
      levels: in the order in which they are made. steps: the passes between two of them.
      facts: texts by name: `resources` of a program, `sharding`, `choice` of tiles, and `schedule`: why the kernel runs
        at the block level or not.
      access: which part of which array its programs touch; None where that cannot be known.
      speed: None for kernels whose sizes are not known. roles: None for kernels at the level of tiles.
      layouts: None where the back end tells none.
    """

    name: str
    group: str
    calls: int
    grid: list[int]
    refs: list[dict[str, Any]]
    levels: list[Level]
    steps: list[Step]
    facts: dict[str, str]
    access: Grid | None
    speed: Speed | None
    roles: Roles | None
    layouts: Layouts | None


@dataclasses.dataclass(frozen=True)
class Record:
    """All of a page.

    Attributes:
      title: the page's title; `target`: the target's name; `version`: that of jtile; `schema`: that of this record.
      sources: the files that places are in. places: `[number of a source, line]`; the first stands for no place.
      pieces: the kernels, those of the gradient behind the others.
      notes: sentences about what could not be shown, and why.
    """

    title: str
    target: str
    version: str
    schema: int
    sources: list[Source]
    places: list[list[int]]
    pieces: list[Piece]
    notes: list[str]

    def json(self) -> dict[str, Any]:
        """The record as dicts, lists, texts and numbers."""
        return dataclasses.asdict(self)
