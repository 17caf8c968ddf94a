"""argmax and argmin along a row, whose lanes have an extreme each: the first of equal ones wins, and a NaN."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jtile as jt

SIZES = (1, 7, 16, 31, 33, 64, 100)


@jt.kernel(out_type=lambda x: (jt.like(x, shape=x.shape[:1], dtype=np.int32),) * 2, grid=lambda x: x.shape[0])
def extremes(x, most, least):
    i = jt.program_id(0)
    most[i] = jnp.argmax(x[i, :]).astype(jnp.int32)
    least[i] = jnp.argmin(x[i, :]).astype(jnp.int32)


def rows(n, kind):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((6, n)) * 50
    if kind == "ties":
        x = np.round(x / 60) + 0.0
    if kind == "nan":
        x[rng.random((6, n)) < 3 / n] = np.nan
    return x


@pytest.mark.parametrize("kind", ["plain", "ties", "nan"])
def test_rows(kind, native_isa):
    dtypes = [np.float32, ml_dtypes.bfloat16] if kind == "nan" else [np.float32, np.int8, np.uint16, np.bool_]
    with jt.config(isa=native_isa):
        for dtype in dtypes:
            for n in SIZES:
                x = rows(n, kind)
                x = x > 0 if dtype is np.bool_ else np.clip(x, -100 if dtype is np.int8 else 0, 100).astype(dtype)
                if kind == "nan":
                    x = rows(n, kind).astype(dtype)
                most, least = extremes(x)
                wide = x.astype(np.float64)
                np.testing.assert_array_equal(most, wide.argmax(1), err_msg=f"{x.dtype} {n}")
                np.testing.assert_array_equal(least, wide.argmin(1), err_msg=f"{x.dtype} {n}")
