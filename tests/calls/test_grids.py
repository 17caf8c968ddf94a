"""Grids of more than three axes, and axes with names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ttir import run_ttir

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.testing import check_kernel

pytestmark = pytest.mark.usefixtures("by_numpy")

X = jax.random.normal(jax.random.key(0), (2, 3, 2, 1, 2, 5))
W = jax.random.normal(jax.random.key(1), (2, 5))


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w: dict(zip("abcde", x.shape[:5], strict=True)))
def five(x, w, o):
    at = [jt.program_id(name) for name in "abcde"]
    o[*at, :] = jnp.sin(x[*at, :]) * w[jt.program_id(2), :] + jt.num_programs("e").astype(x.dtype)


def five_reference(x, w):
    return jnp.sin(x) * w[None, None, :, None, None] + x.shape[4]


SIDES = {"batch": 2, "head": 3, "group": 1, "row": 2, "column": 2}


def _product_types(a, b, *, t=4, **_):
    return jt.like(a, shape=(*a.shape[:3], a.shape[3], b.shape[4]))


def _product_grid(a, b, *, t=4):
    sides = (*a.shape[:3], jt.cdiv(a.shape[3], t), jt.cdiv(b.shape[4], t))
    return dict(zip(SIDES, sides, strict=True))


@jt.kernel(out_type=_product_types, grid=_product_grid)
def product(a, b, o, *, t=4):
    i, j = jt.swizzle(
        jt.program_id("row"), jt.program_id("column"), jt.num_programs("row"), jt.num_programs("column"), group=2
    )
    at = [jt.program_id(name) for name in ("batch", "head", "group")]
    A, B = a.tiles(None, None, None, t, 8), b.tiles(None, None, None, 8, t)
    o.tiles(None, None, None, t, t)[*at, i, j] = jt.dot(A[*at, i, 0], B[*at, 0, j])


A = jax.random.normal(jax.random.key(2), (2, 3, 1, 7, 8))
B = jax.random.normal(jax.random.key(3), (2, 3, 1, 8, 6))


def test_transforms_of_five_axes():
    names = ("value", "interpreter", "jvp", "vjp", "vmap", "grad of vmap")
    check_kernel(five, five_reference, (X, W), only=names)


def test_products_of_five_axes_and_their_gradients():
    """The axes of a gradient's sum are found among those of the grid, and become a loop."""
    limits = {"tolerance": 1e-5, "derivative_tolerance": 1e-4}
    check_kernel(product, lambda a, b: a @ b, (A, B), only=("value", "vjp"), **limits)
    text = product.lower(A, B).vjp().texts["tile_ir_opt"]
    assert "atomic" not in text


def test_the_ids_of_the_gpu_code():
    """Axes are taken out of the one that a launch has."""
    for target, arch in (("cuda:sm_90", "sm_90"), ("rocm:gfx942", "gfx942")):
        lowered = five.lower(X, W, target=target)
        np.testing.assert_allclose(
            run_ttir(lowered.kernel, [np.asarray(X), np.asarray(W)], arch)[0], five_reference(X, W), atol=1e-5
        )
        assert lowered.image


def test_automatic_partitioning_cuts_along_them():
    assert five.lower(X, W).texts["sharding"].startswith("a b c _ _ d, c d -> a b c _ _ d\n")
    assert product.lower(A, B).texts["sharding"].startswith("a b _ _ c, a b _ c _ -> a b _ _ _; sum over c\n")


def test_dynamic_sizes():
    k = product.with_options(dynamic={0: (0, 3), 1: (0,)})
    for n in (1, 2):
        np.testing.assert_allclose(k(A[:n, ..., :5, :], B[:n]), A[:n, ..., :5, :] @ B[:n], atol=1e-5)
    assert len(k._families) == 1


def test_as_many_axes_as_possible_under_vmap():
    shape = (2,) * 9 + (1,) * 7

    def body(x, o):
        at = [jt.program_id(k) for k in range(16)]
        o[*at] = x[*at] + 1

    k = jt.call(body, out_type=lambda x: jt.like(x), grid=lambda x: x.shape)
    x = jnp.arange(2.0 ** len([n for n in shape if n == 2])).reshape(shape)
    many = jax.vmap(k)(jnp.stack([x, -x]))
    np.testing.assert_array_equal(many, jnp.stack([x + 1, 1 - x]))
    np.testing.assert_array_equal(k.interpret(x), x + 1)
    np.testing.assert_array_equal(run_ttir(k.lower(x, target="cuda:sm_90").kernel, [np.asarray(x)])[0], x + 1)


def test_prints_of_five_axes(capfd):
    def body(o):
        jt.print("here")
        o[...] = 0.0

    k = jt.call(body, out_type=jax.ShapeDtypeStruct((), jnp.float32), grid=dict.fromkeys("abcde", 1))
    jax.block_until_ready(k())
    k.interpret()
    assert capfd.readouterr().out == "[body (0, 0, 0, 0, 0)] here\n" * 2


def test_a_jitted_helper_of_several_kernels():
    """What JAX has traced of it under other names is not taken again."""

    @jax.jit
    def column():
        return jt.program_id("column") + 10 * jt.program_id(1)

    def body(o):
        o[jt.program_id(0), jt.program_id(1)] = column()

    out = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    i, j = np.indices((2, 3))
    for grid, want in (({"row": 2, "column": 3}, j), ({"column": 2, "row": 3}, i), ({"row": 2, "column": 3}, j)):
        np.testing.assert_array_equal(jt.call(body, out_type=out, grid=grid)(), want + 10 * j)


def _fails(kind, match, grid, fn=lambda: jt.program_id("row")):
    def body(o):
        o[...] = fn()

    with pytest.raises(kind, match=match) as e:
        jt.call(body, out_type=jax.ShapeDtypeStruct((), jnp.int32), grid=grid)()
    assert "test_grids.py" in str(e.value)


@pytest.mark.parametrize(
    ("kind", "match", "grid"),
    [
        (KernelValueError, "axes of this grid have no names, so none is 'row': .* grid={'row': ..., ...}", (2, 3)),
        (KernelValueError, "this grid has no axis 'row'; did you mean 'rows'", {"rows": 2}),
        (KernelValueError, "this grid has no axis 'row'; its axes are 'i', 'j'", {"i": 2, "j": 1}),
        (KernelTypeError, "the grid of kernel body calls an axis 0: a name", {0: 2}),
        (KernelTypeError, "the grid of kernel body calls an axis 'a b': a name", {"a b": 2}),
        (KernelValueError, "axis row of the grid of kernel body is -1", {"row": -1}),
        (KernelTypeError, "axis row of the grid of kernel body is 1.5, which is no int", {"row": 1.5}),
        (KernelValueError, "has 17 axes: at most 16 are possible, besides those of vmap", (1,) * 17),
    ],
)
def test_names_that_are_none(kind, match, grid):
    _fails(kind, match, grid)


@pytest.mark.parametrize(
    ("kind", "match", "axis"),
    [
        (KernelValueError, r"a grid of 1 axis, so there is no program_id\(1\)", 1),
        (KernelValueError, "counts from 0, got -1", -1),
        (KernelTypeError, "a Python int or a name, got True", True),
        (KernelTypeError, "a Python int or a name, got None", None),
    ],
)
def test_axes_that_are_none(kind, match, axis):
    _fails(kind, match, 1, lambda: jt.program_id(axis))


def test_names_outside_of_a_kernel():
    with pytest.raises(KernelTypeError, match="only inside of a kernel"):
        jt.num_programs("row")


def test_names_of_a_grid_that_depend_on_a_size():
    def body(x, o):
        o[jt.program_id(0)] = x[jt.program_id(0)]

    grid = lambda x: {"one" if isinstance(x.shape[0], int) else "other": x.shape[0]}
    k = jt.call(body, out_type=lambda x: jt.like(x), grid=grid, dynamic={"x": 0})
    with pytest.raises(KernelTypeError, match=r"grid of kernel body gives .*other.* but .*one"):
        k(jnp.ones(3))
