"""Memory between pages that may not be read, so that a kernel that reads outside of its arrays dies."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

NO_ACCESS = 0


class Fenced:
    """Copies of arrays, each between two pages that may not be read: at the end of its own pages, or at their start."""

    def __init__(self):
        self._libc, self._maps = ctypes.CDLL(None, use_errno=True), []

    def copy(self, x: np.ndarray, at_end: bool) -> np.ndarray:
        page = mmap.PAGESIZE
        room = -(-x.nbytes // page) * page
        memory = mmap.mmap(-1, room + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for fence in (start, start + page + room):
            assert self._libc.mprotect(ctypes.c_void_p(fence), page, NO_ACCESS) == 0
        self._maps.append(memory)
        out = np.frombuffer(memory, x.dtype, x.size, page + (room - x.nbytes if at_end else 0)).reshape(x.shape)
        out[...] = x
        return out
