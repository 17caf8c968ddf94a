"""Functions with `jax.custom_jvp` and `jax.custom_vjp` in kernel bodies: derivatives of kernels use their rules.

The rules are wrong on purpose, so that a derivative shows whether it was made of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jtile as jt
from jtile.errors import TransformError

pytestmark = pytest.mark.usefixtures("by_numpy")

X = jnp.linspace(0.3, 2, 8, dtype=jnp.float32)


@jax.custom_jvp
def forward(x):
    return jnp.sin(x)


@forward.defjvp
def _(primals, tangents):
    return forward(*primals), 7 * tangents[0] * jnp.cos(primals[0])


@jax.custom_vjp
def backward(x, y):
    return x * y


backward.defvjp(lambda x, y: (x * y, (x, y)), lambda r, g: (5 * g * r[1], g * r[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def applied(fn, x):
    return fn(x)


applied.defvjp(lambda fn, x: (fn(x), x), lambda fn, x, g: (3 * g * x,))


@jax.custom_vjp
def searched(x):
    return jax.vmap(lambda v: lax.while_loop(lambda c: c < 10, lambda c: c * c + v, v))(x)


searched.defvjp(lambda x: (searched(x), x), lambda x, g: (g * x,))

FUNCTIONS = {
    "jvp": lambda x: forward(x) * x,
    "jvp in a loop of lanes": lambda x: jax.vmap(lambda v: lax.fori_loop(0, 3, lambda _, c: forward(c) * v, v))(x),
    "vjp": lambda x: backward(x, x) + applied(jnp.exp, x),
    "vjp in a loop": lambda x: lax.fori_loop(0, 3, lambda _, c: backward(c, x), x),
    "vjp in a branch": lambda x: jax.vmap(lambda v: lax.cond(v > 1, lambda: backward(v, v), lambda: v))(x),
    "vjp of a loop of lanes": searched,
    "vjp of the body": lambda x: jax.grad(lambda v: backward(v, v).sum())(x),
}


def kernel_of(fn):
    @jt.kernel(out_type=lambda x: jt.like(x))
    def kernel(x, o):
        o[...] = fn(x[...])

    return kernel


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rules_are_used(name):
    fn = FUNCTIONS[name]
    kernel = kernel_of(fn)
    np.testing.assert_allclose(kernel(X), fn(X), rtol=1e-6)
    grad = lambda f: jax.grad(lambda x: (f(x) * jnp.cos(X)).sum())(X)
    np.testing.assert_allclose(grad(kernel), grad(fn), rtol=1e-5)
    push = lambda f: jax.jvp(f, (X,), (jnp.cos(X),))[1]
    if name.startswith("jvp") or name == "vjp of the body":
        np.testing.assert_allclose(push(kernel), push(fn), rtol=1e-5)
    else:
        with pytest.raises(TypeError):
            push(fn)
        with pytest.raises(TransformError, match=r"jax\.custom_vjp here, whose rule is for reverse mode"):
            push(kernel)


def test_a_rule_knows_of_values_only():
    @jt.kernel(out_type=lambda x: jt.like(x))
    def loads(x, o):
        fn = jax.custom_vjp(lambda v: x[0] * v)
        fn.defvjp(lambda v: (x[0] * v, None), lambda _, g: (g,))
        o[...] = fn(x[...])

    np.testing.assert_allclose(loads(X), X[0] * X, rtol=1e-6)
    with pytest.raises(TransformError, match=r"custom_vjp that loads from a Ref"):
        jax.grad(lambda x: loads(x).sum())(X)


def test_kernels_that_compute_the_same_keep_derivatives_of_their_own():
    """Their Tile IR is equal, and with it all that is compiled, but for what their bodies say of derivatives."""

    def scaled(by):
        @jax.custom_jvp
        def square(a):
            return a * a

        square.defjvp(lambda primals, dots: (square(*primals), by * dots[0]))
        return square

    @jax.custom_vjp
    def backwards(a):
        return a * a

    backwards.defvjp(lambda a: (a * a, None), lambda _, g: (-g,))
    bodies = [scaled(3.0), lambda a: a * a, scaled(4.0), lambda a: a * jax.lax.stop_gradient(a), backwards]
    x = np.array([5.0], np.float32)
    kernel_of = lambda fn: jt.call(lambda x, o: jt.store(o, ..., fn(x[...])), out_type=jt.like(x), interpret=True)
    gradients = [jax.grad(lambda x, k=k: k(x).sum())(x) for k in map(kernel_of, bodies)]
    assert [float(s[0]) for s in gradients] == [3, 10, 4, 5, -1]
    one, other = (kernel_of(jax.nn.relu).lower(x).program for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
