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


@jt.kernel(out_type=lambda x, w, **_: jax.ShapeDtypeStruct((64, 64), jnp.float32), grid=1)
def window(x, w, y, *, taps: int):
    sums = jt.zeros((64, 64), jnp.float32)
    for t in jt.range(x.shape[0] // 64):
        for k in range(taps):
            rows = t * 64 + jt.arange(64) + k
            sums = jt.dot(x[rows[:, None], jt.arange(64)[None, :]].T, w[jt.ds(t * 64, 64), :], sums)
    y[...] = sums


@pytest.mark.parametrize(("taps", "way"), [(2, "cg"), (3, "ca")])
def test_neighbouring_tiles_of_a_round_go_through_the_first_level_cache(taps, way):
    x = w = jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
    ptx = window.lower(x, w, target="cuda:sm_90", taps=taps).texts["ptx"]
    assert set(re.findall(r"cp\.async\.(c[ag])\.shared", ptx)) == {way}


@pytest.mark.gpu
def test_results_are_the_same():
    x, w = jnp.arange(3 * 1024.0).reshape(3, 1024) % 17, jnp.arange(1024.0) % 5
    assert jnp.array_equal(read_again(x, w), x * w[None] * x.sum(1, keepdims=True))
