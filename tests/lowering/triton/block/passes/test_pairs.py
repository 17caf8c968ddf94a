"""Rounds in pairs where products are folded into sums by arithmetic: text in, expected text out, the same results."""

import importlib
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_kernels import operands
from machines import machine

from jtile.errors import JtileError
from jtile.interpret import interpret
from jtile.ir import DotWait, For, Kernel, parse_kernel, print_kernel, verify
from jtile.lowering.triton.block.passes import NoPlan, steps
from jtile.lowering.triton.block.passes.pairs import pairs

TEXT = """kernel @k(%a: ref<64x256xf32>, %b: ref<256x16xf32>, %n: ref<i32>, %o: ref<64x16xf32, out>) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c3 = full 3 : i32
  %A = alloc_shared : shared<64x32xf32, slots 3>
  %B = alloc_shared : shared<32x16xf32, slots 3>
  %full = alloc_barriers : barrier<3, arrivals 1>
  %empty = alloc_barriers : barrier<3, arrivals 1>
  roles {
    role consumer warps=4 registers=240 {
      %rounds = ROUNDS
      %zero = full 0.0 : tile<64x16xf32>
      %sum, %end = for %k in %c0..%rounds step %c1 carry (%acc = %zero, %it = %c0) {
        %s = rem %it, %c3
        %t = div %it, %c3
        %p = and %t, %c1
        wait %full[%s], %p
        %As = slot %A[%s]
        %Bs = slot %B[%s]
        %run = dot_async %As, %Bs
        %d = dot_wait %run
        arrive %empty[%s]
        %e = exp2 %d
        %next = add %acc, %e
        %it1 = add %it, %c1
        yield %next, %it1
      }
      store %o[%c0:+64, %c0:+16], %sum
    }
    role producer warps=1 registers=24 {
      %rounds = ROUNDS
      for %k in %c0..%rounds step %c1 {
        %s = rem %k, %c3
        %t = div %k, %c3
        %p = and %t, %c1
        %q = xor %p, %c1
        wait %empty[%s], %q
        expect %full[%s] bytes=10240
        %As = slot %A[%s]
        %Bs = slot %B[%s]
        async_load %a[%c0:+64, tile(%k, 32)] -> %As, %full[%s]
        async_load %b[tile(%k, 32), %c0:+16] -> %Bs, %full[%s]
      }
    }
  }
}"""


def test_two_rounds_in_one():
    """An even number of rounds needs no loop for the rest."""
    kernel = pairs(parse_kernel(TEXT.replace("ROUNDS", "full 4 : i32")))
    verify(kernel, "block")
    text = print_kernel(kernel).split("%zero = full 0.0 : tile<64x16xf32>\n")[1].split("store %o")[0]
    expected = """\
      %c2 = full 2 : i32
      %sum, %end = for %k in %c0..%rounds step %c2 carry (%acc = %zero, %it = %c0) {
        %s = rem %it, %c3 : i32
        %t = div %it, %c3 : i32
        %p = and %t, %c1 : i32
        wait %full[%s], %p
        %As = slot %A[%s] : shared<64x32xf32>
        %Bs = slot %B[%s] : shared<32x16xf32>
        %run = dot_async %As, %Bs : tile<64x16xf32>
        %it1 = add %it, %c1 : i32
        %0 = add %k, %c1 : i32
        %s_1 = rem %it1, %c3 : i32
        %t_1 = div %it1, %c3 : i32
        %p_1 = and %t_1, %c1 : i32
        wait %full[%s_1], %p_1
        %As_1 = slot %A[%s_1] : shared<64x32xf32>
        %Bs_1 = slot %B[%s_1] : shared<32x16xf32>
        %run_1 = dot_async %As_1, %Bs_1 : tile<64x16xf32>
        %it1_1 = add %it1, %c1 : i32
        %d = dot_wait %run pending=1 : tile<64x16xf32>
        arrive %empty[%s]
        %e = exp2 %d : tile<64x16xf32>
        %next = add %acc, %e : tile<64x16xf32>
        %d_1 = dot_wait %run_1 : tile<64x16xf32>
        arrive %empty[%s_1]
        %e_1 = exp2 %d_1 : tile<64x16xf32>
        %next_1 = add %next, %e_1 : tile<64x16xf32>
        yield %next_1, %it1_1
      }"""
    assert textwrap.dedent(text.rstrip(" ")).splitlines() == textwrap.dedent(expected).splitlines()


@pytest.mark.parametrize("rounds", [0, 1, 4, 7])
@pytest.mark.parametrize("known", [True, False])
def test_any_number_of_rounds(rounds, known):
    kernel = parse_kernel(TEXT.replace("ROUNDS", f"full {rounds} : i32" if known else "load %n[]"))
    after = pairs(kernel)
    verify(after, "block")
    consumer = after.body.ops[-1].blocks()[0]
    assert sum(isinstance(op, For) for op in consumer.ops) == (1 if known and rounds % 2 == 0 else 2)
    inputs = operands(kernel, rounds)
    want = interpret(kernel, inputs)[0]
    for seed in range(3):
        np.testing.assert_array_equal(interpret(after, inputs, seed=seed)[0], want)


def test_the_waits_are_needed():
    """A product that runs is no tile yet."""
    kernel = pairs(parse_kernel(TEXT.replace("ROUNDS", "full 4 : i32")))
    faulty = parse_kernel(print_kernel(kernel).replace("dot_wait %run_1 :", "dot_wait %run_1 pending=1 :"))
    with pytest.raises(JtileError):
        interpret(faulty, operands(faulty, 4))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("slots 3", "slots 2"),  # the second round would wait for the slot of the first
        ("%it1 = add %it, %c1", "%x = reduce max %acc axes=(0, 1)\n %y = cast %x : i32\n %it1 = add %it, %y"),
        ("64x16", "64x256"),  # too few registers for two products and a sum
    ],
    ids=["two slots", "rounds that need the sum", "large tiles"],
)
def test_what_stays(old, new):
    text = TEXT.replace("ROUNDS", "full 4 : i32").replace(old, new)
    if new == "slots 2":
        text = text.replace("barrier<3", "barrier<2").replace("%c3 = full 3", "%c3 = full 2")
    if new == "64x256":
        text = text.replace("256x16x", "256x256x").replace("32x16x", "32x256x").replace("+16]", "+256]")
    kernel = parse_kernel(text)
    assert print_kernel(pairs(kernel)) == print_kernel(kernel)


def in_pairs(name: str, operands_: list[tuple[tuple[int, ...], jnp.dtype]], **options) -> tuple[Kernel, Kernel]:
    """A kernel of the library, of products of 128 x 128 x 384, and what the block level makes of it: two products in
    flight."""
    kernel = getattr(importlib.import_module("jtile.ops.scaled_matmul"), name)
    options = {"tb": True, "bm": 128, "bn": 128, "bk": 128} | options
    kernel = kernel.lower(*(jax.ShapeDtypeStruct(s, t) for s, t in operands_), **options).kernel
    planned = steps(kernel, machine(), {})
    assert not isinstance(planned, NoPlan), str(planned)
    waits = [op.pending for op in planned.kernel.body.walk() if isinstance(op, DotWait)]
    assert waits == [1, 0, 0] * planned.plan.consumers
    return kernel, planned.kernel


F8 = ((128, 384), jnp.float8_e4m3fn)


def test_exact_products_of_bytes():
    """Their sums leave the tensor cores after 128 terms: the addition of one round overlaps with the next product."""
    kernel, made = in_pairs("products_times", [F8, F8, ((), jnp.float32)], out_dtype="float32")
    inputs = operands(kernel, 0)
    np.testing.assert_allclose(interpret(made, inputs)[0], interpret(kernel, inputs)[0], rtol=1e-5, atol=1e-4)


def test_products_with_scales_for_blocks():
    """Scales are loaded a round ahead."""
    scales = [((3, 128), jnp.float32), ((1, 3), jnp.float32)]
    kernel, made = in_pairs("scaled_products", [F8, F8, *scales], out_dtype="bfloat16", block=128)
    inputs = operands(kernel, 0)
    want = interpret(kernel, inputs)[0]
    for seed in range(2):
        np.testing.assert_array_equal(interpret(made, inputs, seed=seed)[0], want)
