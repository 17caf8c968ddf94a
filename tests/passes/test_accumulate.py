"""Accumulation: stores where programs cannot meet, sums carried by loops; and what stays atomic."""

from __future__ import annotations

import numpy as np
import pytest
from accumulation import atomics, carries, check, expect, kernel, norm, ops

from jtile.interpret import interpret
from jtile.ir import Load, Store, parse_kernel, print_kernel
from jtile.passes.accumulate import Pieces, Result, accumulate

# -- plain stores -----------------------------------------------------------------------------------------------------


def test_programs_with_tiles_of_their_own_store_them_rounded():
    pieces = check(
        """kernel @k(%x: ref<20x8xf32>, %o: ref<20x8xf32, out>) grid(3) init(%o = 0) {
          %i = program_id 0 : i32
          %c0 = full 0 : i32
          %v = load %x[tile(%i, 8), %c0:+8]
          %d = add %v, %v
          %0 = atomic add %o[tile(%i, 8), %c0:+8], %d
        }""",
        ("bfloat16",),
    )
    assert pieces.inputs == ((0,),)
    assert pieces.results == (Result(0, 0, 0),)
    expect(
        pieces,
        """
        kernel @k(%x: ref<20x8xf32>, %o: ref<20x8xbf16, out>) grid(3) {
          %i = program_id 0 : i32
          %c0 = full 0 : i32
          %v = load %x[tile(%i, 8), %c0:+8] : tile<8x8xf32>
          %d = add %v, %v : tile<8x8xf32>
          %0 = cast %d : tile<8x8xbf16>
          store %o[tile(%i, 8), %c0:+8], %0
        }
        """,
    )


def test_what_programs_leave_out_keeps_the_zero():
    """The last row belongs to nobody; a mask leaves lanes out; a stride leaves elements between."""
    left = "%i = program_id 0\n%v = load %x[%i]\n%0 = atomic add %o[%i], %v"
    pieces = check(kernel(left, "%x: ref<4xf32>, %o: ref<5xf32, out>", "4"), ("float16",))
    assert (pieces.kernels[0].inits, pieces.kernels[0].outputs[0].dtype, atomics(pieces)) == ((0,), "float16", 0)
    masked = """
      %i = program_id 0
      %v = load %x[tile(%i, 2)]
      %m = lt %i, %c3
      %b = broadcast %m dims=() : tile<2xbool>
      %0 = atomic add %o[tile(%i, 2)], %v mask=%b
    """
    pieces = check(kernel(masked, "%x: ref<8xf32>, %o: ref<8xf32, out>", "4"))
    assert (pieces.kernels[0].inits, atomics(pieces), ops(pieces, Store)) == ((0,), 0, 1)
    comb = "%i = program_id 0\n%j = mul %i, %c4\n%v = load %x[%j:+2]\n%0 = atomic add %o[%j:+2:2], %v"
    pieces = check(kernel(comb, "%x: ref<20xf32>, %o: ref<16xf32, out>", "4"))
    assert (pieces.kernels[0].inits, atomics(pieces)) == ((0,), 0)


@pytest.mark.parametrize(
    ("index", "shape", "grid"),
    [
        ("%i, %j", "3x4", "3, 4"),
        ("%j, %i", "4x3", "3, 4"),
        ("tile(%i, 2), tile(%j, 3)", "6x12", "3, 4"),
        ("tile(%i, 2, step=5), tile(%j, 3)", "14x12", "3, 4"),
        ("%ij", "12", "3, 4"),  # row-major
        ("tile(%ij, 2)", "24", "3, 4"),
        ("%i4:+3, %j", "12x4", "3, 4"),
        ("%i:+4:3, %j", "12x4", "3, 4"),  # interleaved
        ("%back, %j", "3x4", "3, 4"),  # from the end
        ("tile(%i, 2), tile(%j, 3)", "5x11", "3, 4"),  # over the edges
    ],
)
def test_index_maps_that_tell_programs_apart(index, shape, grid):
    sizes = {"tile(%i, 2), tile(%j, 3)": "tile<2x3xf32>", "tile(%i, 2, step=5), tile(%j, 3)": "tile<2x3xf32>",
             "tile(%ij, 2)": "tile<2xf32>", "%i4:+3, %j": "tile<3xf32>", "%i:+4:3, %j": "tile<4xf32>"}  # fmt: skip
    wide = sizes.get(index, "f32")
    body = f"""
      %i = program_id 0
      %j = program_id 1
      %r = mul %i, %c4
      %ij = add %r, %j
      %i4 = mul %i, %c4
      %back = sub %c2, %i
      %v = load %x[%ij]
      %b = {"add %v, %v" if wide == "f32" else f"broadcast %v dims=() : {wide}"}
      %0 = atomic add %o[{index}], %b
    """
    pieces = check(kernel(body, f"%x: ref<12xf32>, %o: ref<{shape}xf32, out>", grid), ("bfloat16",))
    assert (atomics(pieces), ops(pieces, Load), pieces.kernels[0].outputs[0].dtype) == (0, 1, "bfloat16")


def test_program_ids_taken_apart_by_division():
    """Head h of 6 adds to key head h // 3: two grid axes, of which one is summed."""
    body = """
      %h = program_id 0
      %s = sign %h
      %d = div %h, %c3
      %n = ne %s, %c1
      %m = rem %h, %c3
      %z = ne %m, %c0
      %b = and %n, %z
      %e = sub %d, %c1
      %g = select %b, %e, %d
      %v = load %x[%h, %c0:+4]
      %0 = atomic add %k[%g, %c0:+4], %v
      %1 = atomic add %q[%g, %m, %c0:+4], %v
    """
    pieces = check(
        kernel(body, "%x: ref<6x4xf32>, %k: ref<2x4xf32, out>, %q: ref<2x3x4xf32, out>", "6", "%k = 0, %q = 0"),
        ("bfloat16", "bfloat16"),
    )
    assert atomics(pieces) == 0
    assert [r.partials for r in pieces.results] == [1, 0]
    assert pieces.kernels[pieces.results[1].piece].outputs[pieces.results[1].output].dtype == "bfloat16"


ROWS_AND_COLUMNS = """
  %i = program_id 0
  %r0 = iota 0 : tile<3x2xi32>
  %c = iota 1 : tile<3x2xi32>
  %f = full 3 : tile<3x2xi32>
  %p = broadcast %i dims=() : tile<3x2xi32>
  %b = mul %p, %f
  %r = add %r0, %b
  %v = load %x[take(%r), take(%c)]
  %0 = atomic add %o[{index}], %v
"""


@pytest.mark.parametrize(
    ("index", "stored"),
    [
        ("take(%r), take(%c)", True),
        ("take(%c), take(%r)", True),
        ("take(%r), take(%r)", False),  # a diagonal: columns of the tile meet
        ("take(%r0), take(%c)", False),  # the same rows in every program
    ],
)
def test_gathers_that_count(index, stored):
    """Rows and columns as NumPy writes them are affine in the lanes."""
    text = kernel(ROWS_AND_COLUMNS.format(index=index), "%x: ref<8x2xf32>, %o: ref<8x8xf32, out>", "3")
    pieces = check(text, ("bfloat16",))
    assert (pieces.kernels[0].outputs[0].dtype == "bfloat16") == stored
    assert pieces.results[0].partials == (index == "take(%r0), take(%c)")
    assert (atomics(pieces) == 0) == ("%c" in index)


def test_gathers_of_every_row_leave_no_start():
    text = kernel(ROWS_AND_COLUMNS.format(index="take(%r), take(%c)"), "%x: ref<8x2xf32>, %o: ref<8x2xf32, out>", "3")
    assert check(text).kernels[0].inits == (None,)
    back = text.replace("%r = add %r0, %b", "%q = full 7 : tile<3x2xi32>\n%r1 = add %r0, %b\n%r = sub %q, %r1")
    pieces = check(back)
    assert (atomics(pieces), pieces.kernels[0].inits) == (0, (0,)), "row -1 is none"


def test_a_row_of_its_own_does_not_part_the_lanes():
    body = """
      %i = program_id 0
      %v = load %x[%c0:+4]
      %t = load %n[%c0:+4]
      %0 = atomic add %o[%i, take(%t)], %v
    """
    text = kernel(body, "%x: ref<4xf32>, %n: ref<4xi32>, %o: ref<4x8xf32, out>", "4")
    assert atomics(check(text, (), [np.ones(4, np.float32), np.array([1, 1, 3, 7], np.int32)])) == 1


# -- several statements -----------------------------------------------------------------------------------------------


def test_two_statements_at_one_place_are_one_store():
    body = """
      %i = program_id 0
      %v = load %x[tile(%i, 4)]
      %0 = atomic add %o[tile(%i, 4)], %v
      %w = mul %v, %v
      %1 = atomic add %o[tile(%i, 4)], %w
    """
    pieces = check(kernel(body, "%x: ref<16xf32>, %o: ref<16xf32, out>", "4"), ("float16",))
    assert (ops(pieces, Store), ops(pieces, Load), pieces.kernels[0].inits) == (1, 1, (None,))


def test_the_first_statement_stores_and_later_ones_add():
    """Columns of the program's own rows, after the rows as a whole."""
    body = """
      %i = program_id 0
      %v = load %x[tile(%i, 2), %c0:+4]
      %0 = atomic add %o[tile(%i, 2), %c0:+4], %v
      %w = load %x[tile(%i, 2), %c1]
      %1 = atomic add %o[tile(%i, 2), %c2], %w
    """
    pieces = check(kernel(body, "%x: ref<8x4xf32>, %o: ref<8x4xf32, out>", "4"), ("bfloat16",))
    assert (ops(pieces, Store), ops(pieces, Load), pieces.kernels[0].inits) == (2, 3, (None,))
    assert pieces.kernels[0].outputs[0].dtype == "float32", "what is read again is not rounded"
    pieces = check(kernel(body.replace("%c0:+4], %v", "%c0:+3], %v").replace("%c0:+4]", "%c0:+3]"),
                          "%x: ref<8x4xf32>, %o: ref<8x4xf32, out>", "4"))  # fmt: skip
    assert pieces.kernels[0].inits == (0,)


def test_mirrored_statements_of_different_programs_meet():
    """Program i adds at i and at 3 - i."""
    body = """
      %i = program_id 0
      %j = sub %c3, %i
      %v = load %x[%i]
      %0 = atomic add %o[%i], %v
      %1 = atomic add %o[%j], %v
    """
    pieces = check(kernel(body, "%x: ref<4xf32>, %o: ref<4xf32, out>", "4"))
    assert pieces.results[0].partials == 1


def test_statements_side_by_side():
    """Two windows of a program, 4 elements on: with 8 elements a program they stay apart, with 4 they do not; and an
    offset that data give is the same in every program, but two of them need not be equal."""
    body = """
      %i = program_id 0
      %s = mul %i, STEP
      FIRST
      %b = add %s, %c4
      %v = load %x[%i:+4]
      %0 = atomic add %o[%a:+4], %v
      SECOND
      %1 = atomic add %o[%e:+4], %v
    """
    same = "%n0 = load %n[%c0]\n%a = add %s, %n0", "%e = add %b, %n0"
    other = "%n0 = load %n[%c0]\n%a = add %s, %n0", "%n1 = load %n[%c1]\n%e = add %b, %n1"
    none = "%a = add %s, %c0", "%e = add %b, %c0"
    for step, (first, second), partial in [("%c8", none, 0), ("%c4", none, 1), ("%c8", same, 0), ("%c8", other, 1)]:
        text = body.replace("STEP", step).replace("FIRST", first).replace("SECOND", second)
        text = kernel(text, "%x: ref<8xf32>, %n: ref<2xi32>, %o: ref<48xf32, out>", "4")
        pieces = check(text, (), [np.arange(8, dtype=np.float32), np.array([1, 4], np.int32)])
        assert (atomics(pieces), pieces.results[0].partials) == (0, partial)


# -- loops ------------------------------------------------------------------------------------------------------------

SUM = """
  %i = program_id 0
  %w = load %x[tile(%i, 4)]
  for %k in {lo}..{hi} step %c1 {{
    %v = load %y[tile(%k, 4)]
    %m = mul %v, %w
    %0 = atomic add %o[tile(%i, 4)], %m
  }}
"""
REFS = "%x: ref<16xf32>, %y: ref<16xf32>, %n: ref<i32>, %o: ref<16xf32, out>"


def test_a_sum_over_a_loop_is_carried():
    pieces = check(kernel(SUM.format(lo="%c0", hi="%c4"), REFS, "4"), ("bfloat16",))
    expect(
        pieces,
        """
        kernel @k(%x: ref<16xf32>, %y: ref<16xf32>, %o: ref<16xbf16, out>) grid(4) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c4 = full 4 : i32
          %i = program_id 0 : i32
          %w = load %x[tile(%i, 4)] checked=false : tile<4xf32>
          %0 = full 0.0 : tile<4xf32>
          %o_sum = for %k in %c0..%c4 step %c1 carry (%o_sum_1 = %0) {
            %v = load %y[tile(%k, 4)] checked=false : tile<4xf32>
            %m = mul %v, %w : tile<4xf32>
            %o_sum_2 = add %o_sum_1, %m : tile<4xf32>
            yield %o_sum_2
          }
          %1 = cast %o_sum : tile<4xbf16>
          store %o[tile(%i, 4)], %1 checked=false
        }
        """,
    )
    assert pieces.inputs == ((0, 1),)


@pytest.mark.parametrize("n", [0, 1, 4])
def test_rounds_that_data_decide(n):
    body = "%h = load %n[]\n" + SUM.format(lo="%c0", hi="%h")
    inputs = [np.arange(16, dtype=np.float32), np.arange(16, dtype=np.float32), np.asarray(n, np.int32)]
    pieces = check(kernel(body, REFS, "4"), ("bfloat16",), inputs)
    assert (atomics(pieces), carries(pieces.kernels[0])) == (0, 1)


def test_a_place_that_may_not_exist_waits_for_the_loop():
    """The index of data is an error unless the loop runs: nothing of it stands after the loop."""
    body = """
      %h = load %n[]
      %p = load %n[]
      for %k in %c0..%h step %c1 {
        %v = load %x[%k]
        %0 = atomic add %o[%p], %v
      }
    """
    text = kernel(body, "%x: ref<4xf32>, %n: ref<i32>, %o: ref<2xf32, out>", "1")
    for n in (0, 1):
        pieces = check(text, (), [np.ones(4, np.float32), np.asarray(n, np.int32)])
        assert carries(pieces.kernels[0]) == 0


def test_branches_of_a_loop_feed_one_sum():
    """Both branches, and a mask that changes from round to round."""
    body = """
      %i = program_id 0
      for %k in %c0..%c4 step %c1 {
        %v = load %x[tile(%k, 4)]
        %c = lt %k, %i
        if %c {
          %0 = atomic add %o[tile(%i, 4)], %v
        } else {
          %w = mul %v, %v
          %m = eq %v, %w
          %1 = atomic add %o[tile(%i, 4)], %w mask=%m
        }
      }
    """
    pieces = check(kernel(body, "%x: ref<16xf32>, %o: ref<16xf32, out>", "4"), ("bfloat16",))
    assert (atomics(pieces), carries(pieces.kernels[0]), pieces.kernels[0].inits) == (0, 1, (None,))


def test_rounds_that_overlap_add_in_memory():
    """A window that slides inside of the program's own row: read, add, write; no other program is there."""
    body = """
      %i = program_id 0
      for %k in %c0..%c4 step %c1 {
        %v = load %x[%i, %k:+3]
        %0 = atomic add %o[%i, %k:+3], %v
      }
    """
    pieces = check(kernel(body, "%x: ref<4x8xf32>, %o: ref<4x8xf32, out>", "4"), ("bfloat16",))
    assert (atomics(pieces), ops(pieces, Load), pieces.kernels[0].inits) == (0, 2, (0,))
    assert pieces.kernels[0].outputs[0].dtype == "float32"


def test_a_while_adds_in_memory():
    body = """
      %i = program_id 0
      %r = while (%a = %c0) {
        %t = lt %a, %i
        yield %t
      } do (%b) {
        %v = load %x[%b]
        %0 = atomic add %o[%i], %v
        %n = add %b, %c1
        yield %n
      }
    """
    text = kernel(body, "%x: ref<4xf32>, %o: ref<4xf32, out>", "4")
    pieces = check(text)
    assert (atomics(pieces), pieces.kernels[0].inits) == (0, (0,))


# -- what stays as it is ----------------------------------------------------------------------------------------------


def test_a_kernel_without_accumulation_is_the_same_object():
    body = "%i = program_id 0\n%v = load %x[%i]\nstore %o[%i], %v"
    k = parse_kernel(kernel(body, "%x: ref<4xf32>, %o: ref<4xf32, out>", "4"))
    assert accumulate(k, (None,)) == Pieces((k,), ((0,),), (Result(0, 0),))


@pytest.mark.parametrize(
    "body",
    [
        "%t = load %n[%c0:+4]\n%0 = atomic add %o[take(%t)], %v",  # rows that data name, maybe twice
        "%0 = atomic max %o[%i], %s",
        "%0 = atomic add %o[%i], %s\n%1 = atomic xchg %o[%i], %0",  # old values
        '%0 = atomic add %o[%c0], %s\n%w = add %s, %s\nprint "{}" %w',  # each program speaks for itself
    ],
)
def test_what_stays_atomic(body):
    first = "%i = program_id 0\n%v = load %x[%c0:+4]\n%s = load %x[%i]\n"
    text = kernel(first + body, "%x: ref<4xf32>, %n: ref<4xi32>, %o: ref<8xf32, out>", "4")
    inputs = [np.ones(4, np.float32), np.array([1, 1, 3, 7], np.int32)]
    if "xchg" in body:
        assert atomics(accumulate(parse_kernel(text), ("bfloat16",))) == 2
    else:
        assert atomics(check(text, (None,), inputs)) > 0


@pytest.mark.parametrize(("init", "dtype"), [("1.5", "f32"), ("0", "i32"), ("0", "f16")])
def test_other_starts_and_dtypes_are_no_gradients(init, dtype):
    text = kernel("%i = program_id 0\n%v = load %x[%i]\n%0 = atomic add %o[%i], %v",
                  f"%x: ref<4x{dtype}>, %o: ref<4x{dtype}, out>", "4", f"%o = {init}")  # fmt: skip
    pieces = check(text)
    assert atomics(pieces) == 1
    assert pieces.kernels[0].inits == (float(init) if "." in init else int(init),)


def test_float64_accumulates_as_float32_does():
    text = norm(10).replace("f32", "f64")
    pieces = check(text, ("float32", "float64"))
    assert [o.dtype for o in pieces.kernels[0].outputs] == ["float32", "float64"]


def test_other_outputs_come_along():
    """A histogram of ints, a plain output, scratch, and a float output with a start of its own."""
    body = """
      %i = program_id 0
      %v = load %x[tile(%i, 2)]
      %f = cast %v : tile<2xi32>
      %s = reduce sum %f axes=(0)
      %e = and %s, %c1
      %0 = atomic add %h[%e], %c1
      store %y[tile(%i, 2)], %v
      store %t[%c0:+2], %v
      %u = load %t[%c0:+2]
      %1 = atomic add %dw[%c0:+2], %u
    """
    refs = "%x: ref<300xf32>, %h: ref<2xi32, out>, %y: ref<300xf32, out>, %dw: ref<2xf32, out>, %t: ref<2xf32, scratch>"
    pieces = check(kernel(body, refs, "150", "%h = 0, %dw = 0"))
    assert (len(pieces.kernels), atomics(pieces)) == (1, 1)
    assert [r.partials for r in pieces.results] == [0, 0, 1]


def test_an_output_that_is_read_back_keeps_its_reader():
    body = """
      %i = program_id 0
      %v = load %x[%i, %c0:+4]
      store %y[%i, %c0:+4], %v
      for %k in %c0..%c4 step %c1 {
        %w = load %y[%i, %k]
        %0 = atomic add %o[%k], %w
      }
    """
    refs = "%x: ref<8x4xf32>, %y: ref<8x4xf32, out>, %o: ref<4xf32, out>"
    pieces = check(kernel(body, refs, "8"))
    assert (len(pieces.kernels), atomics(pieces)) == (1, 0)


def test_an_output_that_shares_its_input_stays():
    text = """kernel @k(%x: ref<8xf32>, %o: ref<8xf32, out>, %d: ref<8xf32, out>) grid(4) alias(%x = %o) init(%d = 0) {
      %i = program_id 0 : i32
      %v = load %x[tile(%i, 2)]
      %0 = atomic add %o[tile(%i, 2)], %v
      %1 = atomic add %d[tile(%i, 2)], %v
    }"""
    pieces = check(text, (None, "bfloat16"))
    assert pieces.kernels[0].aliases == ((0, 0),)
    assert (atomics(pieces), pieces.kernels[0].outputs[1].dtype) == (1, "bfloat16")


def test_the_same_kernel_gives_the_same_pieces():
    texts = {"".join(map(print_kernel, accumulate(parse_kernel(norm(300)), (None, None)).kernels)) for _ in range(3)}
    assert len(texts) == 1


def test_an_empty_grid_leaves_the_zeros():
    k = parse_kernel(norm(0))
    pieces = accumulate(k, (None, None))
    assert pieces.kernels == (k,)
    assert not interpret(k, [np.ones((0, 4), np.float32), np.ones(4, np.float32)])[1].any()
