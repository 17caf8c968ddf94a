from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jtile import language as jt

F = np.random.default_rng(0).standard_normal((5, 3)).astype("f")
V = F[:, 0].copy()


def test_counted(check):
    check(lambda x: lax.fori_loop(0, 5, lambda k, c: c * 0.5 + x[k], x[0]), V)
    check(lambda x, n: lax.fori_loop(0, n, lambda k, c: c * 0.5 + x[k], x[0]), V, np.int32(3))
    check(
        lambda x: lax.fori_loop(0, 3, lambda k, c: lax.fori_loop(k, 4, lambda j, d: d + x[j] * k, c), np.float32(0)), V
    )
    check(lambda x: lax.fori_loop(0, 3, lambda _, c: (c[0] + 1.0, c[1] - 1), (x, 3)), V)


@pytest.mark.parametrize("n", [-6, 1, 2, 5, 6])
def test_counter_after_the_loop(check, n):
    step = lambda n: lambda x: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 2, c[1] * 0.5), (np.int32(1), x))
    check(lambda n, x: step(n)(x), np.int32(n), V)


def test_while(check):
    check(
        lambda x: lax.while_loop(lambda c: c[0] < 100.0, lambda c: (c[0] * 2 + 1, c[1] + 1), (x[0], 0)), np.abs(V) + 1
    )
    # a limit that moves, and a counter that goes down, are no counted loops
    check(lambda x: lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1] - 1, c[2] * 2), (0, 7, x)), V)
    check(lambda x: lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] * 2), (3, x)), V)


def test_scans(check):
    check(lambda x: lax.scan(lambda c, v: (c + v.sum(), (c * v, c)), np.float32(0), x), F)
    check(lambda x: lax.scan(lambda c, v: (c + v, c * v), x[0], x, reverse=True), F)
    check(lambda x: lax.scan(lambda c, v: (c + v, c * v), x[0], x, unroll=2), F)
    check(lambda x: lax.scan(lambda c, v: (c + v, c * v), np.float32(3), x), V[:0])
    check(lambda x: lax.scan(lambda c, v: ((c[0] + v[0], c[1]), v[1] > 0), (x[0], 1), (x, x)), V)
    check(lambda x: lax.map(jnp.sin, x), V)
    check(lambda x: lax.scan(lambda c, _: (c * 2, c > 1), x, None, length=3), V)


def test_branches(check):
    check(lambda x: lax.cond(x[0] > 0, lambda y: y * 2, lambda y: y - 1, x), V)
    check(lambda x, k: lax.cond(k, lambda y: y * 2, lambda y: y - 1, x), V, np.int32(3))
    check(lambda k, x: lax.switch(k, [lambda y: (y, 1), lambda y: (y * 2, 2)], x), np.int32(1), V)


@pytest.mark.parametrize("k", [-1, 0, 1, 2, 3])
def test_switch(check, k):
    check(lambda k, x: lax.switch(k, [lambda y: y, lambda y: y * 2, lambda y: y * 3], x), np.int32(k), V)


def test_differentiated_inside(check):
    check(jax.grad(lambda x: lax.scan(lambda c, v: (jnp.sin(c * v) + c, c * v), np.float32(1), x)[0]), V, tol=1e-4)
    check(jax.grad(lambda x: (jnp.sin(x) * jax.nn.gelu(x)).sum()), V, tol=1e-4)
    check(lambda x: jax.jvp(jnp.tanh, (x,), (x,))[1], V)
    check(jax.hessian(lambda x: (x**3).sum()), V, tol=1e-4)


def test_x64(check):
    with jax.enable_x64(True):
        check(lambda x: lax.fori_loop(0, 5, lambda k, c: c * 0.5 + x[k], x[0]), V.astype("f8"))
        check(lambda x, n: lax.fori_loop(0, n, lambda k, c: c * 0.5 + x[k], x[0]), V.astype("f8"), np.int64(3))


def loops(kernel):
    return [op for op in kernel.body.walk() if op.mnemonic in ("for", "while")]


def test_shape_of_the_ir(lower):
    """Counted loops, static or not, are `for` without the counter among the carry; hints arrive."""

    def kernel(x, n, o):
        acc = jt.fori(4, lambda k, c: c + x[k], jnp.float32(0), stages=3, unroll=2)
        acc = jt.fori((0, n[...], 2), lambda k, c: c + x[k], acc, stages=2)
        acc = lax.fori_loop(1, n[...], lambda k, c: c + x[k], acc)
        acc = lax.while_loop(lambda c: c < 3.0, lambda c: c + 1.0, acc)
        m = n[...]
        acc, _, _ = lax.while_loop(lambda c: c[2] < m, lambda c: (c[0] + c[1], c[1] + 2, c[2] + 1), (acc, 0, 0))
        o[...] = acc

    kinds = loops(lower(kernel, [V, np.int32(3)], [jax.ShapeDtypeStruct((), np.float32)]))
    assert [k.mnemonic for k in kinds] == ["for", "for", "for", "while", "for"]
    assert [(k.stages, k.unroll) for k in kinds[:3]] == [(3, 2), (2, 1), (None, 1)]
    assert [len(k.inits) for k in kinds] == [1, 1, 1, 1, 2]


def test_platform_choice(check):
    check(lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.sin), V)
