"""Tiles that hang over the edge of an array are read in place where no store shows what is behind the edge; nothing
outside of an array is ever read."""

from __future__ import annotations

import itertools

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


def kernel_of(body: str, params: str, grid: str) -> ir.Kernel:
    return run_pipeline(ir.parse_kernel(f"kernel @k({params}) grid({grid}) {{\n{body}\n}}"), TILE)


def run(kernel: ir.Kernel, inputs: list[np.ndarray], at_end: bool) -> list[np.ndarray]:
    art, fenced = compile_kernel(kernel), Fenced()
    given = [fenced.copy(x, at_end) for x in inputs]
    outs = [fenced.copy(np.full(r.shape, 7, r.dtype), at_end) for r in kernel.outputs]
    run_image(art.image, [*given, *outs], **{k: art.launch[k] for k in LAUNCH})
    return [np.array(x) for x in outs]


def text(kernel: ir.Kernel) -> str:
    return emit_kernel(kernel, host_isa())[0]


T = "tile<4x32xf32>"
# Bodies over x of 11 x 45 and y of 45, with one output of `rows` x `columns`, and how many padded copies they need.
SHIFTED = f"""%i = program_id 0 : i32   %j = program_id 1 : i32   %c4 = full 4 : i32   %c32 = full 32 : i32
    %r = mul %i, %c4 : i32   %c = mul %j, %c32 : i32   %by = full {{shift}} : i32   %s = add %r, %by : i32
    %a = load %x[%r:+4, %c:+32] : {T}
    %b = load %x[%s:+4, %c:+32] : {T}
    %z = add %a, %b : {T}"""
ROW = f"""%v = load %y[%c:+32] : tile<32xf32>   %w = reshape %v : tile<1x32xf32>
    %u = broadcast %w dims=(0, 1) : {T}   %zz = mul %z, %u : {T}"""
STORE = "store %o[tile(%i, 4), tile(%j, 32)], {}"
CASES = {
    "shifted rows, none beyond the end": (SHIFTED.format(shift=2) + STORE.format("%z"), 9, 45, False),
    "shifted rows, one beyond the end": (SHIFTED.format(shift=2) + STORE.format("%z"), 10, 45, True),
    "a row for all rows": (SHIFTED.format(shift=1) + ROW + STORE.format("%zz"), 10, 45, False),
    "fewer columns in the array": (SHIFTED.format(shift=1) + ROW + STORE.format("%zz"), 10, 46, True),
    "a sum sees all of it": (
        SHIFTED.format(shift=1) + f"%e = exp %z : {T}   %q = reduce sum %e axes=(1) : tile<4xf32>"
        f"%k = broadcast %q dims=(0) : {T}   %d = div %z, %k : {T}" + STORE.format("%d"), 10, 45, True,
    ),
    "a dear value for two stores": (
        SHIFTED.format(shift=1) + f"%e = tanh %z : {T}   %g = mul %e, %z : {T}"
        + STORE.format("%e") + "  store %p[tile(%i, 4), tile(%j, 32)], %g", 10, 45, True,
    ),
    "two stores of other rows": (
        SHIFTED.format(shift=2) + STORE.format("%z") + "  store %p[tile(%i, 4), tile(%j, 32)], %z", 9, 45, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_copies_are_made_where_they_are_read(case):
    body, rows, columns, copies = CASES[case]
    second = ", %p: ref<11x45xf32, out>" if "%p" in body else ""
    params = f"%x: ref<11x45xf32>, %y: ref<45xf32>, %o: ref<{rows}x{columns}xf32, out>{second}"
    kernel = kernel_of(body, params, "3, 2")
    assert ("getelementptr i8, ptr %ws" in text(kernel)) == copies
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(11, 45)).astype(np.float32), rng.normal(size=45).astype(np.float32)]
    want = interpret(kernel, inputs)
    for at_end in (False, True):
        for got, expected in zip(run(kernel, inputs, at_end), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


STEPS = (
    "add %{a}, %{b}", "mul %{a}, %{b}", "sub %{a}, %{b}", "max %{a}, %{b}", "tanh %{a}", "abs %{b}", "mul %{a}, %{a}"
)  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_random_chains_read_nothing_outside(seed):
    """Two loads at random shifts, random steps and two random stores, between pages that may not be read."""
    rng = np.random.default_rng(seed)
    rows, columns, tall, wide = (int(n) for n in rng.integers((3, 17, 1, 8), (14, 70, 6, 40)))
    tile = f"tile<{tall}x{wide}xf32>"
    shifts = rng.integers(0, 4, (2, 2))
    names, lines = ["a", "b"], ["%i = program_id 0 : i32   %j = program_id 1 : i32"]
    lines += [f"%t{n} = full {n} : i32" for n in sorted({tall, wide, *map(int, shifts.ravel())})]
    lines += [f"%r = mul %i, %t{tall} : i32   %c = mul %j, %t{wide} : i32"]
    for name, (down, right) in zip(names, shifts, strict=True):
        lines.append(f"%r{name} = add %r, %t{down} : i32   %c{name} = add %c, %t{right} : i32")
        lines.append(f"%{name} = load %x[%r{name}:+{tall}, %c{name}:+{wide}] : {tile}")
    for k in range(int(rng.integers(1, 9))):
        a, b = rng.choice(names), names[-1]
        lines.append(f"%n{k} = {str(rng.choice(STEPS)).format(a=a, b=b)} : {tile}")
        names.append(f"n{k}")
    sides = [(max(rows + int(d), 1), columns + int(e)) for d, e in rng.integers(-5, 1, (2, 2))]
    lines += [
        f"store %o{k}[tile(%i, {tall}), tile(%j, {wide})], %{v}" for k, v in enumerate((names[-1], rng.choice(names)))
    ]
    outs = ", ".join(f"%o{k}: ref<{m}x{n}xf32, out>" for k, (m, n) in enumerate(sides))
    first, last = zip(*((m, n) for m, n in [*sides, *((rows - int(d), columns - int(e)) for d, e in shifts)]))
    grid = f"{-(-min(first) // tall)}, {-(-min(last) // wide)}"  # every tile begins inside of its array
    kernel = kernel_of("\n".join(lines), f"%x: ref<{rows}x{columns}xf32>, {outs}", grid)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    want = interpret(kernel, [x])
    for at_end, (got, expected) in itertools.product((False, True), enumerate(want)):
        written = ~np.isnan(expected)  # the interpreter marks what no program writes
        result = run(kernel, [x], at_end)[got]
        np.testing.assert_allclose(result[written], expected[written], rtol=1e-5, atol=1e-6)


DEEP = "\n".join(f"%k{n + 1} = {('add', 'mul', 'xor')[n % 3]} %k{n}, %k0 : tile<64xi32>" for n in range(62))
OTHER_READERS = {
    "an index that wraps around": (
        """%u = cast %i : u8   %w = cast %u : i32   %a = load %x[%i:+64] : tile<64xf32>   %n = neg %a : tile<64xf32>
        store %o[%i, %w:+64], %n""",
        "%x: ref<300xf32>, %k: ref<320xi32>, %o: ref<300x300xf32, out>", 300,
    ),
    "a mask that makes a chain too long": (
        f"""%one = full 1 : tile<64xi32>   %k0 = load %k[tile(%i, 64)] : tile<64xi32>   {DEEP}
        %m = gt %k62, %one : tile<64xbool>   %a = load %x[tile(%i, 64)] : tile<64xf32>
        %b = load %x[tile(%i, 64)] mask=%m : tile<64xf32>   %z = add %a, %b : tile<64xf32>
        store %o[tile(%i, 64)], %z""",
        "%x: ref<300xf32>, %k: ref<320xi32>, %o: ref<300xf32, out>", 5,
    ),
    "a store of half bytes": (
        """%a = load %x[tile(%i, 64)] : tile<64xf32>   %b = cast %a : tile<64xi4>   store %o[tile(%i, 64)], %b""",
        "%x: ref<300xf32>, %k: ref<320xi32>, %o: ref<300xi4, out>", 5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_READERS)
def test_readers_that_see_more_than_is_stored_get_copies(case):
    body, params, programs = OTHER_READERS[case]
    kernel = kernel_of(f"%i = program_id 0 : i32   {body}", params, str(programs))
    assert "getelementptr i8, ptr %ws" in text(kernel)
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=300).astype(np.float32), rng.integers(-9, 9, 320).astype(np.int32)]
    (want,), (got,) = interpret(kernel, inputs), run(kernel, inputs, at_end=True)
    if want.dtype == np.float32:
        np.testing.assert_array_equal(got[~np.isnan(want)], want[~np.isnan(want)])
