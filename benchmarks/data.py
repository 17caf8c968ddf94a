"""Arguments for the cases: seeded, of any dtype."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def normal(seed: int, *shape: int, dtype: str = "float32", scale: float = 1.0) -> jax.Array:
    """Normal random numbers of `shape`; equal seeds, equal numbers."""
    return _normal(seed, shape, dtype, scale)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(seed: int, shape: tuple[int, ...], dtype: str, scale: float) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


def size(*arrays: Any) -> int:
    """Bytes of all arrays (and pytrees of them) together."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


# How far results of a dtype may be apart, as a relative norm: a few roundings of the result.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
