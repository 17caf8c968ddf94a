"""Loop-invariant code: text in, expected text out."""

import pytest
from golden import check

from jtile.ir import For, Load, parse_kernel
from jtile.passes import hoist
from jtile.passes.hoist import small


def test_pure_ops_and_loads_of_constant_loops():
    """%b is loaded once; the scaled copy of %o depends on the loop's own stores and stays; free tiles stay."""
    check(
        hoist,
        """kernel @k(%x: ref<8xf32>, %y: ref<64xf32>, %o: ref<64xf32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c8 = full 8 : i32
          %f = full 3.0 : f32
          for %k in %c0..%c8 step %c1 {
            %b = load %x[%c0:+8]
            %e = exp %b
            %s = broadcast %f dims=() : tile<8xf32>
            %z = full 0.0 : tile<8xf32>
            %v = mul %e, %s
            %a = load %y[tile(%k, 8)]
            %r = add %a, %v
            %m = max %r, %z
            %old = load %o[%c0:+8]
            %n = add %m, %old
            store %o[%c0:+8], %n
          }
        }""",
        """
        kernel @k(%x: ref<8xf32>, %y: ref<64xf32>, %o: ref<64xf32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c8 = full 8 : i32
          %f = full 3.0 : f32
          %b = load %x[%c0:+8] : tile<8xf32>
          %e = exp %b : tile<8xf32>
          %s = broadcast %f dims=() : tile<8xf32>
          %v = mul %e, %s : tile<8xf32>
          for %k in %c0..%c8 step %c1 {
            %z = full 0.0 : tile<8xf32>
            %a = load %y[tile(%k, 8)] : tile<8xf32>
            %r = add %a, %v : tile<8xf32>
            %m = max %r, %z : tile<8xf32>
            %old = load %o[%c0:+8] : tile<8xf32>
            %n = add %m, %old : tile<8xf32>
            store %o[%c0:+8], %n
          }
        }""",
    )


def test_what_may_fail_waits_for_the_loop_to_run():
    """A load or gather of a loop that may not run would leave its array for nothing."""
    check(
        hoist,
        """kernel @k(%x: ref<8xf32>, %n: ref<i32>, %o: ref<64xf32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %hi = load %n[]
          for %k in %c0..%hi step %c1 {
            %b = load %x[%hi]
            %i = iota 0 : tile<8xi32>
            %g = gather %i, %i axis=0
            %h = add %hi, %c1
            print "{} {} {}" %b, %g, %h
          }
        }""",
        """
        kernel @k(%x: ref<8xf32>, %n: ref<i32>, %o: ref<64xf32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %hi = load %n[] : i32
          %h = add %hi, %c1 : i32
          for %k in %c0..%hi step %c1 {
            %b = load %x[%hi] : f32
            %i = iota 0 : tile<8xi32>
            %g = gather %i, %i axis=0 : tile<8xi32>
            print "{} {} {}" %b, %g, %h
          }
        }""",
    )


def test_through_two_loops_but_not_out_of_a_branch():
    check(
        hoist,
        """kernel @k(%x: ref<8xf32>, %o: ref<8xf32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c8 = full 8 : i32
          for %k in %c0..%c8 step %c1 {
            for %l in %c0..%c8 step %c1 {
              %a = load %x[%c0]
              %b = exp %a
              %t = lt %l, %k
              if %t {
                %d = log %a
                print "{}" %d
              }
              %e = add %k, %c1
              print "{} {}" %b, %e
            }
          }
        }""",
        """
        kernel @k(%x: ref<8xf32>, %o: ref<8xf32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c8 = full 8 : i32
          %a = load %x[%c0] : f32
          %b = exp %a : f32
          for %k in %c0..%c8 step %c1 {
            %e = add %k, %c1 : i32
            for %l in %c0..%c8 step %c1 {
              %t = lt %l, %k : bool
              if %t {
                %d = log %a : f32
                print "{}" %d
              }
              print "{} {}" %b, %e
            }
          }
        }""",
    )


def test_a_load_through_an_alias_stays():
    text = """
        kernel @k(%x: ref<8xf32>, %o: ref<8xf32, out>) alias(%x = %o) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c8 = full 8 : i32
          for %k in %c0..%c8 step %c1 {
            %a = load %x[%c0] : f32
            %b = add %a, %a : f32
            store %o[%c0], %b
          }
        }"""
    check(hoist, text, text)


@pytest.mark.parametrize(("programs", "most", "moves"), [(3, 8, True), (4, 8, False), (3, 4, False)])
def test_loops_over_the_tiles_of_a_program(programs, most, moves):
    """A loop from the program's own number on makes a round if no program's number is beyond its end; tiles of more
    than `most` elements stay."""
    kernel = parse_kernel(f"""kernel @k(%x: ref<8xf32>, %o: ref<3x8xf32, out>) grid({programs}) {{
      %t = program_id 0 : i32
      %c0 = full 0 : i32
      %c3 = full 3 : i32
      %s = full 3 : i32
      for %k in %t..%c3 step %s {{
        %b = load %x[%c0:+8]
        store %o[%k, %c0:+8], %b
      }}
    }}""")
    (loop,) = (op for op in small(kernel, most).body.ops if isinstance(op, For))
    assert any(isinstance(op, Load) for op in loop.body.ops) != moves
