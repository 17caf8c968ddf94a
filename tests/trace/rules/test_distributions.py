"""Distributions that reject: loops with rounds for every element, inside of kernels what they are outside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import thorough
from ttir import run_ttir

import jtile as jt
from jtile.testing.evaluate import evaluated

KEY = jax.random.key(3)
A = jnp.asarray([0.3, 0.9, 1.5, 2.5, 4, 9], jnp.float32)

DRAWS = {
    "gamma": lambda key, a: jax.random.gamma(key, a),
    "loggamma": lambda key, a: jax.random.loggamma(key, a),
    "beta": lambda key, a: jax.random.beta(key, a, a + 1),
    "dirichlet": lambda key, a: jax.random.dirichlet(key, a),
    "chisquare": lambda key, a: jax.random.chisquare(key, a),
    "t": lambda key, a: jax.random.t(key, a),
    "poisson": lambda key, a: jax.random.poisson(key, 3 * a),
    "binomial": lambda key, a: jax.random.binomial(key, 10.0, a / 10),
}


def inside(name):
    draw = DRAWS[name]

    @jt.kernel(out_type=jax.eval_shape(draw, KEY, A))
    def kernel(key, a, o):
        o[...] = draw(key[...], a[...])

    return kernel


SLOW = ("loggamma", "chisquare")  # draws of gamma, and a function of them
CASES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in DRAWS]


@pytest.mark.parametrize("name", CASES)
def test_draws(name):
    kernel, want = inside(name), evaluated(DRAWS[name])(KEY, A)
    for got in (kernel(KEY, A), kernel.interpret(KEY, A)):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gamma", pytest.param("loggamma", marks=pytest.mark.slow)])  # by the same rule
def test_derivatives(name):
    kernel = inside(name)
    modes = [
        lambda f: evaluated(jax.grad(lambda a: (f(KEY, a) * A).sum()))(A),
        lambda f: evaluated(lambda a: jax.jvp(lambda a: f(KEY, a), (a,), (a,))[1])(A),
    ]
    for mode in modes:
        np.testing.assert_allclose(mode(kernel), mode(DRAWS[name]), rtol=1e-4)


def test_on_gpus():
    kernel = inside("gamma")
    tile_ir = kernel.lower(KEY, A, target="cuda:sm_90").kernel
    got = run_ttir(tile_ir, [np.asarray(jax.random.key_data(KEY)), np.asarray(A)])[0]
    np.testing.assert_allclose(got, evaluated(DRAWS["gamma"])(KEY, A), rtol=2e-6)
    for target in ("cuda:sm_90", "rocm:gfx942") if thorough() else ("rocm:gfx942",):
        assert kernel.lower(KEY, A, target=target).image
