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


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def window(x, o, *, size=3, block=2):
    """Each number goes through those of a window in front of it, whose blocks are found by floor divisions."""
    i = jt.program_id(0)
    X = x.tiles(block)
    h = x[i]
    for k in jt.range(max(i - size, 0) // block, min(jt.cdiv(i + 1, block), X.shape[0])):
        h = jnp.tanh(h + X[k].sum())
    o[i] = h


def test_blocks_of_a_window_are_bounded():
    def reference(x, size=3, block=2):
        out, padded = [], jnp.pad(x, (0, 1))
        for i in range(len(x)):
            h = x[i]
            for k in range(max(i - size, 0) // block, -(-(i + 1) // block)):
                h = jnp.tanh(h + padded[k * block : (k + 1) * block].sum())
            out.append(h)
        return jnp.stack(out)

    x = jnp.linspace(-1, 1, 7, dtype=jnp.float32)
    got = jax.grad(lambda x: (window(x) ** 2).sum())(x)
    assert jnp.allclose(got, jax.grad(lambda x: (reference(x) ** 2).sum())(x), rtol=1e-5)


@jt.kernel(out_type=lambda x, n: jt.like(x))
def masked(x, n, o):
    h = jnp.zeros(x.shape, x.dtype)
    for _ in jt.range((n[...] & 7) >> 1):
        h = jnp.tanh(h + x[:])
    o[:] = h


def test_bits_bound_a_number_from_memory():
    for n in (5, -1):
        got = jax.grad(lambda x, n=n: masked(x, jnp.int32(n)).sum())(X)
        assert jnp.allclose(got, jax.grad(rounds)(X, (n & 7) >> 1), rtol=1e-5)
