"""Sides of tiles that are no powers of two become the next one: text in, expected text out, the same results."""

import numpy as np
import pytest
import tile_kernels as tk
from machines import machine

from jtile.interpret import interpret
from jtile.ir import Dot, parse_kernel, print_kernel, verify
from jtile.lowering.triton.block.passes import NoPlan, steps
from jtile.lowering.triton.block.passes.widen import widen
from jtile.passes import TILE, run_pipeline

PRODUCT = """kernel @k(%a: ref<128x96xbf16>, %b: ref<192x96xbf16>, %o: ref<128x96xf32, out>) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c3 = full 3 : i32
  %z = full 0.0 : tile<128x96xf32>
  %half = full 0.5 : tile<128x96xbf16>
  %q = load %a[tile(%c0, 128), tile(%c0, 96)] : tile<128x96xbf16>
  %x = mul %q, %half : tile<128x96xbf16>
  %r = for %k in %c0..%c3 step %c1 carry (%acc = %z) {
    %y = load %b[tile(%k, 64), %c0:+96] : tile<64x96xbf16>
    %s = dot %x, %y trans_b=true : tile<128x64xf32>
    %p = cast %s : tile<128x64xbf16>
    %d = dot %p, %y acc=%acc : tile<128x96xf32>
    yield %d
  }
  store %o[tile(%c0, 128), tile(%c0, 96)], %r
}
"""


def test_a_side_of_96_is_one_of_128():
    """Places are those of the old tile, whose number is 0."""
    wide = PRODUCT.replace("x96x", "x128x").replace("+96]", "+128]")
    for name, shape in (("a", "128x"), ("b", "192x"), ("o", "128x")):
        wide = wide.replace(f"%{name}: ref<{shape}128x", f"%{name}: ref<{shape}96x")
    wide = wide.replace("tile(%c0, 96)", "tile(%c0, 128, step=96)")
    after = widen(parse_kernel(PRODUCT))
    verify(after, "tile")
    assert print_kernel(after) == print_kernel(parse_kernel(wide))


SUMMED = PRODUCT.replace("store", "%t = reduce sum %q axes=(1) : tile<128xbf16>\n store")


@pytest.mark.parametrize("text", [PRODUCT, SUMMED], ids=["product", "sum over zeros"])
def test_the_results_are_the_same(text):
    kernel = parse_kernel(text)
    after = widen(kernel)
    assert {op.result.shape[1] for op in after.body.walk() if isinstance(op, Dot)} == {64, 128}
    inputs = tk.operands(kernel)
    np.testing.assert_array_equal(interpret(after, inputs)[0], interpret(kernel, inputs)[0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b: ref<192x96x", "b: ref<192x200x"),  # the next elements of the array are no zeros
        ("%c0:+96]", "%c1:+96]"),
        ("%x = mul %q, %half", "%x = exp2 %q"),  # a product would sum over ones
        ("%x = mul %q, %half", "%x = mul %q, %q"),
        ("  store", "  %m = reduce max %r axes=(1) : tile<128xf32>\n  store"),
        ("  store", "  %m = reduce sum %r axes=(1) : tile<128xf32>\n  store"),
        ("tile(%c0, 96)] : tile<128x96xbf16>", "tile(%c0, 96)] pad=1.0 : tile<128x96xbf16>"),
    ],
    ids=["part of an array", "starts later", "ones", "unknown factor", "maximum", "sum", "pad"],
)
def test_what_stays(old, new):
    assert old in PRODUCT
    kernel = parse_kernel(PRODUCT.replace(old, new))
    assert widen(kernel) is kernel


def test_rows_of_three_consumers_stay():
    kernel = parse_kernel(PRODUCT.replace("128", "192"))
    assert {op.result.shape for op in widen(kernel).body.walk() if isinstance(op, Dot)} == {(192, 64), (192, 128)}


@pytest.mark.parametrize("d", [24, 96, 192])
def test_attention_of_other_heads(d):
    """At the block level, from a kernel that knows nothing of it; queries hang over."""
    kernel = tk.plain_attention(200, 192, d)
    planned = steps(run_pipeline(kernel, TILE), machine(), {"specialize": True})
    assert not isinstance(planned, NoPlan), str(planned)
    inputs = tk.operands(kernel)
    want = interpret(kernel, inputs)[0]
    for seed in range(2):
        np.testing.assert_array_equal(interpret(planned.kernel, inputs, seed=seed)[0], want)
