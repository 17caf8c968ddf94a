"""K-quants: every bit of a file is kept, and products with them are those with their dequantised weights."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import thorough
from k_quants import random_blocks, random_tensor
from library import agree, normal

import jtile as jt
from jtile import ops
from jtile._errors import KernelValueError
from jtile.ops import QuantizedTensor
from jtile.ops.normed_products import rms_norm_matmul_reference
from jtile.ops.quantized import quantized_matmul_reference
from jtile.ops.quantized_tensor import K_KINDS
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

gguf = pytest.importorskip("gguf", reason="the reference of the block layouts is the gguf package")
gated_mlp_reference = importlib.import_module("jtile.ops.gated_mlp").gated_mlp_reference
dequantized = evaluated(QuantizedTensor.dequantize)

# outside of make test-all each kind meets two numbers of rows, one of them in a gated product
CASES = [(kind, m, gated) for i, kind in enumerate(K_KINDS) for j, m in enumerate((1, 2, 5)) for gated in (False, True)
         if (i + j) % 3 == gated or thorough()]  # fmt: skip
GPU = [("q3_k", 5, 1.0), ("q2_k", 1, 1e30), ("q4_k", 1, 1.0), ("q6_k", 2 if thorough() else 1, 1.0)]


@pytest.mark.parametrize("kind", K_KINDS)
def test_every_bit_of_a_file_is_kept(kind):
    raw = random_blocks(kind, 5, 768)
    tensor = QuantizedTensor.from_gguf_blocks(raw, kind, (5, 768))
    expected = gguf.dequantize(raw.reshape(5, -1), gguf.GGMLQuantizationType[kind.upper()])
    wider = 4 * 15 if kind in ("q3_k", "q4_k", "q5_k") else 0  # integers of 6 bits in bytes
    assert (tensor.shape, tensor.nbytes) == ((5, 768), raw.size + wider)
    assert np.array_equal(dequantized(tensor), expected)
    packed = tensor.packed()
    assert packed.is_packed and packed.shape == (5, 768) and packed.nbytes == tensor.nbytes
    assert np.array_equal(dequantized(packed), expected)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), packed.unpacked(), tensor))
    both = QuantizedTensor.concatenate([tensor, tensor.rows(np.array([3, 1]))])
    assert np.array_equal(dequantized(both), expected[[0, 1, 2, 3, 4, 3, 1]])
    ids = np.array([[4, 0], [7, -1]], np.int32)  # outside of the table: zeros
    rows = evaluated(lambda t: ops.embedding(t, ids, dtype="float32"))(both.packed())
    assert np.array_equal(rows, [[expected[4], expected[0]], [0 * expected[0]] * 2])


def test_blocks_that_make_no_tensor():
    for raw, kind, shape, message in (
        (np.zeros(10, np.uint8), "q4_k", (1, 256), "q4_k blocks of shape .* take 144 bytes, got 10"),
        (np.zeros(144, np.uint8), "q4_k", (1, 128), "q4_k needs `in` to be a multiple of 256"),
        (np.zeros(144, np.uint8), "iq2_xs", (1, 256), "unknown kind .*q6_k"),
    ):
        with pytest.raises(KernelValueError, match=message):
            QuantizedTensor.from_gguf_blocks(raw, kind, shape)
    with pytest.raises(KernelValueError, match="unknown kind of quantisation 'q4_k'"):
        ops.quantize(np.zeros((1, 256), np.float32), "q4_k")


def everything(f, weight):
    return lambda x, bias, residual: f(x, weight, bias=bias, activation="silu", residual=residual)


@pytest.mark.parametrize(("kind", "m", "gated"), CASES)
def test_products(kind, m, gated):
    weight, up = (random_tensor(kind, 21, 512, seed) for seed in (0, 1))
    if gated:
        of = (lambda x, f=f: f(x, weight, up, transpose=True) for f in (ops.gated_mlp, gated_mlp_reference))
        agree(*of, normal(1, m, 512), tolerance=5e-6)
        return
    weight = weight.packed() if m == 2 else weight
    args = normal(1, m, 512), normal(2, 21), np.asarray(normal(3, m, 21)) + 4
    agree(*(everything(f, weight) for f in (ops.quantized_matmul, quantized_matmul_reference)), *args, tolerance=3e-6)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("kind", ["q4_k", "q6_k"])
def test_a_row_has_the_same_bits_among_others(kind):
    """From three rows on; servers on CPUs count on it."""
    if jt.platform() != "cpu":
        pytest.skip("on GPUs kernels differ by the number of rows")
    weight, x = random_tensor(kind, 21, 512, 0), normal(1, 40, 512)
    several = ops.quantized_matmul(x, weight)
    for m in (3, 9):
        np.testing.assert_array_equal(ops.quantized_matmul(x[:m], weight), several[:m])


@pytest.mark.parametrize(("kind", "m"), [("q3_k", 1), ("q5_k", 3)])
def test_products_in_the_interpreter(kind, m):
    weight = random_tensor(kind, 3, 256)
    agree(ops.quantized_matmul, quantized_matmul_reference, normal(1, m, 256), weight, tolerance=3e-6, interpret=True)


@pytest.mark.parametrize(("kind", "m"), [("q4_k", 1)])
def test_gradients(kind, m):
    weight = random_tensor(kind, 21, 768)
    args = normal(1, m, 768), normal(2, 21), normal(3, m, 21)
    total = lambda f: jax.grad(lambda *a: (everything(f, weight)(*a) ** 2).sum(), (0, 1, 2))
    got, expected = (evaluated(total(f))(*args) for f in (ops.quantized_matmul, quantized_matmul_reference))
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(got, expected))


def test_behind_a_norm_and_of_other_rows():
    weight, x = random_tensor("q6_k", 8, 256), normal(0, 1, 256)
    normed = lambda f: lambda x: f(x, jnp.ones(256), weight, residual=x)
    agree(normed(ops.rms_norm_matmul), normed(rms_norm_matmul_reference), x, tolerance=5e-6)
    assert ops.quantized_matmul(jnp.zeros((2, 0, 256)), weight).shape == (2, 0, 8)
    halves = evaluated(ops.quantized_matmul)(x.astype(jnp.bfloat16), weight)
    assert relative_error(halves, evaluated(quantized_matmul_reference)(x.astype(jnp.bfloat16), weight)) < 1e-5


@pytest.mark.parametrize(("kind", "m", "size"), GPU)
def test_products_on_tiles_of_a_gpu(kind, m, size):
    """Also beyond the range in which codes are taken as the bits of subnormal numbers."""
    weight, up = (random_tensor(kind, 6, 512, seed) for seed in (0, 1))
    weight, up = (weight.packed(), up.packed()) if kind != "q2_k" else (weight, up)
    x = np.float32(size) * normal(1, m, 512)
    with jt.config(arch="sm_90"):
        assert ops.choices(ops.quantized_matmul, x, weight)[0].implementation == "codes in lanes"
        if kind == "q4_k":
            gated = (lambda x, f=f: f(x, weight, up, transpose=True) for f in (ops.gated_mlp, gated_mlp_reference))
            agree(*gated, x, tolerance=5e-6)
        else:
            fs = (
                lambda x, f=f: f(x, weight, residual=x[:, :6])
                for f in (ops.quantized_matmul, quantized_matmul_reference)
            )
            agree(*fs, x, tolerance=5e-6)


def test_gradients_on_tiles_of_a_gpu():
    weight, x = random_tensor("q4_k", 40, 256).packed(), normal(1, 3, 256)
    with jt.config(arch="sm_90"):
        total = lambda f: jax.grad(lambda x: (f(x, weight) ** 2).sum())
        got, expected = (evaluated(total(f))(x) for f in (ops.quantized_matmul, quantized_matmul_reference))
    assert relative_error(got, expected) < 1e-5
