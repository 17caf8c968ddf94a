"""Rows of x times codes by the tensor cores, over quads of lanes: in the interpreter, and what instructions they
become."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal, stored_weight

import jtile as jt
from jtile.ops import gpu_tiles, hopper_gemv, streamed_quads
from jtile.ops.operands import NO_EPILOGUE, Norm, Weight
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated


@pytest.fixture(autouse=True)
def on_tensor_cores(monkeypatch):
    monkeypatch.setattr(streamed_quads, "ON_GPUS", True)
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 2)  # several tiles a program


def grouped(kind: str, out: int, inner: int, seed: int = 1) -> tuple[Weight, np.ndarray]:
    """`stored_weight`, with groups of 128 weights where codes have 4 bits."""
    weight, matrix = stored_weight(kind, out, inner, seed)
    if hopper_gemv.bits_of(kind) == 8:
        return weight, matrix
    of_groups = lambda k: np.asarray(normal(seed + k, out, inner // 128, dtype="bfloat16"))
    whole = QuantizedTensor.quantize(matrix, kind).packed()
    minimum = None if whole.minimum is None else of_groups(8)
    whole = dataclasses.replace(whole, scale=of_groups(7), minimum=minimum)
    return Weight(whole.codes, whole.scale, whole.minimum), evaluated(QuantizedTensor.dequantize)(whole)


CASES = {  # kind, rows of x, out, in, rows of a tile of one matrix
    "q4_0": ("q4_0", 1, 40, 1024, 16),
    "q4_1, two rows": ("q4_1", 2, 24, 1024, 16),
    "int8": ("int8", 1, 32, 1056, 32),
    "fp8": ("fp8", 1, 40, 1056, 16),
}


@pytest.mark.parametrize("case", CASES)
def test_products(case):
    kind, m, out, inner, rows = CASES[case]
    (weight, matrix), (up, second) = (grouped(kind, out, inner, seed) for seed in (1, 4))
    x, residual = (np.array(normal(seed, m, inner, dtype="bfloat16")) for seed in (2, 3))
    x[0, 5], n = 255 / 64, 128 // hopper_gemv.bits_of(kind)  # a digit of 127 and more
    norm = 1 + np.asarray(normal(5, inner)) / 4
    assert hopper_gemv.in_quads(x, (weight, up), kind)
    meta = dict(kind=kind, out_dtype="float32", roles=2, slots=2)
    y = hopper_gemv.kernel((weight,), NO_EPILOGUE).interpret(
        x.reshape(m, inner // n, n), (weight,), NO_EPILOGUE, activation=None, rows=rows, **meta
    )
    normed = Norm(norm.reshape(inner // n, n), residual.reshape(m, inner // n, n))
    z, _ = hopper_gemv.normed_kernel(len(jax.tree.leaves((weight, up)))).interpret(
        x.reshape(m, inner // n, n), (weight, up), normed, activation="relu", eps=1e-2, rows=rows // 2, **meta
    )
    assert relative_error(y, x.astype(np.float32) @ np.asarray(matrix).T) < 1e-5
    s = x.astype(np.float32) + residual.astype(np.float32)
    s = s / np.sqrt((s * s).mean(1, keepdims=True) + 1e-2) * norm
    assert relative_error(z, np.maximum(s @ np.asarray(matrix).T, 0) * (s @ np.asarray(second).T)) < 2e-4


@pytest.mark.parametrize("kind", ["q4_0", "fp8"])
@pytest.mark.parametrize("scale", [1e30, 1e-30, 0.0, np.inf])
def test_any_size_of_x(kind, scale):
    weight, matrix = grouped(kind, 16, 1024)
    x = np.array(normal(2, 1, 1024, dtype="bfloat16"))
    with jt.config(arch="sm_90", interpret=True):
        x0 = (x.astype(np.float32) * np.float32(1 if np.isinf(scale) else scale)).astype(jnp.bfloat16)
        if np.isinf(scale):
            x0[0, 3] = scale
        y = evaluated(lambda x: hopper_gemv.product(x, (weight,), kind=kind))(x0)
    if np.isinf(scale):
        assert not np.isfinite(y).any()
    else:
        want = x0.astype(np.float32) @ np.asarray(matrix).T
        assert float(abs(y - want).max()) <= 1e-4 * float(abs(want).max())


def test_what_does_not_fit():
    weight, _ = stored_weight("q4_0", 16, 1024)  # groups of 32: a lane's own
    x = jax.ShapeDtypeStruct((1, 1024), jnp.bfloat16)
    assert not hopper_gemv.in_quads(x, (weight,), "q4_0")
    eight, _ = stored_weight("fp8", 16, 1024)
    assert hopper_gemv.in_quads(x, (eight,), "fp8")
    assert not hopper_gemv.in_quads(jax.ShapeDtypeStruct((1, 1024), jnp.float32), (eight,), "fp8")
    assert {one["rows"] for one in hopper_gemv.choices(1, 1024, "fp8", False, (), 2, False, True)} == {16}
    assert {one["rows"] for one in hopper_gemv.choices(1, 1024, "fp8", True, (), 2, False, True)} == {8, 16}


@pytest.mark.parametrize(
    ("kind", "instruction", "scale"),
    [("q4_0", "IMMA.16832.S8.S8", ((16, 8), jnp.bfloat16)), ("fp8", "HMMA.16816.F32", ((16, 1), jnp.float32))],
)
def test_what_it_compiles_to(kind, instruction, scale):
    """The words come from shared memory 16 bytes at a time, and go to the tensor cores as they are."""
    sd, n = jax.ShapeDtypeStruct, 128 // hopper_gemv.bits_of(kind)
    weight, x = Weight(sd((16, 1024 * 4 // n), jnp.uint32), sd(*scale)), sd((1, 1024 // n, n), jnp.bfloat16)
    options = dict(kind=kind, activation=None, out_dtype="bfloat16", rows=16, roles=1, slots=2)
    kernel = hopper_gemv.kernel((weight,), NO_EPILOGUE)
    sass = kernel.lower(x, (weight,), NO_EPILOGUE, target="cuda:sm_90", **options).texts["sass"]
    assert sass.count(instruction) == {"q4_0": 8, "fp8": 16}[kind]
    assert "LDS.128" in sass and "IDP" not in sass
