"""Grids of more programs than a launch has blocks, and the order in which blocks take programs."""

from __future__ import annotations

import numpy as np
import pytest
from machines import card
from ttir import run_ttir

from jtile import ir, passes
from jtile.interpret import interpret
from jtile.lowering.triton import compile as back_end
from jtile.lowering.triton.compile import compile_kernel, emit_kernel
from jtile.lowering.triton.features import features

POINTS = """kernel @k(%o: ref<GRIDxi32, out>) grid(GRID) {
  %i = program_id 0 %j = program_id 1 %h = program_id 2
  %c = full 100 : i32 %a = mul %i, %c %b = add %a, %j %d = mul %b, %c %e = add %d, %h
  store %o[%i, %j, %h], %e
}"""
PRODUCT = """kernel @k(%a: ref<BATCHxMx16xf32>, %b: ref<BATCHx16xNxf32>, %o: ref<BATCHxMxNxf32, out>) grid(GRID) {
  %h = program_id 0 %i = program_id 1 %j = program_id 2 %c0 = full 0 : i32
  %x = load %a[%h, tile(%i, 2), %c0:+16] : tile<2x16xf32>
  %y = load %b[%h, %c0:+16, tile(%j, 2)] : tile<16x2xf32>
  %d = dot %x, %y : tile<2x2xf32>
  store %o[%h, tile(%i, 2), tile(%j, 2)], %d
}"""


def points(*grid: int) -> ir.Kernel:
    sides = "x".join(map(str, grid))
    return ir.parse_kernel(POINTS.replace("GRIDx", f"{sides}x").replace("GRID", ", ".join(map(str, grid))))


def product(batch: int, m: int, n: int) -> ir.Kernel:
    text = PRODUCT.replace("BATCH", str(batch)).replace("xMx", f"x{2 * m}x").replace("16xNx", f"16x{2 * n}x")
    return ir.parse_kernel(text.replace("xNx", f"x{2 * n}x").replace("GRID", f"{batch}, {m}, {n}"))


@pytest.mark.parametrize("grid", [(3, 1, 7), (2, 3, 4), (1, 1, 11)])
def test_each_block_takes_several_programs(monkeypatch, grid):
    monkeypatch.setattr(back_end, "MAX_BLOCKS", 4)
    kernel = points(*grid)
    text, record = emit_kernel(kernel, features("sm_90"))
    assert record.grid == 4
    assert ": i64 {" in text
    np.testing.assert_array_equal(run_ttir(kernel, [])[0], interpret(kernel, [])[0])


@pytest.mark.parametrize(("batch", "m", "n", "most"), [(2, 3, 2, 5), (1, 9, 2, 2**31 - 1), (1, 17, 3, 7)])
def test_bands_of_a_product_hold_every_program(monkeypatch, batch, m, n, most):
    monkeypatch.setattr(back_end, "MAX_BLOCKS", most)
    kernel = product(batch, m, n)
    rng = np.random.default_rng(0)
    args = [rng.normal(size=v.shape).astype(np.float32) for v in kernel.inputs]
    (got,) = run_ttir(kernel, args)
    np.testing.assert_allclose(got, args[0] @ args[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("grid", [(65536, 65536, 1), (1, 46341, 46341)])
def test_more_programs_than_32_bits_count(grid):
    """Their number wrapped to one that is not positive, and no program ran."""
    text, record = emit_kernel(passes.run_pipeline(points(*grid), passes.TILE), features("sm_90"))
    assert record.grid == 2**31 - 1
    assert f"arith.constant {np.prod(grid, dtype=object)} : i64" in text


def test_bands_wider_than_32_bits():
    """The size of a band wrapped to zero, and ids came from a division by it."""
    kernel = ir.parse_kernel(
        f"""kernel @k(%a: ref<2x16x16xf32>, %b: ref<{2**29}x16x16xf32>, %o: ref<16x16xf32, out>) grid(2, {2**29}) {{
          %i = program_id 0 %j = program_id 1 %c0 = full 0 : i32
          %x = load %a[%i, %c0:+16, %c0:+16] : tile<16x16xf32>
          %y = load %b[%j, %c0:+16, %c0:+16] : tile<16x16xf32>
          %d = dot %x, %y : tile<16x16xf32>
          store %o[%c0:+16, %c0:+16], %d
        }}"""
    )
    text, _ = emit_kernel(passes.run_pipeline(kernel, passes.TILE), features("sm_90"))
    zeros = [line.split()[0] for line in text.splitlines() if line.endswith("arith.constant 0 : i32")]
    assert not any(line.endswith(f", {zero} : i32") for line in text.splitlines() if "ui %" in line for zero in zeros)


def test_a_large_grid_compiles():
    assert compile_kernel(passes.run_pipeline(points(65536, 65536, 1), passes.TILE), card("sm_90")).image
