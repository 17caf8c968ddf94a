"""How far the tiles that `ops.matmul` chooses by shape are from the best that a search finds, on shapes that the
shipped tuning records do not have. The peer is the tuned kernel: a ratio of 0.95 means that tuning gains 5 %."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import jtile as jt
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import Options
from benchmarks.harness import Result, result
from jtile import ops
from jtile.testing import Timing

SHAPES = (  # m, n, k, whether the right operand lies in memory as [n, k]
    (1024, 1024, 1024, True), (1024, 4096, 1024, False), (1536, 4608, 1536, True), (2560, 2560, 2560, False),
    (3072, 3072, 3072, True), (6144, 6144, 1024, False), (5000, 5000, 5000, True), (16384, 1024, 1024, False),
    (1024, 16384, 2048, True), (384, 6144, 2048, False), (640, 5120, 5120, True), (768, 768, 768, False),
    (896, 3584, 3584, True), (200, 11008, 4096, False), (256, 32000, 2048, True), (2000, 1200, 800, False),
    (4096, 512, 4096, True), (3584, 7168, 512, False), (192, 8192, 1024, True), (12288, 3072, 768, False),
)  # fmt: skip
SECONDS = 8.0  # of a search at most
TINY = ((96, 96, 64, False),)


def results(machine: Machine, options: Options, say: Callable[[str], None], tiny: bool = False) -> Iterator[Result]:
    """One a shape: the time of the choice, and of the winner of a search that is forgotten afterwards."""
    for m, n, k, transposed in TINY if tiny else SHAPES:
        a, b = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (n, k) if transposed else (k, n)))
        with tempfile.TemporaryDirectory() as folder, jt.config(cache_dir=folder):
            found = jt.tune(
                lambda a, b, t=transposed: ops.matmul(a, b, transpose_b=t), a, b, time_limit=SECONDS, progress=False
            ).kernels
        if not found or found[0].best is None:
            say(f"choices {m}x{n}x{k}: no search space")
            continue
        best = found[0].best
        times = {"ours": Timing(best.default_us, best.default_us), "tuned": Timing(best.time_us, best.time_us)}
        got = result("choices", f"{m}x{n}x{k} N{'NT'[transposed]}", "bfloat16", machine.device, times)
        say(f"choices {got.record.config}: {best.default_us:.1f} us, tuned {best.time_us:.1f} by {dict(best.config)}")
        yield got
