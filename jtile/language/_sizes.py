"""Sizes of dynamic dimensions in a kernel body: JAX's symbolic dimensions, which compute and compare as ints do where
that does not depend on their value, and become int32 scalars of the kernel where one is needed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtile._compat import is_symbolic
from jtile._errors import KernelTypeError, KernelValueError
from jtile.language._place import user_place


def is_dynamic(v: Any) -> bool:
    """Whether a size is one that is known only when the kernel runs."""
    return is_symbolic(v)


def as_value(v: Any) -> Any:
    """A dynamic size as a scalar of the kernel; anything else as it is."""
    return jnp.asarray(v) if is_dynamic(v) else v


def static(v: Any, what: str) -> Any:
    """Return `v`; raise an error if it is a dynamic size."""
    if is_dynamic(v):
        raise KernelTypeError(
            f"{what} is {v}, a dynamic size, and the shape of a tile is static: cover the dimension with tiles "
            "(x.tiles(64) and jt.range over its shape), or with jt.ds(start, 64)",
            user_place(),
        )
    return v


MAX_SIDE = 2**31 - 1  # elements along one side of a tile


def integer(i: Any, what: str, instead: str) -> np.integer:
    """A Python int as a constant of a kernel: an int32, or an int64 where it takes that and JAX has it."""
    if -(2**31) <= i < 2**31:
        return np.int32(i)
    if jax.config.jax_enable_x64 and -(2**63) <= i < 2**63:
        return np.int64(i)
    if not -(2**63) <= i < 2**63:
        raise KernelValueError(f"{what} {i} does not fit an int64", user_place())
    raise KernelValueError(
        f"{what} {i} takes an int64, which JAX has where jax_enable_x64 is set: set it, or {instead}", user_place()
    )


def side(n: int, what: str) -> int:
    """The side of a tile, as a Python int that a compiler can count to."""
    if n > MAX_SIDE:
        raise KernelValueError(
            f"{what} is {n}, and a tile has at most {MAX_SIDE} elements along one side: loop over smaller tiles",
            user_place(),
        )
    return n
