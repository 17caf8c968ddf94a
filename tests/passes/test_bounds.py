"""Bounds: text in, expected text out; and the intervals behind it against brute force."""

from __future__ import annotations

import itertools

import pytest
from golden import check

from jtile.ir import Builder, Kernel, Map, Value, parse_kernel
from jtile.ir.elementwise import ELEMENTWISE, compute
from jtile.ir.shapes import full_array
from jtile.ir.types import DTYPES, TileType
from jtile.passes import bounds, canonicalise
from jtile.passes.intervals import ARITHMETIC, Interval, Intervals, dtype_range


def test_tiles_that_divide_are_unchecked():
    """%x has 4 whole tiles, %y hangs over, the grid walks past the end of %z."""
    check(
        bounds,
        """kernel @k(%x: ref<32xf32>, %y: ref<30xf32>, %z: ref<24xf32>, %o: ref<4x8xf32, out>) grid(4) {
          %i = program_id 0
          %c0 = full 0 : i32
          %a = load %x[tile(%i, 8)]
          %b = load %y[tile(%i, 8)]
          %c = load %z[tile(%i, 8)]
          %d = load %z[tile(%i, 6)]
          %e = load %x[%i:+8:3]
          %f = load %x[%i:+8:5]
          store %o[%i, %c0:+8], %a
          store %o[%i, %i:+8], %b
        }""",
        """
        kernel @k(%x: ref<32xf32>, %y: ref<30xf32>, %z: ref<24xf32>, %o: ref<4x8xf32, out>) grid(4) {
          %i = program_id 0 : i32
          %c0 = full 0 : i32
          %a = load %x[tile(%i, 8)] checked=false : tile<8xf32>
          %b = load %y[tile(%i, 8)] : tile<8xf32>
          %c = load %z[tile(%i, 8)] : tile<8xf32>
          %d = load %z[tile(%i, 6)] checked=false : tile<6xf32>
          %e = load %x[%i:+8:3] checked=false : tile<8xf32>
          %f = load %x[%i:+8:5] : tile<8xf32>
          store %o[%i, %c0:+8], %a checked=false
          store %o[%i, %i:+8], %b
        }""",
    )


MASKED = """kernel @k(%x: ref<{n}xf32>, %o: ref<{n}xf32, out>) grid(4) {{
  %i = program_id 0
  %c8 = full 8 : i32
  %n = full {n} : tile<8xi32>
  %s = mul %i, %c8
  %l = iota 0 : tile<8xi32>
  %b = broadcast %s dims=() : tile<8xi32>
  %at = add %b, %l
  %m = lt %at, %n
  %a = load %x[take(%at)] mask=%m
  store %o[%s:+8], %a mask=%m
}}"""


def test_a_mask_that_cannot_fail_goes():
    check(
        bounds,
        MASKED.format(n=32),
        """
        kernel @k(%x: ref<32xf32>, %o: ref<32xf32, out>) grid(4) {
          %i = program_id 0 : i32
          %c8 = full 8 : i32
          %n = full 32 : tile<8xi32>
          %s = mul %i, %c8 : i32
          %l = iota 0 : tile<8xi32>
          %b = broadcast %s dims=() : tile<8xi32>
          %at = add %b, %l : tile<8xi32>
          %m = full true : tile<8xbool>
          %a = load %x[take(%at)] checked=false : tile<8xf32>
          store %o[%s:+8], %a checked=false
        }""",
    )


def test_a_mask_that_can_fail_stays():
    after = bounds(parse_kernel(MASKED.format(n=31)))
    load, store = after.body.ops[-2:]
    assert load.mask is not None and store.mask is not None
    assert load.checked and store.checked


def test_loops_branches_and_arithmetic():
    check(
        (bounds, canonicalise),
        """kernel @k(%x: ref<40xf32>, %n: ref<i32>, %o: ref<8xf32, out>) grid(3, 2) {
          %i = program_id 1
          %c0 = full 0 : i32
          %c2 = full 2 : i32
          %c5 = full 5 : i32
          %v = load %n[]
          for %k in %c0..%c5 step %c2 {
            %j = add %k, %i
            %a = load %x[tile(%k, 8)]
            %b = load %x[tile(%j, 8)]
            %c = load %x[%v]
            %r = rem %j, %c5
            %d = load %x[tile(%r, 8)]
            %t = lt %v, %c5
            %p = ge %v, %c0
            %both = and %t, %p
            if %both {
              %e = load %x[tile(%v, 8)]
              print "{}" %e
            } else {
              %f = load %x[tile(%v, 8)]
              print "{}" %f
            }
            %never = gt %i, %c5
            if %never { print "no" }
            print "{} {} {} {}" %a, %b, %c, %d
          }
        }""",
        """
        kernel @k(%x: ref<40xf32>, %n: ref<i32>, %o: ref<8xf32, out>) grid(3, 2) {
          %i = program_id 1 : i32
          %c0 = full 0 : i32
          %c2 = full 2 : i32
          %c5 = full 5 : i32
          %v = load %n[] checked=false : i32
          for %k in %c0..%c5 step %c2 {
            %j = add %k, %i : i32
            %a = load %x[tile(%k, 8)] checked=false : tile<8xf32>
            %b = load %x[tile(%j, 8)] : tile<8xf32>
            %c = load %x[%v] : f32
            %r = rem %j, %c5 : i32
            %d = load %x[tile(%r, 8)] checked=false : tile<8xf32>
            %t = lt %v, %c5 : bool
            %p = ge %v, %c0 : bool
            %both = and %t, %p : bool
            if %both {
              %e = load %x[tile(%v, 8)] checked=false : tile<8xf32>
              print "{}" %e
            } else {
              %f = load %x[tile(%v, 8)] : tile<8xf32>
              print "{}" %f
            }
            %never = full false : bool
            print "{} {} {} {}" %a, %b, %c, %d
          }
        }""",
    )


def test_what_may_wrap_is_unknown():
    """An int8 index that passes 127 comes back negative; a carry, a negative step, a tile with a gap."""
    text = """
        kernel @k(%x: ref<400xf32>) grid(3) {
          %i = program_id 0 : i32
          %b = cast %i : i8
          %c100 = full 100 : i8
          %m = mul %b, %c100 : i8
          %a = load %x[%m] : f32
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %cm1 = full -1 : i32
          %c9 = full 9 : i32
          %r = for %k in %c0..%c9 step %c1 carry (%w = %c0) {
            %d = load %x[%w] : f32
            %w1 = add %w, %k : i32
            yield %w1
          }
          for %l in %c9..%c0 step %cm1 {
            %e = load %x[%l] : f32
          }
        }"""
    check(bounds, text, text)


SMALL = [Interval(a, b) for a, b in itertools.combinations_with_replacement((-7, -2, -1, 0, 1, 2, 5), 2)]


@pytest.mark.parametrize("fn", sorted(ARITHMETIC))
def test_intervals_hold_every_result(fn):
    """Brute force over int8 operands: each result lies in the interval of the operands' intervals."""
    if fn == "not":
        return
    f, d = ELEMENTWISE[fn], DTYPES["int8"]
    for given in itertools.product(SMALL, repeat=f.arity) if f.arity < 3 else zip(SMALL, SMALL[5:], SMALL[9:]):
        out = ARITHMETIC[fn](*given)
        if out is None or not out.inside(Interval(-128, 127)):
            continue  # unknown, or it may wrap: then nothing is claimed
        grids = [range(i.lo, i.hi + 1) for i in given]
        values = list(itertools.product(*grids))
        arrays = [full_array(0, (len(values),), "int8") + d.numpy.type(0) for _ in grids]
        for k, a in enumerate(arrays):
            a[:] = [v[k] for v in values]
        results = compute(f, arrays).astype(int)
        assert out.lo <= results.min() and results.max() <= out.hi, (fn, given, out)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "uint64"])
def test_dtype_ranges(dtype):
    r = dtype_range(dtype)
    assert r is not None
    full_array(r.lo, (), dtype), full_array(r.hi, (), dtype)
    if dtype != "bool":
        for n in (r.lo - 1, r.hi + 1):
            with pytest.raises(OverflowError):
                full_array(n, (), dtype)


def test_not_of_integers_is_not_logic():
    b = Builder()
    x = b.full(1, (), "int32")
    b.value(Map("not", (x,)))
    k = Kernel("k", (), (), b.block)
    known = Intervals(k)
    for op in b.block.ops:
        known.visit(op)
    i = known(b.block.ops[-1].result)
    assert i is not None and i.lo <= -2 <= i.hi
    assert known(Value(TileType((), "float32"))) is None
