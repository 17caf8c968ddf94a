"""Python's collector of reference cycles stands still while the compiler makes many objects."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Pause:
    """How many are in a pause, and the thresholds from before the first of them. `gc.disable` is left to the user, who
    may call it in any thread meanwhile."""

    def __init__(self):
        self.lock = threading.RLock()
        self.inside = 0
        self.before = gc.get_threshold()

    def begin(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = gc.get_threshold()
                gc.set_threshold(0, *self.before[1:])
            self.inside += 1

    def end(self) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside and gc.get_threshold()[0] == 0:  # else someone has set others meanwhile
                gc.set_threshold(*self.before)


_pause = _Pause()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collections inside, for all threads; also a decorator. For what takes a fraction of a second.

    A pass makes a new kernel of tens of thousands of objects, so that the collector would look through all of JAX's
    and the program's objects every few passes: half of the time that the passes take.
    """
    _pause.begin()
    try:
        yield
    finally:
        _pause.end()
