"""In which order blocks take programs."""

import pytest
import tile_kernels as tk

from jtile.passes.order import grouped_axes

KERNELS = {
    "a product": (tk.matmul(256, 256, 64), (1, 2)),
    "one column of tiles": (tk.matmul(256, 128, 64), None),
    # which group a tile is of is searched for by its number: the matrices move with the columns alone
    "products of groups": (tk.grouped(256, 2, 128, 64), (0, 1)),
    "a gated layer": (tk.gated(256, 128, 64), (0, 1)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_bands_of_rows(name):
    kernel, axes = KERNELS[name]
    assert grouped_axes(kernel) == axes
