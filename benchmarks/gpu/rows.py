"""Softmax, RMS norm and layer norm over rows, with cold and with warm L2."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks import norms
from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from jtile import ops

SIZES = ((8192, 4096), (4096, 16384), (131072, 1024))
EPS = norms.EPS


def cases(tiny: bool = False) -> Iterator[Case]:
    for rows, columns in ((64, 256),) if tiny else SIZES:
        for warm in (False, True):
            fixed = {
                "config": f"{rows}x{columns}" + ", warm L2" * warm, "dtype": "bfloat16", "bytes": 4 * rows * columns,
                "warm": warm,
            }  # fmt: skip
            for f in (_softmax, _rms_norm, _layer_norm):
                yield f(rows, columns, fixed)


def _peers(xla, torch) -> dict:
    return {"xla": xla, "torch": Torch(torch), "torch.compile": Torch(torch, compiled=True)}


def _softmax(rows: int, columns: int, fixed: dict) -> Case:
    make = lambda seed: (normal(seed, rows, columns, dtype="bfloat16"),)
    return Case(
        "softmax", make=make, ours=ops.softmax, peers=_peers(jax.nn.softmax, lambda torch, x: torch.softmax(x, -1)),
        reference=lambda x: jax.nn.softmax(x.astype(jnp.float32)), **fixed,
    )  # fmt: skip


def _rms_norm(rows: int, columns: int, fixed: dict) -> Case:
    make = lambda seed: (
        normal(2 * seed, rows, columns, dtype="bfloat16"),
        normal(2 * seed + 1, columns, dtype="bfloat16"),
    )
    torch = lambda torch, x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w, EPS)
    return Case(
        "rms_norm", make=make, ours=lambda x, w: ops.rms_norm(x, w, eps=EPS), peers=_peers(norms.rms_norm, torch),
        reference=lambda x, w: norms.rms_norm(x.astype(jnp.float32), w), **fixed,
    )  # fmt: skip


def _layer_norm(rows: int, columns: int, fixed: dict) -> Case:
    make = lambda seed: (
        normal(3 * seed, rows, columns, dtype="bfloat16"),
        *(normal(3 * seed + i, columns, dtype="bfloat16") for i in (1, 2)),
    )
    torch = lambda torch, x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, EPS)
    return Case(
        "layer_norm", make=make, ours=lambda x, w, b: ops.layer_norm(x, w, b, eps=EPS),
        peers=_peers(norms.layer_norm, torch), reference=lambda x, w, b: norms.layer_norm(x.astype(jnp.float32), w, b),
        **fixed,
    )  # fmt: skip
