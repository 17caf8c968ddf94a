"""The gradients that are measured, and the memory that they take."""

import functools
import os

import jax
import numpy as np
import pytest

from benchmarks import backward, memory
from benchmarks.data import normal
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated


def test_a_function_of_the_cotangent():
    x, ct = normal(0, 3), normal(1, 3)
    (gradient,) = backward.pulled(lambda x, y: x * y, 1)(ct, x, 2 * x)
    assert relative_error(gradient, ct * 2 * x) < 1e-6


def test_the_plain_forms_are_those_of_jax():
    q, (k, v) = normal(0, 1, 9, 4, 8), (normal(s, 1, 9, 2, 8) for s in (1, 2))
    for causal in (False, True):
        ours = functools.partial(backward.attention, causal=causal)
        theirs = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
        assert relative_error(*(evaluated(f)(q, k, v) for f in (ours, theirs))) < 1e-6
    x, labels = normal(0, 2, 5), np.array([1, 4], np.int32)
    theirs = evaluated(lambda x: -jax.nn.log_softmax(x)[np.arange(2), labels])(x)
    assert relative_error(evaluated(lambda x: backward.cross_entropy(x, labels))(x), theirs) < 1e-6


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak of the resident memory here")
def test_peak_memory_counts_the_results_at_least():
    assert memory.peak("ours", 1024) >= 3 * 1024 * 8 * 64 * 4
