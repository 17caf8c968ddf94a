"""Layer norm and RMS norm against jnp."""

import jax.numpy as jnp
import numpy as np
import pytest
from library import FLOATS, agree, normal, shapes_and_dtypes

from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.norms import layer_norm_reference, rms_norm_reference

SHAPES = [(33, 100), (7,), (2, 3, 5, 129), (1, 1), (0, 5), (5, 0)]


@pytest.mark.parametrize(("shape", "dtype"), shapes_and_dtypes(SHAPES))
def test_layer_norm(shape, dtype):
    x, weight, bias = normal(0, *shape, dtype=dtype), normal(1, shape[-1], dtype=dtype), normal(2, shape[-1])
    forms = ((weight, bias), (weight,), (None, bias), ())
    for params in forms if (shape, dtype) == ((33, 100), "float32") else forms[:1]:
        agree(ops.layer_norm, layer_norm_reference, x, *params, interpret=shape == (33, 100))


@pytest.mark.parametrize(("shape", "dtype"), shapes_and_dtypes(SHAPES))
def test_rms_norm(shape, dtype):
    x, weight = normal(0, *shape, dtype=dtype), normal(1, shape[-1])
    agree(ops.rms_norm, rms_norm_reference, x, weight, eps=1e-3, weight_offset=1.0, interpret=shape == (33, 100))


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_with_residual(dtype):
    x, weight = normal(0, 3, 11, 70, dtype=dtype), normal(1, 70, dtype=dtype)
    for residual in (normal(2, 3, 11, 70, dtype=dtype), normal(3, 3, 11, 70)):
        agree(ops.rms_norm, rms_norm_reference, x, weight, residual=residual, interpret=True)
    y, total = ops.rms_norm(x[:0], weight, residual=x[:0])
    assert y.shape == total.shape == (0, 11, 70)


def test_no_cancellation_around_a_large_mean():
    x = np.asarray(normal(0, 16, 256)) + 10_000
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    assert np.abs(np.asarray(ops.layer_norm(x)) - exact).max() < 5e-3  # the mean itself is rounded to 1e-3


def test_errors():
    x = jnp.zeros((2, 4))
    with pytest.raises(KernelTypeError, match="weight is a float array"):
        ops.rms_norm(x, jnp.ones(4, jnp.int32))
    with pytest.raises(KernelValueError, match=r"weight has shape \(3,\), expected \(4,\)"):
        ops.rms_norm(x, jnp.ones(3))
    for norm in (ops.layer_norm, lambda x: ops.rms_norm(x, x)):
        with pytest.raises(KernelValueError, match="no axis of an array of rank 0"):
            norm(jnp.float32(1))
    with pytest.raises(KernelValueError, match="residual"):
        ops.rms_norm(x, jnp.ones(4), residual=jnp.zeros((4, 2)))
    with pytest.raises(KernelValueError, match="bias"):
        ops.layer_norm(x, None, jnp.ones(3))
