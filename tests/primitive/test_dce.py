"""Results of a kernel that nobody uses are not computed; those that are used stay as they were."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import draws
from hypothesis import given
from random_gradients import Case, gradient_kernels

import jtile as jt
from jtile import ir, ops


@jt.kernel(
    out_type=lambda x, y, z: (jt.like(x), jt.like(x), jt.like(y), jt.like(z)), grid=lambda x, *_: x.shape[0],
    alias={"y": "shared"}, init=(None, 0, None, None), scratch=jax.ShapeDtypeStruct((2,), jnp.float32),
)  # fmt: skip
def several(x, y, z, twice, total, shared, both, tmp):
    i = jt.program_id(0)
    tmp[:] = jnp.stack([x[i], x[i]])
    twice[i] = jnp.exp(x[i]) * 2
    jt.atomic_add(total, i, y[i])
    both[i] = total[i] + z[i] + tmp[0]
    shared[i] = x[i]


X, Y, Z = jnp.arange(6.0), jnp.arange(6.0) + 1, jnp.arange(6.0) * 3
USED = [used for used in itertools.product([False, True], repeat=4) if any(used)]


def chosen(f, used):
    return lambda *args: [o for o, u in zip(f(*args), used, strict=True) if u]


def pruned(f, *args):
    """The program that jit lowers for `f`, and how many operands it gets."""
    closed = jax.make_jaxpr(f)(*args)
    jaxpr, _ = jax.interpreters.partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    eqns = [e for e in jaxpr.eqns if "program" in e.params]
    return (eqns[0].params["program"], len(eqns[0].invars)) if eqns else (None, 0)


@pytest.mark.parametrize("used", USED, ids=lambda used: "".join("01"[u] for u in used))
def test_every_choice_of_results(used):
    expected = [o for o, u in zip(several(X, Y, Z), used, strict=True) if u]
    for got in (jax.jit(chosen(several, used))(X, Y, Z), jax.vmap(chosen(several, used))(X[None], Y[None], Z[None])):
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a.reshape(b.shape), b)
    program, operands = pruned(chosen(several, used), X, Y, Z)
    # `total` is read by `both`, `shared` is the buffer of `y`
    assert program.spec.n_out == used[0] + (used[1] or used[3]) + 1 + used[3]
    assert operands == program.spec.n_in == (3 if used[3] else 2)
    text = ir.print_kernel(program.kernel)
    assert ("exp " in text) == used[0]
    assert ("%z" in text) == ("%both" in text) == used[3]


def test_under_vmap_the_flags_of_the_rest_stay():
    f = chosen(several, (True, False, False, True))
    program, _ = pruned(jax.vmap(f, (0, None, None)), X[None], Y, Z)
    assert [v.shape for v in program.kernel.inputs] == [(1, 6), (1, 6), (6,)]  # the alias made y one of each lane
    np.testing.assert_array_equal(jax.jit(jax.vmap(f, (0, None, None)))(X[None], Y, Z)[1][0], several(X, Y, Z)[3])


def test_calls_that_nobody_uses():
    assert pruned(lambda x: (several(x, Y, Z), x)[1], X) == (None, 0)
    shown = jt.call(lambda x, o: (jt.print("x {}", x[0]), o.__setitem__(..., x[...]))[1], out_type=jt.like(X))
    program, _ = pruned(lambda x: (shown(x), x)[1], X)
    assert program.io  # 0.11 keeps such a call as it is


def test_it_prints_still(capfd):
    shown = jt.call(lambda x, o: (jt.print("x {}", x[0]), o.__setitem__(..., x[...]))[1], out_type=jt.like(X))
    jax.block_until_ready(jax.jit(lambda x: (shown(x), x)[1])(X))
    assert "x 0.0" in capfd.readouterr().out


def test_the_library():
    x = jax.random.normal(jax.random.key(0), (5, 33))
    (call,) = re.findall(
        r"custom_call @jtile_\w+\(.* -> (.*)", jax.jit(lambda x: ops.top_k(x, 4)[0]).lower(x).as_text()
    )
    assert call == "tensor<5x4xf32>"
    np.testing.assert_array_equal(jax.jit(lambda x: ops.top_k(x, 4)[0])(x), ops.top_k(x, 4)[0])


@jt.kernel(out_type=lambda x, s: (jt.like(x), jt.like(x)), grid=1)
def two(x, s, o, p):
    o[...] = x[...] * s[()]
    p[...] = jnp.sin(x[...])


two.defvjp(
    lambda x, s: (two(x, s), (x, s)),
    lambda r, ct: (3 * ct[0] * r[1] + ct[1] * jnp.cos(r[0]), (3 * ct[0] * r[0]).sum()),
)


@pytest.mark.parametrize("used", [0, 1])
def test_a_reverse_rule_stays(used):
    """Inside of jit, checkpoint and scan, whose bodies JAX prunes before it differentiates them."""
    s = jnp.float32(2)
    f = lambda x: two(x, s)[used]
    step = jnp.full(6, 6.0) if used == 0 else jnp.cos(X)
    for g in (f, jax.jit(f), jax.checkpoint(f), jax.jit(jax.checkpoint(f))):
        np.testing.assert_allclose(jax.grad(lambda x, g=g: g(x).sum())(X), step, rtol=1e-6)
    program, operands = pruned(f, X)
    assert (program.spec.n_out, operands) == (1, 2)
    y, *residuals = program.vjp.fwd(X, s)
    np.testing.assert_array_equal(y, f(X))
    np.testing.assert_allclose(program.vjp.bwd(*residuals, jnp.ones(6))[0], step, rtol=1e-6)
    scanned = lambda x: jax.lax.scan(lambda c, _: (two(c, s)[used], None), x, None, length=2)[0].sum()
    expected = step * 6 if used == 0 else jnp.cos(X) * jnp.cos(jnp.sin(X))
    np.testing.assert_allclose(jax.jit(jax.grad(scanned))(X), expected, rtol=1e-5)


@draws(15)
@given(gradient_kernels())
def test_random_kernels(case: Case):
    kernel = case.define().with_options(interpret=True)
    whole = jax.tree.leaves(kernel(*case.args))
    for k, expected in enumerate(whole):
        got = jax.jit(lambda *args, k=k: jax.tree.leaves(kernel(*args))[k])(*case.args)
        np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(expected, np.float64))
