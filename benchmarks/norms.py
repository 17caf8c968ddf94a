"""RMS norm and layer norm over rows."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax

from benchmarks.data import TOLERANCE, normal, size
from benchmarks.harness import Case
from jtile import ops

EPS = 1e-5


def rms_norm(x, weight):
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x, weight, bias):
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + EPS)
    return (centred * scale * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def cases() -> Iterator[Case]:
    for rows, columns in ((4096, 1024), (1024, 4096), (512, 576)):
        for dtype in ("float32", "bfloat16"):
            x = normal(0, rows, columns, dtype=dtype)
            weight, bias = normal(1, columns, dtype=dtype), normal(2, columns, dtype=dtype)
            fixed = {"config": f"{rows}x{columns}", "dtype": dtype, "tolerance": TOLERANCE[dtype], "bytes": size(x, x)}
            ours = lambda x, w: ops.rms_norm(x, w, eps=EPS)
            yield Case(workload="rms_norm", ours=ours, peers={"xla": rms_norm}, args=(x, weight), **fixed)
            ours = lambda x, w, b: ops.layer_norm(x, w, b, eps=EPS)
            yield Case(workload="layer_norm", ours=ours, peers={"xla": layer_norm}, args=(x, weight, bias), **fixed)
