"""The layers of a decoder, as functions over arrays: the one place that chooses the kernel for each step of a model.

Activations are float32 and row-major. Weights are dense [out, in] (float32, float16 or bfloat16), a `QuantizedTensor`,
or a tuple of these whose outputs are concatenated. Sums run in float32 whatever the weight is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jtile.ops.quantized import quantized_matmul
from jtile.ops.quantized_tensor import QuantizedTensor, dequantize_rows

Weight = jax.Array | QuantizedTensor | tuple


def rms_norm(x, weight, eps: float):
    """x * weight / sqrt(mean(x^2) + eps) over the last axis; x [..., features], weight [features]."""
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return x * scale * weight.reshape((1,) * (x.ndim - 1) + (-1,))


def linear(x, weight: Weight, residual=None):
    """x [..., in] times the transposed weight, plus the residual if there is one: [..., out], float32."""
    if isinstance(weight, tuple):
        y = jnp.concatenate([linear(x, part) for part in weight], axis=-1)
        return y if residual is None else y + residual
    if isinstance(weight, QuantizedTensor):
        return quantized_matmul(x, weight, residual=residual)
    y = jax.lax.dot_general(x, weight.astype(jnp.float32), (((x.ndim - 1,), (1,)), ((), ())), precision="highest")
    return y if residual is None else y + residual


def embedding(table: Weight, ids):
    """Rows `ids` (int, any shape) of the table [vocab, features] as float32."""
    if isinstance(table, QuantizedTensor):
        return dequantize_rows(
            table.kind, *(None if leaf is None else leaf[ids] for leaf in (table.codes, table.scale, table.minimum))
        )
    return table[ids].astype(jnp.float32)


def rope_angles(positions, inverse_frequencies):
    """cos and sin [..., head_dim / 2] for integer positions [...]."""
    frequencies = inverse_frequencies.reshape((1,) * positions.ndim + (-1,))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rope(x, cos, sin):
    """Rotates the pairs (i, i + head_dim / 2) of x [batch, length, heads, head_dim]; cos, sin [batch, length, half]
    are those of each position."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, :, None], sin[:, :, None]
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def attention(q, k, v, scale: float):
    """Causal attention of q [batch, length, heads, head_dim] over k, v [batch, length, kv_heads, head_dim]."""
    length = q.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    return _attend(q, k, v, scale, causal[None, None, None])


def decode_attention(q, keys, values, lengths, scale: float):
    """One query per row, q [batch, heads, head_dim], over the first `lengths` (int [batch]) slots of the cache
    [batch, slots, kv_heads, head_dim]; the result has q's shape."""
    slots = jnp.arange(keys.shape[1], dtype=lengths.dtype)
    live = slots[None, :] < lengths[:, None]
    return _attend(q[:, None], keys, values, scale, live[:, None, None, None])[:, 0]


def _attend(q, k, v, scale, mask):
    """mask is boolean and broadcasts to [batch, kv_heads, group, length, slots]."""
    batch, length, _, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, head_dim)
    scores = jnp.einsum("blkgd,bskd->bkgls", grouped, k, precision="highest") * scale
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgls,bskd->blkgd", weights, v, precision="highest").reshape(q.shape)


def gated_mlp(x, gate_up: Weight, down: Weight, residual):
    """residual + down(silu(gate(x)) * up(x)); gate and up are stacked along `out` in that order."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down, residual)
