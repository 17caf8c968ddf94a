"""Products whose operands are what is loaded, and lie the right way round."""

from __future__ import annotations

import numpy as np
from accumulation import random_inputs

from jtile.interpret import interpret
from jtile.ir import Cast, Dot, Load, Transpose, parse_kernel, print_kernel, verify
from jtile.passes.nests import tidy
from jtile.passes.turned import turned
from jtile.passes.unscaled import unscaled

KERNEL = """
kernel @k(%q: ref<4x8xf32>, %k: ref<6x8xf32>, %g: ref<4x8xbf16>, %l: ref<4x1xf32>, %o: ref<6x8xf32, out>,
          %s: ref<4xf32, out>, %r: ref<4x6xf32, out>) {
  %c0 = full 0 : i32
  %x = load %q[%c0:+4, %c0:+8]
  %y = load %k[%c0:+6, %c0:+8]
  %p = dot %x, %y trans_b=true
  %iq = iota 0 : tile<4x1xi32>
  %ik = iota 1 : tile<1x6xi32>
  %bq = broadcast %iq dims=(0, 1) : tile<4x6xi32>
  %bk = broadcast %ik dims=(0, 1) : tile<4x6xi32>
  %m = ge %bq, %bk
  %zero = full 0.0 : tile<4x6xf32>
  %w = select %m, %p, %zero
  %h = load %g[%c0:+4, %c0:+8]
  %wide = cast %h : tile<4x8xf32>
  %n = load %l[%c0:+4, %c0:+1]
  %f = broadcast %n dims=(0, 1) : tile<4x8xf32>
  %scaled = mul %wide, %f
  %e = cast %scaled : tile<4x8xbf16>
  %z = cast %w : tile<4x6xbf16>
  %d = dot %z, %e trans_a=true
  store %o[%c0:+6, %c0:+8], %d
  %t = reduce sum %w axes=(1)
  store %s[%c0:+4], %t
  %STORE
}
"""


def kernel(store: str = "%u = mul %t, %t"):
    return parse_kernel(KERNEL.replace("%STORE", store))


def same(a, b) -> None:
    verify(b)
    inputs = random_inputs(a)
    for x, y in zip(interpret(a, inputs), interpret(b, inputs), strict=True):
        np.testing.assert_array_equal(x, y)  # of what neither stores, the poison


def dots(k) -> list[Dot]:
    return [op for op in k.body.walk() if isinstance(op, Dot)]


def test_a_computed_left_operand_is_made_as_the_product_takes_it():
    before = kernel()
    after = tidy(turned(before))
    same(before, after)
    first, second = dots(after)
    assert (first.result.shape, second.trans_a) == ((6, 4), False), print_kernel(after)
    assert not any(isinstance(op, Transpose) for op in after.body.walk())


def test_what_is_stored_as_it_lies_stays():
    before = kernel("store %r[%c0:+4, %c0:+6], %w")
    assert turned(before) is before


def test_the_factor_of_a_term_goes_to_the_operand_that_is_computed():
    before = kernel()
    after = tidy(unscaled(before))
    same(before, after)
    second = dots(after)[1]
    assert isinstance(second.b.op, Load) and isinstance(second.a.op, Cast), print_kernel(after)


def test_the_factor_of_a_row_goes_behind_the_product():
    product = "%v = cast %y : tile<6x8xbf16>\n  %d = dot %e, %v acc=%p trans_b=true"
    text = KERNEL.replace("%d = dot %z, %e trans_a=true", product).replace("%STORE", "%u = mul %t, %t")
    before = parse_kernel(text.replace("store %o[%c0:+6, %c0:+8], %d", "store %r[%c0:+4, %c0:+6], %d"))
    after = tidy(unscaled(before))
    same(before, after)
    assert isinstance(dots(after)[1].a.op, Load) and dots(after)[1].acc is None, print_kernel(after)
