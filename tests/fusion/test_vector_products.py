"""Products of a computed matrix and a vector are sums in the kernel that computes the matrix; other products stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.fusion import costs
from jtile.fusion.bodies import kernel_of
from jtile.fusion.fused import evaluate
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("any_size")
rng = np.random.default_rng(0)


def array(*shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def near(x, y, weights):
    """Sums of a Gaussian of all distances: the matrix of them is in no memory."""
    return jnp.exp(-((x[:, None] - y[None]) ** 2)) @ weights


# {name: (function, arguments)}
CASES = {
    "outer": (near, (array(9), array(7), array(7))),
    "from the left": (lambda x, a: x @ jnp.exp(a), (array(9), array(9, 7))),
    "a column": (lambda a, x: jnp.exp(a) @ x + 1, (array(9, 7), array(7, 1))),
    "transposed": (lambda a, x: jnp.exp(a).T @ x, (array(9, 7), array(9))),
    "batches": (lambda a, x: jnp.einsum("bij,bj->bi", jnp.exp(a), x), (array(3, 9, 7), array(3, 7))),
    "batches in the middle": (lambda a, x: jnp.einsum("ibj,jb->bi", jnp.exp(a), x), (array(9, 3, 7), array(7, 3))),
    "two axes": (lambda a, x: jnp.einsum("jik,kj->i", jnp.exp(a), x), (array(5, 9, 7), array(7, 5))),
    "codes": (lambda a, s, x: (a.astype(jnp.float32) * s) @ x, (jnp.int8(array(9, 7) * 9), array(7), array(7))),
}


def by_interpreter(unit, args):
    return kernel_of(unit).interpret(args)


def products(plan):
    """How many of them stay with XLA."""
    return sum(isinstance(k, int) and plan.program.nodes[k].name == "dot_general" for k in plan.order)


def close(got, want, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, tolerance, tolerance)


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("name", CASES)
def test_sums_are_the_product(name):
    f, args = CASES[name]
    plan, tree, leaves = jt.fuse(f).planned(args, {})
    assert products(plan) == 0 and len(plan.units) == 1
    close(jax.tree.unflatten(tree, evaluate(plan, leaves, by_interpreter)), f(*args))


def test_on_this_machine_and_under_every_transformation():
    args = CASES["outer"][1]
    loss = lambda f: lambda *args: (f(*args) ** 2).sum()
    batch = tuple(jnp.stack([x, x + 1]) for x in args)

    def all_of(f):
        gradient = jax.grad(loss(f), (0, 1, 2))
        forward = jax.jvp(lambda x: f(x, *args[1:]), args[:1], (jnp.cos(args[0]),))
        return f(*args), gradient(*args), forward, jax.vmap(f)(*batch), jax.vmap(gradient)(*batch)

    ours, plain = (evaluated(lambda _, f=f: all_of(f))(()) for f in (jt.fuse(near), near))
    close(ours, plain, 2e-4)
    close(jt.fuse(jax.grad(loss(near), (0, 1, 2)))(*args), plain[1], 2e-4)


def test_what_stays_a_product(monkeypatch):
    monkeypatch.setattr(costs, "PRODUCTS_ANYWHERE", False)
    a, x = array(9, 7), array(7)
    for f, args in {
        "a matrix in memory": (lambda a, x: jnp.exp(a @ x), (a, x)),
        "a matrix that is moved only": (lambda a, x: a.T.reshape(7, 9).T @ x, (a, x)),
        "a vector that is computed": (lambda x, a: jnp.exp(x) @ a, (array(1, 7), array(7, 4))),
        "two matrices": (lambda a, b: jnp.exp(a) @ b, (a, array(7, 2))),
        "short floats": (lambda a, x: jnp.exp(a) @ x, (a.astype(jnp.bfloat16), x.astype(jnp.bfloat16))),
        "another dtype": (
            lambda a, x: jnp.matmul(jnp.exp(a), x, preferred_element_type=jnp.float32),
            (a.astype(jnp.bfloat16), x.astype(jnp.bfloat16)),
        ),
    }.values():
        plan = jt.fuse(f).explain(*args).plan
        assert products(plan) == 1
    with jax.enable_x64(True):
        wider = lambda a, x: jnp.matmul(jnp.exp(a), x, preferred_element_type=jnp.float64)
        assert products(jt.fuse(wider).explain(a, x).plan) == 1
    assert products(jt.fuse(near).planned((x, x, x), {}, everything=True)[0]) == 1  # as `jt.tile` asks for it


def test_gpus_leave_large_matrices_in_memory_to_xla(monkeypatch):
    monkeypatch.setattr(costs, "LARGE_PRODUCTS_ON_GPUS", False)
    with jt.config(arch="sm_90"):
        left = {name: products(jt.fuse(f).explain(*args).plan) for name, (f, args) in CASES.items()}
    assert left == {name: int(name != "outer") for name in CASES}


def test_small_arrays_of_large_products_are_worth_a_kernel(monkeypatch):
    if "warps" in jt.target().features:
        pytest.skip("on GPUs only arrays in memory count")
    monkeypatch.setattr(costs, "LEAST", 4096)
    text = str(jt.fuse(near).explain(array(100), array(90), array(90)))
    assert "0 by XLA" in text and "dot_general" in text
    text = str(jt.fuse(near).explain(array(10), array(9), array(9)))
    assert "its largest array has 90 elements, fewer than 4096" in text
