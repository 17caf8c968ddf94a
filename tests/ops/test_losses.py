"""Cross-entropy against jnp."""

import jax.numpy as jnp
import numpy as np
import pytest
from library import FLOATS, agree, integers, normal

from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.losses import cross_entropy_reference

OPTIONS = [{}, {"label_smoothing": 0.1}, {"ignore": None}, {"ignore": 7}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options):
    labels = np.array(integers(1, 0, 100, 37))
    labels[[3, 5, 6]] = -100, 100, 7
    logits = 5 * np.asarray(normal(0, 37, 100))
    agree(ops.cross_entropy, cross_entropy_reference, logits, labels, interpret=True, **options)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_large_vocabulary(dtype):
    logits, labels = normal(0, 2, 3, 50000, dtype=dtype), integers(1, 0, 50000, 2, 3)
    agree(ops.cross_entropy, cross_entropy_reference, logits, labels, tolerance=1e-6)


def test_edges():
    agree(ops.cross_entropy, cross_entropy_reference, jnp.zeros((0, 5)), jnp.zeros(0, jnp.int32))
    agree(ops.cross_entropy, cross_entropy_reference, normal(0, 1, 1), jnp.zeros(1, jnp.int32))
    x = jnp.array([[-jnp.inf, 0.0, 1e4], [jnp.inf, 0.0, 1.0]])
    loss = np.asarray(ops.cross_entropy(x, jnp.array([0, 1])))
    assert loss[0] == np.inf
    assert not np.isfinite(loss[1])
    np.testing.assert_allclose(ops.cross_entropy(x[:1], jnp.array([2])), 0, atol=1e-6)


def test_errors():
    x = jnp.zeros((2, 4))
    for problem, args, kw in [
        (r"labels has shape \(3,\)", (x, jnp.zeros(3, jnp.int32)), {}),
        ("label_smoothing", (x, jnp.zeros(2, jnp.int32)), {"label_smoothing": 2.0}),
        ("vocabulary is empty", (x[:, :0], jnp.zeros(2, jnp.int32)), {}),
    ]:
        with pytest.raises(KernelValueError, match=problem):
            ops.cross_entropy(*args, **kw)
    with pytest.raises(KernelTypeError, match="labels is an integer array"):
        ops.cross_entropy(x, jnp.zeros(2))
