"""Experts of 4-bit floats in safetensors files (MXFP4, GPT-OSS): a sign, 2 + 1 bits, and an exponent for 32 of them.

`{name}_blocks` uint8 [experts, out, in / 32, 16] holds two numbers in a byte, the first in its lower half, and
`{name}_scales` uint8 [experts, out, in / 32] the exponents plus 127. They stand for `{name}` [experts, in, out], and
are held as they are: a stack of matrices [out, in] of the kind mxfp4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jtile._errors import ModelError
from jtile.ops import QuantizedTensor

from .mapped import Stored

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the name of a tensor


def mxfp4(tensors: Mapping[str, Stored]) -> dict[str, Callable[[], QuantizedTensor]]:
    """The functions that read those tensors which are stored as blocks, by name."""
    names = (name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS))
    return {name: functools.partial(_read, tensors, name) for name in names}


def _read(tensors: Mapping[str, Stored], name: str) -> QuantizedTensor:
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
    return _ordered(blocks(), scales())


@jax.jit
def _ordered(blocks, scales) -> QuantizedTensor:
    """The tensor of these blocks and scales, its bytes in the order of `QuantizedTensor`: weights j and j + 16 of a
    block beside each other."""
    lead = scales.shape[:2]
    codes = jnp.stack([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1).reshape(*scales.shape, 2, 16)
    codes = codes[..., 0, :] | codes[..., 1, :] << np.uint8(4)
    powers = jax.lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu)
    return QuantizedTensor(codes.reshape(*lead, -1), powers, None, "mxfp4")
