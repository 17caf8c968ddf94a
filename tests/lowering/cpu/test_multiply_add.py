"""Products and sums of kernels of small tiles: what is rounded once is decided by the values, not by LLVM."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from native import run_native

import jtile as jt
from jtile import ir
from jtile.lowering.cpu.isa import ISAS, host_isa
from jtile.lowering.cpu.multiply_add import MultiplyAdd, multiply_adds

HOST = host_isa()
TEXT = """kernel @k(%x: ref<40xf32>, %y: ref<40xf32>, %z: ref<40xf32>, %o: ref<40xf32, out>) grid(1) {{
  %zero = full 0 : i32
  %a = load %x[tile(%zero, 40)] : tile<40xf32>
  %b = load %y[tile(%zero, 40)] : tile<40xf32>
  %c = load %z[tile(%zero, 40)] : tile<40xf32>
{body}
  store %o[tile(%zero, 40)], %r
}}"""

# What is stored, and the same in float64, where a product of float32 is exact.
FORMS = {
    "%p = mul %a, %b / %r = add %p, %c": (1, lambda a, b, c: a * b + c),
    "%p = mul %a, %b / %r = add %c, %p": (1, lambda a, b, c: a * b + c),
    "%p = mul %a, %b / %r = sub %p, %c": (1, lambda a, b, c: a * b - c),
    "%p = mul %a, %b / %r = sub %c, %p": (1, lambda a, b, c: c - a * b),
    "%p = mul %a, %b / %q = mul %b, %c / %r = add %p, %q": (1, lambda a, b, c: a * b + np.float32(b * c)),
    "%p = mul %a, %b / %q = mul %b, %c / %r = sub %q, %p": (1, lambda a, b, c: b * c - np.float32(a * b)),
    "%p = mul %a, %b / %q = add %p, %c / %r = sub %q, %p": (0, lambda a, b, c: np.float32(np.float32(a * b) + c)
                                                           - np.float32(a * b).astype(np.float64)),
    "%p = mul %a, %b / %n = neg %p / %r = add %n, %c": (0, lambda a, b, c: c - np.float32(a * b).astype(np.float64)),
}  # fmt: skip


def kernel_of(form: str) -> ir.Kernel:
    return ir.parse_kernel(TEXT.format(body="\n".join(f"  {line} : tile<40xf32>" for line in form.split(" / "))))


@pytest.mark.parametrize("form", FORMS)
def test_a_sum_takes_the_first_product_that_nobody_else_reads(form):
    kernel, (count, exact) = kernel_of(form), FORMS[form]
    found = [op for op in multiply_adds(kernel).body.walk() if isinstance(op, MultiplyAdd)]
    assert len(found) == count
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(40).astype(np.float32) for _ in range(3)]
    (got,) = run_native(kernel, inputs)
    want = exact(*(x.astype(np.float64) for x in inputs)).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    twice = np.float32(inputs[0] * inputs[1]) + inputs[2]
    assert form != "%p = mul %a, %b / %r = add %p, %c" or (twice != want).any()  # the numbers tell both apart


@pytest.mark.skipif(HOST.arch != "x86_64", reason="an instruction set without fused multiply-add")
def test_machines_without_the_instruction_round_twice():
    x = [np.random.default_rng(k).standard_normal(40).astype(np.float32) for k in range(3)]
    (got,) = run_native(kernel_of("%p = mul %a, %b / %r = add %p, %c"), x, ISAS["sse2"])
    np.testing.assert_array_equal(got, x[0] * x[1] + x[2])


def test_loops_whose_ends_are_products_and_sums():
    """The estimate of a program's time computes how often its loops run."""

    @jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
    def sums(x, o):
        i = jt.program_id(0)
        end = (i.astype(jnp.float32) * 0.5 + 1.25).astype(jnp.int32)
        s = 0.0
        for k in jt.range(end):
            s = s + x[k]
        o[i] = s

    want = [sum(range(int(i * 0.5 + 1.25))) for i in range(40)]
    np.testing.assert_array_equal(sums(jnp.arange(40.0)), want)


def test_products_of_other_blocks_and_of_narrow_floats_stay():
    kernel = kernel_of("%p = mul %a, %b / %r = add %p, %c")
    narrow = ir.parse_kernel(ir.print_kernel(kernel).replace("f32", "f16"))
    assert multiply_adds(narrow) is narrow
    loop = ir.parse_kernel(
        TEXT.format(
            body="""  %p = mul %a, %b : tile<40xf32>
  %two = full 2 : i32
  %one = full 1 : i32
  %r = for %k in %zero..%two step %one carry (%s = %c) {
    %t = add %s, %p : tile<40xf32>
    yield %t
  }"""
        )
    )
    assert multiply_adds(loop) is loop
