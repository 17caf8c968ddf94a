"""What a group computes is added to tables in its kernel: values, derivatives, batches, and what is left to XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import array, index

import jtile as jt
from jtile.fusion import costs
from jtile.fusion.bodies import kernel_of
from jtile.fusion.fused import evaluate
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("any_size_and_rows")


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    monkeypatch.setattr(costs, "SCATTERS_ANYWHERE", True)


def bins(x):
    """How many values lie in each bin, and their sum."""
    place = jnp.clip(jnp.floor((x + 4) * 2).astype(int), 0, 15)
    return jnp.zeros(16, int).at[place].add(1), jnp.zeros(16).at[place].add(x)


def smooth(x, i):
    """A sum into cells, what is in none is dropped, and a total beside it."""
    weight = jnp.exp(x * 0.5)
    return jnp.ones(30).at[i].add(weight, mode="drop"), weight.sum()


TABLE = array(7, 5)

# {name: (function, its arrays)}
CASES = {
    "elements": (lambda x, i: jnp.zeros(30).at[i].add(jnp.exp(x)), array(500), index(30, 500)),
    "beyond": (smooth, array(1500), index(30, 1500, beyond=9)),
    "clipped": (lambda x, i: jnp.zeros(30).at[i].add(x * 2, mode="clip"), array(90), index(30, 90, beyond=9)),
    "a grid": (lambda x, i: jnp.zeros(30).at[i].add(jnp.sin(x) + 1), array(40, 5), index(30, 40, 5)),
    "rows": (lambda x, i: TABLE.at[i].add(jnp.tanh(x)), array(400, 5), index(7, 400)),
    "columns": (lambda x, i: jnp.zeros((5, 7)).at[:, i].add(jnp.tanh(x.T)), array(400, 5), index(7, 400)),
    "rows of one": (lambda x, i: jnp.zeros((7, 1)).at[i].add(jnp.tanh(x)), array(400, 1), index(7, 400)),
    "by two": (lambda x, i: jnp.zeros((6, 9)).at[i, i + 2].add(x * x, mode="drop"), array(300), index(6, 300)),
    "largest": (lambda x, i: jnp.zeros(30).at[i].max(jnp.cos(x) * x), array(500), index(30, 500)),
    "smallest": (lambda x, i: jnp.full((3, 4), 9).at[i % 3, i % 4].min(i * 2), array(1), index(30, 500)),
    "bytes": (lambda x, i: jnp.zeros(99, "uint8").at[i].add(i * i), array(1), index(90, 5000, dtype="uint8")),
    "halves": (lambda x, i: jnp.zeros(30, "float16").at[i].add(x), array(500, dtype="float16") / 99, index(30, 500)),
    "histogram": (lambda x, i: bins(x), array(999), index(3, 3)),
    "softmax first": (lambda x, i: jnp.zeros((7, 9)).at[i].add(jax.nn.softmax(x)), array(60, 9), index(7, 60)),
    "picked and added": (lambda x, i: jnp.zeros(30).at[i].add(jnp.exp(x[i]) * 2), array(30), index(30, 400)),
}


def close(got, want, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        tolerance = 4e-3 if x.dtype == "float16" else tolerance
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), tolerance, tolerance)


@pytest.mark.usefixtures("by_numpy")
def test_programs():
    """By the CPU's kernels and by the interpreter; no scatter is left to XLA."""
    args = {name: args for name, (_, *args) in CASES.items()}
    run = lambda wrap: evaluated(lambda args: {name: wrap(f)(*args[name]) for name, (f, *_) in CASES.items()})(args)
    want = run(lambda f: f)
    for name, (f, *_) in CASES.items():
        plan, tree, leaves = jt.fuse(f).planned(tuple(args[name]), {})
        assert any(unit.scatters for unit in plan.units)
        assert not any("scatter" in plan.program.nodes[k].name for k in plan.order if isinstance(k, int))
        inside = evaluate(plan, leaves, lambda unit, arrays: kernel_of(unit).interpret(arrays))
        close(jax.tree.unflatten(tree, inside), want[name])
    close(run(jt.fuse), want)
    f, *some = CASES["beyond"]
    assert "= scatter-add  (" in str(jt.fuse(f).explain(*some))


@pytest.mark.usefixtures("by_numpy")
def test_nan_and_gradients_and_batches():
    x, i = array(300), index(30, 300)
    holes = x.at[7].set(jnp.nan)
    fused = jt.fuse(smooth)
    close(fused(holes, i), smooth(holes, i))
    loss = lambda f: lambda x: (f(x, i)[0] ** 2).sum()
    close(*(evaluated(jax.grad(loss(f)))(x) for f in (fused, smooth)), 2e-4)
    xs = array(3, 300)
    close(*(evaluated(jax.vmap(f, (0, None)))(xs, i) for f in (fused, smooth)))
    table, rows = array(9, 4), index(9, 200)
    slope = jax.grad(lambda table: jnp.sin(table[rows]).sum())
    assert any(getattr(unit, "scatters", ()) for unit in jt.fuse(slope).explain(table).plan.units)
    close(jt.fuse(slope)(table), slope(table))


def test_what_stays_with_xla(monkeypatch):
    """Tables of few updates, everything on GPUs, and updates of blocks and of other kinds."""
    has = lambda f, *args: any(getattr(unit, "scatters", ()) for unit in jt.fuse(f).explain(*args).plan.units)
    x, i = array(300), index(30, 300)
    assert not has(lambda x, i: jnp.zeros(30).at[i].set(jnp.exp(x) * 2), x, i)
    moved = lambda x, i: jax.lax.scatter_add(jnp.zeros(900), i[:1, None], jnp.exp(x)[None], numbers)
    numbers = jax.lax.ScatterDimensionNumbers((1,), (), (0,))
    assert not has(moved, x, i)
    monkeypatch.setattr(costs, "SCATTERS_ANYWHERE", False)
    add = lambda n: lambda x, i: jnp.zeros(n).at[i].add(jnp.exp(x))
    large = jax.ShapeDtypeStruct((1 << 16,), jnp.float32), jax.ShapeDtypeStruct((1 << 16,), jnp.int32)
    with jt.config(arch=None):
        on_cpu = "warps" not in jt.target().features
        assert has(add(1000), *large) == on_cpu
        assert not has(add(1 << 14), *large)
    with jt.config(arch="sm_90"):
        assert not has(add(1000), *large)
