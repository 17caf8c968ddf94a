"""Special functions: values and edge cases against JAX outside of a kernel; derivatives are in test_gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

X = np.asarray([0.1, 0.5, 1, 1.5, 3, 7.25, 30, 1e4, np.inf], "f")
Q = np.asarray([0.05, 0.3, 1, 2.5, 40], "f")
# s and q: below and at s = 1, at the poles, between them
EDGES = np.asarray([
    [0.5, 1], [1, 1], [1, -1], [2, 0], [3, 0], [3, -1], [4, -1], [2.5, 0], [2.5, -2], [2.5, -0.5], [2, -1.5], [3, -1.5],
], "f").T  # fmt: skip


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_polygamma(check, n):
    check(lambda x: jax.scipy.special.polygamma(n, x), X, tol=1e-4)
    below = [-0.5, -2.5]
    with jax.enable_x64(True):
        check(lambda x: jax.scipy.special.polygamma(n, x), np.append(below, Q), tol=1e-9)


def test_zeta(check):
    check(jax.scipy.special.zeta, np.repeat(np.asarray([1.5, 2, 4, 20], "f"), 5), np.tile(Q, 4), tol=1e-4)
    check(jax.scipy.special.zeta, *EDGES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_incomplete(check, dtype):
    a, x = (jnp.asarray(np.outer(Q, np.ones(5)), dtype), jnp.asarray(np.outer(np.ones(5), Q), dtype))
    tol = 1e-4 if dtype == "float32" else 2e-2
    check(lambda a, x: (lax.igamma(a, x), lax.igammac(a, x)), a, x, tol=tol)
    unit = jnp.asarray(np.outer(np.ones(5), [0, 0.25, 0.5, 0.9, 1]), dtype)
    check(lambda a, x: jax.scipy.special.betainc(a, jnp.full_like(a, 2), x), a, unit, tol=tol)
