"""Products of one left operand become one: text out, and the same results."""

import pytest
import tile_kernels as tk
from machines import machine

from jtile.ir import DotAsync, Kernel, SliceShared, parse_kernel, print_kernel
from jtile.lowering.triton.block.passes import NoPlan, steps


def joined(kernel: Kernel, **options) -> Kernel:
    return tk.block_level(kernel, 2, **options)


def products(kernel: Kernel) -> set[tuple[int, ...]]:
    return {op.result.shape for op in kernel.body.walk() if isinstance(op, DotAsync)}


@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("save", [False, True])
def test_a_gated_layer(tb, save):
    """Both weights arrive in the halves of one buffer; rows, columns and terms hang over."""
    made = joined(tk.gated(200, 136, 72, tb=tb, save=save))
    assert products(made) == {(64, 128)}
    slices = [op for op in made.body.walk() if isinstance(op, SliceShared)]
    halves = {op.starts for op in slices if op.sizes[0] > 16}  # rows of x come in boxes of 16
    assert halves == ({(0, 0), (64, 0)} if tb else {(0, 0), (0, 64)})


def test_three_consumers_have_too_few_registers():
    assert products(joined(tk.gated(192, 128, 64, tile=(192, 64, 32)))) == {(64, 64)}


TWO = """kernel @k(%a: ref<128x96xbf16>, %b: ref<96x64xbf16>, %c: ref<96x64xbf16>, %o: ref<128x64xf32, out>,
    %p: ref<128x64xf32, out>) {{
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c3 = full 3 : i32
  %z = full 0.0 : tile<128x64xf32>
  %y = full {start} : tile<128x64xf32>
  %s, %t = for %k in %c0..%c3 step %c1 carry (%x = %z, %w = %y) {{
    %l = load %a[tile(%c0, 128), tile(%k, 32)]
    %u = load %b[tile(%k, 32), tile(%c0, 64)]
    %v = load %c[tile(%k, 32), tile(%c0, 64)]
    %d = dot %l, %u acc=%x
    %e = dot {left}, {right} acc=%w
    yield %d, %e
  }}
  store %o[tile(%c0, 128), tile(%c0, 64)], %s
  store %p[tile(%c0, 128), tile(%c0, 64)], %t
}}"""


@pytest.mark.parametrize(
    ("new", "columns"),
    [
        ({}, 128),
        ({"start": "1.0"}, 64),  # sums that do not start from zero
        ({"right": "%u"}, 64),  # one right operand for both
    ],
)
def test_two_sums_of_one_loop(new, columns):
    text = TWO.format(**{"start": "0.0", "left": "%l", "right": "%v"} | new)
    assert products(joined(parse_kernel(text))) == {(64, columns)}


def test_halves_of_a_swizzle():
    """Of 32 columns of 16 bits two buffers cannot be one: its lines of 128 bytes would be cut in the middle."""
    assert products(joined(tk.gated(128, 64, 64, tile=(128, 32, 32)))) == {(64, 32)}
    assert products(joined(tk.gated(128, 64, 64, tile=(128, 32, 32), tb=True))) == {(64, 64)}


def test_the_text():
    """One buffer for both right operands, one product, one sum that is cut behind the loop."""
    kernel = parse_kernel(TWO.format(start="0.0", left="%l", right="%v"))
    planned = steps(kernel, machine(processors=2), {"consumers": 1})
    assert not isinstance(planned, NoPlan)
    (made,) = (kernel for name, _, kernel in planned.steps if name == "join")
    assert print_kernel(made).splitlines() == JOINED.splitlines()


JOINED = """\
kernel @k(
    %a: ref<128x96xbf16>,
    %b: ref<96x64xbf16>,
    %c: ref<96x64xbf16>,
    %o: ref<128x64xf32, out>,
    %p: ref<128x64xf32, out>) grid(1) {
  %a_1 = alloc_shared : shared<128x32xbf16, slots 8>
  %b_c = alloc_shared : shared<32x128xbf16, slots 8>
  %a_full = alloc_barriers : barrier<8, arrivals 1>
  %a_empty = alloc_barriers : barrier<8, arrivals 1>
  %o0 = alloc_shared : shared<128x64xf32, slots 1>
  roles {
    role consumer0 warps=8 {
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c3 = full 3 : i32
      %0 = full 0.0 : tile<128x128xf32>
      %1, %2 = for %k in %c0..%c3 step %c1 carry (%round = %c0, %x = %0) {
        %c8 = full 8 : i32
        %3 = rem %round, %c8 : i32
        %4 = div %round, %c8 : i32
        %5 = and %4, %c1 : i32
        wait %a_full[%3], %5
        %a_2 = slot %a_1[%3] : shared<128x32xbf16>
        %6 = slot %b_c[%3] : shared<32x128xbf16>
        %7 = dot_async %a_2, %6 acc=%x : tile<128x128xf32>
        %8 = dot_wait %7 : tile<128x128xf32>
        arrive %a_empty[%3]
        %9 = add %round, %c1 : i32
        yield %9, %8
      }
      %10 = slice %2 starts=(0, 0) stops=(128, 64) strides=(1, 1) : tile<128x64xf32>
      %11 = slice %2 starts=(0, 64) stops=(128, 128) strides=(1, 1) : tile<128x64xf32>
      store_wait 0
      %o_1 = slot %o0[%c0] : shared<128x64xf32>
      store_shared %o_1, %10
      fence_shared
      async_store %o[tile(%c0, 128), tile(%c0, 64)] <- %o_1
      store_wait 0
      store_shared %o_1, %11
      fence_shared
      async_store %p[tile(%c0, 128), tile(%c0, 64)] <- %o_1
      store_wait 0
    }
    role producer warps=1 registers=24 {
      %c0_1 = full 0 : i32
      %c1_1 = full 1 : i32
      %c3_1 = full 3 : i32
      %12 = for %k_1 in %c0_1..%c3_1 step %c1_1 carry (%round_1 = %c0_1) {
        %c8_1 = full 8 : i32
        %13 = rem %round_1, %c8_1 : i32
        %14 = div %round_1, %c8_1 : i32
        %15 = and %14, %c1_1 : i32
        %16 = xor %15, %c1_1 : i32
        wait %a_empty[%13], %16
        expect %a_full[%13] bytes=16384
        %a_3 = slot %a_1[%13] : shared<128x32xbf16>
        async_load %a[tile(%c0_1, 128), tile(%k_1, 32)] -> %a_3, %a_full[%13]
        %b_1 = slot %b_c[%13] : shared<32x128xbf16>
        %b_2 = slice_shared %b_1 starts=(0, 0) sizes=(32, 64) : shared<32x64xbf16>
        async_load %b[tile(%k_1, 32), tile(%c0_1, 64)] -> %b_2, %a_full[%13]
        %c_1 = slot %b_c[%13] : shared<32x128xbf16>
        %c_2 = slice_shared %c_1 starts=(0, 64) sizes=(32, 64) : shared<32x64xbf16>
        async_load %c[tile(%k_1, 32), tile(%c0_1, 64)] -> %c_2, %a_full[%13]
        %17 = add %round_1, %c1_1 : i32
        yield %17
      }
    }
  }
}
"""
