"""Dead code: text in, expected text out."""

from golden import check

from jtile.passes import dce

HEAD = "kernel @k(%x: ref<8xf32>, %o: ref<8xf32, out>, %s: ref<8xf32, scratch>) grid(2)"


def test_what_nobody_uses_goes():
    check(
        dce,
        HEAD
        + """ {
          %i = program_id 0
          %j = program_id 0
          %a = load %x[tile(%i, 8)]
          %b = exp %a
          %c = load %x[tile(%j, 8)]
          %n = alloc : ref<4xf32, scratch>
          store %o[tile(%i, 8)], %a
        }""",
        """
        kernel @k(%x: ref<8xf32>, %o: ref<8xf32, out>) grid(2) {
          %i = program_id 0 : i32
          %a = load %x[tile(%i, 8)] : tile<8xf32>
          store %o[tile(%i, 8)], %a
        }""",
    )


def test_effects_stay():
    text = """
        kernel @k(%o: ref<8xi32, out>, %s: ref<1xi32, scratch>) grid(2) init(%o = 0) {
          %c1 = full 1 : i32
          %t = full true : bool
          print "{}" %c1
          assert %t message="m"
          %old = atomic add %o[%c1], %c1 : i32
          store %s[%c1], %c1
        }"""
    check(dce, text, text)


def test_carries_that_feed_only_themselves():
    """%n counts for nobody; %m counts for %a; %d is used after the loop only."""
    check(
        dce,
        """kernel @k(%o: ref<i32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c9 = full 9 : i32
          %r, %n1, %m1, %d1 = for %k in %c0..%c9 step %c1 carry (%a = %c0, %n = %c0, %m = %c0, %d = %c0) {
            %n2 = add %n, %c1
            %m2 = add %m, %c1
            %a2 = mul %a, %m
            %d2 = add %d, %k
            yield %a2, %n2, %m2, %d2
          }
          %s = add %r, %d1
          store %o[], %s
        }""",
        """
        kernel @k(%o: ref<i32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c9 = full 9 : i32
          %r, %m1, %d1 = for %k in %c0..%c9 step %c1 carry (%a = %c0, %m = %c0, %d = %c0) {
            %m2 = add %m, %c1 : i32
            %a2 = mul %a, %m : i32
            %d2 = add %d, %k : i32
            yield %a2, %m2, %d2
          }
          %s = add %r, %d1 : i32
          store %o[], %s
        }""",
    )


def test_while_keeps_what_its_condition_needs():
    check(
        dce,
        """kernel @k(%o: ref<i32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %i1, %u1, %r = while (%i = %c0, %u = %c0, %a = %c1) {
            %go = lt %i, %c1
            yield %go
          } do (%j, %v, %b) {
            %j1 = add %j, %c1
            %v1 = add %v, %j
            %b1 = add %b, %b
            yield %j1, %v1, %b1
          }
          store %o[], %r
        }""",
        """
        kernel @k(%o: ref<i32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %i1, %r = while (%i = %c0, %a = %c1) {
            %go = lt %i, %c1 : bool
            yield %go
          } do (%j, %b) {
            %j1 = add %j, %c1 : i32
            %b1 = add %b, %b : i32
            yield %j1, %b1
          }
          store %o[], %r
        }""",
    )


def test_branches_and_dead_loops():
    check(
        dce,
        """kernel @k(%o: ref<i32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %t = lt %c0, %c1
          %p, %q = if %t {
            %a = add %c0, %c1
            %b = mul %c0, %c1
            yield %a, %b
          } else {
            yield %c0, %c1
          }
          %l = for %k in %c0..%c1 step %c1 carry (%z = %c0) { yield %k }
          for %k in %c0..%c1 step %c1 { print "{}" %k }
          store %o[], %q
        }""",
        """
        kernel @k(%o: ref<i32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %t = lt %c0, %c1 : bool
          %q = if %t {
            %b = mul %c0, %c1 : i32
            yield %b
          } else {
            yield %c1
          }
          for %k in %c0..%c1 step %c1 {
            print "{}" %k
          }
          store %o[], %q
        }""",
    )


def test_combiners_keep_their_two_sides():
    text = """
        kernel @k(%x: ref<8xf32>, %o: ref<f32, out>) {
          %c0 = full 0 : i32
          %a = load %x[%c0:+8] : tile<8xf32>
          %z = full 0.0 : f32
          %r, %u = user_reduce [%a, %a], [%z, %z] axes=(0) : f32, f32 body(%p: f32, %q: f32, %s: f32, %t: f32) {
            %m = max %p, %s : f32
            yield %m, %q
          }
          store %o[], %r
        }"""
    check(dce, text, text)
