"""Convolutions of one and three axes, of few channels, depthwise, and transposed ones; those of two axes are in
test_stencils_and_convolutions.py."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.convolution_points import depthwise_rows
from jtile.ops.convolutions import convolution_reference, convolution_transpose_reference

pytestmark = pytest.mark.usefixtures("by_numpy")


def both(op, reference, options):
    return functools.partial(op, **options), functools.partial(reference, **options)


CONVOLUTIONS = {
    "one axis": ((2, 9, 4), (3, 4, 5), {"stride": 2}),
    "three axes": ((1, 5, 6, 7, 20), (3, 3, 2, 20, 6), {"stride": (1, 2, 1), "padding": "VALID"}),
    "three axes, groups": ((1, 3, 4, 5, 4), (2, 1, 2, 2, 4), {"groups": 2}),
    "few channels": ((2, 9, 9, 3), (5, 5, 3, 6), {"stride": 2, "dilation": (2, 1)}),
    "few channels, three axes": ((1, 4, 4, 5, 2), (2, 3, 3, 2, 3), {"stride": (2, 1, 2)}),
    "points taken away": ((1, 7, 8, 3), (2, 2, 3, 4), {"padding": ((-2, 1), (0, -1))}),
    "depthwise": ((1, 8, 9, 6), (3, 3, 1, 6), {"groups": 6, "stride": 2}),
    "depthwise, strides": ((2, 11, 9, 6), (3, 4, 1, 6), {"groups": 6, "stride": (2, 3), "padding": ((1, 0), (2, 1))}),
    "depthwise, one axis": ((2, 19, 6), (4, 1, 6), {"groups": 6, "padding": ((3, 0),)}),
    "depthwise, one axis, a stride": ((2, 19, 6), (4, 1, 6), {"groups": 6, "stride": 3}),
    "depthwise, three axes": ((1, 4, 5, 6, 5), (2, 3, 1, 1, 5), {"groups": 5, "dilation": (1, 2, 1)}),
}


@pytest.mark.parametrize("arch", [None, "sm_90"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name, arch):
    shape, window, options = CONVOLUTIONS[name]
    op, reference = both(ops.convolution, convolution_reference, options)
    with jt.config(arch=arch):
        x, w = normal(0, *shape), normal(1, *window)
        agree(op, reference, x, w, tolerance=2e-6, interpret=arch is None and "channels" in name)
        if (name.startswith("depthwise") and name != "depthwise, three axes") or (arch is None) == (
            name in ("one axis", "few channels", "depthwise")
        ):
            gradients_agree(op, reference, x, w)


NEIGHBOURS = {
    "stride and gaps": ((2, 9, 8, 16), (3, 3, 16, 24), {"stride": (2, 1), "dilation": (1, 2)}),
    "three axes": ((1, 4, 5, 6, 32), (3, 2, 3, 32, 16), {}),
    "remainders together": ((2, 9, 8, 16), (5, 4, 16, 16), {"stride": (1, 2)}),
    "few channels": ((2, 9, 8, 3), (5, 4, 3, 16), {"stride": 2}),
    "few channels, three axes": ((1, 4, 5, 6, 5), (2, 3, 2, 5, 16), {"dilation": (1, 2, 1)}),
    "few outputs": ((1, 6, 5, 16), (3, 2, 16, 3), {"padding": ((-1, 2), (1, 0))}),
    "one point": ((2, 3, 5, 16), (1, 1, 16, 32), {}),
    "by rows": ((2, 9, 7, 6), (3, 5, 1, 6), {"groups": 6}),
    "by rows, padded by hand": ((1, 6, 5, 4), (2, 2, 1, 4), {"groups": 4, "padding": ((0, 2), (1, 0))}),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbouring_points_of_a_gpu(name):
    shape, window, options = NEIGHBOURS[name]
    op, reference = both(ops.convolution, convolution_reference, options)
    x, w = (normal(k, *s).astype(jnp.float16) for k, s in enumerate((shape, window)))
    with jt.config(arch="sm_90"):
        agree(op, reference, x, w, tolerance=2e-3)
        gradients_agree(op, reference, x, w, tolerance=4e-3)


def test_rows_behind_the_end_of_a_plane_are_not_written():
    """By the interpreter, which refuses them: they would be the next plane's."""
    x, w = (np.asarray(normal(k, *s)) for k, s in enumerate(((2, 5, 7, 3), (3, 2, 1, 3))))
    pads = (1, 1), (0, 1)
    y = depthwise_rows.interpret(x.reshape(2, 5, 21), w, bh=3, bn=8, pads=pads, stride=(1, 1)).reshape(2, 5, 7, 3)
    agree(lambda *_: y, functools.partial(convolution_reference, groups=3, padding=pads), x, w)


@pytest.mark.usefixtures("on_the_cpu")
def test_what_computes_a_convolution():
    def of(shape, window, dtype=jnp.float32, **o):
        x, w = jnp.zeros(shape, dtype), jnp.zeros(window, dtype)
        return ops.choices(functools.partial(ops.convolution, **o), x, w)[0].implementation

    assert of((1, 9, 9, 3), (3, 3, 3, 4)) == "windows below each other"
    assert of((1, 9, 9, 3), (3, 3, 3, 4), dilation=2) == "points of the window"
    assert of((1, 9, 9, 4), (3, 3, 1, 4), groups=4) == "channels for themselves"
    with jt.config(arch="sm_90"):
        assert of((1, 9, 9, 3), (3, 3, 3, 4)) == "rows of the window"
        assert of((1, 9, 9, 32), (3, 3, 32, 4)) == "points of the window"
        assert of((1, 9, 9, 32), (3, 3, 32, 32), dtype=jnp.bfloat16) == "boxes of points"
        assert of((1, 9, 9, 32), (3, 3, 32, 32), dtype=jnp.bfloat16, stride=2) == "points of the result"
        assert of((1, 9, 9, 4), (3, 3, 1, 4), groups=4) == "channels for themselves, by rows"


TRANSPOSED = [
    ((2, 9, 4), (3, 5, 4), {"stride": 2}),
    ((1, 5, 6, 4), (3, 4, 3, 4), {"stride": (3, 2), "padding": "VALID", "dilation": (1, 2), "groups": 2}),
    ((1, 5, 6, 4), (2, 2, 3, 4), {"stride": 3}),
    ((1, 3, 4, 5, 4), (3, 3, 3, 2, 4), {"stride": 2, "padding": 1}),
]


@pytest.mark.parametrize(("shape", "window", "options"), TRANSPOSED, ids=str)
def test_transposed(shape, window, options):
    pair = both(ops.convolution_transpose, convolution_transpose_reference, options)
    x, w = normal(0, *shape), normal(1, *window)
    agree(*pair, x, w, tolerance=2e-6)
    if len(shape) == 3:
        gradients_agree(*pair, x, w)
    if options.get("padding", "SAME") == "SAME":
        assert pair[0](x, w).shape[1:-1] == tuple(n * options["stride"] for n in shape[1:-1])


@pytest.mark.parametrize("stride", [2, (3, 2)])
def test_transposed_depthwise(stride):
    """By rows, as gradients of depthwise convolutions with strides are; its derivatives are convolutions and sums."""
    options = {"stride": stride, "groups": 6}
    pair = both(ops.convolution_transpose, convolution_transpose_reference, options)
    x, w = normal(0, 2, 5, 4, 6), normal(1, 3, 3, 1, 6)
    with jt.config(arch="sm_90"):
        assert ops.choices(pair[0], x, w)[0].implementation == "channels for themselves, by rows"
        agree(*pair, x, w, tolerance=2e-6)
        gradients_agree(*pair, x, w)


def test_errors():
    x, w = jnp.zeros((1, 4, 4, 6)), jnp.zeros((3, 3, 4, 6))
    for error, match, args, kw in [
        (KernelValueError, "weight has shape", (x, w[..., 1:]), {}),
        (KernelValueError, "4 groups do not divide", (x, w), {"groups": 4}),
        (KernelValueError, "a pair for each of 2 axes", (x, w), {"padding": ((0, 0),)}),
        (KernelValueError, "padding is", (x, w), {"padding": "FULL"}),
        (KernelValueError, "a pair of ints", (x, w), {"padding": ((0, 0.5), (0, 0))}),
        (KernelValueError, "as many axes", (x[0], w), {}),
        (KernelTypeError, "one dtype", (x, w.astype("bfloat16")), {}),
    ]:
        with pytest.raises(error, match=match):
            ops.convolution_transpose(*args, **kw)
    assert ops.convolution_transpose(x[:0], w, stride=2).shape == (0, 8, 8, 4)
    assert ops.convolution_transpose(x[:, :1, :1], w, padding=2).shape == (1, 0, 0, 4)
