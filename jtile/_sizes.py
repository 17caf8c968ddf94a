"""What is known of sizes that have no number yet: JAX's symbolic dimensions, whose bounds their scope has."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from typing import Any

import jax

MOST = 2**31 - 1  # elements of a dynamic dimension, so that its size fits an int32


@functools.lru_cache(maxsize=8192)
def bounds_of(n: Any) -> tuple[int, int | None]:
    """The least and the most that a size may be: what choices go by where sizes are dynamic.

    Args:
      n: a size of an array, an int or one of JAX's symbolic dimensions, with the bounds that `jt.dynamic` gave it.

    Returns:
      `(least, most)`; None as the most: there is no bound.
    """
    # JAX compares a symbolic dimension with a number by the bounds of its symbols; the numbers are found by bisection.
    if isinstance(n, int):
        return n, n
    whole = range(-MOST, MOST + 1)
    least = whole[max(bisect.bisect_right(whole, False, key=lambda m: not _holds(lambda: n >= m)) - 1, 0)]
    if not _holds(lambda: n <= MOST):
        return least, None
    return least, whole[bisect.bisect_left(whole, True, key=lambda m: _holds(lambda: n <= m))]


def _holds(asked: Callable[[], Any]) -> bool:
    """Whether a comparison holds for all values of the symbols."""
    try:
        return bool(asked())
    except jax.errors.InconclusiveDimensionOperation:
        return False
