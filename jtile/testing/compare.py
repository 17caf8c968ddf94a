"""How a result is compared with what was expected: the error, its limit, and where it is furthest off."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import dtypes

from jtile._parts import is_complex
from jtile.testing import relative_error
from jtile.testing import widest as wide


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


def turned(x: Any, by: int) -> Any:
    """The elements of an array in another order. By NumPy, as all data of the checks: each `jnp` function would compile
    a program for each shape."""
    where, x = (jnp, x) if _opaque(x) else (np, np.asarray(x))
    return where.roll(x.reshape(-1), by).reshape(x.shape)


def stacked(xs: Sequence[Any], axis: int = 0) -> Any:
    return jnp.stack(xs, axis) if _opaque(xs[0]) else np.stack([np.asarray(x) for x in xs], axis)


def _opaque(x: Any) -> bool:
    """Whether an array holds what NumPy does not know: random keys."""
    return dtypes.issubdtype(x.dtype, dtypes.extended)


def stack_rows(rows: Sequence[Sequence[Any]], axis: int) -> tuple[Any, ...]:
    return tuple(stacked(leaf, axis) for leaf in zip(*rows, strict=True))


def summed(x: Any) -> np.ndarray:
    """The sum along axis 0, in float32, in the dtype of the array."""
    x = np.asarray(x)
    return x.sum(0) if is_complex(x.dtype) else x.astype(np.float32).sum(0).astype(x.dtype)


def dot(a: Any, b: Any) -> float:
    """What a cotangent makes of a tangent; of complex ones it is the real part, as JAX pairs them."""
    return float(np.sum(wide(a) * wide(b)).real)


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
