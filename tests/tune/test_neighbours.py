"""Which products have blocks that share copies."""

import pytest

from jtile.tune.warpgroups import Gpu, Product, neighbours

H200 = Gpu(132)


@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "expected"),
    [
        (1000, 1000, 1000, (64, 128), 2),
        (1000, 1000, 1000, (128, 64), 1),  # tiles that were not measured
        (1000, 1000, 200, (64, 128), 1),
        (1024, 1024, 1024, (64, 128), 1),  # rows that begin with lines
        (1100, 1000, 1000, (128, 128), 1),  # an odd number of rows of tiles
        (4000, 3000, 2000, (128, 256), 1),  # two rounds
    ],
)
def test_blocks_share_where_rows_start_inside_of_lines(m, n, k, tile, expected):
    assert neighbours(Product(m, n, k), *tile, H200) == expected
