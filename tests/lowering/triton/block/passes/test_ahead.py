"""What a result is made of besides its product is under way before the product has ended."""

from __future__ import annotations

import numpy as np
import pytest
from block_kernels import operands
from machines import machine

from jtile.interpret import interpret
from jtile.ir import DotWait, For, Load, Roles, StoreWait, parse_kernel, print_kernel
from jtile.lowering.triton.block.passes import steps

KERNEL = """
kernel @layer(%a: ref<256x128xbf16>, %b: ref<128x256xbf16>, %r: ref<256x256xbf16>, %c: ref<256xf32>,
    %o: ref<256x256xbf16, out>) grid(2) {
  %i = program_id 0
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c2 = full 2 : i32
  %zero = full 0.0 : tile<128x256xf32>
  %sum = for %k in %c0..%c2 step %c1 carry (%acc = %zero) {
    %x = load %a[tile(%i, 128), tile(%k, 64)] checked=false
    %y = load %b[tile(%k, 64), tile(%c0, 256)] checked=false
    %d = dot %x, %y acc=%acc
    yield %d
  }
  %rr = load %r[tile(%i, 128), tile(%c0, 256)] checked=false
  %rw = cast %rr : tile<128x256xf32>
  %cc = load %c[tile(%c0, 256)] checked=false
  %cw = broadcast %cc dims=(1) : tile<128x256xf32>
  %s = add %sum, %cw
  %t = mul %s, %rw
  %u = cast %t : tile<128x256xbf16>
  store %o[tile(%i, 128), tile(%c0, 256)], %u checked=false
}
"""


def test_each_piece_is_loaded_before_the_one_in_front_of_it_is_computed():
    kernel = parse_kernel(KERNEL)
    found = steps(kernel, machine(), {})
    (roles,) = [op for op in found.kernel.body.ops if isinstance(op, Roles)]
    blocks = [roles.bodies[0], *(b for op in roles.bodies[0].walk() for b in op.blocks())]
    body = next(b for b in blocks if {StoreWait, For} <= set(map(type, b.ops)))
    order = [type(op) for op in body.ops if isinstance(op, Load | DotWait | StoreWait)]
    pieces = 256 // 64
    assert order[:4] == [Load] * 4 and order[4:6] == [DotWait, StoreWait], print_kernel(found.kernel)
    assert order[6:] == [*[Load, Load, StoreWait] * (pieces - 2), StoreWait, *order[6 + 3 * (pieces - 2) + 1 :]]
    inputs = operands(kernel, 0)
    want = interpret(kernel, inputs)[0]
    for seed in (0, 1):
        np.testing.assert_array_equal(interpret(found.kernel, inputs, seed=seed)[0], want)


@pytest.mark.parametrize(("dtype", "few"), [("i32", 150), ("i8", 20), ("u8", 150)])
def test_places_in_a_piece_are_counted_not_cut_from_those_of_the_tile(dtype, few):
    """Also those that leave the range of short integers."""
    masked = KERNEL.replace(
        "  %u = cast %t",
        f"  %n = iota 1 : tile<128x256x{dtype}>\n  %few = full {few} : tile<128x256x{dtype}>\n  %in = lt %n, %few\n"
        "  %v = select %in, %t, %zero\n  %u = cast %v",
    )
    kernel = parse_kernel(masked)
    found = steps(kernel, machine(), {}).kernel
    text = print_kernel(found)
    cut = {line.split("slice ")[1].split(" ")[0] for line in text.splitlines() if " slice " in line}
    counted = {line.split()[0] for line in text.splitlines() if " iota " in line}
    assert counted and cut and not counted & cut, text
    inputs = operands(kernel, 0)
    np.testing.assert_array_equal(interpret(found, inputs, seed=0)[0], interpret(kernel, inputs)[0])
