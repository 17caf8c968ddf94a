"""Rounds float weights to the codes, scales and minima of a kind of quantisation: see quantized_tensor.py.

Each function has a parameter `xp`, the module whose functions it calls: NumPy for arrays in the host's memory, where
`jnp` would compile two dozen programs for every shape, and `jnp` elsewhere. Both give the same bits.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from jtile.ops.weight_codes import BLOCK, FLOAT8, float4_codes

POWER = jnp.float8_e8m0fnu  # the type of the scales of mxfp4, which are powers of two


def round_weights(xp, x, kind: str, group: int):
    """Rounds a matrix of floats to a kind of quantisation.

    Args:
      xp: `numpy`, or `jax.numpy`.
      x: float [out, in].
      kind: a kind that `quantized_tensor.KINDS` lists.
      group: how many weights of a row share a scale; int8 and fp8 have one scale for a row.
    Returns:
      The codes, the scales and the minima (None but for q4_1), as a `QuantizedTensor` of this kind keeps them.
    """
    out, inner = x.shape
    with np.errstate(over="ignore", invalid="ignore"):  # scales may exceed float16, and x may hold NaN and infinities
        x = x.astype(np.float32)
        if kind == "int8":
            scale = xp.max(xp.abs(x), axis=1, keepdims=True, initial=0) / 127.0
            return _round_to_int8(xp, x * _inverse(xp, scale)), scale, None
        if kind == "fp8":
            scale = xp.max(xp.abs(x), axis=1, keepdims=True, initial=0) / 448.0
            return xp.clip(x * _inverse(xp, scale), -448.0, 448.0).astype(FLOAT8), scale, None
        codes, scale, minimum = _ROUNDERS[kind](xp, x.reshape(out, inner // group, group))
        scale = scale[..., 0].astype(POWER if kind == "mxfp4" else np.float16)
        minimum = None if minimum is None else minimum[..., 0].astype(np.float16)
    if kind != "q8_0":
        codes = codes.reshape(out, inner // BLOCK, BLOCK)
        codes = codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << np.uint8(4))
    return codes.reshape(out, math.prod(codes.shape[1:])), scale, minimum


def _round_q8_0(xp, blocks):
    scale = xp.max(xp.abs(blocks), axis=-1, keepdims=True) / 127.0
    return _round_to_int8(xp, blocks * _inverse(xp, scale)), scale, None


def _round_q4_0(xp, blocks):
    at = xp.argmax(xp.abs(blocks), axis=-1, keepdims=True)
    scale = xp.take_along_axis(blocks, at, axis=-1) / -8.0
    return xp.clip(xp.trunc(blocks * _inverse(xp, scale) + 8.5), 0, 15).astype(np.uint8), scale, None


def _round_q4_1(xp, blocks):
    low, high = xp.min(blocks, axis=-1, keepdims=True), xp.max(blocks, axis=-1, keepdims=True)
    scale = (high - low) / 15.0
    return xp.clip(xp.trunc((blocks - low) * _inverse(xp, scale) + 0.5), 0, 15).astype(np.uint8), scale, low


def _round_mxfp4(xp, blocks):
    """Codes of the nearest numbers, and scales: powers of two that bring a block's largest value between 4 and 8."""
    power = xp.frexp(xp.max(xp.abs(blocks), axis=-1, keepdims=True))[1] - 3
    scale = xp.ldexp(np.float32(1), xp.clip(power, -126, 127)).astype(np.float32)
    return float4_codes(xp, blocks / scale), scale, None


_ROUNDERS = {"q8_0": _round_q8_0, "q4_0": _round_q4_0, "q4_1": _round_q4_1, "mxfp4": _round_mxfp4}


def _inverse(xp, scale):
    return xp.where(scale == 0, 0.0, 1.0 / xp.where(scale == 0, 1.0, scale))


def _round_to_int8(xp, x):
    """Rounds half away from zero, as ggml does (round goes to even)."""
    return (xp.sign(x) * xp.floor(xp.abs(x) + 0.5)).astype(np.int8)
