"""What a launch costs: one small kernel in a jitted program, and chains of 200 of them.

`python -m benchmarks.gpu.launch` prints the numbers as JSON: a child with other XLA flags runs it so.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

import jtile as jt
from benchmarks.data import normal
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import Options
from benchmarks.harness import Result, result
from jtile.testing import Timing

LINKS = 200
# XLA puts five or more kernels in a row into a command buffer (a CUDA graph), jtile's too; loops only if asked to
FLAGS = {
    ", loops in command buffers": (
        "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
        " --xla_gpu_graph_min_graph_size=1"
    ),
    ", no command buffers": "--xla_gpu_enable_command_buffer=",
}


@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def sine(x, y):
    y[...] = jnp.sin(x[...])


def results(machine: Machine, options: Options, say: Callable[[str], None], tiny: bool = False) -> Iterator[Result]:
    """Microseconds, host to host or of the host alone, with XLA's default flags and with others."""
    runs: list[tuple[str, Callable]] = [("", lambda: measure(options.repeats, tiny))]
    if jax.default_backend() != "cpu":
        runs += [(suffix, lambda flags=flags: _in_child(options.repeats, flags)) for suffix, flags in FLAGS.items()]
    for suffix, run in runs:
        try:
            numbers = run()
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failed:
            say(f"    launch{suffix}: failed: {str(failed.stderr)[-600:] if failed.stderr else failed}")
            continue
        for config, of_name in numbers.items():
            times = {name: Timing(*pair) for name, pair in of_name.items()}
            got = result("launch", config + suffix, "us", machine.device, times)
            say(f"launch {config}{suffix}: {got.record.ours_us} us; {got.record.peers}; ratio {got.record.ratio}")
            yield got


def measure(repeats: int, tiny: bool = False) -> dict[str, dict[str, tuple[float, float]]]:
    """{config: {"ours" or "xla": (median, minimum)}} in microseconds."""
    x = jnp.linspace(0, 1, 256, dtype=jnp.float32)
    # the barrier keeps XLA from fusing the chain into one kernel
    links = {"ours": sine, "xla": lambda x: lax.optimization_barrier(jnp.sin(x))}
    one = {name: jax.jit(f) for name, f in links.items()}
    chain = {name: jax.jit(lambda x, f=f: _chain(f, x)) for name, f in links.items()}
    loop = {name: jax.jit(lambda x, f=f: lax.fori_loop(0, LINKS, lambda _, y: f(y), x)) for name, f in links.items()}
    programs = {f"{kind} {n}": f[n] for kind, f in (("one", one), ("chain", chain), ("loop", loop)) for n in links}
    busy = jax.jit(lambda a: a @ a @ a @ a)
    a = normal(0, *((64, 64) if tiny else (8192, 8192)), dtype="bfloat16")
    how = {"wait": lambda f: _host_to_host(f, x), "enqueue": lambda f: _enqueue(f, x, busy, a)}
    rounds = max(repeats, 5)
    samples = {
        kind: {name: [take(f) for _ in range(rounds + 2)][2:] for name, f in programs.items()}
        for kind, take in how.items()
    }
    turns = [{name: _host_to_host(f, x) for name, f in programs.items()} for _ in range(rounds + 1)][1:]
    samples["moved"] = {name: [turn[name] for turn in turns] for name in programs}
    return _summary(samples, tuple(links))


def _summary(
    samples: dict[str, dict[str, list[float]]], names: tuple[str, ...]
) -> dict[str, dict[str, tuple[float, float]]]:
    """The cost of one link of a chain: the difference to a program of one, over the number of the others."""
    both = lambda values: (statistics.median(values), min(values))

    def slope(kind, name, of="wait"):
        many, single = both(samples[of][f"{kind} {name}"]), both(samples[of][f"one {name}"])
        median, least = (max((m - s) / (LINKS - 1), 1e-3) for m, s in zip(many, single))
        return median, least

    return {
        "one jitted kernel, host to host": {n: both(samples["wait"][f"one {n}"]) for n in names},
        f"a kernel of {LINKS} in one jit": {n: slope("chain", n) for n in names},
        f"a kernel of {LINKS} in one jit, other programs between": {n: slope("chain", n, "moved") for n in names},
        f"a kernel of {LINKS} in one jit, host only": {n: slope("chain", n, "enqueue") for n in names},
        f"a kernel of {LINKS} in a fori_loop": {n: slope("loop", n) for n in names},
    }


def _chain(f: Callable, x):
    for _ in range(LINKS):
        x = f(x)
    return x


def _host_to_host(program: Callable, x) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(x))
    return 1e6 * (time.perf_counter() - start)


def _enqueue(program: Callable, x, busy: Callable, a) -> float:
    """Microseconds until the call returns while the device is busy with other work, so that no device time is in it."""
    before = busy(a)
    start = time.perf_counter()
    y = program(x)
    us = 1e6 * (time.perf_counter() - start)
    jax.block_until_ready((before, y))
    return us


def _in_child(repeats: int, flags: str) -> dict:
    env = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "benchmarks.gpu.launch", str(repeats)]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, **env}, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
