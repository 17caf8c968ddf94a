"""A few rows times a weight matrix of bf16: the weights' bytes are the work."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.case import Case
from benchmarks.gpu.gemm import product


def cases(tiny: bool = False) -> Iterator[Case]:
    n, k = (256, 64) if tiny else (14336, 4096)
    for m in (1, 16, 64):
        for transposed in (True, False):
            yield product("gemv", m, n, k, transposed)
