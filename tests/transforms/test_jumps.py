"""Derivatives and lanes of kernels with jumps under traced conditions, against JAX's of the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jtile as jt
from jtile import testing
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

X = np.random.default_rng(0).standard_normal((5, 4)).astype("f")


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[:1]), grid=3)
def until_large(x, o):
    """A persistent loop around one that ends where its carry, which is not linear, has grown; rows whose first
    element is large leave early."""
    for i in jt.range(jt.program_id(0), x.shape[0], jt.num_programs(0)):
        if x[i, 0] > 1.2:
            o[i] = 3 * x[i, 1]
            continue
        t = x[i]
        for k in jt.range(6):
            t = jnp.sin(t) + x[i] * (1 + k).astype(x.dtype)
            if jnp.sum(t * t) > 9.0:
                break
            t = t * 1.5
        else:
            t = t * 2
        o[i] = jnp.sum(t)


def reference(x):
    def row(v):
        def step(c, k):
            t, done = c
            new = jnp.sin(t) + v * (1 + k)
            stop = jnp.sum(new * new) > 9
            return (jnp.where(done, t, jnp.where(stop, new, new * 1.5)), done | stop), None

        (t, done), _ = lax.scan(step, (v, jnp.array(False)), jnp.arange(6, dtype=jnp.float32))
        return jnp.where(v[0] > 1.2, 3 * v[1], jnp.sum(jnp.where(done, t, 2 * t)))

    return jax.vmap(row)(x)


def test_derivatives():
    x = jnp.asarray(X).at[2, 0].set(1.5)  # one row of each kind
    x = x.at[4].set(0.01)
    v = jnp.cos(jnp.arange(20.0)).reshape(5, 4)
    testing.assert_close(np.asarray(until_large(x)), evaluated(reference)(x), tolerance=1e-5)
    for fn in (
        lambda f: lambda x: jax.jvp(f, (x,), (v,))[1],
        lambda f: lambda x: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x),
        lambda f: lambda x: jax.vmap(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(jnp.stack([x, -x])),
    ):
        got, want = (evaluated(fn(f))(x) for f in (until_large, reference))
        testing.assert_close(got, want, tolerance=1e-5)


@jt.kernel(out_type=lambda x: jt.like(x, shape=()), grid=1)
def endless(x, o):
    t = x[0]
    while True:
        t = t * 2
        if t > 9:
            break
    o[...] = t


def test_rounds_of_a_while_loop_with_a_break_are_counted():
    x = jnp.array([1.0, 2.0])
    assert jax.jvp(endless, (x,), (jnp.ones(2),))[1] == 16
    assert jax.grad(endless)(x).sum() == 16


def test_derivatives_inside_a_kernel():
    @jt.function
    def power(v, n):
        """`v ** n` for n up to 5."""
        out = v * 0.0 + 1.0
        for k in jt.range(5):
            if k >= n:
                return out
            out = out * v
        return out

    def kernel(x, n, o):
        i = jt.program_id(0)
        o[i, 0], o[i, 1] = jax.value_and_grad(lambda v: power(v, n[i]))(x[i])
        o[i, 2] = jax.jvp(lambda v: power(v, n[i]), (x[i],), (2.0,))[1]

    x, n = jnp.array([2.0, 3.0, 2.0]), jnp.array([3, 0, 9])
    out = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    got = jt.call(kernel, out_type=out, grid=3)(x, n)
    np.testing.assert_allclose(got, [[8, 12, 24], [1, 0, 0], [32, 80, 160]], rtol=1e-6)
