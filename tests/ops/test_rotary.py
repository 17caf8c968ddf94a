"""Rotary position embedding against jnp."""

import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, integers, normal, shapes_and_dtypes

from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.rotary import rope_reference

SHAPES = [(2, 7, 3, 64), (1, 1, 1, 6), (2, 300, 5, 10), (0, 4, 2, 8), (2, 0, 2, 8)]
interleaved = pytest.mark.parametrize("interleaved", [False, True])


@interleaved
@pytest.mark.parametrize(("shape", "dtype"), shapes_and_dtypes(SHAPES))
def test_tables(shape, dtype, interleaved):
    batch, length, _, dim = shape
    x = normal(0, *shape, dtype=dtype)
    tables = [(length, dim // 2), (batch, length, dim // 2), (length, dim // 2 - 1)]
    for table in tables if (length, dtype) == (7, "float32") else tables[1:2]:
        cos, sin = normal(1, *table), normal(2, *table)
        agree(ops.rope, rope_reference, x, cos, sin, interleaved=interleaved, interpret=length == 7)


@interleaved
@pytest.mark.parametrize(("shape", "dtype"), shapes_and_dtypes(SHAPES))
def test_positions(shape, dtype, interleaved):
    x, positions = normal(0, *shape, dtype=dtype), integers(3, 0, 5000, *shape[:2])
    tolerance = {"float32": 2e-6, "bfloat16": 2e-3, "float16": 2e-4}[dtype]  # cos and sin differ by an ulp
    options = [{}, {"positions": positions, "theta": 1e6}, {"rotary_dim": 4}]
    options.append({"inverse_frequencies": jnp.array([1.0, 0.01]), "positions": positions[:1].reshape(-1)[: shape[1]]})
    for kw in options if (shape[1], dtype) == (7, "float32") else options[1:2]:
        agree(ops.rope, rope_reference, x, interleaved=interleaved, tolerance=tolerance, **kw)


@interleaved
def test_it_keeps_lengths_and_relative_positions(interleaved):
    q, k = normal(0, 1, 1, 1, 32), normal(1, 1, 1, 1, 32)
    at = lambda x, p: np.asarray(ops.rope(x, positions=jnp.array([p]), interleaved=interleaved), np.float64).ravel()
    np.testing.assert_allclose(np.linalg.norm(at(q, 777)), np.linalg.norm(q), rtol=1e-5)
    np.testing.assert_allclose(at(q, 40) @ at(k, 30), at(q, 110) @ at(k, 100), rtol=1e-3)


def test_errors():
    x, table = jnp.zeros((2, 3, 1, 8)), jnp.zeros((3, 4))
    for problem, args, kw in [
        ("together", (x, table), {}),
        ("leave positions out", (x, table, table), {"positions": jnp.arange(3)}),
        ("5 pairs do not fit", (x, jnp.zeros((3, 5)), jnp.zeros((3, 5))), {}),
        (r"cos has shape \(1, 2, 4\)", (x, jnp.zeros((2, 4)), jnp.zeros((2, 4))), {}),
        ("batch 3", (x, jnp.zeros((3, 3, 4)), jnp.zeros((3, 3, 4))), {}),
        ("even number", (x,), {"rotary_dim": 3}),
        ("heads, head_dim", (x[0],), {}),
    ]:
        with pytest.raises(KernelValueError, match=problem):
            ops.rope(*args, **kw)
    with pytest.raises(KernelTypeError, match="positions is an integer array"):
        ops.rope(x, positions=jnp.zeros(3))
