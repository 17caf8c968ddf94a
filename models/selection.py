"""The tokens that a sparse attention reads: those with the best scores of an indexer (DeepSeek-V3.2, 2025)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jtile import ops

# Numbers, of scores or of queries, that are in memory at once: what needs more goes through in parts.
LARGEST = 1 << 25


class IndexQuery(NamedTuple):
    """What an indexer asks of the keys: queries [..., heads, d], and the weight of each head, float32 [..., heads]."""

    q: jax.Array
    weights: jax.Array


def select(query: IndexQuery, keys, lengths, count: int, table=None, scales=None) -> tuple[jax.Array, jax.Array]:
    """The best tokens up to each of the newest ones.

    query: of [batch, t] tokens, the last of `lengths` [batch]. keys, table, scales: `keys`, `pages` and `scales` of
    `ops.index_scores`. Returns places int32 [batch, t, count], ascending, and how many of them count, int32 [batch, t]:
    a token early in its row sees fewer, which stand in front of those behind it. The scores of few rows at a time are
    in memory.
    """
    t = query.q.shape[1]
    slots = keys.shape[1] * (1 if table is None else table.shape[1])
    lengths = jnp.clip(lengths, 0, slots)

    def best(q, weights, lengths, own):
        table, (held, units) = (own, (keys, scales)) if paged else (None, own)
        scores = ops.index_scores(q, held, weights, lengths, pages=table, scales=units)
        return ops.largest(scores, count)

    paged = table is not None
    places = _in_parts(best, LARGEST // (t * slots), (*query, lengths, table if paged else (keys, scales)))
    position = lengths[:, None] - t + jnp.arange(t, dtype=jnp.int32)[None, :]
    return places, jnp.clip(position + 1, 0, count)


def _in_parts(run: Callable, size: int, arrays):
    """run(*arrays) for arrays [batch, ...], of which it gets at most `size` rows at a time, but one at least. Parts are
    equal, so that no array is copied for them."""
    batch = len(arrays[0])
    if batch <= max(size, 1):
        return run(*arrays)
    parts = next(n for n in range(-(-batch // max(size, 1)), batch + 1) if batch % n == 0)
    apart = lambda x: x.reshape(parts, -1, *x.shape[1:])
    found = jax.lax.map(lambda part: run(*part), jax.tree.map(apart, arrays))
    return found.reshape(-1, *found.shape[2:])
