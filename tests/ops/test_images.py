"""Bilateral filters, and images of other sizes, against jnp and `jax.image`."""

import jax
import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import images


def of(pair, **options):
    return [lambda x, f=f: f(x, **options) for f in pair]


BILATERAL = ops.bilateral_filter, images.bilateral_filter_reference
RESIZE = ops.resize, images.resize_reference


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_bilateral_filters(arch):
    with jt.config(arch=arch):
        pair = of(BILATERAL, space=0.8, level=0.7)
        x = normal(0, 2, 9, 13)
        agree(*pair, x, interpret=arch is None)
        gradients_agree(*pair, x, tolerance=1e-5)
        if arch is None:
            for dtype in ("bfloat16", "float16"):
                agree(*of(BILATERAL, space=2.0, level=1.0, radius=1), normal(1, 3, 5, dtype=dtype), tolerance=4e-3)


@pytest.mark.parametrize("arch", [None, "sm_90"])
@pytest.mark.parametrize(
    ("shape", "to", "method"),
    [
        ((2, 7, 9, 3), (2, 12, 5, 3), "linear"),
        ((7, 9), (3, 20), "cubic"),
        ((6, 5), (6, 11), "nearest"),
        ((11, 4), (4, 4), "lanczos3"),
    ],
)
def test_resize(shape, to, method, arch):
    with jt.config(arch=arch):
        x, pair = normal(0, *shape), of(RESIZE, shape=to, method=method)
        agree(*pair, x, interpret=arch is None and method == "linear")
        gradients_agree(*pair, x)
        if arch is None and method != "nearest":
            exact = jax.image.resize(x, to, method, precision="highest")
            np.testing.assert_allclose(ops.resize(x, to, method=method), exact, atol=3e-6)


def test_resize_without_antialias():
    x = normal(0, 9, 5, dtype="bfloat16")
    agree(*of(RESIZE, shape=(4, 5), antialias=False), x, tolerance=4e-3)
    exact = jax.image.resize(x.astype("float32"), (4, 5), "linear", antialias=False, precision="highest")
    np.testing.assert_allclose(ops.resize(x.astype("float32"), (4, 5), antialias=False), exact, atol=1e-6)


def test_errors():
    x = np.zeros((4, 5), np.float32)
    for error, match, call in [
        (KernelValueError, "space is above 0", lambda: ops.bilateral_filter(x, space=0, level=1)),
        (KernelTypeError, "level is a number", lambda: ops.bilateral_filter(x, space=1, level="1")),
        (KernelValueError, "radius is an int", lambda: ops.bilateral_filter(x, space=1, level=1, radius=40)),
        (KernelValueError, "method is one of", lambda: ops.resize(x, (2, 2), method="best")),
        (KernelValueError, "for an array of shape", lambda: ops.resize(x, (2, 2, 2))),
        (KernelTypeError, "tuple of ints", lambda: ops.resize(x, (2.0, 2))),
    ]:
        with pytest.raises(error, match=match):
            call()
    assert ops.resize(x, (0, 5)).shape == (0, 5)
