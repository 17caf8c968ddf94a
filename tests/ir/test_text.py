"""Printer and parser: what one writes the other reads, for every card; errors point at the place."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from jtile._errors import ParseError
from jtile.ir import (
    ELEMENTWISE,
    OPS,
    BarrierType,
    Builder,
    Full,
    Kernel,
    Loc,
    Map,
    RefType,
    SharedType,
    Value,
    copy_block,
    parse_kernel,
    parse_size,
    print_kernel,
    verify,
)
from jtile.ir.types import DTYPES

# In the printer's own spelling; every card but Map stands here or, if it belongs to the block level, below.
EVERYTHING = """\
kernel @everything(
    %x: ref<64x48xf32>,
    %n: ref<64xi32>,
    %q: ref<8x8xf4e2m1fn>,
    %same: ref<16xf32>,
    %dyn: ref<{3*n}x4xf32>,
    %o: ref<64x48xf32, out>,
    %total: ref<f32, out>,
    %low: ref<4xf32, out>,
    %kept: ref<16xf32, out>,
    %tmp: ref<8xf32, scratch>,
    %box: ref<4xf32, symmetric>,
    %came: ref<2xi32, signal>) grid(4, {n}, 1) devices(x=2, "y z"=1) \
alias(%same = %kept) init(%total = 0, %low = -inf) @"a \\"b\\".py":3 {
  %i = program_id 0 : i32
  %n0 = num_programs 1 : i32 @"f.py":12
  %sized = size {-cdiv(n, 4) + 2*n} : i64
  %c0 = full 0 : i32
  %cm1 = full -1 : i64
  %ctrue = full true : bool
  %f = full 0.1 : f32
  %m = full true : tile<16x16xbool>
  %four = full 1e-45 : tile<4xf32>
  %0 = full nan : tile<2xbf16>
  %1 = dense (1, -2, 3) : tile<3xi8>
  %2 = dense (inf, -inf, nan, -0.0, 1e-300, 1.0) : tile<2x3xf64>
  %3 = iota 1 : tile<8x16xi32>
  %a = load %x[tile(%i, 16), %c0:+16] pad=-inf : tile<16x16xf32>
  %b = load %x[tile(%i, 16, step=8), %c0:+16:2] mask=%m pad=nan checked=false : tile<16x16xf32>
  %row = load %x[%i, tile(%c0, 48)] : tile<48xf32>
  %rows = load %n[tile(%i, 16)] : tile<16xi32>
  %g = load %x[take(%rows), %c0] : tile<16xf32>
  %gg = load %x[take(%rows), take(%rows)] pad=1.5 : tile<16xf32>
  %fp4 = load %q[tile(%c0, 8), tile(%c0, 8)] : tile<8x8xf4e2m1fn>
  %s = load %total[] : f32
  store %o[tile(%i, 16), %c0:+16], %a mask=%m checked=false
  store %total[], %f
  %old = atomic add %low[%c0:+4], %four : tile<4xf32>
  %cas = atomic cas %low[%c0], %f compare=%f mask=%ctrue : f32
  %mem = alloc : ref<4x4xi4, scratch>
  %last = last_arrival %i, %c0 counters="a \\"b\\"" size=7 : bool
  %place = axis_index "x" : i32
  %there = on %box, %place axis="y z" : ref<4xf32, symmetric>
  %far = on %came, %place axis="x" : ref<2xi32, signal>
  signal set %far[%place], %c0
  wait_signal %came[%c0], %c0
  axis_barrier "y z"
  print "plain"
  print "x {} {:.3f} \\u00e9\\n" %f, %i
  assert %ctrue message="must hold, 100%"
  %4 = reduce sum %a axes=(0, 1) : f32
  %5 = arg_reduce max %a axis=1 : tile<16xi64>
  %6 = cumulative logsumexp %a axis=0 reverse=true : tile<16x16xf32>
  %sorted, %by = sort %g, %rows axis=0 keys=2 descending=true : tile<16xf32>, tile<16xi32>
  %7 = dot %a, %b trans_b=true precision="highest" : tile<16x16xf32>
  %8 = dot %a, %b acc=%7 trans_a=true : tile<16x16xf32>
  %scale = full 2.0 : tile<1x8xf8e8m0fnu>
  %9 = dot_scaled %fp4, %fp4 sb=%scale : tile<8x8xf32>
  %10 = dot_scaled %fp4, %fp4 sb=%scale acc=%9 : tile<8x8xf32>
  %11 = broadcast %row dims=(1) : tile<2x48xf32>
  %12 = reshape %a : tile<256xf32>
  %13 = transpose %a perm=(1, 0) : tile<16x16xf32>
  %14 = concat %a, %a axis=1 : tile<16x32xf32>
  %15 = slice %a starts=(0, 1) stops=(16, 9) strides=(2, 1) : tile<8x8xf32>
  %16 = pad %g, %f low=(1) high=(0) interior=(2) : tile<47xf32>
  %17 = reverse %a axes=(0) : tile<16x16xf32>
  %18 = dynamic_slice %g, [%i] sizes=(4) : tile<4xf32>
  %19 = dynamic_update %g, %18, [%i] : tile<16xf32>
  %20 = gather %g, %rows axis=0 : tile<16xf32>
  %21 = scatter min %g, %rows, %g : tile<16xf32>
  %22 = select %m, %a, %b : tile<16x16xf32>
  %23 = cast %a : tile<16x16xbf16>
  %24 = bitcast %rows : tile<16xf32>
  %z, %at = user_reduce [%g, %rows], [%f, %c0] axes=(0) : f32, i32 @"f.py":30 body(%u: f32, %v: i32, %w: f32, %y: i32) {
    %25 = max %u, %w : f32
    yield %25, %y
  }
  %26 = user_scan %g axis=0 reverse=false : tile<16xf32> body(%l: f32, %r: f32) {
    %27 = add %l, %r : f32
    yield %27
  }
  %lo = full 0 : u8
  %hi = full 9 : u8
  %step = full 2 : u8
  %28, %29 = for %k in %lo..%hi step %step stages=3 unroll=2 carry (%p = %a, %t = %f) @"f.py":40 {
    %30 = if %ctrue {
      yield %p
    } else {
      %31 = neg %p : tile<16x16xf32>
      yield %31
    }
    yield %30, %t
  }
  for %k_1 in %lo..%hi step %step {
    if %ctrue {
      print "in"
    }
  }
  %32, %33 = while (%d = %f, %e = %c0) {
    %34 = lt %e, %i : bool
    yield %34
  } do (%h, %j) {
    %35 = add %j, %c0 : i32
    yield %h, %35
  }
}
"""


BLOCK = """\
kernel @block(
    %a: ref<256x128xbf16>,
    %o: ref<256x64xf32, out>,
    %box: ref<256x64xf32, symmetric>) grid(2) devices("one device"=1) {
  %i = program_id 0 : i32
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %ctrue = full true : bool
  %A = alloc_shared : shared<64x64xbf16, slots 2> @"f.py":3
  %B = alloc_shared : shared<64x64xbf16>
  %C = alloc_shared : shared<64x64xf32>
  %full = alloc_barriers : barrier<2, arrivals 1>
  %free = alloc_barriers : barrier<1, arrivals 4>
  roles @"f.py":4 {
    role consumer warps=4 registers=240 {
      %t0 = clock : i64
      wait %full[%c0], %c0 @"f.py":12
      %A0 = slot %A[%c0] : shared<64x64xbf16>
      %Bt = transpose_shared %B : shared<64x64xbf16>
      %0 = dot_async %A0, %Bt : tile<64x64xf32>
      %1 = dot_async %A0, %B acc=%0 keep=%ctrue fast=true : tile<64x64xf32>
      dot_wait pending=1
      %2 = dot_wait %1 : tile<64x64xf32>
      arrive %free[%c0] when=%ctrue count=4
      store_shared %C, %2
      fence_shared
      kernels_wait
      kernels_wait hold=true
      role_barrier
      async_store %o[tile(%i, 64), %c0:+64] <- %C fn="add" checked=false
      async_store %o[tile(%i, 64), %c0:+64] <- %C
      store_wait 1
      store_wait 0
      %part = slice_shared %C starts=(0, 32) sizes=(8, 16) : shared<8x16xf32>
      %3 = load_shared %part : tile<8x16xf32>
      post %box[tile(%i, 8), %c0:+16], %3
      %4 = lt %3, %3 : tile<8x16xbool>
      post %box[tile(%i, 8), %c0:+16], %3 mask=%4
      %5 = receive %box[tile(%i, 8), %c0:+16] : tile<8x16xf32>
      %6 = receive %box[tile(%i, 8), %c0:+16] mask=%4 : tile<8x16xf32>
    }
    role "the producer" warps=1 {
      wait %free[%c0], %c1 when=%ctrue
      expect %full[%c0] bytes=16384
      %A1 = slot %A[%c0] : shared<64x64xbf16>
      async_load %a[tile(%i, 64), tile(%c0, 64)] -> %A1, %full[%c0]
      async_load %a[tile(%i, 64), tile(%c1, 64)] -> %B, %full[%c0] when=%ctrue pad=nan checked=false
      prefetch %a[tile(%i, 64), tile(%c1, 64)] -> %B when=%ctrue
    }
  }
}
"""


def test_every_card_round_trips():
    found = set()
    for text, level in (EVERYTHING, "tile"), (BLOCK, "block"):
        k = parse_kernel(text)
        assert print_kernel(k, locations=True) == text
        verify(k, level)
        found |= {op.mnemonic for op in k.body.walk()}
    assert found == set(OPS)


def test_what_the_parser_read_of_roles():
    k = parse_kernel(BLOCK)
    roles = k.body.ops[-1]
    assert (roles.names, roles.warps, roles.registers) == (("consumer", "the producer"), (4, 1), (240, 0))
    assert k.body.ops[4].result.type == SharedType((64, 64), "bfloat16", 2)
    assert k.body.ops[8].result.type == BarrierType(1, 4)
    assert (roles.loc, roles.bodies[0].ops[1].loc) == (Loc("f.py", 4), Loc("f.py", 12))
    copied = copy_block(k.body, lambda v: v)
    assert print_kernel(k.with_body(copied), locations=True) == BLOCK
    assert not set(copied.walk()) & set(k.body.walk())


def test_what_the_parser_read():
    k = parse_kernel(EVERYTHING)
    assert (k.grid, k.aliases, k.inits) == ((4, parse_size("n"), 1), ((3, 3),), (None, 0, -math.inf, None))
    assert (k.loc, k.body.ops[1].loc) == (Loc('a "b".py', 3), Loc("f.py", 12))
    plain = print_kernel(k)
    assert "@" not in plain.replace("@everything", "")
    assert print_kernel(parse_kernel(plain)) == plain


@pytest.mark.parametrize("fn", sorted(ELEMENTWISE))
def test_every_function_round_trips(fn):
    f = ELEMENTWISE[fn]
    for dtype in [d for d in DTYPES.values() if d.kind in f.kinds]:
        b = Builder()
        args = tuple(b.full(1, (2,), dtype.name) for _ in range(f.arity))
        b.map(fn, *args)
        text = print_kernel(Kernel("k", (), (), b.block))
        assert f" = {fn} %0" in text
        assert print_kernel(parse_kernel(text)) == text


@pytest.mark.parametrize(
    "x", [0.0, -0.0, 1e-45, 0.1, 3.4028234663852886e38, 5e-324, math.inf, -math.inf, math.nan, 1e16]
)
def test_floats_keep_their_bits(x):
    b = Builder()
    b.full(x, (), "float64")
    k = parse_kernel(print_kernel(Kernel("k", (), (), b.block)))
    assert np.float64(k.body.ops[0].value).tobytes() == np.float64(x).tobytes()


def test_numpy_numbers_print_as_numbers():
    b = Builder()
    b.full(np.float32(0.5), (), "float32")
    b.full(np.int64(3), (), "int32")
    b.full(np.bool_(True), (), "bool")
    assert [line.split(" = ")[1] for line in print_kernel(Kernel("k", (), (), b.block)).splitlines()[1:-1]] == [
        "full 0.5 : f32",
        "full 3 : i32",
        "full true : bool",
    ]


def test_names_are_hints():
    """Equal hints become different names, odd ones are spelled with underscores, numbers belong to the printer."""
    b = Builder()
    for hint in ("x", "x", "x_1", "a.b", "7", "", "2nd"):
        b.add(Full(5, (), "int32"), hint)
    ref = Value(RefType((3,), "int32"), "x")
    text = print_kernel(Kernel("k", (ref,), (), b.block))
    names = [line.split()[0] for line in text.splitlines()[1:-1]]
    assert names == ["%x_1", "%x_2", "%x_1_1", "%a_b", "%c5", "%c5_1", "%v2nd"]
    assert print_kernel(parse_kernel(text)) == text


def test_text_is_the_same_in_every_process(subprocess_env):
    """Here, where hashes have another seed, and in a process of its own."""
    code = "import sys; from jtile.ir import *; sys.stdout.write(print_kernel(parse_kernel(sys.stdin.read()), True))"
    run, env = [sys.executable, "-c", code], subprocess_env | {"PYTHONHASHSEED": "1"}
    done = subprocess.run(run, input=EVERYTHING, capture_output=True, text=True, env=env, check=True)
    assert done.stdout == print_kernel(parse_kernel(EVERYTHING), True) == EVERYTHING


def test_odd_kernel_name_and_free_layout():
    k = parse_kernel('kernel @"a-b c"() { // nothing here\n}')
    assert k.name == "a-b c"
    assert print_kernel(k) == 'kernel @"a-b c"() {\n}\n'
    k = parse_kernel("kernel @k() { %a = full 1 : i32 %b = add %a, %a  // two ops on a line\n%c = mul %b,%a:i32 }")
    assert [op.mnemonic for op in k.body.ops] == ["full", "map", "map"]


def test_names_may_return_in_another_region():
    k = parse_kernel(
        "kernel @k() { %c = full true : bool\n"
        "%r = if %c { %x = full 1 : i32 yield %x } else { %x = full 2 : i32 yield %x } }"
    )
    verify(k)
    assert "%x_1 = full 2" in print_kernel(k)


HEAD = "kernel @k(%x: ref<8xf32>, %o: ref<8xf32, out>) grid(2) {\n"
ERRORS = [
    ("  %i = program_id 0\n  %i = program_id 0\n}", "%i is defined twice", (3, 3)),
    ("  %a = load %x[%i]\n}", "%i is not defined here", (2, 16)),
    ("  %a = frobnicate %x\n}", "there is no op 'frobnicate'", (2, 8)),
    ("  %a = full 0.0 : tile<8xf99>\n}", "expected a type", (2, 19)),
    ("  %a = full 0.0 : tile<8xf32, out>\n}", "expected a type", (2, 19)),
    ("  %a = full 0.0\n}", "needs its result type", (2, 8)),
    ("  %a = iota 0 : tile<8xi32> %b = full 1.0 : tile<4xf32> %c = add %a, %b\n}", "operands of one type", (2, 62)),
    (
        "  %a = iota 0 : tile<8xi32> %c = neg %a : tile<8xf32>\n}",
        "gives tile<8xi32>, the text says tile<8xf32>",
        (2, 34),
    ),
    ("  %a, %b = iota 0 : tile<8xi32>\n}", "has 1 results, the text names 2", (2, 12)),
    ("  %a = iota 0 : tile<8xi32> %b = reduce sum %a\n}", "reduce needs axes", (2, 34)),
    ("  %a = iota 0 : tile<8xi32> %b = reduce sum %a axis=(0)\n}", "unknown attribute 'axis'", (2, 48)),
    ("  %a = iota 0 : tile<8xi32> %b = reverse %a axes=(1)\n}", "not different axes", (2, 34)),
    ("  %c = full true : bool\n  if %c { %y = full 1 : i32 }\n  %z = neg %y\n}", "%y is not defined here", (4, 12)),
    ("  %i = program_id x\n", "expected", None),
    ("  %i = program_id 0\n", "expected an op, got 'the end of the text'", (3, 1)),
    ("}\n}", "expected the end of the text", (3, 1)),
    ("  $\n}", "unexpected character '$'", (2, 3)),
    ("  store %x[], %x\n}", "takes 1 indices", (2, 3)),
    ("  %a = full 0 : i32 store %o[%a:+8], %a\n}", "this store writes tile<8xf32>, got i32", (2, 21)),
    ("  %a = full 1.5 : i32 %b = load %x[tile(%a, 4, step=2.5)]\n}", "expected a whole number", (2, 53)),
    ("  %v = while () { } do () { }\n}", "condition of a while", (2, 8)),
    ("  %f = full 0.0 : f32 for %k in %f..%f step %f { }\n}", "loop bounds", (2, 23)),
    ("  %A = alloc_shared : shared<8xf32, slot 2>\n}", "expected a type", (2, 23)),
    ("  %A = alloc_shared : shared<{n}xf32>\n}", "has a static shape", (2, 23)),
    ("  %A = alloc_shared : barrier<2>\n}", "gives shared<2xu64>, the text says barrier<2, arrivals 1>", (2, 8)),
    ("  %A = alloc_shared : tile<8xf32>\n}", "gives shared<8xf32>, the text says tile<8xf32>", (2, 8)),
    ("  %b = alloc_barriers : barrier<2, arrivals x>\n}", "expected barriers such as", (2, 25)),
    ("  %b = alloc_barriers : tile<2xf32>\n}", "needs count", (2, 8)),
    ("  %b = alloc_barriers : barrier<0>\n}", "count >= 1", (2, 8)),
    ("  roles { role x { } }\n}", "needs its number of warps", (2, 16)),
    ("  roles { role x warps=4 { } role x warps=1 { } }\n}", "roles have different names, got x, x", (2, 3)),
    ("  roles { }\n}", "every role has a name", (2, 3)),
    ("  roles { warps=4 { } }\n}", "expected 'role', got 'warps'", (2, 11)),
]


@pytest.mark.parametrize(("body", "message", "place"), ERRORS)
def test_errors_point_at_the_place(body, message, place):
    with pytest.raises(ParseError) as e:
        parse_kernel(HEAD + body)
    assert message in str(e.value)
    if place:
        assert (e.value.line, e.value.column) == place
        *_, shown, caret = str(e.value).splitlines()
        assert len(caret) - 5 == place[1] - 1
        assert shown.strip() == (HEAD + body).split("\n")[place[0] - 1].strip()


@pytest.mark.parametrize(
    "head",
    [
        "kernel k() {}",
        "kernel @k(%x ref<8xf32>) {}",
        "kernel @k(%x: ref<8xf32>, %x: ref<8xf32>) {}",
        "kernel @k() grid(1.5) {}",
        "kernel @k(%x: ref<8xf32>) init(%x = 0) {}",
        "kernel @k(%x: ref<8xf32>, %y: ref<8xf32>) alias(%x = %y) {}",
        "",
    ],
)
def test_broken_heads(head):
    with pytest.raises(ParseError, match="line 1"):
        parse_kernel(head)


def test_map_prints_as_its_function():
    b = Builder()
    x = b.full(1.0, (4,), "float32")
    b.value(Map("max", (x, x)), "y")
    assert print_kernel(Kernel("k", (), (), b.block)).splitlines()[2] == "  %y = max %0, %0 : tile<4xf32>"
