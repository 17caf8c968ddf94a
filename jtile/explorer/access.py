"""Which part of which array each program reads and writes. Programs are walked in the interpreter, but only the numbers
that indices, masks and the lengths of loops come from are computed: that takes no time for arrays of any size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jtile import ir
from jtile.explorer.places import Places
from jtile.explorer.record import Access, Grid
from jtile.interpret.control import rounds
from jtile.interpret.machine import Machine
from jtile.interpret.memory import index_values, resolve
from jtile.ir.types import DTYPES

EVENTS = 12_000  # accesses that a record holds with their rounds, and of one program at most
WALKED = 60_000  # accesses that programs are walked for
PROGRAMS = 1024  # programs that are shown, at most

Touch = ir.Load | ir.Store | ir.Atomic | ir.AsyncLoad | ir.AsyncStore


def walked(kernel: ir.Kernel, data: Sequence[Any] | None, places: Places) -> Grid | None:
    """The accesses of the programs of a kernel; None where there are none to show.

    Args:
      kernel: a kernel of static sizes, at tile level or at the block level.
      data: the kernel's inputs, as far as they are known (others count as zeros): indices may be loaded from them.
    """
    total = math.prod(kernel.grid)
    if not total or kernel.devices or not all(isinstance(n, int) for n in kernel.grid):
        return None
    walk = _Walk(kernel, data, places)
    each = max(len(walk.run(0)), 1)
    programs = sample(kernel.grid, max(1, min(PROGRAMS, WALKED // each)))
    events, held = [], 0
    for program in programs:
        found = walk.run(program)
        whole = held + len(found) <= EVENTS or not events
        held += len(found) if whole else 0
        events.append(found if whole else _merged(found))
    notes = []
    if len(programs) < total:
        notes.append(f"{len(programs):,} of {total:,} programs are shown, evenly spaced.")
    if any(es and es[0][1] < 0 for es in events):
        notes.append("Of programs late in the grid, all rounds of a loop are shown as one.")
    if walk.cut:
        notes.append(f"Of each program the first {EVENTS:,} accesses are shown.")
    if walk.guessed:
        notes.append("Indices that are loaded count as zeros: call jt.view with arrays to see those of your data.")
    return Grid([*kernel.grid], programs, walk.accesses, [[n for e in es for n in e] for es in events], notes)


def sample(grid: Sequence[int], most: int) -> list[int]:
    """The numbers of at most so many programs, evenly spaced along each axis of a grid."""
    counts = [*grid]
    while math.prod(counts) > most:
        axis = max(range(len(counts)), key=counts.__getitem__)
        counts[axis] = max(counts[axis] * 3 // 4, 1)
    chosen = [np.unique(np.linspace(0, n - 1, c).astype(np.int64)) for n, c in zip(grid, counts, strict=True)]
    if not chosen:
        return [0]
    return np.ravel_multi_index(np.meshgrid(*chosen, indexing="ij"), tuple(grid)).reshape(-1).tolist()


def _merged(events: list[list[int]]) -> list[list[int]]:
    """One box for each op, around those of all rounds; its round is -1."""
    out: dict[int, list[int]] = {}
    for op, _, masked, *box in events:
        if op not in out:
            out[op] = [op, -1, masked, *box]
            continue
        around = out[op]
        around[2] += masked
        for k in range(0, len(box), 2):
            low = min(around[3 + k], box[k])
            around[4 + k] = max(around[3 + k] + around[4 + k], box[k] + box[k + 1]) - low
            around[3 + k] = low
    return [*out.values()]


class _EnoughError(Exception):
    """A program made as many accesses as a record holds."""


class _Zeros(dict[ir.Value, Any]):
    """Values of a program; one that was not computed, since nobody needs it, reads as zeros that take no memory."""

    def __missing__(self, v: ir.Value) -> Any:
        return np.broadcast_to(np.zeros((), DTYPES[v.dtype].numpy), v.shape)


class _Walk(Machine):
    """Runs programs for their accesses.

    Attributes:
      accesses: the ops that touch arrays, in the order in which they are met.
      cut: whether a program had more than `EVENTS`; guessed: whether an index was loaded from an unknown array.
    """

    def __init__(self, kernel: ir.Kernel, data: Sequence[Any] | None, places: Places):
        self.kernel, self.check, self.seed, self.silent = kernel, False, 0, True
        self.crew = self.part = self.arrivals = self.order = self.watch = None
        self.where, self.pid, self.linear = "", (), 0
        self.places, self.needed = places, needed(kernel.body)
        known = zip(kernel.inputs, data or (), strict=False)
        self.data = {v: np.asarray(x) for v, x in known if x is not None and np.shape(x) == v.shape}
        self.position = {v: k for k, v in enumerate(kernel.params)}
        self.accesses: list[Access] = []
        self._numbers: dict[ir.Op, int] = {}
        self.cut = self.guessed = False

    def run(self, linear: int) -> list[list[int]]:
        """The accesses of a program: `[op, round, masked lanes, start, size, ...]` each."""
        self.linear, self.pid = linear, self._pid_of(linear)
        self.env: Any = _Zeros()
        self.events: list[list[int]] = []
        self.round = 0
        try:
            with np.errstate(all="ignore"):
                self.block(self.kernel.body.ops)
        except _EnoughError:
            self.cut = True
        return self.events

    def op(self, op: ir.Op) -> None:
        if isinstance(op, Touch):
            self._touched(op)
        elif isinstance(op, ir.For):
            self._for(op)
        elif isinstance(op, ir.Roles):
            for body in op.bodies:
                self.round = 0
                self.block(body.ops)
        elif isinstance(op, ir.While | ir.If):
            super().op(op)
        elif any(r in self.needed for r in op.results):
            if op.level != "block":  # at block level, numbers from shared memory and from clocks stay zero
                super().op(op)

    def _for(self, op: ir.For) -> None:
        carry = [self.env[v] for v in op.inits]
        for k in rounds(self, op):
            self.round += 1
            self.env.update(zip(op.body.params, [k, *carry], strict=True))
            self.block(op.body.ops)
            carry = [self.env[v] for v in op.body.yields]
        self.round += 1
        self.env.update(zip(op.results, carry, strict=True))

    def _touched(self, op: Any) -> None:
        if op.ref in self.position:
            if len(self.events) >= EVENTS:
                raise _EnoughError
            if op not in self._numbers:
                self._numbers[op] = len(self.accesses)
                self.accesses.append(self._access(op))
            self.events.append([self._numbers[op], self.round, self._masked(op), *self._box(op)])
        if op.results and op.result in self.needed:
            self.env[op.result] = self._loaded(op)

    def _access(self, op: Any) -> Access:
        kind = (
            "write" if isinstance(op, ir.Store | ir.AsyncStore) else "atomic" if isinstance(op, ir.Atomic) else "read"
        )
        dims = [{"kind": type(d).__name__.lower(), "stride": getattr(d, "stride", 1)} for d in op.index]
        return Access(self.position[op.ref], kind, op.mnemonic, self.places.number(op.loc), dims)

    def _box(self, op: Any) -> Iterator[int]:
        """Start and size along each dimension of the array, as the index says it: it may hang over."""
        for d, v in zip(op.index, index_values(op.index, self.env), strict=True):
            if isinstance(d, ir.Take):
                low, high = (int(v.min()), int(v.max())) if v.size else (0, -1)
                yield from (low, high - low + 1)
            elif isinstance(d, ir.At):
                yield from (int(v), 1)
            elif isinstance(d, ir.Tile):
                yield from (int(v) * d.step, d.size)
            else:
                yield from (int(v), (d.size - 1) * d.stride + 1)

    def _masked(self, op: Any) -> int:
        mask = getattr(op, "mask", None)
        return 0 if mask is None else int((~self.env[mask]).sum())

    def _loaded(self, op: Any) -> Any:
        """The result of a load from which other indices are computed."""
        if not isinstance(op, ir.Load) or op.ref not in self.data:
            self.guessed = True
            return self.env[op.result]
        mask = None if op.mask is None else self.env[op.mask]
        array = self.data[op.ref]
        lanes = resolve(op.index, index_values(op.index, self.env), array.shape, mask)
        out = np.full(lanes.active.shape, op.pad, array.dtype)
        out[lanes.active] = array.reshape(-1)[lanes.elements]
        return out.reshape(lanes.shape)


# -- what indices come from -------------------------------------------------------------------------------------------


def needed(body: ir.Block) -> set[ir.Value]:
    """The values that places and numbers of accesses come from: indices, masks, bounds and conditions, and what those
    come from."""
    sources: dict[ir.Value, list[ir.Value]] = {}
    roots: list[ir.Value] = []
    for block in _blocks(body):
        for op in block.ops:
            for v, of in _sources(op):
                sources.setdefault(v, []).extend(of)
            roots += _roots(op)
    found: set[ir.Value] = set()
    while roots:
        v = roots.pop()
        if v not in found:
            found.add(v)
            roots += sources.get(v, ())
    return found


def _blocks(body: ir.Block) -> Iterator[ir.Block]:
    yield body
    for op in body.ops:
        for inner in op.blocks():
            yield from _blocks(inner)


def _roots(op: Any) -> Iterable[ir.Value]:
    if isinstance(op, Touch):
        masks = [op.mask] if getattr(op, "mask", None) is not None else []
        return [*(ir.dim_value(d) for d in op.index), *masks]
    if isinstance(op, ir.For):
        return [op.lo, op.hi, op.step]
    if isinstance(op, ir.While):
        return op.cond.yields
    return [op.cond] if isinstance(op, ir.If) else []


def _sources(op: Any) -> Iterator[tuple[ir.Value, Sequence[ir.Value]]]:
    """The values that each result of an op, and each parameter of its regions, is made of."""
    if isinstance(op, ir.For):
        for k, v in enumerate(op.results):
            yield v, (op.body.yields[k], op.inits[k])
            yield op.body.params[k + 1], (op.body.yields[k], op.inits[k])
    elif isinstance(op, ir.While):
        for k, v in enumerate(op.results):
            for made in (v, op.cond.params[k], op.body.params[k]):
                yield made, (op.body.yields[k], op.inits[k])
    elif isinstance(op, ir.If):
        for k, v in enumerate(op.results):
            yield v, [b.yields[k] for b in op.blocks() if b.yields]
    else:
        inner = [v for b in op.blocks() for x in b.ops for v in (*x.results, *x.operands())]
        inner += [v for b in op.blocks() for v in b.yields]
        for v in op.results:
            yield v, [*op.operands(), *inner]
