"""Shares of a program along the rows of its products: text in, expected text out, and the same results bit for bit."""

import textwrap

import numpy as np
import pytest
import tile_kernels as tk

from jtile.interpret import interpret
from jtile.ir import Block, Kernel, parse_kernel, print_kernel, verify
from jtile.lowering.triton.block.passes.plan import NoPlan
from jtile.lowering.triton.block.passes.split_rows import Split, apart, split

HEAD = """kernel @k(%x: ref<256x32xbf16>, %y: ref<32x64xbf16>, %s: ref<256xf32>, %o: ref<256x64xf32, out>) grid(2) {
  %i = program_id 0
  %c0 = full 0 : i32
  %a = load %x[tile(%i, 128), %c0:+32]
  %b = load %y[%c0:+32, %c0:+64]
"""


def shares(kernel: Kernel, n: int) -> Kernel:
    """A kernel that does the shares one after the other."""
    plan = split(kernel, n)
    assert isinstance(plan, Split), str(plan)
    out = kernel.with_body(Block((), [op for w in range(n) for op in plan.body(w)[0].ops]))
    verify(out)
    return out


def refused(text: str, n: int = 2) -> str:
    plan = split(parse_kernel(text), n)
    assert isinstance(plan, NoPlan)
    return plan.reason


def test_rows_of_loads_stores_and_statistics():
    """The second share of a product whose rows are scaled, less the row's number and its maximum."""
    kernel = parse_kernel(
        HEAD
        + """  %d = dot %a, %b
  %f = load %s[tile(%i, 128)]
  %g = broadcast %f dims=(0) : tile<128x64xf32>
  %e = mul %d, %g
  %m = reduce max %e axes=(1)
  %r = iota 0 : tile<128xi32>
  %q = cast %r : tile<128xf32>
  %t = add %m, %q
  %u = broadcast %t dims=(0) : tile<128x64xf32>
  %v = sub %e, %u
  store %o[tile(%i, 128), %c0:+64], %v
}"""
    )
    plan = split(kernel, 2)
    assert isinstance(plan, Split)
    assert sorted((op.ref.name, axis) for op, axis in plan.axes.items()) == [("s", 0), ("x", 0), ("y", None)]
    body, loads = plan.body(1)
    assert sorted((old.ref.name, new.result.shape) for old, new in loads.items()) == [
        ("s", (64,)),
        ("x", (64, 32)),
        ("y", (32, 64)),
    ]
    assert textwrap.dedent("\n".join(print_kernel(kernel.with_body(body)).splitlines()[1:-1])) == textwrap.dedent("""\
          %i = program_id 0 : i32
          %c0 = full 0 : i32
          %c2 = full 2 : i32
          %0 = mul %i, %c2 : i32
          %c1 = full 1 : i32
          %1 = add %0, %c1 : i32
          %a = load %x[tile(%1, 64), %c0:+32] : tile<64x32xbf16>
          %b = load %y[%c0:+32, %c0:+64] : tile<32x64xbf16>
          %d = dot %a, %b : tile<64x64xf32>
          %c2_1 = full 2 : i32
          %2 = mul %i, %c2_1 : i32
          %c1_1 = full 1 : i32
          %3 = add %2, %c1_1 : i32
          %f = load %s[tile(%3, 64)] : tile<64xf32>
          %g = broadcast %f dims=(0) : tile<64x64xf32>
          %e = mul %d, %g : tile<64x64xf32>
          %m = reduce max %e axes=(1) : tile<64xf32>
          %r = iota 0 : tile<64xi32>
          %4 = full 64 : tile<64xi32>
          %5 = add %r, %4 : tile<64xi32>
          %q = cast %5 : tile<64xf32>
          %t = add %m, %q : tile<64xf32>
          %u = broadcast %t dims=(0) : tile<64x64xf32>
          %v = sub %e, %u : tile<64x64xf32>
          %c2_2 = full 2 : i32
          %6 = mul %i, %c2_2 : i32
          %c1_2 = full 1 : i32
          %7 = add %6, %c1_2 : i32
          store %o[tile(%7, 64), %c0:+64], %v""")  # fmt: skip
    same(kernel, 2)


def same(kernel: Kernel, n: int) -> None:
    inputs = tk.operands(kernel)
    for want, got in zip(interpret(kernel, inputs), interpret(shares(kernel, n), inputs), strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize(
    ("kernel", "n"),
    [
        (lambda: tk.matmul(256, 64, 64, bias=True, activation="silu", save=True, batch=2), 2),
        (lambda: tk.matmul(256, 64, 64, ta=True, tile=(256, 64, 32)), 4),
        (lambda: tk.gated(128, 64, 64, tb=True), 2),
        (lambda: tk.attention(128, 128, save=True, window=(None, 0)), 2),
        (lambda: tk.attention(192, 128, tile=(192, 64), window=(40, 70), softcap=5.0), 3),
        (lambda: tk.attention(128, 128, lengths=True, save=True), 2),
        (lambda: tk.matmul(96, 64, 64, tile=(64, 64, 32)), 1),
    ],
)
def test_the_shares_do_what_the_kernel_does(kernel, n):
    same(kernel(), n)


def test_what_all_shares_have_alike_is_written_once():
    """The sum of %y has no rows of the product."""
    kernel = parse_kernel(
        HEAD.replace("out>)", "out>, %p: ref<64xf32, out>)")
        + """  %d = dot %a, %b
  store %o[tile(%i, 128), %c0:+64], %d
  %e = cast %b : tile<32x64xf32>
  %f = reduce sum %e axes=(0)
  store %p[%c0:+64], %f
}"""
    )
    plan = split(kernel, 2)
    assert isinstance(plan, Split)
    stores = [[op.ref.name for op in plan.body(w)[0].ops if op.mnemonic == "store"] for w in range(2)]
    assert stores == [["o", "p"], ["o"]]


def test_a_tile_that_is_written_again():
    text = "%d = dot %a, %b\nstore %o[tile(%i, 128), %c0:+64], %d\n%e = exp %d\nstore %o[tile(%i, 128), %c0:+64], %e\n}"
    assert isinstance(split(parse_kernel(HEAD + text), 2), Split)


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("%d = dot %a, %b  %e = reduce sum %d axes=(0)  store %o[%i, %c0:+64], %e", "reduce mixes the rows"),
        ("%d = dot %a, %b  %e = reverse %d axes=(0)  store %o[tile(%i, 128), %c0:+64], %e", "reverse mixes the rows"),
        ("%d = dot %a, %b  %w = full 1.0 : tile<128x128xf32>  %e = dot %w, %d  store %o[tile(%i, 128), %c0:+64], %e",
         "dot mixes the rows"),
        ('%d = dot %a, %b  print "{}" %d  store %o[tile(%i, 128), %c0:+64], %d', "print mixes the rows"),
        ("%d = dot %a, %b  %z = full 1.0 : f32  %e = atomic add %s[%i], %z"
         "  %f = broadcast %e dims=() : tile<128x64xf32>  %g = add %d, %f"
         "  store %o[tile(%i, 128), %c0:+64], %g", "every share needs what this atomic gives"),
        ("%d = dot %a, %a trans_b=true  %e = slice %d starts=(0, 0) stops=(128, 64) strides=(1, 1)"
         "  store %o[tile(%i, 128), %c0:+64], %e", "is needed whole and by rows"),
        ("%d = dot %a, %b  %e = load %o[tile(%i, 128), %c0:+64]  %f = add %d, %e"
         "  store %o[tile(%i, 128), %c0:+64], %f", "reads an array that it writes"),
        ("%z = full 0.0 : tile<128x64xf32>  store %o[tile(%i, 128), %c0:+64], %z  %d = dot %a, %b"
         "  store %o[tile(%i, 128), %c0:+64], %d", "several ops write o, not all of them cut alike"),
        ("%d = dot %a, %b  store %o[%c0:+128, %c0:+64], %d  %n = full 64 : i32  store %o[%n:+128, %c0:+64], %d",
         "several ops write o, not all of them cut alike"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut(rest, reason):
    assert reason in refused(HEAD + "\n".join(rest.split("  ")) + "\n}")


@pytest.mark.parametrize(
    ("place", "meet"),
    [("tile(%k, 128)", False), ("tile(%k, 128, step=64)", True), ("%k:+128", True), ("%i:+128", False)],
)
def test_rows_that_are_written_in_several_rounds(place, meet):
    """A share may be a round ahead: no round may write rows that another share has in another round."""
    kernel = parse_kernel(
        HEAD
        + f"""  %c1 = full 1 : i32
  %c2 = full 2 : i32
  for %k in %c0..%c2 step %c1 {{
    %d = dot %a, %b
    store %o[{place}, %c0:+64], %d
  }}
}}"""
    )
    shares = split(kernel, 2)
    assert isinstance(shares, Split)
    found = apart(shares)
    assert isinstance(found, NoPlan) == meet
    if meet:
        assert found.reason == "rounds of a loop may write the same rows of o"


def test_rows_of_a_warpgroup():
    text = HEAD + "%d = dot %a, %b\nstore %o[tile(%i, 128), %c0:+64], %d\n}"
    assert refused(text, 4) == "128 rows of a product are not 4 shares of whole 64s"
