"""Loops and branches on the CPU back end: carried tiles updated in place, swapped, passed through, or read late."""

from __future__ import annotations

import numpy as np
import pytest
from native import run_native

from jtile import ir
from jtile.interpret import interpret
from jtile.lowering.cpu.cost import program_cost_ns

CASES = {
    "in place": """
    %r = for %k in %c0..%c5 step %c1 carry (%acc = %x) {
      %s = mul %acc, %y : tile<6x20xf32>
      yield %s
    }
    store %o[%c0:+6, %c0:+20], %r""",
    "old value read after the update": """
    %r, %q = for %k in %c0..%c5 step %c1 carry (%a = %x, %b = %y) {
      %s = add %a, %b : tile<6x20xf32>
      %t = mul %a, %s : tile<6x20xf32>
      yield %s, %t
    }
    %z = sub %r, %q : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %z""",
    "swap": """
    %r, %q = for %k in %c0..%c5 step %c1 carry (%a = %x, %b = %y) {
      yield %b, %a
    }
    %z = sub %r, %q : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %z""",
    "rotation with a sum": """
    %r, %q, %p = for %k in %c0..%c5 step %c1 carry (%a = %x, %b = %y, %c = %x) {
      %s = add %a, %c : tile<6x20xf32>
      yield %b, %s, %a
    }
    %z = sub %r, %q : tile<6x20xf32>
    %w = mul %z, %p : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %w""",
    "the initial value is read later": """
    %r = for %k in %c0..%c5 step %c1 carry (%a = %sum) {
      %s = mul %a, %y : tile<6x20xf32>
      %t = add %s, %sum : tile<6x20xf32>
      yield %t
    }
    %z = sub %r, %sum : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %z""",
    "empty loop": """
    %r = for %k in %c5..%c0 step %c1 carry (%a = %x) {
      %s = mul %a, %y : tile<6x20xf32>
      yield %s
    }
    store %o[%c0:+6, %c0:+20], %r""",
    "backwards with a scalar carry": """
    %r, %n = for %k in %c5..%c0 step %cm2 carry (%a = %x, %m = %c1) {
      %f = cast %k : f32
      %g = broadcast %f dims=() : tile<6x20xf32>
      %s = add %a, %g : tile<6x20xf32>
      %m2 = add %m, %k : i32
      yield %s, %m2
    }
    %nf = cast %n : f32
    %ng = broadcast %nf dims=() : tile<6x20xf32>
    %z = mul %r, %ng : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %z""",
    "branch that passes a carry through": """
    %r = for %k in %c0..%c5 step %c1 carry (%acc = %sum) {
      %two = full 2 : i32
      %odd = rem %k, %two : i32
      %p = eq %odd, %c1 : bool
      %n = if %p {
        %s = mul %acc, %y : tile<6x20xf32>
        %t = add %s, %acc : tile<6x20xf32>
        yield %t
      } else {
        yield %acc
      }
      yield %n
    }
    store %o[%c0:+6, %c0:+20], %r""",
    "branches that swap": """
    %r, %q = for %k in %c0..%c5 step %c1 carry (%a = %sum, %b = %x) {
      %two = full 2 : i32
      %odd = rem %k, %two : i32
      %p = eq %odd, %c1 : bool
      %n, %m = if %p {
        yield %b, %a
      } else {
        %s = mul %a, %y : tile<6x20xf32>
        yield %s, %b
      }
      yield %n, %m
    }
    %z = sub %r, %q : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %z""",
    "nested loops with late readers": """
    %r = for %k in %c0..%c5 step %c1 carry (%acc = %sum) {
      %e = exp %acc : tile<6x20xf32>
      %in = for %j in %c0..%k step %c1 carry (%u = %acc) {
        %h = full 0.25 : tile<6x20xf32>
        %v = mul %u, %h : tile<6x20xf32>
        yield %v
      }
      %w = logistic %e : tile<6x20xf32>
      %d = add %in, %w : tile<6x20xf32>
      yield %d
    }
    store %o[%c0:+6, %c0:+20], %r""",
    "while": """
    %r, %n = while (%a = %sum, %i = %c0) {
      %go = lt %i, %c5 : bool
      yield %go
    } do (%b, %j) {
      %s = sub %b, %y : tile<6x20xf32>
      %i2 = add %j, %c1 : i32
      yield %s, %i2
    }
    store %o[%c0:+6, %c0:+20], %r""",
    "scratch in a loop": """
    store %tmp[%c0:+6, %c0:+20], %x
    for %k in %c0..%c5 step %c1 {
      %a = load %tmp[%c0:+6, %c0:+20] : tile<6x20xf32>
      %s = mul %a, %y : tile<6x20xf32>
      store %tmp[%c0:+6, %c0:+20], %s
      %b = load %tmp[%c1:+5, %c0:+20] : tile<5x20xf32>
      store %tmp[%c0:+5, %c0:+20], %b
    }
    %r = load %tmp[%c0:+6, %c0:+20] : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %r""",
    "snapshot of a scratch": """
    store %tmp[%c0:+6, %c0:+20], %x
    %a = load %tmp[%c0:+6, %c0:+20] : tile<6x20xf32>
    %e = mul %a, %y : tile<6x20xf32>
    store %tmp[%c0:+6, %c0:+20], %y
    %b = load %tmp[%c0:+6, %c0:+20] : tile<6x20xf32>
    %z = sub %e, %b : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %z""",
    "dot into its accumulator": """
    %r = for %k in %c0..%c5 step %c1 carry (%acc = %sq) {
      %f = full 0.5 : tile<6x6xf32>
      %h = mul %acc, %f : tile<6x6xf32>
      %d = dot %x, %y acc=%h trans_b=true : tile<6x6xf32>
      yield %d
    }
    %w = full 0.0 : f32
    %z = pad %r, %w low=(0, 0) high=(0, 14) interior=(0, 0) : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %z""",
    "dot whose accumulator is read again": """
    %d = dot %x, %y acc=%sq trans_b=true : tile<6x6xf32>
    %e = dot %x, %y acc=%d trans_b=true : tile<6x6xf32>
    %g = mul %d, %e : tile<6x6xf32>
    %w = full 0.0 : f32
    %z = pad %g, %w low=(0, 0) high=(0, 14) interior=(0, 0) : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %z""",
    "operand and accumulator from one tile": """
    %e = slice %sum starts=(0, 0) stops=(6, 6) strides=(1, 1) : tile<6x6xf32>
    %p = exp %e : tile<6x6xf32>
    %q = sub %p, %sq : tile<6x6xf32>
    %r = for %k in %c0..%c5 step %c1 carry (%acc = %q) {
      %h = sin %acc : tile<6x6xf32>
      %g = cos %acc : tile<6x6xf32>
      %d = dot %h, %g acc=%acc : tile<6x6xf32>
      %u = logistic %d : tile<6x6xf32>
      yield %u
    }
    %w = full 0.0 : f32
    %z = pad %r, %w low=(0, 0) high=(0, 14) interior=(0, 0) : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %z""",
    "lazy operand and lazy accumulator of one carry": """
    %r = for %k in %c0..%c5 step %c1 carry (%acc = %sq) {
      %f = full 0.125 : tile<6x6xf32>
      %h = mul %acc, %f : tile<6x6xf32>
      %g = add %acc, %f : tile<6x6xf32>
      %d = dot %h, %g acc=%h : tile<6x6xf32>
      %u = logistic %d : tile<6x6xf32>
      yield %u
    }
    %w = full 0.0 : f32
    %z = pad %r, %w low=(0, 0) high=(0, 14) interior=(0, 0) : tile<6x20xf32>
    store %o[%c0:+6, %c0:+20], %z""",
}

HEAD = """kernel @control(
    %x_ref: ref<6x20xf32>, %y_ref: ref<6x20xf32>, %o: ref<6x20xf32, out>, %tmp: ref<6x20xf32, scratch>) grid() {
    %c0 = full 0 : i32
    %c1 = full 1 : i32
    %c5 = full 5 : i32
    %cm2 = full -2 : i32
    %x = load %x_ref[%c0:+6, %c0:+20] : tile<6x20xf32>
    %y = load %y_ref[%c0:+6, %c0:+20] : tile<6x20xf32>
    %sum = add %x, %y : tile<6x20xf32>
    %sq = dot %x, %x trans_b=true : tile<6x6xf32>
"""


@pytest.mark.parametrize("name", CASES)
def test_against_the_interpreter(name):
    kernel = ir.parse_kernel(HEAD + CASES[name] + "\n}\n")
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(-1, 1, (6, 20)).astype(np.float32) for _ in range(2)]
    (want,) = interpret(kernel, inputs)
    (got,) = run_native(kernel, inputs)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_the_cost_of_loops_that_the_place_of_a_program_bounds():
    """Such a loop counts as in the program in the middle of the grid, a loop inside of it as in the round in the
    middle; what memory bounds is a guess."""
    text = """
    kernel @bounded(%n: ref<1xi32>, %o: ref<8192xf32, out>) grid(64) {{
      %z = full 0 : i32    %s = full 128 : i32    %one = full 1 : i32
      %read = load %n[%z] : i32
      %p = program_id 0 : i32    %lo = mul %p, %s : i32    %q = add %p, %one : i32    %end = mul %q, %s : i32
      for %k in {lo}..{hi} step %one {{
        for %j in %lo..%k step %one {{
          %x = full 1.0 : f32
          store %o[%k], %x
        }}
      }}
    }}"""
    cost = lambda lo, hi: program_cost_ns(ir.parse_kernel(text.format(lo=lo, hi=hi)))
    assert cost("%lo", "%lo") < 10
    assert cost("%lo", "%end") == pytest.approx(128 * 64 * 1.3, rel=0.1)
    assert cost("%z", "%read") < 8 * 8 * 2


def test_the_cost_of_a_loop_behind_a_long_chain_of_scalars():
    """The number of rounds is found without a recursion, which Python would end."""
    chain = "\n".join(f"%n{k + 1} = add %n{k}, %p : i32" for k in range(2000))
    text = f"""
    kernel @chained(%o: ref<8192xf32, out>) grid(1) {{
      %z = full 0 : i32    %one = full 1 : i32    %p = num_programs 0 : i32    %n0 = full 0 : i32
      {chain}
      for %k in %z..%n2000 step %one {{
        %x = full 1.0 : f32
        store %o[%k], %x
      }}
    }}"""
    assert program_cost_ns(ir.parse_kernel(text)) > 2000
