"""Accumulation: grid axes that an output is summed over, and programs that overlap."""

from __future__ import annotations

import pytest
from accumulation import atomics, check, expect, kernel, norm, ops

from jtile.ir import If, Load
from jtile.passes import partials
from jtile.passes.accumulate import Result


def test_a_weight_gradient_is_partial_sums_beside_the_rows():
    """129 programs are 43 that do three each; x is read once for both outputs; dx is stored rounded, once."""
    pieces = check(norm(258), ("bfloat16", "bfloat16"))
    assert pieces.results == (Result(0, 0, 0), Result(0, 1, 1))
    expect(
        pieces,
        """
        kernel @k(%x: ref<258x4xf32>, %s: ref<4xf32>, %dx: ref<258x4xbf16, out>, %ds: ref<43x4xf32, out>) grid(43) {
          %0 = program_id 0 : i32
          %c0 = full 0 : i32
          %c3 = full 3 : i32
          %1 = mul %0, %c3 : i32
          %c1 = full 1 : i32
          %w = load %s[%c0:+4] checked=false : tile<4xf32>
          %2 = full 0.0 : tile<4xf32>
          %ds_sum = for %3 in %c0..%c3 step %c1 carry (%ds_sum_1 = %2) {
            %i = add %1, %3 : i32
            %v = load %x[tile(%i, 2), %c0:+4] checked=false : tile<2x4xf32>
            %b = broadcast %w dims=(1) : tile<2x4xf32>
            %p = mul %v, %b : tile<2x4xf32>
            %4 = cast %p : tile<2x4xbf16>
            store %dx[tile(%i, 2), %c0:+4], %4 checked=false
            %q = reduce sum %v axes=(0) : tile<4xf32>
            %ds_sum_2 = add %ds_sum_1, %q : tile<4xf32>
            yield %ds_sum_2
          }
          store %ds[%0, %c0:+4], %ds_sum checked=false
        }
        """,
    )


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 127, 128, 129, 130, 255, 300])
def test_any_number_of_rows(rows):
    pieces = check(norm(rows), ("bfloat16", None))
    if rows:
        assert atomics(pieces) == 0
        assert pieces.kernels[0].inits == (None, None)
        assert pieces.kernels[0].outputs[0].dtype == "bfloat16"


def test_enough_other_programs_make_the_sum_serial():
    """64 columns of programs: no partial sums, and the result is stored rounded."""
    body = """
      %i = program_id 0
      %j = program_id 1
      %v = load %x[%i, %j]
      %0 = atomic add %o[%j], %v
    """
    pieces = check(kernel(body, "%x: ref<5x64xf32>, %o: ref<64xf32, out>", "5, 64"), ("bfloat16",))
    assert pieces.results == (Result(0, 0, 0),)
    assert (pieces.kernels[0].grid, pieces.kernels[0].outputs[0].dtype) == ((64,), "bfloat16")


def test_outputs_that_miss_different_axes_have_kernels_of_their_own(monkeypatch):
    monkeypatch.setattr(partials, "PROGRAMS", 4)
    monkeypatch.setattr("jtile.passes.accumulate.ANY", partials.Busy(programs=4))
    body = """
      %i = program_id 0
      %j = program_id 1
      %v = load %x[%i, %j]
      %0 = atomic add %a[%j], %v
      %1 = atomic add %b[%i], %v
      %2 = atomic add %c[%i, %j], %v
      %3 = atomic add %d[], %v
    """
    refs = "%x: ref<6x5xf32>, %a: ref<5xf32, out>, %b: ref<6xf32, out>, %c: ref<6x5xf32, out>, %d: ref<f32, out>"
    pieces = check(kernel(body, refs, "6, 5", "%a = 0, %b = 0, %c = 0, %d = 0"))
    assert atomics(pieces) == 0
    assert [r.piece for r in pieces.results] == [0, 1, 0, 2]
    assert [r.partials for r in pieces.results] == [0, 0, 0, 1]


@pytest.mark.parametrize(("step", "programs", "entries"), [(1, 18, 3), (1, 16, 3), (1, 2, 2), (2, 9, 2), (2, 8, 2)])
def test_windows_that_reach_into_the_next_programs_have_colours(step, programs, entries):
    """Three elements, one or two on: programs three or two apart do not meet, and store side by side."""
    body = f"%i = program_id 0\n%s = mul %i, %c{step}\n%v = load %x[%s:+3]\n%0 = atomic add %o[%s:+3], %v"
    pieces = check(kernel(body, "%x: ref<20xf32>, %o: ref<20xf32, out>", str(programs)))
    (k,) = pieces.kernels
    assert (atomics(pieces), ops(pieces, Load), pieces.results[0].partials) == (0, 1, 1)
    assert (k.outputs[0].shape, k.inits) == ((entries, 20), (0,))
    assert k.grid == ((entries,) if programs == 2 else (-(-programs // entries), entries))
    assert any(isinstance(op, If) for op in k.body.walk()) == bool(programs % entries)


def test_a_stencil_colours_both_axes_and_sums_its_weights():
    """dx of 3 x 3 points in 4 x 4 blocks: four copies, whatever the number of programs; dw in chunks."""
    points = "\n".join(
        f"%d{a}{b} = mul %g0, %w{a}{b}\n%a{a}{b} = atomic add %dx[%n, %i{a}:+4, %j{b}:+4], %d{a}{b}\n"
        f"%x{a}{b} = load %x[%n, %i{a}:+4, %j{b}:+4]\n%p{a}{b} = mul %x{a}{b}, %g0\n"
        f"%s{a}{b} = reduce sum %p{a}{b} axes=(0, 1)\n%e{a}{b} = atomic add %dw[%c{a}, %c{b}], %s{a}{b}"
        for a in range(3) for b in range(3)
    )  # fmt: skip
    weights = "\n".join(
        f"%u{a}{b} = load %w[%c{a}, %c{b}]\n%w{a}{b} = broadcast %u{a}{b} dims=() : tile<4x4xf32>"
        for a in range(3) for b in range(3)
    )  # fmt: skip
    starts = "\n".join(f"%{v}{a} = add %{v}, %c{a}" for v in "ij" for a in range(3))
    body = f"""
%n = program_id 0
%bi = program_id 1
%bj = program_id 2
%i = mul %bi, %c4
%j = mul %bj, %c4
{starts}
{weights}
%g0 = load %g[%n, tile(%bi, 4), tile(%bj, 4)]
{points}
"""
    refs = "%x: ref<2x12x20xf32>, %w: ref<3x3xf32>, %g: ref<2x10x18xf32>"
    outputs = "%dx: ref<2x12x20xf32, out>, %dw: ref<3x3xf32, out>"
    pieces = check(kernel(body, f"{refs}, {outputs}", "2, 3, 5", "%dx = 0, %dw = 0"))
    assert (atomics(pieces), len(pieces.kernels)) == (0, 2)
    assert pieces.kernels[0].outputs[0].shape == (4, 2, 12, 20)
    assert pieces.kernels[0].grid == (2, 2, 2, 3, 2)
    pieces = check(kernel(body, f"{refs}, {outputs}", "2, 3, 2", "%dx = 0, %dw = 0"))  # an axis of no more than colours
    assert (atomics(pieces), pieces.kernels[0].outputs[0].shape) == (0, (4, 2, 12, 20))
