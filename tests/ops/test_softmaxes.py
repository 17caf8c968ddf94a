"""Softmax and log-softmax against jnp."""

import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, normal, shapes_and_dtypes

from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import softmaxes

PAIRS = [(ops.softmax, softmaxes.softmax_reference), (ops.log_softmax, softmaxes.log_softmax_reference)]
pairs = pytest.mark.parametrize(("op", "reference"), PAIRS, ids=["softmax", "log_softmax"])


@pairs
@pytest.mark.parametrize(("shape", "dtype"), shapes_and_dtypes([(33, 100), (7,), (2, 3, 5, 129), (1, 1), (300, 2)]))
def test_rows(op, reference, shape, dtype):
    agree(op, reference, normal(0, *shape, dtype=dtype), interpret=len(shape) == 2)


@pairs
@pytest.mark.parametrize(("shape", "axis"), [((9, 70), 0), ((2, 33, 4, 5), 1), ((2, 3, 1), -2)])
def test_other_axes(op, reference, shape, axis):
    agree(op, reference, normal(1, *shape), axis=axis, interpret=True)


@pairs
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_nothing(op, reference, shape):
    agree(op, reference, jnp.zeros(shape))


@pairs
def test_a_row_too_long_for_one_tile(op, reference):
    x = np.array(normal(2, 3, 9001))
    x[1, :3000], x[2] = -np.inf, -np.inf
    agree(op, reference, x, interpret=True)


@pairs
def test_large_numbers_and_infinities(op, reference):
    x = np.array([[1e30, 1e30, -1e30], [-np.inf, 0, 1], [np.inf, 0, 1], [np.nan, 0, 1]], np.float32)
    agree(op, reference, x, interpret=True)


def test_rows_sum_to_one():
    y = ops.softmax(normal(3, 64, 1000) * 30)
    np.testing.assert_allclose(np.asarray(y).sum(1), 1, rtol=1e-5)


@pairs
def test_errors(op, reference):
    del reference
    with pytest.raises(KernelTypeError, match="float array, got int32"):
        op(jnp.arange(3))
    with pytest.raises(KernelValueError, match="axis 2"):
        op(jnp.zeros((2, 2)), axis=2)
