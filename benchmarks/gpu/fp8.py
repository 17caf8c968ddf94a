"""Matrix products of float8_e4m3fn into bf16: with one scale, and with scales of blocks."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from jtile import ops
from jtile.ops.scaled_matmul import scaled_matmul_reference

SCALE = 0.25
BLOCK = 128


def cases(tiny: bool = False) -> Iterator[Case]:
    for n in (64,) if tiny else (8192, 4096):
        make = lambda seed, n=n: tuple(normal(2 * seed + i, n, n, dtype="float8_e4m3fn") for i in range(2))
        yield Case(
            workload="gemm_fp8", config=f"{n} NT", dtype="float8_e4m3fn", make=make, ours=_ours,
            peers={"xla": _xla, "cublas": Torch(_cublas)}, reference=_reference, bytes=4 * n * n, flops=2 * n**3,
            unit="fp8",
        )  # fmt: skip
    for m, n, k in ((64, 128, 256),) if tiny else ((8192, 8192, 8192), (4096, 4096, 4096), (4096, 7168, 2048)):
        yield Case(
            workload="gemm_fp8_blocks", config=f"{m}x{n}x{k} NT" if not m == n == k else f"{m} NT",
            dtype="float8_e4m3fn", make=lambda seed, sizes=(m, n, k): _blocks(seed, *sizes), ours=_ours_blocks,
            peers={"torch": Torch(_torch_blocks)}, reference=_reference_blocks,
            bytes=m * k + n * k + 2 * m * n, flops=2 * m * n * k, unit="fp8",
        )  # fmt: skip


def _ours(a, b):
    return ops.scaled_matmul(a, b, jnp.float32(SCALE), jnp.float32(1), transpose_b=True, precision="fast")


def _xla(a, b):
    """The product in the form for which XLA's rewriter calls cuBLAS in 8 bits."""
    return (jnp.matmul(a, b.T, preferred_element_type=jnp.float32) * SCALE).astype(jnp.bfloat16)


def _cublas(torch, a, b):
    scale = torch.full((), SCALE, device=a.device, dtype=torch.float32)
    one = torch.ones((), device=a.device, dtype=torch.float32)
    return torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _reference(a, b):
    return SCALE * jnp.matmul(a.astype(jnp.float32), b.T.astype(jnp.float32), precision="highest")


def _blocks(seed, m: int, n: int, k: int):
    """Arguments: a [m, k] with scales of 1 x 128 blocks, b [n, k] with scales of 128 x 128 blocks."""
    a, b = normal(4 * seed, m, k, dtype="float8_e4m3fn"), normal(4 * seed + 1, n, k, dtype="float8_e4m3fn")
    scales = (normal(4 * seed + 2, m, k // BLOCK), normal(4 * seed + 3, n // BLOCK, k // BLOCK))
    return a, b, *(jnp.exp2(s) for s in scales)


def _ours_blocks(a, b, sa, sb):
    return ops.scaled_matmul(a, b, sa, sb, block=BLOCK, transpose_b=True)


def _torch_blocks(torch, a, b, sa, sb):
    outer = sa.t().contiguous().t()  # the scales of a column of blocks lie together, as cuBLAS wants them
    return torch._scaled_mm(a, b.t(), scale_a=outer, scale_b=sb.t(), out_dtype=torch.bfloat16)


def _reference_blocks(a, b, sa, sb):
    return scaled_matmul_reference(a, b, sa, sb, block=BLOCK, transpose_b=True, out_dtype=jnp.float32)
