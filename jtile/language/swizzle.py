"""Orders of a 2-D grid for cache reuse: bijections from program ids to program ids, on traced ints."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile._errors import KernelValueError
from jtile.language._place import user_place
from jtile.language.basics import num_programs

PATTERNS = ("row", "column", "grouped", "morton", "hilbert", "diagonal")


def swizzle(i, j, n_i=None, n_j=None, pattern: str = "grouped", group: int = 8):
    """The tile (row, column) that program (i, j) should work on: every tile exactly once, neighbours in time near
    in space.

    Args:
      i, j: ids of this program along grid axes 0 and 1 (the last runs fastest).
      n_i, n_j: number of programs along them; default: `jt.num_programs(0)` and `(1)`.
      pattern: `row` (as they come), `column`, `grouped` (bands of `group` rows, column by column inside a band),
        `morton` and `hilbert` (space-filling curves inside blocks of `group` x `group`, a power of two), `diagonal`
        (each row starts one later).
    Returns:
      Two int32 scalars.
    """
    if pattern not in PATTERNS:
        raise KernelValueError(
            f"unknown swizzle pattern {pattern!r}: expected one of {', '.join(PATTERNS)}", user_place()
        )
    if not isinstance(group, int) or group < 1 or (pattern in ("morton", "hilbert") and group & (group - 1)):
        raise KernelValueError(
            f"the group of swizzle {pattern!r} is a positive int (a power of two for curves), got {group!r}",
            user_place(),
        )
    int32 = lambda v: jnp.asarray(v).astype(np.int32)
    i, j = int32(i), int32(j)
    n_i = int32(num_programs(0) if n_i is None else n_i)
    n_j = int32(num_programs(1) if n_j is None else n_j)
    linear = i * n_j + j
    if pattern == "row":
        return i, j
    if pattern == "diagonal":
        return i, lax.rem(i + j, n_j)
    if pattern == "column":
        return lax.rem(linear, n_i), lax.div(linear, n_i)
    if pattern == "grouped":
        return _grouped(linear, n_i, n_j, group)
    return _curve(linear, n_i, n_j, group, _morton if pattern == "morton" else _hilbert)


def _band(linear, n_i, n_j, group: int):
    """`(first row, number of rows, number inside)` of the band of `group` rows that holds tile number `linear`."""
    size = np.int32(group)
    first = lax.div(linear, lax.max(size * n_j, np.int32(1))) * size
    return first, lax.max(lax.min(n_i - first, size), np.int32(1)), linear - first * n_j


def _grouped(linear, n_i, n_j, group: int):
    first, rows, inside = _band(linear, n_i, n_j, group)
    return first + lax.rem(inside, rows), lax.div(inside, rows)


def _curve(linear, n_i, n_j, group: int, decode):
    """Blocks of `group` x `group` row by row, the curve inside each; the cut blocks at the edges go row by row."""
    size = np.int32(group)
    first, rows, inside = _band(linear, n_i, n_j, group)
    left = lax.div(inside, rows * size) * size
    columns = lax.max(lax.min(n_j - left, size), np.int32(1))
    inside = inside - left * rows
    whole = (rows == size) & (columns == size)
    r, c = decode(inside, group.bit_length() - 1)
    r = lax.select(whole, r, lax.div(inside, columns))
    c = lax.select(whole, c, lax.rem(inside, columns))
    return first + r, left + c


def _morton(t, bits: int):
    """Row and column from the odd and even bits of `t`."""
    one = np.int32(1)
    r = c = jnp.zeros((), np.int32)
    for b in range(bits):
        c = c | (((t >> np.int32(2 * b)) & one) << np.int32(b))
        r = r | (((t >> np.int32(2 * b + 1)) & one) << np.int32(b))
    return r, c


def _hilbert(t, bits: int):
    """Point number `t` of the Hilbert curve over 2**bits x 2**bits, built from its smallest square up (the d-to-xy
    walk)."""
    one = np.int32(1)
    r = c = jnp.zeros((), np.int32)
    for b in range(bits):
        side = np.int32(1 << b)
        quarter = (t >> np.int32(2 * b)) & np.int32(3)
        east = quarter >> one
        south = (quarter & one) ^ east
        flip = (south == 0) & (east == 1)
        r, c = lax.select(flip, side - one - r, r), lax.select(flip, side - one - c, c)
        swap = south == 0
        r, c = lax.select(swap, c, r), lax.select(swap, r, c)
        r, c = r + side * south, c + side * east
    return r, c
