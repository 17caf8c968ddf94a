"""Chains of stencils, separable filters and morphology against jnp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import filters

STENCILS = [ops.stencil, filters.stencil_reference]


def stepped(boundary, steps):
    return (lambda x, w, f=f: f(x, w, boundary=boundary, steps=steps) for f in STENCILS)


@pytest.mark.parametrize("arch", [None, "sm_90"])
@pytest.mark.parametrize(
    ("shape", "sides", "boundary", "steps"),
    [
        ((9, 13), (3, 3), "zero", 3),
        ((2, 9, 11), (1, 3), "wrap", 6),
        ((5, 2), (1, 3), "wrap", 3),
        ((7, 9), (3, 3), "reflect", 2),
        ((4, 5, 9), (3, 1, 3), "zero", 2),
        ((3, 40), (5,), "edge", 2),
    ],
)
def test_stencils(shape, sides, boundary, steps, arch):
    with jt.config(arch=arch):
        x, w = normal(0, *shape), normal(1, *sides)
        agree(*stepped(boundary, steps), x, w, interpret=arch is None and steps == 2)
        if arch is None and boundary in ("zero", "edge"):
            gradients_agree(*stepped(boundary, steps), x, w)


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_separable_filters(arch):
    with jt.config(arch=arch):
        x, windows = normal(0, 2, 21, 40), (normal(1, 5), normal(2, 9))
        pair = (lambda x, *w, f=f: f(x, w) for f in (ops.separable_filter, filters.separable_filter_reference))
        op, reference = pair
        agree(op, reference, x, *windows)
        if arch is None:
            gradients_agree(op, reference, x, *windows)
            agree(op, reference, x.astype("bfloat16"), *windows, tolerance=4e-3)


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_morphology(arch):
    with jt.config(arch=arch):
        x = normal(0, 2, 18, 37)
        for op, reference in ((ops.dilate, filters.dilate_reference), (ops.erode, filters.erode_reference)):
            agree(lambda x, f=op: f(x, (3, 7)), lambda x, f=reference: f(x, (3, 7)), x, tolerance=0)
        if arch is None:
            gradients_agree(lambda x: ops.dilate(x, (3, 5)), lambda x: filters.dilate_reference(x, (3, 5)), x)


@pytest.mark.parametrize("steps", [1, 3])
def test_points_outside_need_no_copy_of_the_array(steps):
    """A CPU reads its tiles in place; those that hang over an edge are of the right size there, and in between."""
    x, w = normal(0, 2, 70, 1100), normal(1, 3, 5)
    stepped = lambda x, w: ops.stencil(x, w, steps=steps)
    assert "stablehlo.pad" not in jax.jit(stepped).lower(x, w).as_text()
    agree(stepped, lambda x, w: filters.stencil_reference(x, w, steps=steps), x, w)
    gradients_agree(stepped, lambda x, w: filters.stencil_reference(x, w, steps=steps), x, w)


def test_errors():
    x = jnp.zeros((4, 4))
    for error, match, call in [
        (KernelValueError, "odd sides", lambda: ops.stencil(x, jnp.zeros((2, 3)))),
        (KernelValueError, "boundary is one of", lambda: ops.stencil(x, jnp.zeros(3), boundary="torus")),
        (KernelValueError, "one to three axes", lambda: ops.stencil(x, jnp.zeros(()))),
        (KernelValueError, "at least 3 axes", lambda: ops.stencil(x, jnp.zeros((3, 3, 3)))),
        (KernelValueError, "steps is an int", lambda: ops.stencil(x, jnp.zeros(3), steps=-1)),
        (KernelValueError, "two or three vectors", lambda: ops.separable_filter(x, (x, x))),
        (KernelTypeError, "size is a pair", lambda: ops.dilate(x, 3)),
        (KernelTypeError, "float array", lambda: ops.erode(np.zeros((3, 3), np.int32), (3, 3))),
    ]:
        with pytest.raises(error, match=match):
            call()
    assert ops.stencil(x[:0], jnp.ones(3), steps=2).shape == (0, 4)
