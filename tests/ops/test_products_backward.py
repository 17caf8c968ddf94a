"""Reverse mode of matmul, the gated MLP and products with quantised weights."""

import jax
import numpy as np
import pytest
from draws import thorough
from library import differences_agree, gradients_agree, normal

from jtile import ops
from jtile.ops.embeddings import embedding_reference
from jtile.ops.gated_mlp import gated_mlp_reference
from jtile.ops.matmul import matmul_reference
from jtile.ops.quantized import quantized_matmul_reference
from jtile.ops.quantized_tensor import KINDS
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

MOST = KINDS if thorough() else KINDS[:-1]  # mxfp4 differs in what a code is


def operands(m: int, n: int, k: int, dtype: str = "float32", ta: bool = False, tb: bool = False, batch=()):
    a = normal(0, *batch, *((k, m) if ta else (m, k)), dtype=dtype)
    return a, normal(1, *batch, *((n, k) if tb else (k, n)), dtype=dtype)


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matmul(dtype, ta, tb):
    a, b = operands(33, 70, 45, dtype, ta, tb, batch=(2,))
    gradients_agree(ops.matmul, matmul_reference, a, b, transpose_a=ta, transpose_b=tb)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_matmul_epilogues(activation):
    ours, theirs = (lambda a, b, c, f=f: f(a, b, bias=c, activation=activation) for f in (ops.matmul, matmul_reference))
    gradients_agree(ours, theirs, *operands(9, 20, 16), normal(2, 20))


def test_matmul_of_narrow_operands_into_wide_ones():
    ours, theirs = (
        lambda a, b, c, f=f: f(a, b, bias=c, activation="silu", out_dtype="float32")
        for f in (ops.matmul, matmul_reference)
    )
    gradients_agree(ours, theirs, *operands(9, 20, 16, "bfloat16"), normal(2, 20))


def test_matmul_batches_and_one_weight_for_all():
    a = normal(0, 2, 3, 11, 16)
    gradients_agree(ops.matmul, matmul_reference, a, normal(1, 2, 3, 16, 9))
    gradients_agree(ops.matmul, matmul_reference, a, normal(1, 16, 9))
    turned = a.swapaxes(-1, -2)
    gradients_agree(ops.matmul, matmul_reference, turned, normal(1, 16, 9), transpose_a=True)
    gradients_agree(ops.matmul, matmul_reference, turned, normal(1, 9, 16), transpose_a=True, transpose_b=True)


@pytest.mark.parametrize(("a", "b"), [((0, 4), (4, 5)), ((3, 0), (0, 5)), ((3, 4), (4, 0))])
def test_matmul_of_nothing(a, b):
    gradients = evaluated(jax.grad(lambda a, b: ops.matmul(a, b).sum(), (0, 1)))
    for x, gradient in zip((a, b), gradients(np.ones(a, np.float32), np.ones(b, np.float32))):
        np.testing.assert_array_equal(gradient, np.zeros(x))


def test_matmul_differences():
    with jax.enable_x64(True):
        differences_agree(ops.matmul, *operands(7, 9, 5), activation="gelu")


def test_matmul_under_vmap_and_twice():
    a, b = normal(0, 3, 5, 8), normal(1, 8, 7)
    loss = lambda op: lambda a, b: (op(a, b, activation="silu") ** 2).sum()
    for way in (
        lambda f: jax.vmap(jax.grad(f, (0, 1)), (0, None)),
        lambda f: jax.grad(lambda a, b: jax.vmap(f, (0, None))(a, b).sum(), (0, 1)),
        lambda f: jax.grad(lambda a, b: sum((s**2).sum() for s in jax.grad(f, (0, 1))(a[0], b)), (0, 1)),
    ):
        got, expected = (evaluated(way(loss(op)))(a, b) for op in (ops.matmul, matmul_reference))
        assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize(("dtype", "transpose"), [("float32", False), ("float32", True), ("bfloat16", True)])
def test_gated_mlp(dtype, transpose):
    gate, up = (normal(s, *((101, 40) if transpose else (40, 101)), dtype=dtype) for s in (1, 2))
    x = normal(0, 3, 7, 40, dtype=dtype)
    gradients_agree(ops.gated_mlp, gated_mlp_reference, x, gate, up, transpose=transpose, activation="silu")


def test_gated_mlp_differences_and_nothing():
    with jax.enable_x64(True):
        differences_agree(ops.gated_mlp, normal(0, 5, 6), normal(1, 6, 9), normal(2, 6, 9), activation="gelu")
    x, w = np.ones((0, 4), np.float32), np.ones((4, 5), np.float32)
    gradient = evaluated(jax.grad(lambda w: ops.gated_mlp(x, w, w).sum()))(w)
    np.testing.assert_array_equal(gradient, np.zeros((4, 5)))


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("m", [1, 5])
def test_quantized_matmul(kind, m):
    weight = ops.quantize(normal(0, 101, 1056), kind)  # three chunks of columns
    ours, theirs = (
        lambda x, b, r, f=f: f(x, weight, bias=b, activation="silu", residual=r)
        for f in (ops.quantized_matmul, quantized_matmul_reference)
    )
    gradients_agree(
        ours, theirs, normal(1, m, 1056), normal(2, 101), normal(3, m, 101), tolerance=1e-5
    )  # silu of long sums


@pytest.mark.parametrize(("kind", "m"), [("q4_1", 1), ("q8_0", 5)])
def test_quantized_gated_mlp(kind, m):
    gate, up = (ops.quantize(normal(s, 96, 64), kind) for s in (0, 1))
    gradients_agree(ops.gated_mlp, gated_mlp_reference, normal(2, m, 64), gate, up, of=1, activation="gelu")


def test_quantized_weights_are_frozen():
    weight = ops.quantize(normal(0, 32, 64), "q4_1")
    for op in (
        lambda w: ops.quantized_matmul(normal(1, 3, 64), w),
        lambda w: ops.gated_mlp(normal(1, 3, 64), w, w),
        lambda w: ops.embedding(w, np.array([1, 2], np.int32)),
    ):
        gradients = evaluated(jax.grad(lambda w, op=op: op(w).sum(), allow_int=True))(weight)
        assert not np.asarray(gradients.scale).any()
        f = lambda s, op=op: op(type(weight)(weight.codes, s, weight.minimum, "q4_1"))
        pushed = evaluated(lambda s, f=f: jax.jvp(f, (s,), (s,)))(weight.scale)
        assert not np.asarray(pushed[1]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding(dtype):
    ids = np.array([[3, 5, 3], [29, -1, 30]], np.int32)
    gradients_agree(ops.embedding, embedding_reference, normal(0, 30, 200, dtype=dtype), ids, of=1)
    gradients_agree(ops.embedding, embedding_reference, normal(0, 30, 7, dtype=dtype), ids.astype(np.int8), of=1)
