"""Room for the frames of deep calls.

Python keeps the frames of a thread in chunks of 16 KiB, and gives a chunk back to the system as soon as its first frame
ends. Where a loop of JAX or of a compiler stands right at the end of a chunk, each call that it makes is an `mmap`, a
page fault for each page, and a `munmap`: 160,000 of them in 211 tests, and 7 % of their CPU time. A frame that asks for
much more gets a chunk of its own, with as much room again for what it calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_WORDS = (1 << 16) + 1  # half of the chunk that Python makes for it, a power of two, stays: 512 KiB, some 1,500 frames


def roomy(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called where the frames of what it calls have room in one chunk."""

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_WORDS)  # nothing of it is used, so it is no memory either
    return call
