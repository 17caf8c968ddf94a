"""Common subexpressions: text in, expected text out."""

from golden import check

from jtile.passes import cse

HEAD = "kernel @k(%x: ref<8xf32>, %o: ref<8xf32, out>) grid(2)"


def test_equal_ops_and_loads():
    check(
        cse,
        HEAD
        + """ init(%o = 0) {
          %i = program_id 0
          %j = program_id 0
          %a = load %x[tile(%i, 4)]
          %b = load %x[tile(%j, 4)]
          %c = add %a, %b
          %d = add %b, %a
          %e = sub %c, %d
          %f = load %x[tile(%i, 4)] pad=1.0
          %g = add %e, %f
          store %o[tile(%i, 4)], %g
        }""",
        """
        kernel @k(%x: ref<8xf32>, %o: ref<8xf32, out>) grid(2) init(%o = 0) {
          %i = program_id 0 : i32
          %a = load %x[tile(%i, 4)] : tile<4xf32>
          %c = add %a, %a : tile<4xf32>
          %e = sub %c, %c : tile<4xf32>
          %f = load %x[tile(%i, 4)] pad=1.0 : tile<4xf32>
          %g = add %e, %f : tile<4xf32>
          store %o[tile(%i, 4)], %g
        }""",
    )


def test_different_numbers_stay_apart():
    """0 and -0, an absent and a present mask, two Allocs, a dot with and without a start."""
    text = """
        kernel @k(%x: ref<4x4xf32>, %o: ref<4x4xf32, out>) {
          %c0 = full 0 : i32
          %p = full 0.0 : tile<4x4xf32>
          %n = full -0.0 : tile<4x4xf32>
          %m = full true : tile<4x4xbool>
          %a = load %x[%c0:+4, %c0:+4] : tile<4x4xf32>
          %b = load %x[%c0:+4, %c0:+4] mask=%m : tile<4x4xf32>
          %d = dot %a, %b : tile<4x4xf32>
          %e = dot %a, %b acc=%d : tile<4x4xf32>
          %f = sub %p, %n : tile<4x4xf32>
          %g = sub %n, %p : tile<4x4xf32>
          %s = alloc : ref<4xf32, scratch>
          %t = alloc : ref<4xf32, scratch>
          store %o[%c0:+4, %c0:+4], %e
        }"""
    check(cse, text, text)


def test_a_write_between_two_loads():
    check(
        cse,
        """kernel @k(%x: ref<8xf32>, %y: ref<8xf32>, %o: ref<8xf32, out>, %p: ref<8xf32, out>) alias(%x = %o) {
          %c = full 0 : i32
          %a = load %x[%c:+8]
          %b = load %y[%c:+8]
          %d = load %o[%c:+8]
          store %o[%c:+8], %b
          %a1 = load %x[%c:+8]
          %b1 = load %y[%c:+8]
          store %p[%c:+8], %a1
          store %p[%c:+8], %b1
          store %p[%c:+8], %d
        }""",
        """
        kernel @k(%x: ref<8xf32>, %y: ref<8xf32>, %o: ref<8xf32, out>, %p: ref<8xf32, out>) alias(%x = %o) {
          %c = full 0 : i32
          %a = load %x[%c:+8] : tile<8xf32>
          %b = load %y[%c:+8] : tile<8xf32>
          %d = load %o[%c:+8] : tile<8xf32>
          store %o[%c:+8], %b
          %a1 = load %x[%c:+8] : tile<8xf32>
          store %p[%c:+8], %a1
          store %p[%c:+8], %b
          store %p[%c:+8], %d
        }""",
    )


def test_regions_see_what_dominates_them():
    """A branch may use what stands before it, not what its sibling made; a loop that writes a buffer reads it anew."""
    check(
        cse,
        """kernel @k(%x: ref<8xf32>, %s: ref<8xf32, scratch>) {
          %c = full 0 : i32
          %c1 = full 1 : i32
          %a = load %x[%c:+8]
          store %s[%c:+8], %a
          %b = load %s[%c:+8]
          %t = lt %c, %c1
          if %t {
            %e = exp %a
            %b1 = load %s[%c:+8]
            store %s[%c:+8], %e
            store %s[%c:+8], %b1
          } else {
            %e = exp %a
            %b2 = load %s[%c:+8]
            store %s[%c:+8], %e
            store %s[%c:+8], %b2
          }
          for %k in %c..%c1 step %c1 {
            %a3 = load %x[%c:+8]
            %b3 = load %s[%c:+8]
            %b4 = load %s[%c:+8]
            %f = add %b3, %b4
            %g = add %f, %a3
            store %s[%c:+8], %g
          }
        }""",
        """
        kernel @k(%x: ref<8xf32>, %s: ref<8xf32, scratch>) {
          %c = full 0 : i32
          %c1 = full 1 : i32
          %a = load %x[%c:+8] : tile<8xf32>
          store %s[%c:+8], %a
          %b = load %s[%c:+8] : tile<8xf32>
          %t = lt %c, %c1 : bool
          if %t {
            %e = exp %a : tile<8xf32>
            store %s[%c:+8], %e
            store %s[%c:+8], %b
          } else {
            %e_1 = exp %a : tile<8xf32>
            store %s[%c:+8], %e_1
            store %s[%c:+8], %b
          }
          for %k in %c..%c1 step %c1 {
            %b3 = load %s[%c:+8] : tile<8xf32>
            %f = add %b3, %b3 : tile<8xf32>
            %g = add %f, %a : tile<8xf32>
            store %s[%c:+8], %g
          }
        }""",
    )
