"""The level of the kernel that is being traced, and the role in it: the meaning of `jt.alloc` depends on the level.

A kernel is at tile level until something of the block level shows up. Memory that was made before then was taken for
scratch of the tile level, so the body is traced once more, now known to be at block level.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

from jtile._errors import JtileError, KernelSyntaxError
from jtile.language._place import user_place


@dataclasses.dataclass
class Level:
    """One trace of one kernel body.

    Attributes:
      block: whether the kernel is known to be at block level.
      scratch: whether `jt.alloc` gave scratch of the tile level.
      role: the name of the role whose body is being traced.
      roles: the names of all roles so far.
      left: traced values that variables hold at the end of a role that gave them, each with the name of the role.
    """

    block: bool = False
    scratch: bool = False
    role: str | None = None
    roles: list[str] = dataclasses.field(default_factory=list)
    left: list[tuple[Any, str]] = dataclasses.field(default_factory=list)


class BlockLevelError(Exception):
    """The trace must start again, at block level. `otherwise` is what to raise if no role shows up then either."""

    def __init__(self, otherwise: JtileError | None = None):
        super().__init__()
        self.otherwise = otherwise


_LEVEL: contextvars.ContextVar[Level | None] = contextvars.ContextVar("jtile_level", default=None)


@contextlib.contextmanager
def tracing(level: Level) -> Iterator[Level]:
    token = _LEVEL.set(level)
    try:
        yield level
    finally:
        _LEVEL.reset(token)


def at_tile_level() -> bool:
    """Whether the trace at hand, if there is one, is of a kernel that is not known to be at block level."""
    level = _LEVEL.get()
    return level is not None and not level.block


def at_block_level(what: str) -> Level:
    """The trace at hand, which `what` makes one of the block level."""
    level = _LEVEL.get()
    if level is None:
        raise KernelSyntaxError(f"{what} means something only inside of a kernel", user_place())
    if level.scratch and not level.block:
        raise BlockLevelError
    level.block = True
    return level


def outside_roles(what: str, why: str) -> None:
    """Raise a syntax error if a role is open."""
    level = at_block_level(what)
    if level.role is not None:
        raise KernelSyntaxError(f"{what} stands outside of roles, {why}; this is role {level.role!r}", user_place())


def in_role(what: str) -> Level:
    """Raise a syntax error if no role is open."""
    level = at_block_level(what)
    if level.role is None:
        raise KernelSyntaxError(
            f"{what} belongs to the warps of a role; put it under `with jt.role(name, ...):`", user_place()
        )
    return level


def giver(value: Any) -> tuple[str, str] | None:
    """This role and the finished one that gave a variable its value; None where no other role did."""
    level = _LEVEL.get()
    if level is None or level.role is None:
        return None
    return next(((level.role, role) for v, role in level.left if v is value), None)


def scratch_at_tile_level() -> bool:
    """Whether `jt.alloc` gives scratch: so unless the kernel is known to be at block level."""
    level = _LEVEL.get()
    if level is None:
        raise KernelSyntaxError("jt.alloc means something only inside of a kernel", user_place())
    level.scratch |= not level.block
    return not level.block


def perhaps_block_level(otherwise: JtileError) -> Any:
    """What only memory of the block level can do was asked of scratch: start again if this may be a block-level
    kernel."""
    raise otherwise if _LEVEL.get() is None else BlockLevelError(otherwise)
