"""Products with weights of which two of four numbers are zero, against those of dense ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, differences_agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import two_of_four as module
from jtile.testing.evaluate import evaluated

PAIR = (ops.sparse24_matmul, module.sparse24_matmul_reference)


def test_which_numbers_are_kept():
    """The two largest of four in their places, of equal ones the first; a mask takes some away before."""
    w = np.array([[3, -4, 1, 0, 1, 1, 1, 1, 0, 0, 0, -7, 0.5, 0, 9, -9]], np.float32)
    kept = ops.sparse24(w)
    wanted = [[3, -4, 0, 0, 1, 1, 0, 0, 0, 0, 0, -7, 0, 0, 9, -9]]
    np.testing.assert_array_equal(kept.dense(), wanted)
    assert (kept.shape, kept.dtype, kept.nbytes) == ((1, 16), np.float32, 8 * 4 + 2)
    masked = ops.sparse24(w, np.arange(16)[None] % 4 != 1).dense()
    np.testing.assert_array_equal(masked, [[3, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, -7, 0, 0, 9, -9]])
    half = ops.sparse24(w.astype("float8_e4m3fn")).dense()
    assert half.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(half, np.float32), wanted)
    slopes = np.float32(wanted != 0 * w)
    slopes[0, 8] = 1  # of two numbers that are kept, this one is zero
    np.testing.assert_array_equal(jax.grad(lambda w: ops.sparse24(w).values.sum())(w), slopes)


@pytest.mark.parametrize("arch", [None, "sm_90"])
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"), [(1, 5, 16, "float32"), (2, 7, 40, "bfloat16"), (5, 6, 48, "float32")]
)
def test_products(m, n, k, dtype, arch):
    with jt.config(arch=arch):
        x, w = normal(0, m, k, dtype=dtype), ops.sparse24(normal(1, n, k, dtype=dtype))
        agree(*PAIR, x, w, interpret=arch is None)
        if dtype == "float32":
            of_both = [lambda x, v, f=f: f(x, ops.Sparse24Tensor(v, w.codes)) for f in PAIR]
            gradients_agree(*of_both, x, w.values)


def test_not_a_number_is_kept():
    """A weight that has gone wrong shows it, whatever stands beside it."""
    w = np.tile(np.array([3, np.nan, -5, np.inf], "f"), (1, 2))
    dense = evaluated(lambda w: ops.sparse24(w).dense())(w)
    np.testing.assert_array_equal(dense, np.where(np.isfinite(w), 0, w))


def test_dtypes():
    x, w = normal(0, 2, 3, 16, dtype="bfloat16"), ops.sparse24(normal(1, 5, 16).astype("float8_e4m3fn"))
    agree(*PAIR, x, w, out_dtype="float32")
    with jax.enable_x64(True):
        agree(*PAIR, np.asarray(normal(0, 3, 16), np.float64), ops.sparse24(np.asarray(normal(1, 5, 16), np.float64)))


def test_maps_and_second_derivatives():
    w = ops.sparse24(normal(1, 6, 16))
    agree(*(jax.vmap(f, (0, None)) for f in PAIR), normal(0, 3, 4, 16), w)
    of_both = [lambda x, v, f=f: f(x, ops.Sparse24Tensor(v, w.codes)) for f in PAIR]

    def curves(f):
        slopes = jax.grad(lambda x, v: (f(x, v) ** 3).sum(), (0, 1))
        return evaluated(jax.grad(lambda x, v: sum((s**2).sum() for s in slopes(x, v)), (0, 1)))

    x = normal(2, 3, 16)
    for ours, theirs in zip(*(curves(f)(x, w.values) for f in of_both), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * abs(theirs).max())


def test_differences():
    w = ops.sparse24(normal(1, 3, 8))
    with jax.enable_x64(True):
        of_both = lambda x, v: ops.sparse24_matmul(x, ops.Sparse24Tensor(v, w.codes))
        differences_agree(of_both, normal(0, 3, 8), w.values)


def test_errors():
    x, w = np.zeros((3, 16), np.float32), ops.sparse24(np.zeros((5, 16), np.float32))
    for error, match, call in [
        (KernelTypeError, "float array", lambda: ops.sparse24(np.zeros((5, 16), np.int32))),
        (KernelValueError, "multiple of 8", lambda: ops.sparse24(x[:, :12])),
        (KernelValueError, "mask has shape", lambda: ops.sparse24(x, np.ones((3, 8), bool))),
        (KernelTypeError, "bool", lambda: ops.sparse24(x, np.ones((3, 16), np.int32))),
        (KernelTypeError, "see ops.sparse24", lambda: ops.sparse24_matmul(x, x)),
        (KernelTypeError, "the weight float32", lambda: ops.sparse24_matmul(x.astype(np.float16), w)),
        (KernelValueError, r"\[\.\.\., 16\]", lambda: ops.sparse24_matmul(x[:, :8], w)),
        (KernelValueError, "in halves has shape", lambda: ops.sparse24_matmul(x, dataclasses.replace(w, values=x))),
    ]:
        with pytest.raises(error, match=match):
            call()
    assert ops.sparse24_matmul(x[:0], w).shape == (0, 5)
