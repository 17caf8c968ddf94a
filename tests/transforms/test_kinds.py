"""Every kind of kernel under every transform, against its `jnp` form; docs/composition.json says the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import composition
import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_kinds import CASES, doubled, largest
from library_cases import floats

import jtile as jt
from jtile import ir
from jtile.errors import TransformError
from jtile.testing import Report, check_kernel

pytestmark = pytest.mark.usefixtures("by_numpy")

SUPPORT = Path(composition.__file__).parent
DEVICES = ("shard_map", "partitioned jit")


@pytest.mark.parametrize("name", CASES)
def test_every_transform(name, request):
    case = CASES[name]
    skip = {**case.options.get("skip", {}), **dict.fromkeys(DEVICES, "in a process of its own")}
    report = check_kernel(case.op, case.reference, case.args(), name=name, **{**case.options, "skip": skip})
    here = Report(name, tuple(c for c in report.checks if c.transform not in DEVICES))
    composition.agree(request.config, "kinds", list(CASES), here)


@pytest.mark.long
def test_over_eight_devices(request, subprocess_env):
    env = subprocess_env | {"PYTHONPATH": str(SUPPORT), "JTILE_OPTIMIZE": "0"}
    run = [sys.executable, str(SUPPORT / "device_checks.py"), "kernel_kinds", *CASES]
    done = forked.run(run, env=env)
    assert done.returncode == 0, done.stderr
    reports = [Report.from_dict(r) for r in json.loads(done.stdout)]
    composition.agree(request.config, "kinds", list(CASES), *reports)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (doubled, "only where it writes nothing.* write `for k in jt.range.* and `break`"),
        (largest, "depends on the order of the programs"),
    ],
)
def test_what_the_table_calls_impossible_is_an_error_that_says_so(kernel, message):
    with pytest.raises(TransformError, match=message):
        jax.grad(lambda x: kernel(x).sum())(floats(2, 3))


@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def grown(x, o):
    y = x[...]
    while jnp.max(y) < 10:
        y = y * 2
    o[...] = y


def test_rounds_that_need_no_carry_compute_none_again():
    """Of a linear body: the rounds are counted, and go backwards by themselves."""
    x = floats(2, 3) ** 2 + 1
    ops = list(grown.lower(x).vjp().kernel.body.walk())
    assert [type(op) for op in ops if op.blocks()] == [ir.While, ir.For]
    scale = 2.0 ** np.ceil(np.log2(10 / np.max(x)))
    with jt.config(interpret=True):
        np.testing.assert_allclose(jax.grad(lambda x: grown(x).sum())(x), np.full(x.shape, scale), rtol=1e-6)


@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def small(x, o):
    y = x[...]
    while jnp.abs(y).sum() > 1.5:
        y = jnp.sin(y) * 0.9
    o[...] = y * y


def test_the_gradient_of_a_while_loop_has_none_where_a_round_needs_its_carry():
    """It computes the carry again, in a loop over rounds that nobody can bound where no counter is tested."""
    gradient = jax.grad(lambda x: small(x).sum())
    with pytest.raises(TransformError, match=r"of a while loop, .* `for k in jt.range.* and `break`") as e:
        jax.grad(lambda x: gradient(x).sum())(floats(2, 3))
    assert "test_kinds.py" in str(e.value) and "while " in str(e.value)


@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def settled(x, o):
    y, k = x[...], jnp.int32(0)
    while (jnp.abs(y).sum() > 1.5) & (k < 6):
        y, k = jnp.sin(y) * 0.9, k + 1
    o[...] = y * y


def test_second_derivatives_of_a_while_loop_that_tests_a_counter_too():
    """The most rounds are known, so that the loop which the gradient is may save its carry."""

    def reference(x):
        for _ in range(6):
            x = jnp.where(jnp.abs(x).sum() > 1.5, jnp.sin(x) * 0.9, x)
        return x * x

    x = floats(2, 3) * 2
    second = lambda f: jax.grad(lambda x: jnp.sin(jax.grad(lambda x: f(x).sum())(x)).sum())
    np.testing.assert_allclose(second(settled)(x), second(reference)(x), rtol=1e-5, atol=1e-6)


@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def around(x, o):
    y, k = x[...], jnp.uint8(0)
    while (jnp.abs(y).sum() > 1.5) & (k < jnp.uint8(250)):
        y, k = jnp.sin(y), k + jnp.uint8(100)  # 100, 200, 44: it is below 250 in any round
    o[...] = y


def test_a_counter_that_wraps_around_bounds_no_rounds():
    x, y, rounds = jnp.full((2, 3), 0.3, jnp.float32), 0.3, 0
    while 6 * y > 1.5:
        y, rounds = np.sin(y), rounds + 1

    def reference(x):
        for _ in range(rounds):
            x = jnp.sin(x)
        return x

    assert rounds > 3
    got, want = (jax.grad(lambda x, f=f: f(x).sum())(x) for f in (around, reference))
    np.testing.assert_allclose(got, want, rtol=1e-5)
