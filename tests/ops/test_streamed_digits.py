"""Rows of x times codes by the tensor cores, lane by lane: in the interpreter, and what instructions they become."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal, stored_weight

import jtile as jt
from jtile.ops import gpu_tiles, hopper_gemv, streamed_numbers
from jtile.ops.operands import NO_EPILOGUE, Norm, Weight
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated


@pytest.fixture(autouse=True)
def on_tensor_cores(monkeypatch):
    monkeypatch.setattr(streamed_numbers, "TENSOR_CORES", True)
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 2)  # several tiles a program
    hopper_gemv.choices.cache_clear()
    yield
    hopper_gemv.choices.cache_clear()


CASES = {  # kind, rows of x, out, in, rows of a tile
    "q4_0": ("q4_0", 1, 24, 1280, 8),
    "q4_1, two rows": ("q4_1", 2, 24, 512, 8),
    "q8_0, tall tiles": ("q8_0", 1, 24, 512, 16),
    "int8": ("int8", 1, 16, 1056, 8),
    "fp8": ("fp8", 1, 24, 1056, 8),
    "bfloat16": ("bfloat16", 2, 16, 520, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_products(case):
    kind, m, out, inner, rows = CASES[case]
    (weight, matrix), (up, second) = (stored_weight(kind, out, inner, seed) for seed in (1, 4))
    x, residual = (np.array(normal(seed, m, inner, dtype="bfloat16")) for seed in (2, 3))
    x[0, 5], n = 255 / 64, 128 // hopper_gemv.bits_of(kind)  # a digit of 127 and more
    norm = 1 + np.asarray(normal(5, inner)) / 4
    meta = dict(kind=kind, out_dtype="float32", rows=rows, roles=2, slots=2)
    y = hopper_gemv.kernel((weight,), NO_EPILOGUE).interpret(
        x.reshape(m, inner // n, n), (weight,), NO_EPILOGUE, activation=None, **meta
    )
    normed = Norm(norm.reshape(inner // n, n), residual.reshape(m, inner // n, n))
    z, _ = hopper_gemv.normed_kernel(len(jax.tree.leaves((weight, up)))).interpret(
        x.reshape(m, inner // n, n), (weight, up), normed, activation="relu", eps=1e-2, **meta
    )
    assert relative_error(y, x.astype(np.float32) @ np.asarray(matrix).T) < 1e-5
    s = x.astype(np.float32) + residual.astype(np.float32)
    s = s / np.sqrt((s * s).mean(1, keepdims=True) + 1e-2) * norm
    assert relative_error(z, np.maximum(s @ np.asarray(matrix).T, 0) * (s @ np.asarray(second).T)) < 1e-4


@pytest.mark.parametrize("kind", ["q4_0", "fp8"])
@pytest.mark.parametrize("scale", [1e30, 1e-30, 0.0, np.inf])
def test_any_size_of_x(kind, scale):
    weight, matrix = stored_weight(kind, 8, 512)
    x = np.array(normal(2, 1, 512, dtype="bfloat16"))
    with jt.config(arch="sm_90", interpret=True):
        x0 = (x.astype(np.float32) * np.float32(1 if np.isinf(scale) else scale)).astype(jnp.bfloat16)
        if np.isinf(scale):
            x0[0, 3] = scale
        y = evaluated(lambda x: hopper_gemv.product(x, (weight,), kind=kind))(x0)
    if np.isinf(scale):
        assert not np.isfinite(y).any()
    else:
        want = x0.astype(np.float32) @ np.asarray(matrix).T
        assert float(abs(y - want).max()) <= 1e-3 * scale


@pytest.mark.parametrize(
    ("kind", "instruction", "scale"),
    [("q4_0", "IMMA.16832.S8.U8", ((16, 32), jnp.float16)), ("fp8", "HMMA.16816.F32", ((16, 1), jnp.float32))],
)
def test_what_it_compiles_to(kind, instruction, scale):
    """The words come from shared memory 16 bytes at a time, and go to the tensor cores as they are."""
    sd, n = jax.ShapeDtypeStruct, 128 // hopper_gemv.bits_of(kind)
    weight, x = Weight(sd((16, 1024 * 4 // n), jnp.uint32), sd(*scale)), sd((1, 1024 // n, n), jnp.bfloat16)
    options = dict(kind=kind, activation=None, out_dtype="bfloat16", rows=8, roles=1, slots=2)
    kernel = hopper_gemv.kernel((weight,), NO_EPILOGUE)
    sass = kernel.lower(x, (weight,), NO_EPILOGUE, target="cuda:sm_90", **options).texts["sass"]
    assert sass.count(instruction) == {"q4_0": 8, "fp8": 16}[kind]
    assert "LDS.128" in sass and "IDP" not in sass
