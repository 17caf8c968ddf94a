"""The rates of the GPU at hand, measured: a large copy, and a large matrix product."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.data import normal

# sets of arguments together have more bytes than this, four times the 50 to 60 MB of a Hopper's L2; also enough for
# Blackwell
COLD_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Machine:
    """One GPU: `device` is what records are filed under; `copy_rate` in bytes (read and written) a second; `peaks`
    in operations a second by unit; `threads` of the host."""

    device: str
    copy_rate: float
    peaks: dict[str, float]
    threads: int

    def bound_us(self, moved: int, flops: int, unit: str) -> float:
        """Microseconds that the work takes at least: the larger of the time to move and the time to compute."""
        return 1e6 * max(moved / self.copy_rate, flops / self.peaks[unit])

    def bandwidth(self, working_set: int) -> float:
        """The bytes a second of a copy, for any working set, since everything is cold."""
        del working_set
        return self.copy_rate


def device_name() -> str:
    """The name of the GPU in records: `h200` for an `NVIDIA H200`."""
    kind = jax.devices()[0].device_kind.lower()
    return "-".join(word for word in kind.split() if word not in ("nvidia", "amd", "instinct"))


def measure(tiny: bool = False) -> Machine:
    """The rates of JAX's default device; `tiny`: small measurements that only try the code."""
    n, side, turns = (1 << 16, 128, 2) if tiny else (1 << 30, 8192, 20)
    x = jax.random.bits(jax.random.key(0), (n,), jnp.uint8)
    copies = [_seconds(jax.jit(f), (x,), turns) for f in (jnp.copy, lambda x: x ^ 1)]
    del x
    operands = tuple(normal(seed, side, side, dtype="bfloat16") for seed in range(2))
    bf16 = 2 * side**3 / _seconds(jax.jit(jnp.matmul), operands, 4 * turns)
    copy_rate = 2 * n / min(copies)
    return Machine(device_name(), copy_rate, {"bf16": bf16, "fp8": 2 * bf16}, os.cpu_count() or 1)


def _seconds(function: Callable, args: tuple, turns: int) -> float:
    """The seconds of one call, the median of three batches after a warm-up of the same length."""
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(turns):
            y = function(*args)
        jax.block_until_ready(y)
        seconds.append((time.perf_counter() - start) / turns)
    return sorted(seconds[1:])[1]
