"""Static numbers as elements of a Ref: those that lanes outside of it read, and those that are stored to it."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jtile._errors import KernelTypeError, KernelValueError
from jtile._parts import is_complex, is_key, part_dtype
from jtile.language._place import user_place


def kind_of(v) -> str:
    """What a value is, for errors."""
    return f"{v.dtype}{list(v.shape)}" if hasattr(v, "dtype") else repr(v)


def tile_of(x: Any, what: str) -> jax.Array:
    """A tile or a number as a tile; what can be neither is an error that names it."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        got = f"{reprlib.repr(x)}, which is a {type(x).__name__}"
        raise KernelTypeError(f"{what} is a tile or a number, got {got}", user_place()) from None


def number(v, dtype, what: str) -> complex | int | bool:
    """A static number as a parameter of a load. NaN becomes the one `math.nan`, so that equal kernels compare equal."""
    if hasattr(v, "dtype") and not isinstance(v, core.Tracer) and np.ndim(v) == 0:
        v = np.asarray(v).item()
    if isinstance(v, complex) and not is_key(dtype):
        return _complex_number(v, dtype, what)
    if not isinstance(v, bool | int | float):
        raise KernelTypeError(f"{what} is a number, got {kind_of(v)}", user_place())
    if is_complex(dtype):
        return number(float(v), part_dtype(dtype), what)
    if is_key(dtype):
        if v == 0:
            return 0
        raise KernelTypeError(f"{what}={v!r} cannot be a random key; keys come from jax.random", user_place())
    if dtype == np.bool_ or jnp.issubdtype(dtype, np.integer):
        return _int_number(v, dtype, what)
    try:
        with np.errstate(over="ignore"):
            rounded = float(np.asarray(float(v)).astype(dtype))
    except OverflowError:
        raise KernelValueError(f"{what}={v} does not fit {np.dtype(dtype).name}", user_place()) from None
    # The number that a lane reads counts as an element of the array, so it has the array's precision.
    if v == 0 and rounded != 0:  # a dtype of scales has no zero: the number nearest to it
        rounded = float(jnp.finfo(dtype).tiny)
    return v if v == rounded else math.nan if math.isnan(rounded) else rounded


def _complex_number(v: complex, dtype, what: str) -> complex:
    if not is_complex(dtype):
        name = np.dtype(dtype).name
        raise KernelTypeError(f"{what}={v} is complex, and cannot be a {name}: give v.real or v.imag", user_place())
    return complex(*[number(p, part_dtype(dtype), what) for p in (v.real, v.imag)])


def _int_number(v: float, dtype, what: str) -> int | bool:
    name = np.dtype(dtype).name
    if isinstance(v, float) and not v.is_integer():
        raise KernelTypeError(f"{what}={v} cannot be a {name}", user_place())
    if dtype == np.bool_:
        return bool(v)
    info = jnp.iinfo(dtype)
    if not info.min <= v <= info.max:
        raise KernelValueError(f"{what}={v} does not fit {name}: {info.min} to {info.max}", user_place())
    return int(v)
