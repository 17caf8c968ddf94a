"""Reverse mode of convolutions, stencils, scans, sorting, rotary embedding and transposition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import differences_agree, gradients_agree, normal

from jtile import ops
from jtile.ops.convolutions import convolution_reference
from jtile.ops.layout import transpose_reference
from jtile.ops.rotary import rope_reference
from jtile.ops.scans import cumsum_reference
from jtile.ops.sorting import sort_reference, top_k_reference
from jtile.ops.stencils import stencil_2d_reference
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

CONVOLUTIONS = {
    "same": {},
    "strided": {"stride": 2},
    "valid": {"padding": "VALID", "stride": (2, 3)},
    "dilated": {"dilation": 2, "padding": 1},
    "with points that no window meets": {"stride": (4, 6), "dilation": (3, 4), "padding": "VALID"},
    "grouped": {"groups": 3, "stride": 2, "dilation": (1, 2)},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name):
    options = CONVOLUTIONS[name]
    x, w = normal(0, 2, 13, 17, 12), normal(1, 3, 2, 12 // options.get("groups", 1), 21)
    gradients_agree(ops.convolution, convolution_reference, x, w, **options)


def test_convolution_of_16_bits_and_of_many_channels():
    x, w = normal(0, 1, 9, 5, 12, dtype="bfloat16"), normal(1, 3, 3, 12, 20, dtype="bfloat16")
    gradients_agree(ops.convolution, convolution_reference, x, w)
    gradients_agree(ops.convolution, convolution_reference, normal(0, 1, 6, 5, 300), normal(1, 1, 1, 300, 200))


def test_convolution_differences():
    with jax.enable_x64(True):
        differences_agree(ops.convolution, normal(0, 1, 6, 5, 4), normal(1, 3, 2, 2, 4), groups=2, stride=2)


def test_convolution_under_vmap_and_twice():
    x, w = normal(0, 2, 1, 5, 6, 3), normal(1, 3, 3, 3, 4)
    loss = lambda op: lambda x, w: (op(x, w) ** 2).sum()
    for way in (
        lambda f: jax.vmap(jax.grad(f, (0, 1)), (0, None)),
        lambda f: jax.grad(lambda x, w: (jax.grad(f)(x[0], w) ** 2).sum(), (0, 1)),
    ):
        got, expected = (evaluated(way(loss(op)))(x, w) for op in (ops.convolution, convolution_reference))
        assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("boundary", ["zero", "edge", "wrap", "reflect", "valid"])
def test_stencil(boundary):
    gradients_agree(ops.stencil_2d, stencil_2d_reference, normal(0, 2, 33, 70), normal(1, 3, 5), boundary=boundary)


def test_stencil_of_16_bits_and_differences():
    gradients_agree(
        ops.stencil_2d, stencil_2d_reference, normal(0, 40, 30, dtype="bfloat16"), normal(1, 3, 3, dtype="bfloat16")
    )
    with jax.enable_x64(True):
        differences_agree(ops.stencil_2d, normal(0, 6, 5), normal(1, 3, 3), boundary="wrap")


@pytest.mark.parametrize(
    ("axis", "reverse", "dtype"), [(0, False, "float32"), (-1, True, "float32"), (1, False, "bfloat16")]
)
def test_cumsum(axis, reverse, dtype):
    gradients_agree(ops.cumsum, cumsum_reference, normal(0, 7, 30, 50, dtype=dtype), axis=axis, reverse=reverse)


def test_transpose():
    gradients_agree(ops.transpose, transpose_reference, normal(0, 3, 50, 70, dtype="bfloat16"))


@pytest.mark.parametrize("descending", [False, True])
def test_sort(descending):
    gradients_agree(ops.sort, sort_reference, normal(0, 9, 70), descending=descending)


@pytest.mark.parametrize("k", [3, 40, 70])
def test_top_k(k):
    values = [lambda x, f=f: f(x, k)[0] for f in (ops.top_k, top_k_reference)]
    gradients_agree(*values, normal(0, 9, 70))
    gradients_agree(*values, normal(0, 9, 70, dtype="bfloat16"))


def test_integers_have_no_gradient():
    x = normal(0, 4, 9)
    for op in (
        ops.argmax,
        ops.argsort,
        lambda x: ops.largest(x, 2),
        lambda x: ops.top_k(x, 2)[1],
        lambda x: ops.histogram(x, bins=3, range=(-1.0, 1.0)),
    ):
        gradient = evaluated(jax.grad(lambda x, op=op: op(x).astype(jnp.float32).sum() + x.sum()))(x)
        np.testing.assert_array_equal(gradient, np.ones(x.shape))


@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"rotary_dim": 8}], ids=str)
def test_rope(options):
    x = normal(0, 2, 40, 4, 16)
    gradients_agree(ops.rope, rope_reference, x, **options)
    gradients_agree(
        ops.rope, rope_reference, x, normal(1, 40, 4), normal(2, 40, 4), interleaved="interleaved" in options
    )


def test_rope_frequencies_and_tables_of_each_row():
    x, positions = normal(0, 2, 10, 3, 8), np.arange(20, dtype=np.int32).reshape(2, 10)
    by_frequency = [
        lambda x, f, op=op: op(x, positions=positions, inverse_frequencies=f) for op in (ops.rope, rope_reference)
    ]
    gradients_agree(*by_frequency, x, np.abs(normal(1, 4)))
    gradients_agree(ops.rope, rope_reference, np.asarray(x, jnp.bfloat16), normal(1, 2, 10, 4), normal(2, 2, 10, 4))
    with jax.enable_x64(True):
        differences_agree(ops.rope, x, normal(1, 10, 4), normal(2, 10, 4))
