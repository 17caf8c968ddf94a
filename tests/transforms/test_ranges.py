"""Bounds of traced loops: what the advice of the error says works."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from jtile.errors import TransformError

pytestmark = pytest.mark.usefixtures("by_numpy")


@jt.kernel(out_type=lambda x, n: jt.like(x))
def unbounded(x, n, o):
    h = jnp.zeros(x.shape, x.dtype)
    for _ in jt.range(n[...]):
        h = jnp.tanh(h + x[:])
    o[:] = h


@jt.kernel(out_type=lambda x, n: jt.like(x))
def bounded(x, n, o):
    h = jnp.zeros(x.shape, x.dtype)
    for _ in jt.range(jnp.minimum(n[...], 4)):
        h = jnp.tanh(h + x[:])
    o[:] = h


@jt.kernel(out_type=lambda x, n: jt.like(x))
def clipped(x, n, o):
    h = jnp.zeros(x.shape, x.dtype)
    for _ in jt.range(1, jnp.clip(n[...], 0, 5)):
        h = jnp.tanh(h + x[:])
    o[:] = h


X = jnp.linspace(-1, 1, 6, dtype=jnp.float32)


def rounds(x, n):
    h = jnp.zeros_like(x)
    for _ in range(n):
        h = jnp.tanh(h + x)
    return h.sum()


def test_a_carry_of_unknown_rounds_is_an_error_with_the_way_out():
    with pytest.raises(TransformError, match=r"jnp\.minimum\(hi, a Python int\)"):
        jax.grad(lambda x: unbounded(x, jnp.int32(3)).sum())(X)


@pytest.mark.parametrize(("kernel", "first"), [(bounded, 0), (clipped, 1)])
def test_a_number_from_memory_is_bounded_by_minimum_and_clip(kernel, first):
    for n in (0, 1, 4):
        got = jax.grad(lambda x, n=n: kernel(x, jnp.int32(n)).sum())(X)
        want = jax.grad(rounds)(X, max(0, n - first))
        assert jnp.allclose(got, want, rtol=1e-5)
