"""One or two rows of x times a small matrix that is held in registers, at the block level, by the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal, stored_weight

import jtile as jt
from jtile.ops import hopper_gemv, hopper_held
from jtile.ops.operands import NO_EPILOGUE, Epilogue, Norm, Weight
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

CASES = {  # kind, rows of x, out, in
    "q4_1": ("q4_1", 1, 22, 576),
    "q4_0, two pieces": ("q4_0", 2, 12, 1536),
    "q8_0": ("q8_0", 1, 8, 288),
    "int8": ("int8", 1, 8, 320),
    "bfloat16": ("bfloat16", 1, 12, 520),
    "fp8, half a piece": ("fp8", 1, 8, 288),
}


@pytest.mark.parametrize("case", CASES)
def test_products(case):
    kind, m, out, inner = CASES[case]
    x, residual = (np.asarray(normal(seed, m, inner, dtype="bfloat16")) for seed in (2, 3))
    (weight, matrix), (up, second) = (stored_weight(kind, out, inner, seed) for seed in (1, 4))
    norm, bias = 1 + np.asarray(normal(5, inner)) / 4, np.asarray(normal(6, 1, out))
    with jt.config(arch="sm_90", interpret=True, overlap=True):
        assert hopper_gemv.misfit(x, weight, kind) is None
        epilogue, of = Epilogue(bias, np.ones((m, out), np.float32)), dict(kind=kind, activation="relu")
        normed = lambda x: hopper_gemv.normed_product(x, (weight, up), Norm(norm, residual), eps=1e-2, **of)
        assert "hopper_norm_held" in str(jax.make_jaxpr(normed)(x))
        y, (z, total) = evaluated(lambda x: (hopper_gemv.product(x, (weight,), epilogue, **of), normed(x)))(x)
    x, residual = x.astype(np.float32), residual.astype(np.float32)
    assert relative_error(y, np.maximum(x @ np.asarray(matrix).T + bias, 0) + 1) < 2e-6
    s = x + residual
    np.testing.assert_array_equal(np.asarray(total), s.astype(jnp.bfloat16))
    normed = s / np.sqrt((s * s).mean(1, keepdims=True) + 1e-2) * norm
    assert relative_error(z, np.maximum(normed @ np.asarray(matrix).T, 0) * (normed @ np.asarray(second).T)) < 4e-6


def test_what_a_ring_says_to_caches():
    """Matrices are read once: caches may forget them first."""
    weight = Weight(jax.ShapeDtypeStruct((16, 512), jnp.bfloat16))
    options = dict(kind="bfloat16", activation=None, out_dtype="bfloat16", rows=8, roles=1, slots=2)
    kernel, x = hopper_gemv.kernel((weight,), NO_EPILOGUE), jax.ShapeDtypeStruct((1, 64, 8), jnp.bfloat16)
    ptx = kernel.lower(x, (weight,), NO_EPILOGUE, target="cuda:sm_90", **options).texts["ptx"]
    assert ptx.count("L2::cache_hint") == ptx.count("cp.async.bulk.tensor") == 4


def test_which_matrices():
    """Those that all multiprocessors hold at once, where kernels overlap."""
    kinds = {kind: hopper_held.rows_of(1, 576, 576, kind, False, 132) for kind in ("q4_1", "q8_0", "bfloat16")}
    assert all(kinds.values())
    assert hopper_held.rows_of(1, 49152, 576, "q4_1", False, 132) is None
    assert hopper_held.rows_of(1, 4096, 4096, "q4_1", False, 132) is None
    assert hopper_held.rows_of(3, 576, 576, "q4_1", False, 132) is None
    x, w = np.zeros((1, 576), jnp.bfloat16), Weight(np.zeros((576, 576), jnp.bfloat16))
    with jt.config(arch="sm_90"):
        assert hopper_held.choice(x, (w,), "bfloat16") is None
        with jt.config(overlap=True):
            assert hopper_held.choice(x, (w,), "bfloat16")
            eight = Weight(np.zeros((576, 144), np.uint32), np.zeros((576, 1), np.float32))
            assert hopper_held.choice(x, (eight,), "fp8")
            assert hopper_held.choice(x.astype(np.float32), (w,), "bfloat16") is None


def test_what_it_compiles_to():
    """Nothing goes through shared memory and barriers; codes come before the wait, x behind it, a word a lane."""
    sd = jax.ShapeDtypeStruct
    weight = Weight(sd((64, 72), jnp.uint32), *[sd((64, 18), jnp.float16)] * 2)
    options = dict(kind="q4_1", activation=None, out_dtype="bfloat16", rows=8)
    with jt.config(overlap=True):
        kernel = hopper_held.kernel(3, False, False)
        lowered = kernel.lower(sd((1, 18, 32), jnp.bfloat16), (weight,), NO_EPILOGUE, target="cuda:sm_90", **options)
    ptx = lowered.texts["ptx"]
    _, behind = ptx.split("griddepcontrol.wait")
    assert "shared" not in behind and "bar.sync" not in behind and "ld.global.b16" not in behind
    assert behind.count("ld.global.b32") == 12  # 18 blocks of four words are three strips, of four pairs of x


def test_words_behind_the_end_of_a_row():
    """They are not converted: ptxas makes NaN of the upper half of a word of 8-bit floats that it knows to be zero."""
    sd, options = jax.ShapeDtypeStruct, dict(kind="fp8", activation="silu", out_dtype="bfloat16", rows=4, eps=1e-5)
    weight, x = Weight(sd((16, 72), jnp.uint32), sd((16, 1), jnp.float32)), sd((1, 18, 16), jnp.bfloat16)
    with jt.config(overlap=True):
        kernel = hopper_held.normed_kernel(4)
        lowered = kernel.lower(x, (weight,) * 2, Norm(sd((18, 16), jnp.float32), x), target="cuda:sm_90", **options)
    sass = lowered.texts["sass"]
    assert "E4M3" in sass and "QNAN" not in sass
