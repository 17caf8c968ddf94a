"""What a kernel costs besides its work: a call, a compilation, a load from the disk cache, the import."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from benchmarks.data import normal
from benchmarks.harness import Result, result
from jtile import ops
from jtile.testing import Timing, time_alternating

_IMPORT = "import time, jax; t = time.perf_counter(); import jtile; print(time.perf_counter() - t)"
_LINKS = 64  # kernels in a row: the difference to one, over their number, is the cost of one inside a program


@jt.kernel(out_type=lambda x: jt.like(x), grid=1)
def increment(x, o):
    o[...] = x[...] + 1


def results(roofline: Any, repeats: int) -> Iterator[Result]:
    x = jnp.zeros(16, jnp.float32)
    device = roofline.device
    eager = time_alternating({"ours": lambda: increment(x), "jnp": lambda: x + 1}, repeats=repeats)
    yield result("overhead", "eager call", "us", device, eager)
    chains = {"ours": lambda x: jnp.sin(increment(x)), "without": jnp.sin}
    programs = {f"{name} {n}": _repeat(f, n) for name, f in chains.items() for n in (1, _LINKS)}
    times = time_alternating({name: lambda f=f: f(x) for name, f in programs.items()}, repeats=repeats)
    slope = {name: _difference(times[f"{name} {_LINKS}"], times[f"{name} 1"]) for name in chains}
    yield result("overhead", "one kernel inside jit", "us", device, {"ours": _minus(slope["ours"], slope["without"])})
    with tempfile.TemporaryDirectory() as cache:
        for config in ("compile", "load from disk cache"):
            for name, seconds in _in_fresh_process(cache).items():
                yield result("overhead", f"{config}: {name}", "us", device, {"ours": _timing([seconds])})
    seconds = [float(_python(["-c", _IMPORT], {})) for _ in range(7)]
    yield result("overhead", "import jtile after jax", "us", device, {"ours": _timing(seconds)})


def lowering_seconds() -> dict[str, float]:
    """Seconds that JAX's first lowering of a call takes, less those of a second one, which finds the kernel compiled.

    Each kernel is traced before, so that what is left is the compiler, or the disk cache.
    """
    f32 = lambda *shape: normal(0, *shape)
    cases: dict[str, tuple[Callable, tuple[Any, ...]]] = {
        "increment": (increment, (f32(16),)),
        "softmax": (ops.softmax, (f32(256, 1024),)),
        "matmul": (ops.matmul, (f32(512, 512), f32(512, 512))),
        "attention": (ops.attention, tuple(f32(1, 512, 4, 64) for _ in range(3))),
    }
    jax.jit(lambda x: increment(x * 2)).lower(f32(8))  # whatever the process does once, it has done by now
    out = {}
    for name, (function, args) in cases.items():
        jax.eval_shape(function, *args)
        first = _lower_once(function, args)
        out[name] = max(0.0, first - statistics.median(_lower_once(function, args) for _ in range(5)))
    return out


def _lower_once(function: Callable, args: tuple[Any, ...]) -> float:
    jitted = jax.jit(lambda *a: function(*a))
    start = time.perf_counter()
    jitted.lower(*args)
    return time.perf_counter() - start


def _repeat(function: Callable, count: int) -> Callable:
    def chain(x):
        for _ in range(count):
            x = function(x)
        return x

    return jax.jit(chain)


def _in_fresh_process(cache: str) -> dict[str, float]:
    return json.loads(_python(["-m", "benchmarks.overhead"], {"JTILE_CACHE_DIR": cache}))


def _python(args: list[str], env: dict[str, str]) -> str:
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, *args]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=root, env={**os.environ, **env}
    ).stdout


def _difference(many: Timing, one: Timing) -> Timing:
    links = _LINKS - 1
    return Timing((many.median_us - one.median_us) / links, (many.min_us - one.min_us) / links)


def _minus(a: Timing, b: Timing) -> Timing:
    return Timing(max(a.median_us - b.median_us, 1e-3), max(a.min_us - b.min_us, 1e-3))


def _timing(seconds: list[float]) -> Timing:
    return Timing(1e6 * statistics.median(seconds), 1e6 * min(seconds))


if __name__ == "__main__":
    print(json.dumps(lowering_seconds()))
