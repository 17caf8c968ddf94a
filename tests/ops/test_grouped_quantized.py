"""Products of groups of rows with stacks of quantised matrices: those with the dequantised matrices, forwards and
backwards, of few rows and of many, as CPUs compute them and on tiles of a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import thorough
from k_quants import random_tensor
from library import agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.grouped_matmul import grouped_matmul_reference
from jtile.ops.quantized_tensor import K_KINDS, KINDS, QuantizedTensor
from jtile.ops.routed_matmul import routed_matmul_reference
from jtile.ops.weight_codes import float4_codes, float4_numbers
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

FEW, MANY = (1, 0, 1, 0, 0, 0, 0, 1), (5, 0, 19, 0, 3, 0, 0, 0)  # rows of eight matrices, and one behind them
# every kind in every way in make test-all; else each way twice, of K-quants where the decoders differ most
CASES = [(kind, sizes, arch) for kind in (*KINDS, *K_KINDS) for sizes in (FEW, MANY) for arch in (None, "sm_90")]
SOME = [
    ("int8", FEW, None),
    ("mxfp4", FEW, None),
    ("q8_0", FEW, "sm_90"),
    ("fp8", MANY, None),
    ("q4_k", MANY, None),
    ("q4_1", MANY, "sm_90"),
    ("q2_k", MANY, "sm_90"),
]
GRADIENTS = ("fp8", "int8", "q2_k", "q4_k")  # of those, what gradients are compared of  # fmt: skip


def stack(kind: str, inner: int, out: int = 21, groups: int = 8) -> QuantizedTensor:
    if kind in K_KINDS:
        whole = random_tensor(kind, groups * out, inner)
    else:
        x = np.random.default_rng(0).standard_normal((groups * out, inner), np.float32)
        whole = QuantizedTensor.quantize(x, kind, 64 if kind.startswith("q4") else 32)
    return jax.tree.map(lambda a: jax.device_put(np.asarray(a).reshape(groups, out, -1)), whole)


def both(product, rows, gradient=True, **options):
    """The product of x and a stack, whose `rows` are sizes of groups or an index, and with `gradient` that of the sum
    of its squares."""
    f = lambda x, w: product(x, w, np.asarray(rows, np.int32), **options)
    return evaluated(lambda x, w: (f(x, w), *([jax.grad(lambda x: (f(x, w) ** 2).sum())(x)] if gradient else [])))


@pytest.mark.parametrize(("kind", "sizes", "arch"), CASES if thorough() else SOME)
def test_products_and_gradients(kind, sizes, arch):
    w = stack(kind, 256 if kind in K_KINDS else 128)
    assert (w.shape, w.ndim) == ((8, 21, w.shape[2]), 3)
    x = normal(9, sum(sizes) + 1, w.shape[2])
    with jt.config(arch=arch):
        chosen = ops.choices(lambda x: ops.grouped_matmul(x, w, jnp.asarray(sizes), transpose_w=True), x)
        on_cpu = "tiles of codes" if sizes is MANY else "rows of codes"
        assert [c.implementation for c in chosen] == [on_cpu if jt.platform() == "cpu" else "codes in lanes"]
        options = {"gradient": kind in GRADIENTS or thorough(), "transpose_w": True}
        got = both(ops.grouped_matmul, sizes, **options)(x, w)
    for a, b in zip(got, both(grouped_matmul_reference, sizes, **options)(x, w), strict=True):
        assert a.dtype == np.float32 and relative_error(a, b) < 2e-6 and (a[-1] == 0).all()


@pytest.mark.parametrize(("kind", "m", "arch"), [("int8", 3, None), ("fp8", 9, "sm_90"), ("q4_1", 9, "sm_90")])
def test_rows_of_16_bits_and_any_length(kind, m, arch):
    """One scale a row asks for no blocks; on a GPU weights of many 16-bit rows are rounded to their dtype."""
    w = stack(kind, 64 if kind == "q4_1" else 40, groups=3)
    x, sizes = normal(1, m, w.shape[2], dtype="bfloat16"), np.array([1, m - 2, 1], np.int32)
    with jt.config(arch=arch):
        y = evaluated(lambda x, w: ops.grouped_matmul(x, w, sizes, transpose_w=True, out_dtype=jnp.float32))(x, w)
    want = evaluated(lambda x, w: grouped_matmul_reference(x, w, sizes, transpose_w=True, out_dtype=jnp.float32))(x, w)
    assert y.dtype == np.float32 and relative_error(y, want) < (3e-3 if kind == "q4_1" else 1e-5)


@pytest.mark.parametrize("sizes", [FEW, MANY])
def test_in_the_interpreter(sizes):
    w, x = stack("q4_0", 64, out=6), normal(2, sum(sizes), 64)
    options = dict(tolerance=2e-6, transpose_w=True, interpret=True)
    agree(ops.grouped_matmul, grouped_matmul_reference, x, w, np.asarray(sizes, np.int32), **options)


def test_layers_and_packed_codes():
    """vmap takes stacks of stacks; packed codes are taken apart where a product needs that."""
    layers = [stack("q8_0", 64, 6, 4), stack("q8_0", 64, 6, 4).packed().unpacked()]
    w = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    x, sizes = normal(3, 2, 9, 64), np.array([[2, 3, 0, 4], [0, 0, 9, 0]], np.int32)
    f = lambda x, w, sizes: ops.grouped_matmul(x, w, sizes, transpose_w=True)
    got = evaluated(jax.vmap(f))(x, w, sizes)
    plain = [layer.dequantize() for layer in layers]
    want = [evaluated(f)(x[k], plain[k], sizes[k]) for k in range(2)]
    assert relative_error(got, np.stack(want)) < 2e-6
    with jt.config(arch="sm_90"):
        packed, y = (evaluated(f)(x[0, :2], v, sizes[1] // 9 * 2) for v in (layers[0].packed(), layers[0]))
    assert relative_error(packed, y) < 1e-6


@pytest.mark.parametrize(("kind", "activation", "own", "arch", "many"), [
    ("fp8", "silu", False, None, True), ("fp8", "silu", True, None, False), ("q4_0", "silu", True, "sm_90", False),
    ("q4_k", "relu", False, "sm_90", False),
])  # fmt: skip
def test_rows_that_an_index_routes(kind, activation, own, arch, many):
    """Few rows, whose matrices are read once each, and `many`, which are sorted; `own`: a row for each choice."""
    w = stack(kind, 256 if kind == "q4_k" else 64, out=24)
    index = np.array([[2, 3], [8, 1], [2, 2]] * 3 if many else [[0, 3], [-1, 1]], np.int32)
    x = normal(5, *index.shape[: 1 + own], w.shape[2])
    with jt.config(arch=arch):
        got = both(ops.routed_matmul, index, activation=activation, gradient=arch is None)(x, w)
    want = both(routed_matmul_reference, index, activation=activation, gradient=arch is None)(x, w)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and relative_error(a, b) < 3e-6


def test_floats_that_an_index_routes():
    x, w, index = normal(0, 3, 8), normal(1, 4, 6, 8), np.array([[0, 3], [4, 1], [2, 2]], np.int32)
    agree(ops.routed_matmul, routed_matmul_reference, x, w, index, tolerance=2e-6, activation="silu")
    assert ops.routed_matmul(x[:0], w, index[:0]).shape == (0, 2, 6)
    for args, error, message in (
        ((x, w.astype(jnp.bfloat16), index), KernelTypeError, "one dtype"),
        ((x[:2], w, index), KernelValueError, r"x is \[3, 8\] or \[3, 2, 8\]"),
        ((x, w[0], index), KernelValueError, r"w is \[groups, out, in\]"),
        ((x, w, index[0]), KernelValueError, r"index is \[tokens, k\]"),
        ((x, w, index * 1.0), KernelTypeError, "index is an integer array"),
    ):
        with pytest.raises(error, match=message):
            ops.routed_matmul(*args)
    with pytest.raises(KernelValueError, match="unknown activation 'swish'"):
        ops.routed_matmul(x, w, index, activation="swish")
    with pytest.raises(KernelValueError, match="5 rows of a matrix are no gates"):
        ops.routed_matmul(x, w[:, :5], index, activation="silu")


def test_what_a_result_and_a_stack_cannot_be_is_refused():
    x, w, sizes = normal(0, 3, 8), normal(1, 4, 8, 8), np.array([1, 1, 1, 0], np.int32)
    for given, said in (("int8", "int8"), ("f33", "'f33'")):
        with pytest.raises(KernelTypeError, match=f"out_dtype {said}; expected a float, for instance float32"):
            ops.grouped_matmul(x, w, sizes, out_dtype=given)
    with pytest.raises(KernelTypeError, match=r"takes quantised tensors, got ArrayImpl; stack arrays by jnp\.stack"):
        QuantizedTensor.stack([x, x])


def test_stacks():
    parts = [QuantizedTensor.quantize(np.asarray(normal(seed, 5, 64)), "q4_0") for seed in range(3)]
    w = QuantizedTensor.stack(parts)
    assert w.shape == (3, 5, 64) and w.nbytes == sum(p.nbytes for p in parts) and w.group == 32
    np.testing.assert_array_equal(w.dequantize(), np.stack([p.dequantize() for p in parts]))
    np.testing.assert_array_equal(w.packed().dequantize(), w.dequantize())
    assert w.packed().shape == w.shape and QuantizedTensor.concatenate([w, w]).shape == (3, 10, 64)
    np.testing.assert_allclose(parts[0].with_minima().dequantize(), parts[0].dequantize(), atol=1e-6)
    with pytest.raises(KernelTypeError, match="several shapes or kinds"):
        QuantizedTensor.stack([parts[0], parts[1].with_minima()])


def test_floats_of_4_bits():
    """Every code is its number's, what lies between is rounded to the nearest, and a power of two scales 32 of them."""
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.concatenate([sizes, -sizes])
    codes = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(float4_numbers(codes), numbers)
    np.testing.assert_array_equal(float4_codes(np, np.delete(numbers, 8)), np.delete(codes, 8))
    x = np.random.default_rng(0).uniform(-7, 7, 999).astype(np.float32)
    off = abs(numbers[None, :] - x[:, None])
    np.testing.assert_array_equal(abs(numbers[float4_codes(np, x)] - x), off.min(1))
    w = QuantizedTensor.quantize(np.stack([np.tile(numbers, 4) * 2.0**-9, np.zeros(64)]).astype(np.float32), "mxfp4")
    assert w.scale.shape == (2, 2) and w.scale.dtype == jnp.float8_e8m0fnu and w.nbytes == 2 * 64 // 2 + 4
    np.testing.assert_array_equal(w.dequantize()[0], np.tile(numbers, 4) * 2.0**-9)
    np.testing.assert_array_equal(w.dequantize()[1], 0)


def test_refuses():
    w, x = stack("q4_0", 64, groups=4), normal(0, 3, 64)
    with pytest.raises(KernelValueError, match=r"are \[groups, n, k\]; call it with transpose_w=True"):
        ops.grouped_matmul(x, w, jnp.asarray([1, 1, 1, 0]))
    with pytest.raises(KernelValueError, match=r"w is \[groups, n, k\], got shape"):
        ops.grouped_matmul(x, QuantizedTensor.quantize(np.ones((4, 64), np.float32), "q4_0"), jnp.asarray([3]))
    with pytest.raises(KernelValueError, match=r"x is \[rows, 64\], group_sizes \[4\]"):
        ops.grouped_matmul(x[:, :32], w, jnp.asarray([1, 1, 1, 0]), transpose_w=True)
    with pytest.raises(KernelValueError, match="got a stack"):
        ops.quantized_matmul(x, w)
    with pytest.raises(KernelTypeError, match="x is a float array"):
        ops.grouped_matmul(jnp.ones((3, 64), jnp.int32), w, jnp.asarray([1, 1, 1, 0]), transpose_w=True)
    assert ops.grouped_matmul(x[:0], w, jnp.asarray([0, 0, 0, 0]), transpose_w=True).shape == (0, 21)
