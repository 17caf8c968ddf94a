"""Sizes of dynamic dimensions in a kernel body: JAX's symbolic dimensions, which compute and compare as ints do where
that does not depend on their value, and become int32 scalars of the kernel where one is needed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jtile._compat import is_symbolic
from jtile._errors import KernelTypeError
from jtile.language._place import user_place


def is_dynamic(v: Any) -> bool:
    """Whether a size is one that is known only when the kernel runs."""
    return is_symbolic(v)


def as_value(v: Any) -> Any:
    """A dynamic size as a scalar of the kernel; anything else as it is."""
    return jnp.asarray(v) if is_dynamic(v) else v


def static(v: Any, what: str) -> Any:
    """`v`, which must not be a dynamic size."""
    if is_dynamic(v):
        raise KernelTypeError(
            f"{what} is {v}, a dynamic size, and the shape of a tile is static: cover the dimension with tiles "
            "(x.tiles(64) and jt.range over its shape), or with jt.ds(start, 64)",
            user_place(),
        )
    return v
