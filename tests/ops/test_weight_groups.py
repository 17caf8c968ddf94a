"""Quantised weights whose groups are larger than GGUF's blocks of 32, in every kernel that takes them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.ops import float8_rows, hopper_gemv, hopper_quantized, normed_products, quantized_lanes, streamed_forms
from jtile.ops.embeddings import embedding_reference
from jtile.ops.operands import NO_EPILOGUE, Weight
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")


def int4(out, inner, groups, seed=0, zeros=True, dtype="float16"):
    """A tensor of codes, scales and zero points, and the matrix that they say."""
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 16, (out, inner), np.uint8)
    scale = draw.uniform(0.5, 1.5, (out, groups)).astype(jnp.dtype(dtype))
    zero = draw.integers(0, 16, (out, groups)).astype(np.int32) if zeros else None
    wide = lambda a: np.repeat(a.astype(np.float32), inner // groups, axis=1)
    matrix = wide(scale) * (codes.astype(np.float32) - (wide(zero) if zeros else 8))
    return QuantizedTensor.from_int4(
        jnp.asarray(codes), jnp.asarray(scale), None if zero is None else jnp.asarray(zero)
    ), matrix


@pytest.mark.parametrize(("groups", "group"), [(3, 128), (6, 64), (4, 32), (1, 128)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_codes_scales_and_zeros(groups, group, dtype):
    for zeros in (False, True):
        w, matrix = int4(5, 384, groups, zeros=zeros, dtype=dtype)
        assert (w.kind, w.shape, w.group) == (("q4_0", "q4_1")[zeros], (5, 384), group)
        assert w.scale.dtype == dtype and w.codes.nbytes == 5 * 192
        error = abs(np.asarray(w.dequantize()) - matrix).max()
        assert error < (1e-6 if zeros else 1e-30)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_quantising_in_groups(kind):
    x = np.asarray(normal(0, 3, 512))
    for group in (32, 128, 512):
        w = QuantizedTensor.quantize(x, kind, group)
        assert w.scale.shape == (3, 512 // group)
        largest = abs(x.reshape(3, -1, group)).max(-1)
        near = abs(np.asarray(w.dequantize()) - x).reshape(3, -1, group).max(-1)
        assert (near < largest * {"q8_0": 0.5 / 127, "q4_0": 1.02 / 8, "q4_1": 1.05 / 15}[kind] + 1e-3).all()
    smaller = w.regrouped(64)
    assert smaller.group == 64 and np.array_equal(smaller.dequantize(), w.dequantize())
    for message, group in (("32 weights times a power of two, got 96", 96), ("multiple of 1024", 1024)):
        with pytest.raises(jt.errors.KernelValueError, match=message):
            QuantizedTensor.quantize(x, kind, group)
    with pytest.raises(jt.errors.KernelValueError, match="groups of 512 weights do not divide into groups of 96"):
        w.regrouped(96)


def test_what_is_no_int4():
    codes, scale = jnp.zeros((2, 96), jnp.uint8), jnp.ones((2, 2))
    with pytest.raises(jt.errors.KernelValueError, match="2 groups do not divide a row of 96"):
        QuantizedTensor.from_int4(codes, scale)
    with pytest.raises(jt.errors.KernelValueError, match=r"are not \[out, in\] and \[out, groups\]"):
        QuantizedTensor.from_int4(codes, scale[:1])


@functools.cache
def grouped(kind, group, inner=512, out=12, seed=1):
    if kind == "fp8":  # what is drawn, and scales of any size
        codes = np.asarray(normal(seed, out, inner, dtype="float8_e4m3fn"))
        scale = np.exp2(np.asarray(normal(seed + 1, out, inner // group)))
        return QuantizedTensor.from_float8(jnp.asarray(codes), jnp.asarray(scale))
    return QuantizedTensor.quantize(normal(seed, out, inner), kind, group)


@pytest.mark.parametrize(
    ("kind", "group", "arch", "m"),
    [
        ("q4_0", 128, None, 1),
        ("q8_0", 256, None, 5),
        ("q4_1", 64, "sm_90", 1),
        ("q4_0", 128, "sm_90", 5),
        ("fp8", 128, None, 5),
    ],
)
def test_products(kind, group, arch, m):
    w, x = grouped(kind, group), normal(3, m, 512)
    with jt.config(arch=arch):
        gradient = jax.grad(lambda x: (ops.quantized_matmul(x, w) ** 2).sum())
        y, g = evaluated(lambda x: (ops.quantized_matmul(x, w), gradient(x)))(x)
    matrix = np.asarray(w.dequantize())
    want = np.asarray(x) @ matrix.T
    assert relative_error(y, want) < 3e-6
    assert relative_error(g, 2 * want @ matrix) < 1e-5


def test_rows_of_a_table():
    w, ids = grouped("q4_1", 128), np.array([3, 0, 11, 99], np.int32)
    for table in (w, w.packed()):
        want = evaluated(embedding_reference)(w, ids)
        np.testing.assert_array_equal(evaluated(ops.embedding)(table, ids), want)


@pytest.mark.parametrize(
    ("kind", "group", "inner", "packed"),
    [
        ("q4_0", 512, 2048, 128),
        ("q4_0", 128, 512, 64),
        ("q4_0", 128, 384, 128),
    ],
)
def test_packing_halves_groups_that_tensor_maps_do_not_copy(kind, group, inner, packed):
    w = grouped(kind, group, inner)
    assert w.packed().group == packed and w.packed().unpacked().shape == w.shape
    np.testing.assert_array_equal(w.packed().dequantize(), w.dequantize())


STREAMED = {  # kind, group, in, dtype of the scales, meta-parameters
    "q4_0, 128": ("q4_0", 128, 2048, "float16", {}),
    "q4_1, 64, rounds": ("q4_1", 64, 2048, "float16", {"roles": 1, "rows": 4}),
    "fp8, 128": ("fp8", 128, 1024, "float32", {}),
    "fp8, a row": ("fp8", 1024, 1024, "float32", {"roles": 1, "rows": 4}),
}


def packed_in_groups(kind, group, inner, dtype, out=12):
    """A packed weight of that group, and its matrix."""
    w = grouped(kind, group, inner, out)
    cast = lambda a: None if a is None else a.astype(dtype)
    p = QuantizedTensor(w.codes, cast(w.scale), cast(w.minimum), kind).packed()
    assert p.group == group
    return p, np.asarray(w.dequantize())


@pytest.mark.parametrize("case", STREAMED)
def test_one_row_against_a_stream(case):
    *of, options = STREAMED[case]
    p, matrix = packed_in_groups(*of)
    kind, inner, x = of[0], of[2], normal(2, 1, of[2], dtype="bfloat16")
    weight, n = Weight(p.codes, p.scale, p.minimum), 128 // hopper_gemv.bits_of(kind)
    assert hopper_gemv.misfit(x, weight, kind) is None
    found = streamed_forms.choices(1, inner, kind, False, streamed_forms.scale_bytes(weight, inner, kind))[0]
    meta = dict(kind=kind, activation=None, out_dtype="float32") | found | options
    y = hopper_gemv.kernel((weight,), NO_EPILOGUE).interpret(
        np.asarray(x).reshape(1, inner // n, n), (weight,), NO_EPILOGUE, seed=len(case), **meta
    )
    assert relative_error(y, np.asarray(x, np.float32) @ matrix.T) < (1e-5 if hopper_gemv.integers(kind) else 3e-6)


def test_copies_of_scales_go_to_multiples_of_128_bytes():
    for kind, lines in (("fp8", (16,)), ("q4_1", (16, 32)), ("q8_0", (32,))):
        for gated in (False, True):
            for one in streamed_forms.choices(1, 14336, kind, gated, lines):
                assert all(one["rows"] * n % 128 == 0 for n in lines)
    assert streamed_forms.choices(1, 4096, "fp8", True, (16,))[0] == {"rows": 8, "roles": 4, "slots": 2}


SEVERAL = {  # kind, group, in, dtype of the scales, meta-parameters
    "q4_0, 128": ("q4_0", 128, 1024, "bfloat16", {"high": 2, "deep": 2, "splits": 2}),
    "q4_1, 256": ("q4_1", 256, 1024, "float32", {"splits": 1}),
    "fp8, 128": ("fp8", 128, 512, "float32", {}),
    "fp8, a row, of halves": ("fp8", 256, 256, "float32", {}),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_several_rows_on_warpgroups(case):
    *of, options = SEVERAL[case]
    p, matrix = packed_in_groups(*of, out=64)
    kind, inner = of[0], of[2]
    x = normal(2, 8, inner, dtype="float16" if "halves" in case else "bfloat16")
    weight = Weight(p.codes, p.scale, p.scale if p.minimum is None else p.minimum)
    assert hopper_quantized.misfit(x, weight, kind) is None
    meta = hopper_quantized.choice(8, 64, inner, kind) | options
    y = hopper_quantized.hopper_quantized_product.interpret(x, weight, kind=kind, seed=len(case), **meta)
    assert relative_error(np.asarray(y).sum(0), np.asarray(x, np.float32) @ matrix.T) < 5e-3  # weights in bfloat16
    lines = Weight(p.codes, jnp.ones((64, 3)))
    assert hopper_quantized.misfit(x, lines, kind) == "scales are not in lines of copies"


def test_every_code_of_8_bits_is_the_number_that_it_says():
    """Of one row in lanes, and of several: the bits of float8_e4m3fn where float32 and 16-bit floats have theirs."""
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[codes & 127 != 127]  # no numbers
    codes = np.concatenate([codes, codes[:2]]).view(jnp.float8_e4m3fn)[None]
    p = QuantizedTensor.from_float8(jnp.asarray(codes), jnp.ones((1, 1))).packed()
    want = codes.astype(np.float32)[0]
    words = np.asarray(p.codes).reshape(1, 16, 4)
    for dtype, factor in ((jnp.bfloat16, 2.0**120), (jnp.float16, 2.0**8)):
        found = np.asarray(hopper_quantized._codes(jnp.asarray(words), "fp8", np.dtype(dtype).type))
        found = found.astype(np.float32) * np.float32(factor)
        # units of two a block: of s, t, h, e
        order = found.reshape(8, 2, 4, 2, 2).transpose(0, 1, 3, 2, 4).reshape(-1)
        np.testing.assert_array_equal(order, want)
    lanes = quantized_lanes.float8_fields(jnp.asarray(words))
    of_bytes = np.stack([np.asarray(f) for f in lanes], -1).reshape(-1) * np.float32(2.0**120)
    np.testing.assert_array_equal(np.sort(of_bytes), np.sort(want))


def rounded_to_8_bits(x, groups):
    parts = x.astype(np.float32).reshape(x.shape[0], groups, -1)
    top, largest = abs(parts).max(-1, keepdims=True), np.float32(448)
    codes = (parts * (largest / top)).astype(jnp.float8_e4m3fn)
    return (codes.astype(np.float32) * (top / largest)).reshape(x.shape)


@pytest.mark.parametrize(("activations", "packed"), [("rows", True), ("blocks", False)])
def test_rows_that_are_rounded_too(activations, packed):
    groups = 1 if activations == "rows" else 2
    codes = np.asarray(normal(1, 256, 256, dtype="float8_e4m3fn"))
    scale = np.repeat(np.exp2(np.asarray(normal(2, 2, groups))), 128, axis=0)
    w = QuantizedTensor.from_float8(jnp.asarray(codes), jnp.asarray(scale))
    w = dataclasses.replace(w, activations=activations)
    x = np.asarray(normal(3, 128, 256, dtype="bfloat16"))
    want = rounded_to_8_bits(x, groups) @ (codes.astype(np.float32) * np.repeat(scale, 256 // groups, axis=1)).T
    form = w.packed() if packed else w
    with jt.config(arch="sm_90"):
        chosen = ops.choices(ops.quantized_matmul, x, form)
        assert [c.implementation for c in chosen] == ["rows in 8 bits"]
        product = functools.partial(float8_rows.product, activations=activations, out_dtype="float32")
        y = evaluated(lambda x: product(x, Weight(form.codes, form.scale)))(x)
        # Hopper's tensor cores keep about 13 bits below the largest term while they add products of 8-bit numbers.
        assert relative_error(y, want) < (5e-4 if jax.default_backend() == "gpu" else 3e-6)
        for other, why in ((x[:5], "fewer than 128 rows"), (x.astype(np.float32), "rows are float32")):
            assert why in str(ops.choices(ops.quantized_matmul, other, w)[0])
    both = QuantizedTensor.concatenate([w, w])
    assert both.activations == activations and both.shape == (512, 256)
    apart = QuantizedTensor.concatenate([w.rows(np.arange(40)), w])
    assert apart.activations == (None if activations == "blocks" else activations)


@pytest.mark.parametrize("packed", [True, False])
def test_gated_rows_that_are_rounded_too(packed):
    """Both products in one kernel, as the activation of one times the other."""
    codes = [np.asarray(normal(seed, 192, 256, dtype="float8_e4m3fn")) for seed in (1, 2)]
    scales = [np.exp2(np.asarray(normal(seed, 192, 1))) * np.float32(0.1) for seed in (3, 4)]
    x = np.asarray(normal(5, 130, 256, dtype="bfloat16"))
    weights = [QuantizedTensor.from_float8(*map(jnp.asarray, of)) for of in zip(codes, scales, strict=True)]
    weights = [dataclasses.replace(w, activations="rows") for w in weights]
    forms = [w.packed() if packed else w for w in weights]
    g, u = (rounded_to_8_bits(x, 1) @ (c.astype(np.float32) * s).T for c, s in zip(codes, scales, strict=True))
    with jt.config(arch="sm_90"):
        chosen = ops.choices(ops.gated_mlp, x, *forms)
        assert [c.implementation for c in chosen] == ["rows in 8 bits"]
        both = functools.partial(float8_rows.gated, activation="silu", out_dtype="float32")
        y = evaluated(lambda x: both(x, *(Weight(w.codes, w.scale) for w in forms)))(x)
    assert relative_error(y, g / (1 + np.exp(-g)) * u) < (5e-4 if jax.default_backend() == "gpu" else 3e-6)


@pytest.mark.parametrize(("packed", "gated"), [(True, False), (False, True)])
def test_a_norm_that_rounds_its_rows(packed, gated):
    """One kernel from x and the residual to rows of 8 bits and the sum, in front of one product or of two."""
    codes = np.asarray(normal(1, 128, 256, dtype="float8_e4m3fn"))
    scale = np.exp2(np.asarray(normal(2, 128, 1))) * np.float32(0.1)
    w = dataclasses.replace(QuantizedTensor.from_float8(jnp.asarray(codes), jnp.asarray(scale)), activations="rows")
    weights = [w.packed() if packed else w] * (1 + gated)
    x, residual = (np.asarray(normal(seed, 130, 256, dtype="bfloat16")) for seed in (3, 4))
    norm = 1 + np.asarray(normal(5, 256)) / 4
    t = x.astype(np.float32) + residual.astype(np.float32)
    rows = rounded_to_8_bits(t / np.sqrt((t * t).mean(-1, keepdims=True) + 1e-5) * norm, 1)
    want = rows @ (codes.astype(np.float32) * scale).T
    want = want / (1 + np.exp(-want)) * want if gated else want
    options = {"eps": 1e-5, "activation": "silu" if gated else None, "out_dtype": "float32"}
    with jt.config(arch="sm_90"):
        op = ops.rms_norm_gated_mlp if gated else ops.rms_norm_matmul
        assert "normed_rounded_rows" in str(jax.make_jaxpr(lambda x: op(x, norm, *weights, residual=residual))(x))
        run = functools.partial(normed_products._rounded, weights=tuple(weights), **options)
        got, total = evaluated(run)(x, residual, norm)
    assert relative_error(got, want) < 2e-3  # a number beside the middle of two codes may be rounded to either
    np.testing.assert_array_equal(np.asarray(total, np.float32), t.astype(residual.dtype).astype(np.float32))
