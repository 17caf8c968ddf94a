"""Native sparse attention against whole matrices of scores."""

import jax
import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import native_sparse

SIZES = {"block": 8, "stride": 4, "keys": 8, "count": 3, "window": 9}
PAIR = [
    lambda *a, f=f: f(*a, **SIZES)
    for f in (ops.native_sparse_attention, native_sparse.native_sparse_attention_reference)
]


def operands(t, dtype="float32"):
    q, k, v = (normal(s, 2, t, heads, 16, dtype=dtype) for s, heads in enumerate((4, 2, 2)))
    return q, k, v, jax.nn.sigmoid(normal(4, 2, t, 4, 3, dtype=dtype))


@pytest.mark.parametrize("arch", [None, "sm_90"])
def test_three_branches(arch):
    with jt.config(arch=arch):
        agree(*PAIR, *operands(45), tolerance=2e-6)
        if arch is None:
            gradients_agree(*PAIR, *operands(45), tolerance=1e-5)


def test_short_and_narrow():
    agree(*PAIR, *operands(5))  # shorter than a window: nothing is compressed
    # blocks whose importance is nearly equal may be chosen differently where operands are rounded: all are chosen
    every = SIZES | {"count": 6}
    pair = [
        lambda *a, f=f: f(*a, **every)
        for f in (ops.native_sparse_attention, native_sparse.native_sparse_attention_reference)
    ]
    agree(*pair, *operands(45, "bfloat16"), tolerance=8e-3)


def test_compressed_by_a_layer():
    q, k, v, gates = operands(21)
    both = (normal(7, 2, 4, 2, 16), normal(8, 2, 4, 2, 16))
    pair = [lambda q, *c, f=f: f(q, k, v, gates, compressed=c, **SIZES) for f in
            (ops.native_sparse_attention, native_sparse.native_sparse_attention_reference)]  # fmt: skip
    agree(*pair, q, *both)


def test_errors():
    q, k, v, gates = (np.asarray(x) for x in operands(9))
    call = ops.native_sparse_attention
    for error, match, run in [
        (KernelValueError, "gates has shape", lambda: call(q, k, v, gates[..., :2])),
        (KernelValueError, "stride divides block", lambda: call(q, k, v, gates, block=6, stride=4)),
        (KernelValueError, "count is at least 1", lambda: call(q, k, v, gates, count=0)),
        (KernelTypeError, "window is an int", lambda: call(q, k, v, gates, window=2.0)),
        (KernelValueError, "compressed", lambda: call(q, k, v, gates, compressed=(k, v), **SIZES)),
        (KernelValueError, "k has shape", lambda: call(q, k[:, :4], v[:, :4], gates)),
    ]:
        with pytest.raises(error, match=match):
            run()
