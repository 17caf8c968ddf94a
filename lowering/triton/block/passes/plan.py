"""What a tile-level kernel becomes at block level: roles, rings, registers, order of tiles. Decided from the kernel and
the machine before anything is rewritten, as data that prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NoReturn

from jtile._errors import KernelValueError
from jtile.ir import NOWHERE, Loc, Op

from ....targets import Target

_OF_CACHE = 0.64  # share of the second-level cache for operands of a wave: 32 of an H200's 50 MiB, as measured


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a plan must know of a GPU with asynchronous copies and warpgroup products.

    Attributes:
      shared: bytes of shared memory that a block may have.
      processors: multiprocessors, each of which runs one block of a plan at a time.
      cache: bytes of the second-level cache that the operands of one wave of blocks may take.
    """

    shared: int
    processors: int
    cache: int

    @classmethod
    def of(cls, target: Target) -> Machine:
        """The machine of a target, whose memories and scales say all of it."""
        sizes = {scale: memory.size for scale in ("block", "device") if (memory := target.memory(scale))}
        processors = target.units("device")
        missing = [name for name in ("block", "device") if not sizes.get(name)]
        if missing or processors is None:
            raise KernelValueError(
                f"target {target.name!r} does not say what memory its scale {(missing or ['device'])[0]!r} has, which "
                "plans at the block level go by: give it `scales` and `memories` with sizes, as those of "
                "jtile.lowering.targets.resolve('cuda:sm_90') are"
            )
        return cls(sizes["block"], processors, int(sizes["device"] * _OF_CACHE))


@dataclasses.dataclass(frozen=True)
class NoPlan:
    """Why a kernel stays at tile level, in one sentence, and the place that it is about."""

    reason: str
    loc: Loc = NOWHERE

    def __str__(self) -> str:
        return f"{self.reason} ({self.loc})" if self.loc.file else self.reason


def for_tiles(registers: int) -> int:
    """The registers that tiles may take, of the registers of a thread (0: what is left for one role)."""
    return (registers or 240) * 5 // 6


def deferred(registers: int) -> int:
    """The registers that tiles may take in loops that wait for their sums at the end of a round (see `defer`): more
    than elsewhere, since such loops carry nothing else."""
    return (registers or 240) * 7 // 8


class Refusal(Exception):  # noqa: N818  an outcome, no error
    """Ends the making of a plan; `block_level` returns the `NoPlan` that it carries."""

    def __init__(self, no_plan: NoPlan):
        super().__init__(str(no_plan))
        self.no_plan = no_plan


def refuse(reason: str, op: Op | None = None) -> NoReturn:
    """Raise a Refusal for a reason that concerns `op`."""
    raise Refusal(NoPlan(reason, NOWHERE if op is None else op.loc))


@dataclasses.dataclass(frozen=True)
class Output:
    """How the rows of one consumer leave through shared memory: `columns` at a time, in `buffers` buffers."""

    columns: int
    buffers: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shape of a block-level kernel.

    Attributes:
      consumers, warps: how many roles compute, and the warps of each.
      registers: registers of a thread of a consumer (0: what is left) and of the producer.
      blocks: blocks of the grid; where they are fewer than `tiles`, each takes several.
      stages: slots of a ring; resident: slots of rings whose tiles stay for a loop.
      rings: what the rings hold, as texts for readers.
      mixed: tiles of blocks that take several come from all over an axis; see `persist.Mixed`.
      turns: consumers whose products wait for each other start them one after the other.
      outputs: position of a parameter -> how its store goes through shared memory; others go through pointers.
      evict: position of a parameter -> how soon the second-level cache forgets what copies read of it; see `evict.py`.
      shared: bytes that all of this takes.
    """

    consumers: int
    warps: int
    registers: tuple[int, int]
    tiles: int
    blocks: int
    stages: int
    resident: int
    rings: tuple[str, ...]
    outputs: Mapping[int, Output]
    shared: int
    turns: bool = False
    mixed: bool = False
    evict: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def persistent(self) -> bool:
        return self.blocks < self.tiles

    def __str__(self) -> str:
        roles = f"{self.consumers} consumer{'s' * (self.consumers > 1)} of {self.warps} warps"
        roles += " in turns" * self.turns
        order = f"{self.blocks} blocks{' for ' + str(self.tiles) + ' tiles' if self.persistent else ''}"
        order += ", mixed" * self.mixed
        slots = f"{self.stages} slots" + (f", resident {self.resident}" if "resident" in " ".join(self.rings) else "")
        out = ", ".join(f"{o.buffers} of {o.columns} columns" for o in self.outputs.values()) or "by pointers"
        return (
            f"{roles}, {self.registers[0] or 'the other'} registers; {order}; rings of {slots}: "
            f"{'; '.join(self.rings)}; stores: {out}; {self.shared} bytes shared"
        ) + (f"; evicted first: {self._evicted('first')}, last: {self._evicted('last')}" if self.evict else "")

    def _evicted(self, when: str) -> str:
        return " ".join(f"parameter {k}" for k, w in self.evict.items() if w == when)
