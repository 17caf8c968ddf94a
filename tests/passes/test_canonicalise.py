"""Canonical forms: text in, expected text out."""

from __future__ import annotations

import numpy as np
import pytest
from golden import check

from jtile.interpret import interpret
from jtile.ir import OPS, Builder, Cast, Kernel, RefType, Span, Store, Value, parse_kernel, print_kernel
from jtile.ir.elementwise import convert
from jtile.ir.types import DTYPES
from jtile.passes import canonicalise, dce
from jtile.passes.algebra import exact

BOTH = (canonicalise, dce)


def expression(body: str, result: str, types: str = "tile<4xi32>", shape: str = "4") -> str:
    """A kernel that loads %x and %y, computes, and stores the last value."""
    dtype = types.rstrip(">").split("x")[-1].split("<")[-1]
    dims = ", ".join(f"%z:+{n}" for n in shape.split("x")) if shape else ""
    ref = f"ref<{shape + 'x' if shape else ''}{dtype}"
    return f"""kernel @k(%a: {ref}>, %b: {ref}>, %o: {ref}, out>) {{
  %z = full 0 : i32
  %x = load %a[{dims}] : {types}
  %y = load %b[{dims}] : {types}
{body}
  store %o[{dims}], {result}
}}"""


def simplify(body: str, result: str, **kw) -> list[str]:
    """The lines between the loads and the store after canonicalising, and what is stored."""
    after = print_kernel(dce(canonicalise(parse_kernel(expression(body, result, **kw))))).splitlines()
    inner = [line.strip() for line in after[1:-1] if " = load " not in line and not line.startswith("  %z =")]
    return [*inner[:-1], inner[-1].split("], ")[1]]


INT = [
    ("%c = full 0 : tile<4xi32>\n%r = add %c, %x", ["%x"]),
    ("%c = full 0 : tile<4xi32>\n%r = sub %x, %c", ["%x"]),
    ("%c = full 1 : tile<4xi32>\n%r = mul %c, %x", ["%x"]),
    ("%c = full 1 : tile<4xi32>\n%r = div %x, %c", ["%x"]),
    ("%c = full -1 : tile<4xi32>\n%r = and %x, %c", ["%x"]),
    ("%c = full 0 : tile<4xi32>\n%r = shl %x, %c", ["%x"]),
    ("%c = full 0 : tile<4xi32>\n%r = mul %x, %c", ["%c = full 0 : tile<4xi32>", "%c"]),
    ("%c = full 1 : tile<4xi32>\n%r = rem %x, %c", ["%r = full 0 : tile<4xi32>", "%r"]),
    ("%r = sub %x, %x", ["%r = full 0 : tile<4xi32>", "%r"]),
    ("%r = max %x, %x", ["%x"]),
    ("%n = neg %x\n%r = neg %n", ["%x"]),
    ("%c = full 3 : tile<4xi32>\n%d = full 4 : tile<4xi32>\n%s = add %x, %c\n%r = add %d, %s",
     ["%0 = full 7 : tile<4xi32>", "%r = add %x, %0 : tile<4xi32>", "%r"]),
    ("%c = full 3 : tile<4xi32>\n%r = sub %x, %c",
     ["%0 = full -3 : tile<4xi32>", "%r = add %x, %0 : tile<4xi32>", "%r"]),
    ("%c = full 2147483647 : tile<4xi32>\n%r = add %c, %c", ["%r = full -2 : tile<4xi32>", "%r"]),
    ("%c = full 5 : tile<4xi32>\n%l = gt %c, %x\n%r = select %l, %x, %y",
     ["%c = full 5 : tile<4xi32>",
      "%l = lt %x, %c : tile<4xbool>", "%r = select %l, %x, %y : tile<4xi32>", "%r"]),
    ("%l = lt %x, %y\n%n = not %l\n%r = select %n, %x, %y",
     ["%n = ge %x, %y : tile<4xbool>",
      "%r = select %n, %x, %y : tile<4xi32>", "%r"]),
    ("%l = lt %x, %x\n%r = select %l, %x, %y", ["%y"]),
    ("%l = lt %x, %y\n%r = select %l, %x, %x", ["%x"]),
    ("%p = program_id 0\n%s = broadcast %p dims=() : tile<4xi32>\n%r = add %x, %s", ["%x"]),
    ("%n = num_programs 0\n%s = broadcast %n dims=() : tile<4xi32>\n%r = mul %x, %s", ["%x"]),
    ("%c = dense (1, 2, 3, 4) : tile<4xi32>\n%d = dense (4, 3, 2, 1) : tile<4xi32>\n%r = mul %c, %d",
     ["%r = dense (4, 6, 6, 4) : tile<4xi32>", "%r"]),
    ("%i = iota 0 : tile<4xi32>\n%c = full 9 : tile<4xi32>\n%l = lt %i, %c\n%r = select %l, %x, %y", ["%x"]),
    ("%i = iota 0 : tile<4xi32>\n%r = mul %i, %i",
     ["%i = iota 0 : tile<4xi32>", "%r = mul %i, %i : tile<4xi32>", "%r"]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "after"), INT)
def test_integers(body, after):
    names = lambda lines: [line.replace("%1 ", "%0 ").replace("%1,", "%0,") for line in lines]
    assert names(simplify(body, "%r")) == after


F32 = "tile<4xf32>"
FLOAT = [
    ("%c = full -0.0 : tile<4xf32>\n%r = add %x, %c", ["%x"]),
    ("%c = full 0.0 : tile<4xf32>\n%r = sub %x, %c", ["%x"]),
    ("%c = full 1 : tile<4xf32>\n%r = div %x, %c", ["%x"]),
    ("%c = full 0.1 : tile<4xf32>\n%d = full 3.0 : tile<4xf32>\n%r = mul %c, %d",
     ["%r = full 0.3 : tile<4xf32>", "%r"]),
    ("%c = full 1 : tile<4xf32>\n%r = exp %c", ["%r = full 2.7182817 : tile<4xf32>", "%r"]),
    ("%c = cast %x : tile<4xf64>\n%r = cast %c : tile<4xf32>", ["%x"]),
    ("%n = neg %x\n%c = full 0.5 : tile<4xf32>\n%r = mul %c, %n",
     ["%0 = full -0.5 : tile<4xf32>", "%r = mul %x, %0 : tile<4xf32>", "%r"]),
    ("%n = neg %x\n%c = full -3.0 : tile<4xf32>\n%r = div %n, %c",
     ["%0 = full 3.0 : tile<4xf32>", "%r = div %x, %0 : tile<4xf32>", "%r"]),
    ("%l = eq %x, %y\n%n = not %l\n%r = select %n, %x, %y",
     ["%n = ne %x, %y : tile<4xbool>",
      "%r = select %n, %x, %y : tile<4xf32>", "%r"]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "after"), FLOAT)
def test_floats(body, after):
    assert simplify(body, "%r", types=F32) == after


KEPT = [
    ("%c = full 0.0 : tile<4xf32>\n%r = add %x, %c", F32),  # -0 + 0 is +0
    ("%c = full -0.0 : tile<4xf32>\n%r = sub %x, %c", F32),
    ("%c = full 0.0 : tile<4xf32>\n%r = mul %x, %c", F32),  # infinities
    ("%r = sub %x, %x", F32),
    ("%l = lt %x, %y\n%n = not %l\n%r = select %n, %x, %y", F32),  # NaN; the select turns instead
    ("%c = cast %x : tile<4xbf16>\n%r = cast %c : tile<4xf32>", F32),
    ("%c = cast %x : tile<4xi8>\n%r = cast %c : tile<4xi32>", "tile<4xi32>"),
    ("%c = cast %x : tile<4xf32>\n%r = cast %c : tile<4xi32>", "tile<4xi32>"),
]


@pytest.mark.parametrize(("body", "types"), KEPT)
def test_what_is_not_exact_stays(body, types):
    *lines, stored = simplify(body, "%r", types=types)
    assert stored == "%r" and not lines[-1].startswith("%r = full")


LAYOUT = [
    ("%p = reshape %x : tile<12xf32>\n%q = reshape %p : tile<2x6xf32>\n%r = reshape %q : tile<3x4xf32>", ["%x"]),
    ("%p = transpose %x perm=(1, 0)\n%r = transpose %p perm=(1, 0)", ["%x"]),
    ("%r = slice %x starts=(0, 0) stops=(3, 4) strides=(1, 1)", ["%x"]),
    ("%r = reverse %x axes=()", ["%x"]),
    ("%p = reverse %x axes=(0, 1)\n%r = reverse %p axes=(1)", ["%r = reverse %x axes=(0) : tile<3x4xf32>", "%r"]),
    ("%r = concat %x axis=1", ["%x"]),
    ("%c = full 0 : i32\n%r = dynamic_slice %x, [%c, %c] sizes=(3, 4)", ["%x"]),
    ("%v = full 1.0 : f32\n%r = pad %x, %v low=(0, 0) high=(0, 0) interior=(0, 0)", ["%x"]),
    ("%r = reduce sum %x axes=()", ["%x"]),
]


@pytest.mark.parametrize(("body", "after"), LAYOUT)
def test_chains_of_moves(body, after):
    assert simplify(body, "%r", types="tile<3x4xf32>", shape="3x4") == after


def test_moves_become_shorter():
    check(
        BOTH,
        """kernel @k(%a: ref<8x1x4xf32>, %o: ref<64xf32, out>) {
          %z = full 0 : i32
          %x = load %a[%z:+8, %z:+1, %z:+4]
          %t = transpose %x perm=(1, 0, 2)
          %s = slice %x starts=(1, 0, 0) stops=(8, 1, 4) strides=(3, 1, 1)
          %u = slice %s starts=(0, 0, 1) stops=(3, 1, 4) strides=(2, 1, 2)
          %v = load %o[%z:+8]
          %w = reshape %v : tile<8x1xf32>
          %b = broadcast %w dims=(0, 1) : tile<8x16xf32>
          %c = broadcast %b dims=(1, 2) : tile<2x8x16xf32>
          %i = iota 0 : tile<4xi32>
          %j = broadcast %i dims=(1) : tile<3x4xi32>
          %l = transpose %j perm=(1, 0)
          %d = load %o[%z:+1]
          %m = reduce max %d axes=(0)
          %one = full 1.0 : tile<4xf32>
          %p = reshape %one : tile<2x2xf32>
          %two = iota 0 : tile<1xi32>
          %q = full 1.0 : tile<3xf32>
          %g = concat %one, %q axis=0
          print "{} {} {} {} {} {} {} {}" %t, %u, %c, %l, %m, %p, %two, %g
        }""",
        """
        kernel @k(%a: ref<8x1x4xf32>, %o: ref<64xf32, out>) {
          %z = full 0 : i32
          %x = load %a[%z:+8, %z:+1, %z:+4] : tile<8x1x4xf32>
          %t = reshape %x : tile<1x8x4xf32>
          %u = slice %x starts=(1, 0, 1) stops=(8, 1, 4) strides=(6, 1, 2) : tile<2x1x2xf32>
          %v = load %o[%z:+8] : tile<8xf32>
          %c = broadcast %v dims=(1) : tile<2x8x16xf32>
          %l = iota 0 : tile<4x3xi32>
          %d = load %o[%z:+1] : tile<1xf32>
          %m = reshape %d : f32
          %p = full 1.0 : tile<2x2xf32>
          %two = full 0 : tile<1xi32>
          %g = full 1.0 : tile<7xf32>
          print "{} {} {} {} {} {} {} {}" %t, %u, %c, %l, %m, %p, %two, %g
        }""",
    )


def test_dots():
    """Transposed operands are read transposed, a sum becomes the start, an integer product needs no zeros."""
    check(
        BOTH,
        """kernel @k(%a: ref<8x4xf32>, %i: ref<4x4xi8>, %o: ref<8x8xf32, out>) {
          %z = full 0 : i32
          %x = load %a[%z:+8, %z:+4]
          %t = transpose %x perm=(1, 0)
          %d = dot %x, %t
          %c = load %o[%z:+8, %z:+8]
          %r = add %c, %d
          %u = dot %t, %x trans_a=true trans_b=true
          %twice = dot %x, %t
          %p = add %twice, %twice
          %n = load %i[%z:+4, %z:+4]
          %zero = full 0 : tile<4x4xi32>
          %m = dot %n, %n acc=%zero
          print "{} {} {} {}" %r, %u, %p, %m
        }""",
        """
        kernel @k(%a: ref<8x4xf32>, %i: ref<4x4xi8>, %o: ref<8x8xf32, out>) {
          %z = full 0 : i32
          %x = load %a[%z:+8, %z:+4] : tile<8x4xf32>
          %c = load %o[%z:+8, %z:+8] : tile<8x8xf32>
          %r = dot %x, %x acc=%c trans_b=true : tile<8x8xf32>
          %u = dot %x, %x trans_b=true : tile<8x8xf32>
          %twice = dot %x, %x trans_b=true : tile<8x8xf32>
          %p = add %twice, %twice : tile<8x8xf32>
          %n = load %i[%z:+4, %z:+4] : tile<4x4xi8>
          %m = dot %n, %n : tile<4x4xi32>
          print "{} {} {} {}" %r, %u, %p, %m
        }""",
    )


def test_a_sum_of_products_starts_from_the_total():
    check(
        BOTH,
        """kernel @k(%a: ref<8x4xf32>, %o: ref<8x8xf32, out>) {
          %z = full 0 : i32
          %x = load %a[%z:+8, %z:+4]
          %c = load %o[%z:+8, %z:+8]
          %d = dot %x, %x trans_b=true
          %e = dot %x, %x acc=%d trans_b=true
          %r = add %c, %e
          store %o[%z:+8, %z:+8], %r
        }""",
        """
        kernel @k(%a: ref<8x4xf32>, %o: ref<8x8xf32, out>) {
          %z = full 0 : i32
          %x = load %a[%z:+8, %z:+4] : tile<8x4xf32>
          %c = load %o[%z:+8, %z:+8] : tile<8x8xf32>
          %0 = dot %x, %x acc=%c trans_b=true : tile<8x8xf32>
          %r = dot %x, %x acc=%0 trans_b=true : tile<8x8xf32>
          store %o[%z:+8, %z:+8], %r
        }""",
    )


def test_control_flow():
    check(
        BOTH,
        """kernel @k(%n: ref<i32>, %o: ref<i32, out>) grid(1, 4) {
          %i = program_id 0
          %j = program_id 1
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c3 = full 3 : i32
          %first = eq %i, %c0
          %p = if %first {
            %a = add %j, %c1
            yield %a
          } else {
            yield %c0
          }
          %once = for %k in %c3..%c3 step %c1 carry (%u = %p) { %u1 = mul %u, %u yield %u1 }
          %one = for %k in %c1..%c3 step %c3 carry (%v = %once) { %v1 = add %v, %k yield %v1 }
          %h = load %n[]
          %same, %sum = for %k in %c0..%h step %c1 carry (%s = %one, %t = %c0) { %t1 = add %t, %s yield %s, %t1 }
          %w = while (%x = %sum) { %no = full false : bool yield %no } do (%y) { %y1 = add %y, %y yield %y1 }
          %big = gt %w, %same
          %r = if %big { yield %w } else { yield %same }
          store %o[], %r
        }""",
        """
        kernel @k(%n: ref<i32>, %o: ref<i32, out>) grid(1, 4) {
          %j = program_id 1 : i32
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c2 = full 2 : i32
          %v1 = add %j, %c2 : i32
          %h = load %n[] : i32
          %sum = for %k in %c0..%h step %c1 carry (%t = %c0) {
            %t1 = add %t, %v1 : i32
            yield %t1
          }
          %big = gt %sum, %v1 : bool
          %r = select %big, %sum, %v1 : i32
          store %o[], %r
        }""",
    )


def test_a_while_gives_up_the_carries_it_keeps():
    check(
        BOTH,
        """kernel @k(%n: ref<i32>, %o: ref<i32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %h = load %n[]
          %i1, %h1 = while (%i = %c0, %a = %h) {
            %go = lt %i, %a
            yield %go
          } do (%j, %b) {
            %j1 = add %j, %c1
            yield %j1, %b
          }
          %r = add %i1, %h1
          store %o[], %r
        }""",
        """
        kernel @k(%n: ref<i32>, %o: ref<i32, out>) {
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %h = load %n[] : i32
          %i1 = while (%i = %c0) {
            %go = lt %i, %h : bool
            yield %go
          } do (%j) {
            %j1 = add %j, %c1 : i32
            yield %j1
          }
          %r = add %i1, %h : i32
          store %o[], %r
        }""",
    )


def test_masks_and_asserts():
    check(
        BOTH,
        """kernel @k(%a: ref<8xf32>, %o: ref<8xf32, out>) {
          %z = full 0 : i32
          %yes = full true : tile<8xbool>
          %no = full false : tile<8xbool>
          %x = load %a[%z:+8] mask=%yes pad=1.0
          %y = load %a[%z:+8] mask=%no pad=2.0
          %s = add %x, %y
          store %o[%z:+8], %s mask=%no
          store %o[%z:+8], %s mask=%yes
          %p = atomic add %o[%z:+8], %x mask=%yes
          %q = atomic add %o[%z:+8], %x mask=%no
          %r = add %p, %q
          store %o[%z:+8], %r
          assert %yes message="fine"
          assert %no message="always"
        }""",
        """
        kernel @k(%a: ref<8xf32>, %o: ref<8xf32, out>) {
          %z = full 0 : i32
          %no = full false : tile<8xbool>
          %x = load %a[%z:+8] pad=1.0 : tile<8xf32>
          %y = full 2.0 : tile<8xf32>
          %s = add %x, %y : tile<8xf32>
          store %o[%z:+8], %s
          %p = atomic add %o[%z:+8], %x : tile<8xf32>
          %q = full 0.0 : tile<8xf32>
          %r = add %p, %q : tile<8xf32>
          store %o[%z:+8], %r
          assert %no message="always"
        }""",
    )


ARITHMETIC = sorted(set(DTYPES) - {"float8_e8m0fnu", "float4_e2m1fn"})


@pytest.mark.parametrize("dtype", ARITHMETIC)
def test_folding_keeps_every_bit(dtype):
    """A folded constant is what the interpreter would have computed, for every dtype and odd number."""
    d = DTYPES[dtype]
    numbers = [0.0, -0.0, 1.5, 0.1, float("inf"), float("nan"), 1e-40] if d.kind == "f" else [0, 1, 7]
    for x in numbers:
        b = Builder()
        out = Value(RefType((2,), dtype, "out"), "o")
        zero = b.index(0)
        v = b.full(bool(x) if d.kind == "b" else x, (2,), dtype)
        w = b.map("or" if d.kind == "b" else "mul", v, v)
        u = b.cast(b.cast(w, "float64"), dtype)
        b.add(Store(out, (Span(zero, 2),), u))
        k = Kernel("k", (out,), (), b.block)
        after = dce(canonicalise(k))
        assert not any(isinstance(op, Cast) for op in after.body.ops)
        assert interpret(after, [])[0].tobytes() == interpret(k, [])[0].tobytes()


def test_exact_casts_are_exact():
    """Every pair of dtypes that `exact` names: all (or many) numbers survive the way there and back."""
    for src in DTYPES.values():
        for dst in DTYPES.values():
            if not exact(src.name, dst.name):
                continue
            if src.bits <= 8:
                bits = np.arange(1 << src.bits, dtype=np.uint8)
                x = bits.astype(src.numpy) if src.kind == "b" or src.bits < 8 else bits.view(src.numpy)
            elif src.bits == 16:
                x = np.arange(1 << 16, dtype=np.uint16).view(src.numpy)
            else:
                x = np.random.default_rng(0).integers(0, 256, 8000, np.uint8).view(src.numpy)
            back = convert(convert(x, dst.name), src.name)
            wide = np.float64 if src.kind == "f" else object
            with np.errstate(invalid="ignore"):  # signalling NaNs among the patterns
                np.testing.assert_array_equal(back.astype(wide), x.astype(wide), err_msg=f"{src.name} in {dst.name}")


def test_every_rule_is_for_a_card():
    from jtile.passes.canonicalise import RULES

    assert set(RULES.table) <= set(OPS.values())
