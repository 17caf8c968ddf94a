"""`jt.prefetch` changes no result, and is an instruction where there is one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.errors import KernelTypeError


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w: jt.cdiv(x.shape[0], 8))
def doubled(x, w, y):
    i = jt.program_id(0)
    jt.prefetch(w.tiles(16, w.shape[1]), (i, 0))  # one run of memory
    jt.prefetch(w, (jt.ds(3, 4), jt.ds(8, 64)))  # four rows
    y.tiles(8)[i] = x.tiles(8)[i] * 2


X, W = np.arange(24, dtype=np.float32), np.zeros((40, 1024), jnp.bfloat16)


def test_no_result_depends_on_it():
    np.testing.assert_array_equal(doubled(X, W), 2 * X)
    np.testing.assert_array_equal(doubled.interpret(X, W), 2 * X)
    gradient, tangent = jax.vjp(doubled, X, W)[1](jnp.ones_like(X))
    np.testing.assert_array_equal(gradient, np.full_like(X, 2))
    np.testing.assert_array_equal(tangent, np.zeros_like(W))
    many = jax.vmap(doubled)(np.stack([X, -X]), np.stack([W, W]))
    np.testing.assert_array_equal(many, np.stack([2 * X, -2 * X]))


def test_instructions():
    """32 KiB are two pieces of 16; a tile that hangs over the array is asked for under a condition."""
    text = doubled.lower(X, W, target="cuda:sm_90").texts["ttir"]
    found = [re.findall(r"prefetch\.L2\.global \[%ja\], (\d+);", line) for line in text.splitlines()]
    assert [sizes for sizes in found if sizes] == [["16384", "16384"], ["128"] * 4]
    assert "arith.cmpi sle" in text
    assert "prefetch" not in doubled.lower(X, W, target="cuda:sm_80").texts["ttir"]
    assert "prefetch" not in doubled.lower(X, W, target="rocm:gfx942").texts["ttir"]


def test_it_takes_a_ref():
    with pytest.raises(KernelTypeError, match="expected a Ref or a tile view"):
        jt.prefetch(X, (0,))
