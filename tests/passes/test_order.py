"""In which order blocks take programs."""

import jax
import jax.numpy as jnp
import pytest
import tile_kernels as tk

import jtile as jt
from jtile.passes.order import grouped_axes


@jt.kernel(out_type=jax.ShapeDtypeStruct((256, 128), jnp.float32), grid=(4, 2))
def products_of_groups(x, w, ends, y):
    i, j = jt.program_id(0), jt.program_id(1)
    g = (ends[...] <= i).sum(dtype=jnp.int32)
    y.tiles(64, 64)[i, j] = jt.dot(x.tiles(64, 64)[i, 0], w.tiles(None, 64, 64)[g, 0, j])


def _of_groups():
    types = ((256, 64), jnp.bfloat16), ((2, 64, 128), jnp.bfloat16), ((2,), jnp.int32)
    return products_of_groups.lower(*(jax.ShapeDtypeStruct(*t) for t in types)).kernel


KERNELS = {
    "a product": (tk.matmul(256, 256, 64), (1, 2)),
    "one column of tiles": (tk.matmul(256, 128, 64), None),
    # which group a tile is of is searched for by its number: the matrices move with the columns alone
    "products of groups": (_of_groups(), (0, 1)),
    "products of groups whose kernel orders its tiles": (tk.grouped(256, 2, 128, 64), None),
    "a gated layer": (tk.gated(256, 128, 64), (0, 1)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_bands_of_rows(name):
    kernel, axes = KERNELS[name]
    assert grouped_axes(kernel) == axes
