"""Reductions by a function of the kernel: over several axes, over none, over nothing; the start comes in once."""

from __future__ import annotations

import numpy as np
import pytest
from native import run_native

from jtile import ir
from jtile.interpret import interpret

TEXT = """kernel @r(%a: ref<{shape}xf32>, %b: ref<{shape}xf32>, %p: ref<{out}f32, out>, %q: ref<{out}f32, out>) {{
  %z = full 0 : i32
  %x = load %a[{at}] : tile<{shape}xf32>
  %y = load %b[{at}] : tile<{shape}xf32>
  %three = full 3.0 : f32
  %five = full 5.0 : f32
  %u, %v = user_reduce [%x, %y], [%three, %five] axes={axes} body(%m: f32, %c: f32, %n: f32, %d: f32) {{
    %s = mul %m, %n
    %t = mul %c, %n
    %w = add %t, %d
    yield %s, %w
  }}
  store %p[{to}], %u
  store %q[{to}], %v
}}"""


@pytest.mark.parametrize("axes", [(), (0,), (2,), (0, 2), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 1, 33), (3, 0, 5)], ids=str)
def test_affine_maps_from_a_start_that_is_not_neutral(shape, axes):
    out = [n for k, n in enumerate(shape) if k not in axes]
    whole = lambda sides: ", ".join(f"%z:+{n}" for n in sides)
    text = TEXT.format(
        shape="x".join(map(str, shape)), out="".join(f"{n}x" for n in out), at=whole(shape), to=whole(out),
        axes=str(axes).replace(",)", ")"),
    )  # fmt: skip
    kernel = ir.parse_kernel(text)
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(0.9, 1.1, shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32)]
    for got, want in zip(run_native(kernel, inputs), interpret(kernel, inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
