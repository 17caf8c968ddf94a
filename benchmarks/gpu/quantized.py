"""A 4-bit or 8-bit weight matrix times rows of bf16, against products with the same weights in bf16; all
results are bf16.

One and two rows are bound by reading the weights, 256 by the tensor cores.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.data import normal, size
from benchmarks.gpu.case import Case, Torch
from jtile import ops

KINDS = ("q4_0", "q4_1", "q8_0", "int8")
ROWS = {"quantized_gemv": (1, 2), "quantized_gemm": (16, 64, 256)}


def cases(tiny: bool = False) -> Iterator[Case]:
    outputs, inputs = (256, 64) if tiny else (14336, 4096)
    for workload, rows in ((w, r) for w, many in ROWS.items() for r in many):
        for kind in KINDS:
            make = lambda seed, rows=rows, kind=kind: (
                normal(2 * seed, rows, inputs, dtype="bfloat16"),
                ops.quantize(normal(2 * seed + 1, outputs, inputs, scale=inputs**-0.5), kind),
            )
            yield Case(
                workload=workload, config=f"{rows}x{outputs}x{inputs}", dtype=kind, make=make,
                ours=functools.partial(ops.quantized_matmul, out_dtype=jnp.bfloat16),
                peers={"xla bf16": lambda x, w: x @ w.T, "cublas bf16": Torch(lambda torch, x, w: x @ w.T)},
                prepare={"ours": _packed, "xla bf16": _in_bf16, "cublas bf16": _in_bf16}, reference=_reference,
                bytes=size(jax.eval_shape(make, 0)) + 2 * rows * outputs, flops=2 * rows * outputs * inputs,
            )  # fmt: skip


def _packed(x, weight):
    return x, weight.packed()


@jax.jit
def _in_bf16(x, weight):
    return x, weight.dequantize().astype(jnp.bfloat16)


def _reference(x, weight):
    return jnp.matmul(x.astype(jnp.float32), weight.dequantize().T, precision="highest")
