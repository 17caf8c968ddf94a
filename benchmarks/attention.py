"""Attention over whole sequences, against the `jnp` form under XLA."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from benchmarks.data import TOLERANCE, normal, size
from benchmarks.harness import Case
from jtile import ops


def cases() -> Iterator[Case]:
    heads, width = 8, 64
    for length, causal in ((1024, False), (1024, True), (4096, False), (4096, True)):
        for dtype, unit in (("float32", "f32"), ("bfloat16", "bf16")):
            q, k, v = (normal(i, 1, length, heads, width, dtype=dtype) for i in range(3))
            ours = lambda q, k, v, causal=causal: ops.attention(q, k, v, causal=causal)
            peer = lambda q, k, v, causal=causal: jax.nn.dot_product_attention(q, k, v, is_causal=causal)
            pairs = length * (length + 1) // 2 if causal else length * length
            yield Case(
                workload="attention", config=f"{length}, {heads} heads of {width}{', causal' if causal else ''}",
                dtype=dtype, ours=ours, peers={"xla": peer}, args=(q, k, v), bytes=size(q, q, q, q),
                flops=4 * pairs * heads * width, unit=unit, tolerance=TOLERANCE[dtype],
            )  # fmt: skip
