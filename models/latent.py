"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one small vector per token.

A prompt expands the latent vectors to keys and values of every head. A decoding step attends to the latent vectors
themselves: the expansion is absorbed into the query and into the output. The cache holds, per token, the normalised
latent vector and behind it the rotated part of the keys, which all heads share.

With an indexer (DeepSeek-V3.2) a token attends to the keys that `selection.select` gives for it, to their latent
vectors in a prompt, too, and the cache holds the keys of the indexer beside the latent vectors. Up to as many tokens as
are chosen, all of them are: the attention is the one without an indexer then.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jtile import ops
from jtile.ops import QuantizedTensor

from . import layers
from .cache import Slots
from .config import WeightSource
from .indexer import NORM_EPS as INDEX_EPS
from .indexer import IndexConfig, Indexer, key_rows
from .kernels import rotate_tail
from .layers import as_float32, fuse
from .parallel import ALONE, Axes
from .rope import Rope
from .selection import LARGEST, IndexQuery, select

NORM_EPS = 1e-6  # for norms of queries and latent vectors, whatever the configuration says of other norms


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of a latent attention. `query_rank`: the size of the queries' own latent vector (None: they are projected
    at once); `rank`: the size of the latent vector of keys and values; `plain`: a head's features without position,
    before the `rope.size` rotated ones; `value`: the features of a head's values; `scale`: the factor of the scores;
    `adjacent`: the checkpoint rotates the pairs (2i, 2i + 1), else (i, i + size / 2); `index`: the indexer that chooses
    the keys of a token, None where it sees all."""

    heads: int
    query_rank: int | None
    rank: int
    plain: int
    value: int
    rope: Rope
    scale: float
    adjacent: bool = True
    index: IndexConfig | None = None


class LatentAttention(nnx.Module):
    """Latent self-attention, which is used as `decoder.Attention` is. Keys, values and entries of the cache have the
    dtype of the weights that expand them; if these are quantised, they become bfloat16. The other projections stay as
    they are stored.

    Rotated rows of the weights are reordered from adjacent pairs to halves on loading: scores, the product of queries
    and keys that are both so reordered, stay the same.
    """

    window = None  # a token sees all keys
    over: Axes = ALONE

    def __init__(self, config: LatentConfig, hidden: int, weight: WeightSource, prefix: str):
        """Takes the tensors `{prefix}{q_a,q_b,q,kv_a,kv_b,o}_proj…` and `{prefix}indexer…`, which `weight(name, shape)`
        reads, as weights."""
        rope, heads = config.rope.size, config.heads
        rows = heads * (config.plain + rope)
        read = lambda name, *shape: weight(f"{prefix}{name}.weight", shape)
        halves = (lambda w, heads: _halves(w, heads, rope)) if config.adjacent else lambda w, heads: w
        entry = halves(read("kv_a_proj_with_mqa", config.rank + rope, hidden), 1)
        if config.query_rank is None:
            first, self.query_norm, self.query = halves(read("q_proj", rows, hidden), heads), None, None
        else:
            first = read("q_a_proj", config.query_rank, hidden)
            self.query_norm = nnx.Param(as_float32(read("q_a_layernorm", config.query_rank)))
            self.query = nnx.Param(halves(read("q_b_proj", rows, config.query_rank), heads))
        part = None if config.index is None else (config.index, rope, hidden, weight, f"{prefix}indexer.")
        self.indexer = None if part is None else Indexer(config.query_rank or hidden, *part)
        of_indexer = [] if part is None else [key_rows(*part)]
        self.down = nnx.Param(fuse([first, *of_indexer, entry]))
        self.norm = nnx.Param(as_float32(read("kv_a_layernorm", config.rank)))
        both = _dense(read("kv_b_proj", heads * (config.plain + config.value), config.rank))
        both = both.reshape(heads, config.plain + config.value, config.rank)
        self.key, self.value = nnx.Param(both[:, : config.plain]), nnx.Param(both[:, config.plain :])
        self.output = nnx.Param(read("o_proj", hidden, heads * config.value))
        self.config, self.rope = config, config.rope

    def _project(self, x):
        """q [..., heads, plain + rope] and the latent vectors with the keys' rotary part [..., rank + rope], not
        rotated yet; then the low-rank vectors of queries and the projection of the indexer's keys, None without one."""
        config, low, key = self.config, None, None
        y = layers.linear(x, self.down.get_value())
        q, entry = jnp.split(y, [y.shape[-1] - config.rank - config.rope.size], axis=-1)
        if self.indexer is not None:
            q, key = jnp.split(q, [q.shape[-1] - self.indexer.config.size], axis=-1)
        if self.query is not None:
            low = layers.rms_norm(q, self.query_norm.get_value(), NORM_EPS)
            q = layers.linear(low, self.query.get_value())
        return q.reshape(*x.shape[:-1], config.heads, -1), entry, low, key

    def _absorbed(self, q):
        """q [tokens, heads, plain + rope] without its rotary part, as queries of latent vectors: float32 [tokens,
        heads, rank]."""
        # q . (W c) = (W^T q) . c, and sum_j p_j (W c_j) = W sum_j p_j c_j
        key = self.key.get_value()
        plain = q[:, :, : self.config.plain].swapaxes(0, 1).astype(key.dtype)
        return ops.matmul(plain, key, out_dtype=jnp.float32).swapaxes(0, 1)

    def _expanded(self, mixed, dtype):
        """The values [tokens, heads, value] of sums of latent vectors [tokens, heads, rank]."""
        value = self.value.get_value()
        mixed = mixed.astype(value.dtype).swapaxes(0, 1)
        return ops.matmul(mixed, value, transpose_b=True, out_dtype=dtype).swapaxes(0, 1)

    def prefill(self, x, cos, sin):
        """Attention within prompts x [batch, length, hidden]; returns (output [batch, length, hidden], what the cache
        keeps: entries [batch, length, rank + rope], and the keys of an indexer [batch, length, size])."""
        dtype, config = self.key.get_value().dtype, self.config
        q, entry, low, key = self._project(x)
        q = rotate_tail(q, cos, sin, dtype=dtype.name)
        rope = rotate_tail(entry[:, :, None, config.rank :], cos, sin, dtype=dtype.name)[:, :, 0]
        latent = layers.rms_norm(entry[:, :, : config.rank], self.norm.get_value(), NORM_EPS).astype(dtype)
        kept = (jnp.concatenate([latent, rope], axis=-1),)
        if self.indexer is not None:
            kept = (*kept, self.indexer.keys(key, cos, sin, dtype.name))
        if self.indexer is None or x.shape[1] <= self.indexer.config.count:
            mixed = self._attend_all(q, latent, rope)
        else:
            mixed = self._attend_selected(q, *kept, self.indexer.ask(x, low, cos, sin, dtype.name))
        mixed = mixed.astype(x.dtype).reshape(*x.shape[:2], -1)
        return self.over.term(layers.linear(mixed, self.output.get_value())), kept

    def _attend_all(self, q, latent, rope):
        """Causal attention of q [batch, length, heads, plain + rope]: [batch, length, heads, value]."""
        weights, shape = (self.key.get_value(), self.value.get_value()), q.shape[:3]
        k, v = (ops.matmul(latent, w.reshape(-1, self.config.rank), transpose_b=True) for w in weights)
        return ops.mla_attention(q, k.reshape(*shape, -1), rope, v.reshape(*shape, -1), scale=self.config.scale)

    def _attend_selected(self, q, entries, keys, index: IndexQuery):
        """`_attend_all` to the chosen entries of the cache, by blocks of queries, so that neither scores nor queries of
        latent vectors of a whole prompt are in memory."""
        (batch, length, heads), config = q.shape[:3], self.config
        size = max(LARGEST // (batch * max(length, heads * entries.shape[2])), 1)
        blocks = -(-length // size)
        size = -(-length // blocks)
        whole = lambda y: jnp.pad(y, ((0, 0), (0, blocks * size - length)) + ((0, 0),) * (y.ndim - 2))
        apart = lambda y: whole(y).reshape(batch, blocks, size, *y.shape[2:]).swapaxes(0, 1)
        entries, keys = whole(entries), whole(keys)

        def attend(part):
            end, q, index = part
            flat = q.reshape(batch * size, heads, -1)
            latent = self._absorbed(flat).astype(q.dtype).reshape(batch, size, heads, -1)
            query = jnp.concatenate([latent, q[..., config.plain :]], axis=-1)
            places, counts = select(index, keys, jnp.full((batch,), end), config.index.count)
            mixed = ops.mla_selected(query, entries, places, counts, rank=config.rank, scale=config.scale)
            return self._expanded(mixed.reshape(*flat.shape[:2], -1), q.dtype).reshape(batch, size, heads, -1)

        ends = jnp.arange(1, blocks + 1, dtype=jnp.int32) * size
        parts = jax.lax.map(jax.checkpoint(attend), (ends, apart(q), jax.tree.map(apart, index)))
        return parts.swapaxes(0, 1).reshape(batch, blocks * size, heads, -1)[:, :length]

    def step(self, x, cos, sin, slots: Slots):
        """Attention of the next t tokens of each row, x [batch * t, hidden], to this layer's part of the cache; returns
        (output [batch * t, hidden], the part of the cache with these tokens)."""
        config, indexer = self.config, self.indexer
        q, new, low, key = self._project(x)
        norm = self.norm.get_value()
        query, slots = slots.append_latent(q, self._absorbed(q), new, norm, cos, sin, NORM_EPS)
        if indexer is None:
            mixed = slots.attend_latent(query, config.rank, config.scale)
        else:
            slots = slots.append_index(key, indexer.norm.get_value(), indexer.bias.get_value(), cos, sin, INDEX_EPS)
            index = indexer.ask(x[None], low[None], cos, sin, slots.query_dtype(x.dtype))
            index = jax.tree.map(lambda y: y[0], index)
            mixed = slots.attend_selected(query, index, indexer.config.count, config.rank, config.scale)
        mixed = self._expanded(mixed, x.dtype).reshape(x.shape[0], -1)
        return self.over.term(layers.linear(mixed, self.output.get_value())), slots


def _halves(weight: jax.Array | QuantizedTensor, heads: int, rope: int) -> jax.Array | QuantizedTensor:
    """The rows [heads (d + rope), in], of which the last `rope` of each head are reordered from adjacent pairs to
    halves: rows of even index come first."""
    rows = np.arange(weight.shape[0]).reshape(heads, -1)
    plain, turned = np.split(rows, [rows.shape[1] - rope], axis=1)
    order = np.concatenate([plain, turned[:, ::2], turned[:, 1::2]], axis=1).reshape(-1)
    return layers.rows_of_heads(weight, order)


def _dense(weight: layers.Weight) -> jax.Array:
    """The weight as a dense array: queries and outputs absorb it, for which it is multiplied from both sides, and
    quantised weights cannot be."""
    return weight.dequantize(jnp.bfloat16) if isinstance(weight, QuantizedTensor) else weight
