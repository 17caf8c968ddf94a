"""What is known of the lanes of a tile that lie beyond its shape."""

from __future__ import annotations

import numpy as np
from ttir import evaluate

from jtile import ir
from jtile.lowering.triton.compile import emit_kernel
from jtile.lowering.triton.features import features


def test_zeros_beyond_the_shape_stay_zero():
    """What a load put there is known through casts and exact functions: a sum selects nothing again."""
    kernel = ir.parse_kernel("""kernel @k(%a: ref<100xbf16>, %o: ref<f32, out>) grid() {
  %i = full 0 : i32
  %x = load %a[tile(%i, 100)] : tile<100xbf16>
  %w = cast %x : tile<100xf32>
  %m = mul %w, %w
  %s = reduce sum %m axes=(0)
  store %o[], %s
}""")
    text, record = emit_kernel(kernel, features("sm_80"))
    assert "arith.select" not in text
    x = np.random.default_rng(0).integers(-128, 128, 100).astype(ir.DTYPES["bfloat16"].numpy)
    (total,) = evaluate(text, record, kernel, [x]).outputs
    assert total == np.sum(x.astype(np.float32) ** 2)
    exp = ir.parse_kernel(ir.print_kernel(kernel).replace("mul %w, %w", "exp %w"))
    assert "arith.select" in emit_kernel(exp, features("sm_80"))[0]  # exp(0) is not 0
