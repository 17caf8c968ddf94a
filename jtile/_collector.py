"""Python's collector of reference cycles stands still while the compiler makes many objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collections inside, for all threads; also a decorator. For what takes a fraction of a second.

    A pass makes a new kernel of tens of thousands of objects, so that the collector would look through all of JAX's
    and the program's objects every few passes: half of the time that the passes take.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
