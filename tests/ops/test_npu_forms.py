"""What the library does on an NPU, run in the interpreter: tiles and kernels that its vector cores have room for, and
that its compiler translates. What they compile to is in `tests/lowering/ascend`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile import ops
from jtile.ops import _shapes, convolutions, elementwise, norms, norms_backward, quantized
from jtile.ops.grouped_matmul import grouped_matmul_reference
from jtile.ops.rwkv import rwkv7_reference
from jtile.ops.state_space import selective_scan_reference
from jtile.testing import relative_error

pytestmark = pytest.mark.usefixtures("by_numpy")

GROUPS = np.asarray([5, 0, 9, 2], np.int32)
WEIGHT = ops.QuantizedTensor.quantize(normal(1, 24, 64), "q4_0")


def grouped(fn):
    return lambda x, w: fn(x, w, GROUPS)


CASES = {
    "bias_gelu_residual": (ops.bias_gelu_residual, elementwise.bias_gelu_residual_reference, (3, 21), (21,), (3, 21)),
    "rms_norm, long": (ops.rms_norm, norms.rms_norm_reference, (5, 53), (53,)),
    "layer_norm": (ops.layer_norm, norms.layer_norm_reference, (50, 14), (14,), (14,)),
    "layer_norm, long": (ops.layer_norm, norms.layer_norm_reference, (11, 53), (53,), (53,)),
    "grouped_matmul": (grouped(ops.grouped_matmul), grouped(grouped_matmul_reference), (18, 10), (4, 10, 12)),
    "rwkv7": (ops.rwkv7, rwkv7_reference, *[(1, 7, 2, 3)] * 6),
    "selective_scan": (
        ops.selective_scan, selective_scan_reference, (1, 7, 5), (1, 7, 5), (5, 3), (1, 7, 3), (1, 7, 3)
    ),
    "convolution": (ops.convolution, convolutions.convolution_reference, (1, 6, 19, 4), (3, 3, 4, 5)),
    "quantized_matmul": (
        lambda x: ops.quantized_matmul(x, WEIGHT), lambda x: quantized.quantized_matmul_reference(x, WEIGHT), (1, 64)
    ),
}  # fmt: skip


@pytest.fixture
def little(monkeypatch):
    """Vector cores with room for a few numbers."""
    monkeypatch.setattr(_shapes, "_NPU", dataclasses.replace(_shapes._NPU, tile=32, sums=3))
    monkeypatch.setattr(norms_backward, "_IN_CORE", 32)


@pytest.mark.parametrize("name", CASES)
def test_equal_results_and_gradients(name, little):
    op, reference, *shapes = CASES[name]
    args = [normal(k, *shape) for k, shape in enumerate(shapes)]
    g = normal(9, *jax.eval_shape(reference, *args).shape)
    run = lambda fn: jax.vjp(fn, *args)[1](g)
    want = [reference(*args), *run(reference)]
    with jt.config(arch="910b1", interpret=True):
        got = [op(*args), *run(op)]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, b) <= 3e-6


def test_choices():
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    gradients = lambda x, w: jax.grad(lambda x: ops.rms_norm(x, w).sum())(x)
    with jt.config(arch="910b1"):
        found = [ops.choices(gradients, f32(8, n), f32(n))[-1].implementation for n in (4096, 4104)]
    assert found == ["sums in a vector core", "rows in blocks"]
