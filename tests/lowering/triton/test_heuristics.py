"""How many warps a kernel gets where nobody says."""

from __future__ import annotations

import pytest

from jtile import ir
from jtile.lowering.triton import heuristics
from jtile.lowering.triton.features import features


def copied(n: int) -> ir.Kernel:
    return ir.parse_kernel(f"""kernel @k(%x: ref<{n}xf32>, %o: ref<{n}xf32, out>) {{
      %z = full 0 : i32
      %t = load %x[tile(%z, {n})] : tile<{n}xf32>
      store %o[tile(%z, {n})], %t
    }}""")


@pytest.mark.parametrize(
    ("n", "arch", "warps"),
    [
        (33, "sm_90", 2), (1024, "sm_90", 4), (4000, "sm_90", 8), (65536, "sm_90", 16), (65537, "sm_90", 32),
        (1 << 18, "sm_80", 32), (65536, "gfx942", 8), (1 << 18, "gfx942", 16), (1 << 18, "gfx1100", 32),
    ],
)  # fmt: skip
def test_warps_by_the_widest_tile(n, arch, warps):
    """Within the threads of a block: 1024, in wavefronts of 64 lanes on CDNA."""
    assert heuristics.choose(copied(n), features(arch), {}).num_warps == warps


def test_what_is_given_is_taken():
    assert heuristics.choose(copied(1 << 18), features("sm_90"), {"num_warps": 4}).num_warps == 4


@pytest.mark.parametrize(("arch", "asked", "stages"), [("sm_80", "", 3), ("sm_80", "stages=1000000000", 16),
                                                       ("gfx942", "", 2), ("gfx942", "stages=9", 2)])  # fmt: skip
def test_the_depth_of_a_pipeline_is_bounded(arch, asked, stages):
    """Of a thousand million stages each would have been tried, down to those that fit."""
    kernel = ir.parse_kernel(f"""kernel @k(%x: ref<4xf32>, %o: ref<4xf32, out>) {{
      %z = full 0 : i32
      %n = full 4 : i32
      for %k in %z..%n step %n {asked} {{
        %t = load %x[tile(%z, 4)] : tile<4xf32>
        store %o[tile(%z, 4)], %t
      }}
    }}""")
    assert heuristics.choose(kernel, features(arch), {}).num_stages == stages
