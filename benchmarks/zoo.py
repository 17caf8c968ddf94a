"""Kernels of the library that stand alone, against what people write in jnp: on CPUs here, on GPUs in gpu/zoo.py."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from benchmarks.backward import cross_entropy, pulled
from benchmarks.data import TOLERANCE, normal, size
from benchmarks.harness import Case
from jtile import ops


def cases() -> Iterator[Case]:
    yield from _linear_cross_entropy()


def _linear_cross_entropy() -> Iterator[Case]:
    rows, k, vocab = 512, 512, 32000
    for dtype, unit in (("float32", "f32"), ("bfloat16", "bf16")):
        x, w, labels = linear_cross_entropy_operands(0, rows, k, vocab, dtype)
        fixed = {
            "config": f"{rows}x{k}x{vocab}", "dtype": dtype, "unit": unit, "bytes": size(x, w),
            "tolerance": TOLERANCE[dtype],
        }  # fmt: skip
        yield Case(
            "linear_cross_entropy", ours=ops.linear_cross_entropy, peers={"xla": linear_cross_entropy},
            args=(x, w, labels), flops=2 * rows * k * vocab, **fixed,
        )  # fmt: skip
        yield Case(
            "linear_cross_entropy_gradient", ours=pulled(ops.linear_cross_entropy, 2),
            peers={"xla": pulled(linear_cross_entropy, 2)}, args=(normal(3, rows), x, w, labels),
            flops=6 * rows * k * vocab, **fixed,
        )  # fmt: skip


def linear_cross_entropy(x, w, labels):
    """The loss of logits that are in memory."""
    return cross_entropy(x @ w.T, labels)


def linear_cross_entropy_operands(seed, rows: int, k: int, vocab: int, dtype: str):
    labels = jax.random.randint(jax.random.key(2 * seed + 1), (rows,), 0, vocab)
    x = normal(2 * seed, rows, k, dtype=dtype)
    return x, normal(2 * seed + 1, vocab, k, dtype=dtype, scale=k**-0.5), labels
