"""How many steps a launch has: as few as the host is in time for. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence

SMOOTH = 16  # launches over which lateness is averaged
PATIENCE = 64  # launches in time, behind which shorter ones are tried


class Pace:
    """Chooses among numbers of steps, `steps`, ascending.

    A launch is late where the device had ended the one before it. Then it waited for the host, which works once for
    each launch, so that longer launches help, and cost the clients time: a new prompt waits for those under way. One
    late launch says nothing, since any pause of the process makes one; longer ones follow where half of them are late,
    and shorter ones again behind enough in time."""

    def __init__(self, steps: Sequence[int]):
        self._steps, self._at = tuple(steps), 0
        self._begin()

    def _begin(self) -> None:
        self._late, self._count = 0.0, 0

    @property
    def steps(self) -> int:
        """How many steps the next launch has."""
        return self._steps[self._at]

    def note(self, late: bool) -> None:
        """Notes a launch of so many steps."""
        self._late += (late - self._late) / SMOOTH
        self._count += 1
        if self._late > 0.5 and self._at + 1 < len(self._steps):
            self._at += 1
            self._begin()
        elif self._at and self._count >= PATIENCE and self._late < 0.5:
            self._at -= 1
            self._begin()
