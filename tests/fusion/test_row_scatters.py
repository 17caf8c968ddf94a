"""Scatters of rows as kernels: values with duplicates and indices beyond the table, derivatives, batches, and what is
left to XLA."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import array, index

import jtile as jt
from jtile.fusion import costs
from jtile.fusion.bodies import kernel_of
from jtile.fusion.fused import evaluate
from jtile.fusion.row_scatters import RowScatter
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("any_size")


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    monkeypatch.setattr(costs, "ROW_SCATTERS_ANYWHERE", True)


def like(*types):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]


def scaled(i, x, w):
    """Rows of several axes, each with a factor."""
    return jnp.zeros((9, 2, 20)).at[i].add(x * w[:, :, None, None])


TABLE = array(9, 37)
BYTES, HALVES = index(9, 70, 37, dtype="int8"), array(6, 37, dtype="bfloat16")
UNIQUE = jnp.asarray([8, 3, 40, 0, 5, -2])

# {name: (function, its arrays)}
CASES = {
    "rows": (lambda t, i, x: t.at[i].add(jnp.tanh(x) * 2), TABLE, index(9, 70), array(70, 37)),
    "as they are": (lambda t, i, x: t.at[i].add(x), TABLE, index(9, 70), array(70, 37)),
    "beyond": (lambda t, i, x: t.at[i].add(x * x, mode="drop"), TABLE, index(9, 70, beyond=4), array(70, 37)),
    "clipped": (lambda t, i, x: t.at[i].add(x * x, mode="clip"), TABLE, index(9, 70, beyond=4), array(70, 37)),
    "bytes": (lambda i, x: jnp.zeros((9, 37), "int8").at[i].add(x * x), index(9, 70, dtype="uint8"), BYTES),
    "halves": (lambda i, x, b: jnp.ones((9, 37), "bfloat16").at[i].add(x + b), UNIQUE, HALVES, HALVES[0]),
    "scaled": (scaled, index(9, 5, 8), array(5, 8, 2, 20), array(5, 8)),
    "one value": (lambda i: jnp.zeros((9, 20)).at[i].add(1.5), index(9, 70)),
    "set": (lambda t, i, x: t.at[i].set(jnp.exp(x), unique_indices=True), TABLE, UNIQUE, array(6, 37)),
}  # fmt: skip
ON_CPUS = {
    "largest": (lambda t, i, x: t.at[i].max(jnp.sin(x) * 3), TABLE, index(9, 70), array(70, 37)),
    "smallest": (lambda t, i, x: t.at[i].min(x - 1), TABLE, index(9, 70), array(70, 37)),
    "times": (lambda t, i, x: t.at[i].multiply(x + 1, mode="drop"), TABLE, index(9, 20, beyond=2), array(20, 37)),
    "last wins": (lambda t, i, x: t.at[i].set(jnp.exp(x)), TABLE, index(9, 70), array(70, 37)),
}


def close(got, want, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        tolerance = 1e-2 if x.dtype == "bfloat16" else tolerance
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), tolerance, tolerance)


def scattered(f, *args):
    return [unit for unit in jt.fuse(f).explain(*args).plan.units if isinstance(unit, RowScatter)]


@pytest.mark.usefixtures("by_numpy")
def test_programs():
    """By the kernels of the machine and by the interpreter; no scatter is left to XLA."""
    cases = CASES if "warps" in jt.target().features else CASES | ON_CPUS
    args = {name: args for name, (_, *args) in cases.items()}
    run = lambda wrap: evaluated(lambda args: {name: wrap(f)(*args[name]) for name, (f, *_) in cases.items()})(args)
    want = run(lambda f: f)
    for name, (f, *_) in cases.items():
        plan, tree, leaves = jt.fuse(f).planned(tuple(args[name]), {})
        assert any(isinstance(unit, RowScatter) for unit in plan.units), name
        inside = evaluate(plan, leaves, lambda unit, arrays: kernel_of(unit).interpret(arrays))
        close(jax.tree.unflatten(tree, inside), want[name])
    close(run(jt.fuse), want)


@pytest.mark.usefixtures("by_numpy")
def test_nan_and_gradients_and_batches():
    f, t, i, x = CASES["rows"]
    holes = x.at[7, 5].set(jnp.nan)
    close(jt.fuse(f)(t, i, holes), f(t, i, holes))
    loss = lambda f: lambda t, x: (f(t, i, x) ** 2).sum()
    close(*(evaluated(jax.grad(loss(f), argnums=(0, 1)))(t, x) for f in (jt.fuse(f), f)), 2e-4)
    tables, xs = array(3, 9, 37), array(3, 70, 37)
    close(*(evaluated(jax.vmap(f, (0, None, 0)))(tables, i, xs) for f in (jt.fuse(f), f)))
    slope = lambda table: jnp.sin(table[i]).sum()  # of an embedding
    assert scattered(jax.grad(slope), t)
    close(jt.fuse(jax.grad(slope))(t), jax.grad(slope)(t))
    assert (x[0] != 0).all() and bool((t == TABLE).all())  # the table itself is not written to


def test_for_a_gpu(monkeypatch):
    """Programs add by vectors, atomically; what would depend on their order is XLA's."""
    with jt.config(arch="sm_90"):
        (unit,) = scattered(*CASES["rows"])
        types = like(((70, 37), "float32"), ((70,), "int32"), ((9, 37), "float32"))
        ptx = kernel_of(unit).kernel.lower(*types, target="cuda:sm_90").texts["ptx"]
        assert re.search(r"(red|atom)\.\S*add", ptx)  # older versions of triton keep the unused result
        assert scattered(*CASES["set"]) and not scattered(*ON_CPUS["last wins"])
        f, *args = ON_CPUS["last wins"]
        assert "programs of a kernel for GPUs write them in any order" in str(jt.fuse(f).explain(*args))


def test_new_elements_of_old_ones_stay_with_xla():
    """`apply` has updates that nothing reads."""
    f = lambda t, i: t.at[i].apply(jnp.cos)
    assert not scattered(f, TABLE, index(9, 70))
    close(jt.fuse(f)(TABLE, jnp.arange(9)), f(TABLE, jnp.arange(9)))


def test_what_stays_with_xla(monkeypatch):
    """Other axes than the first, rows that nothing computes, few of them, and large tables."""
    f, t, i, x = CASES["rows"]
    assert not scattered(lambda t, i, x: t.at[:, i].add(jnp.tanh(x.T)), t.T, i, x)
    monkeypatch.setattr(costs, "ROW_SCATTERS_ANYWHERE", False)
    monkeypatch.setattr(costs, "LEAST", 4096)
    assert not scattered(f, t, i, x)
    of = lambda v, n, d: like(((v, d), "float32"), ((n,), "int32"), ((n, d), "float32"))
    said = lambda f, *args: str(jt.fuse(f).explain(*args))
    with jt.config(arch=None):
        if "warps" not in jt.target().features:
            assert scattered(f, *of(100, 1000, 64))
            assert "programs, each scatters 16 elements of every row" in said(f, *of(100, 1000, 64))
            assert "nothing computes its rows" in said(lambda t, i, x: t.at[i].add(x), *of(100, 1000, 64))
            assert "whose copy takes most of the time" in said(f, *of(10000, 1000, 64))
            assert "too few to repay a kernel" in said(f, *of(100, 10000, 4))
    with jt.config(arch="sm_90"):
        sums = lambda i, x: jnp.zeros((3200, 1024), x.dtype).at[i].add(x)
        of_type = lambda d: like(((4096,), "int32"), ((4096, 1024), d))
        assert all(scattered(sums, *of_type(d)) for d in ("bfloat16", "float16"))
        few = like(((1200,), "int32"), ((1200, 1024), "bfloat16"))
        assert not scattered(sums, *of_type("float32")) and scattered(sums, *few)
        few = like(((512,), "int32"), ((512, 1024), "bfloat16"))
        assert not scattered(sums, *few)
        assert "XLA's code for GPUs scatters rows as quickly" in said(sums, *of_type("float32"))
