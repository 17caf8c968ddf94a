"""Chains whose sums fill the registers: products of a round start together, their sums are waited for at its end, and
what is one number a column comes with the operands."""

from __future__ import annotations

import numpy as np
import pytest
from block_kernels import operands
from machines import machine

from jtile.interpret import interpret
from jtile.ir import DotAsync, DotWait, For, Kernel, Load, LoadShared, Roles, Value, parse_kernel, print_kernel
from jtile.lowering.triton.block.passes import steps

# Of attention's gradient: that of keys and values, with one number (w, c) a query, here a column.
SLOPES = """
kernel @slopes(%q: ref<512x128xbf16>, %k: ref<256x128xbf16>, %v: ref<256x128xbf16>, %g: ref<512x128xbf16>,
    %w: ref<512xf32>, %c: ref<512xf32>, %dk: ref<256x128xbf16, out>, %dv: ref<256x128xbf16, out>) grid(2) {
  %i = program_id 0
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c8 = full 8 : i32
  %zero = full 0.0 : tile<128x128xf32>
  %kk = load %k[tile(%i, 128), tile(%c0, 128)] checked=false
  %vv = load %v[tile(%i, 128), tile(%c0, 128)] checked=false
  %sv, %sk = for %j in %c0..%c8 step %c1 carry (%av = %zero, %ak = %zero) {
    %qq = load %q[tile(%j, 64), tile(%c0, 128)] checked=false
    %gg = load %g[tile(%j, 64), tile(%c0, 128)] checked=false
    %ww = load %w[tile(%j, 64)] checked=false
    %cc = load %c[tile(%j, 64)] checked=false
    %s = dot %kk, %qq trans_b=true
    %w1 = broadcast %ww dims=(1) : tile<128x64xf32>
    %d = sub %s, %w1
    %p = exp2 %d
    %pb = cast %p : tile<128x64xbf16>
    %dv1 = dot %pb, %gg acc=%av
    %c2 = broadcast %cc dims=(1) : tile<128x64xf32>
    %dp = dot %vv, %gg acc=%c2 trans_b=true
    %ds = mul %dp, %p
    %dsb = cast %ds : tile<128x64xbf16>
    %dk1 = dot %dsb, %qq acc=%ak
    yield %dv1, %dk1
  }
  %rk = cast %sk : tile<128x128xbf16>
  %rv = cast %sv : tile<128x128xbf16>
  store %dk[tile(%i, 128), tile(%c0, 128)], %rk checked=false
  store %dv[tile(%i, 128), tile(%c0, 128)], %rv checked=false
}
"""


def small(kernel: Kernel) -> list[np.ndarray]:
    return [x * np.asarray(0.125, x.dtype) for x in operands(kernel, 0)]


@pytest.fixture(scope="module")
def planned():
    kernel = parse_kernel(SLOPES)
    return kernel, steps(kernel, machine(), {})


def consumer(kernel: Kernel) -> For:
    (roles,) = [op for op in kernel.body.ops if isinstance(op, Roles)]
    return next(op for op in roles.bodies[0].walk() if isinstance(op, For) and DotAsync in map(type, op.body.ops))


def test_products_start_together_and_their_sums_end_a_round(planned):
    _, found = planned
    loop = consumer(found.kernel)
    order = [op for op in loop.body.ops if isinstance(op, DotAsync | DotWait)]
    assert [type(op) for op in order] == [DotAsync, DotAsync, DotWait, DotAsync, DotWait, DotAsync, DotWait]
    s, dp, first, dv, second, dk, last = order
    assert (first.values, first.pending, second.values, second.pending) == ((s.result,), 1, (dp.result,), 1)
    assert last.values == (dv.result, dk.result) and last.pending == 0
    assert dp.acc is None  # registers that are written while another product runs would stop it
    # nothing of a round but sums and a counter goes to the next
    assert sum(len(v.shape) == 2 for v in loop.results) == 2 and len(loop.results) == 3


def test_numbers_of_columns_come_with_the_operands(planned):
    _, found = planned
    assert [r.count("+") for r in found.plan.rings] == [0, 0, 1, 1], found.plan.rings
    loop = consumer(found.kernel)
    assert not any(isinstance(op, Load) for op in loop.body.ops)
    assert sum(isinstance(op, LoadShared) and len(op.result.shape) == 1 for op in loop.body.ops) == 2


def test_the_results_are_those_of_the_tile_level(planned):
    kernel, found = planned
    inputs = small(kernel)
    want = interpret(kernel, inputs)
    for seed in (0, 1):
        for x, y in zip(interpret(found.kernel, inputs, seed=seed), want, strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), 2e-2, 2e-2)


def test_a_product_of_what_a_round_computes_does_not_start_before_that():
    """`v (2 g)T` needs nothing of `k qT`, but its right operand is stored to shared memory between the two."""
    text = SLOPES.replace("128x128", "64x128").replace("128x64", "64x64").replace("(%i, 128)", "(%i, 64)")
    text = text.replace("grid(2)", "grid(4)").replace("full 8", "full 2").replace(
        "%dp = dot %vv, %gg", "%two = full 2.0 : tile<64x128xbf16>\n%gs = mul %gg, %two\n%dp = dot %vv, %gs"
    )  # fmt: skip
    text = text.replace("%dk1 = dot %dsb, %qq acc=%ak", "%dk0 = dot %dsb, %qq acc=%ak\n%dk1 = dot %dsb, %gg acc=%dk0")
    kernel = parse_kernel(text)
    found, inputs = steps(kernel, machine(), {}), small(kernel)
    for x, y in zip(interpret(found.kernel, inputs), interpret(kernel, inputs), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), 2e-2, 2e-2)


def test_tiles_of_half_as_many_columns_are_rotated():
    """What rotation carries has room there."""
    found = steps(parse_kernel(SLOPES.replace("x64x", "x32x").replace("x64xb", "x32xb").replace(", 64)", ", 32)")
                               .replace("128x64", "128x32").replace("full 8", "full 16")), machine(), {})  # fmt: skip
    loop = consumer(found.kernel)
    assert sum(v.dtype == "bfloat16" for v in loop.results) == 2, print_kernel(found.kernel)


BEHIND = """
kernel @behind(%q: ref<256x64xbf16>, %k: ref<256x64xbf16>, %g: ref<256x64xbf16>, %o: ref<256xf32, out>) grid(2) {
  %i = program_id 0
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c4 = full 4 : i32
  %zero = full 0.0 : tile<128x64xf32>
  %qq = load %q[tile(%i, 128), tile(%c0, 64)] checked=false
  %sum = for %j in %c0..%c4 step %c1 carry (%acc = %zero) {
    %kk = load %k[tile(%j, 64), tile(%c0, 64)] checked=false
    %s = dot %qq, %kk trans_b=true
    %p = cast %s : tile<128x64xbf16>
    %d = dot %p, %kk acc=%acc
    yield %d
  }
  %gg = load %g[tile(%i, 128), tile(%c0, 64)] checked=false
  %gw = cast %gg : tile<128x64xf32>
  %m = mul %gw, %sum
  %r = reduce sum %m axes=(1)
  store %o[tile(%i, 128)], %r checked=false
}
"""


def test_what_is_loaded_behind_a_chain_comes_by_a_copy():
    kernel = parse_kernel(BEHIND)
    found = steps(kernel, machine(), {})
    assert not any(isinstance(op, Load) for op in found.kernel.body.walk()), print_kernel(found.kernel)
    assert "g tile<128x64xbf16>, resident" in found.plan.rings
    inputs = small(kernel)
    np.testing.assert_allclose(interpret(found.kernel, inputs, seed=1)[0], interpret(kernel, inputs)[0], 1e-4, 1e-4)
    values: list[Value] = [op.result for op in found.kernel.body.walk() if isinstance(op, LoadShared)]
    assert [v.shape for v in values] == [(64, 64)] * 2
