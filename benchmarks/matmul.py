"""Square matmuls, and the flat ones of a language model."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.data import TOLERANCE, normal, size
from benchmarks.harness import Case
from jtile import ops


def cases() -> Iterator[Case]:
    for m, n, k in ((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (1000, 1000, 1000), (512, 1536, 576)):
        for dtype, unit in (("float32", "f32"), ("bfloat16", "bf16")):
            a, b = normal(0, m, k, dtype=dtype), normal(1, k, n, dtype=dtype)
            config = f"{m}x{n}x{k}" if not m == n == k else f"{m}"
            moved = size(a, b) + m * n * a.dtype.itemsize
            yield Case(
                workload="matmul", config=config, dtype=dtype, ours=ops.matmul, peers={"xla": jnp.matmul}, args=(a, b),
                bytes=moved, flops=2 * m * n * k, unit=unit, tolerance=TOLERANCE[dtype],
            )  # fmt: skip
