"""Softmax and log-softmax over rows."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from benchmarks.data import TOLERANCE, normal, size
from benchmarks.harness import Case
from jtile import ops


def cases() -> Iterator[Case]:
    for rows, columns in ((4096, 1024), (1024, 4096), (256, 32000), (4000, 1000)):
        for dtype in ("float32", "bfloat16"):
            x = normal(0, rows, columns, dtype=dtype, scale=3.0)
            fixed = {"config": f"{rows}x{columns}", "dtype": dtype, "args": (x,), "bytes": size(x, x)}
            fixed["tolerance"] = TOLERANCE[dtype]
            yield Case(workload="softmax", ours=ops.softmax, peers={"xla": jax.nn.softmax}, **fixed)
            if dtype == "float32":
                yield Case(workload="log_softmax", ours=ops.log_softmax, peers={"xla": jax.nn.log_softmax}, **fixed)
