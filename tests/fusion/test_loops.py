"""Loops in `jt.fuse`: a scan of steps is one kernel; the bodies of all others are cut as the program is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from benchmarks.fuse import selective_scan
from jtile.fusion.bodies import kernel_of
from jtile.fusion.fused import evaluate
from jtile.fusion.loops import Loop
from jtile.testing.evaluate import evaluated

rng = np.random.default_rng(0)


pytestmark = pytest.mark.usefixtures("any_size")


def array(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def close(got, want, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), tolerance, tolerance)


def units(f, *args):
    return [type(unit) for unit in jt.fuse(f).explain(*args).plan.units]


def backwards(x, gates):
    """The last carry, and values of the rounds in their reverse order."""
    return jax.lax.scan(lambda h, of: (h * of[1] + of[0], (h, of[0])), jnp.ones(x.shape[1:]), (x, gates), reverse=True)


def state_space(x, decay, b, c):
    """A state of two axes, of which a round sums one."""

    def one(state, of):
        x, b, c = of
        state = state * decay + x[:, None] * b
        return state, (state * c).sum(-1)

    return jax.lax.scan(one, jnp.zeros(decay.shape), (x, b, c))[1]


def swapped(x, y):
    """A counter, two carries that change places, and one that stays."""

    def one(i, carry):
        u, v, w = carry
        return v, jnp.where(i % 2 == 0, u + w, jnp.sin(u)), w

    return jax.lax.fori_loop(0, 5, one, (x, y, x * 2))[:2]


def spikes(x):
    """Carries of other dtypes, and of dimensions in another order than the values of a round."""

    def one(carry, x):
        volts, rest = carry
        volts = jnp.where(rest > 0, 0.0, volts * 0.9 + x.T)
        fired = volts > 0.5
        return (jnp.where(fired, 0.0, volts), jnp.where(fired, 2, jnp.maximum(rest - 1, 0))), fired.T

    shape = x.shape[:0:-1]
    return jax.lax.scan(one, (jnp.zeros(shape), jnp.zeros(shape, jnp.int32)), x)


CASES = {
    "selective scan": (selective_scan, (array(6, 40), array(6, 40))),
    "backwards": (backwards, (array(6, 3, 5), array(6, 3, 5))),
    "state space": (state_space, (array(6, 20), array(20, 4) * 0.3, array(6, 4), array(6, 4))),
    "swapped": (swapped, (array(4, 9), array(4, 9))),
    "spikes": (spikes, (array(7, 3, 6),)),
    "numbers": (lambda x: jax.lax.scan(lambda h, x: (0.9 * h + x, h), 0.0, x), (array(11),)),
    "no rounds": (lambda x: jax.lax.scan(lambda h, x: (h + x, h), jnp.ones(3), x), (array(0, 3),)),
}


@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("name", CASES)
def test_a_scan_is_one_kernel(name):
    f, args = CASES[name]
    plan, tree, leaves = jt.fuse(f).planned(args, {})
    loops = [unit for unit in plan.units if isinstance(unit, Loop)]
    assert len(loops) == (name != "no rounds")
    got = evaluate(plan, leaves, lambda unit, args: kernel_of(unit).interpret(args))
    close(jax.tree.unflatten(tree, got), f(*args))


def test_loops_on_this_machine_and_their_gradients():
    """All of them in one program each side; gradients of the scan as a kernel, and of the program as kernels."""
    x, gates = CASES["selective scan"][1]

    def run(fuse):
        scan = fuse(selective_scan)
        loss = lambda x, gates: (scan(x, gates) ** 2).sum()
        plain = lambda x, gates: (selective_scan(x, gates) ** 2).sum()

        def of(args):
            outs = [fuse(f)(*args[name]) for name, (f, _) in CASES.items()]
            gradients = jax.grad(loss, (0, 1))(x, gates), fuse(jax.grad(plain, (0, 1)))(x, gates)
            return outs, gradients, jax.vmap(scan)(jnp.stack([x, -x]), jnp.stack([gates, gates]))

        return jax.jit(of)({name: args for name, (_, args) in CASES.items()})

    close(run(jt.fuse), run(lambda f: f), 1e-4)


@pytest.mark.usefixtures("by_numpy")
def test_rules_of_functions_in_a_loop_are_theirs():
    def f(x):
        return jax.lax.scan(lambda h, x: (jax.nn.relu(h - x), h), jnp.zeros(3), x)[1]

    x = array(5, 3)
    assert units(f, x) == [Loop]
    ours, want = (evaluated(jax.grad(lambda x, g=g: (g(x) ** 2).sum()))(x) for g in (jt.fuse(f), f))
    close(ours, want)


@pytest.mark.usefixtures("by_numpy")
def test_functions_inside_are_cut_too():
    """Of loops with a product, of branches, of `jax.checkpoint`: their norms are kernels there."""
    norm = lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    w = array(8, 8) * 0.3

    def f(x):
        x = jax.lax.fori_loop(0, 3, lambda _, x: norm(x @ w), x)
        x = jax.lax.while_loop(lambda x: x[0, 0] > 5, lambda x: norm(x) + x @ w, x)
        x = jax.lax.cond(x[0, 0] > 0, norm, lambda x: jnp.tanh(x) * 2 + 1, x)
        return jax.checkpoint(lambda x: norm(x @ w))(x)

    x = array(4, 8)
    text = str(jt.fuse(f).explain(x))
    assert text.count("a function in it:") == 5  # a branch each
    assert text.count("kernel fused_") == 5
    close(jt.fuse(f)(x), evaluated(f)(x))
    loss = lambda f: lambda x: (f(x) ** 2).sum()
    g = lambda x: jax.checkpoint(lambda x: norm(x @ w))(x)
    close(*(evaluated(jax.grad(loss(f)))(x) for f in (jt.fuse(g), g)), 1e-4)


def test_what_no_kernel_takes_of_a_loop():
    text = str(jt.fuse(lambda x: jax.lax.scan(lambda h, x: (jnp.sort(h) + x, h), x[0], x)).explain(array(5, 3)))
    assert "XLA: float32[3], float32[5, 3] = scan" in text
    assert "not all of its body are steps of a kernel over axes that all of it has" in text
