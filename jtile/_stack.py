"""Room for the frames of deep calls.

Python keeps the frames of a thread in chunks of 16 KiB, and gives a chunk back to the system as soon as its first frame
ends. Where a loop of JAX or of the compiler stands right at the end of a chunk, each call that it makes is an `mmap`, a
page fault for each page, and a `munmap`: 9,000 of them for one attention and its gradient, and 160,000, with 7 % of the
CPU time, in 211 of jtile's tests. A frame that asks for much more gets a chunk of its own, with as much room again for
what it calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

_WORDS = (1 << 16) + 1  # of the chunk for it, whose size is a power of two, nearly half is left: 1,500 frames or so


def roomy[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorate what traces or compiles, so that the frames of what it calls have room in one chunk."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_WORDS)  # nobody writes there, so it takes no memory
    return functools.update_wrapper(call, function)
