"""The codes of quantised weights: the numbers that they say, and words of them; the kinds are those of
quantized_tensor.py."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jtile.ops.operands import Weight

BLOCK = 32  # weights of a block of GGUF; groups that share a scale are of one or more blocks
FOUR_BIT = ("q4_0", "q4_1", "mxfp4")
FLOAT8 = jnp.float8_e4m3fn
PANEL = 16  # rows of a panel: lanes of a vector of 64 bytes
WORDS = ("uint32", "int32")  # dtypes of codes in words: in the order of tensor cores, and in panels


def float4_numbers(codes):
    """float32 numbers of codes uint8 from 0 to 15, floats with a sign, 2 bits of exponent and 1 of mantissa (e2m1):
    0, 0.5, 1, 1.5, 2, 3, 4, 6, and from 8 on the negatives of these."""
    # The bits are those of a float16, 2^-14 times the number, at the place where its exponent and mantissa meet.
    wide = codes.astype(jnp.uint16)
    bits = (wide & np.uint16(7)) << np.uint16(9) | (wide & np.uint16(8)) << np.uint16(12)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * np.float32(2.0**14)


def float4_codes(xp, x):
    """The codes, uint8, of the numbers nearest to x, float32; `xp`: NumPy or `jnp`."""
    size = xp.abs(x)
    near = xp.where(size < 2, xp.round(2 * size), xp.where(size < 4, xp.round(size) + 2, xp.round(size / 2) + 4))
    return xp.minimum(near, np.float32(7)).astype(np.uint8) | xp.where(x < 0, np.uint8(8), np.uint8(0))


def dequantize_rows(kind: str, codes, scale, minimum=None) -> jax.Array:
    """The weights, float32 [..., in], of codes [..., in or in/2] with scales (and minima) [..., in/32 or 1]."""
    codes = unpack_codes(codes, kind)
    scale = scale.astype(jnp.float32)[..., None]
    if kind == "int8":
        return codes.astype(jnp.float32) * scale[..., 0]
    lead, groups = codes.shape[:-1], scale.shape[-2]
    if kind in ("q8_0", "fp8"):
        return (codes.reshape(*lead, groups, -1).astype(jnp.float32) * scale).reshape(*lead, -1)
    blocks = codes.reshape(*lead, -1, BLOCK // 2)
    quants = jnp.concatenate([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1)
    quants = quants.reshape(*lead, groups, -1)
    if kind == "mxfp4":
        return (float4_numbers(quants) * scale).reshape(*lead, -1)
    quants = quants.astype(jnp.float32)
    if kind == "q4_0":
        weights = (quants - 8.0) * scale
    else:
        weights = quants * scale + minimum.astype(jnp.float32)[..., None]
    return weights.reshape(*lead, -1)


@functools.partial(jax.jit, static_argnames="kind")
def pack_codes(codes, kind: str) -> jax.Array:
    """Codes [..., in or in/2] as words."""
    lead = codes.shape[:-1]
    if kind in FOUR_BIT:
        pairs = codes.reshape(*lead, -1, 2, 4, 2).astype(jnp.uint32)  # of s = 0 and 1, by block, h, t, e
        parts, step = (pairs & 15) | (pairs >> 4) << 8, 4
    else:
        eights = jax.lax.bitcast_convert_type(codes, jnp.uint8) ^ np.uint8(0 if kind == "fp8" else 128)
        parts, step = eights.reshape(*lead, -1, 2, 4, 2).astype(jnp.uint32), 8  # by block and s, h, t, e
    words = (parts << _places(step, parts.ndim)).sum((-3, -1), dtype=jnp.uint32)
    return words.reshape(*lead, -1)


@functools.partial(jax.jit, static_argnames="kind")
def unpack_codes(codes, kind: str) -> jax.Array:
    """The inverse of `pack_codes`; codes that are no words stay as they are."""
    if codes.dtype != jnp.uint32:
        return codes
    lead, four = codes.shape[:-1], kind in FOUR_BIT
    parts = codes.reshape(*lead, -1, 1, 4, 1)
    parts = parts >> _places(4 if four else 8, parts.ndim)
    if four:
        return (parts & 15 | (parts >> 8 & 15) << 4).astype(jnp.uint8).reshape(*lead, -1)
    eights = (parts & 255).astype(jnp.uint8) ^ np.uint8(0 if kind == "fp8" else 128)
    return jax.lax.bitcast_convert_type(eights, FLOAT8 if kind == "fp8" else jnp.int8).reshape(*lead, -1)


def in_panels(weight: Weight) -> Weight:
    """A weight [out, in] with codes in bytes as one in panels: its codes are words int32, and of each 16 rows of its
    arrays first all first elements are stored, then all second ones, and so on."""
    out, stored = weight.codes.shape
    words = jax.lax.bitcast_convert_type(weight.codes.reshape(out, stored // 4, 4), jnp.int32)
    turned = lambda a: jnp.swapaxes(a.reshape(out // PANEL, PANEL, -1), 1, 2).reshape(a.shape)
    return jax.tree.map(turned, weight._replace(codes=words))


def codes_of_panels(tile, rows: int, kind: str) -> jax.Array:
    """The codes of words in panels, whose bytes come behind each other, and the rows before them. A CPU knows these
    steps (`lowering/cpu/nibbles.py`) and takes the words as they are."""
    panels, words, four = rows // PANEL, tile.shape[1], kind != "q8_0"
    wide = (panels, words // 4, 2, 4, PANEL, 4) if four else (panels, words, PANEL, 4)
    places = lambda axis, bits: jax.lax.broadcasted_iota(jnp.int32, wide, axis) * bits
    one = (panels, words // 4, 1, 4, PANEL, 1) if four else (panels, words, PANEL, 1)
    fields = jnp.broadcast_to(tile.reshape(one), wide) >> (places(2, 4) + places(5, 8) if four else places(3, 8))
    if four:
        return (fields & 15).astype(jnp.uint8).transpose(0, 4, 1, 2, 3, 5).reshape(rows, 8 * words)
    return fields.astype(jnp.int8).transpose(0, 2, 1, 3).reshape(rows, 4 * words)


def in_rows(weight: Weight, kind: str) -> Weight:
    """The inverse of `in_panels`; a weight in another form stays as it is."""
    if weight.codes.dtype != jnp.int32:
        return weight
    out = weight.codes.shape[0]
    turned = lambda a: jnp.swapaxes(a.reshape(out // PANEL, -1, PANEL), 1, 2).reshape(a.shape)
    return _in_bytes(jax.tree.map(turned, weight), kind)


def rows_of_panels(weight: Weight, index, kind: str) -> Weight:
    """The rows index int [n] of a weight in panels, with codes in bytes; floats are NaN where no row is."""
    out = weight.codes.shape[0]
    row = jnp.where(index < 0, index + out, index)
    panel, lane = jnp.where((row < 0) | (row >= out), out // PANEL, row // PANEL), row % PANEL
    found = lambda a: a.reshape(out // PANEL, -1, PANEL).at[panel, :, lane].get(mode="fill")
    return _in_bytes(jax.tree.map(found, weight), kind)


def _in_bytes(weight: Weight, kind: str) -> Weight:
    """The weight [n, in] with its words taken apart."""
    codes = jax.lax.bitcast_convert_type(weight.codes, jnp.uint8 if kind in FOUR_BIT else jnp.int8)
    return weight._replace(codes=codes.reshape(codes.shape[0], -1))


def _places(step: int, rank: int):
    """The bits at which the parts of words begin, by h, t and e, the last of `rank` axes."""
    h, e = np.indices((2, 2), np.uint32)
    return (step * h + 16 * e).reshape((1,) * (rank - 3) + (2, 1, 2))
