"""Stores of values that are made of the same ones come together; what they share is kept only if others read it."""

from __future__ import annotations

import numpy as np
import pytest

from jtile import ir
from jtile.ffi import run_image
from jtile.interpret import interpret
from jtile.lowering.cpu import compile_kernel
from jtile.passes import TILE, run_pipeline

LAUNCH = ("programs", "workspace", "isa", "sites", "name")
T = "tile<8x48xf32>"
START = f"""%i = program_id 0 : i32   %c0 = full 0 : i32
    %x0 = load %x[tile(%i, 8), tile(%c0, 48)] : {T}   %e = tanh %x0 : {T}
    %a = mul %e, %x0 : {T}   %b = add %e, %x0 : {T}
    """
STORE = "store %{}[tile(%i, 8), tile(%c0, 48)], %{}   "
A, B = STORE.format("o", "a"), STORE.format("p", "b")
# Bodies, the rows of the arrays, and whether the shared value is kept in memory.
CASES = {
    "both": (START + A + B, 16, False),
    "and the shared value": (START + A + STORE.format("p", "e"), 16, False),
    "rows that hang over": (START + A + B, 13, True),
    "a load between, of what the first wrote": (
        START + A + f"%again = load %o[tile(%i, 8), tile(%c0, 48)] : {T}   %b2 = add %b, %again : {T}   "
        + STORE.format("p", "b2"), 16, True,
    ),
    "the first reads backwards what the second overwrites": (
        START + STORE.format("p", "x0") + f"%p0 = load %p[tile(%i, 8), tile(%c0, 48)] : {T}   "
        f"%r = reverse %p0 axes=(1) : {T}   %a2 = add %a, %r : {T}   " + STORE.format("o", "a2") + B, 16, True,
    ),
    "one array twice": (START + A + STORE.format("o", "b") + B, 16, True),
    "a sum reads it behind": (
        START + A + B + f"%s = reduce sum %e axes=(1) : tile<8xf32>   %w = broadcast %s dims=(0) : {T}   "
        f"%d = mul %w, %x0 : {T}   " + STORE.format("p", "d"), 16, True,
    ),
    "in another place": (
        START + f"%r = reverse %e axes=(1) : {T}   %b2 = add %r, %x0 : {T}   " + A + STORE.format("p", "b2"), 16, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_stores_together(case):
    body, rows, kept = CASES[case]
    array = f"ref<{rows}x48xf32"
    text = f"kernel @k(%x: {array}>, %o: {array}, out>, %p: {array}, out>) grid({-(-rows // 8)}) {{\n{body}\n}}"
    kernel = run_pipeline(ir.parse_kernel(text), TILE)
    x = np.random.default_rng(0).normal(size=(rows, 48)).astype(np.float32)
    art = compile_kernel(kernel)
    outs = [np.full((rows, 48), 7, np.float32) for _ in range(2)]
    run_image(art.image, [x, *outs], **{k: art.launch[k] for k in LAUNCH})
    for found, expected in zip(outs, interpret(kernel, [x]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    assert (art.launch["workspace"] > 0) == kept


def test_in_place():
    """The second store reads elsewhere what the first one overwrites."""
    body = START + f"%r = reverse %x0 axes=(1) : {T}   %b2 = add %b, %r : {T}   " + A + STORE.format("p", "b2")
    array = "ref<16x48xf32"
    text = f"kernel @k(%x: {array}>, %o: {array}, out>, %p: {array}, out>) grid(2) alias(%x = %o) {{\n{body}\n}}"
    kernel = run_pipeline(ir.parse_kernel(text), TILE)
    x = np.random.default_rng(0).normal(size=(16, 48)).astype(np.float32)
    art = compile_kernel(kernel)
    expected = interpret(kernel, [x])
    both, other = x.copy(), np.full((16, 48), 7, np.float32)
    run_image(art.image, [both, both, other], **{k: art.launch[k] for k in LAUNCH})
    for found, want in zip((both, other), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-6, atol=2e-6)


def test_the_first_reads_an_input_that_the_second_overwrites():
    body = f"""{START} %y0 = load %y[tile(%i, 8), tile(%c0, 48)] : {T}   %r = reverse %y0 axes=(1) : {T}
        %a2 = add %a, %r : {T}   {STORE.format("o", "a2")}   {B}"""
    array = "ref<16x48xf32"
    text = f"kernel @k(%x: {array}>, %y: {array}>, %o: {array}, out>, %p: {array}, out>) grid(2) alias(%y = %p)"
    kernel = run_pipeline(ir.parse_kernel(f"{text} {{\n{body}\n}}"), TILE)
    x, y = np.random.default_rng(0).normal(size=(2, 16, 48)).astype(np.float32)
    art = compile_kernel(kernel)
    expected = interpret(kernel, [x, y])
    both, other = y.copy(), np.full((16, 48), 7, np.float32)
    run_image(art.image, [x, both, other, both], **{k: art.launch[k] for k in LAUNCH})
    for found, want in zip((other, both), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-6, atol=2e-6)
