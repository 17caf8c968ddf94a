"""Matrix products of bf16: square, those of a language model's feed-forward layers, and those with few tiles; in every
order of the operands in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.data import normal
from benchmarks.gpu import mosaic
from benchmarks.gpu.case import Case, Torch
from jtile import ops

SIZES = (  # m, n, k
    (4096, 4096, 4096), (8192, 8192, 8192), (2048, 2048, 2048), (8192, 28672, 4096), (8192, 4096, 14336),
    (128, 28672, 4096), (512, 2048, 8192),
)  # fmt: skip
ODD = ((4000, 3000, 2000), (1000, 1000, 1000))
SMALL = ((1024, 1024, 1024), (776, 1000, 2008), (512, 512, 4096))  # a round of tiles
FEW = ((200, 9216, 4096), (520, 8192, 4096), (1100, 4096, 4096))  # rows
BATCH = (16, 1024)
EPILOGUES = ("gelu", "silu")
TINY = ((64, 128, 32),)


def cases(tiny: bool = False) -> Iterator[Case]:
    """The cases; products with a transposed left operand, which gradients have, come last."""
    for ta, tb in itertools.product((False, True), repeat=2):
        for m, n, k in TINY if tiny else SIZES:
            yield product("gemm", m, n, k, tb, pallas=m >= 2048 and not (ta or tb), ta=ta)
    for m, n, k in () if tiny else (*ODD, *FEW, *SMALL):
        yield product("gemm", m, n, k, False)
    yield batched(*((2, 32) if tiny else BATCH))
    for activation in EPILOGUES:
        yield with_epilogue(*(TINY[0] if tiny else SIZES[0]), activation)


def product(workload: str, m: int, n: int, k: int, tb: bool, pallas: bool = False, ta: bool = False) -> Case:
    """The case a [m, k] times b [k, n]; with `ta`, `tb` the operands lie in memory as [k, m], [n, k]."""
    make = lambda seed: (
        normal(2 * seed, *((k, m) if ta else (m, k)), dtype="bfloat16"),
        normal(2 * seed + 1, *((n, k) if tb else (k, n)), dtype="bfloat16"),
    )
    left, right = ((lambda x: x.T) if t else (lambda x: x) for t in (ta, tb))
    wide = lambda x: x.astype(jnp.float32)
    peers: dict[str, Any] = {"cublas": Torch(lambda torch, a, b: left(a) @ right(b))}
    if not (ta or tb):  # XLA's search takes longest, and ends at cuBLAS for most
        peers["xla"] = lambda a, b: left(a) @ right(b)
    if pallas:
        peers |= {"mosaic 256x128": mosaic.matmul(True), "mosaic 128x256": mosaic.matmul(False)}
    return Case(
        workload=workload, config=f"{_size(m, n, k)} {'NT'[ta]}{'NT'[tb]}",
        dtype="bfloat16", make=make, ours=lambda a, b: ops.matmul(a, b, transpose_a=ta, transpose_b=tb), peers=peers,
        reference=lambda a, b: jnp.matmul(wide(left(a)), wide(right(b)), precision="highest"),
        bytes=2 * (m * k + k * n + m * n), flops=2 * m * n * k,
    )  # fmt: skip


def batched(batch: int, n: int) -> Case:
    """The case a^T b of square matrices, as in gradients of products."""
    wide = lambda x: x.astype(jnp.float32)
    plain = lambda a, b, **options: jnp.matmul(a.swapaxes(1, 2), b, **options)
    return Case(
        workload="gemm", config=f"{batch} x {n} TN", dtype="bfloat16",
        make=lambda seed: tuple(normal(2 * seed + j, batch, n, n, dtype="bfloat16") for j in range(2)),
        ours=lambda a, b: ops.matmul(a, b, transpose_a=True),
        peers={"xla": plain, "cublas": Torch(lambda torch, a, b: torch.bmm(a.transpose(1, 2), b))},
        reference=lambda a, b: plain(wide(a), wide(b), precision="highest"),
        bytes=6 * batch * n * n, flops=2 * batch * n**3,
    )  # fmt: skip


def with_epilogue(m: int, n: int, k: int, activation: str) -> Case:
    """The case activation(a b + bias), against XLA's product with a fusion behind it."""
    act: Callable = {"gelu": lambda y: jax.nn.gelu(y, approximate=False), "silu": jax.nn.silu}[activation]
    wide = lambda x: x.astype(jnp.float32)
    fused = lambda a, b, c: act(jnp.matmul(a, b, preferred_element_type=jnp.float32) + wide(c)).astype(a.dtype)
    return Case(
        workload="gemm", config=f"{_size(m, n, k)} NN bias {activation}", dtype="bfloat16",
        make=lambda seed: tuple(
            normal(3 * seed + j, *shape, dtype="bfloat16") for j, shape in enumerate(((m, k), (k, n), (n,)))
        ),
        ours=lambda a, b, c: ops.matmul(a, b, bias=c, activation=activation), peers={"xla": fused},
        reference=lambda a, b, c: act(jnp.matmul(wide(a), wide(b), precision="highest") + wide(c)),
        bytes=2 * (m * k + k * n + m * n + n), flops=2 * m * n * k,
    )  # fmt: skip


def _size(m: int, n: int, k: int) -> str:
    return f"{m}" if m == n == k else f"{m}x{n}x{k}"
