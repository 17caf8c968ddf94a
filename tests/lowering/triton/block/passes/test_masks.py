"""Masks in branches, and adjoining loops that differ by masks alone: text in, expected text out."""

import numpy as np
import pytest
import tile_kernels as tk
from golden import check

from jtile.interpret import interpret
from jtile.ir import For, If, Kernel, parse_kernel, verify
from jtile.lowering.triton.block.passes.masks import masks

LOOPS = """kernel @k(%x: ref<512xf32>, %bounds: ref<4xi32>, %o: ref<64xf32, out>) {{
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c2 = full 2 : i32
  %c3 = full 3 : i32
  %c4 = full 4 : i32
  %a = load %bounds[%c0]
  %b = load %bounds[%c1]
  %c = load %bounds[%c2]
  %d = load %bounds[%c3]
  %last = load %bounds[%c3]
  %edge = full 60 : tile<64xi32>
  %z = full 0.0 : tile<64xf32>
  {body}
  store %o[%c0:+64], %r
}}"""

PLAIN = """%{r} = for %k in %{lo}..%{hi} step %c1{stages} carry (%s = %{init}) {{
    %u = load %x[tile(%k, 64)]
    %t = add %s, %u
    yield %t
  }}"""
MASKED = """%{r} = for %k in %{lo}..%{hi} step %c1{stages} carry (%s = %{init}) {{
    %u = load %x[tile(%k, 64)]
    %i = iota 0 : tile<64xi32>
    %m = lt %i, %edge
    %w = select %m, %u, %z
    %t = add %s, %w
    yield %t
  }}"""


def loop(form: str, r: str, lo: str, hi: str, init: str, stages: str = "") -> str:
    return form.format(r=r, lo=lo, hi=hi, init=init, stages=stages)


def loops(kernel: Kernel) -> int:
    return sum(isinstance(op, For) for op in kernel.body.walk())


def same(kernel: Kernel, inputs: list[np.ndarray]) -> Kernel:
    """The kernel with its masks in branches, which gives the same."""
    after = masks(kernel)
    verify(after)
    for want, got in zip(interpret(kernel, inputs), interpret(after, inputs), strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    return after


def test_two_loops_are_one():
    """Where the second one is masked, `k >= b`; a loop of no rounds may have its bounds in the wrong order."""
    body = loop(PLAIN, "q", "a", "b", "z", " stages=3") + "\n  " + loop(MASKED, "r", "b", "c", "q")
    check(
        masks,
        LOOPS.format(body=body),
        """
        kernel @k(%x: ref<512xf32>, %bounds: ref<4xi32>, %o: ref<64xf32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c2 = full 2 : i32
          %a = load %bounds[%c0] : i32
          %b = load %bounds[%c1] : i32
          %c = load %bounds[%c2] : i32
          %edge = full 60 : tile<64xi32>
          %z = full 0.0 : tile<64xf32>
          %0 = min %a, %b : i32
          %1 = max %b, %c : i32
          %r = for %k in %0..%1 step %c1 stages=3 carry (%s = %z) {
            %u = load %x[tile(%k, 64)] : tile<64xf32>
            %2 = ge %k, %b : bool
            %w = if %2 {
              %i = iota 0 : tile<64xi32>
              %m = lt %i, %edge : tile<64xbool>
              %w_1 = select %m, %u, %z : tile<64xf32>
              yield %w_1
            } else {
              yield %u
            }
            %t = add %s, %w : tile<64xf32>
            yield %t
          }
          store %o[%c0:+64], %r
        }""",
    )


@pytest.mark.parametrize("bounds", [(0, 3, 7, 7), (0, 0, 2, 2), (4, 2, 6, 6), (1, 5, 3, 3), (2, 2, 2, 2)])
@pytest.mark.parametrize("first", [PLAIN, MASKED])
def test_any_order_of_bounds(bounds, first):
    second = MASKED if first is PLAIN else PLAIN
    body = loop(first, "q", "a", "b", "z") + "\n  " + loop(second, "r", "b", "c", "q")
    kernel = parse_kernel(LOOPS.format(body=body))
    x = np.arange(512, dtype=np.float32)
    assert loops(same(kernel, [x, np.array(bounds, np.int32)])) == 1


@pytest.mark.parametrize("ordered", [True, False])
def test_a_masked_loop_on_either_side(ordered):
    """Three loops are one where the middle one surely goes upwards: rounds must not be made twice. Else two are."""
    top = "%e = max %b, %c\n  " if ordered else "%e = add %c, %c0\n  "
    body = loop(MASKED, "p", "a", "b", "z") + "\n  " + top + loop(PLAIN, "q", "b", "e", "p")
    kernel = parse_kernel(LOOPS.format(body=body + "\n  " + loop(MASKED, "r", "e", "d", "q")))
    for bounds in [(0, 2, 5, 7), (1, 3, 1, 6), (0, 0, 0, 4)]:
        after = same(kernel, [np.arange(512, dtype=np.float32), np.array(bounds, np.int32)])
        assert loops(after) == (1 if ordered else 2)


def test_loops_that_differ_in_more_stay():
    other = PLAIN.replace("add %s, %u", "sub %s, %u")
    gap = loop(PLAIN, "q", "a", "b", "z") + "\n  " + loop(MASKED, "r", "c", "d", "q")
    used = loop(PLAIN, "q", "a", "b", "z") + "\n  " + loop(MASKED, "p", "b", "c", "q") + "\n  %r = add %p, %q"
    for body in (loop(other, "q", "a", "b", "z") + "\n  " + loop(MASKED, "r", "b", "c", "q"), gap, used):
        assert loops(masks(parse_kernel(LOOPS.format(body=body)))) == 2


def test_a_mask_by_places():
    """Columns `16 k + c` and rows `64 p + r`: rounds whose last column is not right of the first row need no mask."""
    check(
        masks,
        """kernel @k(%x: ref<128x16xf32>, %y: ref<16x64xf32>, %o: ref<128x16xf32, out>) grid(2) {
          %p = program_id 0
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c4 = full 4 : i32
          %c16 = full 16 : i32
          %c64 = full 64 : i32
          %z = full 0.0 : tile<64x16xf32>
          %a = load %x[tile(%p, 64), %c0:+16]
          %f = mul %p, %c64
          %rows0 = iota 0 : tile<64x1xi32>
          %f0 = broadcast %f dims=() : tile<64x1xi32>
          %rows = add %f0, %rows0
          %r = for %k in %c0..%c4 step %c1 carry (%s = %z) {
            %b = load %y[%c0:+16, tile(%k, 16)]
            %d = dot %a, %b
            %j = mul %k, %c16
            %j0 = broadcast %j dims=() : tile<1x16xi32>
            %i = iota 1 : tile<1x16xi32>
            %columns = add %j0, %i
            %u = broadcast %columns dims=(0, 1) : tile<64x16xi32>
            %v = broadcast %rows dims=(0, 1) : tile<64x16xi32>
            %m = le %u, %v
            %w = select %m, %d, %z
            %t = add %s, %w
            yield %t
          }
          store %o[tile(%p, 64), %c0:+16], %r
        }""",
        """
        kernel @k(%x: ref<128x16xf32>, %y: ref<16x64xf32>, %o: ref<128x16xf32, out>) grid(2) {
          %p = program_id 0 : i32
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c4 = full 4 : i32
          %c16 = full 16 : i32
          %c64 = full 64 : i32
          %z = full 0.0 : tile<64x16xf32>
          %a = load %x[tile(%p, 64), %c0:+16] : tile<64x16xf32>
          %f = mul %p, %c64 : i32
          %rows0 = iota 0 : tile<64x1xi32>
          %f0 = broadcast %f dims=() : tile<64x1xi32>
          %rows = add %f0, %rows0 : tile<64x1xi32>
          %r = for %k in %c0..%c4 step %c1 carry (%s = %z) {
            %b = load %y[%c0:+16, tile(%k, 16)] : tile<16x16xf32>
            %d = dot %a, %b : tile<64x16xf32>
            %j = mul %k, %c16 : i32
            %c15 = full 15 : i32
            %0 = add %j, %c15 : i32
            %c0_1 = full 0 : i32
            %1 = add %f, %c0_1 : i32
            %2 = gt %0, %1 : bool
            %w = if %2 {
              %j0 = broadcast %j dims=() : tile<1x16xi32>
              %i = iota 1 : tile<1x16xi32>
              %columns = add %j0, %i : tile<1x16xi32>
              %u = broadcast %columns dims=(0, 1) : tile<64x16xi32>
              %v = broadcast %rows dims=(0, 1) : tile<64x16xi32>
              %m = le %u, %v : tile<64x16xbool>
              %w_1 = select %m, %d, %z : tile<64x16xf32>
              yield %w_1
            } else {
              yield %d
            }
            %t = add %s, %w : tile<64x16xf32>
            yield %t
          }
          store %o[tile(%p, 64), %c0:+16], %r
        }""",
    )


@pytest.mark.parametrize(
    "options",
    [
        {"window": (None, 0)},
        {"window": (100, 0), "softcap": 5.0},
        {"window": (60, 40), "save": True},
        {"window": (None, 0), "lengths": True},
    ],
)
def test_attention_has_one_loop(options):
    kernel = tk.attention(256, 384, heads=1, **options)
    inputs = tk.operands(kernel)
    if "lengths" in options:
        inputs[3] = np.array([150], np.int32)
    after = same(kernel, inputs)
    assert loops(after) == 1 < loops(kernel)
    assert sum(isinstance(op, If) for op in after.body.walk()) == (2 if "lengths" in options else 1)
