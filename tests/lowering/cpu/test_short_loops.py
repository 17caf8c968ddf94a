"""Short loops of many turns: several turns are written one behind the other."""

from __future__ import annotations

import numpy as np
import pytest

from jtile import ir
from jtile.ffi import run_image
from jtile.interpret import interpret
from jtile.lowering.cpu import compile_kernel
from jtile.lowering.cpu.compile import emit_kernel
from jtile.lowering.cpu.emit_control import TURNS
from jtile.lowering.cpu.isa import host_isa
from jtile.passes import TILE, run_pipeline

LAUNCH = ("programs", "workspace", "isa", "sites", "name")
TABLE = """%id = load %ids[%k] : i32   %old = load %o[%id] : f32   %x = load %data[%k] : f32
    %y = add %old, %x : f32   store %o[%id], %y"""


def scatter(n: int, dtype: str = "i32", first: int = 0, step: int = 1, body: str = TABLE) -> ir.Kernel:
    """A kernel that adds n elements up in a table of 5, at the places `first`, `first + step`, ..."""
    last = first + n * step
    text = f"""kernel @k(%ids: ref<64xi32>, %data: ref<64xf32>, %o: ref<5xf32, out>) grid(1) init(%o = 0.0) {{
        %lo = full {first} : {dtype}   %hi = full {last} : {dtype}   %by = full {step} : {dtype}
        for %k in %lo..%hi step %by {{ {body} }} }}"""
    return run_pipeline(ir.parse_kernel(text), TILE)


def run(kernel: ir.Kernel, inputs: list[np.ndarray]) -> np.ndarray:
    art, out = compile_kernel(kernel), np.zeros(5, np.float32)
    run_image(art.image, [*inputs, out], **{k: art.launch[k] for k in LAUNCH})
    return out


def operands() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 5, 64).astype(np.int32), rng.standard_normal(64).astype(np.float32)]


@pytest.mark.parametrize("n", [1, TURNS, 2 * TURNS - 1, 2 * TURNS, 2 * TURNS + 1, 5 * TURNS - 1, 64])
def test_every_turn_runs_once_and_in_order(n):
    """Elements of one place are added in their order, so that the sums have the same bits."""
    kernel, inputs = scatter(n), operands()
    stores = emit_kernel(kernel, host_isa())[0].count("fadd")
    assert stores == (1 if n < 2 * TURNS else TURNS + (n % TURNS != 0))
    (want,) = interpret(kernel, inputs)
    np.testing.assert_array_equal(run(kernel, inputs), want)


@pytest.mark.parametrize(("n", "first", "step"), [(20, 63, -1), (21, 60, -2), (13, 1, 4), (9, 63, -7)])
@pytest.mark.parametrize("dtype", ["i32", "i64", "i8"])
def test_places_that_go_down_or_in_steps(n, first, step, dtype):
    kernel, inputs = scatter(n, dtype, first, step), operands()
    (want,) = interpret(kernel, inputs)
    np.testing.assert_array_equal(run(kernel, inputs), want)


def test_a_place_is_no_number_without_a_sign_before_it_is_cast():
    """`k` from -8 on, as 32 bits without a sign: 2^32 - 8 lies outside, and the load gives its pad."""
    body = """%u = cast %k : u32   %t = broadcast %u dims=() : tile<1xu32>   %x = load %data[take(%t)] : tile<1xf32>
        store %o[tile(%z, 1)], %x"""
    kernel = scatter(16, first=-8, body=f"%z = full 0 : i32   {body}")
    inputs = operands()
    np.testing.assert_array_equal(run(kernel, inputs)[:1], inputs[1][7:8])


def test_carried_numbers_go_from_turn_to_turn():
    text = """kernel @k(%ids: ref<64xi32>, %data: ref<64xf32>, %o: ref<5xf32, out>) grid(1) {
        %lo = full 0 : i32   %hi = full 62 : i32   %one = full 1 : i32   %s = full 0.5 : f32   %h = full 0.5 : f32
        %r = for %k in %lo..%hi step %one carry (%a = %s) {
            %x = load %data[%k] : f32   %b = mul %a, %h : f32   %c = add %b, %x : f32   yield %c }
        %t = broadcast %r dims=() : tile<5xf32>   store %o[tile(%lo, 5)], %t }"""
    kernel, inputs = run_pipeline(ir.parse_kernel(text), TILE), operands()
    (want,) = interpret(kernel, inputs)
    np.testing.assert_allclose(run(kernel, inputs), want, rtol=1e-6)
