"""Experts of 4-bit floats in safetensors files (MXFP4, GPT-OSS): a sign, 2 + 1 bits, and an exponent for 32 of them.

`{name}_blocks` uint8 [experts, out, in / 32, 16] holds two numbers in a byte, the first in its lower half, and
`{name}_scales` uint8 [experts, out, in / 32] the exponents plus 127. They stand for `{name}` [experts, in, out], read
as bfloat16, which holds every such number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jtile._errors import ModelError

from .mapped import Stored

BLOCKS, SCALES = "_blocks", "_scales"  # behind the name of a tensor
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def mxfp4(tensors: Mapping[str, Stored]) -> dict[str, Callable[[], jax.Array]]:
    """The readers of the tensors that have blocks."""
    names = (name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS))
    return {name: functools.partial(_read, tensors, name) for name in names}


def _read(tensors: Mapping[str, Stored], name: str) -> jax.Array:
    blocks = tensors[name + BLOCKS]
    if name + SCALES not in tensors:
        raise ModelError(f"the tensor {blocks.name} has no scales: {name}{SCALES} is missing; download the file again")
    scales = tensors[name + SCALES]
    fits = len(blocks.shape) == 4 and blocks.shape[3] == 16 and scales.shape == blocks.shape[:3]
    if not fits or blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ModelError(
            f"the tensor {blocks.name} is {blocks.dtype.name} {blocks.shape} with scales {scales.dtype.name} "
            f"{scales.shape}; expected uint8 [experts, out, in / 32, 16] and [experts, out, in / 32]"
        )
    return _multiplied(blocks(), scales())


@jax.jit
def _multiplied(blocks, scales) -> jax.Array:
    codes = jnp.stack([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1)
    codes = codes.reshape(*scales.shape, 32)
    sizes = jnp.asarray(NUMBERS)[(codes & np.uint8(7)).astype(jnp.int32)]
    numbers = jnp.where(codes >= 8, -sizes, sizes)
    bits = scales.astype(jnp.uint32) << np.uint32(23)  # of the float 2^(exponent)
    power = jax.lax.bitcast_convert_type(jnp.where(scales == 0, np.uint32(1 << 22), bits), jnp.float32)
    found = (numbers * power[..., None]).astype(jnp.bfloat16)
    return found.reshape(*scales.shape[:2], -1).swapaxes(1, 2)
