"""The indexer of a sparse attention, which scores keys for queries with few small heads (DeepSeek-V3.2, 2025).

A token has one key for all heads of the indexer. The score of a key is a weighted sum over heads of what is positive of
the products of queries and key; the best `count` keys are those that the attention reads. The Hadamard rotation of the
published code is orthogonal and changes no product, and its positive factors of all scores change no choice, so that
neither is here. The choice has no derivative.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jtile import ops

from . import few_tokens, layers
from .config import WeightSource
from .kernels import rotate_tail
from .layers import as_float32
from .selection import IndexQuery

NORM_EPS = 1e-6  # of the layer norm of keys, whatever the configuration says of other norms


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """Sizes of an indexer: its `heads`, the features of one (`size`), and how many keys a query reads (`count`)."""

    heads: int
    size: int
    count: int


class Indexer(nnx.Module):
    """Queries of an indexer from the low-rank vector of the attention's queries, keys and weights of heads from the
    hidden states. Rows of the weights are reordered on loading, so that the rotated features of a head stand behind
    the others; the checkpoint has them in front, as halves, also where the attention itself rotates adjacent pairs."""

    def __init__(self, rank: int, config: IndexConfig, rope: int, hidden: int, weight: WeightSource, prefix: str):
        """Takes the tensors `{prefix}{wq_b,weights_proj,k_norm}…`; `rope`: the rotated features of a head; `rank`: the
        features of the vectors that queries come from."""
        self.config = config
        order = _behind(config.heads, config.size, rope)
        query = weight(f"{prefix}wq_b.weight", (config.heads * config.size, rank))
        self.query = nnx.Param(layers.rows_of_heads(query, order))
        self.weights = nnx.Param(as_float32(weight(f"{prefix}weights_proj.weight", (config.heads, hidden))))
        norm = lambda name: nnx.Param(
            as_float32(weight(f"{prefix}k_norm.{name}", (config.size,)))[order[: config.size]]
        )
        self.norm, self.bias = norm("weight"), norm("bias")

    def ask(self, x, low, cos, sin, dtype: str) -> IndexQuery:
        """The queries [batch, length, heads, size] of hidden states x [batch, length, hidden], with the vectors `low`
        [batch, length, rank], and the weights of heads. cos, sin [length, rope / 2]: see `rotate_tail`."""
        x, low = jax.lax.stop_gradient((x, low))
        q = layers.linear(low, self.query.get_value()).reshape(*x.shape[:2], self.config.heads, -1)
        weights = few_tokens.scores(x.reshape(-1, x.shape[-1]).astype(jnp.float32), self.weights.get_value())
        return IndexQuery(rotate_tail(q, cos, sin, dtype=dtype), weights.reshape(q.shape[:3]))

    def keys(self, projected, cos, sin, dtype: str):
        """The keys [batch, length, size] from their projection."""
        norm = self.norm.get_value(), self.bias.get_value()
        normed = ops.layer_norm(jax.lax.stop_gradient(projected), *norm, eps=NORM_EPS)
        return rotate_tail(normed[:, :, None], cos, sin, dtype=dtype)[:, :, 0]


def key_rows(config: IndexConfig, rope: int, hidden: int, weight: WeightSource, prefix: str) -> layers.Weight:
    """The projection of keys, the tensor `{prefix}wk.weight`, which the attention multiplies with others."""
    return layers.rows_of_heads(weight(f"{prefix}wk.weight", (config.size, hidden)), _behind(1, config.size, rope))


def _behind(heads: int, size: int, rope: int) -> np.ndarray:
    """The order of the features of heads in which the first `rope` of each head come last."""
    return np.roll(np.arange(heads * size).reshape(heads, size), -rope, axis=1).reshape(-1)
