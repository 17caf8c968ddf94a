"""A function of a few kernels, one of which updates in place, for execution graphs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import jtile as jt


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, b, **_: jt.cdiv(x.shape[0], b))
def doubled(x, o, *, b=4):
    """Twice the elements, a block of rows a program."""
    i = jt.program_id(0)
    o.tiles(b, x.shape[1])[i, 0] = x.tiles(b, x.shape[1])[i, 0] * 2.0


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, **_: x.shape[0])
def added(x, y, o):
    i = jt.program_id(0)
    o[i, :] = x[i, :] + y[i, :]


@jt.kernel(out_type=lambda c, *_: jt.like(c), grid=lambda c, *_: c.shape[0], alias={"c": "o"})
def appended(c, x, o):
    """Adds to each row of the cache, in place."""
    i = jt.program_id(0)
    o[i, :] = c[i, :] + x[i, :]


@jt.kernel(out_type=lambda x: jt.like(x, shape=(1, x.shape[1])), grid=1)
def summed(x, o):
    o[0, :] = jnp.sum(x[...], 0)


rng = np.random.default_rng(0)
X, Y = (rng.standard_normal((8, 6)).astype(np.float32) for _ in range(2))


def step(cache, x, y):
    """A row of the old cache is read beside its update, a row of the new one behind it; reshapes stand in between."""
    a = doubled(x)
    before = summed(cache)
    cache = appended(cache, a)
    b = added(cache.reshape(4, 12).reshape(8, 6), a)
    return cache, before, summed(doubled(added(b, y))).reshape(6), jnp.sin(y)


def expected(cache, x, y):
    new = cache + 2 * x
    return new, cache.sum(0, keepdims=True), (2 * (new + 2 * x + y)).sum(0), np.sin(y)
