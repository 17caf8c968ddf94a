"""How many steps a launch has: as few as the host is in time for. Pure Python."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence

SMOOTH = 16  # launches over which lateness and times are averaged
TRIAL = 12  # times of launches that a trial takes
GAIN = 0.1  # the share of a step's time that longer launches have to save
BEGIN = 32  # launches before a trial: the first ones behind prompts take longer, whatever they have
PATIENCE = 128  # launches in time, behind which shorter ones are tried
REST, MOST_REST = 256, 4096  # launches until the next trial behind one that gained nothing: at first, and at most


class Pace:
    """Chooses among numbers of steps, `steps`, ascending.

    A launch is late where the device had ended the one before it. Then it waited for the host, which works once for
    each launch, so that longer launches may help, and cost the clients time: a new prompt waits for those under way.
    How long the device waited is not known, and may be next to nothing; one late launch is nothing either, since any
    pause of the process makes one. So where half of the launches are late, longer ones are tried for a few launches,
    and stay if a step takes a tenth less time with them. Shorter ones follow behind enough in time."""

    def __init__(self, steps: Sequence[int]):
        self._steps, self._at = tuple(steps), 0
        self._pause = REST  # launches until the next trial, if one gains nothing
        self._go(0)

    def _go(self, by: int, trial: float | None = None, rest: int = 0) -> None:
        """Other launches from now on. trial: what a step took with the ones before, if these are on trial; rest: how
        many launches pass before the next trial."""
        self._at += by
        self._trial, self._rest = trial, rest
        self._late, self._count = 0.0, 0
        self._times: collections.deque[float] = collections.deque(maxlen=SMOOTH)

    @property
    def steps(self) -> int:
        """How many steps the next launch has."""
        return self._steps[self._at]

    def note(self, late: bool, seconds: float | None) -> None:
        """Notes a launch of so many steps, and the seconds since the one before it was sent; None if that one was of
        another kind."""
        self._late += (late - self._late) / SMOOTH
        self._count += 1
        if seconds is not None:
            self._times.append(seconds / self.steps)
        if self._trial is not None:
            self._judge(self._trial)
        elif (
            self._late > 0.5
            and self._count > max(self._rest, BEGIN)
            and self._at + 1 < len(self._steps)
            and self._times
        ):
            self._go(1, trial=statistics.median(self._times))
        elif self._at and self._count >= PATIENCE and self._late < 0.5:
            self._go(-1)

    def _judge(self, before: float) -> None:
        """Ends a trial, if there are enough times, or if none come, since other launches stand between these."""
        if len(self._times) < TRIAL and self._count < 4 * TRIAL:
            return
        if len(self._times) >= TRIAL and statistics.median(self._times) < (1 - GAIN) * before:
            self._pause = REST
            self._go(0)
        else:
            self._go(-1, rest=self._pause)
            self._pause = min(2 * self._pause, MOST_REST)
