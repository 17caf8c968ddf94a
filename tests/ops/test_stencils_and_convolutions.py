"""Stencils and convolution against jnp and lax."""

import jax
import jax.numpy as jnp
import pytest
from library import agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.convolution_kernels import convolution_tiles, forward_tiles
from jtile.ops.convolutions import convolution_reference
from jtile.ops.stencils import stencil_2d_reference

pytestmark = pytest.mark.usefixtures("by_numpy")

CONVOLUTIONS = [
    ((2, 17, 19, 8), (3, 3, 8, 20), {}),
    ((1, 30, 30, 4), (5, 3, 4, 7), {"stride": 2}),
    ((1, 9, 11, 6), (3, 3, 2, 9), {"groups": 3, "stride": (1, 2), "padding": "VALID"}),
    ((2, 9, 9, 5), (3, 3, 1, 5), {"groups": 5, "dilation": 2}),
    ((1, 4, 4, 3), (5, 5, 3, 2), {"padding": "VALID"}),
    ((1, 7, 8, 3), (1, 1, 3, 300), {"padding": 1}),
    ((1, 6, 5, 2), (2, 2, 2, 3), {"padding": ((0, 1), (2, 0)), "stride": (3, 1)}),
    ((0, 6, 5, 2), (2, 2, 2, 3), {}),
    ((1, 6, 5, 0), (2, 2, 0, 3), {}),
]


@pytest.mark.parametrize("boundary", ["zero", "edge", "wrap", "reflect", "valid"])
def test_stencil_boundaries(boundary):
    for shape, sides in (((70, 90), (3, 3)), ((2, 3, 5, 7), (1, 5)), ((1, 1), (3, 3)), ((0, 4), (3, 3))):
        x, weights = normal(0, *shape), normal(1, *sides)
        agree(ops.stencil_2d, stencil_2d_reference, x, weights, boundary=boundary, interpret=len(shape) == 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stencil_dtypes(dtype):
    agree(ops.stencil_2d, stencil_2d_reference, normal(0, 33, 40, dtype=dtype), normal(1, 3, 5))


def test_stencil_errors():
    x = jnp.zeros((4, 4))
    for problem, args, kw in [
        ("odd sides", (x, jnp.zeros((2, 3))), {}),
        ("boundary is one of", (x, jnp.zeros((3, 3))), {"boundary": "torus"}),
        (r"weights is \[p, q\]", (x, jnp.zeros(3)), {}),
        (r"x is \[\.\.\., m, n\]", (x[0], jnp.zeros((3, 3))), {}),
    ]:
        with pytest.raises(KernelValueError, match=problem):
            ops.stencil_2d(*args, **kw)
    assert ops.stencil_2d(x, jnp.zeros((2, 2)), boundary="valid").shape == (3, 3)


@pytest.mark.parametrize(("shape", "window", "options"), CONVOLUTIONS, ids=str)
def test_convolution(shape, window, options):
    x, weight = normal(0, *shape), normal(1, *window)
    agree(ops.convolution, convolution_reference, x, weight, interpret=x.size < 2000, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_convolution_dtypes(dtype):
    x, weight = normal(0, 1, 9, 9, 32, dtype=dtype), normal(1, 3, 3, 32, 8, dtype=dtype)
    agree(ops.convolution, convolution_reference, x, weight)


@pytest.mark.parametrize(("arch", "target"), [("sm_90", "cuda:sm_90"), ("gfx942", "rocm:gfx942")])
def test_channels_that_no_tile_divides_compile_for_gpus(arch, target):
    """300 channels at once, as many as 512, are more float32 than a block has memory."""
    pytest.importorskip("triton")
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 6, 5, 300), (1, 1, 300, 200)))
    with jt.config(arch=arch):
        tiles = forward_tiles(6, 5, 300, 200, 4)
    options = {"stride": (1, 1), "dilation": (1, 1), "groups": 1}
    assert convolution_tiles.lower(x, w, **tiles, **options, target=target).image


def test_convolution_errors():
    x, weight = jnp.zeros((1, 4, 4, 6)), jnp.zeros((3, 3, 6, 4))
    for problem, args, kw in [
        ("4 groups do not divide", (x, weight), {"groups": 4}),
        ("weight has shape", (x, weight), {"groups": 2}),
        ("padding is", (x, weight), {"padding": "FULL"}),
        (r"padding \(-3, -2\) takes away more than the 4 points", (x, weight), {"padding": ((-3, -2), (0, 0))}),
        ("stride is a positive int", (x, weight), {"stride": 0}),
        ("x is", (x[0, 0], weight), {}),
        ("as many axes", (x[0], weight), {}),
        ("a pair for each", (x, weight), {"padding": ((0, 0),)}),
    ]:
        with pytest.raises(KernelValueError, match=problem):
            ops.convolution(*args, **kw)
    with pytest.raises(KernelTypeError, match="one dtype"):
        ops.convolution(x, weight.astype(jnp.bfloat16))
