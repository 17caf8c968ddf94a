"""Kernels that once gave wrong numbers: each is compared with the interpreter, as it is and after the passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import ffi, ir
from jtile.interpret import interpret, poison
from jtile.lowering.cpu import compile_kernel
from jtile.passes import TILE, run_pipeline

CASES = {
    "the condition of a while does not overwrite the carry": """
    %r, %n = while (%a = %sq, %i = %c0) {
      %e = neg %a : tile<6x6xf32>
      %s = sort %e axis=0 : tile<6x6xf32>
      %t = reduce sum %s axes=(0, 1) : f32
      %big = full 1e9 : f32
      %u = lt %t, %big : bool
      %v = lt %i, %c3 : bool
      %go = and %u, %v : bool
      yield %go
    } do (%b, %j) {
      %h = add %b, %y : tile<6x6xf32>
      %j2 = add %j, %c1 : i32
      yield %h, %j2
    }
    store %o[%c0:+6, %c0:+6], %r""",
    "an update keeps off a view that is read later": """
    %w = reshape %sq : tile<36xf32>
    %u = neg %w : tile<36xf32>
    %part = slice %y starts=(0, 0) stops=(3, 3) strides=(1, 1) : tile<3x3xf32>
    %r = dynamic_update %sq, %part, [%c1, %c2] : tile<6x6xf32>
    %v = reshape %u : tile<6x6xf32>
    %d = sub %r, %v : tile<6x6xf32>
    store %o[%c0:+6, %c0:+6], %d""",
    "a loop that never ran has not computed a constant": """
    %f = full 2.0 : tile<6x6xf32>
    for %k in %c0..%zero step %c1 {
      %d = dot %f, %x : tile<6x6xf32>
      store %q[%c0:+6, %c0:+6], %d
    }
    %g = dot %f, %sq : tile<6x6xf32>
    store %o[%c0:+6, %c0:+6], %g""",
    "a constant does not go to the result of a branch": """
    %f = full 2.0 : tile<6x6xf32>
    %p = lt %zero, %c5 : bool
    %r = if %p {
      %s = dot %x, %x : tile<6x6xf32>
      yield %s
    } else {
      yield %f
    }
    %g = dot %f, %sq : tile<6x6xf32>
    %h = add %g, %r : tile<6x6xf32>
    store %o[%c0:+6, %c0:+6], %h""",
    "a constant does not go to the result of a loop": """
    %f = full 2.0 : tile<6x6xf32>
    %r = for %k in %c0..%zero step %c1 carry (%a = %sq) {
      %s = dot %a, %a : tile<6x6xf32>
      store %q[%c0:+6, %c0:+6], %s
      yield %f
    }
    %g = dot %f, %sq : tile<6x6xf32>
    %h = add %g, %r : tile<6x6xf32>
    store %o[%c0:+6, %c0:+6], %h""",
    "a branch does not compute the next carry over the present one": """
    %r = for %k in %c0..%c3 step %c1 carry (%a = %sq) {
      %kf = cast %k : f32
      %f = broadcast %kf dims=() : tile<6x6xf32>
      %p = lt %zero, %c5 : bool
      %i = if %p {
        %s = dot %f, %x : tile<6x6xf32>
        yield %s
      } else {
        yield %x
      }
      %u = add %i, %a : tile<6x6xf32>
      store %q[%c0:+6, %c0:+6], %u
      yield %f
    }
    store %o[%c0:+6, %c0:+6], %r""",
    "the memory of a dead carry went to another value": """
    %r = for %k in %c0..%c3 step %c1 carry (%a = %sq) {
      %s = sin %a : tile<6x6xf32>
      %t = dot %s, %x : tile<6x6xf32>
      %v = dot %t, %x : tile<6x6xf32>
      %u = add %s, %t : tile<6x6xf32>
      store %q[%c0:+6, %c0:+6], %u
      yield %v
    }
    store %o[%c0:+6, %c0:+6], %r""",
    "the next carry is a mirror image of the present one": """
    %r = for %k in %c0..%c3 step %c1 carry (%a = %sq) {
      %s = reverse %a axes=(0) : tile<6x6xf32>
      %v = max %s, %x : tile<6x6xf32>
      yield %v
    }
    store %o[%c0:+6, %c0:+6], %r""",
    "a tile and a view of it, in another order": """
    %a = add %sq, %x : tile<6x6xf32>
    %b = dot %a, %a : tile<6x6xf32>
    %w = reshape %b : tile<36xf32>
    %m = reverse %w axes=(0) : tile<36xf32>
    %n = reshape %m : tile<6x6xf32>
    %v = sub %b, %n : tile<6x6xf32>
    %s = sort %v axis=0 : tile<6x6xf32>
    store %o[%c0:+6, %c0:+6], %s""",
    "an accumulator that is an operand as well": """
    %d = dot %sq, %sq acc=%sq trans_a=true trans_b=true : tile<6x6xf32>
    store %o[%c0:+6, %c0:+6], %d""",
    "an update that stands in the memory of the next carry": """
    %r = for %k in %c0..%c3 step %c1 carry (%a = %sq) {
      %s = sin %a : tile<6x6xf32>
      %v = dynamic_update %x, %s, [%c0, %c0] : tile<6x6xf32>
      yield %v
    }
    store %o[%c0:+6, %c0:+6], %r""",
    "bounds of a loop that need all bits of an unsigned number": """
    %lo = full 0 : u8
    %hi = full 255 : u8
    %st = full 100 : u8
    %r = for %k in %lo..%hi step %st carry (%a = %sq) {
      %kf = cast %k : f32
      %kk = broadcast %kf dims=() : tile<6x6xf32>
      %m = add %kk, %a : tile<6x6xf32>
      yield %m
    }
    store %o[%c0:+6, %c0:+6], %r""",
    "a start beyond the end of int64": """
    %i = full 18446744073709551615 : u64
    %j = full 9223372036854775807 : i64
    %d = dynamic_slice %sq, [%i, %j] sizes=(3, 3) : tile<3x3xf32>
    store %o[%c0:+3, %c0:+3], %d""",
    "a result that nobody reads lies on nothing that somebody reads": """
    %f0 = full 0.0 : f32
    %e = tanh %sq : tile<6x6xf32>
    %m = mul %e, %e : tile<6x6xf32>
    %t = transpose %m perm=(1, 0) : tile<6x6xf32>
    %a, %b = user_reduce [%t, %y], [%f0, %f0] axes=(0) : tile<6xf32>, tile<6xf32>
      body(%u: f32, %v: f32, %p: f32, %w: f32) {
      %s = add %u, %p : f32
      %n = sub %v, %w : f32
      yield %s, %n
    }
    %c = broadcast %a dims=(1) : tile<6x6xf32>
    %d = add %c, %m : tile<6x6xf32>
    store %o[%c0:+6, %c0:+6], %d""",
    "the padded copy of a tile does not lie on the memory it is copied from": """
    %m = alloc : ref<7x6xf32, scratch>
    store %m[%zero:+6, %c0:+6], %x
    store %m[%c1:+6, %c0:+6], %y
    %a = load %m[%c2:+6, %zero:+6] : tile<6x6xf32>
    store %o[%c0:+6, %c0:+6], %a""",
}

HEAD = """kernel @t(
    %x_ref: ref<6x6xf32>,
    %y_ref: ref<6x6xf32>,
    %n_ref: ref<4xi32>,
    %o: ref<6x6xf32, out>,
    %q: ref<6x6xf32, out>) grid() {
    %c0 = full 0 : i32
    %c1 = full 1 : i32
    %c2 = full 2 : i32
    %c3 = full 3 : i32
    %c5 = full 5 : i32
    %x = load %x_ref[%c0:+6, %c0:+6] : tile<6x6xf32>
    %y = load %y_ref[%c0:+6, %c0:+6] : tile<6x6xf32>
    %zero = load %n_ref[%c0] : i32
    %sq = dot %x, %y : tile<6x6xf32>
"""


def native(kernel: ir.Kernel, inputs: list[np.ndarray]) -> list[np.ndarray]:
    art = compile_kernel(kernel)
    outs = [poison(v.shape, v.dtype) for v in kernel.outputs]
    options = {n: art.launch[n] for n in ("programs", "workspace", "isa", "sites", "name")}
    ffi.run_image(art.image, [*inputs, *outs], **options)
    return outs


def agree(text: str, inputs: list[np.ndarray]) -> None:
    """The native code gives the interpreter's numbers, and the interpreter's poison where nothing was written."""
    kernel = ir.parse_kernel(text)
    want = interpret(kernel, inputs)
    for k in (kernel, run_pipeline(kernel, TILE)):
        for a, b in zip(native(k, inputs), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_against_the_interpreter(name):
    rng = np.random.default_rng(0)
    x, y = (rng.uniform(-1, 1, (6, 6)).astype(np.float32) for _ in range(2))
    agree(HEAD + CASES[name] + "\n}\n", [x, y, np.zeros(4, np.int32)])


def test_a_product_does_not_go_where_its_operand_is_read_through_a_view():
    rng = np.random.default_rng(0)
    kernel = """kernel @t(%x: ref<2x64x32xf32>, %y: ref<64x32xf32>, %o: ref<2x64x32xf32, out>) grid() {
    %c0 = full 0 : i32
    %c1 = full 1 : i32
    %b = load %y[%c0:+64, %c0:+32] : tile<64x32xf32>
    %t = load %x[%c0:+2, %c0:+64, %c0:+32] : tile<2x64x32xf32>
    store %o[%c0:+2, %c0:+64, %c0:+32], %t
    %l = load %o[%c0:+2, %c0:+64, %c0:+32] : tile<2x64x32xf32>
    %w = reshape %l : tile<64x64xf32>
    %d = dot %w, %b : tile<64x32xf32>
    store %o[%c1, %c0:+64, %c0:+32], %d
    }"""
    agree(kernel, [rng.uniform(-0.1, 0.1, s).astype(np.float32) for s in ((2, 64, 32), (64, 32))])


@pytest.mark.parametrize("n", [24, 64, 200])
def test_the_sum_of_a_row_does_not_depend_on_how_many_there_are(n):
    """Servers promise that a request gets the same bits whatever is in the batch."""
    x = np.random.default_rng(0).standard_normal((9, n)).astype(np.float32)

    def sums(rows: np.ndarray) -> np.ndarray:
        r = len(rows)
        kernel = f"""kernel @t(%x: ref<{r}x{n}xf32>, %o: ref<{r}xf32, out>) grid() {{
        %c0 = full 0 : i32
        %a = load %x[%c0:+{r}, %c0:+{n}] : tile<{r}x{n}xf32>
        %b = mul %a, %a : tile<{r}x{n}xf32>
        %s = reduce sum %b axes=(1) : tile<{r}xf32>
        store %o[%c0:+{r}], %s
        }}"""
        return native(ir.parse_kernel(kernel), [rows])[0]

    whole = sums(x)
    for lo, hi in ((0, 1), (0, 2), (4, 7), (3, 8)):
        np.testing.assert_array_equal(sums(x[lo:hi]), whole[lo:hi])


def test_a_number_of_float64_becomes_float16_without_a_library():
    """LLVM made one conversion of the two by way of float32, which is a call of a function that is nowhere."""

    @jt.kernel(out_type=jt.like(jnp.float16(0)))
    def short(x, y):
        y[...] = jnp.tanh(x[...].astype(jnp.float16))

    with jax.enable_x64(True):
        for x in (0.3, 1e-6, 6e4, -2.5, np.nan):
            np.testing.assert_allclose(short(np.float64(x)), np.tanh(np.float16(np.float32(x))), 1e-3)
