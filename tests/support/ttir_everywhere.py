"""A plugin of pytest: jitted kernels run as TTIR in the evaluator, where they would run native code of the CPU.

    pytest -p ttir_everywhere tests/ops tests/transforms

Slow, and not part of the suite: a way to try GPU emission on all that the suite computes, on a machine without a GPU.
`JTILE_TTIR_ARCH` says for which architecture (sm_90).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

ARCH = os.environ.get("JTILE_TTIR_ARCH", "sm_90")


def pytest_configure(config) -> None:
    from jtile.primitive import lowering

    lowering._custom_call = _custom_call  # type: ignore[assignment]


@functools.lru_cache(4096)
def _emitted(kernel: Any) -> tuple[Any, str, Any]:
    from ttir.padding import spoiled_padding

    from jtile.lowering.triton.compile import emit_kernel
    from jtile.lowering.triton.features import features
    from jtile.passes import TILE, run_pipeline

    lowered = run_pipeline(kernel, TILE)
    with spoiled_padding():
        return lowered, *emit_kernel(lowered, features(ARCH))


def _custom_call(platform: str, ctx, operands: Sequence[Any], program, piece: int, values) -> Sequence[Any]:
    from ttir import evaluate

    from jtile.lowering import platforms, targets
    from jtile.primitive import lowering

    whole = lowering.complete(lowering.pieces_of(program).kernels[piece], platforms.named("cuda"))
    kernel = dataclasses.replace(whole.kernel, inits=(None,) * len(whole.kernel.outputs))  # said by the aliases now
    targets.check_capabilities(kernel, targets.resolve(f"cuda:{ARCH}"))
    lowered, text, record = _emitted(kernel)
    narrow = lowering._callback_dtype
    outs = [jax.ShapeDtypeStruct(a.shape, narrow(a.dtype)) for a in ctx.avals_out]
    fills = [np.full(lowering._shape(s, values), s.value, s.dtype) for s in whole.starts]

    def callback(*arrays):
        arrays = [np.asarray(x).astype(v.type.info.numpy) for x, v in zip(arrays, kernel.inputs)]
        got = evaluate(text, record, lowered, [*arrays, *fills, *whole.tables]).outputs
        return [x.astype(o.dtype) for x, o in zip(got, outs, strict=True)]

    def call(*operands):
        args = [x.astype(narrow(x.dtype)) for x in operands]
        results = jax.pure_callback(callback, outs, *args)
        return [r.astype(a.dtype) for r, a in zip(results, ctx.avals_out)]

    return mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
