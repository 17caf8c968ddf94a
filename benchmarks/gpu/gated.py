"""The first half of a gated feed-forward layer, silu(x @ gate) * (x @ up), in one kernel."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from jtile import ops

SIZES = ((4096, 4096, 14336), (128, 4096, 14336), (512, 4096, 14336), (8192, 1024, 4096))  # m, k, n


def cases(tiny: bool = False) -> Iterator[Case]:
    for m, k, n in ((64, 32, 128),) if tiny else SIZES:
        yield Case(
            workload="gated_mlp", config=f"{m}x{k}x{n}", dtype="bfloat16",
            make=lambda seed, m=m, k=k, n=n: _make(seed, m, k, n), ours=ops.gated_mlp,
            peers={"xla": _jnp, "torch": Torch(_torch), "torch.compile": Torch(_torch, compiled=True)},
            reference=_reference, bytes=2 * (m * k + 2 * k * n + m * n), flops=4 * m * n * k,
        )  # fmt: skip


def _make(seed, m: int, k: int, n: int):
    weights = (normal(3 * seed + i, k, n, dtype="bfloat16", scale=k**-0.5) for i in (1, 2))
    return normal(3 * seed, m, k, dtype="bfloat16"), *weights


def _jnp(x, gate, up):
    return jax.nn.silu(x @ gate) * (x @ up)


def _torch(torch, x, gate, up):
    return torch.nn.functional.silu(x @ gate) * (x @ up)


def _reference(x, gate, up):
    x, gate, up = (a.astype(jnp.float32) for a in (x, gate, up))
    product = lambda w: jnp.matmul(x, w, precision="highest")
    return jax.nn.silu(product(gate)) * product(up)
