"""Peak memory of attention's gradient, ours and of the `jnp` form, each in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, result
from jtile.testing import Timing

LENGTHS = (1024, 2048, 4096, 8192)
_PEER_UP_TO = 4096  # the scores of 8 heads take 2 GiB an array at 8192


def results(roofline: Any, repeats: int) -> Iterator[Result]:
    """The KiB that a call adds to the process at its peak: results, temporary arrays and the kernels' workspaces."""
    del repeats
    for length in LENGTHS:
        names = ("ours", "xla") if length <= _PEER_UP_TO else ("ours",)
        peaks = {name: peak(name, length) / 1024 for name in names}
        times = {name: Timing(kib, kib) for name, kib in peaks.items()}
        config = f"{length}, 8 heads of 64, causal"
        yield result("attention_backward_memory", config, "float32, KiB", roofline.device, times)


def peak(name: str, length: int) -> int:
    """The most bytes by which the resident memory of a fresh process grows during one call."""
    command = [sys.executable, "-m", "benchmarks.memory", name, str(length)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}  # memory goes back when freed
    environment["JAX_PLATFORMS"] = "cpu"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _measure(name: str, length: int) -> int:
    import jax

    from benchmarks.backward import attention, pulled
    from benchmarks.data import normal
    from jtile import ops

    f = {"ours": lambda q, k, v: ops.attention(q, k, v, causal=True), "xla": lambda q, k, v: attention(q, k, v, True)}
    args = [normal(s, 1, length, 8, 64) for s in range(4)]
    compiled = jax.jit(pulled(f[name], 3)).lower(*args).compile()
    jax.block_until_ready(args)
    ctypes.CDLL(None).malloc_trim(0)  # else memory that the compiler has freed is taken again, unseen
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the compiler
    jax.block_until_ready(compiled(*args))
    return _resident("VmHWM") - before


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
