"""Products of many rows with weights that are dequantised in front of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.ops import dequantized, quantized
from jtile.ops.operands import Weight
from jtile.ops.quantized_tensor import QuantizedTensor
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "int8", "fp8"])
def test_matrices(kind):
    w = QuantizedTensor.quantize(normal(1, 12, 96), kind)
    p = w.packed()
    got = evaluated(lambda *arrays: dequantized.dequantized([Weight(*arrays)], kind, jnp.float32)[0])
    np.testing.assert_array_equal(got(p.codes, p.scale, p.minimum), evaluated(QuantizedTensor.dequantize)(w))


def test_groups_of_several_blocks():
    w = QuantizedTensor.quantize(normal(1, 8, 2304), "q4_0").packed()
    scale = np.asarray(normal(2, 8, 18))
    got = evaluated(lambda c, s: dequantized.dequantized([Weight(c, s)], "q4_0", jnp.float32)[0])(w.codes, scale)
    codes = evaluated(lambda c: dequantized.dequantized([Weight(c, jnp.ones((8, 1)))], "q4_0", jnp.float32)[0])(w.codes)
    np.testing.assert_allclose(got, np.asarray(codes) * np.repeat(scale, 128, axis=1), rtol=1e-6)


def test_the_ops_call_it():
    w, up = (QuantizedTensor.quantize(normal(seed, 24, 96), "q4_1").packed() for seed in (1, 3))
    x, more = (
        normal(2, 80, 96, dtype="bfloat16"),
        dict(bias=normal(4, 24), activation="silu", residual=normal(5, 80, 24)),
    )
    one = functools.partial(ops.quantized_matmul, weight=w, **more)
    want = functools.partial(quantized.quantized_matmul_reference, weight=w, **more)
    with jt.config(arch="sm_90"):
        assert ops.choices(one, x)[0].implementation == "dequantised, then dense"
        assert ops.choices(ops.gated_mlp, x, w, up)[0].implementation == "dequantised, then dense"
        for few in (x[:5], x.astype(jnp.float32)):
            assert ops.choices(ops.quantized_matmul, few, w)[0].implementation == "codes in lanes"
        stored = [Weight(q.codes, q.scale, q.minimum) for q in (w, up)]
        options = dict(kind="q4_1", activation="silu", out_dtype="float32")
        epilogue = quantized.Epilogue(more["bias"].reshape(1, -1), more["residual"])
        y, z = evaluated(
            lambda x: (
                dequantized.product(x, stored[:1], epilogue, **options),
                dequantized.product(x, stored, quantized.NO_EPILOGUE, **options),
            )
        )(x)
        total = [lambda x, f=f: (f(x) ** 2).sum() for f in (one, want)]
        got, expected = (evaluated(jax.grad(f))(x) for f in total)
    assert relative_error(y, want(x)) < 4e-3  # weights are rounded to bfloat16
    g, u = (quantized.quantized_matmul_reference(x, q) for q in (w, up))
    assert relative_error(z, jax.nn.silu(g) * u) < 6e-3
    assert relative_error(got.astype(np.float32), expected.astype(np.float32)) < 1e-2
