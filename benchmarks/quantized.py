"""One row times a 4-bit or 8-bit weight matrix, against the same product with bf16 weights under XLA."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.data import normal, size
from benchmarks.harness import Case
from jtile import ops


def cases() -> Iterator[Case]:
    for outputs, inputs in ((4096, 4096), (14336, 4096), (1536, 576)):
        weight, x = normal(0, outputs, inputs, scale=inputs**-0.5), normal(1, 1, inputs)
        wide = (x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16))
        for kind in ("q4_0", "q4_1", "q8_0", "int8"):
            packed = ops.quantize(weight, kind)
            yield Case(
                workload="gemv", config=f"{outputs}x{inputs}", dtype=kind, ours=ops.quantized_matmul, args=(x, packed),
                peers={"xla bf16": lambda x, w: x @ w.T}, peer_args={"xla bf16": wide}, bytes=size(x, packed),
                reference=lambda x, w: x @ w.dequantize().T, tolerance=1e-2,
            )  # fmt: skip
