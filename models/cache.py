"""The key-value cache of a decoder: static slots per row, donated from step to step so that it is updated in place."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

SMALLEST_BUCKET = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer; row b holds `lengths[b]` tokens in its first slots, slot = position.

    keys, values: one float32 array [batch, slots, kv_heads, head_dim] per layer (apart: no step copies a layer);
    lengths: int32 [batch].
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array

    @property
    def slots(self) -> int:
        return self.keys[0].shape[1]


def from_prefill(pairs, lengths, slots: int) -> KVCache:
    """A cache with `slots` slots from per-layer (key, value) [batch, length, kv_heads, head_dim], length <= slots."""

    def place(x):
        return jnp.pad(x, ((0, 0), (0, slots - x.shape[1]), (0, 0), (0, 0)))

    return KVCache(tuple(place(k) for k, _ in pairs), tuple(place(v) for _, v in pairs), lengths)


def bucket(length: int, limit: int | None = None) -> int:
    """The smallest allowed static size >= length: multiples of an eighth of its power of two, at least 16.

    Few sizes mean few compilations; steps of an eighth waste at most 12.5 percent of the work above 128.
    """
    step = max(SMALLEST_BUCKET, 1 << max(0, (length - 1).bit_length() - 4))
    size = max(SMALLEST_BUCKET, -(-length // step) * step)
    return size if limit is None else max(length, min(size, limit))
