"""Ref forwarding: text in, expected text out."""

from golden import check

from jtile.passes import ref_forwarding


def test_scratch_becomes_a_carry():
    """A scratch accumulator that is used whole, in a loop and under a branch."""
    check(
        ref_forwarding,
        """kernel @k(%x: ref<64xf32>, %o: ref<8xf32, out>, %acc: ref<8xf32, scratch>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c8 = full 8 : i32
          %z = full 0.0 : tile<8xf32>
          store %acc[%c0:+8], %z
          for %k in %c0..%c8 step %c1 stages=3 {
            %a = load %x[tile(%k, 8)]
            %t = lt %k, %c1
            if %t {
              %old = load %acc[tile(%c0, 8)]
              %new = add %old, %a
              store %acc[tile(%c0, 8)], %new
            }
          }
          %r = load %acc[%c0:+8]
          store %o[%c0:+8], %r
        }""",
        """
        kernel @k(%x: ref<64xf32>, %o: ref<8xf32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c8 = full 8 : i32
          %z = full 0.0 : tile<8xf32>
          %acc = for %k in %c0..%c8 step %c1 stages=3 carry (%acc_1 = %z) {
            %a = load %x[tile(%k, 8)] : tile<8xf32>
            %t = lt %k, %c1 : bool
            %acc_2 = if %t {
              %new = add %acc_1, %a : tile<8xf32>
              yield %new
            } else {
              yield %acc_1
            }
            yield %acc_2
          }
          store %o[%c0:+8], %acc
        }""",
    )


def test_alloc_in_a_while():
    check(
        ref_forwarding,
        """kernel @k(%n: ref<i32>, %o: ref<i32, out>) {
          %c1 = full 1 : i32
          %s = alloc : ref<i32, scratch>
          %a = load %n[]
          store %s[], %a
          %r = while (%i = %c1) {
            %v = load %s[]
            %go = lt %i, %v
            yield %go
          } do (%j) {
            %w = load %s[]
            %w1 = sub %w, %c1
            store %s[], %w1
            %j1 = add %j, %c1
            yield %j1
          }
          %last = load %s[]
          store %o[], %last
        }""",
        """
        kernel @k(%n: ref<i32>, %o: ref<i32, out>) {
          %c1 = full 1 : i32
          %a = load %n[] : i32
          %r, %s = while (%i = %c1, %s_1 = %a) {
            %go = lt %i, %s_1 : bool
            yield %go
          } do (%j, %s_2) {
            %w1 = sub %s_2, %c1 : i32
            %j1 = add %j, %c1 : i32
            yield %j1, %w1
          }
          store %o[], %s
        }""",
    )


def test_used_in_parts_it_stays_memory():
    """The masked store, the half, and the strided span keep their scratch."""
    text = """
        kernel @k(%o: ref<8xf32, out>, %s: ref<8xf32, scratch>) {
          %c0 = full 0 : i32
          %z = full 0.0 : tile<8xf32>
          store %s[%c0:+8], %z
          %h = load %s[%c0:+4] : tile<4xf32>
          store %o[%c0:+4:2], %h
        }"""
    check(ref_forwarding, text, text)


def test_store_then_load_of_the_same_lanes():
    """Also for outputs; not where a lane may hang over (it would read the pad), nor after another store."""
    check(
        ref_forwarding,
        """kernel @k(%x: ref<8xf32>, %o: ref<8xf32, out>, %p: ref<32xf32, out>) grid(2) {
          %i = program_id 0
          %c0 = full 0 : i32
          %a = load %x[tile(%i, 4)]
          store %o[tile(%i, 4)], %a checked=false
          %b = load %o[tile(%i, 4)]
          %c = load %o[tile(%i, 4, step=3)]
          store %p[tile(%i, 4)], %b
          %d = load %p[tile(%i, 4)]
          store %p[tile(%i, 4)], %c
          store %p[tile(%i, 4)], %d checked=false
          store %p[%i], %t
          %e = load %p[tile(%i, 4)]
          store %p[tile(%i, 4)], %e
        }""".replace("%a = load", "%t = full 1.0 : f32\n%a = load"),
        """
        kernel @k(%x: ref<8xf32>, %o: ref<8xf32, out>, %p: ref<32xf32, out>) grid(2) {
          %i = program_id 0 : i32
          %c0 = full 0 : i32
          %t = full 1.0 : f32
          %a = load %x[tile(%i, 4)] : tile<4xf32>
          store %o[tile(%i, 4)], %a checked=false
          %c = load %o[tile(%i, 4, step=3)] : tile<4xf32>
          store %p[tile(%i, 4)], %a
          %d = load %p[tile(%i, 4)] : tile<4xf32>
          store %p[tile(%i, 4)], %c
          store %p[tile(%i, 4)], %d checked=false
          store %p[%i], %t
          %e = load %p[tile(%i, 4)] : tile<4xf32>
          store %p[tile(%i, 4)], %e
        }""",
    )


def test_stores_that_nobody_reads():
    check(
        ref_forwarding,
        """kernel @k(%o: ref<8xf32, out>, %s: ref<8xf32, scratch>, %t: ref<4xi32, scratch>) {
          %c0 = full 0 : i32
          %z = full 0.0 : tile<4xf32>
          store %s[%c0:+4], %z
          %old = atomic add %t[%c0], %c0
          for %k in %c0..%c0 step %c0 {
            store %s[%k:+4], %z
          }
          %u = alloc : ref<4xf32, scratch>
          store %u[%c0:+2], %h
          store %o[%c0:+4], %z
        }""".replace("store %s[%c0:+4], %z\n", "%h = full 1.0 : tile<2xf32>\nstore %s[%c0:+4], %z\n", 1),
        """
        kernel @k(%o: ref<8xf32, out>) {
          %c0 = full 0 : i32
          %z = full 0.0 : tile<4xf32>
          %h = full 1.0 : tile<2xf32>
          for %k in %c0..%c0 step %c0 {
          }
          store %o[%c0:+4], %z
        }""",
    )


def test_an_atomic_whose_old_value_is_used_reads():
    text = """
        kernel @k(%o: ref<i32, out>, %t: ref<4xi32, scratch>) {
          %c0 = full 0 : i32
          store %t[%c0], %c0
          %old = atomic add %t[%c0], %c0 : i32
          store %o[], %old
        }"""
    check(ref_forwarding, text, text)
