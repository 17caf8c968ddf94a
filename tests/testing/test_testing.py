"""jtile.testing: the error measure and the fair timing."""

import types

import numpy as np
import pytest

from jtile.testing import Timing, assert_close, relative_error, time_alternating


def test_relative_error():
    a = np.array([3.0, 4.0])
    assert relative_error(a, a) == 0
    assert relative_error(a + np.array([0, 0.5]), a) == pytest.approx(0.1)
    assert relative_error({"x": a, "y": a * 2}, {"x": a, "y": a * 2 + np.array([0, 1])}) == pytest.approx(
        1 / (25 + 36 + 81) ** 0.5
    )


def test_relative_error_of_what_is_not_finite():
    a = np.array([np.inf, -np.inf, np.nan, 1.0])
    assert relative_error(a, a) == 0
    assert relative_error(np.array([np.inf]), np.array([-np.inf])) == float("inf")
    assert relative_error(np.array([np.nan]), np.array([1.0])) == float("inf")
    assert relative_error(np.array([1.0]), np.array([0.0])) == float("inf")


def test_relative_error_refuses_other_shapes():
    with pytest.raises(ValueError, match="shape"):
        relative_error(np.zeros((2, 1)), np.zeros(2))
    with pytest.raises(ValueError, match="2 results against 1"):
        relative_error([np.zeros(1)] * 2, [np.zeros(1)])


def test_timing_alternates_and_orders_the_two(monkeypatch):
    order, now = [], [0]
    monkeypatch.setattr("jtile.testing.time", types.SimpleNamespace(perf_counter_ns=lambda: now[0]))

    def slow():
        order.append("slow")
        now[0] += 3_000
        return np.float32(0)

    def quick():
        order.append("quick")
        now[0] += 1_000
        return np.float32(1)

    times = time_alternating({"slow": slow, "quick": quick}, repeats=4, warmup=1, sample_us=1.0)
    assert times == {"slow": Timing(3.0, 3.0), "quick": Timing(1.0, 1.0)}
    # warm-up and one call to calibrate each, then rounds whose order rotates
    rounds = [name for i, name in enumerate(order) if i >= 4]
    firsts = [a for a, b in zip([None, *rounds], rounds, strict=False) if a != b]
    assert rounds[0] == "slow"
    assert len(firsts) >= 4


def test_assert_close_by_dtype():
    x = np.linspace(1, 2, 100, dtype=np.float32)
    assert_close({"a": x, "b": [np.arange(3)]}, {"a": x * np.float32(1 + 1e-6), "b": [np.arange(3)]})
    with pytest.raises(AssertionError, match=r"\['a'\] \(float32\[100\]\): relative error 1\.00e-05 > 2e-06"):
        assert_close({"a": x}, {"a": x * np.float32(1 + 1e-5)})
    assert_close(x, x * np.float32(1 + 1e-5), tolerance=1e-4)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(np.arange(1000), np.arange(1000) + (np.arange(1000) == 500))


def test_assert_close_wants_one_structure_shape_and_dtype():
    x = np.zeros(3, np.float32)
    with pytest.raises(AssertionError, match="structure"):
        assert_close((x, x), [x, x])
    with pytest.raises(AssertionError, match=r"the result is float32\[3\], expected float32\[1, 3\]"):
        assert_close(x, x[None])
    with pytest.raises(AssertionError, match=r"float32\[3\], expected float64\[3\]"):
        assert_close(x, x.astype(np.float64))
