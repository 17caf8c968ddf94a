"""Transposition, cumulative sums, sorting, selection and histograms against jnp."""

import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, normal

from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.histograms import histogram_reference
from jtile.ops.layout import transpose_reference
from jtile.ops.scans import cumsum_reference
from jtile.ops.sorting import argsort_reference, sort_reference, top_k_reference

pytestmark = pytest.mark.usefixtures("by_numpy")

DTYPES = ("float32", "bfloat16", "int32")


def values(*shape, dtype="float32"):
    """Numbers of which some are equal."""
    return np.round(np.asarray(normal(0, *shape)) * 30).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, "float16", "int8", "bool"])
@pytest.mark.parametrize("shape", [(70, 130), (2, 3, 5, 7)])
def test_transpose(shape, dtype):
    agree(ops.transpose, transpose_reference, values(*shape, dtype=dtype), tolerance=0, interpret=shape[0] == 2)


def test_transpose_edges():
    for shape in ((1, 5), (5, 1), (0, 4), (3, 0, 2)):
        agree(ops.transpose, transpose_reference, values(*shape), tolerance=0)
    with pytest.raises(KernelValueError, match=r"\[\.\.\., m, n\]"):
        ops.transpose(jnp.zeros(3))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((33, 70), -1), ((33, 70), 0), ((2, 9, 5), 1), ((3000,), 0), ((4, 1), 1)])
def test_cumsum(shape, axis, reverse):
    for x in (normal(1, *shape), values(*shape, dtype="int32")):
        agree(ops.cumsum, cumsum_reference, x, axis=axis, reverse=reverse, interpret=x.size < 3000)


def test_cumsum_edges():
    agree(ops.cumsum, cumsum_reference, normal(1, 5, 2000, dtype="bfloat16"), tolerance=1e-3)  # added up in float32
    for shape in ((0, 4), (4, 0), (1, 1)):
        agree(ops.cumsum, cumsum_reference, values(*shape))
    with pytest.raises(KernelValueError, match="axis 1"):
        ops.cumsum(jnp.zeros(3), axis=1)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sort(dtype, descending):
    x = values(9, 130, dtype=dtype)
    agree(ops.sort, sort_reference, x, descending=descending, tolerance=0, interpret=True)
    agree(ops.argsort, argsort_reference, x, descending=descending, tolerance=0, interpret=True)


def test_sort_edges():
    x = np.array([[np.nan, 1.0, -np.inf, np.inf, -0.0, 0.0, 1.0]], np.float32)
    for shape in ((3, 0), (0, 3), (1,), (2, 3, 1)):
        agree(ops.sort, sort_reference, values(*shape))
        agree(ops.argsort, argsort_reference, values(*shape))
    agree(ops.sort, sort_reference, x, interpret=True)
    agree(ops.argsort, argsort_reference, x, tolerance=0, interpret=True)
    with pytest.raises(KernelValueError, match="rank 0"):
        ops.sort(jnp.zeros(()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 7, 130])
def test_top_k(k, dtype):
    agree(ops.top_k, top_k_reference, values(9, 130, dtype=dtype), k=k, tolerance=0, interpret=k == 7)


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "float16", "bool"])
def test_top_k_of_other_dtypes(dtype):
    x = np.abs(values(5, 40)).astype(dtype)
    agree(ops.top_k, top_k_reference, x, k=3, tolerance=0)
    agree(ops.top_k, top_k_reference, x, k=20, tolerance=0)


@pytest.mark.parametrize("k", [5, 17])
def test_top_k_of_special_numbers(k):
    row = [np.nan, 1.0, -np.inf, np.inf, -0.0, 0.0, 1.0, -np.nan, -1.0] + [-np.inf] * 9
    agree(ops.top_k, top_k_reference, np.array([row, row[::-1]], np.float32), k=k, tolerance=0, interpret=True)
    least = np.full((2, 20), -(2**31), np.int32)
    least[1, 7] = 2**31 - 1
    agree(ops.top_k, top_k_reference, least, k=k, tolerance=0, interpret=True)


def test_top_k_edges():
    for shape, k in (((2, 3, 5), 0), ((0, 5), 2), ((5,), 5)):
        agree(ops.top_k, top_k_reference, values(*shape), k=k)
    with pytest.raises(KernelValueError, match="between 0 and the row length 3"):
        ops.top_k(jnp.zeros((2, 3)), 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bins", [1, 37])
def test_histogram(bins, dtype):
    x = values(3, 700, dtype=dtype)
    agree(ops.histogram, histogram_reference, x, bins=bins, range=(-40, 60.5), tolerance=0, interpret=True)


def test_histogram_as_numpy():
    x = normal(2, 50000)
    expected, _ = np.histogram(np.asarray(x), bins=16, range=(-2, 2))
    assert np.array_equal(ops.histogram(x, bins=16, range=(-2, 2)), expected)


def test_histogram_edges():
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.0, 1.0, 0.5, -1e-9])
    assert ops.histogram(x, bins=2, range=(0, 1)).tolist() == [1, 2]
    assert ops.histogram(x[:0], bins=2, range=(0, 1)).tolist() == [0, 0]
    with pytest.raises(KernelValueError, match="low < high"):
        ops.histogram(x, bins=2, range=(1, 1))
    with pytest.raises(KernelTypeError, match="real array"):
        ops.histogram(x > 0, bins=2, range=(0, 1))
