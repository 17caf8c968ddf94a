"""Matrix products of bf16: square, and those of a language model's feed-forward layers."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.data import normal
from benchmarks.gpu import mosaic
from benchmarks.gpu.case import Case, Torch
from jtile import ops

SIZES = (  # m, n, k
    (4096, 4096, 4096), (8192, 8192, 8192), (2048, 2048, 2048), (8192, 28672, 4096), (8192, 4096, 14336),
    (128, 28672, 4096),
)  # fmt: skip
TINY = ((64, 128, 32),)


def cases(tiny: bool = False) -> Iterator[Case]:
    for m, n, k in TINY if tiny else SIZES:
        for transposed in (False, True):
            yield product("gemm", m, n, k, transposed, pallas=m >= 2048 and not transposed)


def product(workload: str, m: int, n: int, k: int, transposed: bool, pallas: bool = False) -> Case:
    """a [m, k] times b [k, n], or times the transposed b [n, k]."""
    make = lambda seed: (
        normal(2 * seed, m, k, dtype="bfloat16"),
        normal(2 * seed + 1, *((n, k) if transposed else (k, n)), dtype="bfloat16"),
    )
    turned = (lambda b: b.T) if transposed else (lambda b: b)
    wide = lambda x: x.astype(jnp.float32)
    peers = {"xla": lambda a, b: a @ turned(b), "cublas": Torch(lambda torch, a, b: a @ turned(b))}
    if pallas:
        peers |= {"mosaic 256x128": mosaic.matmul(True), "mosaic 128x256": mosaic.matmul(False)}
    return Case(
        workload=workload, config=(f"{m}x{n}x{k}" if not m == n == k else f"{m}") + (" NT" if transposed else " NN"),
        dtype="bfloat16", make=make, ours=lambda a, b: ops.matmul(a, b, transpose_b=transposed), peers=peers,
        reference=lambda a, b: jnp.matmul(wide(a), wide(turned(b)), precision="highest"),
        bytes=2 * (m * k + k * n + m * n), flops=2 * m * n * k,
    )  # fmt: skip
