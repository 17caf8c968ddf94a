"""Products of one left operand become one."""

import numpy as np
import pytest
import tile_kernels as tk

from jtile.interpret import interpret
from jtile.ir import DotAsync, Kernel, SliceShared, parse_kernel
from jtile.passes.block import Machine, NoPlan, steps


def joined(kernel: Kernel, **options) -> Kernel:
    """The block-level kernel, which gives what the kernel gives."""
    planned = steps(kernel, Machine(processors=2), options)
    assert not isinstance(planned, NoPlan), str(planned)
    inputs = tk.operands(kernel)
    want = interpret(kernel, inputs)
    for seed in range(2):
        for w, g in zip(want, interpret(planned.kernel, inputs, seed=seed), strict=True):
            np.testing.assert_array_equal(g, w)
    return planned.kernel


def products(kernel: Kernel) -> set[tuple[int, ...]]:
    return {op.result.shape for op in kernel.body.walk() if isinstance(op, DotAsync)}


@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("save", [False, True])
def test_a_gated_layer(tb, save):
    """Both weights arrive in the halves of one buffer; rows, columns and terms hang over."""
    made = joined(tk.gated(200, 136, 72, tb=tb, save=save))
    assert products(made) == {(64, 128)}
    halves = {op.starts for op in made.body.walk() if isinstance(op, SliceShared)}
    assert halves == ({(0, 0), (64, 0)} if tb else {(0, 0), (0, 64)})


def test_three_consumers_have_too_few_registers():
    assert products(joined(tk.gated(192, 128, 64, tile=(192, 64, 32)))) == {(64, 64)}


TWO = """kernel @k(%a: ref<128x96xbf16>, %b: ref<96x32xbf16>, %c: ref<96x32xbf16>, %o: ref<128x32xf32, out>,
    %p: ref<128x32xf32, out>) {{
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c3 = full 3 : i32
  %z = full 0.0 : tile<128x32xf32>
  %y = full {start} : tile<128x32xf32>
  %s, %t = for %k in %c0..%c3 step %c1 carry (%x = %z, %w = %y) {{
    %l = load %a[tile(%c0, 128), tile(%k, 32)]
    %u = load %b[tile(%k, 32), tile(%c0, 32)]
    %v = load %c[tile(%k, 32), tile(%c0, 32)]
    %d = dot %l, %u acc=%x
    %e = dot {left}, {right} acc=%w
    yield %d, %e
  }}
  store %o[tile(%c0, 128), tile(%c0, 32)], %s
  store %p[tile(%c0, 128), tile(%c0, 32)], %t
}}"""


@pytest.mark.parametrize(
    ("new", "columns"),
    [
        ({}, 64),
        ({"start": "1.0"}, 32),  # sums that do not start from zero
        ({"right": "%u"}, 32),  # one right operand for both
    ],
)
def test_two_sums_of_one_loop(new, columns):
    text = TWO.format(**{"start": "0.0", "left": "%l", "right": "%v"} | new)
    assert products(joined(parse_kernel(text))) == {(64, columns)}
