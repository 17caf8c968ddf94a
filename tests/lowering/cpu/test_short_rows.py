"""Rows that are shorter than a vector: a lane for each, and the bits of sums that are made row by row."""

from __future__ import annotations

import numpy as np
import pytest

from jtile import ir
from jtile.ffi import run_image
from jtile.interpret import interpret
from jtile.lowering.cpu import compile_kernel, short_rows
from jtile.lowering.cpu.compile import emit_kernel
from jtile.lowering.cpu.isa import host_isa
from jtile.passes import TILE, run_pipeline

LAUNCH = ("programs", "workspace", "isa", "sites", "name")

pytestmark = pytest.mark.skipif(not host_isa().has("avx512f"), reason="rows are turned by instructions of AVX-512")


def kernel_of(body: str, rows: int, n: int, dtype: str, memory: str, columns: int) -> ir.Kernel:
    """A kernel that reduces rows of n elements, at column 1 of an array of so many columns."""
    tile = f"tile<{rows}x{n}x{dtype}>"
    params = f"%x: ref<{rows}x{columns}x{memory}>, %m: ref<{rows}x{dtype}>, %o: ref<{rows}x{dtype}, out>"
    text = f"""kernel @k({params}) grid(1) {{
        %z = full 0 : i32   %c = full {int(columns > n)} : i32
        %raw = load %x[tile(%z, {rows}), %c:+{n}] : tile<{rows}x{n}x{memory}>
        %t = {"add %raw, %raw" if memory == dtype else "cast %raw"} : {tile}
        %row = load %m[tile(%z, {rows})] : tile<{rows}x{dtype}>   %b = broadcast %row dims=(0) : {tile}
        {body.format(tile=tile, row=f"tile<{rows}x{dtype}>")}
        store %o[tile(%z, {rows})], %r }}"""  # fmt: skip
    return run_pipeline(ir.parse_kernel(text), TILE)


def run(kernel: ir.Kernel, inputs: list[np.ndarray]) -> np.ndarray:
    art, out = compile_kernel(kernel), np.zeros(kernel.outputs[0].shape, inputs[1].dtype)
    run_image(art.image, [*inputs, out], **{k: art.launch[k] for k in LAUNCH})
    return out


def operands(rows: int, columns: int, dtype, memory) -> list[np.ndarray]:
    rng = np.random.default_rng(rows + columns)
    if np.dtype(dtype).kind in "iu":
        return [rng.integers(-99, 99, (rows, columns)).astype(memory), rng.integers(1, 9, rows).astype(dtype)]
    x = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-20, 20, (rows, columns))
    x[1], x[2, 1], x[3, -2] = -0.0, np.nan, -np.inf
    return [x.astype(memory), np.abs(rng.standard_normal(rows)).astype(dtype) + 1]


SUM = "%r = reduce sum %t axes=(1) : {row}"
BODIES = {
    "sum": SUM,
    "products": "%p = mul %t, %b : {tile}   %r = reduce sum %p axes=(1) : {row}",
    "product": "%r = reduce prod %t axes=(1) : {row}",
    "maximum": "%r = reduce max %t axes=(1) : {row}",
    "squares beside maxima": """%p = mul %t, %t : {tile}   %s = reduce sum %p axes=(1) : {row}
        %q = reduce max %t axes=(1) : {row}   %r = add %s, %q : {row}""",
}


@pytest.mark.parametrize("columns", ["alone", "of longer rows"])
@pytest.mark.parametrize(("dtype", "memory"), [("f32", "f32"), ("f64", "f64"), ("f32", "bf16"), ("i32", "i32")])
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("body", BODIES)
def test_bits_are_those_of_single_rows(body, n, dtype, memory, columns, monkeypatch):
    rows = 40  # two vectors of 16, five of 8, and a rest of 8
    kernel = kernel_of(BODIES[body], rows, n, dtype, memory, n if columns == "alone" else n + 3)
    inputs = operands(
        rows, n if columns == "alone" else n + 3, ir.DTYPES[kernel.outputs[0].dtype].numpy, kernel.inputs[0].dtype
    )
    got, text = run(kernel, inputs), emit_kernel(kernel, host_isa())[0]
    monkeypatch.setattr(short_rows, "lanes_for", lambda *_: 0)
    assert (text != emit_kernel(kernel, host_isa())[0]) == (2 * n <= (8 if dtype == "f64" else 16))
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), run(kernel, inputs).view(f"u{got.itemsize}"))


def test_exponentials_of_rows():
    body = """%d = sub %t, %b : {tile}   %e = exp %d : {tile}   %r = reduce sum %e axes=(1) : {row}"""
    kernel = kernel_of(body, 48, 8, "f32", "f32", 64)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((48, 64)).astype(np.float32), rng.standard_normal(48).astype(np.float32)]
    (want,) = interpret(kernel, inputs)
    np.testing.assert_allclose(run(kernel, inputs), want, rtol=2e-6)
    assert "fadd <16 x float>" in emit_kernel(kernel, host_isa())[0]


def test_what_others_read_is_kept_row_by_row():
    """The exponentials of a softmax are stored on the way."""
    body = """%e = exp %t : {tile}   %s = reduce sum %e axes=(1) : {row}   %w = broadcast %s dims=(0) : {tile}
        %q = div %e, %w : {tile}   %r = reduce max %q axes=(1) : {row}"""
    kernel = kernel_of(body, 32, 8, "f32", "f32", 8)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((32, 8)).astype(np.float32), np.ones(32, np.float32)]
    (want,) = interpret(kernel, inputs)
    np.testing.assert_allclose(run(kernel, inputs), want, rtol=2e-6)
    assert "scatter" not in emit_kernel(kernel, host_isa())[0]
