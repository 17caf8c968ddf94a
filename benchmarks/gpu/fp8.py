"""Matrix products of float8_e4m3fn with one scale, into bf16: a kernel as a user writes it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

import jtile as jt
from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch

SCALE = 0.25


@jt.kernel(
    out_type=lambda a, b, scale, **_: jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), jnp.bfloat16),
    grid=lambda a, b, scale, *, bm, bn, **_: (jt.cdiv(a.shape[0], bm), jt.cdiv(b.shape[0], bn)),
)
def scaled_product(a, b, scale, o, *, bm=128, bn=256, bk=128):
    """scale a bᵀ of a [m, k] and b [n, k], summed in float32."""
    i, j = jt.swizzle(jt.program_id(0), jt.program_id(1), jt.num_programs(0), jt.num_programs(1), group=8)
    A, B, O = a.tiles(bm, bk), b.tiles(bn, bk), o.tiles(bm, bn)
    acc = jnp.zeros((bm, bn), jnp.float32)
    for p in jt.range(A.shape[1], stages=3):  # pyright: ignore[reportGeneralTypeIssues]
        acc = jt.dot(A[i, p], B[j, p].T, acc)
    O[i, j] = (acc * scale[0]).astype(o.dtype)


def cases(tiny: bool = False) -> Iterator[Case]:
    for n in (64,) if tiny else (8192, 4096):
        make = lambda seed, n=n: tuple(normal(2 * seed + i, n, n, dtype="float8_e4m3fn") for i in range(2))
        yield Case(
            workload="gemm_fp8", config=f"{n} NT", dtype="float8_e4m3fn", make=make, ours=_ours,
            peers={"xla": _xla, "cublas": Torch(_cublas)}, reference=_reference, bytes=4 * n * n, flops=2 * n**3,
            unit="fp8",
        )  # fmt: skip


def _ours(a, b):
    return scaled_product.with_options(num_warps=8)(a, b, jnp.full((1,), SCALE, jnp.float32))


def _xla(a, b):
    """As XLA's rewriter wants to see it, to call cuBLAS in 8 bits."""
    return (jnp.matmul(a, b.T, preferred_element_type=jnp.float32) * SCALE).astype(jnp.bfloat16)


def _cublas(torch, a, b):
    scale = torch.full((), SCALE, device=a.device, dtype=torch.float32)
    one = torch.ones((), device=a.device, dtype=torch.float32)
    return torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _reference(a, b):
    return SCALE * jnp.matmul(a.astype(jnp.float32), b.T.astype(jnp.float32), precision="highest")
