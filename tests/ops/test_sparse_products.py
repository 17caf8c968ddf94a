"""Products of sparse matrices against those of dense ones."""

import jax
import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import sparse_products as sparse
from jtile.testing.evaluate import evaluated

# a row without entries, one with many, and a number of the dense matrix in two parts
STARTS = np.array([0, 2, 2, 19, 21], np.int32)
COLUMNS = np.random.default_rng(0).integers(0, 11, 21).astype(np.int32)
COLUMNS[5] = COLUMNS[4]


def with_places(f, columns=COLUMNS, starts=STARTS):
    return lambda data, b: f(data, columns, starts, b)


CSR = [with_places(f) for f in (ops.csr_matmul, sparse.csr_matmul_reference)]


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_rows_of_numbers(arch):
    with jt.config(arch=arch):
        data, b = normal(0, 21), normal(1, 11, 13)
        agree(*CSR, data, b, interpret=arch is None)
        gradients_agree(*CSR, data, b)
        if arch is None:
            agree(*CSR, data.astype("bfloat16"), b.astype("bfloat16"), tolerance=4e-3)


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_rows_of_blocks(arch):
    starts, columns = np.array([0, 2, 2, 7], np.int32), np.array([3, 0, 1, 1, 2, 4, 0], np.int32)
    pair = [with_places(f, columns, starts) for f in (ops.bsr_matmul, sparse.bsr_matmul_reference)]
    with jt.config(arch=arch):
        data, b = normal(0, 7, 4, 8), normal(1, 40, 13)
        agree(*pair, data, b, interpret=arch is None)
        gradients_agree(*pair, data, b)


def test_maps_and_second_derivatives():
    (ours, theirs), data, b = CSR, normal(0, 3, 21), normal(1, 11, 5)
    agree(*(jax.vmap(f, (0, None)) for f in (ours, theirs)), data, b)
    curve = lambda f: jax.grad(lambda d: (jax.grad(lambda d: (f(d, b) ** 2).sum())(d) ** 2).sum())
    np.testing.assert_allclose(evaluated(curve(ours))(data[0]), evaluated(curve(theirs))(data[0]), rtol=1e-4)


def test_errors():
    data, b = np.zeros(21, np.float32), np.zeros((11, 3), np.float32)
    for error, match, call in [
        (KernelValueError, "columns has shape", lambda: ops.csr_matmul(data, COLUMNS[:3], STARTS, b)),
        (KernelTypeError, "starts is an integer", lambda: ops.csr_matmul(data, COLUMNS, STARTS * 1.0, b)),
        (KernelTypeError, "b float16", lambda: ops.csr_matmul(data, COLUMNS, STARTS, b.astype(np.float16))),
        (KernelValueError, "none", lambda: ops.csr_matmul(data, COLUMNS, STARTS[:0], b)),
        (KernelValueError, "multiple of 4 rows", lambda: ops.bsr_matmul(np.zeros((21, 4, 4), "f"), COLUMNS, STARTS, b)),
    ]:
        with pytest.raises(error, match=match):
            call()
    assert ops.csr_matmul(data[:0], COLUMNS[:0], np.zeros(3, np.int32), b).shape == (2, 3)
