"""Accumulation in kernels some of whose sizes are known only when they run."""

from __future__ import annotations

import numpy as np
import pytest
from accumulation import atomics, combine, random_inputs
from native import run_native

from jtile.interpret import interpret
from jtile.ir import bind_sizes, concrete, parse_kernel, used_symbols, verify
from jtile.ir.dynamic import sources
from jtile.passes import TILE, run_pipeline
from jtile.passes.accumulate import Pieces, accumulate

MATMUL = """kernel @mm(%a: ref<{m}x{k}xf32>, %b: ref<{k}x{n}xf32>, %g: ref<{m}x{n}xf32>, %da: ref<{m}x{k}xf32, out>,
    %db: ref<{k}x{n}xf32, out>) grid({cdiv(m, 4)}, {cdiv(n, 3)}) init(%da = 0, %db = 0) {
  %i = program_id 0
  %j = program_id 1
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %hi = size {cdiv(k, 2)} : i32
  %ct = load %g[tile(%i, 4), tile(%j, 3)]
  for %t in %c0..%hi step %c1 stages=3 {
    %x = load %a[tile(%i, 4), tile(%t, 2)]
    %y = load %b[tile(%t, 2), tile(%j, 3)]
    %dx = dot %ct, %y trans_b=true
    %dy = dot %x, %ct trans_a=true
    %0 = atomic add %da[tile(%i, 4), tile(%t, 2)], %dx
    %1 = atomic add %db[tile(%t, 2), tile(%j, 3)], %dy
  }
}"""

NORM = """kernel @norm(%x: ref<{n}x4xf32>, %w: ref<4xf32>, %dx: ref<{n}x4xf32, out>, %dw: ref<4xf32, out>)
    grid({cdiv(n, 2)}) init(%dx = 0, %dw = 0) {
  %i = program_id 0
  %c0 = full 0 : i32
  %v = load %x[tile(%i, 2), %c0:+4]
  %s = load %w[%c0:+4]
  %b = broadcast %s dims=(1) : tile<2x4xf32>
  %p = mul %v, %b
  %0 = atomic add %dx[tile(%i, 2), %c0:+4], %p
  %q = reduce sum %v axes=(0)
  %1 = atomic add %dw[%c0:+4], %q
}"""

WINDOW = """kernel @window(%g: ref<{n}xf32>, %dx: ref<{2*n + 1}xf32, out>) grid({n}) init(%dx = 0) {
  %i = program_id 0
  %c2 = full 2 : i32
  %s = mul %i, %c2
  %v = load %g[%i]
  %b = broadcast %v dims=() : tile<3xf32>
  %0 = atomic add %dx[%s:+3], %b
}"""


def check(text: str, shapes: list[list[tuple[int, ...]]], narrow) -> Pieces:
    """The pieces, after they gave for every set of shapes what the kernel gives."""
    kernel = parse_kernel(text)
    verify(kernel)
    pieces = accumulate(kernel, narrow)
    for k in pieces.kernels:
        verify(k)
        assert used_symbols(k) <= set(sources(k)), "every size stands in an input of the piece"
    for given in shapes:
        values = bind_sizes(kernel, given)
        fixed = concrete(kernel, values)
        inputs = random_inputs(fixed)
        got = combine(pieces, inputs, narrow, lambda k, xs, values=values: interpret(concrete(k, values), xs))
        for a, b in zip(interpret(fixed, inputs), got, strict=True):
            np.testing.assert_array_equal(a, b.astype(np.float32))
    return pieces


def test_a_matmul_of_any_size_is_two_matmuls():
    shapes = [[(m, k), (k, n), (m, n)] for m, n, k in [(8, 9, 10), (7, 5, 3), (1, 1, 1), (4, 3, 2), (13, 2, 9)]]
    pieces = check(MATMUL, shapes, ("bfloat16", None))
    assert atomics(pieces) == 0
    assert [str(k.grid) for k in pieces.kernels] == ["(cdiv(m, 4), cdiv(k, 2))", "(cdiv(k, 2), cdiv(n, 3))"]
    assert [k.outputs[0].dtype for k in pieces.kernels] == ["bfloat16", "float32"]


def test_rows_of_any_number_have_a_fixed_number_of_partial_sums():
    """The sum must not depend on what the kernel was compiled for: 64 chunks, of which the last may be empty."""
    pieces = check(NORM, [[(n, 4), (4,)] for n in (1, 2, 3, 127, 128, 129, 300)], ("bfloat16", "bfloat16"))
    (k,) = pieces.kernels
    assert (atomics(pieces), k.grid, k.outputs[0].dtype) == (0, (64,), "bfloat16")
    assert [r.partials for r in pieces.results] == [0, 1]
    assert k.outputs[1].shape == (64, 4)


def test_neighbours_of_any_number_have_colours():
    pieces = check(WINDOW, [[(n,)] for n in (1, 2, 3, 8)], (None,))
    assert (atomics(pieces), pieces.results[0].partials, str(pieces.kernels[0].outputs[0].shape[0])) == (0, 1, "2")


@pytest.mark.parametrize("rows", [5, 12])
def test_machine_code(rows):
    kernel = parse_kernel(NORM)
    pieces = accumulate(kernel, (None, None))
    fixed = concrete(kernel, {"n": rows})
    inputs = random_inputs(fixed)
    got = combine(pieces, inputs, (None, None), lambda k, xs: run_native(run_pipeline(k, TILE), xs))
    for a, b in zip(interpret(fixed, inputs), got, strict=True):
        np.testing.assert_array_equal(a, b)
