"""Quantised tensors against the gguf package, bit for bit, and as pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile._errors import KernelTypeError, KernelValueError
from jtile.ops import quantizing
from jtile.ops.quantized_tensor import KINDS, QuantizedTensor
from jtile.ops.quantizing import BLOCK_BYTES

pytestmark = pytest.mark.usefixtures("by_numpy")

gguf = pytest.importorskip("gguf", reason="the reference of the block layouts is the gguf package")

BLOCKS = sorted(BLOCK_BYTES)


def weights(shape=(6, 96), seed=0):
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x[0, :32] = 0  # a block whose scale is zero
    x[1, :32] = 0.25  # a block without spread
    x[2, 5] = -100.0
    return x


def reference(kind, x):
    type_ = gguf.GGMLQuantizationType[kind.upper()]
    raw = gguf.quantize(x, type_)
    return raw, gguf.dequantize(raw, type_)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("shape", [(6, 96), (5, 32), (3, 1024)])
def test_blocks_of_gguf(kind, shape):
    raw, expected = reference(kind, weights(shape))
    tensor = QuantizedTensor.from_gguf_blocks(raw, kind, shape)
    assert tensor.shape == shape
    assert np.array_equal(np.asarray(tensor.dequantize()), expected)
    assert tensor.nbytes == raw.size  # nothing is stored twice
    under_jit = np.asarray(jax.jit(QuantizedTensor.dequantize)(tensor))
    np.testing.assert_allclose(under_jit, expected, rtol=1e-6, atol=1e-6)  # may fuse multiply and add


@pytest.mark.parametrize("where", ["NumPy", "host", "elsewhere"])
@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != "mxfp4"])  # ggml chooses its powers otherwise
def test_quantize_rounds_as_ggml_does(kind, where, monkeypatch):
    x = weights((64, 256), seed=1)
    raw, _ = reference(kind, x)
    given = x if where == "NumPy" else jnp.asarray(x)
    if where == "elsewhere":  # as what lies on a GPU: by `jnp`
        monkeypatch.setattr(quantizing, "_on_host", lambda x: False)
    expected, got = QuantizedTensor.from_gguf_blocks(raw, kind, x.shape), QuantizedTensor.quantize(given, kind)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert isinstance(ours, jax.Array)
        assert ours.dtype == theirs.dtype
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("where", ["host", "elsewhere"])
@pytest.mark.parametrize("kind", ["int8", *BLOCKS])
def test_what_is_no_number_gives_no_warning_and_empty_matrices_no_error(kind, where, monkeypatch):
    monkeypatch.setattr(quantizing, "_on_host", lambda x: where == "host")
    for value in (np.nan, np.inf, 1e-44):  # warnings are errors here
        assert QuantizedTensor.quantize(np.full((2, 64), value, np.float32), kind).shape == (2, 64)
    for shape in ((0, 64), (2, 0)):
        assert QuantizedTensor.quantize(np.zeros(shape, np.float32), kind).shape == shape


@pytest.mark.parametrize(("kind", "steps"), [("int8", 127), ("q8_0", 127), ("q4_0", 8), ("q4_1", 7.5)])
def test_the_error_is_at_most_half_a_step(kind, steps):
    x = np.random.default_rng(2).uniform(-1, 1, (8, 64)).astype(np.float32)
    error = np.abs(np.asarray(QuantizedTensor.quantize(x, kind).dequantize()) - x).max()
    worst = 1 if kind == "q4_0" else 0.5  # q4_0 clips the end of the range that has 7 steps, by up to a whole one
    assert 0.1 / steps < error < worst / steps * 1.02 + 5e-4  # the scale is rounded to float16


def test_int8_takes_any_size_and_zero_rows():
    x = np.random.default_rng(3).standard_normal((5, 7)).astype(np.float32)
    x[3] = 0
    tensor = QuantizedTensor.quantize(x, "int8")
    assert (tensor.shape, tensor.codes.dtype, tensor.scale.shape) == ((5, 7), jnp.int8, (5, 1))
    np.testing.assert_allclose(np.asarray(tensor.dequantize()), x, atol=np.abs(x).max() / 254 * 1.01)
    assert not np.asarray(tensor.dequantize())[3].any()


@pytest.mark.parametrize("kind", ["int8", *BLOCKS])
def test_rows_and_concatenation(kind):
    a, b = (QuantizedTensor.quantize(weights(seed=seed), kind) for seed in (0, 1))
    both = QuantizedTensor.concatenate([a, b])
    assert both.shape == (12, 96)
    assert np.array_equal(both.dequantize(), np.concatenate([a.dequantize(), b.dequantize()]))
    index = np.array([11, 0, 5])
    assert np.array_equal(both.rows(index).dequantize(), np.asarray(both.dequantize())[index])


def test_it_is_a_pytree():
    tensor = QuantizedTensor.quantize(weights(), "q4_1")
    assert len(jax.tree.leaves(tensor)) == 3
    assert jax.jit(lambda t: t)(tensor).kind == "q4_1"
    assert tensor.dequantize(jnp.bfloat16).dtype == jnp.bfloat16
    assert len(jax.tree.leaves(QuantizedTensor.quantize(weights(), "q4_0"))) == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x: QuantizedTensor.quantize(x, "q3_k"), "unknown kind of quantisation 'q3_k'"),
        (lambda x: QuantizedTensor.quantize(x[:, :40], "q4_0"), "multiple of 32"),
        (lambda x: QuantizedTensor.quantize(x[0], "q8_0"), r"shape \(out, in\)"),
        (lambda x: QuantizedTensor.from_gguf_blocks(np.zeros(10, np.uint8), "q4_0", (1, 32)), "take 18 bytes, got 10"),
        (lambda x: QuantizedTensor.from_gguf_blocks(np.zeros(10, np.uint8), "int8", (1, 32)), "no GGUF block layout"),
    ],
)
def test_refused(build, message):
    with pytest.raises(KernelValueError, match=message):
        build(weights())


@pytest.mark.parametrize("dtype", ["complex64", "int32", "bool"])
def test_only_floats_are_quantised(dtype):
    with pytest.raises(KernelTypeError, match=f"x is a float array, got {dtype}"):
        QuantizedTensor.quantize(weights().astype(dtype), "q8_0")


def test_kinds_do_not_mix():
    parts = [QuantizedTensor.quantize(weights(), kind) for kind in ("q4_0", "q8_0")]
    with pytest.raises(KernelTypeError, match="q4_0, q8_0"):
        QuantizedTensor.concatenate(parts)


@pytest.mark.parametrize(("sides", "groups"), [((64, 128), (32, 32)), ((128, 128), (32, 64))])
def test_matrices_of_several_widths_or_groups_are_not_concatenated(sides, groups):
    parts = [QuantizedTensor.quantize(weights((4, n)), "q8_0", g) for n, g in zip(sides, groups, strict=True)]
    with pytest.raises(KernelValueError, match="expected one `in` and one size of groups"):
        QuantizedTensor.concatenate(parts)


def test_one_scale_for_a_row_is_not_cut_into_groups():
    tensor = QuantizedTensor.quantize(weights((4, 64)), "int8")
    assert tensor.regrouped(64).group == 64
    with pytest.raises(KernelValueError, match="int8 has no groups of another size"):
        tensor.regrouped(32)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_count_from_the_end_and_those_that_do_not_exist_are_no_numbers(kind):
    tensor = QuantizedTensor.quantize(weights((4, 64)), kind)
    found = np.asarray(tensor.rows([-1, 9]).dequantize())
    assert np.array_equal(found[0], tensor.dequantize()[3])
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize(("kind", "group"), [("q4_0", 32), ("q4_1", 64), ("q8_0", 32)])
def test_panels(kind, group):
    """The same weights in another order: each method gives what it gives of rows."""
    w = QuantizedTensor.quantize(weights((48, 192)), kind, group)
    p = w.in_panels()
    same = lambda x, y: np.testing.assert_array_equal(x.dequantize(), y.dequantize())
    assert p.is_packed and (p.shape, p.nbytes, p.group) == (w.shape, w.nbytes, group) and p.in_panels() is p
    assert np.asarray(p.scale).reshape(-1)[:16].tolist() == np.asarray(w.scale)[:16, 0].tolist()
    for a, b in zip(jax.tree.leaves(p.unpacked()), jax.tree.leaves(w), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    for x, y in ((p, w), (p.rows([-1, 17, 0]), w.rows([-1, 17, 0])), (p.regrouped(32), w.regrouped(32))):
        same(x, y)
    assert np.isnan(np.asarray(p.rows([48, 1]).dequantize())[0]).all()
    same(QuantizedTensor.concatenate([p, p]), QuantizedTensor.concatenate([w, w]))
    same(QuantizedTensor.stack([p, p]), QuantizedTensor.stack([w, w]))
    same(p.with_minima(), w.with_minima())
    np.testing.assert_array_equal(p.packed().codes, w.packed().codes)
    with pytest.raises(KernelTypeError, match=f"panels of {kind}, {kind}"):
        QuantizedTensor.concatenate([p, w])


@pytest.mark.parametrize("made", [
    lambda: QuantizedTensor.quantize(weights((40, 64)), "q4_0"),
    lambda: QuantizedTensor.quantize(weights((32, 64)), "fp8"),
    lambda: QuantizedTensor.stack([QuantizedTensor.quantize(weights((16, 64)), "q4_0")] * 2),
])  # fmt: skip
def test_what_has_no_panels(made):
    with pytest.raises(KernelValueError, match="panels are of 16 rows of q4_0, q4_1 or q8_0, got"):
        made().in_panels()
