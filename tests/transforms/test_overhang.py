"""Derivatives of kernels whose tiles hang over: what functions make of padding is no term of a sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.testing import check_kernel

ONLY = ("value", "jvp", "vjp", "grad of vmap", "vmap of grad", "second order")
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@jt.kernel(out_type=lambda x, s: jt.like(x), grid=lambda x, s: jt.cdiv(x.shape[0], 4))
def over(x, s, o):
    i = jt.program_id(0)
    o.tiles(4)[i] = s[...] / x.tiles(4)[i]


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w: jt.cdiv(x.shape[0], 4))
def normed(x, w, o):
    """Rows behind the last one are 0 / 0."""
    i, n = jt.program_id(0), x.shape[1]
    t = x.tiles(4, n)[i, 0]
    t = t - t.mean(1, keepdims=True)
    o.tiles(4, n)[i, 0] = t / jnp.sqrt((t * t).mean(1, keepdims=True)) * w[...][None]


@jt.kernel(out_type=lambda x, w: jt.like(x, shape=(x.shape[0], w.shape[1])), grid=lambda x, w: jt.cdiv(x.shape[0], 4))
def normed_product(x, w, o):
    i = jt.program_id(0)
    t = x.tiles(4, x.shape[1])[i, 0]
    o.tiles(4, o.shape[1])[i, 0] = jt.dot(t / jnp.abs(t).sum(1, keepdims=True), w[...])


@jt.kernel(out_type=lambda x, s: jt.like(x), grid=lambda x, s: jt.cdiv(x.shape[0], 4))
def masked(x, s, o):
    at = jt.program_id(0) * 4 + jt.arange(4)
    live = at < x.shape[0]
    jt.store(o, at, s[...] * jnp.log(jt.load(x, at, mask=live)), mask=live)


@jt.kernel(out_type=lambda x: jt.like(x, shape=()), init=0, grid=lambda x: jt.cdiv(x.shape[0], 4))
def roots(x, o):
    """The tangent of a root of padding is 0 * inf, and not written."""
    jt.atomic_add(o, (), jnp.sqrt(x.tiles(4)[jt.program_id(0)]).sum())


@jt.kernel(out_type=lambda table, at, x: jt.like(x), grid=lambda table, at, x: jt.cdiv(x.shape[0], 4))
def looked_up(table, at, x, o):
    """Lanes behind the last one look up entry 0."""
    i = jt.program_id(0)
    o.tiles(4)[i] = table[at.tiles(4)[i]] / x.tiles(4)[i]


@jt.kernel(out_type=lambda x, y: jt.like(x))
def running(x, y, o):
    o.tiles(8)[0] = jnp.cumsum(x.tiles(8)[0]) / y.tiles(8)[0]


@jt.kernel(out_type=lambda x, w: jt.like(x, shape=x.shape[:1]), grid=lambda x, w: jt.cdiv(x.shape[0], 4))
def in_rounds(x, w, o):
    """The carry of a loop over blocks is zero for rows behind the last one."""
    i = jt.program_id(0)
    X, W = x.tiles(4, 3), w.tiles(3)
    s = jnp.zeros(4)
    for k in jt.range(X.shape[1]):
        s = s + jnp.abs(X[i, k]).sum(1)
    total = jnp.zeros(4)
    for k in jt.range(X.shape[1]):
        total = total + (X[i, k] / s[:, None] * W[k][None]).sum(1)
    o.tiles(4)[i] = total


X, W = normal(6, 5) + 3, normal(5)
POSITIVE = np.arange(1, 8, dtype=np.float32)[:6]
AT = np.array([1, 2, 2, 0, 1, 2], np.int32)


def normed_reference(x, w):
    x = x - x.mean(1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(1, keepdims=True)) * w[None]


CASES = {
    "over": (over, lambda x, s: s / x, (POSITIVE, np.float32(2))),
    "normed": (normed, normed_reference, (X, W)),
    "normed_product": (normed_product, lambda x, w: x / jnp.abs(x).sum(1, keepdims=True) @ w, (X, normal(5, 3))),
    "masked": (masked, lambda x, s: s * jnp.log(x), (POSITIVE, np.float32(2))),
    "roots": (roots, lambda x: jnp.sqrt(x).sum(), (POSITIVE,)),
    "looked_up": (looked_up, lambda t, at, x: t[at] / x, (normal(3), AT, POSITIVE)),
    "running": (running, lambda x, y: jnp.cumsum(x) / y, (normal(6), POSITIVE)),
    "in_rounds": (in_rounds, lambda x, w: (x / jnp.abs(x).sum(1, keepdims=True) * w[None]).sum(1), (X, W)),
}


@pytest.mark.parametrize("name", CASES)
def test_derivatives(name):
    kernel, reference, args = CASES[name]
    check_kernel(kernel, reference, args, only=ONLY, order=2, derivative_tolerance=2e-5)


@pytest.mark.parametrize("name", ["normed_product", "masked"])
def test_derivatives_in_the_interpreter(name):
    kernel, reference, args = CASES[name]
    with jt.config(interpret=True):
        check_kernel(kernel, reference, args, only=("vjp",), derivative_tolerance=2e-5)


def test_dynamic_rows():
    rows = jax.grad(lambda w: (normed(jt.dynamic(X, 0), w) ** 2).sum())(W)
    want = jax.grad(lambda w: (normed_reference(X, w) ** 2).sum())(W)
    np.testing.assert_allclose(rows, want, rtol=1e-5)


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w: jt.cdiv(x.shape[0], 4))
def softmax(x, w, o):
    i = jt.program_id(0)
    t = x.tiles(4, 8, pad=-jnp.inf)[i, 0]
    e = jnp.exp(t - jnp.maximum(t.max(1, keepdims=True), -1e30))
    o.tiles(4, 8)[i, 0] = jnp.tanh(e * w.tiles(8)[0][None])


def test_finite_padding_costs_nothing():
    low = softmax.lower(X, W)
    assert "select" not in low.vjp(wrt=1).texts["tile_ir_opt"]
    assert "select" in normed.lower(X, W).vjp(wrt=1).texts["tile_ir_opt"]
    assert "select" not in normed.lower(X[:4], W).vjp(wrt=1).texts["tile_ir_opt"]  # no tile hangs over
