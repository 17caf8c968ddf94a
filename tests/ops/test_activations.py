"""The gates of gated MLPs and the fused elementwise chain against jnp."""

import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, normal, shapes_and_dtypes

from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.activations import geglu_reference, swiglu_reference
from jtile.ops.elementwise import bias_gelu_residual_reference

GATES = [(ops.swiglu, swiglu_reference, {}), (ops.geglu, geglu_reference, {})]
GATES.append((ops.geglu, geglu_reference, {"approximate": False}))
gates = pytest.mark.parametrize(("op", "reference", "options"), GATES, ids=["swiglu", "geglu_tanh", "geglu"])
SHAPES = [(33, 100), (6,), (2, 3, 5, 130), (3, 9000), (0, 6), (4, 0)]


@gates
@pytest.mark.parametrize(("shape", "dtype"), shapes_and_dtypes(SHAPES))
def test_gates(op, reference, options, shape, dtype):
    x, up = np.asarray(normal(0, *shape, dtype=dtype)) * 4, normal(1, *shape, dtype=dtype)
    if shape != (3, 9000):
        agree(op, reference, x, up, **options)
    agree(op, reference, x, interpret=shape == (33, 100), **options)


@pytest.mark.parametrize(("shape", "dtype"), shapes_and_dtypes(SHAPES))
@pytest.mark.parametrize("approximate", [True, False])
def test_bias_gelu_residual(shape, dtype, approximate):
    x, residual, bias = normal(0, *shape, dtype=dtype), normal(1, *shape), normal(2, shape[-1], dtype=dtype)
    interpret = shape == (33, 100)
    agree(
        ops.bias_gelu_residual,
        bias_gelu_residual_reference,
        x,
        bias,
        residual,
        approximate=approximate,
        interpret=interpret,
    )


def test_errors():
    with pytest.raises(KernelValueError, match=r"up has shape \(2, 3\)"):
        ops.swiglu(jnp.zeros((2, 4)), jnp.zeros((2, 3)))
    with pytest.raises(KernelValueError, match=r"\[\.\.\., 2n\]"):
        ops.geglu(jnp.zeros((2, 3)))
    with pytest.raises(KernelTypeError, match="gate is a float array"):
        ops.swiglu(jnp.zeros((2, 4), jnp.int32))
    with pytest.raises(KernelValueError, match="bias"):
        ops.bias_gelu_residual(jnp.zeros((2, 4)), jnp.zeros(3), jnp.zeros((2, 4)))
