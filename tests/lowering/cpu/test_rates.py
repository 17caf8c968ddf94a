"""What the host expects of a product's time: by dtypes, instruction set and strategy."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from gemm_products import Products, random_matrix

from jtile import ir
from jtile.lowering.cpu import compile_kernel
from jtile.lowering.cpu.cost import program_cost_ns
from jtile.lowering.cpu.gemm import GemmSpec
from jtile.lowering.cpu.isa import ISAS, host_isa

SUMS = {"i8": "i32", "i32": "i32", "f64": "f64"}


def product(dtype: str, m: int = 256, n: int = 256, k: int = 512) -> ir.Kernel:
    sums = SUMS.get(dtype, "f32")
    return ir.parse_kernel(f"""
    kernel @product(%a: ref<{m}x{k}x{dtype}>, %b: ref<{k}x{n}x{dtype}>, %o: ref<{m}x{n}x{sums}, out>) grid(1) {{
      %c = full 0 : i32
      %x = load %a[tile(%c, {m}), tile(%c, {k})] : tile<{m}x{k}x{dtype}>
      %y = load %b[tile(%c, {k}), tile(%c, {n})] : tile<{k}x{n}x{dtype}>
      %z = dot %x, %y : tile<{m}x{n}x{sums}>
      store %o[tile(%c, {m}), tile(%c, {n})], %z
    }}""")


def scaled(m: int) -> ir.Kernel:
    """Rows of int16 and columns of bytes, with scales of 32 numbers."""
    return ir.parse_kernel(f"""
    kernel @scaled(%a: ref<{m}x512xi16>, %sa: ref<{m}x16xf32>, %b: ref<256x512xi8>, %sb: ref<256x16xf32>,
                   %o: ref<{m}x256xf32, out>) grid(1) {{
      %c = full 0 : i32
      %x = load %a[tile(%c, {m}), tile(%c, 512)] : tile<{m}x512xi16>
      %sx = load %sa[tile(%c, {m}), tile(%c, 16)] : tile<{m}x16xf32>
      %y = load %b[tile(%c, 256), tile(%c, 512)] : tile<256x512xi8>
      %sy = load %sb[tile(%c, 256), tile(%c, 16)] : tile<256x16xf32>
      %t = transpose %y perm=(1, 0) : tile<512x256xi8>    %st = transpose %sy perm=(1, 0) : tile<16x256xf32>
      %z = dot_scaled %x, %t sa=%sx sb=%st : tile<{m}x256xf32>
      store %o[tile(%c, {m}), tile(%c, 256)], %z
    }}""")


@pytest.mark.parametrize(
    ("dtype", "order"),
    [
        ("f32", ("avx512", "avx2", "sse2")),
        ("f64", ("avx512", "avx2", "sse2")),
        ("bf16", ("amx", "avx512", "avx2")),
        ("i8", ("amx", "avx512bf16", "avx512", "avx2")),
        ("i32", ("avx512", "avx2", "sse2")),
    ],
)
def test_products_take_longer_with_less(dtype, order):
    """An instruction set without tiles, grouped products or wide vectors takes at least 1.3 times as long."""
    costs = [program_cost_ns(product(dtype), ISAS[isa]) for isa in order]
    assert all(1.3 * a < b for a, b in itertools.pairwise(costs)), costs


def test_tiles_are_several_times_as_fast_as_float32():
    on = lambda dtype: program_cost_ns(product(dtype), ISAS["amx"])
    assert 3 * on("bf16") < on("f32") and on("i8") < on("bf16")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
def test_few_rows_take_as_long_as_the_other_matrix(dtype):
    """One row waits for the matrix, which a product of many rows brings once."""
    one, many = (program_cost_ns(product(dtype, m=m), ISAS["amx"]) for m in (1, 256))
    assert one < many < 64 * one


def test_scaled_products_of_integers_know_of_tiles():
    """Many rows are quicker on tiles, few are multiplied by vectors everywhere."""
    few, many = ([program_cost_ns(scaled(m), ISAS[isa]) for isa in ("amx", "avx512bf16", "avx2")] for m in (4, 128))
    assert few[0] == few[1] and 1.2 * many[0] < many[1] < many[2]


def test_an_image_has_the_cost_of_its_instruction_set():
    kernel = product("f32", 64, 64, 64)
    for isa in ("avx512", "avx2"):
        assert compile_kernel(kernel, ISAS[isa]).launch["cost"] == program_cost_ns(kernel, ISAS[isa])


def test_estimates_are_near_what_this_machine_takes(undefined):
    """A product of float32 takes a quarter to four times of what is expected, in time of the processor."""
    spec = GemmSpec(128, 128, 256, "float32", "float32", "float32")
    products = Products(host_isa(), [spec], undefined)
    rng = np.random.default_rng(0)
    a, b = random_matrix(rng, (128, 256), "float32"), random_matrix(rng, (256, 128), "float32")
    c = np.zeros((128, 128), np.float32)
    function, workspace = products.products[spec]
    scratch = np.zeros(workspace + 64, np.uint8)
    at = scratch.ctypes.data + -scratch.ctypes.data % 64
    least = float("inf")
    for _ in range(50):
        start = time.thread_time_ns()
        function(a.ctypes.data, 256, b.ctypes.data, 128, c.ctypes.data, 128, at)
        least = min(least, time.thread_time_ns() - start)
    expected = program_cost_ns(product("f32", 128, 128, 256), host_isa())
    assert expected / 4 < least < expected * 4
