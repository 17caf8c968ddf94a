"""How a result is compared with what was expected: the error, its limit, and where it is furthest off."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jtile.testing import relative_error


@dataclasses.dataclass(frozen=True)
class Measured:
    error: float
    limit: float
    detail: str = ""


class MismatchError(AssertionError):
    """A result of another structure, shape or dtype than expected, or one that is too far off."""

    def __init__(self, message: str, error: float | None = None, limit: float | None = None):
        super().__init__(message)
        self.error, self.limit = error, limit


class SkippedError(Exception):
    """A check that cannot run here, and why."""


def skip(why: str) -> Measured:
    raise SkippedError(why)


def stack_rows(rows: Sequence[Sequence[Any]], axis: int) -> tuple[Any, ...]:
    return tuple(jnp.stack(leaf, axis) for leaf in zip(*rows, strict=True))


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def dot(a: Any, b: Any) -> float:
    return float(np.sum(wide(a) * wide(b)))


def error_of(got: Any, want: Any) -> float:
    """The relative error; where all that is expected is zero, the norm of what came."""
    x, y = np.asarray(got), np.asarray(want)
    return float(np.linalg.norm(wide(x))) if not np.any(y) else relative_error(x, y)


def where_off(got: Any, want: Any) -> str:
    """The element that is furthest off, which tells a forgotten tile from rounding."""
    a, b = wide(got), wide(want)
    with np.errstate(invalid="ignore"):
        off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.nan_to_num(np.abs(a - b), nan=np.inf))
    if not off.size:
        return ""
    at = tuple(int(i) for i in np.unravel_index(np.argmax(off), off.shape))
    bad = int(np.sum(off > 0.01 * max(float(np.max(np.abs(np.nan_to_num(b)))), 1e-30)))
    return f"; furthest at {list(at)}: {a[at]:.6g}, expected {b[at]:.6g}; {bad} of {off.size} elements are far off"
