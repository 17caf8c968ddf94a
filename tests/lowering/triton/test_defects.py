"""What is done about defects of triton 3.6 and of ptxas: forms that were wrong or crashed on a device."""

from __future__ import annotations

import pytest
from machines import card
from op_matrix import Bench, array

from jtile import ir
from jtile.lowering.triton import layouts, versions
from jtile.lowering.triton.compile import compile_kernel, emit_kernel
from jtile.lowering.triton.features import features
from jtile.lowering.triton.ptx import mended

SCATTERED = """#linear = #ttg.linear<{register = [[0, 1]], lane = [LANES], warp = [[0, 16], [0, 32]], block = []}>
    %49:2 = "tt.reduce"(%47, %48) <{axis = 1 : i32}> ({
    ^bb0(%arg4: i8, %arg5: i32, %arg6: i8, %arg7: i32):
      tt.reduce.return %61, %62 : i8, i32
    }) : (tensor<4x64xi8, PLACE>, tensor<4x64xi32, PLACE>) -> (tensor<4xi8>, tensor<4xi32>)
"""


@pytest.mark.parametrize(
    ("lanes", "place", "right"),
    [
        ("[0, 2], [0, 4], [1, 0], [2, 0], [0, 8]", "#linear", False),
        ("[0, 2], [0, 4], [0, 8], [1, 0], [2, 0]", "#linear", True),
        ("[0, 2], [0, 4], [1, 8], [2, 0], [0, 0]", "#linear", False),
        ("[0, 2], [0, 4], [1, 0], [2, 0], [0, 8]", "#other", True),
    ],
)
def test_reductions_of_lanes_that_are_not_neighbours_are_seen(lanes, place, right):
    text = SCATTERED.replace("LANES", lanes).replace("PLACE", place)
    if right:
        layouts.check(text)
    else:
        with pytest.raises(layouts.ScatteredLanesError):
            layouts.check(text)


def test_a_reduction_after_a_reshape():
    """Compiled by triton 3.6, its lanes are not neighbours but in a layout that was asked for."""
    bench = Bench(array((4, 8, 8), "float32"))
    bench.value(ir.Reduce(bench.b.value(ir.Reshape(bench.loads()[0], (4, 64))), "sum", (1,)))
    kernel = bench.case().kernel
    assert "tt.scan" in emit_kernel(kernel, features("sm_90"), isolate=True)[0]
    text = compile_kernel(kernel, card("sm_90"), texts=True).texts["ttgir"]
    if not versions.reduces_any_layout():
        layouts.check(text)


def test_a_scan_along_a_column():
    """Triton 3.6 fails on one of a tile that several warps hold, as decays of a chunk are: it scans a vector."""
    bench = Bench(array((64, 1), "float32"))
    bench.value(ir.Cumulative(bench.loads()[0], "sum", 0, False))
    kernel = bench.case().kernel
    text = emit_kernel(kernel, features("sm_90"))[0]
    assert "(tensor<64xf32>) -> tensor<64xf32>" in text and "tensor<64x1xf32>) -> tensor<64x1xf32>" not in text
    assert compile_kernel(kernel, card("sm_90")).image


def test_what_gets_its_last_axis_back_keeps_the_layout_of_its_rows():
    """Behind a reshape, triton 3.6 gives every thread whole rows of what is computed with it."""
    bench = Bench(array((8, 64), "float32"))
    bench.value(ir.Reshape(bench.b.value(ir.Reduce(bench.loads()[0], "sum", (1,))), (8, 1)))
    text = emit_kernel(bench.case().kernel, features("sm_90"))[0]
    (line,) = (line for line in text.splitlines() if "tensor<8xf32> -> tensor<8x1xf32>" in line)
    assert "tt.expand_dims" in line


def test_short_sums_with_constants_are_done_by_halves():
    text = "\tmov.b32 \t%r40, 64;\n\tadd.s16x2 \t%r41, %r37, %r40;\n\tadd.s16x2 \t%r42, %r37, %r38;\n"
    after = mended(text)
    assert "add.s16x2 \t%r41" not in after and "add.s16 %jt4, %jt0, %jt2;" in after
    assert "\tadd.s16x2 \t%r42, %r37, %r38;" in after


@pytest.mark.parametrize(("pad", "dtype", "selected"), [(-2, "int8", True), (-1, "int8", False), (-2, "int32", False)])
def test_pads_whose_sign_would_run_over_other_elements(pad, dtype, selected):
    short = ir.DTYPES[dtype].short
    text = emit_kernel(
        ir.parse_kernel(f"""kernel @k(%x: ref<100x{short}>, %o: ref<64x{short}, out>) {{
          %c = full 1 : i32
          %t = load %x[tile(%c, 64)] pad={pad} : tile<64x{short}>
          %z = full 0 : i32
          store %o[tile(%z, 64)], %t
        }}"""),
        features("sm_90"),
    )[0]
    assert ("arith.select" in text) == selected


def test_small_products_of_elements_that_narrow_loads_were_made_wider_for():
    """k is as long as several steps of the instruction, or none is used."""
    for wide, line in (("f32", "tensor<8x32xf32> * tensor<32x8xf32>"), ("f64", None)):
        text = emit_kernel(
            ir.parse_kernel(f"""kernel @d(%x: ref<8x8xi8>, %o: ref<8x8x{wide}, out>) {{
              %z = full 0 : i32
              %u = load %x[tile(%z, 8), tile(%z, 8)] : tile<8x8xi8>
              %w = cast %u : tile<8x8x{wide}>
              %d = dot %w, %w : tile<8x8x{wide}>
              store %o[tile(%z, 8), tile(%z, 8)], %d
            }}"""),
            features("sm_90"),
        )[0]
        assert line in text if line else "tt.dot" not in text


def test_a_loop_that_never_runs():
    text = """kernel @w(%x: ref<64xf32>, %o: ref<64xf32, out>) {
      %z = full 0 : i32
      %r = while (%a = %z) {
        %go = lt %a, %z : bool
        yield %go
      } do (%b) {
        %t = load %x[tile(%b, 64)] : tile<64xf32>
        store %o[tile(%b, 64)], %t
        yield %b
      }
    }"""
    kernel = ir.parse_kernel(text)
    assert compile_kernel(kernel, card("sm_90")).image


def test_what_some_lanes_load_is_defined_in_all_lanes_of_a_role():
    load = "\t@%p129 ld.shared.b32 %r3423, [ %r3424 + 0 ];\n"
    role = "\tsetmaxnreg.dec.sync.aligned.u32 24;\n"
    assert mended(load) == load
    assert mended(role + load) == role + "\tmov.b32 %r3423, 0;\n" + load
    assert mended(role + load.replace("b32 %r", "b16 %rs")) == role + "\tmov.b16 %rs3423, 0;\n" + load.replace(
        "b32 %r", "b16 %rs"
    )
