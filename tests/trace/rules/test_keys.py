from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jtile.errors import UnsupportedError

X = np.random.default_rng(0).standard_normal((4, 5)).astype("f")


def test_generator_functions(check):
    def draw(x):
        a, b = jax.random.split(jax.random.key(3))
        c = jax.random.fold_in(b, 7)
        many = jax.random.split(c, 5)
        return [
            jax.random.uniform(a, (3, 4)),
            jax.random.normal(b, (5,)),
            jax.random.bits(c, (4,)),
            jax.random.randint(many[2], (4,), 0, 9),
            jax.random.bernoulli(many[1], 0.4, (9,)),
            jax.random.categorical(a, x),
            jax.random.permutation(a, 7),
            jax.random.bits(c, (3,), np.uint8),
            jax.random.truncated_normal(a, -1.0, 1.0, (3,)),
            jax.random.key_data(a),
            jax.vmap(lambda k: jax.random.uniform(k, (2,)))(many),
            jax.random.choice(a, 5, (3,)),
        ]

    check(draw, X, tol=1e-4)


def test_raw_keys_and_traced_seeds(check):
    check(lambda x: x[:, 0] + jax.random.normal(jax.random.PRNGKey(0), (4,), x.dtype), X)
    check(lambda s: jax.random.uniform(jax.random.key(s), (3,)), np.int32(5))
    check(lambda k: jax.random.uniform(jax.random.wrap_key_data(k), (3,)), np.array([1, 2], "u4"))


def test_keys_in_control_flow(check):
    def loop(x):
        return lax.fori_loop(
            0,
            3,
            lambda _, c: (jax.random.split(c[0])[0], c[1] + jax.random.uniform(c[0])),
            (jax.random.key(1), x[0, 0]),
        )[1]

    check(loop, X)
    check(
        lambda x: lax.scan(lambda k, v: (jax.random.split(k)[1], (jax.random.bits(k), v)), jax.random.key(1), x)[1], X
    )
    check(lambda x: lax.map(jax.random.uniform, jax.random.split(jax.random.key(1), 4)) + x[:, 0], X)
    check(
        lambda x: lax.scan(lambda k, _: (jax.random.split(k)[1], k), jax.random.key(1), None, length=3)[1].shape[0] + x,
        X,
    )


def test_captured_key(lower):
    key = jax.random.key(1)

    def kernel(o):
        o[...] = jax.random.uniform(key, (3,))

    assert lower(kernel, [], [jax.ShapeDtypeStruct((3,), np.float32)]).body.ops


def test_other_generators_are_refused(lower):
    def kernel(o):
        o[...] = jax.random.uniform(jax.random.key(0, impl="rbg"), (3,))

    with pytest.raises(UnsupportedError, match="threefry"):
        lower(kernel, [], [jax.ShapeDtypeStruct((3,), jnp.float32)])
