"""Softmax computed again takes one shift, and no quotient; numbers that all terms have come behind their sum."""

from __future__ import annotations

import numpy as np
import pytest
from accumulation import random_inputs

from jtile.interpret import interpret
from jtile.ir import Dot, For, Load, Map, parse_kernel, print_kernel, verify
from jtile.passes.per_row import common_factors, per_row

KERNEL = """
kernel @k(%q: ref<16x16xbf16>, %k: ref<16x16xbf16>, %m: ref<16x1xf32>, %l: ref<16x1xf32>, %c: ref<16xf32>,
          %p: ref<16x16xbf16, out>, %ds: ref<16x16xf32, out>) {
  %c0 = full 0 : i32
  %x = load %q[%c0:+16, %c0:+16]
  %y = load %k[%c0:+16, %c0:+16]
  %s = dot %x, %y trans_b=true
  %scale = full 0.25 : tile<16x16xf32>
  %t = mul %s, %scale
  %rows = iota 0 : tile<16x16xi32>
  %columns = iota 1 : tile<16x16xi32>
  %seen = ge %rows, %columns
  %low = full %LOW : tile<16x16xf32>
  %u = select %seen, %t, %low
  %m0 = load %m[%c0:+16, %c0:+1]
  %m1 = broadcast %m0 dims=(0, 1) : tile<16x16xf32>
  %v = sub %u, %m1
  %e = exp %v
  %l0 = load %l[%c0:+16, %c0:+1]
  %l2 = %POSITIVE %l0
  %l1 = broadcast %l2 dims=(0, 1) : tile<16x16xf32>
  %f = div %e, %l1
  %g = cast %f : tile<16x16xbf16>
  store %p[%c0:+16, %c0:+16], %g
  %dp = dot %y, %x trans_b=true
  %h = div %dp, %l1
  %cc = load %c[%c0:+16]
  %c1 = broadcast %cc dims=(0) : tile<16x16xf32>
  %i = add %h, %c1
  %j = mul %i, %e
  store %ds[%c0:+16, %c0:+16], %j
}
"""


def kernel(low: str = "-inf", positive: str = "exp", dtype: str = "bf16"):
    return kernel_of(KERNEL, low, positive, dtype)


def kernel_of(text: str, low: str = "-inf", positive: str = "exp", dtype: str = "bf16"):
    return parse_kernel(text.replace("%LOW", low).replace("%POSITIVE", positive).replace("xbf16", f"x{dtype}"))


def same(a, b, tolerance: float = 1e-4) -> None:
    verify(b)
    inputs = random_inputs(a)
    for x, y in zip(interpret(a, inputs), interpret(b, inputs), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), tolerance, tolerance)


def functions(k) -> list[str]:
    return sorted(op.fn for op in k.body.walk() if isinstance(op, Map) and op.result.shape == (16, 16))


def test_a_softmax_is_one_power_of_a_difference():
    before = kernel()
    after = per_row(before)
    same(before, after, 1e-2)  # of p, which is rounded to bfloat16
    assert functions(before) == ["add", "div", "div", "exp", "ge", "mul", "mul", "sub"]
    assert functions(after) == ["exp2", "ge", "mul", "mul", "sub"], print_kernel(after)
    acc = [op.acc is not None for op in after.body.walk() if isinstance(op, Dot)]
    assert acc == [False, True]  # what is added once a row is what the product starts from


@pytest.mark.parametrize(("low", "positive", "left"), [
    ("-1e30", "exp", ["exp2", "ge", "mul", "mul", "mul", "mul", "sub"]),  # of rows without any score all are equal
    ("-inf", "neg", ["exp2", "ge", "mul", "mul", "mul", "sub"]),  # of a negative number there is no logarithm
])  # fmt: skip
def test_what_is_not_the_same_for_large_numbers_stays(low, positive, left):
    before = kernel(low, positive)
    after = per_row(before)
    same(before, after, 1e-2)
    assert functions(after) == left, print_kernel(after)


def test_wide_operands_are_multiplied_as_they_are():
    before = kernel(dtype="f32")
    assert per_row(before) is before


def test_rows_of_factor_zero_keep_what_is_added_to_them():
    """`(dp r + c) e` and `e r`, where r may be 0: of a row that a mask empties, say."""
    text = KERNEL.replace("%f = div %e", "%f = mul %e").replace("%h = div %dp", "%h = mul %dp")
    before = kernel_of(text, positive="mul %l0,")
    inputs = random_inputs(before)
    inputs[3][3] = 0
    for x, y in zip(interpret(before, inputs), interpret(per_row(before), inputs), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), 1e-2, 1e-2)


def test_a_factor_that_both_operands_of_a_product_have_been_multiplied_with():
    """`e r`, `dp r` and `dp r e`: each of the last two could be made from the other for ever."""
    text = KERNEL.replace("%f = div %e", "%f = mul %e").replace("%h = div %dp", "%h = mul %dp")
    before = kernel_of(text.replace("%j = mul %i, %e", "%j = mul %h, %e"))
    same(before, per_row(before), 1e-2)


SUM = """
kernel @k(%a: ref<48x16x%T>, %b: ref<48x16x%T>, %o: ref<16x16xf32, out>, %z: ref<16x16xf32, out>) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c3 = full 3 : i32
  %zero = full 0.0 : tile<16x16xf32>
  %r, %t = for %k in %c0..%c3 step %c1 carry (%acc = %zero, %other = %START) {
    %x = load %a[tile(%k, 16), tile(%c0, 16)]
    %y = load %b[tile(%k, 16), tile(%c0, 16)]
    %w = cast %x : tile<16x16xf32>
    %scale = full 0.25 : tile<16x16xf32>
    %s = mul %w, %scale
    %u = cast %s : tile<16x16x%T>
    %d = dot %u, %y acc=%acc trans_a=true
    %e = dot %USED, %u acc=%other
    yield %d, %e
  }
  store %o[%c0:+16, %c0:+16], %r
  store %z[%c0:+16, %c0:+16], %t
}
"""


@pytest.mark.parametrize(("dtype", "start", "used", "moves"), [
    ("bf16", "%zero", "%y", True), ("bf16", "%one", "%y", False), ("bf16", "%zero", "%u", False),
    ("f16", "%zero", "%y", False),
])  # fmt: skip
def test_a_number_that_all_terms_have_comes_behind_their_sum(dtype, start, used, moves):
    """Not where the sum starts from something, where a term has it twice, nor where it could leave its range."""
    text = SUM.replace("%T", dtype).replace("%START", start).replace("%USED", used)
    before = parse_kernel(text.replace("%zero = full", "%one = full 1.0 : tile<16x16xf32>\n  %zero = full", 1))
    after = common_factors(before)
    same(before, after, 2e-2)
    (loop,) = [op for op in after.body.ops if isinstance(op, For)]
    behind = [op.fn for op in after.body.ops if isinstance(op, Map)]
    assert behind == ["mul", "mul"] * moves, print_kernel(after)
    if moves:
        assert all(isinstance(d.a.op.x.op.x.op, Load) for d in loop.body.ops if isinstance(d, Dot) and d.trans_a)
