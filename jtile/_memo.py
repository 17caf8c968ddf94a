"""Caches of what was traced: they hold so many entries, and `jax.clear_caches()` empties them with JAX's own.

A traced kernel takes 20 to 100 KiB, so that a process which never stops making new ones would grow without them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from jtile._compat import clear_with_jax

PROGRAMS = 256  # entries for each function of programs: more than one jitted function has
JITTED = 1024  # entries for eager calls, each with what XLA compiled for it; JAX keeps 4096 for its own


def memo[F: Callable[..., Any]](*, entries: int = PROGRAMS) -> Callable[[F], F]:
    """Decorates a function of hashable arguments: the results that were used last are kept."""

    def decorate(fn: F) -> F:
        cached: Any = functools.lru_cache(maxsize=entries)(fn)
        clear_with_jax(cached)
        return cached

    return decorate


class Recent[K, V]:
    """The entries that were made last, at most `entries`; safe from any thread.

    Attributes:
      get: the value of a key, or None.
    """

    def __init__(self, entries: int):
        self._limit = entries
        self._lock = threading.Lock()
        self._values: dict[K, V] = {}
        self.get = self._values.get  # every eager call gets here, so there is no method of ours around it
        clear_with_jax(self)

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: K, value: V) -> V:
        """Keep a value; gives the one that is kept: that of another thread, where it was first."""
        with self._lock:
            if key not in self._values:  # only a new entry makes an old one go
                while len(self._values) >= self._limit:
                    del self._values[next(iter(self._values))]
            return self._values.setdefault(key, value)

    def cache_clear(self) -> None:
        """Drop every entry."""
        with self._lock:
            self._values.clear()
