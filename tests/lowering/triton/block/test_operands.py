"""Operands of products that are made in registers: nothing of them goes through shared memory or between threads."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device import run_artifact
from machines import card

import jtile as jt
from jtile.interpret import interpret
from jtile.lowering.triton.block import compile_block_kernel
from jtile.ops import QuantizedTensor, hopper_quantized
from jtile.ops.operands import Weight
from jtile.testing import relative_error

KINDS = ("q4_0", "q4_1", "q8_0", "int8")


def arguments(kind, m, out, inner, dtype=jnp.bfloat16):
    random = np.random.default_rng(m)
    w = QuantizedTensor.quantize(jnp.asarray(random.normal(size=(out, inner))), kind).packed()
    x = jnp.asarray(random.normal(size=(m, inner))).astype(dtype)
    return [x, w.codes, w.scale, w.scale if w.minimum is None else w.minimum]


def kernel_of(args, kind, **options):
    meta = hopper_quantized.choice(args[0].shape[0], args[1].shape[0], args[0].shape[1], kind) | options
    x, *weight = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args)
    return hopper_quantized.hopper_quantized_product.lower(x, Weight(*weight), kind=kind, **meta).program.kernel


# Of the codes of each width, those with more to do.
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in ("q4_0", "q8_0"))) for k in KINDS])
def test_dequantised_weights_stay_in_registers(kind):
    kernel = kernel_of(arguments(kind, 16, 128, 512), kind, high=1, deep=1, splits=1)
    artifact = compile_block_kernel(kernel, card("sm_90"), texts=True)
    sass = artifact.texts["sass"]
    loop = sass[: sass.rindex("HGMMA")].split("SYNCS.PHASECHK")[-1]  # from the last wait to the last product of a round
    assert len(re.findall("HGMMA", sass)) == 16
    assert not re.search(r"\b(STS|STSM|SHFL|F2F|I2F\w*)\b", loop)
    assert re.search("HMUL2.BF16|HFMA2.BF16", sass) and artifact.launch["resources"]["spills"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [3, 20, 50, 150])
def test_products_with_them(kind, m):
    args = arguments(kind, m, 200, 1024, jnp.float16 if m == 20 else jnp.bfloat16)
    kernel = kernel_of(args, kind)
    inputs = [np.asarray(a) for a in args]
    (got,) = run_artifact(compile_block_kernel(kernel, card("sm_90")), kernel, inputs).outputs()
    assert relative_error(got, interpret(kernel, inputs)[0]) < 1e-5


@jt.kernel(
    out_type=lambda a, b: jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), jnp.float32),
    grid=lambda a, b: (jt.cdiv(a.shape[0], 128), jt.cdiv(b.shape[0], 64)),
    specialize=True,
)
def tf32_product(a, b, o):
    i, j = jt.program_id(0), jt.program_id(1)
    A, B = a.tiles(128, 32), b.tiles(64, 32)
    acc = jt.zeros((128, 64), jnp.float32)
    for k in jt.range(A.shape[1], stages=3):
        acc = jt.dot(A[i, k], B[j, k].T, acc, precision="fast")
    o.tiles(128, 64)[i, j] = acc


def test_float32_as_tf32():
    types = [jax.ShapeDtypeStruct((300, 200), jnp.float32)] * 2
    texts = tf32_product.with_options(specialize=None).lower(*types, target="cuda:sm_90").texts
    assert "specialize=True" in texts["schedule"]
    texts = tf32_product.lower(*types, target="cuda:sm_90").texts
    assert texts["schedule"].startswith("block level: ")
    assert "m64n64k8.f32.tf32.tf32" in texts["ptx"]


@pytest.mark.gpu
def test_float32_as_tf32_on_the_gpu():
    a, b = (jax.random.normal(jax.random.key(k), (n, 200)) for k, n in enumerate((300, 200)))
    error = relative_error(tf32_product(a, b), np.asarray(a, np.float64) @ np.asarray(b, np.float64).T)
    assert 1e-5 < error < 2e-3
