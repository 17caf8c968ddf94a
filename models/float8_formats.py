"""Weights of 8-bit floats in safetensors files: e4m3 with one scale for the matrix, for each row, or for each block.

| published by | scale |
|---|---|
| DeepSeek, Qwen3-FP8 (`fp8`) | `weight_scale_inv` [out / 128, in / 128] |
| compressed-tensors (`float-quantized`, `naive-quantized`), fbgemm | `weight_scale`, one, [out, 1] or of blocks |
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jtile import cdiv
from jtile._errors import ModelError
from jtile.ops import QuantizedTensor

from . import mapped
from .entries import table
from .mapped import Stored

SCALES = ("_scale_inv", "_scale")  # behind the name of a matrix they give the name of its scales
SIDES = BLOCKS = (128, 128)  # the sides of a block where the configuration names none


@dataclasses.dataclass(frozen=True)
class Float8:
    """How a checkpoint keeps 8-bit floats. `sides`: rows and columns of a block that has one scale, where the scales
    are those of blocks; `dynamic`: whether activations are to be rounded to 8 bits, too, as they come."""

    sides: tuple[int, int]
    dynamic: bool


def float8_method(entries: Mapping, schemes: Sequence[Mapping], groups: Sequence[Mapping], source: str) -> Float8:
    """How a `quantization_config` stores 8-bit floats, by its schemes and groups if it has any.

    Raises:
      ModelError: the floats have another format, or blocks have no sides.
    """
    sides = next((s["block_structure"] for s in schemes if s.get("block_structure")), None)
    sides = sides or entries.get("weight_block_size") or SIDES
    kind = entries.get("fmt", "e4m3")
    fits = isinstance(sides, Sequence) and len(sides) == 2 and all(type(n) is int and n > 0 for n in sides)
    if kind not in ("e4m3", "float8_e4m3fn") or not fits:
        raise ModelError(
            f"the weights of {source} are 8-bit floats ({kind}, blocks {sides}); jtile reads e4m3 with one scale, one "
            "a row or one a block: take one of these, or a checkpoint in bfloat16"
        )
    inputs = [table(g, "input_activations") for g in groups]
    dynamic = any(i.get("num_bits") == 8 and i.get("type") == "float" and i.get("dynamic") for i in inputs)
    return Float8((sides[0], sides[1]), dynamic or entries.get("activation_scheme") == "dynamic")


def float8(tensors: Mapping[str, Stored], how: Float8) -> dict[str, Callable[[], jax.Array | QuantizedTensor]]:
    """The functions that read those matrices which have scales, by name."""
    found = {}
    for name in tensors:
        scales = next((name + end for end in SCALES if name + end in tensors), None)
        if scales is not None and name.endswith(".weight") and tensors[name].dtype == jnp.float8_e4m3fn:
            found[name] = functools.partial(_scaled, tensors[name], tensors[scales], how)
    return found


def _scaled(weight: Stored, scales: Stored, how: Float8) -> jax.Array | QuantizedTensor:
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise ModelError(f"the tensor {weight.name} {weight.shape} has scales {scales.shape}; expected a matrix")
    (out, inner), blocks = weight.shape, tuple(map(cdiv, weight.shape, how.sides))
    if scales.shape not in ((), (1,), (1, 1), (out,), (out, 1), blocks):
        raise ModelError(
            f"the tensor {weight.name} {weight.shape} has scales {scales.shape}; expected a matrix and {blocks}, one a "
            f"block of {how.sides}, or one a row, or one"
        )
    mapped.expect(scales, weight.name, mapped.SCALES)
    of_rows = len(scales.shape) > 0 and scales.shape[0] == out and scales.shape != blocks
    sides = how.sides if scales.shape == blocks else (1, inner) if of_rows else (out, inner)
    if sides[1] < inner and (sides[1] % 32 or inner % sides[1]):  # kernels have no such groups
        return _multiplied(weight(), scales(), sides=sides)
    activations = ("blocks" if sides == BLOCKS else "rows" if sides[1] == inner else None) if how.dynamic else None
    return dataclasses.replace(_weight(weight(), scales(), sides=sides), activations=activations)


@functools.partial(jax.jit, static_argnames="sides")
def _weight(weight, scales, *, sides: tuple[int, int]) -> QuantizedTensor:
    """The quantised matrix, the scale of a block repeated for each of its rows: so scales of fused matrices can lie
    side by side."""
    wide = scales.astype(jnp.float32).reshape(tuple(map(cdiv, weight.shape, sides)))
    wide = jnp.repeat(wide, min(sides[0], weight.shape[0]), axis=0)[: weight.shape[0]]
    return QuantizedTensor.from_float8(weight, wide)


@functools.partial(jax.jit, static_argnames="sides")
def _multiplied(weight, scales, *, sides: tuple[int, int]):
    wide = scales.astype(jnp.float32).reshape(tuple(map(cdiv, weight.shape, sides)))
    for axis, (side, length) in enumerate(zip(sides, weight.shape, strict=True)):
        wide = jax.lax.slice_in_dim(jnp.repeat(wide, min(side, length), axis=axis), 0, length, axis=axis)
    return (weight.astype(jnp.float32) * wide).astype(jnp.bfloat16)
