"""Slices, pads, shifts and concatenations are read where they lie: values, derivatives, batches, and what is left."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.fusion import costs
from jtile.fusion.bodies import kernel_of
from jtile.fusion.chains import Chain
from jtile.fusion.fused import evaluate
from jtile.fusion.windowed import ends_within
from jtile.fusion.windows import WINDOWS
from jtile.testing.evaluate import evaluated

rng = np.random.default_rng(0)

pytestmark = pytest.mark.usefixtures("any_size")


def array(*shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape) * 3, dtype)


def five_points(x):
    return x[1:-1, 1:-1] + 0.1 * (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1])


def slopes(x):
    """The gradient of Rosenbrock's function, as NumPy's users add it up."""
    miss = x[1:] - x[:-1] ** 2
    slope = jnp.zeros_like(x).at[1:].add(200 * miss)
    return slope.at[:-1].add(-(400 * x[:-1] * miss + 2 * (1 - x[:-1])))


def shifts(x):
    around = [jnp.roll(x, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]
    return jnp.where(sum(around) > 2, x * 2, -x)


def choices(x):
    """Of which most programs need one side alone."""
    i, j = jnp.arange(50)[:, None], jnp.arange(300)[None]
    edge = jnp.where((i - 2 <= 45) & (j > 3), x * 2, jnp.exp(x))
    other = jnp.where((i < 1) | (j + 4 >= 290), x, edge)
    return jnp.where(j < 200, 1.0, 2.0) * jnp.roll(x, 1, 0) + other


def around(mode):
    def f(x):
        p = jnp.pad(x, ((1, 2), (2, 1)), mode=mode)
        return p[:-3, 1:-2] * 2 + p[3:, 3:] - p[1:-2, 2:-1]

    return f


# {name: (function, its array, how many kernels it has)}
CASES = {
    "five points": (five_points, array(9, 40), 1),
    "in place": (lambda x: x.at[1:-1, 1:-1].set(five_points(x)), array(50, 300), 1),
    "a row and a column": (lambda x: x.at[0].set(x[1] * 2 + x[-1]).at[:, 3].multiply(2.5) - 1, array(7, 18), 1),
    "slopes": (slopes, array(5000), 1),
    "shifts": (shifts, array(40, 260), 1),
    "edges": (around("edge"), array(12, 17), 1),
    "wrapped": (around("wrap"), array(12, 17), 1),
    "reflected": (around("reflect"), array(12, 17), 1),
    "other numbers outside": (lambda x: jnp.pad(x, 2, constant_values=2.5)[1:-1, 2:-2] * x[0, 0] + 1, array(6, 30), 1),
    "cropped by a pad": (lambda x: jax.lax.pad(x, 1.5, ((-1, 2, 0), (3, -2, 0))) * 2 + 1, array(9, 20), 1),
    "every third": (lambda x: x[1::3] * x[:-1:3] + 2, array(200), 1),
    "beside each other": (lambda x: jnp.concatenate([x[:, :5] * 2, x[:, 9:], x[:, 5:9] - 1], 1) + 1, array(6, 40), 1),
    "backwards": (lambda x: x[::-1, 2:] * x[:, :1:-1] - x[:, :-2], array(9, 25), 1),
    "turned": (lambda x: (x[1:] - 2 * x[:-1]).T * x.T[:, 2:3] + 1, array(9, 20), 1),
    "broadcast": (lambda x: x[1:] * x[0] - x[:-1, :1], array(9, 20), 1),
    "sums": (lambda x: ((x[1:] - x[:-1] * 2) ** 2).sum(), array(700, 33), 1),
    "sums of columns": (lambda x: jnp.abs(jnp.roll(x, 3, 1) - x * 2).max(0), array(300, 40), 1),
    "integers": (lambda x: (jnp.roll(x, -2, 0) ^ (x + 3)) * 2, array(17, 20, dtype="int32"), 1),
    "bytes": (lambda x: jnp.pad(x, 1)[2:, 1:-1] * 2 + x, array(17, 70, dtype="int8"), 1),
    "half precision": (lambda x: x[1:] * x[:-1] + 1, array(9, 20, dtype="bfloat16"), 1),
    "two passes": (lambda x: five_points(jnp.exp(five_points(x))), array(9, 40), 2),
    "three dimensions": (lambda x: x[1:, 2:, :-1] * 2 - x[:-1, :-2, 1:], array(4, 6, 20), 1),
    "choices": (choices, array(50, 300), 1),
    "places": (lambda x: (jnp.arange(20)[:, None] * x)[3:] * 2 + jnp.arange(17.0)[:, None], array(20, 18), 1),
}


def by_interpreter(unit, args):
    return kernel_of(unit).interpret(args)


def close(got, want, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x, "float64"), np.asarray(y, "float64"), tolerance, tolerance)


def windowed(plan):
    return [bool(getattr(unit, "windowed", False)) for unit in plan.units]


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("name", CASES)
def test_what_windows_show(name):
    f, x, kernels = CASES[name]
    plan, tree, leaves = jt.fuse(f).planned((x,), {})
    assert windowed(plan) == [True] * kernels
    left = [plan.program.nodes[k] for k in plan.order if isinstance(k, int)]
    assert not any(node.name in WINDOWS and np.prod(node.outs[0].shape) > 2 for node in left)
    tolerance = 2e-2 if x.dtype == jnp.bfloat16 else 2e-5
    close(jax.tree.unflatten(tree, evaluate(plan, leaves, by_interpreter)), f(x), tolerance)


ON_THIS_MACHINE = [
    ("five points", "in place", "slopes", "shifts", "edges", "sums"),
    ("reflected", "other numbers outside", "cropped by a pad", "every third", "turned", "backwards"),
    ("beside each other", "bytes", "sums of columns", "three dimensions", "choices", "a row and a column"),
]


@pytest.mark.parametrize("names", ON_THIS_MACHINE, ids=str)
def test_on_this_machine(names):
    run = lambda f: evaluated(lambda _: [f(CASES[name][0])(CASES[name][1]) for name in names])(())
    close(run(jt.fuse), run(jax.jit), 1e-4)


INSIDE = [("in place", (1, 1), (48, 298)), ("choices", (1, 4), (47, 199)), ("shifts", (1, 1), (38, 258))]


@pytest.mark.parametrize(("name", "first", "last"), INSIDE)
def test_programs_inside_choose_nothing(name, first, last):
    f, x, _ = CASES[name]
    (group,) = jt.fuse(f).explain(x).plan.units
    needs = ends_within(group)
    assert needs.within == dict(enumerate(zip(first, last, strict=True)))
    assert bool(needs.chosen) == (name != "shifts")


def test_under_every_transformation():
    x = array(8, 19)

    def derivatives(f):
        twice = jax.grad(lambda x: (jax.grad(lambda x: (f(x) ** 2).sum())(x) ** 2).sum())
        forward = jax.jvp(f, (x,), (jnp.cos(x),))
        return twice(x), forward, jax.vmap(f)(jnp.stack([x, x + 1]))

    in_place = CASES["in place"][0]
    ours, plain = (evaluated(lambda _, f=f: derivatives(f(in_place)))(()) for f in (jt.fuse, lambda f: f))
    close(ours, plain, 2e-4)


@pytest.mark.parametrize("name", ["in place", "shifts", "sums"])
def test_compiled_for_hopper(name):
    pytest.importorskip("triton")
    f, x, _ = CASES[name]
    with jt.config(arch="sm_90"):
        (unit,) = jt.fuse(f).explain(x).plan.units
        kernel = kernel_of(unit)
        types = [jax.ShapeDtypeStruct(shape, v.dtype) for shape, v in zip(kernel.shapes, unit.inputs, strict=True)]
        assert "ld.global" in kernel.kernel.lower(*types, target="cuda:sm_90").texts["ptx"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("by_numpy")
def test_random_programs(seed):
    """Windows of windows of what is computed, at shapes that tiles do not divide."""
    draw = np.random.default_rng(seed)
    picks = draw.integers(0, 1 << 30, 12)

    def f(x):
        values = [x]
        for pick in picks:
            v, d, n = values[pick % len(values)], int(pick // 7 % 2), int(pick // 31 % 3)
            kind = pick // 3 % 6
            if kind == 0:
                v = jnp.roll(v, n - 1, d)
            elif kind == 1:
                v = jnp.pad(v, [(n, 1) if i == d else (0, 2) for i in range(2)], mode=("constant", "edge")[pick % 2])
            elif kind == 2:
                v = v[n : -1 - n, 1:] if d else v[:-1, n:]
            elif kind == 3:
                v = v.at[n : n + 3, 1:].add(2.0)
            else:
                w = values[pick // 5 % len(values)]
                m, k = (min(a, b) for a, b in zip(v.shape, w.shape, strict=True))
                v = v[:m, :k] * 0.5 - w[-m:, -k:]
            values.append(v)
        return values[-1] * 2 + 1, values[-2] - 1

    x = array(13 + seed, 21)
    plan, tree, leaves = jt.fuse(f).planned((x,), {})
    assert any(windowed(plan))
    close(jax.tree.unflatten(tree, evaluate(plan, leaves, by_interpreter)), f(x))


# Numbers of rows that their dtype does not have all of: they begin anew.
WRAPPED = {
    "converted": lambda: jnp.arange(300).astype("int8") > 100,
    "added": lambda: jnp.arange(300, dtype="int32") + np.int32(2**31 - 100) > 0,
    "counted": lambda: jax.lax.iota("int8", 300) > -1,
}


@pytest.mark.parametrize("name", WRAPPED)
def test_numbers_that_begin_anew_choose_no_side(name):
    f, x = lambda x: jnp.where(WRAPPED[name]()[:, None], x * 2, x - 1) + jnp.roll(x, 1, 0), array(300, 20)
    (group,) = jt.fuse(f).explain(x).plan.units
    assert group.windowed and not ends_within(group).chosen
    close(jt.fuse(f)(x), f(x))


def test_comparisons_with_no_number():
    f = lambda x: jnp.where(x < jnp.inf, x * 2, 1.0) - jnp.where(x < jnp.nan, 3.0, x) + jnp.roll(x, 1, 0)
    x = array(9, 40)
    assert windowed(jt.fuse(f).explain(x).plan) == [True]
    close(jt.fuse(f)(x), f(x))


def test_functions_of_a_block_are_no_updates():
    """`apply` is a scatter, whose block is of no use."""
    f = lambda x: x.at[2:5].apply(jnp.sin) * 2 + jnp.roll(x, 1, 0)
    x = array(9, 40)
    close(jt.fuse(f)(x), f(x))


@pytest.mark.usefixtures("by_numpy")
def test_chains_that_are_longer_than_the_stack():
    def f(x):
        y = jnp.roll(x, 1, 0)
        for _ in range(250):
            y = y * 0.5 + x
        return y

    x = array(3, 20)
    plan, tree, leaves = jt.fuse(f).planned((x,), {})
    assert windowed(plan) == [True]
    close(jax.tree.unflatten(tree, evaluate(plan, leaves, by_interpreter)), f(x))


def test_bodies_of_loops_read_windows():
    f = lambda x: jax.lax.fori_loop(0, 3, lambda _, u: u.at[1:-1, 1:-1].set(five_points(u)), x)
    x = array(12, 40)
    assert "kernel fused_slice" in str(jt.fuse(f).explain(x))
    close(jt.fuse(f)(x), f(x))


def test_what_takes_long_is_computed_once():
    f = lambda x: (y := jnp.exp(x) * 2)[1:] - 3 * y[:-1]
    plan = jt.fuse(f).explain(array(40, 20)).plan
    assert windowed(plan) == [False, True]


def test_softmaxes_and_attention_stay_what_they_are():
    """A slice in front of them is no reason to take them apart."""
    x = array(20, 40)
    f = lambda x: jax.nn.softmax(x[:, 1:] * 2)
    assert windowed(jt.fuse(f).explain(x).plan) == [False]

    def attention(q, k, v, bias):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias[:, 1:, :-1]
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    args = *(array(2, 12, 4, 8) for _ in range(3)), array(4, 13, 13)
    units = jt.fuse(attention).explain(*args).plan.units
    assert any(isinstance(unit, Chain) for unit in units)


def test_what_windows_are_left_to_xla(monkeypatch):
    x = array(40, 20)
    assert "it moves elements, and computes little" in str(jt.fuse(lambda x: x[1:] * 2).explain(x))
    monkeypatch.setattr(costs, "SHORT", 16)
    text = str(jt.fuse(lambda x: x[:, 2:] * 2 + x[:, :-2]).explain(array(400, 9)))
    assert "its last axis has 7 elements, too few for vectors" in text
    monkeypatch.setattr(costs, "CHAINS_ON_GPUS", False)
    with jt.config(arch="sm_90"):
        f, x, _ = CASES["sums"]
        assert "it sums windows of arrays" in str(jt.fuse(f).explain(x))
