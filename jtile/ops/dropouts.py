"""Which weights of attention are dropped: words of counter-based generators (Salmon et al. 2011) at the place of a
weight, so that forward and reverse mode agree in tiles of any size and shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError

ROUNDS = 7  # of Philox2x32
FAR = 8  # rows of the parts of a tile that one thread of a GPU has, and columns of two of them
MULTIPLIER, STEP = 0xD256D193, 0x9E3779B9  # of Philox2x32


def seeds(key, batch: int, heads: int):
    """uint32 [batch, heads, 2] from the words of a key: what the bits of a row of the batch and a head come from."""
    rows, columns = (jax.lax.broadcasted_iota(jnp.uint32, (batch, heads), axis) for axis in (0, 1))
    return jnp.stack(threefry(key, rows, columns), -1)


def seed_of(seeds, b, h):
    """The two words of row b of the batch and head h, of `seeds` or None."""
    return None if seeds is None else (seeds[b, h, 0], seeds[b, h, 1])


def kept(seed, queries, keys, dropout: float):
    """bool: which of the weights of some queries and keys are kept. Their places are those of `places`, one of them
    along rows and the other one along columns.

    Args:
      seed: the two words of `seeds` of their row of the batch and head.
    """
    # One counter is for two queries and two keys, 8 apart: a word for each query, turned around for the second key.
    (x, second_query), (y, second_key) = queries, keys
    first, second = philox(seed[0], x + seed[1], y)
    word = jnp.where(second_query, second, first)
    turned = (word << jnp.uint32(16)) | (word >> jnp.uint32(16))
    return jnp.where(second_key, turned, word) >= jnp.uint32(limit(dropout))


def places(first, n: int, axis: int):
    """The places `first .. first + n` along an axis of two, for `kept`: the first of two places 8 apart, and which of
    them are the second."""
    inside = jt.arange(n).reshape((n, 1) if axis == 0 else (1, n))
    if n % (2 * FAR):
        return _pairs(first + inside)
    start, second = _pairs(inside)  # where a tile begins says nothing of these bits
    return jnp.asarray(first).astype(jnp.uint32) + start, second


def _pairs(place):
    return (place - (place & FAR)).astype(jnp.uint32), (place & FAR) != 0


def limit(dropout: float) -> int:
    """The words below it drop a weight."""
    return min(round(dropout * 2**32), 2**32 - 1)


def factor(dropout: float) -> float:
    """What the weights that are kept are multiplied with."""
    return 1.0 / (1.0 - limit(dropout) / 2**32)


def dropped(seeds, b, h, queries, keys, dropout: float, *tiles):
    """Tiles of weights, or of cotangents of them, without what is dropped; as they are where `seeds` is None."""
    if seeds is None:
        return tiles
    keep = kept(seed_of(seeds, b, h), queries, keys, dropout)
    return tuple(jnp.where(keep, x * factor(dropout), 0.0) for x in tiles)


def philox(key, x, y, rounds: int = ROUNDS):
    """Both words of Philox2x32 at the counter (x, y)."""
    for _ in range(rounds):
        x, y = jax.lax.mulhi(x, jnp.uint32(MULTIPLIER)) ^ key ^ y, x * jnp.uint32(MULTIPLIER)
        key = key + jnp.uint32(STEP)
    return x, y


def threefry(key, x, y):
    """Both words of threefry2x32, the generator of `jax.random`, at the counter (x, y)."""
    keys = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)
    x, y = x + keys[0], y + keys[1]
    for block in range(5):
        for turn in (13, 15, 26, 6) if block % 2 == 0 else (17, 29, 16, 24):
            x = x + y
            y = x ^ ((y << jnp.uint32(turn)) | (y >> jnp.uint32(32 - turn)))
        x, y = x + keys[(block + 1) % 3], y + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y


def words(op: str, key: Any, dropout: float):
    """The two words of a key where something is dropped, else None."""
    if isinstance(dropout, bool) or not isinstance(dropout, float | int | np.floating):
        raise KernelTypeError(f"{op}: dropout is a number of 0 to less than 1, got {dropout!r}")
    if not 0 <= dropout < 1:
        raise KernelValueError(f"{op}: dropout is a share of 0 to less than 1, got {dropout}")
    if dropout == 0:
        return None
    if key is None:
        raise KernelValueError(f"{op}: dropout takes a key: key=jax.random.key(seed)")
    if not hasattr(key, "dtype"):
        raise KernelTypeError(f"{op}: key is an array of two words, got {type(key).__name__}; jax.random.key(seed)")
    found = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    if found.shape != (2,) or found.dtype != jnp.uint32:
        raise KernelValueError(f"{op}: key is a key of threefry2x32, two words, got {found.dtype.name}{found.shape}")
    return found
