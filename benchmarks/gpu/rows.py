"""Softmax, RMS norm and layer norm over rows, and the norms' gradients, cold and from a warm L2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import norms
from benchmarks.backward import pulled
from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from jtile import ops

SIZES = ((8192, 4096), (4096, 16384), (131072, 1024))
WARM = (2048, 4096)  # 32 MiB with its result: as much as an L2 of 50 MiB keeps from call to call
EPS = norms.EPS


def cases(tiny: bool = False) -> Iterator[Case]:
    for rows, columns in ((64, 256),) if tiny else SIZES:
        for f in (_softmax, _rms_norm, _layer_norm):
            yield f(rows, columns, _fixed(rows, columns))
        for f in (_rms_norm_gradient, _layer_norm_gradient):
            yield f(rows, columns, _fixed(rows, columns, arrays=3))
    rows, columns = (32, 256) if tiny else WARM
    for f in (_softmax, _rms_norm, _layer_norm):
        yield f(rows, columns, _fixed(rows, columns, warm=True))


def _fixed(rows: int, columns: int, *, arrays: int = 2, warm: bool = False) -> dict[str, Any]:
    config = f"{rows}x{columns}" + ", warm L2" * warm
    return {"config": config, "dtype": "bfloat16", "bytes": 2 * arrays * rows * columns, "warm": warm}


def _peers(xla, torch) -> dict:
    return {"xla": xla, "torch": Torch(torch), "torch.compile": Torch(torch, compiled=True)}


def _softmax(rows: int, columns: int, fixed: dict) -> Case:
    make = lambda seed: (normal(seed, rows, columns, dtype="bfloat16"),)
    return Case(
        "softmax", make=make, ours=ops.softmax, peers=_peers(jax.nn.softmax, lambda torch, x: torch.softmax(x, -1)),
        reference=lambda x: jax.nn.softmax(x.astype(jnp.float32)), **fixed,
    )  # fmt: skip


def _ours_rms(x, w):
    return ops.rms_norm(x, w, eps=EPS)


def _ours_layer(x, w, b):
    return ops.layer_norm(x, w, b, eps=EPS)


def _torch_rms(torch, x, w):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], w, EPS)


def _torch_layer(torch, x, w, b):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, EPS)


def _arrays(rows: int, columns: int, wide: int, weights: int) -> Callable:
    """A function from a seed to `wide` arrays [rows, columns] and then `weights` arrays [columns]."""
    shapes = [(rows, columns)] * wide + [(columns,)] * weights
    return lambda seed: tuple(
        normal(len(shapes) * seed + i, *shape, dtype="bfloat16") for i, shape in enumerate(shapes)
    )  # fmt: skip


def _rms_norm(rows: int, columns: int, fixed: dict) -> Case:
    return Case(
        "rms_norm", make=_arrays(rows, columns, 1, 1), ours=_ours_rms, peers=_peers(norms.rms_norm, _torch_rms),
        reference=lambda x, w: norms.rms_norm(x.astype(jnp.float32), w), **fixed,
    )  # fmt: skip


def _layer_norm(rows: int, columns: int, fixed: dict) -> Case:
    return Case(
        "layer_norm", make=_arrays(rows, columns, 1, 2), ours=_ours_layer,
        peers=_peers(norms.layer_norm, _torch_layer),
        reference=lambda x, w, b: norms.layer_norm(x.astype(jnp.float32), w, b), **fixed,
    )  # fmt: skip


def _rms_norm_gradient(rows: int, columns: int, fixed: dict) -> Case:
    return _gradient("rms_norm_gradient", _ours_rms, norms.rms_norm, _torch_rms, rows, columns, fixed)


def _layer_norm_gradient(rows: int, columns: int, fixed: dict) -> Case:
    return _gradient("layer_norm_gradient", _ours_layer, norms.layer_norm, _torch_layer, rows, columns, fixed)


def _gradient(name: str, ours: Callable, xla: Callable, torch: Callable, rows: int, columns: int, fixed: dict) -> Case:
    """The case of a gradient: from the cotangent of the result and the arguments, the cotangents of all arguments."""
    weights = 1 if name.startswith("rms") else 2

    def of_torch(torch_, ct, *args):
        return torch_.func.vjp(lambda *x: torch(torch_, *x), *args)[1](ct)

    def reference(*args):
        return pulled(xla, 1 + weights)(*(x.astype(jnp.float32) for x in args))

    return Case(
        name, make=_arrays(rows, columns, 2, weights), ours=pulled(ours, 1 + weights), reference=reference,
        peers={"xla": pulled(xla, 1 + weights), "torch.compile": Torch(of_torch, compiled=True)},
        **fixed,
    )  # fmt: skip
