"""A function of `shard_map` whose kernels and sums over devices are an execution graph."""

from __future__ import annotations

import graph_programs as programs
import jax
import numpy as np

rng = np.random.default_rng(0)
D = 2
X, Y, C = (rng.standard_normal((D, 8, 6)).astype(np.float32) for _ in range(3))


def step(cache, x, y):
    """A sum of what two kernels made, beside an update of the array that it reads, and one more sum behind it."""
    a = programs.doubled(x)
    total = jax.lax.psum(a, "x")
    new = programs.appended(a, y)  # over `a`, which other devices still read
    b = programs.added(total, new)
    return programs.appended(cache, b), programs.added(jax.lax.psum(programs.doubled(b), "x"), y)


def expected(cache, x, y):
    b = (2 * x).sum(0) + 2 * x + y
    return cache + b, (2 * b).sum(0) + y


def near(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, 1e-5, 1e-5)
