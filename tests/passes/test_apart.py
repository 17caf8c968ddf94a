"""Loops that add several products up become a loop for each of them, which share one ring of buffers."""

import numpy as np
import pytest

from jtile import ir
from jtile.interpret import interpret
from jtile.lowering import targets
from jtile.passes.apart import apart
from jtile.testing import relative_error
from jtile.tune.auto import slots

KERNEL = """kernel @two(
    %a: ref<128x256xbf16>, %b: ref<128x256xbf16>, %g: ref<256x256xbf16>, %u: ref<256x256xbf16>,
    %y: ref<128x256xbf16, out>) grid(1) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c4 = full 4 : i32
  %z = full 0.0 : tile<128x256xf32>
  %sum = for %k in %c0..%c4 step %c1 carry (%acc = %z) {
    %1 = load %a[tile(%c0, 128), tile(%k, 64)] : tile<128x64xbf16>
    %2 = load %b[tile(%c0, 128), tile(%k, 64)] : tile<128x64xbf16>
    %3 = load %g[tile(%c0, 256), tile(%k, 64)] : tile<256x64xbf16>
    %4 = load %u[tile(%c0, 256), tile(%k, 64)] : tile<256x64xbf16>
    %5 = dot %1, %3 acc=%acc trans_b=true : tile<128x256xf32>
    %6 = dot %2, %4 acc=%5 trans_b=true : tile<128x256xf32>
    yield %6
  }
  %out = cast %sum : tile<128x256xbf16>
  store %y[tile(%c0, 128), tile(%c0, 256)], %out
}"""


def test_a_loop_for_each_product():
    kernel = ir.parse_kernel(KERNEL)
    new = apart(kernel)
    assert new is not None
    assert [sum(isinstance(x, ir.Dot) for x in op.body.ops) for op in new.body.ops if isinstance(op, ir.For)] == [1, 1]
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(v.shape).astype(v.type.info.numpy) for v in kernel.inputs]
    got, expected = (np.asarray(interpret(k, args)[0], np.float32) for k in (new, kernel))
    assert relative_error(got, expected) < 1e-3
    hopper = targets.resolve("cuda:sm_90")
    assert [slots(k, hopper, {}) for k in (kernel, new)] == [2, 4]  # both loops go around one ring
    assert apart(new) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dot %2, %4", "dot %1, %4"),  # the products have an operand in common
        ("dot %2, %4 acc=%5 trans_b=true", "add %5, %acc"),  # what is added is no product
        ("%4 acc=%5", "%4 acc=%acc"),  # one product is not in the sum
    ],
)  # fmt: skip
def test_loops_that_stay(old, new):
    assert old in KERNEL
    assert apart(ir.parse_kernel(KERNEL.replace(old, new))) is None
