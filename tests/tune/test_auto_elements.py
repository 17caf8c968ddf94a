"""`jt.auto` where one element along the side that it chooses is several numbers."""

import jax
import jax.numpy as jnp
import numpy as np
from auto_kernels import vector_add

import jtile as jt


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x, *, block: jt.cdiv(x.shape[0], block))
def points(x, o, *, block: int = jt.auto):
    i = jt.program_id(0)
    o.tiles(block, 3)[i, 0] = 2 * x.tiles(block, 3)[i, 0]


def test_elements_of_several_numbers_fill_lines():
    """As of points in space, or complex numbers."""
    low = points.lower(jax.ShapeDtypeStruct((1003, 3), jnp.float32), target="cuda:sm_90")
    assert low.texts["choice"].startswith("block=32 for")
    x = np.random.default_rng(0).normal(size=(2, 70)).astype(np.float32)
    z = jnp.asarray(x[0] + 1j * x[1])
    assert "block=64 for" in vector_add.lower(z, z, target="cuda:sm_90").texts["choice"]
    np.testing.assert_allclose(vector_add(z, z), 2 * z)
