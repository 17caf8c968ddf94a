"""The passes of the tile level on kernels at block level: no barrier, copy or product is dropped, merged or moved."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from block_kernels import attention, gemm
from golden import check

from jtile.interpret import interpret
from jtile.ir import Kernel, parse_kernel, roles_of, verify
from jtile.passes import TILE, canonicalise, cse, dce, hoist, ref_forwarding, run_pipeline

KERNELS = {
    "gemm": gemm(128, 192, 96, 64, 64, 32, slots=2, consumers=1, blocks=2),
    "gemm, two": gemm(128, 128, 128, 128, 64, 64, blocks=1, out="f32"),
    "attention": attention(128, 192, 64, heads=1, bn=64),
}


def effects(kernel: Kernel) -> list[list[str]]:
    """What every role does, in program order, without arithmetic."""
    return [[op.mnemonic for op in b.walk() if op.effect != "none"] for b in roles_of(kernel).bodies]


@pytest.mark.parametrize("name", KERNELS)
def test_the_pipeline_keeps_what_roles_do(name):
    before = parse_kernel(KERNELS[name])
    after = run_pipeline(before, TILE)
    verify(after, "block")
    assert effects(after) == effects(before)
    assert sum(1 for _ in after.body.walk()) < sum(1 for _ in before.body.walk())
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(v.shape).astype(ml_dtypes.bfloat16) for v in before.inputs]
    (want,), (got,) = interpret(before, arrays), interpret(after, arrays, seed=1)
    assert np.array_equal(want, got)


HEAD = """
kernel @k(%x: ref<8xi32>, %o: ref<8xi32, out>) grid(2) init(%o = 0) {
  %c0 = full 0 : i32
  %A = alloc_shared : shared<8xi32>
  %B = alloc_shared : shared<8xi32, slots 2>
  %b = alloc_barriers : barrier<2, arrivals 1>
  roles {
    role main warps=4 {"""
TAIL = """
    }
    role other warps=1 {
      %v = full 1 : tile<8xi32>
      store %o[tile(%c0, 8)], %v
      store_shared %A, %v
      %g = slot %B[%c0] : shared<8xi32>
      store_shared %g, %v
      arrive %b[%c0]
    }
  }
}"""


def checked(run, text: str, expected: str | None = None) -> None:
    check(run, HEAD + text + TAIL, HEAD + (text if expected is None else expected) + TAIL)


def test_views_are_one_and_loads_of_buffers_are_not():
    checked(
        cse,
        """
      wait %b[%c0], %c0
      %s = slot %B[%c0] : shared<8xi32>
      %t = slot %B[%c0] : shared<8xi32>
      %u = load_shared %s : tile<8xi32>
      %w = load_shared %t : tile<8xi32>
      store_shared %A, %u
      store_shared %A, %w
      fence_shared
      fence_shared""",
        """
      wait %b[%c0], %c0
      %s = slot %B[%c0] : shared<8xi32>
      %u = load_shared %s : tile<8xi32>
      %w = load_shared %s : tile<8xi32>
      store_shared %A, %u
      store_shared %A, %w
      fence_shared
      fence_shared""",
    )


def test_a_wait_shows_what_others_wrote():
    """Loads of what some role writes stay on both sides of a wait; those of inputs are one."""
    checked(
        cse,
        """
      %p = load %o[tile(%c0, 8)] : tile<8xi32>
      %i = load %x[tile(%c0, 8)] : tile<8xi32>
      wait %b[%c0], %c0
      %q = load %o[tile(%c0, 8)] : tile<8xi32>
      %j = load %x[tile(%c0, 8)] : tile<8xi32>
      %r = add %p, %q : tile<8xi32>
      %s = add %r, %i : tile<8xi32>
      %t = add %s, %j : tile<8xi32>
      store_shared %A, %t
      fence_shared
      async_store %o[tile(%c0, 8)] <- %A
      %u = load %o[tile(%c0, 8)] : tile<8xi32>
      store_wait 0
      %w = load %o[tile(%c0, 8)] : tile<8xi32>
      %y = add %u, %w : tile<8xi32>
      store_shared %A, %y""",
        """
      %p = load %o[tile(%c0, 8)] : tile<8xi32>
      %i = load %x[tile(%c0, 8)] : tile<8xi32>
      wait %b[%c0], %c0
      %q = load %o[tile(%c0, 8)] : tile<8xi32>
      %r = add %p, %q : tile<8xi32>
      %s = add %r, %i : tile<8xi32>
      %t = add %s, %i : tile<8xi32>
      store_shared %A, %t
      fence_shared
      async_store %o[tile(%c0, 8)] <- %A
      %u = load %o[tile(%c0, 8)] : tile<8xi32>
      store_wait 0
      %w = load %o[tile(%c0, 8)] : tile<8xi32>
      %y = add %u, %w : tile<8xi32>
      store_shared %A, %y""",
    )


def test_loops_keep_their_schedule():
    """What a loop does anew in every round without need may be what its author wants there."""
    text = """
      %n = full 4 : i32
      %c1 = full 1 : i32
      for %k in %c0..%n step %c1 {
        wait %b[%c0], %c0
        %q = load %o[tile(%c0, 8)] : tile<8xi32>
        %s = slot %B[%c1] : shared<8xi32>
        store_shared %s, %q
      }"""
    checked(hoist, text)


def test_predicates_that_are_known():
    checked(
        canonicalise,
        """
      %t = full true : bool
      %f = full false : bool
      wait %b[%c0], %c0 when=%t
      arrive %b[%c0] when=%f
      arrive %b[%c0] when=%t
      expect %b[%c0] when=%f bytes=32
      async_load %x[tile(%c0, 8)] -> %A, %b[%c0] when=%f""",
        """
      %t = full true : bool
      %f = full false : bool
      wait %b[%c0], %c0
      arrive %b[%c0]""",
    )


def test_what_is_dead():
    """Views and arithmetic go; what other roles or the hardware may notice stays, and so does the order."""
    checked(
        dce,
        """
      %t = clock : i64
      %u = neg %t : i64
      %s = slot %B[%c0] : shared<8xi32>
      wait %b[%c0], %c0
      %l = load_shared %A : tile<8xi32>
      role_barrier""",
        """
      %t = clock : i64
      wait %b[%c0], %c0
      %l = load_shared %A : tile<8xi32>
      role_barrier""",
    )


def test_products_are_not_merged():
    head = "kernel @k() { %A = alloc_shared : shared<64x64xbf16> roles { role main warps=4 {\n"
    text = """
    %d = dot_async %A, %A : tile<64x64xf32>
    %e = dot_async %A, %A : tile<64x64xf32>
    %t = full true : bool
    %f = full false : bool
    %g = dot_async %A, %A acc=%d keep=%t : tile<64x64xf32>
    %h = dot_async %A, %A acc=%e keep=%f : tile<64x64xf32>
    %w, %v = dot_wait %g, %h : tile<64x64xf32>, tile<64x64xf32>
    } } }"""
    k = parse_kernel(head + text)
    for step in (cse, canonicalise, dce, ref_forwarding):
        k = step(k)
    products = [op for op in k.body.walk() if op.mnemonic == "dot_async"]
    assert len(products) == 4
    assert [(op.acc is None, op.keep) for op in products] == [(True, None), (True, None), (False, None), (True, None)]
