"""Reverse mode of softmax, norms, cross-entropy and gates: against `jax.vjp` of the references, and differences."""

import jax
import numpy as np
import pytest
from library import FLOATS, differences_agree, gradients_agree, integers, normal

import jtile as jt
from jtile import ops
from jtile.ops.activations import geglu_reference, swiglu_reference
from jtile.ops.elementwise import bias_gelu_residual_reference
from jtile.ops.losses import cross_entropy_reference, cross_entropy_rows
from jtile.ops.norms import layer_norm_reference, rms_norm_reference
from jtile.ops.softmaxes import log_softmax_reference, softmax_reference
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

SOFTMAXES = [(ops.softmax, softmax_reference), (ops.log_softmax, log_softmax_reference)]
LABELS = np.array(integers(1, 0, 100, 37))
LABELS[[3, 5, 6]] = -100, 100, 7
LOSSES = [{}, {"label_smoothing": 0.1}, {"ignore": None}, {"ignore": 7}]


@pytest.mark.parametrize(("op", "reference"), SOFTMAXES)
@pytest.mark.parametrize(
    ("shape", "axis"), [((33, 300), -1), ((5, 700), 1), ((3, 5000), -1), ((3, 50, 40), 1), ((7,), 0)]
)
def test_softmax(op, reference, shape, axis):
    gradients_agree(op, reference, 3 * np.asarray(normal(0, *shape)), axis=axis)


@pytest.mark.parametrize(("op", "reference"), SOFTMAXES)
@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_softmax_of_16_bits(op, reference, dtype):
    gradients_agree(op, reference, normal(0, 9, 700, dtype=dtype))


@pytest.mark.parametrize("op", [ops.softmax, ops.log_softmax])
def test_softmax_differences(op):
    with jax.enable_x64(True):
        differences_agree(op, normal(0, 5, 40))
        differences_agree(op, normal(0, 3, 9, 8), axis=1)


@pytest.mark.parametrize("options", LOSSES, ids=str)
def test_cross_entropy(options):
    logits = 5 * np.asarray(normal(0, 37, 100))
    gradients_agree(ops.cross_entropy, cross_entropy_reference, logits, LABELS, of=1, **options)


@pytest.mark.parametrize("dtype", FLOATS)
def test_cross_entropy_of_a_large_vocabulary(dtype):
    logits, labels = normal(0, 2, 3, 20000, dtype=dtype), integers(1, 0, 20000, 2, 3)
    gradients_agree(ops.cross_entropy, cross_entropy_reference, logits, labels, of=1)


def test_cross_entropy_differences():
    with jax.enable_x64(True):
        differences_agree(ops.cross_entropy, normal(0, 37, 100), np.where(LABELS == 100, 0, LABELS), of=1)


def test_rows_whose_loss_does_not_depend_on_the_logits_have_no_gradient():
    gradient = evaluated(jax.grad(lambda x: ops.cross_entropy(x, np.array([-100, 1, 9], np.int32)).sum()))(
        np.array([[np.inf, np.nan, 0.0], [0.0, 1.0, -np.inf], [0.0, 1.0, 2.0]], np.float32)
    )
    assert not np.asarray(gradient)[[0, 2]].any()
    expected = [1 / (1 + np.e), np.e / (1 + np.e) - 1, 0]
    np.testing.assert_allclose(gradient[1], expected, rtol=1e-6)


def test_the_log_sum_exp_of_a_row_has_a_cotangent():
    x = normal(0, 9, 50)
    meta = {"br": 4, "bv": 32, "ignore": None, "smoothing": 0.0, "save": True}
    ours = lambda x: cross_entropy_rows(x, LABELS[10:19], **meta)
    gradients_agree(ours, lambda x: (cross_entropy_reference(x, LABELS[10:19]), jax.nn.logsumexp(x, -1)), x)


NORMS = {
    "rms": (ops.rms_norm, rms_norm_reference, 2, {}),
    "rms of Gemma": (ops.rms_norm, rms_norm_reference, 2, {"weight_offset": 1.0, "eps": 0.1}),
    "layer": (ops.layer_norm, layer_norm_reference, 3, {}),
    "layer without bias": (ops.layer_norm, layer_norm_reference, 2, {"eps": 0.1}),
    "layer without both": (ops.layer_norm, layer_norm_reference, 1, {}),
}
BIAS_ONLY = [lambda x, b, f=f: f(x, None, b) for f in (ops.layer_norm, layer_norm_reference)]
RESIDUAL = [lambda x, w, r, f=f: f(x, w, residual=r) for f in (ops.rms_norm, rms_norm_reference)]


def of_norm(count: int, dtype="float32"):
    return (normal(0, 7, 33, 130, dtype=dtype), *(normal(s, 130, dtype=dtype) for s in (1, 2)))[:count]


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    op, reference, count, options = NORMS[name]
    gradients_agree(op, reference, *of_norm(count), **options)


@pytest.mark.parametrize("name", ["rms", "layer"])
@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_norms_of_16_bits(name, dtype):
    op, reference, count, options = NORMS[name]
    gradients_agree(op, reference, *of_norm(count, dtype), **options)


def test_norms_of_sums_and_with_a_bias_only():
    gradients_agree(*BIAS_ONLY, *of_norm(2))
    x, w = map(np.asarray, of_norm(2, "bfloat16"))
    gradients_agree(*RESIDUAL, x, w, normal(3, *x.shape))
    gradients_agree(*RESIDUAL, *(np.asarray(v, np.float32) for v in (x[0, :1], w)), normal(3, 1, 130))


@pytest.mark.parametrize("name", ["rms", "layer"])
def test_norm_differences(name):
    op, _, count, options = NORMS[name]
    with jax.enable_x64(True):
        differences_agree(op, normal(0, 5, 12), *(normal(s, 12) for s in range(1, count)), **options)


def test_norms_under_vmap_and_twice():
    x, w = normal(0, 3, 5, 24), normal(1, 24)
    loss = lambda op: lambda x, w: (op(x, w) ** 3).sum()
    for way in (
        lambda f: jax.vmap(jax.grad(f, (0, 1)), (0, None)),
        lambda f: jax.grad(lambda x, w: jax.vmap(f, (0, None))(x, w).sum(), (0, 1)),
        lambda f: jax.grad(lambda x, w: sum((s**2).sum() for s in jax.grad(f, (0, 1))(x, w)), (0, 1)),
    ):
        got, expected = (evaluated(way(loss(op)))(x, w) for op in (ops.rms_norm, rms_norm_reference))
        assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_gates(dtype):
    g, u, b = normal(0, 9, 70, dtype=dtype), normal(1, 9, 70, dtype=dtype), normal(2, 70, dtype=dtype)
    gradients_agree(ops.swiglu, swiglu_reference, g, u)
    gradients_agree(ops.swiglu, swiglu_reference, g)
    gradients_agree(ops.geglu, geglu_reference, g, u, approximate=False)
    gradients_agree(ops.bias_gelu_residual, bias_gelu_residual_reference, g, b, u)


def test_in_the_interpreter():
    with jt.config(interpret=True):
        gradients_agree(ops.softmax, softmax_reference, normal(0, 3, 600))
        gradients_agree(ops.rms_norm, rms_norm_reference, normal(0, 9, 20), normal(1, 20))
        gradients_agree(ops.cross_entropy, cross_entropy_reference, normal(0, 3, 10), integers(1, 0, 10, 3), of=1)
