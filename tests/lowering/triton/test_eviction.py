"""What loads say of how long the cache should keep what they read."""

import re

import jax
import jax.numpy as jnp
import pytest

import jtile as jt


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w: x.shape[0])
def read_again(x, w, y):
    i, n = jt.program_id(0), x.shape[1]
    total = x[i, :].sum()  # the row is held for this sum only
    X, W, Y = x.tiles(None, 256), w.tiles(256), y.tiles(None, 256)
    for j in jt.range(n // 256):
        Y[i, j] = X[i, j] * W[j] * total


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w: x.shape[0])
def other_rows(x, w, y):
    i = jt.program_id(0)
    ahead = x[i, :]
    for k in jt.range(2):
        then = x[(i + k) // 2, :]
        y[i, :] = ahead * w[...]
        ahead = then


def policies(kernel, rows, n, target="cuda:sm_90", **meta):
    """Of the loads of the TTIR, in order."""
    x, w = jax.ShapeDtypeStruct((rows, n), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.float32)
    lines = [line for line in kernel.lower(x, w, target=target, **meta).texts["ttir"].splitlines() if "tt.load" in line]
    return [found[0] if (found := re.search("evict_(first|last)", line)) else None for line in lines]


def test_what_is_read_again_stays_until_then():
    assert policies(read_again, 8, 1024) == ["evict_last", "evict_first", "evict_last"]
    assert policies(read_again, 8, 1024, target="rocm:gfx942") == [None] * 3


def test_other_places_are_not_read_again():
    assert not any(policies(other_rows, 8, 1024))


@pytest.mark.gpu
def test_results_are_the_same():
    x, w = jnp.arange(3 * 1024.0).reshape(3, 1024) % 17, jnp.arange(1024.0) % 5
    assert jnp.array_equal(read_again(x, w), x * w[None] * x.sum(1, keepdims=True))
