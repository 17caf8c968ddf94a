"""Forces of bodies against an array of all pairs."""

import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import bodies


def soft(softening):
    return [lambda x, m, f=f: f(x, m, softening=softening) for f in (ops.n_body, bodies.n_body_reference)]


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_n_body(arch):
    with jt.config(arch=arch):
        x, m = normal(0, 2, 37, 3), abs(normal(1, 2, 37))
        agree(*soft(0.1), x, m, interpret=arch is None)
        gradients_agree(*soft(0.1), x, m, tolerance=1e-5)


def test_pairs_at_one_place_and_dtypes():
    x = np.array([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0]], np.float32)
    m = np.array([1.0, 2.0, 3.0], np.float32)
    agree(*soft(0), x, m)
    gradients_agree(*soft(0), x, m)
    agree(*soft(0.5), normal(0, 9, 1, dtype="bfloat16"), abs(normal(1, 9, dtype="bfloat16")), tolerance=4e-3)


def test_errors():
    x, m = np.zeros((4, 3), np.float32), np.zeros(4, np.float32)
    for error, match, call in [
        (KernelValueError, "d of 1 to 4", lambda: ops.n_body(np.zeros((4, 5), "f"), m)),
        (KernelValueError, "masses has shape", lambda: ops.n_body(x, m[:2])),
        (KernelTypeError, "masses have dtype", lambda: ops.n_body(x, m.astype(np.float16))),
        (KernelTypeError, "softening is a number", lambda: ops.n_body(x, m, softening="soft")),
        (KernelValueError, "0 or more", lambda: ops.n_body(x, m, softening=-1.0)),
    ]:
        with pytest.raises(error, match=match):
            call()
    assert ops.n_body(x[:0], m[:0]).shape == (0, 3)
