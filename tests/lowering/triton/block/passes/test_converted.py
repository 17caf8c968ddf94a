"""Products whose right operands are converted first: a loop with a chain of them has a buffer for each, and converts
the operand of the later product while the next round's first one runs."""

from __future__ import annotations

import numpy as np
import pytest
from block_kernels import operands
from machines import machine

from jtile.interpret import interpret
from jtile.ir import (
    AllocShared,
    Arrive,
    DotAsync,
    DotWait,
    FenceShared,
    For,
    Kernel,
    LoadShared,
    Op,
    Roles,
    StoreShared,
    Wait,
    parse_kernel,
)
from jtile.lowering.triton.block.passes import NoPlan, Planned, steps
from jtile.lowering.triton.block.passes.feeds import feeds

# Attention over keys and values of 8 bits, without its maxima; `rows` of queries, a number a key.
CACHE = """
kernel @cache(%q: ref<{rows}x64xbf16>, %k: ref<128x64xf8e4m3fn>, %v: ref<128x64xf8e4m3fn>, %w: ref<128xf32>,
    %n: ref<i32>, %o: ref<{rows}x64xf32, out>) grid(1) {{
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %rounds = load %n[]
  %zero = full 0.0 : tile<{rows}x64xf32>
  %qq = load %q[tile(%c0, {rows}), tile(%c0, 64)] checked=false
  %sums = for %j in %c0..%rounds step %c1 carry (%acc = %zero) {{
    %k8 = load %k[tile(%j, 32), tile(%c0, 64)] checked=false
    %kk = cast %k8 : tile<32x64xbf16>
    %s = dot %qq, %kk trans_b=true
    %ww = load %w[tile(%j, 32)] checked=false
    %w1 = broadcast %ww dims=(1) : tile<{rows}x32xf32>
    %sw = mul %s, %w1
    %p = exp2 %sw
    %pb = cast %p : tile<{rows}x32xbf16>
    %v8 = load %v[tile(%j, 32), tile(%c0, 64)] checked=false
    %vv = cast %v8 : tile<32x64xbf16>
    %next = dot %pb, %vv acc=%acc
    yield %next
  }}
  store %o[tile(%c0, {rows}), tile(%c0, 64)], %sums checked=false
}}
"""
# The same two operands in products that need nothing of each other.
APART = (
    CACHE.replace("%next = dot %pb, %vv acc=%acc", "%next = dot %qb, %vv acc=%acc")
    .replace("    %pb = cast %p : tile<{rows}x32xbf16>\n", "")
    .replace("    %k8 = load", "    %qb = load %q[tile(%c0, {rows}), tile(%c1, 32)] checked=false\n    %k8 = load")
)


def planned(text: str, rows: int) -> tuple[Kernel, Planned]:
    kernel = parse_kernel(text.format(rows=rows))
    found = steps(kernel, machine(), {})
    assert not isinstance(found, NoPlan), str(found)
    return kernel, found


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_the_results_are_those_of_the_tile_level(rows, rounds):
    kernel, found = planned(CACHE, rows)
    q, k, v, w, _ = operands(kernel, 0)
    inputs = [q * np.asarray(0.125, q.dtype), k, v, w, np.array(rounds, np.int32)]
    (want,) = interpret(kernel, inputs)
    for seed in range(3):
        (got,) = interpret(found.kernel, inputs, seed=seed)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_each_operand_has_a_buffer():
    _, found = planned(CACHE, 128)
    plain = [op for op in found.kernel.body.ops if isinstance(op, AllocShared) and op.dtype == "bfloat16"]
    assert [op.slots for op in plain if op.shape == (32, 64)] == [None] * 2 * found.plan.consumers


def test_products_without_a_chain_share_a_buffer():
    numbers = lambda text: list(feeds(parse_kernel(text.format(rows=64))).computed.values())
    assert (numbers(APART), numbers(CACHE)) == ([0, 0], [0, 1])


def test_values_are_converted_while_scores_are_computed():
    """In a round: scores start, then the values of the round before are converted, multiplied, and given back."""
    _, found = planned(CACHE, 64)
    (roles,) = [op for op in found.kernel.body.ops if isinstance(op, Roles)]
    loops = [op for op in roles.bodies[0].walk() if isinstance(op, For)]
    (loop,) = [op for op in loops if any(isinstance(x, DotAsync) for x in op.body.ops)]
    kinds = (Wait, LoadShared, Arrive, StoreShared, FenceShared, DotAsync, DotWait)
    order: list[Op] = [op for op in loop.body.ops if isinstance(op, kinds)]
    names = [type(op).__name__ for op in order]
    assert names == [
        *("Wait", "LoadShared", "StoreShared", "FenceShared", "DotAsync"),  # this round's keys, and its scores
        *("Wait", "LoadShared", "StoreShared", "FenceShared", "DotAsync"),  # values of the round before
        *("DotWait", "LoadShared", "Arrive"),  # scores, and the numbers that came with the keys
        *("DotWait", "Arrive"),
    ]
