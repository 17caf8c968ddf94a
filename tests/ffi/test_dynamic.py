"""Kernels with dynamic sizes through the handler: sizes from buffers, the grid from the image, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile import ffi

# The vector addition of conftest.py, 256 floats a program, with as many programs as `dims[0]`.
GRID = """
define i64 @jtile_grid(ptr %dims, ptr %sides) {
  %n = load i64, ptr %dims
  store i64 %n, ptr %sides
  ret i64 1
}
"""


@pytest.fixture(scope="module")
def image(emit_object, sources):
    return emit_object(sources["vadd"] + GRID, arch=ffi._run.host_arch())


def add(image, a, b, dims=(0, 0, 0, 256, 1, 0, 0, 256), cost=100):
    ffi.register()
    attrs = {"image": image, "name": "add", "isa": ffi._run.host_arch() + ":", "sites": "[]"}
    numbers = {"programs": np.int64(-1), "workspace": np.int64(0), "cost": np.int64(cost)}
    numbers |= {} if dims is None else {"dims": np.asarray(dims, np.int64)}
    return jax.ffi.ffi_call("jtile_cpu", jax.ShapeDtypeStruct(a.shape, a.dtype))(a, b, **attrs, **numbers)


@pytest.mark.parametrize("cost", [0, 100_000])
def test_one_image_for_every_size(image, cost):
    loaded = ffi.images_loaded()
    for n in (1, 2, 7, 50):
        a, b = jnp.arange(256.0 * n), jnp.ones(256 * n)
        np.testing.assert_array_equal(jax.jit(lambda a, b: add(image, a, b, cost=cost) * 2)(a, b), (a + b) * 2)
    assert ffi.images_loaded() <= loaded + 4  # one a program that is alive


@pytest.mark.parametrize(
    ("a", "b", "dims", "message"),
    [
        (
            512,
            256,
            (0, 0, 0, 256, 1, 0, 0, 256),
            "axis 0 of operand 1 has 256 elements.*the same as another dimension, 512",
        ),
        (300, 300, (0, 0, 0, 256), "axis 0 of operand 0 has 300 elements; it was compiled for a multiple of 256"),
        (256, 256, (0, 1, 0, 256), "it has no axis 1 of operand 0"),
        (256, 256, (2, 0, 0, 256), "it has no axis 0 of operand 2"),
        (256, 256, (0, 0, 0), "its dims are 3 numbers, not fours"),
        (256, 256, (0, 0, 64, 1), "dynamic dimension 0 is damaged, or it has more than 64 symbols"),
        (256, 256, (0, -1, 0, 1), "is damaged"),
        (256, 256, (0, 0, 0, 0), "is damaged"),
        (256, 256, None, "its grid has -1 programs"),
    ],
)
def test_calls_that_do_not_fit_are_refused(image, a, b, dims, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(add(image, jnp.zeros(a), jnp.zeros(b), dims))


def test_an_image_without_a_grid_is_refused(images):
    with pytest.raises(jax.errors.JaxRuntimeError, match="does not compute a grid from dynamic sizes"):
        jax.block_until_ready(add(images["vadd"], jnp.zeros(256), jnp.zeros(256)))


@pytest.mark.parametrize("side", ["-1", "2147483648"])
def test_grids_that_cannot_be_are_refused(emit_object, sources, side):
    grid = f"define i64 @jtile_grid(ptr %dims, ptr %sides) {{\n  store i64 {side}, ptr %sides\n  ret i64 1\n}}\n"
    bad = emit_object(sources["vadd"] + grid, arch=ffi._run.host_arch())
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"axis 0 of its grid has {side} programs"):
        jax.block_until_ready(add(bad, jnp.zeros(256), jnp.zeros(256)))


def test_an_empty_grid(emit_object, sources):
    grid = "define i64 @jtile_grid(ptr %dims, ptr %sides) {\n  store i64 0, ptr %sides\n  ret i64 1\n}\n"
    empty = emit_object(sources["vadd"] + grid, arch=ffi._run.host_arch())
    assert add(empty, jnp.zeros(256), jnp.zeros(256)).shape == (256,)
