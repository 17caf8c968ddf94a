"""Re-nesting of grid and loops, and the machine code of what comes out."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
from accumulation import atomics, carries, check, combine, random_inputs
from native import run_native

from jtile.interpret import interpret
from jtile.ir import DTYPES, For, If, Load, parse_kernel, print_kernel
from jtile.passes import TILE, partials, run_pipeline
from jtile.passes.accumulate import accumulate


def matmul(m: int, n: int, k: int, *, b: tuple[int, int, int] = (4, 3, 2), dtype: str = "f32", lanes: str = "") -> str:
    """The reverse mode of a tiled matrix product; `lanes`: which operands have a leading axis of a vmap (of 3)."""
    bm, bn, bk = b
    grid = (-(-m // bm), -(-n // bn))
    names = {"a": (m, k), "b": (k, n), "g": (m, n), "da": (m, k), "db": (k, n)}
    lead = {name: "3x" if name[-1] in lanes else "" for name in names}
    at = {name: "%v, " if lead[name] else "" for name in names}
    refs = [f"%{x}: ref<{lead[x]}{s[0]}x{s[1]}x{'f32, out' if x[0] == 'd' else dtype}>" for x, s in names.items()]
    axes = (*([3] if lanes else []), *grid)
    body = f"""
      {"%v = program_id 0" if lanes else ""}
      %i = program_id {len(axes) - 2}
      %j = program_id {len(axes) - 1}
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %n = full {-(-k // bk)} : i32
      %ct = load %g[{at["g"]}tile(%i, {bm}), tile(%j, {bn})]
      for %k in %c0..%n step %c1 stages=3 {{
        %x = load %a[{at["a"]}tile(%i, {bm}), tile(%k, {bk})]
        %y = load %b[{at["b"]}tile(%k, {bk}), tile(%j, {bn})]
        %dx = dot %ct, %y trans_b=true
        %dy = dot %x, %ct trans_a=true
        %0 = atomic add %da[{at["a"]}tile(%i, {bm}), tile(%k, {bk})], %dx
        %1 = atomic add %db[{at["b"]}tile(%k, {bk}), tile(%j, {bn})], %dy
      }}
    """
    grid_text = ", ".join(map(str, axes))
    return f"kernel @mm({', '.join(refs)}) grid({grid_text}) init(%da = 0, %db = 0) {{{textwrap.dedent(body)}}}"


def test_the_gradient_of_a_matmul_is_two_matmuls():
    pieces = check(matmul(8, 9, 10), ("bfloat16", None))
    assert pieces.inputs == ((1, 2), (0, 2))
    assert [(r.piece, r.output, r.partials) for r in pieces.results] == [(0, 0, 0), (1, 0, 0)]
    want = """
        kernel @mm_da(%b: ref<10x9xf32>, %g: ref<8x9xf32>, %da: ref<8x10xbf16, out>) grid(2, 5) {
          %i = program_id 0 : i32
          %k = program_id 1 : i32
          %c0 = full 0 : i32
          %c3 = full 3 : i32
          %c1 = full 1 : i32
          %0 = full 0.0 : tile<4x2xf32>
          %da_sum = for %j in %c0..%c3 step %c1 stages=3 carry (%da_sum_1 = %0) {
            %ct = load %g[tile(%i, 4), tile(%j, 3)] checked=false : tile<4x3xf32>
            %y = load %b[tile(%k, 2), tile(%j, 3)] checked=false : tile<2x3xf32>
            %da_sum_2 = dot %ct, %y acc=%da_sum_1 trans_b=true : tile<4x2xf32>
            yield %da_sum_2
          }
          %1 = cast %da_sum : tile<4x2xbf16>
          store %da[tile(%i, 4), tile(%k, 2)], %1 checked=false
        }
        """
    assert print_kernel(pieces.kernels[0]).splitlines() == textwrap.dedent(want).strip().splitlines()
    assert pieces.kernels[1].grid == (5, 3)


@pytest.mark.parametrize(
    "sizes", [(8, 9, 10), (7, 8, 9), (1, 1, 1), (3, 20, 2), (4, 3, 2), (9, 2, 1), (8, 9, 0), (0, 5, 4)]
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_sizes_that_tiles_do_not_divide(sizes, dtype):
    pieces = check(matmul(*sizes, dtype=dtype), ("bfloat16", "float16"))
    if 0 not in sizes:
        assert atomics(pieces) == 0
        assert [k.outputs[0].dtype for k in pieces.kernels] == ["bfloat16", "float16"][: len(pieces.kernels)] or (
            len(pieces.kernels) == 1
        )


@pytest.mark.parametrize(("lanes", "grids"), [
    ("abg", [(3, 2, 5), (3, 5, 3)]), ("ag", [(3, 2, 5), (5, 3)]), ("bg", [(2, 5), (3, 5, 3)]), ("g", [(2, 5), (5, 3)]),
])  # fmt: skip
def test_vmap_of_some_operands(lanes, grids):
    """The cotangent of an operand that all lanes share is summed over them, in the loop nest of its own kernel."""
    pieces = check(matmul(8, 9, 10, lanes=lanes), ("bfloat16", "bfloat16"))
    assert [k.grid for k in pieces.kernels] == grids
    assert [carries(k) for k in pieces.kernels] == [1 if len(g) == 3 else 2 for g in grids]
    assert [k.outputs[0].dtype for k in pieces.kernels] == ["bfloat16", "bfloat16"]


ATTENTION = """kernel @att(%q: ref<{t}x4xf32>, %k: ref<{t}x4xf32>, %n: ref<i32>, %dq: ref<{t}x4xf32, out>,
                           %dk: ref<{t}x4xf32, out>) grid({n}) init(%dq = 0, %dk = 0) {{
  %i = program_id 0
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %m = full {n} : i32
  {bounds}
  %x = load %q[tile(%i, 2), %c0:+4]
  for %j in %lo..%hi step %c1 stages=2 {{
    %y = load %k[tile(%j, 2), %c0:+4]
    %s = dot %x, %y trans_b=true
    %d = dot %s, %y
    %e = dot %s, %x trans_a=true
    %0 = atomic add %dq[tile(%i, 2), %c0:+4], %d
    %1 = atomic add %dk[tile(%j, 2), %c0:+4], %e
  }}
}}"""

BOUNDS = {
    "causal": "%lo = add %c0, %c0\n%hi = add %i, %c1",
    "from here": "%lo = add %i, %c0\n%hi = add %m, %c0",
    "window": "%b = sub %i, %c1\n%lo = max %b, %c0\n%a = add %i, %c1\n%u = add %a, %c1\n%hi = min %u, %m",
    "length": "%lo = add %c0, %c0\n%l = load %n[]\n%hi = min %l, %m",
    "free": "%lo = add %c0, %c0\n%hi = load %n[]",
}


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("rows", [1, 7, 8])
def test_bounds_that_depend_on_the_program(bounds, rows):
    """Two tiled products again; the rounds that the original does not do stay undone."""
    n = -(-rows // 2)
    text = ATTENTION.format(t=rows, n=n, bounds=BOUNDS[bounds])
    for length in range(n + 1) if "load %n" in BOUNDS[bounds] else [n]:
        inputs = [*random_inputs(parse_kernel(text))[:2], np.asarray(length, np.int32)]
        pieces = check(text, ("bfloat16", "bfloat16"), inputs)
        assert atomics(pieces) == 0
        assert [k.outputs[-1].dtype for k in pieces.kernels] == ["bfloat16"] * len(pieces.kernels)
        if n > 1:
            assert [k.grid for k in pieces.kernels] == [(n,), (n,)]
            known = "load" not in BOUNDS[bounds]  # from the index: they are bounds of the new loop
            assert known != any(isinstance(op, If) for op in pieces.kernels[1].body.walk())


def test_two_loops_that_count_the_same_axis():
    """One after the other; the second starts where the first stops."""
    body = """
      kernel @k(%x: ref<5x8xf32>, %o: ref<8x2xf32, out>) grid(5) init(%o = 0) {
        %i = program_id 0
        %c0 = full 0 : i32
        %c1 = full 1 : i32
        %c3 = full 3 : i32
        %c4 = full 4 : i32
        for %a in %c0..%c3 step %c1 {
          %v = load %x[%i, tile(%a, 2)]
          %0 = atomic add %o[tile(%a, 2), %c0], %v
        }
        for %b in %c0..%c4 step %c1 {
          %w = load %x[%i, tile(%b, 2)]
          %1 = atomic add %o[tile(%b, 2), %c0], %w
        }
      }"""
    pieces = check(body)
    assert (atomics(pieces), [k.grid for k in pieces.kernels]) == (0, [(4,)])
    pieces = check(body.replace("%o[tile(%b, 2), %c0]", "%o[tile(%b, 2), %c1]"))
    assert atomics(pieces) == 0


def test_loops_that_are_inside_each_other_for_different_sites_are_not_swapped():
    body = """
      kernel @k(%x: ref<5x4x4xf32>, %o: ref<4xf32, out>) grid(5) init(%o = 0) {
        %i = program_id 0
        %c0 = full 0 : i32
        %c1 = full 1 : i32
        %c4 = full 4 : i32
        for %a in %c0..%c4 step %c1 {
          %v = load %x[%i, %a, %c0]
          %0 = atomic add %o[%a], %v
          for %b in %c0..%c4 step %c1 {
            %w = load %x[%i, %a, %b]
            %1 = atomic add %o[%b], %w
          }
        }
      }"""
    pieces = check(body)
    assert (atomics(pieces), len(pieces.kernels), pieces.results[0].partials) == (0, 1, 1)


def test_rounds_that_a_carry_ties_together_stay_in_their_program(monkeypatch):
    """A product of all rounds so far: the loop cannot become a grid axis; the programs add in partial sums."""
    body = """
      kernel @k(%x: ref<6x4xf32>, %o: ref<4xf32, out>) grid(6) init(%o = 0) {
        %i = program_id 0
        %c0 = full 0 : i32
        %c1 = full 1 : i32
        %c4 = full 4 : i32
        %one = full 1.0 : f32
        %r = for %k in %c0..%c4 step %c1 carry (%p = %one) {
          %v = load %x[%i, %k]
          %q = mul %p, %v
          %0 = atomic add %o[%k], %q
          yield %q
        }
      }"""
    pieces = check(body)
    assert (atomics(pieces), pieces.results[0].partials) == (0, 1)
    monkeypatch.setattr(partials, "PARTIAL_BYTES", 1)
    assert atomics(check(body)) == 1, "too large for partial sums, too few programs for a serial one"
    carried = body.replace("yield %q", "yield %v")
    assert atomics(check(carried)) == 1


@pytest.mark.parametrize(
    "how", ["%u = atomic add %t[%c0], %v", "%u = load %t[%c0]\n%m = max %u, %v\nstore %t[%c0], %m"]
)
def test_rounds_that_memory_ties_together_stay_in_their_program(how):
    """Scratch that every round reads and writes."""
    body = f"""
      kernel @k(%x: ref<6x4xf32>, %o: ref<4xf32, out>, %t: ref<2xf32, scratch>) grid(6) init(%o = 0) {{
        %i = program_id 0
        %c0 = full 0 : i32
        %c1 = full 1 : i32
        %c4 = full 4 : i32
        %z = full 0.0 : f32
        store %t[%c0], %z
        store %t[%c1], %z
        for %k in %c0..%c4 step %c1 {{
          %v = load %x[%i, %k]
          {how}
          %0 = atomic add %o[%k], %u
        }}
      }}"""
    pieces = check(body)
    assert (len(pieces.kernels), pieces.results[0].partials) == (1, 1)


def test_a_loop_taken_apart_by_division():
    """A window of 3 x 2 points as one loop of 6, as convolutions write it."""
    body = """
      kernel @conv(%x: ref<2x9x8x3xf32>, %g: ref<2x7x7x4xf32>, %dw: ref<3x2x3x4xf32, out>) grid(2, 7) init(%dw = 0) {
        %n = program_id 0
        %i = program_id 1
        %c0 = full 0 : i32
        %c1 = full 1 : i32
        %c2 = full 2 : i32
        %c6 = full 6 : i32
        %y = load %g[%n, %i, %c0:+7, %c0:+4]
        for %t in %c0..%c6 step %c1 {
          %a = div %t, %c2
          %b = rem %t, %c2
          %r = add %i, %a
          %z = load %x[%n, %r, %b:+7, %c0:+3]
          %d = dot %z, %y trans_a=true
          %0 = atomic add %dw[%a, %b, %c0:+3, %c0:+4], %d
        }
      }"""
    pieces = check(body, ("bfloat16",))
    assert (atomics(pieces), pieces.kernels[0].grid, pieces.kernels[0].outputs[0].dtype) == (0, (3, 2), "bfloat16")


def test_a_loop_downwards_and_in_steps():
    body = """
      kernel @k(%x: ref<3x9xf32>, %o: ref<9xf32, out>) grid(3) init(%o = 0) {
        %i = program_id 0
        %c0 = full 0 : i32
        %c2 = full 2 : i32
        %c8 = full 8 : i32
        for %k in %c0..%c8 step %c2 {
          %j = sub %c8, %k
          %v = load %x[%i, %j]
          %0 = atomic add %o[%j], %v
        }
      }"""
    pieces = check(body, ("bfloat16",))
    assert (atomics(pieces), pieces.kernels[0].grid, pieces.kernels[0].inits) == (0, (4,), (0,))


def test_the_other_outputs_do_not_read_what_only_the_re_nested_one_needs():
    text = ATTENTION.format(t=8, n=4, bounds=BOUNDS["causal"])
    pieces = check(text)
    loads = [sum(isinstance(op, Load) for op in k.body.walk()) for k in pieces.kernels]
    assert loads == [2, 2]
    assert pieces.inputs == ((0, 1), (0, 1))
    assert all(op.stages == 2 for k in pieces.kernels for op in k.body.walk() if isinstance(op, For))


# -- machine code -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        matmul(40, 50, 30, b=(16, 16, 8)),
        matmul(40, 50, 30, b=(16, 16, 8), lanes="ag", dtype="bf16"),
        ATTENTION.format(t=15, n=8, bounds=BOUNDS["window"]),
    ],
    ids=["matmul", "vmap", "window"],
)
def test_machine_code_of_the_pieces(text):
    kernel = parse_kernel(text)
    inputs = random_inputs(kernel)
    pieces = accumulate(kernel, ("float32", "bfloat16"))
    got = combine(pieces, inputs, ("float32", "bfloat16"), lambda k, xs: run_native(run_pipeline(k, TILE), xs))
    for a, b in zip(interpret(kernel, inputs), got, strict=True):
        np.testing.assert_array_equal(a.astype(DTYPES[b.dtype.name].numpy).astype(np.float32), b.astype(np.float32))
