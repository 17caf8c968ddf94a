from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jtile import language as jt

RNG = np.random.default_rng(0)
F = RNG.standard_normal((5, 7)).astype("f")
I = RNG.integers(-50, 50, (5, 7)).astype("i4")
B = F > 0


@pytest.mark.parametrize(
    "name", ["sum", "prod", "max", "min", "mean", "var", "argmax", "argmin", "ptp", "median", "nansum"]
)
def test_reductions(check, name):
    fn = getattr(jnp, name)
    check(lambda x: (fn(x, axis=0), fn(x, axis=1), fn(x)), F, tol=1e-4)


@pytest.mark.parametrize("name", ["sum", "max", "min", "prod", "any", "all", "argmax"])
def test_ints_and_bools(check, name):
    fn = getattr(jnp, name)
    check(lambda x, b: (fn(x, axis=0), fn(b, axis=1)), I, B)


def test_lax_reduce(check):
    check(
        lambda x: (
            lax.reduce(x, np.int32(0), lax.bitwise_xor, (0,)),
            lax.reduce_and(x, (1,)),
            lax.reduce_or(x, (0, 1)),
        ),
        I,
    )
    check(lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b + a * b, (0,)), F)  # associative, with identity 0
    first = lambda a, b: tuple(jnp.where(a[0] >= b[0], p, q) for p, q in zip(a, b))
    check(lambda x, y: lax.reduce((x, y), (np.float32(-np.inf), np.int32(-1)), first, (1,)), F, I)


@pytest.mark.parametrize("name", ["cummax", "cummin", "cumsum", "cumprod", "cumlogsumexp"])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumulative(check, name, reverse):
    check(lambda x: getattr(lax, name)(x, axis=1, reverse=reverse), F)


def test_associative_scan(check):
    check(lambda x: lax.associative_scan(jnp.maximum, x, axis=1), F)


def test_sorts(check):
    check(lambda x: (jnp.sort(x, axis=0), jnp.argsort(x), jnp.sort(x, descending=True)), F)
    check(lambda x, y: (lax.sort((x, y), num_keys=1), lax.sort((x, y), num_keys=2, dimension=0)), I % 4, F)
    check(lambda x: (lax.top_k(x, 3), lax.top_k(x, 7)), F)
    check(lambda x: lax.top_k(x, 4), I % 5)
    check(lambda x: (lax.top_k(x, 3), jnp.sort(x)), np.array([1, np.nan, 3, np.inf, -np.inf], "f"))


def test_windows(check):
    check(lambda x: lax.reduce_window(x, np.float32(0), lax.add, (2, 3), (1, 2), "SAME"), F)
    check(
        lambda x: lax.reduce_window(x, np.float32(-np.inf), lax.max, (2, 2), (2, 1), ((0, 1), (2, 0)), (1, 2), (2, 1)),
        F,
    )


def test_user_reduce(run):
    def kernel(x, o, k, s):
        t = x[...]
        o[...] = jt.reduce(t, 1, lambda a, b: a * b, 1.0)
        places = lax.broadcasted_iota(jnp.int32, t.shape, 1)
        best = lambda a, b: (jnp.maximum(a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1]))
        k[...] = jt.reduce((t, places), -1, best, (-jnp.inf, -1))[1]
        scale = t[0, 0]
        s[...] = jt.reduce(t, None, lambda a, b: a + b * scale, 0.0)

    o, k, s = run(kernel, [F], [((5,), F.dtype), ((5,), np.dtype("i4")), ((), F.dtype)])
    np.testing.assert_allclose(o, F.prod(1), rtol=1e-5)
    np.testing.assert_array_equal(k, F.argmax(1))
    np.testing.assert_allclose(s, (F * F[0, 0]).sum(), rtol=1e-4)


@pytest.mark.parametrize("reverse", [False, True])
def test_user_scan(run, reverse):
    # the linear recurrence h = a h + b, as a scan of pairs
    def kernel(a, b, o):
        step = lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1])
        o[...] = jt.associative_scan(step, (a[...], b[...]), axis=1, reverse=reverse)[1]

    a, b = np.tanh(F), F[::-1].copy()
    (got,) = run(kernel, [a, b], [(F.shape, F.dtype)])
    h, want = np.zeros(5, "f"), np.zeros_like(F)
    for k in range(6, -1, -1) if reverse else range(7):
        h = a[:, k] * h + b[:, k]
        want[:, k] = h
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
