"""One row times a 4-bit or 8-bit weight matrix, against XLA's product with bf16 and with f32 weights.

XLA has several codes for a product with one row. Each peer is the form that was quickest for its dtype here: f32 as
matrix times vector; bf16, for which none is quick, as row times the transposed matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.data import normal, size
from benchmarks.harness import Case
from jtile import ops


def cases() -> Iterator[Case]:
    for outputs, inputs in ((4096, 4096), (14336, 4096), (1536, 576)):
        weight, x = normal(0, outputs, inputs, scale=inputs**-0.5), normal(1, 1, inputs)
        peers = {"xla bf16": lambda x, w: x @ w, "xla f32": lambda x, w: (w @ x[0])[None]}
        peer_args = {"xla bf16": (x.astype(jnp.bfloat16), weight.T.astype(jnp.bfloat16)), "xla f32": (x, weight)}
        for kind in ("q4_0", "q4_1", "q8_0", "int8"):
            packed = ops.quantize(weight, kind)
            yield Case(
                workload="gemv", config=f"{outputs}x{inputs}", dtype=kind, ours=ops.quantized_matmul, args=(x, packed),
                peers=peers, peer_args=peer_args, bytes=size(x, packed),
                reference=lambda x, w: x @ w.dequantize().T, tolerance=1e-2,
            )  # fmt: skip
