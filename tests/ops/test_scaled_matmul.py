"""Products with scales, one for an array or one for each block, against their `jnp` reference."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, normal, of_sums

from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.scaled_matmul import scaled_matmul_reference


def operands(m, n, k, dtype, block, transpose=False):
    a, b = normal(0, m, k, dtype=dtype), normal(1, *((n, k) if transpose else (k, n)), dtype=dtype)
    parts, columns = -(-k // block), -(-n // block)
    sa, sb = np.exp(normal(2, m, parts)), np.exp(normal(3, *((columns, parts) if transpose else (parts, columns))))
    return a, b, sa, sb


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"])
def test_blocks(dtype, transpose):
    args = operands(70, 300, 290, dtype, 128, transpose)
    options = {"transpose_b": transpose, "out_dtype": "float32"}
    agree(ops.scaled_matmul, scaled_matmul_reference, *args, tolerance=of_sums(dtype, 1e-5), **options)


@pytest.mark.parametrize("block", [16, 24, 32, 256])
def test_other_blocks(block):
    args = operands(20, 70, 100, "float8_e4m3fn", block)
    tolerance = of_sums("float8_e4m3fn", 1e-5)
    agree(ops.scaled_matmul, scaled_matmul_reference, *args, tolerance=tolerance, block=block, out_dtype="float32")


@pytest.mark.parametrize("transpose", [False, True])
def test_one_scale(transpose):
    a, b, *_ = operands(70, 130, 90, "float8_e4m3fn", 128, transpose)
    scales = jnp.float32(0.5), jnp.float32(3)
    agree(ops.scaled_matmul, scaled_matmul_reference, a, b, *scales, tolerance=4e-3, transpose_b=transpose)


def test_a_scalar_beside_blocks():
    a, b, sa, sb = operands(33, 140, 130, "float8_e4m3fn", 128)
    tolerance = of_sums("float8_e4m3fn", 1e-5)
    for scales in ((sa, jnp.float32(2)), (jnp.float32(2), sb)):
        agree(ops.scaled_matmul, scaled_matmul_reference, a, b, *scales, tolerance=tolerance, out_dtype="float32")


def test_refuses():
    a, b, sa, sb = operands(33, 140, 130, "float8_e4m3fn", 128)
    with pytest.raises(KernelTypeError, match="a_scale is float32"):
        ops.scaled_matmul(a, b, sa.astype(jnp.bfloat16), sb)
    with pytest.raises(KernelValueError, match=r"shape \(2, 2\), got"):
        ops.scaled_matmul(a, b, sa, sb[:1])
    with pytest.raises(KernelValueError, match="precision 'bogus'"):
        ops.scaled_matmul(a, b, sa, sb, precision="bogus")
    with pytest.raises(KernelValueError, match="contract"):
        ops.scaled_matmul(a[:, :4], b, sa, sb)
    for block in (0, -128, 64.0):
        with pytest.raises(KernelValueError, match="block is a Python int"):
            ops.scaled_matmul(a, b, sa, sb, block=block)
    assert ops.scaled_matmul(a[:0], b, sa[:0], sb).shape == (0, 140)
