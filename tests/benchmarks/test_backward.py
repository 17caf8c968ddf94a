"""The gradients that are measured, and the memory that they take."""

import os

import jax
import jax.numpy as jnp
import pytest

from benchmarks import backward, memory
from benchmarks.data import normal
from jtile.testing import relative_error


def test_a_function_of_the_cotangent():
    x, ct = normal(0, 3), normal(1, 3)
    (slope,) = backward.pulled(lambda x, y: x * y, 1)(ct, x, 2 * x)
    assert relative_error(slope, ct * 2 * x) < 1e-6


def test_the_plain_forms_are_those_of_jax():
    q, (k, v) = normal(0, 1, 9, 4, 8), (normal(s, 1, 9, 2, 8) for s in (1, 2))
    for causal in (False, True):
        expected = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
        assert relative_error(backward.attention(q, k, v, causal), expected) < 1e-6
    loss = backward.cross_entropy(normal(0, 2, 5), jnp.array([1, 4]))
    assert relative_error(loss, -jax.nn.log_softmax(normal(0, 2, 5))[jnp.arange(2), jnp.array([1, 4])]) < 1e-6


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak of the resident memory here")
def test_peak_memory_counts_the_results_at_least():
    assert memory.peak("ours", 1024) >= 3 * 1024 * 8 * 64 * 4
