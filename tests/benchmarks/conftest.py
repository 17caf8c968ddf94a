"""Arguments of the benchmarks' cases are drawn by NumPy: `jax.random` compiles a program for each shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import data


@pytest.fixture(autouse=True)
def drawn_by_numpy(monkeypatch):
    own = data._normal

    def normal(seed, shape, dtype, scale):
        if isinstance(seed, jax.core.Tracer):  # only its shape is asked for
            return own(seed, shape, dtype, scale)
        drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return jax.device_put((np.float32(scale) * drawn).astype(jnp.dtype(dtype)))

    monkeypatch.setattr(data, "_normal", normal)
