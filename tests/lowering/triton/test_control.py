"""Loops and branches as TTIR: evaluated against the interpreter, for bounds of every kind, and compiled."""

from __future__ import annotations

import numpy as np
import pytest
from device import run_device
from machines import card
from ttir import run_ttir

from jtile import ir
from jtile.interpret import interpret
from jtile.lowering.triton.compile import compile_kernel, emit_kernel
from jtile.lowering.triton.features import features

LOOP = """kernel @loop(%n: ref<3x{dt}>, %o: ref<2x{dt}, out>) grid(1) {{
  %0 = full 0 : i32
  %1 = full 1 : i32
  %2 = full 2 : i32
  %lo = {lo} : {dt}
  %hi = {hi} : {dt}
  %by = {by} : {dt}
  %zero = full 0 : {dt}
  %one = full 1 : {dt}
  %sum, %count = for %k in %lo..%hi step %by carry (%a = %zero, %b = %zero) {{
    %c = add %a, %k : {dt}
    %d = add %b, %one : {dt}
    yield %c, %d
  }}
  store %o[%0], %sum
  store %o[%1], %count
}}"""

INTS = ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"]


def limits(dt: str) -> tuple[int, int]:
    bits, signed = int(dt[1:]), dt[0] == "i"
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


def ranges(dt: str) -> list[tuple[int, int, int]]:
    least, most = limits(dt)
    out = [(0, 5, 1), (3, 3, 1), (5, 2, 1), (1, 12, 5), (most - 7, most, 3), (most - 4, most, 1), (least, least + 9, 4)]
    return out if dt[0] == "u" else [*out, (9, -3, -2), (-3, 9, -2), (least + 7, least, -3), (-5, 5, 3)]


def check(text: str, inputs, run=run_ttir) -> None:
    kernel = ir.parse_kernel(text)
    for got, want in zip(run(kernel, inputs), interpret(kernel, inputs), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("known", ["bounds and step", "step", "nothing"])
@pytest.mark.parametrize("dt", INTS)
def test_a_loop_runs_over_its_range_without_overflow(dt, known):
    for lo, hi, by in ranges(dt):
        numbers = np.array([lo, hi, by], ("int" if dt[0] == "i" else "uint") + dt[1:])
        forms = [f"full {x}" for x in (lo, hi, by)]
        loads = [f"load %n[%{k}]" for k in range(3)]
        forms = loads if known == "nothing" else [*loads[:2], forms[2]] if known == "step" else forms
        check(LOOP.format(dt=dt, lo=forms[0], hi=forms[1], by=forms[2]), [numbers])


CARRY = """kernel @carry(%n: ref<1xi32>, %x: ref<5x3x{dt}>, %y: ref<5x3x{dt}>, %o: ref<2x5x3x{dt}, out>) grid(1) {{
  %0 = full 0 : i32
  %1 = full 1 : i32
  %n0 = load %n[%0] : i32
  %a = load %x[tile(%0, 5), tile(%0, 3)] : tile<5x3x{dt}>
  %b = load %y[tile(%0, 5), tile(%0, 3)] : tile<5x3x{dt}>
  {op}
  store %o[%0, tile(%0, 5), tile(%0, 3)], %p
  store %o[%1, tile(%0, 5), tile(%0, 3)], %q
}}"""

OPS = {
    "for": """%p, %q = for %k in %0..%n0 step %1 carry (%c = %a, %d = %b) {
      yield %d, %c
  }""",
    "while": """%p, %q, %m = while (%c = %a, %d = %b, %j = %n0) {
      %t = gt %j, %0 : bool
      yield %t
  } do (%e, %f, %l) {
      %r = sub %l, %1 : i32
      yield %f, %e, %r
  }""",
    "if": """%t = gt %n0, %1 : bool
  %p, %q = if %t {
      yield %b, %a
  } else {
      yield %a, %a
  }""",
    "if in a loop": """%p, %q = for %k in %0..%n0 step %1 carry (%c = %a, %d = %b) {
      %t = gt %k, %1 : bool
      %u = if %t {
        yield %c
      } else {
        yield %d
      }
      yield %u, %c
  }""",
}
CARRIED = ["bool", "i4", "u4", "i8", "u16", "i32", "i64", "f16", "bf16", "f32", "f64", "f8e4m3fn", "f8e5m2", "f4e2m1fn"]


@pytest.mark.parametrize("form", OPS)
def test_carries_of_every_dtype(form):
    rng = np.random.default_rng(0)
    for dt in CARRIED:
        text = CARRY.format(dt=dt, op=OPS[form])
        dtype = ir.parse_kernel(text).inputs[1].type.info.numpy
        x, y = ((rng.integers(0, 2, (5, 3)) * (k + 1)).astype(dtype) for k in range(2))
        for n in (0, 1, 2, 5):
            check(text, [np.array([n], np.int32), x, y])


@pytest.mark.gpu
@pytest.mark.parametrize("form", OPS)
def test_carries_on_the_device(form):
    for dt in ("bool", "i4", "u16", "i64", "bf16", "f64", "f8e4m3fn"):
        text = CARRY.format(dt=dt, op=OPS[form])
        dtype = ir.parse_kernel(text).inputs[1].type.info.numpy
        x, y = (np.full((5, 3), k).astype(dtype) for k in range(2))
        for n in (0, 1, 5):
            check(text, [np.array([n], np.int32), x, y], run_device)


@pytest.mark.gpu
@pytest.mark.parametrize("dt", INTS)
def test_ranges_on_the_device(dt):
    for lo, hi, by in ranges(dt):
        numbers = np.array([lo, hi, by], ("int" if dt[0] == "i" else "uint") + dt[1:])
        forms = [f"load %n[%{k}]" for k in range(3)]
        check(LOOP.format(dt=dt, lo=forms[0], hi=forms[1], by=forms[2]), [numbers], run_device)


def test_a_loop_and_a_branch_without_results():
    text = """kernel @effects(%n: ref<1xi32>, %o: ref<8xi32, out>) grid(1) {
  %0 = full 0 : i32
  %1 = full 1 : i32
  %4 = full 4 : i32
  %8 = full 8 : i32
  %n0 = load %n[%0] : i32
  for %k in %0..%8 step %1 {
    %t = lt %k, %n0 : bool
    if %t {
      store %o[%k], %1
    } else {
      store %o[%k], %4
    }
  }
}"""
    for n in (0, 3, 9):
        check(text, [np.array([n], np.int32)])


def test_the_padding_of_a_carry_is_not_known_in_the_body():
    text = """kernel @fill(%x: ref<1x5xf32>, %o: ref<1x1xf32, out>) grid(1) {
  %0 = full 0 : i32
  %1 = full 1 : i32
  %5 = full 5 : i32
  %a = load %x[tile(%0, 1), tile(%0, 5)] : tile<1x5xf32>
  %z = full 0.0 : tile<1x5xf32>
  %one = full 1.0 : tile<1x5xf32>
  %ones = full 1.0 : tile<5x1xf32>
  %zero = full 0.0 : tile<1x1xf32>
  %p, %q = for %k in %0..%5 step %1 carry (%c = %z, %s = %zero) {
    %d = add %c, %one : tile<1x5xf32>
    %t = dot %c, %ones acc=%s : tile<1x1xf32>
    yield %d, %t
  }
  %r = dot %p, %ones acc=%q : tile<1x1xf32>
  store %o[tile(%0, 1), tile(%0, 1)], %r
}"""
    check(text, [np.arange(5, dtype=np.float32)[None]])


def test_what_the_pipeliner_reads():
    text = LOOP.format(dt="i32", lo="full 0", hi="load %n[%1]", by="full 1").replace("carry", "stages=4 unroll=2 carry")
    ttir, _ = emit_kernel(ir.parse_kernel(text), features("sm_90"))
    assert "{tt.num_stages = 4 : i32, tt.loop_unroll_factor = 2 : i32}" in ttir
    assert "scf.for" in ttir and " : i32 {" in ttir  # a step of one needs no wider counter


def test_the_option_goes_before_what_loops_ask_for():
    for hint in ("stages=4 carry", "carry"):
        text = LOOP.format(dt="i32", lo="full 0", hi="load %n[%1]", by="full 1").replace("carry", hint)
        for arch in ("sm_90", "gfx942"):
            ttir, _ = emit_kernel(ir.parse_kernel(text), features(arch), num_stages=5)
            assert "tt.num_stages = 5 :" in ttir and "tt.num_stages = 4 :" not in ttir


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_every_form_compiles(arch):
    loop = LOOP.format(dt="u64", lo="load %n[%0]", hi="load %n[%1]", by="load %n[%2]")
    forms = [CARRY.format(dt="bf16", op=OPS["while"]), CARRY.format(dt="bool", op=OPS["if in a loop"])]
    for text in (loop, *forms):
        assert compile_kernel(ir.parse_kernel(text), card(arch)).image
