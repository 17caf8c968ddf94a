"""The clock of a role: text in, expected text out, and the same results."""

import numpy as np

from jtile.interpret import interpret
from jtile.ir import parse_kernel, print_kernel, verify
from jtile.lowering.triton.block.passes.stamps import BEGIN, END, INSTANT, PHASES, SLOT, stamped
from jtile.passes.cse import cse

TEXT = """kernel @k(%x: ref<8x8xf32>, %o: ref<8x8xf32, out>) grid(2) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c2 = full 2 : i32
  %A = alloc_shared : shared<8x8xf32, slots 2>
  %full = alloc_barriers : barrier<2, arrivals 1>
  roles {
    role all warps=4 {
      for %k in %c0..%c2 step %c1 {
        %later = gt %k, %c0 : bool
        expect %full[%k] bytes=256 when=%later
        %s = slot %A[%k] : shared<8x8xf32>
        async_load %x[tile(%c0, 8), tile(%c0, 8)] -> %s, %full[%k] when=%later
        wait %full[%k], %c0 when=%later
      }
      %t = slot %A[%c1] : shared<8x8xf32>
      %y = load_shared %t : tile<8x8xf32>
      store %o[tile(%c0, 8), tile(%c0, 8)], %y
    }
  }
}
"""
EXPECTED = """\
kernel @k(%x: ref<8x8xf32>, %o: ref<8x8xf32, out>, %stamps: ref<1x1x8x2xi64, out>) grid(2) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c2 = full 2 : i32
  %A = alloc_shared : shared<8x8xf32, slots 2>
  %full = alloc_barriers : barrier<2, arrivals 1>
  %0 = num_programs 0 : i32
  %1 = mul %c0, %0 : i32
  %2 = program_id 0 : i32
  %3 = add %1, %2 : i32
  roles {
    role all warps=4 {
      %c1_1 = full 1 : i64
      %4 = clock : i64
      %c8 = full 8 : i32
      %5 = lt %c0, %c8 : bool
      %6 = lt %3, %c1 : bool
      %7 = and %6, %5 : bool
      store %stamps[%3, %c0, %c0, %c0], %4 mask=%7
      store %stamps[%3, %c0, %c0, %c1], %c1_1 mask=%7
      %8 = add %c0, %c1 : i32
      %9 = for %k in %c0..%c2 step %c1 carry (%stamp = %8) {
        %later = gt %k, %c0 : bool
        expect %full[%k] when=%later bytes=256
        %c4 = full 4 : i64
        %10 = cast %k : i64
        %c4294967296 = full 4294967296 : i64
        %11 = mul %10, %c4294967296 : i64
        %12 = add %11, %c4 : i64
        %13 = clock : i64
        %14 = lt %stamp, %c8 : bool
        %15 = and %6, %14 : bool
        %16 = and %15, %later : bool
        store %stamps[%3, %c0, %stamp, %c0], %13 mask=%16
        store %stamps[%3, %c0, %stamp, %c1], %12 mask=%16
        %17 = cast %later : i32
        %18 = add %stamp, %17 : i32
        %s = slot %A[%k] : shared<8x8xf32>
        async_load %x[tile(%c0, 8), tile(%c0, 8)] -> %s, %full[%k] when=%later
        %c8_1 = full 8 : i64
        %19 = clock : i64
        %20 = lt %18, %c8 : bool
        %21 = and %6, %20 : bool
        %22 = and %21, %later : bool
        store %stamps[%3, %c0, %18, %c0], %19 mask=%22
        store %stamps[%3, %c0, %18, %c1], %c8_1 mask=%22
        %23 = add %18, %17 : i32
        %c13 = full 13 : i64
        %24 = add %11, %c13 : i64
        %25 = clock : i64
        %26 = lt %23, %c8 : bool
        %27 = and %6, %26 : bool
        %28 = and %27, %later : bool
        store %stamps[%3, %c0, %23, %c0], %25 mask=%28
        store %stamps[%3, %c0, %23, %c1], %24 mask=%28
        %29 = add %23, %17 : i32
        wait %full[%k], %c0 when=%later
        %c14 = full 14 : i64
        %30 = add %11, %c14 : i64
        %31 = clock : i64
        %32 = lt %29, %c8 : bool
        %33 = and %6, %32 : bool
        %34 = and %33, %later : bool
        store %stamps[%3, %c0, %29, %c0], %31 mask=%34
        store %stamps[%3, %c0, %29, %c1], %30 mask=%34
        %35 = add %29, %17 : i32
        yield %35
      }
      %t = slot %A[%c1] : shared<8x8xf32>
      %y = load_shared %t : tile<8x8xf32>
      store %o[tile(%c0, 8), tile(%c0, 8)], %y
      %c2_1 = full 2 : i64
      %36 = clock : i64
      %37 = lt %9, %c8 : bool
      %38 = and %6, %37 : bool
      store %stamps[%3, %c0, %9, %c0], %36 mask=%38
      store %stamps[%3, %c0, %9, %c1], %c2_1 mask=%38
      %39 = add %9, %c1 : i32
      %c0_1 = full 0 : i64
      %40 = lt %39, %c8 : bool
      %41 = and %6, %40 : bool
      store %stamps[%3, %c0, %39, %c0], %c0_1 mask=%41
    }
  }
}
"""


def test_stamps():
    made, sites = stamped(parse_kernel(TEXT), blocks=1, capacity=8)
    verify(made, "block")
    got = print_kernel(cse.run(made))
    assert got.splitlines() == EXPECTED.splitlines(), f"\n{got}"
    assert [(s.kind, s.about, s.amount, s.count) for s in sites] == [
        ("role", "all", 0, 0), ("expect", "full", 0, 2), ("load", "x", 256, 0), ("wait", "full", 0, 2)
    ]  # fmt: skip


def test_the_result_is_the_same_and_what_is_skipped_is_not_noted():
    kernel = parse_kernel(TEXT.replace("grid(2)", "grid(1)"))
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    want, (got, stamps) = interpret(kernel, [x])[0], interpret(stamped(kernel, 1, 8)[0], [x])
    np.testing.assert_array_equal(got, want)
    codes = [int(code) for at, code in stamps[0, 0] if at][:6]
    role, expect, load, wait = range(0, 4 * PHASES, PHASES)
    assert codes == [
        role + BEGIN, SLOT + expect + INSTANT, load + INSTANT, SLOT + wait + BEGIN, SLOT + wait + END, role + END
    ]  # fmt: skip
