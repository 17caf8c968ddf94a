"""The text of a kernel grows with its length, and not faster: no expression is emitted over and over."""

from __future__ import annotations

import numpy as np
import pytest

from jtile import ir
from jtile.ffi import run_image
from jtile.interpret import interpret
from jtile.lowering.cpu import compile_kernel
from jtile.lowering.cpu.compile import emit_kernel
from jtile.lowering.cpu.isa import host_isa

T = "tile<6x6xf32>"
WHERE = "[%c0:+6, %c0:+6]"
# One step of a chain: from %v{i} to %v{j}, j = i + 1.
STEPS = {
    "elementwise": f"%v{{j}} = max %v{{i}}, %x : {T}",
    "shared by itself": f"%v{{j}} = max %v{{i}}, %v{{i}} : {T}",
    "shared with its mirror image": f"%r{{i}} = reverse %v{{i}} axes=(0) : {T}\n%v{{j}} = max %v{{i}}, %r{{i}} : {T}",
    "shared with its transpose": f"%r{{i}} = transpose %v{{i}} perm=(1, 0) : {T}\n%v{{j}} = max %v{{i}}, %r{{i}} : {T}",
    "dear, and reduced": (
        f"%e{{i}} = tanh %v{{i}} : {T}\n%r{{i}} = reduce max %e{{i}} axes=(1) : tile<6xf32>\n"
        f"%b{{i}} = broadcast %r{{i}} dims=(0) : {T}\n%v{{j}} = sub %e{{i}}, %b{{i}} : {T}"
    ),
    "read and written in place": (
        f"%l{{i}} = load %q{WHERE} : {T}\n%v{{j}} = max %l{{i}}, %v{{i}} : {T}\nstore %q{WHERE}, %v{{j}}"
    ),
}


def chain(step: str, n: int) -> ir.Kernel:
    steps = "\n".join(STEPS[step].format(i=i, j=i + 1) for i in range(n))
    return ir.parse_kernel(f"""kernel @chain(
    %x_ref: ref<6x6xf32>, %o: ref<6x6xf32, out>, %q: ref<6x6xf32, out>) grid() {{
    %c0 = full 0 : i32
    %x = load %x_ref{WHERE} : {T}
    store %q{WHERE}, %x
    %v0 = add %x, %x : {T}
    {steps}
    store %o{WHERE}, %v{n}
    }}""")


@pytest.mark.parametrize("step", STEPS)
def test_text_grows_linearly(step):
    sizes = [len(emit_kernel(chain(step, n), host_isa())[0]) for n in (10, 30, 90)]
    assert sizes[2] - sizes[1] <= 3.5 * (sizes[1] - sizes[0]) + 2000, sizes
    assert sizes[2] < 700_000, sizes


def test_an_expression_is_copied_less_the_longer_it_is():
    """A reduction unrolls over rows and accumulators; forty functions in front of it must not be unrolled with it."""

    def text(n: int) -> int:
        steps = "\n".join(f"%v{i + 1} = tanh %v{i} : tile<64x64xf32>" for i in range(n))
        kernel = f"""kernel @reduced(%x: ref<64x64xf32>, %o: ref<64xf32, out>) grid() {{
        %c0 = full 0 : i32
        %v0 = load %x[%c0:+64, %c0:+64] : tile<64x64xf32>
        {steps}
        %r = reduce sum %v{n} axes=(1) : tile<64xf32>
        store %o[%c0:+64], %r
        }}"""
        return len(emit_kernel(ir.parse_kernel(kernel), host_isa())[0])

    assert text(40) < 4 * text(10)
    assert text(40) < 200_000


def test_a_chain_of_a_thousand_operations_runs():
    kernel = chain("elementwise", 1000)
    art = compile_kernel(kernel)
    x = np.random.default_rng(0).uniform(-1, 1, (6, 6)).astype(np.float32)
    out, other = np.empty((6, 6), np.float32), np.empty((6, 6), np.float32)
    run_image(
        art.image, [x, out, other], **{k: art.launch[k] for k in ("programs", "workspace", "isa", "sites", "name")}
    )
    np.testing.assert_array_equal(out, interpret(kernel, [x])[0])


def test_what_is_called_in_one_place_is_inlined():
    """The optimiser is only asked to inline what the text marks."""
    kernel = ir.parse_kernel("""kernel @product(
    %a: ref<20x30xf32>, %b: ref<30x40xf32>, %o: ref<20x40xf32, out>) grid() {
    %c0 = full 0 : i32
    %x = load %a[%c0:+20, %c0:+30] : tile<20x30xf32>
    %y = load %b[%c0:+30, %c0:+40] : tile<30x40xf32>
    %z = full 0.0 : tile<20x40xf32>
    %p = dot %x, %y acc=%z : tile<20x40xf32>
    store %o[%c0:+20, %c0:+40], %p
    }""")
    texts = compile_kernel(kernel, texts=True).texts
    assert texts["llvm"].count("\ndefine ") > 2
    assert texts["llvm_opt"].count("\ndefine ") == 1, texts["llvm_opt"]


def test_far_angles_are_reduced_in_one_place():
    kernel = ir.parse_kernel("""kernel @angles(%x: ref<64xf32>, %o: ref<64xf32, out>, %q: ref<64xf32, out>) grid() {
    %c0 = full 0 : i32
    %a = load %x[%c0:+64] : tile<64xf32>
    %s = sin %a : tile<64xf32>
    %c = cos %a : tile<64xf32>
    store %o[%c0:+64], %s
    store %q[%c0:+64], %c
    }""")
    art = compile_kernel(kernel, texts=True)
    assert art.texts["llvm_opt"].count("\ndefine ") == 2  # the kernel and the reduction, which is not inlined
    x = np.array([1e7, -3e30, 2.0**40, 1.0] * 16, np.float32)
    out, other = np.empty_like(x), np.empty_like(x)
    run_image(
        art.image, [x, out, other], **{k: art.launch[k] for k in ("programs", "workspace", "isa", "sites", "name")}
    )
    np.testing.assert_allclose(out, np.sin(x.astype(float)), rtol=3e-7)
    np.testing.assert_allclose(other, np.cos(x.astype(float)), rtol=3e-7)
