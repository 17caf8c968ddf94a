"""Random tables and indices of the tests of gathers and scatters."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

_rng = np.random.default_rng(0)


def array(*shape, dtype="float32"):
    return jnp.asarray(_rng.standard_normal(shape), dtype)


def index(n, *shape, dtype="int32", beyond=0):
    """Numbers from -n to n - 1, and `beyond` more on both sides; of elements from the end those below 0."""
    return jnp.asarray(_rng.integers(0 if dtype[0] == "u" else -n - beyond, n + beyond, shape), dtype)
