"""matmul, the gated MLP and products with quantised weights against their `jnp` references."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import thorough
from library import agree, integers, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import gpu_tiles
from jtile.ops.gated_mlp import gated_mlp_reference
from jtile.ops.matmul import matmul_reference
from jtile.ops.quantized import quantized_matmul_reference
from jtile.ops.quantized_tensor import KINDS
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

MOST = KINDS if thorough() else KINDS[:-1]  # mxfp4 differs in what a code is
SIZES = [(5, 7, 9), (1, 100, 64), (33, 70, 129), (300, 260, 40), (1, 1, 1)]
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 1e-3, "float8_e4m3fn": 7e-2}


def operands(m: int, n: int, k: int, dtype: str, ta: bool = False, tb: bool = False, batch=()):
    a = normal(0, *batch, *((k, m) if ta else (m, k)), dtype=dtype)
    return a, normal(1, *batch, *((n, k) if tb else (k, n)), dtype=dtype)


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_matmul_sizes(m, n, k):
    agree(ops.matmul, matmul_reference, *operands(m, n, k, "float32"), tolerance=2e-6, interpret=m * n < 100)


ORDERS = list(itertools.product([False, True], repeat=2))
FORMS = [  # all orders of float32; two of each other dtype outside of make test-all, by turns
    (dtype, ta, tb)
    for (k, dtype), (ta, tb) in itertools.product(enumerate(TOLERANCE), ORDERS)
    if k == 0 or (k + ta + tb) % 2 == 0 or thorough()
]


@pytest.mark.parametrize(("dtype", "ta", "tb"), FORMS)
def test_matmul_transposes_and_dtypes(dtype, ta, tb):
    a, b = operands(33, 70, 45, dtype, ta, tb, batch=(2,))
    bias = normal(2, 70, dtype=dtype)
    options = {"transpose_a": ta, "transpose_b": tb, "activation": "gelu", "bias": bias}
    agree(ops.matmul, matmul_reference, a, b, tolerance=TOLERANCE[dtype], **options)


ODD = [
    (136, 251, 200, False, True),
    (131, 264, 200, False, False),
    (200, 264, 131, True, False),
    (131, 133, 135, True, True),
]


@pytest.mark.parametrize(("m", "n", "k", "ta", "tb"), ODD)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_matmul_of_rows_of_no_whole_16_bytes(m, n, k, ta, tb, dtype):
    """Tensor maps take some of these operands; rows of the result end anywhere."""
    a, b = operands(m, n, k, "bfloat16", ta, tb)
    bias = {} if dtype == "int8" else {"bias": normal(2, n, dtype=dtype), "activation": "relu"}
    a, b = ((20 * np.asarray(x)).astype(dtype) for x in (a, b))
    agree(ops.matmul, matmul_reference, a, b, tolerance=TOLERANCE.get(dtype, 0), transpose_a=ta, transpose_b=tb, **bias)


@pytest.mark.parametrize(("ta", "tb"), [(False, False), (True, False), (False, True)])
def test_matmul_of_copied_rows(monkeypatch, ta, tb):
    """What lies behind the rows adds nothing, and nothing flows back from there."""
    monkeypatch.setattr(gpu_tiles, "extended", lambda m, n, k, *_, **__: (m + 3, n + 2, k + 5))
    options = {"transpose_a": ta, "transpose_b": tb, "activation": "gelu"}
    f, reference = (lambda a, b, bias, g=g: g(a, b, bias=bias, **options) for g in (ops.matmul, matmul_reference))
    args = (*operands(13, 7, 9, "float32", ta, tb, batch=(2,)), normal(2, 7))
    np.testing.assert_allclose(*(evaluated(g)(*args) for g in (f, reference)), rtol=2e-5, atol=2e-5)
    gradients = lambda g: evaluated(jax.grad(lambda *args: (g(*args) ** 2).sum(), argnums=(0, 1, 2)))(*args)
    both = map(gradients, (f, reference))
    for ours, theirs in zip(*both):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def test_matmul_of_float64():
    with jax.enable_x64(True):
        a, b = (jnp.asarray(np.random.default_rng(s).normal(size=(19, 19))) for s in (0, 1))
        agree(ops.matmul, matmul_reference, a, b, tolerance=1e-14)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_matmul_of_integers(dtype):
    low = 0 if dtype == "uint8" else -100
    a, b = (np.asarray(integers(s, low, 100, *shape)).astype(dtype) for s, shape in enumerate([(17, 37), (37, 21)]))
    agree(ops.matmul, matmul_reference, a, b, tolerance=0)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "gelu_tanh"])
def test_matmul_epilogues(activation):
    a, b = operands(9, 20, 16, "bfloat16")
    options = {"activation": activation, "out_dtype": "float32", "bias": normal(2, 20)}
    agree(ops.matmul, matmul_reference, a, b, tolerance=1e-5, **options)


def test_matmul_batches_and_one_weight_for_all():
    a = normal(0, 2, 3, 11, 16)
    agree(ops.matmul, matmul_reference, a, normal(1, 2, 3, 16, 9), tolerance=2e-6)
    agree(ops.matmul, matmul_reference, a, normal(1, 16, 9), tolerance=2e-6)
    agree(ops.matmul, matmul_reference, a.swapaxes(-1, -2), normal(1, 16, 9), tolerance=2e-6, transpose_a=True)


@pytest.mark.parametrize(("a", "b"), [((0, 4), (4, 5)), ((3, 0), (0, 5)), ((3, 4), (4, 0)), ((0, 3, 4), (0, 4, 5))])
def test_matmul_of_nothing(a, b):
    a, b = np.ones(a, np.float32), np.ones(b, np.float32)
    np.testing.assert_array_equal(evaluated(ops.matmul)(a, b), a @ b)
    bias = np.ones(b.shape[-1], np.float32)
    with_bias = evaluated(lambda a, b, bias: ops.matmul(a, b, bias=bias))(a, b, bias)
    np.testing.assert_array_equal(with_bias, np.broadcast_to(bias, (a @ b).shape))


def test_float32_rows_and_a_bfloat16_matrix_without_columns():
    """As many rows as CPUs with tile registers take apart."""
    x, w = np.ones((16, 32), np.float32), np.ones((32, 0), jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        for op in (ops.matmul, lambda x, w: ops.gated_mlp(x, w, w)):
            assert evaluated(op)(x, w).shape == (16, 0)


def test_matmul_refuses():
    with pytest.raises(KernelValueError, match="cannot contract"):
        ops.matmul(jnp.ones((3, 4)), jnp.ones((5, 6)))
    with pytest.raises(KernelValueError, match="two or more axes"):
        ops.matmul(jnp.ones(4), jnp.ones((4, 5)))
    with pytest.raises(KernelValueError, match="unknown activation 'swish'"):
        ops.matmul(jnp.ones((3, 4)), jnp.ones((4, 5)), activation="swish")
    with pytest.raises(KernelTypeError, match="two float or two integer"):
        ops.matmul(jnp.ones((3, 4)), jnp.ones((4, 5), jnp.int8))
    for bias in (jnp.ones(4), jnp.ones((5, 1)), 1.0):
        with pytest.raises(KernelValueError, match="bias has shape"):
            ops.matmul(jnp.ones((3, 4)), jnp.ones((4, 5)), bias=bias)


ROWS, WEIGHTS = (1, 2, 3, 17), ((96, 64), (101, 96), (1, 32))
QUANTISED = [  # outside of make test-all, each two of a kind, a number of rows and a shape meet about once
    (kind, m, out, inner)
    for (i, kind), (j, m), (k, (out, inner)) in itertools.product(*map(enumerate, (MOST, ROWS, WEIGHTS)))
    if (i + j + k) % 3 == 0 or thorough()
]


@pytest.mark.parametrize(("kind", "m", "out", "inner"), QUANTISED)
def test_quantized_matmul(kind, m, out, inner):
    weight = ops.quantize(normal(0, out, inner), kind)
    options = {
        "bias": normal(2, out),
        "activation": "silu",
        "residual": np.asarray(normal(3, m, out)) + 4,
    }  # keeps one-number results off 0
    agree(ops.quantized_matmul, quantized_matmul_reference, normal(1, m, inner), weight, tolerance=2e-6, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_matmul_plain(kind):
    weight = ops.quantize(normal(0, 20, 64), kind)
    for m in (1, 4):
        x = normal(1, m, 64)
        agree(ops.quantized_matmul, quantized_matmul_reference, x, weight, tolerance=2e-6, interpret=True)
    assert ops.quantized_matmul(normal(1, 2, 3, 64), weight).shape == (2, 3, 20)
    assert ops.quantized_matmul(normal(1, 0, 64), weight).shape == (0, 20)


@pytest.mark.cpu
@pytest.mark.usefixtures("optimized")  # LLVM fuses products and sums then
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_among_others(kind):
    """Servers on CPUs count on it."""
    if jt.platform() != "cpu":
        pytest.skip("on GPUs kernels differ by the number of rows")
    weight, x = ops.quantize(normal(0, 37, 160), kind), normal(1, 40, 160)
    both = lambda x: (ops.quantized_matmul(x, weight), ops.gated_mlp(x, weight, weight, transpose=True))
    with jt.config(steady=True):
        for m in (1, 2, 9):
            for got, want in zip(both(x[:m]), both(x), strict=True):
                np.testing.assert_array_equal(got, want[:m])


@pytest.mark.cpu
def test_quantized_matmul_of_rows_that_are_counted_later():
    """A symbolic number of rows takes what many rows take."""
    weight = ops.QuantizedTensor.quantize(normal(1, 8, 64), "q4_0")
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), 64), jnp.float32)
    export = jax.export.export(
        jax.jit(lambda x: ops.quantized_matmul(x, weight)), platforms=["cpu"], disabled_checks=jt.export_checks()
    )
    exported = export(rows)
    for n in (1, 5):
        x = normal(2, n, 64)
        assert relative_error(exported.call(x), evaluated(lambda x: quantized_matmul_reference(x, weight))(x)) < 3e-6


def test_quantized_matmul_refuses():
    weight = ops.quantize(normal(0, 20, 64), "q4_0")
    with pytest.raises(KernelValueError, match="does not fit weights"):
        ops.quantized_matmul(normal(1, 3, 32), weight)
    with pytest.raises(KernelTypeError, match="takes a QuantizedTensor"):
        ops.quantized_matmul(normal(1, 3, 32), normal(0, 20, 32))
    with pytest.raises(KernelValueError, match="unknown activation"):
        ops.quantized_matmul(normal(1, 3, 64), weight, activation="swish")
    with pytest.raises(KernelTypeError, match="x is a float array, got complex64"):
        ops.quantized_matmul(normal(1, 3, 64).astype("complex64"), weight)
    for options in ({"bias": normal(2, 20, 1)}, {"residual": normal(2, 20, 3)}):
        with pytest.raises(KernelValueError, match=f"{next(iter(options))} has shape"):
            ops.quantized_matmul(normal(1, 3, 64), weight, **options)


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("m", [1, 5])
def test_quantized_gated_mlp(kind, m):
    gate, up = (ops.quantize(normal(s, 101, 64), kind) for s in (0, 1))
    agree(ops.gated_mlp, gated_mlp_reference, normal(2, m, 64), gate, up, tolerance=3e-6, activation="gelu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("transpose", [False, True])
def test_gated_mlp(dtype, transpose):
    gate, up = (normal(s, *((101, 40) if transpose else (40, 101)), dtype=dtype) for s in (0, 1))
    x = normal(2, 3, 7, 40, dtype=dtype)
    agree(ops.gated_mlp, gated_mlp_reference, x, gate, up, tolerance=2 * TOLERANCE[dtype], transpose=transpose)


def test_gated_mlp_refuses():
    w = normal(0, 64, 20)
    with pytest.raises(KernelValueError, match="do not fit"):
        ops.gated_mlp(normal(1, 3, 32), w, w)
    with pytest.raises(KernelTypeError, match="two dense weights"):
        ops.gated_mlp(normal(1, 3, 64), w, ops.quantize(normal(0, 20, 64), "q8_0"))
    assert ops.gated_mlp(normal(1, 0, 64), w, w).shape == (0, 20)
