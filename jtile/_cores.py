"""How many cores this process may use: those of the machine, less what `taskset` or a container keeps from it."""

from __future__ import annotations

import os


def cores_here() -> int:
    """The number of cores that the threads of this process may run on."""
    return len(os.sched_getaffinity(0))
