"""Derivatives of kernels whose bodies hold JAX's own Refs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jtile as jt
from jtile import testing
from jtile.testing.evaluate import evaluated

X = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)


def kernel(body):
    """A kernel that maps a body over the rows of x: a tile [4, 5] to one."""

    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
    def rows(x, o):
        i = jt.program_id(0)
        o[i] = body(x[i])

    return rows


def updated(x):
    r = jax.new_ref(x)
    r[...] = r[...] * r[...]
    r[0] += 2 * r[1]
    return r[...]


def updated_reference(x):
    y = x * x
    return y.at[0].add(2 * y[1])


def swapped(x):
    r = jax.new_ref(x)
    old = jax.ref.swap(r, (slice(1, 3),), jnp.sin(x[:2]))
    return jax.freeze(r) * jnp.concatenate([old, old])


def swapped_reference(x):
    return x.at[1:3].set(jnp.sin(x[:2])) * jnp.concatenate([x[1:3], x[1:3]])


def apart(r):
    """An integer and a gather with a slice between them: JAX puts the gathered axis in front."""
    return jnp.sum(r[1, :, jnp.array([4, 0, 4])] * jnp.arange(6.0).reshape(3, 2))


def gathered(x):
    r, rows = jax.new_ref(x), jnp.array([3, 0, 3, 1])
    return r[rows] * r[rows, 2][:, None] + r[1][None, :] * apart(jax.new_ref(x.reshape(2, 2, 5)))


def gathered_reference(x):
    rows = jnp.array([3, 0, 3, 1])
    return x[rows] * x[rows, 2][:, None] + x[1][None, :] * apart(x.reshape(2, 2, 5))


def looped(x):
    r = jax.new_ref(x)

    def step(k, _):
        r[k] = r[k] * r[k + 1]
        return 0

    lax.fori_loop(0, 3, step, 0)
    return r[...]


def looped_reference(x):
    for k in range(3):
        x = x.at[k].set(x[k] * x[k + 1])
    return x


BODIES = [(updated, updated_reference), (swapped, swapped_reference), (gathered, gathered_reference),
          (looped, looped_reference)]  # fmt: skip


@pytest.mark.parametrize(("body", "reference"), BODIES, ids=lambda f: f.__name__)
def test_derivatives(body, reference):
    f, g = kernel(body), jax.vmap(reference)
    close = lambda a, b: testing.assert_close(jax.tree.map(np.asarray, a), jax.tree.map(np.asarray, b), tolerance=1e-5)
    loss = lambda f: lambda x: jnp.sum(jnp.tanh(f(x)) ** 2)
    pushed = lambda f: evaluated(lambda x, t: jax.jvp(f, (x,), (t,)))
    close(pushed(f)(X, X + 1), pushed(g)(X, X + 1))
    close(evaluated(jax.grad(loss(f)))(X), evaluated(jax.grad(loss(g)))(X))
    close(pushed(jax.grad(loss(f)))(X, X), pushed(jax.grad(loss(g)))(X, X))
