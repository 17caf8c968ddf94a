"""How the interpreter runs control flow, user functions, atomics, print and assert."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jtile._errors import InterpreterError, KernelAssertionError, KernelValueError, OutOfBoundsError
from jtile.interpret import interpret
from jtile.ir import parse_kernel


def run(head: str, body: str, *inputs, **kw):
    return interpret(parse_kernel(f"kernel @k{head} {{\n{body}\n}}"), list(inputs), **kw)


def numbers(**values) -> str:
    return "".join(f"%{n} = full {v} : i32\n" for n, v in values.items())


@pytest.mark.parametrize("seed", [-1, "a", 1.5, True, None])
def test_a_seed_that_is_none(seed):
    with pytest.raises(KernelValueError, match="kernel k: seed is an int of at least 0"):
        run("(%o: ref<i32, out>)", "%a = full 1 : i32\nstore %o[], %a", seed=seed)


@pytest.mark.parametrize(("lo", "hi", "step"), [(0, 5, 1), (2, 11, 3), (3, 3, 1), (5, 2, 1), (5, -2, -3), (-3, 3, 2)])
def test_for(lo, hi, step):
    body = (
        numbers(lo=lo, hi=hi, step=step, n=0, c10=10)
        + """
    %r, %t = for %k in %lo..%hi step %step carry (%a = %n, %b = %lo) {
      %c = mul %a, %c10
      %d = add %c, %k
      yield %d, %k
    }
    store %o[], %r
    store %p[], %t"""
    )
    o, p = run("(%o: ref<i32, out>, %p: ref<i32, out>)", body)
    want, last = 0, lo
    for k in range(lo, hi, step):
        want, last = want * 10 + k, k
    assert (int(o), int(p)) == (want, last)


def test_for_swaps_its_carries():
    body = (
        numbers(a=1, b=2, z=0, s=1, n=3)
        + """
    %x, %y = for %k in %z..%n step %s carry (%p = %a, %q = %b) { yield %q, %p }
    store %o[], %x"""
    )
    assert int(run("(%o: ref<i32, out>)", body)[0]) == 2


def test_for_step_zero():
    with pytest.raises(InterpreterError, match="step of a loop is 0"):
        run("()", numbers(a=0, b=2) + "for %k in %a..%b step %a { }")


def test_while():
    body = (
        numbers(n=27, zero=0, one=1, two=2, three=3)
        + """
    %last, %count = while (%x = %n, %c = %zero) {
      %go = ne %x, %one
      yield %go
    } do (%y, %d) {
      %r = rem %y, %two
      %even = eq %r, %zero
      %next = if %even {
        %h = div %y, %two
        yield %h
      } else {
        %m = mul %y, %three
        %m1 = add %m, %one
        yield %m1
      }
      %e = add %d, %one
      yield %next, %e
    }
    store %o[], %count"""
    )
    assert int(run("(%o: ref<i32, out>)", body)[0]) == 111


def test_if_runs_one_branch_only():
    body = """%yes = full true : bool
    %c9 = full 9 : i32
    %f = full 0.0 : f32
    if %yes { } else { store %o[%c9], %f }"""
    run("(%o: ref<1xf32, out>)", body)


SOFTMAX = """
  %one = full 1.0 : f32
  %low = full -inf : f32
  %none = full 0.0 : f32
  %ones = full 1.0 : tile<SHAPExf32>
  %m, %s = user_reduce [%x, %ones], [%low, %none] axes=AXES body(%m1: f32, %s1: f32, %m2: f32, %s2: f32) {
    %mx = max %m1, %m2
    %d1 = sub %m1, %mx
    %d2 = sub %m2, %mx
    %e1 = exp %d1
    %e2 = exp %d2
    %t1 = mul %s1, %e1
    %t2 = mul %s2, %e2
    %u = mul %t1, %one
    %v = add %u, %t2
    yield %mx, %v
  }
  %l = log %s
  %y = add %l, %m
  store %o[INDEX], %y
"""


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (1, 0)])
def test_user_reduce_of_two_tiles(axes):
    """Online log-sum-exp; the combiner uses a value from outside."""
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    want = np.log(np.exp(x).sum(axes))
    shape = "x".join(map(str, want.shape))
    index = ", ".join(f"%c0:+{n}" for n in want.shape)
    body = "%c0 = full 0 : i32\n%x = load %a[%c0:+3, %c0:+5]" + SOFTMAX
    body = body.replace("SHAPE", "3x5").replace("AXES", str(axes).replace(",)", ")")).replace("INDEX", index)
    head = f"(%a: ref<3x5xf32>, %o: ref<{shape + 'x' if shape else ''}f32, out>)"
    np.testing.assert_allclose(run(head, body, x)[0], want, rtol=1e-6)


def test_user_reduce_runs_in_order_from_its_start():
    """Not commutative: the affine maps x -> a x + b under composition."""
    a, b = np.float32([2, 3, 0.5, -1]), np.float32([1, -1, 4, 2])
    body = """%c0 = full 0 : i32
    %x = load %a[%c0:+4]
    %y = load %b[%c0:+4]
    %one = full 1.0 : f32
    %zero = full 0.0 : f32
    %p, %q = user_reduce [%x, %y], [%one, %zero] axes=(0) body(%a1: f32, %b1: f32, %a2: f32, %b2: f32) {
      %r = mul %a1, %a2
      %s = mul %b1, %a2
      %t = add %s, %b2
      yield %r, %t
    }
    store %o[], %q"""
    want = functools.reduce(lambda acc, ab: acc * ab[0] + ab[1], zip(a, b), np.float32(0))
    assert run("(%a: ref<4xf32>, %b: ref<4xf32>, %o: ref<f32, out>)", body, a, b)[0] == want


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_user_scan(axis, reverse):
    x = np.random.default_rng(0).integers(-5, 6, (3, 4)).astype(np.int32)
    body = f"""%c0 = full 0 : i32
    %x = load %a[%c0:+3, %c0:+4]
    %y = user_scan %x axis={axis} reverse={str(reverse).lower()} body(%p: i32, %q: i32) {{
      %m = mul %p, %q
      %s = add %p, %q
      %r = add %s, %m
      yield %r
    }}
    store %o[%c0:+3, %c0:+4], %y"""
    (out,) = run("(%a: ref<3x4xi32>, %o: ref<3x4xi32, out>)", body, x)
    rows = np.moveaxis(x, axis, 0)[:: -1 if reverse else 1]
    want = [rows[0]]
    for row in rows[1:]:
        want.append(want[-1] + row + want[-1] * row)
    np.testing.assert_array_equal(out, np.moveaxis(np.stack(want)[:: -1 if reverse else 1], 0, axis))


def test_a_combiner_with_a_branch():
    """Combiners are any scalar code: here the larger absolute value, chosen by an `if`."""
    x = np.float32([[1, -7, 3], [-2, 2, 0]])
    body = """%c0 = full 0 : i32
    %x = load %a[%c0:+2, %c0:+3]
    %z = full 0.0 : f32
    %y = user_reduce [%x], [%z] axes=(1) body(%p: f32, %q: f32) {
      %u = abs %p
      %v = abs %q
      %c = ge %u, %v
      %r = if %c { yield %p } else { yield %q }
      yield %r
    }
    store %o[%c0:+2], %y"""
    assert run("(%a: ref<2x3xf32>, %o: ref<2xf32, out>)", body, x)[0].tolist() == [-7, -2]


def test_combiners_of_nothing():
    body = """%c0 = full 0 : i32
    %x = full 1.0 : tile<0x3xf32>
    %z = full 5.0 : f32
    %y = user_reduce [%x], [%z] axes=(0) body(%p: f32, %q: f32) { %r = add %p, %q yield %r }
    store %o[%c0:+3], %y
    %w = user_reduce [%x], [%z] axes=(1) body(%p: f32, %q: f32) { %r = add %p, %q yield %r }
    %s = user_scan %x axis=0 reverse=true body(%p: f32, %q: f32) { %r = add %p, %q yield %r }"""
    assert run("(%o: ref<3xf32, out>)", body)[0].tolist() == [5, 5, 5]


ATOMICS = [
    ("add", [5, 250, 7], lambda a, b: (a + b) % 256),
    ("max", [5, 250, 7], max),
    ("min", [5, 250, 7], min),
    ("and", [5, 250, 7], lambda a, b: a & b),
    ("or", [5, 250, 7], lambda a, b: a | b),
    ("xor", [5, 250, 7], lambda a, b: a ^ b),
    ("xchg", [5, 250, 7], lambda a, b: b),
]


@pytest.mark.parametrize(("fn", "values", "python"), ATOMICS)
def test_atomics_lane_after_lane(fn, values, python):
    """Three lanes update element 1; each sees what the one before left; a lane outside does nothing and gives 0."""
    u = np.array([*values, 99], np.uint8)
    body = f"""%c0 = full 0 : i32
    %v = load %u[%c0:+4]
    %t = dense (1, 1, 1, 7) : tile<4xi32>
    %old = atomic {fn} %o[take(%t)], %v
    store %p[%c0:+4], %old"""
    out, old = run("(%u: ref<4xu8>, %o: ref<2xu8, out>, %p: ref<4xu8, out>) init(%o = 12)", body, u)
    seen = [12]
    for v in values:
        seen.append(python(seen[-1], v))
    assert (out.tolist(), old.tolist()) == ([12, seen[-1]], [*seen[:3], 0])


def test_compare_and_swap_compares_bits():
    body = """%c0 = full 0 : i32
    %v = full 3.0 : tile<3xf32>
    %e = dense (0.0, -0.0, nan) : tile<3xf32>
    %m = dense (true, true, true) : tile<3xbool>
    %old = atomic cas %o[%c0:+3], %v compare=%e mask=%m
    store %p[%c0:+3], %old"""
    out, old = run("(%o: ref<3xf32, out>, %p: ref<3xf32, out>) init(%o = 0)", body)
    assert out.tolist() == [3, 0, 0]
    assert old.tolist() == [0, 0, 0]


def test_atomics_of_all_programs_add_up():
    body = "%i = program_id 0\n%f = full 1 : i32\n%c0 = full 0 : i32\n%z = atomic add %o[%c0], %f\nstore %seen[%i], %z"
    total, seen = run("(%o: ref<1xi32, out>, %seen: ref<50xi32, out>) grid(50) init(%o = 0)", body)
    assert total.tolist() == [50]
    assert sorted(seen.tolist()) == list(range(50))


def test_print(capsys):
    body = """%i = program_id 0
    %f = dense (1.0, 2.5) : tile<2xf32>
    %g = full 0.125 : f32
    print "f {} g {:.2f} {:.1f} {{x}}" %f, %g, %f
    print "no argument" """
    run("() grid(1)", body)
    assert capsys.readouterr().out == "[k (0, 0, 0)] f [1.  2.5] g 0.12 [1.0 2.5] {x}\n[k (0, 0, 0)] no argument\n"


def test_assert():
    body = '%i = program_id 0\n%c1 = full 1 : i32\n%ok = ne %i, %c1\nassert %ok message="not one" @"kernel.py":4'
    with pytest.raises(KernelAssertionError) as e:
        run("() grid(3)", body)
    assert "kernel k, program (1,): assertion failed: not one" in str(e.value)
    assert e.value.where == ("kernel.py", 4)
    run("() grid(1)", body)


def test_gather_outside_its_tile():
    body = "%x = iota 0 : tile<4xi32>\n%t = dense ({}) : tile<2xi32>\n%g = gather %x, %t axis=0"
    for bad in ("0, 4", "-1, 0"):
        with pytest.raises(OutOfBoundsError, match=r"gather out of bounds: index (4|-1) into axis 0 of 4 elements"):
            run("()", body.format(bad))
        run("()", body.format(bad), check=False)
    run("()", body.format("0, 3"))


def test_program_ids_of_missing_axes():
    body = """%a = program_id 2
    %b = num_programs 2
    %c = num_programs 0
    store %o[], %a
    store %p[], %b
    store %q[], %c"""
    head = "(%o: ref<i32, out>, %p: ref<i32, out>, %q: ref<i32, out>) grid(1)"
    assert [int(x) for x in run(head, body)] == [0, 1, 1]


def test_state_lives_in_the_call():
    k = parse_kernel(
        "kernel @k(%o: ref<2xf32, out>) init(%o = 0) {\n%i = full 0 : i32\n%f = full 1.0 : f32\n"
        "%a = load %o[%i]\n%b = add %a, %f\nstore %o[%i], %b\n}"
    )
    first = interpret(k, [])[0]
    first += 5
    assert interpret(k, [])[0].tolist() == [1, 0]
