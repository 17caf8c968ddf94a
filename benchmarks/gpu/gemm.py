"""Matrix products of bf16 in every order of operands: square, those of a language model's feed-forward layers, and a
small grid with a long sum."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.data import normal
from benchmarks.gpu import mosaic
from benchmarks.gpu.case import Case, Torch
from jtile import ops

SIZES = (  # m, n, k
    (4096, 4096, 4096), (8192, 8192, 8192), (2048, 2048, 2048), (8192, 28672, 4096), (8192, 4096, 14336),
    (128, 28672, 4096), (512, 2048, 8192),
)  # fmt: skip
TINY = ((64, 128, 32),)


ORDERS = ("NN", "NT", "TN", "TT")  # T: the array is the transposed operand, [k, m] or [n, k]


def cases(tiny: bool = False) -> Iterator[Case]:
    for m, n, k in TINY if tiny else SIZES:
        for order in ORDERS:
            yield product("gemm", m, n, k, order, pallas=m >= 2048 and order == "NN")


def product(workload: str, m: int, n: int, k: int, order: str, pallas: bool = False) -> Case:
    """The product of an [m, k] and a [k, n] operand, which lie in memory as `order` says."""
    sides = tuple(side[:: -1 if letter == "T" else 1] for side, letter in zip(((m, k), (k, n)), order, strict=True))
    make = lambda seed: tuple(normal(2 * seed + i, *side, dtype="bfloat16") for i, side in enumerate(sides))
    left, right = (((lambda x: x.T) if letter == "T" else (lambda x: x)) for letter in order)
    wide = lambda x: x.astype(jnp.float32)
    peers = {"xla": lambda a, b: left(a) @ right(b), "cublas": Torch(lambda torch, a, b: left(a) @ right(b))}
    if pallas:
        peers |= {"mosaic 256x128": mosaic.matmul(True), "mosaic 128x256": mosaic.matmul(False)}
    return Case(
        workload=workload, config=(f"{m}x{n}x{k}" if not m == n == k else f"{m}") + f" {order}", dtype="bfloat16",
        make=make, ours=lambda a, b: ops.matmul(a, b, transpose_a=order[0] == "T", transpose_b=order[1] == "T"),
        peers=peers, reference=lambda a, b: jnp.matmul(wide(left(a)), wide(right(b)), precision="highest"),
        bytes=2 * (m * k + k * n + m * n), flops=2 * m * n * k,
    )  # fmt: skip
