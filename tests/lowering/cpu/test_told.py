"""Masks that say no more than the bounds rule: most programs read the array in place, with the same elements."""

from __future__ import annotations

import numpy as np
import pytest
from fenced import Fenced

from jtile import ir
from jtile.ffi import run_image
from jtile.interpret import interpret
from jtile.lowering.cpu import compile_kernel
from jtile.lowering.cpu.compile import emit_kernel
from jtile.lowering.cpu.isa import host_isa
from jtile.passes import TILE, run_pipeline

LAUNCH = ("programs", "workspace", "isa", "sites", "name")


def axis(name: str, place: str, sides: tuple[int, int], conditions: str) -> str:
    """Places along an axis, of which there are some more than a tile has, and the conditions on them."""
    n, around = sides
    tile = f"tile<{n}"
    lines = f"""%{name}n = full {n - around} : i32   %{name}first = mul {place}, %{name}n : i32
        %{name}by = full {-(around // 2)} : i32   %{name}start = add %{name}first, %{name}by : i32
        %{name}b = broadcast %{name}start dims=() : {tile}xi32>   %{name}o = iota 0 : {tile}xi32>
        %{name} = add %{name}b, %{name}o : {tile}xi32>\n"""
    tests = []
    for k, (fn, bound) in enumerate(c.split() for c in conditions.split(",")):
        lines += f"""%{name}k{k} = full {bound} : {tile}xi32>
            %{name}c{k} = {fn} %{name}, %{name}k{k} : {tile}xbool>\n"""
        tests.append(f"%{name}c{k}")
    while len(tests) > 1:
        lines += f"%{name}a{len(tests)} = and {tests[0]}, {tests[1]} : {tile}xbool>\n"
        tests = [f"%{name}a{len(tests)}", *tests[2:]]
    return lines + f"%{name}in = and {tests[0]}, {tests[0]} : {tile}xbool>\n"


def around(
    rows: str, columns: str, shape: tuple[int, int], tile: tuple[int, int] = (4, 32), reach: int = 2
) -> ir.Kernel:
    """A kernel that adds the first and the last of the points around each, of what the masks let through."""
    tile, reach = (4, 32), 2
    (m, n), (h, w) = shape, (tile[0] + reach, tile[1] + reach)
    big, small = f"tile<{h}x{w}x", f"tile<{tile[0]}x{tile[1]}xf32>"
    body = f"""%i = program_id 0 : i32   %j = program_id 1 : i32
        {axis("r", "%i", (h, reach), rows)} {axis("c", "%j", (w, reach), columns)}
        %rows = broadcast %r dims=(0) : {big}i32>   %columns = broadcast %c dims=(1) : {big}i32>
        %rm = broadcast %rin dims=(0) : {big}bool>   %cm = broadcast %cin dims=(1) : {big}bool>
        %m = and %rm, %cm : {big}bool>
        %x0 = load %x[take(%rows), take(%columns)] mask=%m pad=2.5 : {big}f32>
        %u = slice %x0 starts=(0, 0) stops=({tile[0]}, {tile[1]}) strides=(1, 1) : {small}
        %v = slice %x0 starts=({reach}, {reach}) stops=({h}, {w}) strides=(1, 1) : {small}
        %y = sub %u, %v : {small}
        store %o[tile(%i, {tile[0]}), tile(%j, {tile[1]})], %y"""
    head = f"kernel @k(%x: ref<{m}x{n}xf32>, %o: ref<{m}x{n}xf32, out>) grid({-(-m // tile[0])}, {-(-n // tile[1])})"
    return run_pipeline(ir.parse_kernel(f"{head} {{\n{body}\n}}"), TILE)


CASES = {  # conditions on rows and columns of an array of 11 x 45, and whether they say no more than the bounds rule
    "as the array": ("ge 0, lt 11", "ge 0, lt 45", True),
    "in other words": ("gt -1, le 10", "lt 45, gt -1", True),
    "weaker": ("ge -5, lt 12", "lt 90", True),
    "fewer rows": ("ge 0, lt 10", "ge 0, lt 45", False),
    "without the first column": ("ge 0, lt 11", "ge 1, lt 45", False),
    "without the last column": ("ge 0, lt 11", "ge 0, le 43", False),
    "one column": ("ge 0, lt 11", "ge 3, le 3", False),
}


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_what_the_mask_says(case, at_end):
    rows, columns, plain = CASES[case]
    kernel = around(rows, columns, (11, 45))
    text = emit_kernel(kernel, host_isa())[0]
    assert ("icmp ult <" not in text) == plain  # lanes that are compared one by one
    x = np.random.default_rng(0).standard_normal((11, 45)).astype(np.float32)
    art, fenced = compile_kernel(kernel), Fenced()
    given, out = fenced.copy(x, at_end), fenced.copy(np.full((11, 45), 7, np.float32), at_end)
    run_image(art.image, [given, out], **{k: art.launch[k] for k in LAUNCH})
    (want,) = interpret(kernel, [x])
    np.testing.assert_array_equal(np.array(out), want)


def test_a_tile_that_no_array_holds_is_read_under_its_mask():
    """Every program would copy it."""
    text = emit_kernel(around("ge 0, lt 5", "ge 0, lt 45", (5, 45)), host_isa())[0]
    assert "icmp ult <" in text


@pytest.mark.parametrize("first", [-1, 0, 32, 33])
def test_a_tile_that_hangs_over_in_every_program_is_read_under_its_mask(first):
    text = f"""kernel @k(%x: ref<64xf32>, %o: ref<3x32xf32, out>) grid(3) {{
        %i = program_id 0 : i32   %z = full 0 : i32   {axis("c", "%z", (32, 0), "ge 0, lt 64")}
        %by = full {first} : tile<32xi32>   %p = add %c, %by : tile<32xi32>
        %none = full 0 : tile<32xi32>   %n = full 64 : tile<32xi32>
        %ge = ge %p, %none : tile<32xbool>   %lt = lt %p, %n : tile<32xbool>   %m = and %ge, %lt : tile<32xbool>
        %t = load %x[take(%p)] mask=%m pad=2.5 : tile<32xf32>
        store %o[%i, tile(%z, 32)], %t }}"""
    kernel = run_pipeline(ir.parse_kernel(text), TILE)
    assert ("masked" in emit_kernel(kernel, host_isa())[0]) == (first not in (0, 32))
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    art, out = compile_kernel(kernel), np.zeros((3, 32), np.float32)
    run_image(art.image, [x, out], **{k: art.launch[k] for k in LAUNCH})
    np.testing.assert_array_equal(out, interpret(kernel, [x])[0])
