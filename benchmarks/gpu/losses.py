"""Cross-entropy over a large vocabulary, its gradient, and the memory that either takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.backward import cross_entropy
from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import Options
from benchmarks.harness import Result, result
from jtile import ops
from jtile.testing import Timing


def cases(tiny: bool = False) -> Iterator[Case]:
    rows, vocabulary = _size(tiny)
    torch = lambda torch, x, labels: torch.nn.functional.cross_entropy(x.float(), labels.long(), reduction="none")
    plain = lambda torch, x, labels: torch.nn.functional.cross_entropy(x, labels.long(), reduction="none")
    fixed: dict[str, Any] = {
        "config": f"{rows}x{vocabulary}", "dtype": "bfloat16", "make": lambda seed: _make(seed, tiny),
    }  # fmt: skip
    yield Case(
        "cross_entropy", ours=ops.cross_entropy, reference=cross_entropy, bytes=2 * rows * vocabulary,
        peers={"xla": cross_entropy, "torch": Torch(plain), "torch.compile": Torch(torch, compiled=True)}, **fixed,
    )  # fmt: skip
    yield Case(
        "cross_entropy_gradient", ours=_gradient(ops.cross_entropy), peers={"xla": _gradient(cross_entropy)},
        reference=lambda x, labels: _gradient(cross_entropy)(x.astype(jnp.float32), labels),
        bytes=4 * rows * vocabulary, **fixed,
    )  # fmt: skip


def results(machine: Machine, options: Options, say: Callable[[str], None], tiny: bool = False) -> Iterator[Result]:
    """The KiB that a program takes besides its arguments: its results and XLA's temporary arrays, workspaces
    included."""
    del options
    args = jax.eval_shape(lambda: _make(0, tiny))
    rows, vocabulary = _size(tiny)
    for workload, wrap in (("cross_entropy_memory", lambda f: f), ("cross_entropy_gradient_memory", _gradient)):
        kib = {}
        for name, f in (("ours", ops.cross_entropy), ("xla", cross_entropy)):
            needs: Any = jax.jit(wrap(f)).lower(*args).compile().memory_analysis()
            kib[name] = (needs.temp_size_in_bytes + needs.output_size_in_bytes) / 1024
        got = result(
            workload, f"{rows}x{vocabulary}", "bfloat16, KiB", machine.device,
            {name: Timing(value, value) for name, value in kib.items()},
        )  # fmt: skip
        say(f"{workload}: {kib} KiB")
        yield got


def _size(tiny: bool) -> tuple[int, int]:
    return (16, 1000) if tiny else (4096, 128256)


def _make(seed, tiny: bool):
    rows, vocabulary = _size(tiny)
    labels = jax.random.randint(jax.random.key(2 * seed + 1), (rows,), 0, vocabulary)
    return normal(2 * seed, rows, vocabulary, dtype="bfloat16", scale=3.0), labels


def _gradient(f: Callable) -> Callable:
    return jax.grad(lambda x, labels: f(x, labels).sum())
