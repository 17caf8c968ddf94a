"""Batching of Tile IR: text in, text out; and random kernels, lane by lane."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
from draws import draws
from hypothesis import assume, given
from hypothesis import strategies as st
from native import run_native
from random_kernels import Case, kernels

from jtile.errors import InterpreterError, KernelValueError
from jtile.interpret import interpret
from jtile.ir import Kernel, parse_kernel, print_kernel, verify
from jtile.ir.types import DTYPES
from jtile.passes import TILE, run_pipeline
from jtile.transforms.batch import batch


def check(before: str, after: str, *levels: tuple[int, str]) -> None:
    """Batching a kernel, level by level, gives the expected text. A level is its size and a letter per Ref: b(atched)
    or s(hared)."""
    kernel = parse_kernel(textwrap.dedent(before))
    text = print_kernel(kernel)
    result = kernel
    for size, flags in levels:
        result = batch(result, size, [f == "b" for f in flags])
        verify(result)
    got = print_kernel(result)
    assert got.splitlines() == textwrap.dedent(after).strip("\n").splitlines(), f"\n{got}"
    assert print_kernel(kernel) == text, "batch changed its argument"
    assert print_kernel(parse_kernel(got)) == got


MATMUL = """
kernel @matmul(%a: ref<6x4xf32>, %b: ref<4x7xf32>, %o: ref<6x7xf32, out>) grid(2, 3) {
  %i = program_id 0 : i32
  %j = program_id 1 : i32
  %n = num_programs 1 : i32
  %zero = full 0.0 : tile<4x3xf32>
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c2 = full 2 : i32
  %sum = for %k in %c0..%c2 step %c1 carry (%acc = %zero) {
    %x = load %a[tile(%i, 4), tile(%k, 2)] : tile<4x2xf32>
    %y = load %b[tile(%k, 2), tile(%j, 3)] : tile<2x3xf32>
    %z = dot %x, %y acc=%acc : tile<4x3xf32>
    yield %z
  }
  store %o[tile(%i, 4), tile(%j, 3)], %sum
}
"""


def test_a_level_adds_an_axis_an_index_and_shifts_program_ids():
    check(
        MATMUL,
        """
        kernel @matmul(%a: ref<5x6x4xf32>, %b: ref<4x7xf32>, %o: ref<5x6x7xf32, out>) grid(5, 2, 3) lanes(1) {
          %lane = program_id 0 : i32
          %i = program_id 1 : i32
          %j = program_id 2 : i32
          %n = num_programs 2 : i32
          %zero = full 0.0 : tile<4x3xf32>
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c2 = full 2 : i32
          %sum = for %k in %c0..%c2 step %c1 carry (%acc = %zero) {
            %x = load %a[%lane, tile(%i, 4), tile(%k, 2)] : tile<4x2xf32>
            %y = load %b[tile(%k, 2), tile(%j, 3)] : tile<2x3xf32>
            %z = dot %x, %y acc=%acc : tile<4x3xf32>
            yield %z
          }
          store %o[%lane, tile(%i, 4), tile(%j, 3)], %sum
        }
        """,
        (5, "bsb"),
    )


def test_levels_nest_outermost_first():
    check(
        """
        kernel @row(%x: ref<4xf32>, %s: ref<f32>, %o: ref<4xf32, out>) grid(4) {
          %i = program_id 0 : i32
          %v = load %x[%i] : f32
          %w = load %s[] : f32
          %y = mul %v, %w : f32
          store %o[%i], %y
        }
        """,
        """
        kernel @row(%x: ref<8x4xf32>, %s: ref<3xf32>, %o: ref<8x3x4xf32, out>) grid(8, 3, 4) lanes(2) {
          %lane = program_id 0 : i32
          %lane_1 = program_id 1 : i32
          %i = program_id 2 : i32
          %v = load %x[%lane, %i] : f32
          %w = load %s[%lane_1] : f32
          %y = mul %v, %w : f32
          store %o[%lane, %lane_1, %i], %y
        }
        """,
        (3, "sbb"),
        (8, "bsb"),
    )


def test_gathers_masks_scratch_aliases_and_atomics():
    check(
        """
        kernel @update(%x: ref<9xf32>, %at: ref<4xi32>, %t: ref<9xf32>, %n: ref<i32, out>, %o: ref<9xf32, out>,
            %tmp: ref<4xf32, scratch>) alias(%t = %o) init(%n = 1) {
          %c0 = full 0 : i32
          %at_ = load %at[%c0:+4] : tile<4xi32>
          %m = gt %at_, %at_ : tile<4xbool>
          %v = load %x[take(%at_)] mask=%m pad=2.0 : tile<4xf32>
          store %tmp[%c0:+4], %v
          %buf = alloc : ref<4xf32, scratch>
          %c1 = full 1 : i32
          %old = atomic add %n[], %c1 : i32
          store %o[take(%at_)], %v mask=%m
        }
        """,
        """
        kernel @update(
            %x: ref<3x9xf32>,
            %at: ref<3x4xi32>,
            %t: ref<3x9xf32>,
            %n: ref<i32, out>,
            %o: ref<3x9xf32, out>,
            %tmp: ref<4xf32, scratch>) grid(3) lanes(1) alias(%t = %o) init(%n = 1) {
          %lane = program_id 0 : i32
          %c0 = full 0 : i32
          %at_ = load %at[%lane, %c0:+4] : tile<4xi32>
          %m = gt %at_, %at_ : tile<4xbool>
          %v = load %x[%lane, take(%at_)] mask=%m pad=2.0 : tile<4xf32>
          store %tmp[%c0:+4], %v
          %buf = alloc : ref<4xf32, scratch>
          %c1 = full 1 : i32
          %old = atomic add %n[], %c1 : i32
          store %o[%lane, take(%at_)], %v mask=%m
        }
        """,
        (3, "bbbsb"),
    )


def test_a_level_has_a_flag_for_each_input_and_output():
    kernel = parse_kernel(MATMUL)
    for flags in ((True,) * 2, (True,) * 4):
        with pytest.raises(ValueError, match="argument 2"):
            batch(kernel, 2, flags)


def test_lanes_are_text_and_checked():
    text = "kernel @k(%o: ref<2xf32, out>) grid(2) lanes(1) {\n}\n"
    assert parse_kernel(text).lanes == 1
    assert print_kernel(parse_kernel(text)) == text
    kernel = parse_kernel(text)
    kernel.lanes = -1
    with pytest.raises(KernelValueError, match="not negative"):
        verify(kernel)


# -- random kernels -------------------------------------------------------------------------------------------------


def lane_inputs(case: Case, size: int, flags: list[bool]) -> list[list[np.ndarray]]:
    """Inputs of each lane: floats change their signs from lane to lane, which keeps magnitudes and exactness."""
    sign = lambda x, k: -x if k % 2 and DTYPES[x.dtype.name].kind == "f" else x
    return [[sign(x, k) if b else x for x, b in zip(case.inputs, flags)] for k in range(size)]


def lane_by_lane(case: Case, lanes: list[list[np.ndarray]]) -> list[np.ndarray]:
    try:
        rows = [interpret(case.kernel, x) for x in lanes]
    except InterpreterError:  # other signs may lead a gather outside, say
        assume(False)
        raise
    return [np.stack(parts) for parts in zip(*rows)]


def close(got: np.ndarray, want: np.ndarray, error: float) -> bool:
    a, b = got.astype(np.float64), want.astype(np.float64)
    return bool(((a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= error)).all())


@draws(60)
@given(kernels(), st.integers(1, 3), st.integers(0, 2**30))
def test_random_kernels_lane_by_lane(case: Case, size: int, bits: int):
    aliased = {i for i, _ in case.kernel.aliases}
    flags = [bool(bits >> k & 1) or k in aliased for k in range(len(case.inputs))]
    lanes = lane_inputs(case, size, flags)
    want = lane_by_lane(case, lanes)
    kernel = batch(case.kernel, size, [*flags, *[True] * len(case.kernel.outputs)])
    verify(kernel)
    stacked = [np.stack(x) if b else x[0] for x, b in zip(zip(*lanes), flags)]
    optimised = run_pipeline(kernel, TILE)
    for got in (interpret(kernel, stacked), interpret(optimised, stacked), run_native(optimised, stacked)):
        for a, b, error, v in zip(got, want, case.errors, kernel.outputs, strict=True):
            assert close(a, b, error), v


@draws(25)
@given(kernels())
def test_two_levels_are_the_lanes_of_lanes(case: Case):
    """Passes do not mind where lanes come from: rank and grid grow twice."""
    many = [True] * (len(case.inputs) + len(case.kernel.outputs))
    lanes = lane_inputs(case, 2, many)
    want = lane_by_lane(case, lanes)
    kernel: Kernel = batch(batch(case.kernel, 2, many), 1, many)
    verify(kernel)
    got = run_native(run_pipeline(kernel, TILE), [np.stack(x)[None] for x in zip(*lanes)])
    for a, b, error, v in zip(got, want, case.errors, kernel.outputs, strict=True):
        assert close(a[0], b, error), v
