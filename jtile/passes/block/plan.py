"""What a tile-level kernel becomes at block level: roles, rings, registers, order of tiles. Decided from the kernel and
the machine before anything is rewritten, as data that prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from jtile.ir import NOWHERE, Loc, Op


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a plan must know of a GPU with asynchronous copies and warpgroup products.

    Attributes:
      shared: bytes of shared memory that a block may have.
      processors: multiprocessors, each of which runs one block of a plan at a time.
      registers: of a multiprocessor, 32 bits each.
    """

    shared: int = 232448
    processors: int = 132
    registers: int = 65536


@dataclasses.dataclass(frozen=True)
class NoPlan:
    """Why a kernel stays at tile level, in one sentence, and the place that it is about."""

    reason: str
    loc: Loc = NOWHERE

    def __str__(self) -> str:
        return f"{self.reason} ({self.loc})" if self.loc.file else self.reason


class Refusal(Exception):
    """Ends the making of a plan; `block_level` gives what it carries as a value."""

    def __init__(self, no_plan: NoPlan):
        super().__init__(str(no_plan))
        self.no_plan = no_plan


def refuse(reason: str, op: Op | None = None) -> NoReturn:
    """No plan, for a reason that concerns `op`."""
    raise Refusal(NoPlan(reason, NOWHERE if op is None else op.loc))
