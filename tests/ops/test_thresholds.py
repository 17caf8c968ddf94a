"""Places of the largest elements of rows against a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.thresholds import largest_reference


def levelled(*shape, dtype="float32"):
    """Numbers of which many are equal, with infinities, a NaN and both zeros."""
    x = np.round(np.asarray(normal(0, *shape)) * 2).astype(jnp.dtype(dtype))
    if jnp.issubdtype(x.dtype, jnp.floating):
        x[0, :7], x[-1, ::2], x[-1, -1] = -jnp.inf, -0.0, jnp.nan
    return x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int32", "uint8", "bool"])
def test_rows(dtype):
    x = np.abs(levelled(4, 60)).astype(bool) if dtype == "bool" else levelled(4, 60, dtype=dtype)
    for k in (1, 17, 60):
        agree(ops.largest, largest_reference, x, tolerance=0, k=k, interpret=k == 17)


@pytest.mark.usefixtures("on_the_cpu")
def test_gpus_take_the_sort_of_xla():
    x = levelled(2, 3, 110)
    for arch, implementation in ((None, "thresholds"), ("sm_90", "XLA's top_k")):
        with jt.config(arch=arch):
            agree(ops.largest, largest_reference, x, tolerance=0, k=9)
            assert ops.choices(ops.largest, x, k=9)[0].implementation == implementation


@pytest.mark.usefixtures("on_the_cpu")
def test_elements_of_64_bits_are_sorted():
    with jax.enable_x64(True):
        x = np.asarray(normal(0, 3, 30), np.float64)
        np.testing.assert_array_equal(ops.largest(x, 4), np.sort(np.argsort(-x, axis=1)[:, :4], axis=1))
        assert ops.choices(ops.largest, x, k=4)[0].implementation == "a sort"


def test_errors_and_nothing_to_choose():
    x = levelled(2, 8)
    for k in (-1, 9):
        with pytest.raises(KernelValueError, match=f"between 0 and the row length 8, got {k}"):
            ops.largest(x, k)
    with pytest.raises(KernelValueError, match="rank 0"):
        ops.largest(np.float32(1), 1)
    with pytest.raises(KernelTypeError, match="complex64 has no order"):
        ops.largest(x.astype(np.complex64), 1)
    assert ops.largest(x, 0).shape == (2, 0) and ops.largest(x[:0], 3).shape == (0, 3)
