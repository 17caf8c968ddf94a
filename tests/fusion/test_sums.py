"""Sums in `jt.fuse` along axes that no program takes whole: each program adds up its part, XLA the programs' sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from benchmarks.fuse import gradient, layer_norm
from jtile.fusion import costs, groups
from jtile.fusion.bodies import kernel_of
from jtile.fusion.fused import evaluate
from jtile.testing.evaluate import evaluated

rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def few_elements(any_size, monkeypatch):
    """A program has room for few elements."""
    monkeypatch.setattr(costs, "ALONE", 0)
    monkeypatch.setattr(costs, "ROW_CPU", 64)
    monkeypatch.setattr(groups, "LARGE", 0)


def array(*shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape) * 3, dtype)


def close(got, want, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), tolerance, tolerance)


def kinds(x):
    """Every kind of sum, of numbers of every kind."""
    n, positive = x.astype(jnp.int32), x > 0
    whole = jax.lax.reduce_and(n | 3, axes=(0,)), jax.lax.reduce_or(n * 2, axes=(0,))
    floats = (x * x).sum(0), (x / 3).prod(0), jnp.abs(x).max(0), (-x).min(0), (x * 2).astype(jnp.float16).sum(0)
    return (
        *floats,
        (n + 1).sum(0),
        (n - 7).max(0),
        (n * 2).min(0),
        (positive & (x < 3)).any(0),
        (~positive).all(0),
        *whole,
    )


CASES = {
    "all": (lambda x: (jnp.tanh(x) ** 2).sum(), [(37, 111)]),
    "equal elements": (lambda x: jnp.broadcast_to(jnp.exp(x / 9)[None], (301, 8)).sum() + 1, [(8,)]),
    "columns": (lambda x, w: (jnp.tanh(x) * w).sum(0), [(37, 50), (50,)]),
    "several": (lambda x: ((x * x).sum(0), jnp.exp(x).max(0), x + 1, x.min()), [(37, 50)]),
    "kinds": (kinds, [(23, 9)]),
    "rows and columns": (lambda x: ((y := jax.nn.softmax(x)), (y * x).sum(0)), [(37, 30)]),
    "around an axis": (lambda x: x * x.var((0, 2), keepdims=True), [(5, 6, 70)]),
    "long rows": (jax.nn.softmax, [(3, 1000)]),
    "one row": (lambda x: jnp.exp(-jnp.abs(x)).sum(), [(5000,)]),
    "nan": (lambda x: jnp.log(x).max(0), [(37, 4)]),
    "layer norm gradient": (gradient(layer_norm, 3), [(37, 20), (20,), (20,)]),
}


@pytest.mark.usefixtures("on_the_cpu", "by_numpy")
@pytest.mark.parametrize("name", CASES)
def test_sums_of_programs(name):
    f, shapes = CASES[name]
    args = tuple(array(*shape) for shape in shapes)
    plan, tree, leaves = jt.fuse(f).planned(args, {})
    assert any(getattr(unit, "last", ()) for unit in plan.units)
    got = evaluate(plan, leaves, lambda unit, args: kernel_of(unit).interpret(args))
    close(jax.tree.unflatten(tree, got), f(*args), 1e-2 if name == "kinds" else 1e-4)


@pytest.mark.usefixtures("by_numpy")
def test_on_this_machine():
    """All of them, and a derivative, which is that of the equations."""
    args = {name: [array(*shape) for shape in shapes] for name, (_, shapes) in CASES.items()}
    run = lambda fuse: evaluated(lambda args: {name: fuse(f)(*args[name]) for name, (f, _) in CASES.items()})(args)
    close(run(jt.fuse), run(lambda f: f), 1e-2)
    f, (x,) = CASES["all"][0], args["all"]
    close(*(evaluated(jax.grad(f))(x) for f in (jt.fuse(f), f)))
    close(*(evaluated(lambda x, f=f: jax.jvp(f, (x,), (x,)))(x) for f in (jt.fuse(f), f)))


def test_arrays_are_read_once_for_all_sums():
    x = array(37, 50)
    (unit,) = jt.fuse(lambda x: ((x * x).sum(0), jnp.exp(x).max(0), (x + 1).min(0))).explain(x).plan.units
    assert len(unit.last) == 3
