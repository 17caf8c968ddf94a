"""Draws of the likeliest tokens against a sort."""

import jax
import numpy as np
import pytest
from library import agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.sampling import sample_top_p_reference


@pytest.mark.parametrize("arch", [None, "sm_90"])
@pytest.mark.parametrize("n", [37, 5000])
def test_draws(n, arch):
    key, x = jax.random.key(3), 3 * normal(0, 2, 9, n)
    p = np.linspace(0.05, 1, 18, dtype=np.float32).reshape(2, 9)
    pair = [
        lambda x, f=f: f(x, key, p=p, temperature=np.float32(0.7)) for f in (ops.sample_top_p, sample_top_p_reference)
    ]
    with jt.config(arch=arch):
        agree(*pair, x, tolerance=0, interpret=arch is None and n == 37)


def test_what_is_kept():
    x = np.log(np.array([[0.4, 0.1, 0.1, 0.4], [0.0, 0.0, 1.0, 0.0]], np.float32) + 1e-30)
    draws = np.stack([ops.sample_top_p(x, jax.random.key(k), p=0.5) for k in range(20)])
    assert set(draws[:, 0]) == {0, 3}  # equals enter together
    assert set(draws[:, 1]) == {2}
    banned = np.where(np.arange(4) == 1, 0.0, -np.inf).astype(np.float32)
    assert int(ops.sample_top_p(banned, jax.random.key(0))) == 1
    assert int(ops.sample_top_p(normal(5, 400).astype("bfloat16"), jax.random.key(0), p=1e-6)) == int(
        np.asarray(normal(5, 400).astype("bfloat16")).argmax()
    )


def test_errors():
    x, key = np.zeros((2, 3), np.float32), jax.random.key(0)
    for error, match, call in [
        (KernelTypeError, "float array", lambda: ops.sample_top_p(x.astype(np.int32), key)),
        (KernelValueError, "at least one token", lambda: ops.sample_top_p(x[:, :0], key)),
        (KernelValueError, "p has shape", lambda: ops.sample_top_p(x, key, p=np.ones(3, np.float32))),
    ]:
        with pytest.raises(error, match=match):
            call()
