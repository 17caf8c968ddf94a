"""What a role does with tiles: compiled for Hopper, and on one compared with the interpreter."""

from __future__ import annotations

import json

import numpy as np
import pytest
from block_tiles import CASES
from device import run_artifact
from machines import card

from jtile import ir
from jtile.interpret import interpret
from jtile.lowering.triton.block import compile_block_kernel

ADDED = """
kernel @added(%x: ref<{n}x64x64xf32>, %s: ref<64x64xf32>, %o: ref<64x64xf32, out>) grid({n}) alias(%s = %o) {{
  %i = program_id 0 : i32
  %c0 = full 0 : i32
  %C = alloc_shared : shared<64x64xf32>
  roles {{
    role all warps=4 {{
      %x_i = load %x[%i, tile(%c0, 64), tile(%c0, 64)] : tile<64x64xf32>
      store_shared %C, %x_i
      fence_shared
      async_store %o[tile(%c0, 64), tile(%c0, 64)] <- %C fn="{fn}"
      store_wait 0
    }}
  }}
}}
"""

# Boxes of arrays of any rank that hang over, and copies that do not happen.
COPIES = """
kernel @copies(%x: ref<3x5x100x80x{dt}>, %v: ref<304x{dt}>, %o: ref<3x5x100x80x{dt}, out>, %w: ref<3x5x304x{dt}, out>)
    grid(3, 5) {{
  %i = program_id 0 : i32
  %j = program_id 1 : i32
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %never = lt %i, %c0 : bool
  %X = alloc_shared : shared<64x128x{dt}, slots 2>
  %V = alloc_shared : shared<256x{dt}, slots 2>
  %full = alloc_barriers : barrier<1, arrivals 2>
  roles {{
    role worker warps=4 {{
      wait %full[%c0], %c0
      wait %full[%c0], %c0 when=%never
      for %k in %c0..%two step %c1 {{
        %X_k = slot %X[%k] : shared<64x128x{dt}>
        %V_k = slot %V[%k] : shared<256x{dt}>
        async_store %o[%i, %j, tile(%k, 64), tile(%c0, 128)] <- %X_k
        async_store %w[%i, %j, tile(%k, 256)] <- %V_k
      }}
      store_wait 0
    }}
    role loader warps=1 registers=24 {{
      expect %full[%c0] bytes={bytes}
      arrive %full[%c0]
      arrive %full[%c0] when=%never
      for %k in %c0..%two step %c1 {{
        %X_k = slot %X[%k] : shared<64x128x{dt}>
        %V_k = slot %V[%k] : shared<256x{dt}>
        async_load %x[%i, %j, tile(%k, 64), tile(%c0, 128)] -> %X_k, %full[%c0] pad={pad}
        async_load %x[%i, %j, tile(%c0, 64), tile(%c0, 128)] -> %X_k, %full[%c0] when=%never
        async_load %v[tile(%k, 256)] -> %V_k, %full[%c0]
      }}
    }}
  }}
}}
""".replace("%never = lt", "%two = full 2 : i32\n  %never = lt")


TALL = """
kernel @tall(%x: ref<600x32xbf16>, %o: ref<600x32xbf16, out>) grid(2) {
  %i = program_id 0 : i32
  %c0 = full 0 : i32
  %X = alloc_shared : shared<512x32xbf16>
  %full = alloc_barriers : barrier<1, arrivals 1>
  roles {
    role all warps=4 {
      expect %full[%c0] bytes=32768
      async_load %x[tile(%i, 512), tile(%c0, 32)] -> %X, %full[%c0]
      wait %full[%c0], %c0
      async_store %o[tile(%i, 512), tile(%c0, 32)] <- %X
      store_wait 0
    }
  }
}
"""


def check(kernel: ir.Kernel, inputs: list[np.ndarray], *, exact: bool = True) -> None:
    """The numbers of the GPU are those of the interpreter."""
    got = run_artifact(compile_block_kernel(kernel, card("sm_90")), kernel, inputs).outputs()
    for g, want in zip(got, interpret(kernel, inputs), strict=True):
        if exact:
            np.testing.assert_array_equal(np.asarray(g, np.float64), np.asarray(want, np.float64))
        else:
            np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(want, np.float64), rtol=2e-5, atol=1e-30)


def added(fn: str = "add", n: int = 4) -> ir.Kernel:
    return ir.parse_kernel(ADDED.format(fn=fn, n=n))


def copies(dt: str, pad: str = "0") -> ir.Kernel:
    width = {"f32": 4, "bf16": 2, "i8": 1}[dt]
    return ir.parse_kernel(COPIES.format(dt=dt, pad=pad, bytes=2 * width * (64 * 128 + 256)))


@pytest.mark.parametrize("name", CASES)
def test_a_role_compiles(name):
    case = CASES[name]
    interpret(case.kernel, case.inputs())
    artifact = compile_block_kernel(case.kernel, card("sm_90"))
    assert artifact.image.startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_role_computes_what_the_interpreter_does(name):
    case = CASES[name]
    check(case.kernel, case.inputs(), exact=case.exact)


def test_copies_compile():
    record = json.loads(compile_block_kernel(ir.parse_kernel(TALL), card("sm_90")).launch["record"])
    assert [p["box"] for p in record["params"] if p["kind"] == "tensormap"] == [[32, 256]] * 2  # several copies
    assert compile_block_kernel(added(), card("sm_90")).image
    for dt, pad in (("f32", "nan"), ("bf16", "0"), ("i8", "0")):
        assert compile_block_kernel(copies(dt, pad), card("sm_90")).image


@pytest.mark.gpu
@pytest.mark.parametrize(("dt", "pad"), [("f32", "nan"), ("f32", "0"), ("bf16", "nan"), ("i8", "0")])
def test_boxes_that_hang_over(dt, pad):
    kernel = copies(dt, pad)
    rng = np.random.default_rng(0)
    numpy = kernel.inputs[0].type.info.numpy
    check(kernel, [rng.integers(-9, 9, r.shape).astype(np.float32).astype(numpy) for r in kernel.inputs])


@pytest.mark.gpu
def test_boxes_of_more_than_256_rows():
    kernel = ir.parse_kernel(TALL)
    check(kernel, [np.arange(600 * 32).reshape(600, 32).astype(np.float32).astype(kernel.inputs[0].type.info.numpy)])


@pytest.mark.gpu
def test_programs_add_to_one_array():
    kernel, rng = added(n=64), np.random.default_rng(1)
    check(kernel, [rng.integers(-9, 9, r.shape).astype(np.float32) for r in kernel.inputs])
