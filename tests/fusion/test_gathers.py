"""What an index picks is loaded in the kernel that needs it: values, derivatives, batches, and what is left to XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import array, index

import jtile as jt
from jtile.fusion import costs
from jtile.fusion.bodies import kernel_of
from jtile.fusion.chains import Chain
from jtile.fusion.fused import evaluate
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("any_size_and_rows")


def cross_entropy(x, labels):
    return jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, labels[:, None], 1)[:, 0]


def between(x, i):
    """Linear between four elements, at places that are no whole numbers."""
    y, z = jnp.abs(jnp.sin(i)) * 28, jnp.abs(jnp.cos(i)) * 5
    j, k = jnp.floor(y).astype(int), jnp.floor(z).astype(int)
    a, b = y - j, z - k
    return (1 - a) * ((1 - b) * x[j, k] + b * x[j, k + 1]) + a * ((1 - b) * x[j + 1, k] + b * x[j + 1, k + 1])


# {name: (function, its array, its indices)}
CASES = {
    "rows": (lambda x, i: jax.nn.softmax(x[i] * 2), array(30, 17), index(30, 9)),
    "rows of a grid": (lambda x, i: jnp.exp(x[i]) * 2, array(20, 3), index(20, 4, 5)),
    "one row": (lambda x, i: jnp.exp(jnp.take(x, i, axis=1) * 2), array(5, 12, 7), index(12)),
    "columns": (lambda x, i: jnp.exp(jnp.take(x, i, axis=1)) + 1, array(5, 40), index(40, 9, beyond=9)),
    "in the middle": (
        lambda x, i: jax.nn.softmax(jnp.take(x, i, axis=1) * 2, axis=(1, 2)),
        array(5, 12, 7),
        index(12, 9, beyond=1),
    ),
    "elements": (lambda x, i: jnp.exp(x[i]) * x[i].max(), array(200), index(200, 70)),
    "elements of rows": (cross_entropy, array(16, 20), jnp.arange(16, dtype=jnp.int32)),
    "differences": (lambda x, i: (jnp.exp(x[i] - x[i[::-1]]) ** 2).sum(-1), array(20, 6), index(20, 50)),
    "beside the table": (lambda x, i: jnp.exp(x[i] - x) * 2, array(20, 6), index(20, 20)),
    "long sums": (lambda x, i: jnp.exp(x[i]).sum(), array(2000), index(1990, 5000)),
    "sums of rows": (lambda x, i: jnp.sin(x[i] * 2).sum(0), array(200, 8), index(190, 5000)),
    "clipped": (lambda x, i: jnp.exp(x.at[i].get(mode="clip")) * 2, array(30, 3), index(30, 45, beyond=9)),
    "filled": (
        lambda x, i: jnp.exp(x.at[i].get(mode="fill", fill_value=0.5)) * 2,
        array(30, 3),
        index(30, 45, beyond=9),
    ),
    "a row only": (lambda x, i: jnp.exp(x[i]) * 2, array(1, 6), index(1, 9)),
    "bytes": (lambda x, i: jnp.exp(x[i]) * 2, array(300, 3), index(200, 45, dtype="uint8")),
    "bytes with signs": (
        lambda x, i: jnp.exp(x.at[i].get(mode="fill")) * 2,
        array(90),
        index(100, 45, dtype="int8", beyond=20),
    ),
    "words": (lambda x, i: jnp.exp(x.at[i].get(mode="fill")) * 2, array(30), index(30, 45, dtype="uint32", beyond=9)),
    "by two": (lambda x, i: jnp.exp(x[i, i[::-1] % 7]) * 2, array(30, 7), index(30, 50)),
    "by two, a grid": (lambda x, i: jnp.exp(x[i[:, None], i % 7]) * 2, array(30, 7), index(30, 9)),
    "by two, rows": (lambda x, i: jax.nn.softmax(x[:, i, i % 3]) * 2, array(2, 30, 3), index(30, 50)),
    "by three, filled": (
        lambda x, i: jnp.exp(x.at[i, i[::-1], 1 - i].get(mode="fill", fill_value=0.5)) * 2,
        array(5, 6, 7),
        index(5, 50, beyond=4),
    ),
    "by two, clipped": (
        lambda x, i: jnp.exp(x.at[i, i[::-1]].get(mode="clip")) * 2,
        array(5, 6),
        index(5, 50, dtype="int8", beyond=4),
    ),
    "between neighbours": (between, array(30, 7), index(29, 4, 9) + 29),
    "in rows": (lambda x, i: jnp.exp(jax.vmap(lambda x, i: x[i])(x, i)) * 2, array(4, 30, 3), index(30, 4, 45)),
}


def by_interpreter(unit, args):
    return kernel_of(unit).interpret(args)


def close(got, want, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, tolerance, tolerance)


def gathers(plan):
    """How many of them are in kernels, and how many XLA's."""
    inside = sum(len(getattr(unit, "gathers", ())) for unit in plan.units)
    return inside, sum(isinstance(k, int) and plan.program.nodes[k].name == "gather" for k in plan.order)


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("name", CASES)
def test_what_is_picked(name):
    f, *args = CASES[name]
    plan, tree, leaves = jt.fuse(f).planned(tuple(args), {})
    inside, left = gathers(plan)
    assert inside >= 1 and left == 0
    close(jax.tree.unflatten(tree, evaluate(plan, leaves, by_interpreter)), f(*args))


def derivatives(name, f):
    """The value, the gradient and the second one, those of a batch, and forward mode."""
    own, *args = CASES[name]
    f = f(own)
    one = lambda x, i: jnp.where(jnp.isfinite(y := f(x, i)), y, 0).sum()
    twice = jax.grad(lambda x, i: (jax.grad(one)(x, i) ** 2).sum())
    batch = jnp.stack([args[0], args[0] + 1]), jnp.stack([args[1], args[1]])
    forward = jax.jvp(lambda x: one(x, args[1]), (args[0],), (jnp.cos(args[0]),))
    batched = jax.vmap(f)(*batch), jax.vmap(jax.grad(one), in_axes=(0, None))(batch[0], args[1])
    return f(*args), jax.grad(one)(*args), twice(*args), forward, batched


@pytest.mark.parametrize(
    "names", [("rows", "elements of rows", "long sums"), ("columns", "filled", "in rows", "by two, rows")], ids=str
)
def test_on_this_machine_and_under_every_transformation(names):
    ours, plain = (
        evaluated(lambda _, f=f: [derivatives(name, f) for name in names])(()) for f in (jt.fuse, lambda f: f)
    )
    close(ours, plain, 2e-4)


@pytest.mark.parametrize("name", ["rows", "elements of rows", "long sums"])
def test_compiled_for_hopper(name):
    pytest.importorskip("triton")
    f, *args = CASES[name]
    with jt.config(arch="sm_90"):
        (unit,) = jt.fuse(f).explain(*args).plan.units
        kernel = kernel_of(unit)
        types = [jax.ShapeDtypeStruct(shape, v.dtype) for shape, v in zip(kernel.shapes, unit.inputs, strict=True)]
        assert "ld.global" in kernel.kernel.lower(*types, target="cuda:sm_90").texts["ptx"]


def test_gradients_of_whole_programs():
    loss = lambda x, labels: cross_entropy(x, labels).mean()
    f, x, labels = jt.fuse(jax.value_and_grad(loss)), *CASES["elements of rows"][1:]
    assert gathers(f.explain(x, labels).plan) == (1, 0)
    close(f(x, labels), jax.value_and_grad(loss)(x, labels))


def test_indices_are_made_in_the_kernel():
    f = lambda x, i: jnp.exp(x[i % 7 + 1]) * 2
    (group,) = jt.fuse(f).explain(array(40), index(40, 90)).plan.units
    assert [v.shape for v in group.inputs] == [(90,), (40,)] and len(group.outputs) == 1
    text = str(jt.fuse(f).explain(array(40), index(40, 90)))
    assert "0 by XLA" in text and "= gather" in text


def test_a_table_that_the_kernel_would_make_is_in_memory():
    f = lambda x, i: jnp.exp((jnp.sin(x) * 2)[i]) + 1
    args = array(40), index(40, 40)
    plan = jt.fuse(f).explain(*args).plan
    assert len(plan.units) == 2 and gathers(plan) == (1, 0)
    close(jt.fuse(f)(*args), f(*args))


def test_a_gather_that_several_need_is_one_of_xla():
    f = lambda x, i: (picked := x[i], jnp.exp(picked) * 2)
    explained = jt.fuse(f).explain(array(40), index(40, 90))
    assert gathers(explained.plan) == (0, 1)
    assert "no kernel alone needs what it picks" in str(explained)


def test_whole_rows_are_copied_by_cpus(monkeypatch):
    monkeypatch.setattr(costs, "ROWS_ON_CPUS", False)
    f, *args = CASES["rows"]
    with jt.config(arch="sm_90"):
        assert gathers(jt.fuse(f).explain(*args).plan) == (1, 0)
    if "warps" not in jt.target().features:
        explained = jt.fuse(f).explain(*args)
        assert gathers(explained.plan) == (0, 1) and "it picks whole rows" in str(explained)
        f, *args = CASES["elements of rows"]
        assert gathers(jt.fuse(f).explain(*args).plan) == (1, 0)


def test_picked_biases_leave_attention_as_it_is():
    """A bias by how far a key is behind, from a table."""

    def f(q, k, v, table):
        behind = jnp.arange(12)[:, None] - jnp.arange(12) + 11
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + table[behind].transpose(2, 0, 1)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    args = *(array(2, 12, 4, 8) for _ in range(3)), array(23, 4)
    units = jt.fuse(f).explain(*args).plan.units
    assert any(isinstance(unit, Chain) for unit in units)
    close(jt.fuse(f)(*args), f(*args))
