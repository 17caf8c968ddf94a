"""Largest and smallest elements by compiled programs, where NaN are among them."""

import numpy
import pytest

import jtile.numpy as np


def given(dtype):
    x = (numpy.random.default_rng(0).standard_normal(40000) * 100).astype(dtype)
    x[::7], x[3], x[4] = numpy.nan, numpy.inf, -0.0
    return x


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("name", ["max", "min", "amax", "argmax", "argmin", "ptp", "nanmax", "nanmin"])
def test_nan_is_not_forgotten(name, dtype):
    """XLA's code for CPUs forgets it."""
    x = given(dtype)
    for of in (x, x[1::7], x.reshape(200, 200)):
        with np.execution("compiled"):
            got = numpy.asarray(getattr(np, name)(np.array(of)))
        want = getattr(numpy, name)(of)
        assert got.dtype == numpy.asarray(want).dtype
        numpy.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["max", "min"])
def test_along_axes_and_of_some(name):
    x = given("float64").reshape(20, 40, 50)
    with np.execution("compiled"):
        a = np.array(x)
        of_some = {"where": numpy.isfinite(x), "initial": 0.0}, {"axis": -1, "where": x > 0, "initial": 1.0}
        for options in ({"axis": 1}, {"axis": (0, 2), "keepdims": True}, {"axis": 2, "initial": 7.0}, *of_some):
            got = numpy.asarray(getattr(a, name)(**options))
            numpy.testing.assert_array_equal(got, getattr(x, name)(**options))
        reduced = {"max": "maximum", "min": "minimum"}[name]
        got = getattr(np, reduced).reduce(a, axis=2)
        numpy.testing.assert_array_equal(numpy.asarray(got), getattr(numpy, reduced).reduce(x, axis=2))


def test_shapes_that_do_not_fit_are_named_as_by_numpy():
    for xp in (numpy, np):
        with pytest.raises(ValueError, match=r"cannot reshape array of size 40000 into shape \(3,newaxis\)"):
            xp.array(given("float64")).reshape(3, -1)
