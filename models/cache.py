"""The key-value cache of a decoder: static slots per row, donated from step to step so that it is updated in place."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

SMALLEST_BUCKET = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """What every layer keeps of the tokens; row b holds `lengths[b]` of them in its first slots, slot = position.

    entries: per layer a tuple of arrays [batch, slots, ...], keys and values [batch, slots, kv_heads, head_dim] of
    grouped-query attention (apart: no step copies a layer); lengths: int32 [batch].
    """

    entries: tuple[tuple[jax.Array, ...], ...]
    lengths: jax.Array

    @property
    def slots(self) -> int:
        return self.entries[0][0].shape[1]


def from_prefill(entries, lengths, slots: int, dtype=None) -> KVCache:
    """A cache with `slots` slots from each layer's arrays [batch, length, ...], length <= slots; in `dtype`, by default
    that of the arrays."""

    def place(x):
        x = x if dtype is None else x.astype(dtype)
        return jnp.pad(x, ((0, 0), (0, slots - x.shape[1])) + ((0, 0),) * (x.ndim - 2))

    return KVCache(tuple(tuple(place(x) for x in entry) for entry in entries), lengths)


def bucket(length: int, limit: int | None = None) -> int:
    """The smallest allowed static size >= length: multiples of an eighth of its power of two, at least 16.

    Few sizes mean few compilations; steps of an eighth waste at most 12.5 percent of the work above 128.
    """
    step = max(SMALLEST_BUCKET, 1 << max(0, (length - 1).bit_length() - 4))
    size = max(SMALLEST_BUCKET, -(-length // step) * step)
    return size if limit is None else max(length, min(size, limit))
