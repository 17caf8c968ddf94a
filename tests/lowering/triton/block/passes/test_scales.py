"""Positive factors go behind maxima and masks: text in, expected text out, and the same bits."""

import numpy as np
import pytest
from golden import check

from jtile.interpret import interpret
from jtile.ir import parse_kernel
from jtile.lowering.triton.block.passes.scales import scales
from jtile.passes.dce import dce

HEAD = """kernel @k(%x: ref<8x8xf32>, %o: ref<8x8xf32, out>) grid(1) {
  %c0 = full 0 : i32
  %s = load %x[tile(%c0, 8), tile(%c0, 8)] : tile<8x8xf32>
  %c = full 0.3 : tile<8x8xf32>
"""
MASK = """  %low = full -inf : tile<8x8xf32>
  %i = iota 0 : tile<8x8xi32>
  %j = iota 1 : tile<8x8xi32>
  %seen = ge %i, %j : tile<8x8xbool>
"""
REST = """  %b = broadcast %top dims=(0) : tile<8x8xf32>
  %d = sub %m, %b : tile<8x8xf32>
  store %o[tile(%c0, 8), tile(%c0, 8)], %d
}
"""
SCORES = (
    HEAD
    + MASK
    + """  %t = mul %s, %c : tile<8x8xf32>
  %m = select %seen, %t, %low : tile<8x8xf32>
  %top = reduce max %m axes=(1) : tile<8xf32>
"""
    + REST
)


def test_a_softmax_scales_behind_the_mask_and_the_maximum():
    after = """\
kernel @k(%x: ref<8x8xf32>, %o: ref<8x8xf32, out>) grid(1) {
  %c0 = full 0 : i32
  %s = load %x[tile(%c0, 8), tile(%c0, 8)] : tile<8x8xf32>
  %low = full -inf : tile<8x8xf32>
  %i = iota 0 : tile<8x8xi32>
  %j = iota 1 : tile<8x8xi32>
  %seen = ge %i, %j : tile<8x8xbool>
  %0 = select %seen, %s, %low : tile<8x8xf32>
  %1 = full 0.3 : tile<8x8xf32>
  %m = mul %0, %1 : tile<8x8xf32>
  %2 = reduce max %0 axes=(1) : tile<8xf32>
  %3 = full 0.3 : tile<8xf32>
  %top = mul %2, %3 : tile<8xf32>
  %b = broadcast %top dims=(0) : tile<8x8xf32>
  %d = sub %m, %b : tile<8x8xf32>
  store %o[tile(%c0, 8), tile(%c0, 8)], %d
}
"""
    check((scales, dce), SCORES, after)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("full 0.3", "full -0.3"),  # the largest becomes the smallest
        ("full 0.3", "full 0.0"),  # infinities become NaN
        ("full -inf", "full 1.0"),  # what a mask puts there would be scaled too
    ],
)
def test_what_stays(old, new):
    """Neither the mask nor the maximum of the masked scores has a factor behind it."""
    text = SCORES.replace(old, new)
    ops = [op.mnemonic for op in scales.run(parse_kernel(text)).body.ops]
    assert ops == [op.mnemonic for op in parse_kernel(text).body.ops]


@pytest.mark.parametrize("fn", ["max", "min"])
def test_the_bits_are_the_same(fn):
    kernel = parse_kernel(SCORES.replace("reduce max", f"reduce {fn}").replace("full 0.3", "full 1e-38"))
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    x[0, 0], x[1, 1], x[2, :] = np.inf, -np.inf, np.float32(3e38)
    with np.errstate(invalid="ignore"):
        want, got = (interpret(k, [x])[0] for k in (kernel, scales.run(kernel)))
    np.testing.assert_array_equal(got, want)
