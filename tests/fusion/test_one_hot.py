"""Gradients of what picks an element of each row: rows of zeros with one element, which a kernel computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from benchmarks.fuse import cross_entropy
from jtile.fusion.one_hot import with_one_hot_rows
from jtile.fusion.steps import program_of
from jtile.testing.evaluate import evaluated

rng = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("any_size_and_rows", "by_numpy")


def array(*shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def names(f, *args):
    nodes = program_of(jax.make_jaxpr(f)(*args)).nodes
    return {node.name for node in with_one_hot_rows(nodes)}


def same(f, *args, tolerance=1e-6, run=evaluated):
    for got, want in zip(*(jax.tree.leaves(run(g)(*args)) for g in (jt.fuse(f), f)), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (got, want)), tolerance, tolerance)


def picked(x, i, axis, slopes, **how):
    return jax.vjp(lambda x: jnp.take_along_axis(x, i, axis, **how), x)[1](slopes)[0]


def test_the_gradient_of_a_cross_entropy_is_one_kernel():
    x, labels = array(40, 70), jnp.asarray(rng.integers(-70, 70, 40))
    f = jax.grad(cross_entropy)
    found = jt.fuse(f).explain(x, labels)
    assert ", 0 by XLA" in str(found) and [v.shape for unit in found.plan.units for v in unit.outputs] == [x.shape]
    assert "scatter-add" not in names(f, x, labels)
    same(f, x, labels)
    same(jax.grad(lambda x: (f(x, labels) ** 2).sum()), x, tolerance=1e-5)
    same(jax.vmap(f, (0, None)), array(3, 40, 70), labels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize(("shape", "axis"), [((20, 30), 1), ((20, 30), 0), ((4, 20, 6), 1), ((5, 1), 1)])
def test_rows_along_any_axis(shape, axis, dtype):
    few = tuple(1 if d == axis else n for d, n in enumerate(shape))
    i = jnp.asarray(rng.integers(0, shape[axis], few))
    slopes, zeros = jnp.asarray(9 * rng.standard_normal(few), dtype), jnp.zeros(shape, dtype)
    add = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    f = lambda z, i, u: scattered(z.shape, i, u, axis, add) * 2 - z
    same(f, zeros, i, slopes)
    assert "scatter-add" not in names(f, zeros, i, slopes)


def scattered(shape, index, updates, axis, mode):
    others = tuple(d for d in range(len(shape)) if d != axis)
    numbers = jax.lax.ScatterDimensionNumbers((), (axis,), (axis,), others, tuple(range(len(others))))
    flat = (*(shape[d] for d in others), 1)
    index, updates = index.reshape(*flat, 1), updates.reshape(flat)
    return jax.lax.scatter_add(jnp.zeros(shape, updates.dtype), index, updates, numbers, mode=mode)


@pytest.mark.parametrize("mode", ["FILL_OR_DROP", "CLIP"])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8", "uint8", "int16"])
def test_indices_that_lie_outside(mode, dtype):
    """They are dropped or clipped as XLA does it; narrow ones can name more columns than these numbers can count."""
    values = [0, 1, 29, 30, 120] + ([255, 200] if dtype == "uint8" else [-1, -128] if "u" not in dtype else [2**31, 7])
    index = jnp.asarray(np.array(values).astype(dtype))
    both, u = [array(len(values), columns) for columns in (30, 300)], array(len(values))
    one = lambda x, i, u: scattered(x.shape, i, u, 1, jax.lax.GatherScatterMode[mode]) + jnp.exp(x)
    same(lambda both, i, u: [one(x, i, u) for x in both], both, index, u, run=jax.jit)


def test_special_numbers():
    u = jnp.array([jnp.nan, jnp.inf, -0.0, -jnp.inf])
    f = lambda x, u: scattered(x.shape, jnp.arange(4), u, 1, jax.lax.GatherScatterMode.CLIP) * x
    same(f, jnp.ones((4, 9)), u)
    signs = jt.fuse(lambda x, u: jnp.signbit(f(x, u)))(jnp.ones((4, 9)), u)
    assert np.array_equal(signs, jax.jit(lambda x, u: jnp.signbit(f(x, u)))(jnp.ones((4, 9)), u))


def test_what_stays_a_scatter():
    x, i = array(20, 30), jnp.asarray(rng.integers(0, 30, (20, 2)))
    f = lambda x: picked(x, i, 1, jnp.ones((20, 2)))  # two elements of a row, which may be one
    assert "scatter-add" in names(f, x)
    same(f, x)
    onto = lambda x, u: jnp.ones((20, 30)).at[jnp.arange(20), i[:, 0]].add(u)  # not onto zeros
    assert "scatter-add" in names(onto, x, array(20))
    same(onto, x, array(20))
    minus = lambda x, u: jnp.copysign(1.0, scattered_onto(jnp.full((20, 30), -0.0), u) * jnp.exp(x))  # nor onto -0
    assert "scatter-add" in names(minus, x, array(20))
    same(minus, x, array(20))


def scattered_onto(table, updates):
    numbers = jax.lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
    columns = jnp.arange(len(updates)).reshape(-1, 1, 1)
    return jax.lax.scatter_add(table, columns, updates[:, None], numbers)
