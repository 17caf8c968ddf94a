"""Small tiles that products need are loaded a round ahead: text in, expected text out, and the same results."""

import textwrap

import numpy as np
import pytest

from jtile.interpret import interpret
from jtile.ir import For, Kernel, Load, parse_kernel, print_kernel, verify
from jtile.lowering.triton.block.passes.prefetch import prefetch

TEXT = """kernel @k(%x: ref<4x64xf32>, %y: ref<256x16xf32>, %n: ref<i32>, %o: ref<64x16xf32, out>) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c2 = full 2 : i32
  %c4 = full 4 : i32
  %A = alloc_shared : shared<64x64xf32>
  %B = alloc_shared : shared<64x16xf32, slots 2>
  %full = alloc_barriers : barrier<2, arrivals 1>
  %empty = alloc_barriers : barrier<2, arrivals 1>
  roles {
    role consumer warps=4 registers=240 {
      %ones = full 1.0 : tile<64x64xf32>
      store_shared %A, %ones
      fence_shared
      %zero = full 0.0 : tile<64x16xf32>
      %sum = for %k in %c0..ROUNDS step %c1 carry (%acc = %zero) {
        %s = rem %k, %c2
        %t = div %k, %c2
        %p = and %t, %c1
        wait %full[%s], %p
        %Bs = slot %B[%s]
        %run = dot_async %A, %Bs
        %d = dot_wait %run
        arrive %empty[%s]
        %f = load %x[%k, %c0:+64]
        %g = broadcast %f dims=(0) : tile<64x16xf32>
        %e = mul %d, %g
        %next = add %acc, %e
        yield %next
      }
      store %o[%c0:+64, %c0:+16], %sum
    }
    role producer warps=1 registers=24 {
      for %k in %c0..%c4 step %c1 {
        %s = rem %k, %c2
        %t = div %k, %c2
        %p = and %t, %c1
        %q = xor %p, %c1
        wait %empty[%s], %q
        expect %full[%s] bytes=4096
        %Bs = slot %B[%s]
        async_load %y[tile(%k, 64), %c0:+16] -> %Bs, %full[%s]
      }
    }
  }
}"""
PLAIN = TEXT.replace("ROUNDS", "%c4")


def loop(kernel: Kernel) -> For:
    return next(op for op in kernel.body.walk() if isinstance(op, For))


def test_the_tile_of_the_next_round():
    """The first one is loaded in front of the loop, the next ones behind the product of a round; the last round asks
    for its own once more."""
    kernel = prefetch(parse_kernel(PLAIN))
    verify(kernel, "block")
    text = print_kernel(kernel).split("%zero = full 0.0 : tile<64x16xf32>\n")[1].split("store %o")[0]
    lines = textwrap.dedent(text.rstrip(" ")).splitlines()
    assert lines[:2] == [
        "%f = load %x[%c0, %c0:+64] : tile<64xf32>",
        "%sum, %f_1 = for %k in %c0..%c4 step %c1 carry (%acc = %zero, %f_2 = %f) {",
    ]
    at = lines.index("  %0 = add %k, %c1 : i32")
    assert lines[at - 1].startswith("  %run = dot_async") and lines[at + 4].startswith("  %d = dot_wait %run")
    assert lines[at + 1 : at + 4] == [
        "  %1 = lt %0, %c4 : bool",
        "  %2 = select %1, %0, %k : i32",
        "  %f_3 = load %x[%2, %c0:+64] : tile<64xf32>",
    ]
    assert "  %g = broadcast %f_2 dims=(0) : tile<64x16xf32>" in lines
    assert "  yield %next, %f_3" in lines


def test_the_results_are_the_same():
    kernel = parse_kernel(PLAIN)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((4, 64)), rng.standard_normal((256, 16)), np.int32(4)]
    inputs = [np.asarray(x).astype(v.type.info.numpy) for x, v in zip(inputs, kernel.inputs, strict=True)]
    want = interpret(kernel, inputs)[0]
    for seed in range(4):
        np.testing.assert_array_equal(interpret(prefetch(kernel), inputs, seed=seed)[0], want)


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("ROUNDS", "%c4").replace("%x[%k,", "%x[%c0,"),  # the same tile in all rounds
        TEXT.replace("%zero =", "%m = load %n[]\n %zero =").replace("ROUNDS", "%m"),
        TEXT.replace("ROUNDS", "%c4").replace("%next = add", "store %o[%c0:+64, %c0:+16], %e\n %next = add").replace(
            "load %x[%k, %c0:+64]", "load %o[%c0:+64, %k]"
        ),
    ],
    ids=["place that stays", "maybe no round", "array that is written"],
)  # fmt: skip
def test_what_stays(text):
    kernel = parse_kernel(text)
    after = prefetch(kernel)
    assert len(loop(after).inits) == len(loop(kernel).inits)
    assert sum(isinstance(op, Load) for op in loop(after).body.ops) == 1
