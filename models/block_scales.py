"""Checkpoints of 8-bit floats with one scale for every block of a matrix (DeepSeek-V3's), read as bfloat16."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jtile import cdiv
from jtile._errors import ModelError

SCALES = "_scale_inv"  # behind the name of a matrix: the name of its scales
SIDES = (128, 128)  # of a block where the configuration does not say


def block_sides(config: Mapping, source: str) -> tuple[int, int] | None:
    """Rows and columns of a block that has one scale, after a config.json; None for weights without scales.

    Raises:
      ModelError: the weights are quantised in another way.
    """
    entries = config.get("quantization_config")
    if not entries:
        return None
    method, kind = entries.get("quant_method"), entries.get("fmt", "e4m3")
    sides = entries.get("weight_block_size", SIDES)
    if method != "fp8" or kind != "e4m3" or not sides or len(sides) != 2:
        raise ModelError(
            f"the weights of {source} are quantised by {method!r} ({kind}, blocks {sides}); jtile reads 'fp8' of e4m3 "
            "with a scale a block, and plain floats: take a checkpoint in bfloat16"
        )
    return int(sides[0]), int(sides[1])


def without_scales(tensors: Mapping[str, Callable], sides: tuple[int, int] | None) -> dict[str, Callable]:
    """The readers `tensors` with each scaled matrix multiplied by its scales as it is read."""

    def scaled(name: str) -> jax.Array:
        weight, scales = tensors[name](), tensors[name + SCALES]()
        expected = tuple(cdiv(n, side) for n, side in zip(weight.shape, sides or SIDES, strict=False))
        if weight.ndim != 2 or scales.shape != expected:
            raise ModelError(
                f"the tensor {name} {weight.shape} has scales {scales.shape}; expected a matrix and {expected}, one a "
                f"block of {sides or SIDES}"
            )
        return _multiplied(weight, scales, sides=sides or SIDES)

    def plain(name: str) -> jax.Array:
        weight = tensors[name]()
        if weight.dtype.itemsize == 1:
            raise ModelError(f"the tensor {name} is {weight.dtype.name}, and there is no {name}{SCALES}")
        return weight

    names = (name for name in tensors if not name.endswith(SCALES))
    return {name: functools.partial(scaled if name + SCALES in tensors else plain, name) for name in names}


@functools.partial(jax.jit, static_argnames="sides")
def _multiplied(weight, scales, *, sides: tuple[int, int]):
    wide = scales.astype(jnp.float32)
    for axis, side in enumerate(sides):
        wide = jax.lax.slice_in_dim(jnp.repeat(wide, side, axis=axis), 0, weight.shape[axis], axis=axis)
    return (weight.astype(jnp.float32) * wide).astype(jnp.bfloat16)


def read_float8(file: Path, name: str) -> jax.Array:
    """The float8_e4m3fn tensor `name` of a safetensors file, whose own package knows no such NumPy array."""
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        entry = json.loads(handle.read(length))[name]
        begin, end = entry["data_offsets"]
        handle.seek(8 + length + begin)
        content = np.frombuffer(handle.read(end - begin), jnp.float8_e4m3fn)
    return jnp.asarray(content.reshape(entry["shape"]))
