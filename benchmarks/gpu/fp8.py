"""Matrix products of float8_e4m3fn with one scale, into bf16."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from jtile import ops

SCALE = 0.25


def cases(tiny: bool = False) -> Iterator[Case]:
    for n in (64,) if tiny else (8192, 4096):
        make = lambda seed, n=n: tuple(normal(2 * seed + i, n, n, dtype="float8_e4m3fn") for i in range(2))
        yield Case(
            workload="gemm_fp8", config=f"{n} NT", dtype="float8_e4m3fn", make=make, ours=_ours,
            peers={"xla": _xla, "cublas": Torch(_cublas)}, reference=_reference, bytes=4 * n * n, flops=2 * n**3,
            unit="fp8",
        )  # fmt: skip


def _ours(a, b):
    return (ops.matmul(a, b, transpose_b=True, out_dtype="float32") * SCALE).astype(jnp.bfloat16)


def _xla(a, b):
    """As XLA's rewriter wants to see it, to call cuBLAS in 8 bits."""
    return (jnp.matmul(a, b.T, preferred_element_type=jnp.float32) * SCALE).astype(jnp.bfloat16)


def _cublas(torch, a, b):
    scale = torch.full((), SCALE, device=a.device, dtype=torch.float32)
    one = torch.ones((), device=a.device, dtype=torch.float32)
    return torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _reference(a, b):
    return SCALE * jnp.matmul(a.astype(jnp.float32), b.T.astype(jnp.float32), precision="highest")
