"""Kernels of the decoder beside those of `jtile.ops`: rotary positions fused with what stands around them.

Queries, keys and values leave the projection in one pass; in a decoding step they go straight into the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtile as jt


def _normed(x, weight, eps: float):
    """x [..., head_dim] / sqrt(mean(x^2) + eps) * weight."""
    unit = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return unit * weight.reshape((1,) * (x.ndim - 1) + (-1,))


def _heads(x, norms, heads: int, kv_heads: int, eps: float):
    """Queries and keys of x [..., heads + 2 kv_heads, head_dim], float32, normalised by `norms`, two weights or ()."""
    x = x[..., : heads + kv_heads, :].astype(jnp.float32)
    if not norms:
        return x
    Q, K = x[..., :heads, :], x[..., heads:, :]
    return jnp.concatenate([_normed(Q, norms[0][:], eps), _normed(K, norms[1][:], eps)], axis=-2)


def rotated(x, cos, sin):
    """The pairs (i, i + half) of x [..., heads, head_dim] turned by the angles of cos, sin [..., 1, half]."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def rows_of_split(heads: int, head_dim: int) -> int:
    """How many positions of `heads` heads, those of keys and values too, a program of `rope_split` takes: what the
    registers of a GPU's block hold."""
    return max(1, min(16, 16384 // (jt.next_power_of_2(heads) * jt.next_power_of_2(head_dim))))


def _split_types(qkv, cos, sin, *, heads, kv_heads, **_):
    lead, head_dim = qkv.shape[:-2], qkv.shape[-1]
    return tuple(jt.like(qkv, shape=(*lead, n, head_dim)) for n in (heads, kv_heads, kv_heads))


@jt.kernel(out_type=_split_types, grid=lambda qkv, *_, bt, **__: (qkv.shape[0], jt.cdiv(qkv.shape[1], bt)))
def rope_split(qkv, cos, sin, norms, q, k, v, *, heads: int, kv_heads: int, eps: float = 0.0, bt: int = 16):
    """qkv [batch, length, heads + 2 kv_heads, head_dim], cos and sin float32 [length, head_dim / 2] -> q and k rotated,
    v, of qkv's dtype.

    norms: () or the weights [head_dim] of the RMS norms of queries and keys, which come before the rotation."""
    b, t = jt.program_id(0), jt.program_id(1)
    n, half = cos.shape[-1] * 2, cos.shape[-1]
    X = qkv.tiles(None, bt, qkv.shape[2], n)[b, t, 0, 0]
    C, S = cos.tiles(bt, half)[t, 0][:, None], sin.tiles(bt, half)[t, 0][:, None]
    R = rotated(_heads(X, norms, heads, kv_heads, eps), C, S)
    q.tiles(None, bt, heads, n)[b, t, 0, 0] = R[:, :heads].astype(q.dtype)
    k.tiles(None, bt, kv_heads, n)[b, t, 0, 0] = R[:, heads:].astype(k.dtype)
    v.tiles(None, bt, kv_heads, n)[b, t, 0, 0] = X[:, heads + kv_heads :]


def _step_types(qkv, cos, sin, lengths, keys, values, norms, *, heads, **_):
    return jt.like(qkv, shape=(qkv.shape[0], heads, qkv.shape[2])), jt.like(keys), jt.like(values)


@jt.kernel(
    out_type=_step_types,
    grid=lambda qkv, *_, **__: (qkv.shape[0],),
    alias={"keys": "new_keys", "values": "new_values"},
)
def rope_append(
    qkv, cos, sin, lengths, keys, values, norms, q, new_keys, new_values,
    *, heads: int, kv_heads: int, eps: float = 0.0,
):  # fmt: skip
    """One token a row: rotates q and k of qkv [batch, heads + 2 kv_heads, head_dim] by float32 cos, sin
    [batch, head_dim / 2], and writes k and v into slot lengths[b] of the caches [batch, slots, kv_heads, head_dim], in
    place and in their dtype. `norms`: see `rope_split`."""
    b = jt.program_id(0)
    at, X = lengths[b], qkv[b, :, :]
    R = rotated(_heads(X, norms, heads, kv_heads, eps), cos[b, :][None], sin[b, :][None])
    q[b, :, :] = R[:heads].astype(q.dtype)
    new_keys[b, at, :, :] = R[heads:].astype(new_keys.dtype)
    new_values[b, at, :, :] = X[heads + kv_heads :].astype(new_values.dtype)
