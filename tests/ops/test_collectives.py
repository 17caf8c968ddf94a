"""Collectives: the checks of collective_checks.py on eight host devices, in one child process; and their kernels in the
interpreter, whose races and deadlocks it would find."""

from pathlib import Path

import devices
import expert_copies
import numpy as np
import pytest

from jtile.ops import collective_norms as norms
from jtile.ops import collective_parts as parts
from jtile.ops import collective_products as products
from jtile.ops import collective_rows as rows
from jtile.ops import collective_steps as steps

CHECKS = Path(__file__).with_name("collective_checks.py")


@pytest.mark.long
@pytest.mark.parametrize("name", devices.names(CHECKS))
def test_collectives(name, tmp_path_factory):
    failed = devices.outcome(CHECKS, name, tmp_path_factory)
    assert not failed, failed


def whole(*shape) -> np.ndarray:
    """Whole numbers, whose sums are exact in any order."""
    return np.random.default_rng(0).integers(-4, 4, shape).astype(np.float32)


N = 3
PARTS = {
    "gather_parts": (whole(N, 5), lambda x: np.broadcast_to(x, (N, N, 5))),
    "exchange_parts": (whole(N, N, 5), lambda x: x.swapaxes(0, 1)),
    "sum_parts": (whole(N, N, 5), lambda x: x.sum(0)),
    "sum_all": (whole(N, 5), lambda x: np.broadcast_to(x.sum(0), (N, 5))),
    "sum_all_in_two": (whole(N, N, 5), lambda x: np.broadcast_to(x.sum(0), (N, N, 5))),
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("turns", [1, 2])
def test_sums_in_steps_in_the_interpreter(n, turns):
    kernel = steps.sum_all_in_steps if turns == 1 else steps.sum_all_in_two_steps
    x = whole(n, 13) if turns == 1 else whole(n, n, 7)
    for seed in range(2):
        got = kernel.interpret(x, axis="x", bn=2, programs=2, mesh={"x": n}, seed=seed)
        np.testing.assert_array_equal(got, np.broadcast_to(x.sum(0), x.shape))


@pytest.mark.parametrize("n", [2, 3])
def test_exchanges_in_steps_in_the_interpreter(n):
    x = whole(n, n, 13)
    got = steps.exchange_in_steps.interpret(x, axis="x", bn=2, programs=2, mesh={"x": n}, seed=n)
    np.testing.assert_array_equal(got, x.swapaxes(0, 1))


@pytest.mark.parametrize("name", PARTS)
def test_parts_in_the_interpreter(name):
    x, want = PARTS[name]
    for seed in range(2):
        got = getattr(parts, name).interpret(x, axis="x", bn=2, programs=2, mesh={"x": N}, seed=seed)
        np.testing.assert_array_equal(got, want(x))


def test_a_sum_and_its_norm_in_the_interpreter():
    x, r, w = whole(N, 3, 4), np.broadcast_to(whole(3, 4), (N, 3, 4)), np.ones((N, 4), np.float32)
    y, s = norms.normed_sum.interpret(x, r, w, axis="x", eps=0.5, programs=2, mesh={"x": N}, seed=2)
    total = r[0] + x.sum(0)
    np.testing.assert_array_equal(s, np.broadcast_to(total, s.shape))
    want = total / np.sqrt((total * total).mean(1, keepdims=True) + 0.5)
    np.testing.assert_allclose(y, np.broadcast_to(want, y.shape), rtol=1e-5)


@pytest.mark.parametrize("n", [2, 3])
def test_norms_that_are_gathered_in_the_interpreter(n):
    x, r, w = whole(n, 3, 4), whole(n, 3, 4)[::-1], np.ones((n, 4), np.float32)
    y, s = rows.gathered_norms.interpret(x, r, w, axis="x", eps=0.5, programs=2, mesh={"x": n}, seed=n)
    np.testing.assert_array_equal(s, x + r)
    want = s / np.sqrt((s * s).mean(2, keepdims=True) + 0.5)
    np.testing.assert_allclose(y, np.broadcast_to(want, y.shape), rtol=1e-5)


@pytest.mark.parametrize(("n", "programs"), [(2, 4), (3, 2)])
def test_sums_of_experts_in_the_interpreter(n, programs):
    """With as many programs as tiles, each has its own."""
    operands, want = expert_copies.of_devices(n)
    got = rows.sent_sums.interpret(*operands, axis="x", count=2, bn=4, programs=programs, mesh={"x": n}, seed=n)
    np.testing.assert_array_equal(got, want)


W = whole(N, 4, 3)
PRODUCTS = {
    "gathered_product": (whole(N, 3, 4), "dmk,ekn->edmn"),
    "scattered_product": (whole(N, N, 3, 4), "edmk,ekn->dmn"),
    "summed_product": (whole(N, 3, 4), "dmk,dkn->mn"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_in_the_interpreter(name):
    x, formula = PRODUCTS[name]
    got = getattr(products, name).interpret(x, W, axis="x", bm=2, bn=2, bk=2, programs=2, mesh={"x": N}, seed=1)
    np.testing.assert_array_equal(got, np.broadcast_to(np.einsum(formula, x, W), got.shape))
