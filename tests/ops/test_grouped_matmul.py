"""Products of groups of rows against their `jnp` reference and `jax.lax.ragged_dot`, forwards and backwards."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.grouped_matmul import LastRows, grouped_matmul_reference, grouped_outer, last_rows
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 1e-3}
SIZES = [(5, 0, 9, 70, 3), (0, 0, 87, 0, 0), (17, 17, 17, 17, 17), (0, 0, 0, 0, 0)]


def operands(rows, k, n, groups, dtype="float32", transpose=False):
    return normal(0, rows, k, dtype=dtype), normal(1, groups, *((n, k) if transpose else (k, n)), dtype=dtype)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("transpose", [False, True])
def test_sizes(sizes, transpose):
    x, w = operands(87, 35, 21, 5, transpose=transpose)
    agree(ops.grouped_matmul, grouped_matmul_reference, x, w, jnp.asarray(sizes), tolerance=2e-6, transpose_w=transpose)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dtypes(dtype):
    x, w = operands(150, 96, 40, 3, dtype)
    agree(ops.grouped_matmul, grouped_matmul_reference, x, w, jnp.asarray([64, 1, 80]), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "n"), [("float32", 42), ("bfloat16", 256), ("bfloat16", 80)])
@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_gated_products(dtype, n, arch):
    """Gates and what they gate in one kernel on GPUs, where their columns are whole tiles, and apart elsewhere."""
    x, w = operands(87, 160, n, 5, dtype, transpose=True)
    sizes, tolerance = jnp.asarray(SIZES[0]), 10 * TOLERANCE[dtype]
    run = functools.partial(ops.grouped_matmul, transpose_w=True, activation="silu")
    expected = functools.partial(grouped_matmul_reference, transpose_w=True, activation="silu")
    with jt.config(arch=arch):
        agree(run, expected, x, w, sizes, tolerance=tolerance)
        gradients_agree(run, expected, x, w, sizes, of=2, tolerance=tolerance)


def test_rows_behind_the_groups_are_zero_and_one_program_serves_all_sizes():
    x, w = operands(40, 16, 24, 3)
    f = jax.jit(ops.grouped_matmul)
    for sizes in ([3, 4, 5], [0, 12, 0], [40, 0, 0]):
        y, total = f(x, w, jnp.asarray(sizes)), sum(sizes)
        np.testing.assert_array_equal(y[total:], 0)
        np.testing.assert_allclose(y, jax.lax.ragged_dot(x, w, jnp.asarray(sizes)), rtol=1e-5, atol=1e-5)
    assert f._cache_size() == 1


def test_what_is_no_number_stays_in_its_group():
    x, w = map(np.array, operands(40, 16, 24, 2))
    x[20:] = np.nan

    @evaluated
    def both(x, w):
        y, back = jax.vjp(lambda x, w: ops.grouped_matmul(x, w, np.array([20, 20], np.int32)), x, w)
        return y, back(jnp.ones_like(y))

    y, (dx, dw) = both(x, w)
    assert not np.isnan(y[:20]).any() and np.isnan(y[20:]).all()
    assert not np.isnan(dx).any() and not np.isnan(dw[0]).any() and np.isnan(dw[1]).all()


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients(dtype, transpose):
    sizes = jnp.asarray([21, 0, 64, 2])
    ours, theirs = (
        lambda x, w, f=f: f(x, w, sizes, transpose_w=transpose) for f in (ops.grouped_matmul, grouped_matmul_reference)
    )
    gradients_agree(ours, theirs, *operands(90, 33, 47, 4, dtype, transpose))


def test_gradients_differ_by_out_dtype():
    sizes = jnp.asarray([10, 20])
    ours, theirs = (
        lambda x, w, f=f: f(x, w, sizes, out_dtype=jnp.float32) for f in (ops.grouped_matmul, grouped_matmul_reference)
    )
    gradients_agree(ours, theirs, *operands(30, 16, 24, 2, "bfloat16"))


@pytest.mark.parametrize("sizes", [(3, 70, 0, 100), (32, 0, 64, 16), (0, 0, 0, 0), (150, 100, 7, 0)], ids=str)
def test_gradients_of_large_groups(sizes):
    """The rows behind a whole step come apart, whatever stands behind them; the last sizes go beyond the rows."""
    x, dy = normal(0, 200, 64, dtype="bfloat16"), normal(1, 200, 128, dtype="bfloat16")
    ends = np.minimum(np.cumsum(sizes), 200)
    x, dy = np.array(x), np.array(dy)
    x[int(ends[-1]) :], dy[int(ends[-1]) :] = np.nan, np.nan
    n = np.asarray(sizes, np.int32)
    about = dict(groups=4, out_dtype="float32", bm=64, bn=64)
    last = LastRows(*evaluated(lambda x, dy: [last_rows(v, n, 32) for v in (x, dy)])(x, dy))
    got = grouped_outer.interpret(x, dy, n, last, bk=32, step=16, **about)
    masked = grouped_outer.interpret(x, dy, n, LastRows(), bk=32, **about)
    for g, (start, end) in enumerate(zip((0, *ends), ends)):
        want = np.asarray(x[start:end], np.float32).T @ np.asarray(dy[start:end], np.float32)
        np.testing.assert_allclose(got[g], want, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(masked[g], want, rtol=1e-5, atol=1e-4)


def test_vmap_over_layers():
    x, w = normal(0, 2, 30, 16), normal(1, 2, 3, 16, 8)
    sizes = np.array([[10, 5, 15], [0, 30, 0]], np.int32)
    got = evaluated(jax.vmap(ops.grouped_matmul))(x, w, sizes)
    want = evaluated(lambda *of: [grouped_matmul_reference(*(v[k] for v in of)) for k in range(2)])(x, w, sizes)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_refuses():
    x, w = operands(10, 4, 6, 2)
    with pytest.raises(KernelTypeError, match="one dtype"):
        ops.grouped_matmul(x, w.astype(jnp.bfloat16), jnp.asarray([1, 2]))
    with pytest.raises(KernelTypeError):
        ops.grouped_matmul(x, w, jnp.asarray([1.0, 2.0]))
    with pytest.raises(KernelValueError, match=r"\[rows, 4\]"):
        ops.grouped_matmul(x[:, :3], w, jnp.asarray([1, 2]))
    with pytest.raises(KernelValueError):
        ops.grouped_matmul(x, w, jnp.asarray([1, 2, 3]))
    with pytest.raises(KernelValueError, match="activation"):
        ops.grouped_matmul(x, w, jnp.asarray([1, 2]), activation="tan")
    with pytest.raises(KernelValueError, match="gates"):
        ops.grouped_matmul(x, w[..., :5], jnp.asarray([1, 2]), activation="silu")
    assert ops.grouped_matmul(x[:0], w, jnp.asarray([0, 0])).shape == (0, 6)
    assert ops.grouped_matmul(x[:0], w, jnp.asarray([0, 0]), activation="silu").shape == (0, 3)
