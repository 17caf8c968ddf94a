"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one small vector per token.

A prompt expands the latent vectors to keys and values of every head. A decoding step attends to the latent vectors
themselves: the expansion is absorbed into the query and into the output. The cache holds, per token, the normalised
latent vector and behind it the rotated part of the keys, which all heads share.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jtile as jt
from jtile import ops
from jtile.ops import QuantizedTensor
from jtile.ops.quantized_tensor import BLOCKS

from . import layers
from .cache import Slots
from .config import WeightSource
from .decoder import as_float32, fuse
from .kernels import HEADS, rotated
from .parallel import ALONE, Axes
from .rope import Rope

NORM_EPS = 1e-6  # for norms of queries and latent vectors, whatever the configuration says of other norms


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of a latent attention. `query_rank`: the size of the queries' own latent vector (None: they are projected
    at once); `rank`: the size of the latent vector of keys and values; `plain`: a head's features without position,
    before the `rope.size` rotated ones; `value`: the features of a head's values; `scale`: the factor of the scores;
    `adjacent`: the checkpoint rotates the pairs (2i, 2i + 1), else (i, i + size / 2)."""

    heads: int
    query_rank: int | None
    rank: int
    plain: int
    value: int
    rope: Rope
    scale: float
    adjacent: bool = True


def _tail_type(x, cos, sin, *, dtype, **_):
    return jax.ShapeDtypeStruct(x.shape, dtype)


def _tail_grid(x, *_, bt, **__):
    return x.shape[0], jt.cdiv(x.shape[1], bt), jt.cdiv(x.shape[2], HEADS)


@jt.kernel(out_type=_tail_type, grid=_tail_grid)
def rotate_tail(x, cos, sin, y, *, dtype: str, bt: int = 8):
    """y: x [batch, length, heads, d + r] with the last r features of each head rotated by cos, sin [length, r / 2]."""
    b, t, h = jt.program_id(0), jt.program_id(1), jt.program_id(2)
    half, d = cos.shape[1], x.shape[3] - 2 * cos.shape[1]
    C, S = cos.tiles(bt, half)[t, 0][:, None], sin.tiles(bt, half)[t, 0][:, None]
    tokens, heads = jt.ds(t * bt, bt), jt.ds(h * HEADS, HEADS)
    if d:
        y[b, tokens, heads, :d] = x[b, tokens, heads, :d].astype(dtype)
    y[b, tokens, heads, d:] = rotated(x[b, tokens, heads, d:].astype(jnp.float32), C, S).astype(dtype)


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
        """Takes the tensors `{prefix}{q_a,q_b,q,kv_a,kv_b,o}_proj…`, which `weight(name, shape)` reads, as weights."""
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
        self.down = nnx.Param(fuse([first, entry]))
        self.norm = nnx.Param(as_float32(read("kv_a_layernorm", config.rank)))
        both = _dense(read("kv_b_proj", heads * (config.plain + config.value), config.rank))
        both = both.reshape(heads, config.plain + config.value, config.rank)
        self.key, self.value = nnx.Param(both[:, : config.plain]), nnx.Param(both[:, config.plain :])
        self.output = nnx.Param(read("o_proj", hidden, heads * config.value))
        self.config, self.rope = config, config.rope

    def _project(self, x):
        """q [..., heads, plain + rope] and the latent vectors with the keys' rotary part [..., rank + rope], not
        rotated yet."""
        config = self.config
        y = layers.linear(x, self.down.get_value())
        q, entry = jnp.split(y, [y.shape[-1] - config.rank - config.rope.size], axis=-1)
        if self.query is not None:
            q = layers.linear(layers.rms_norm(q, self.query_norm.get_value(), NORM_EPS), self.query.get_value())
        return q.reshape(*x.shape[:-1], config.heads, -1), entry

    def prefill(self, x, cos, sin):
        """Attention within prompts x [batch, length, hidden]; returns (output [batch, length, hidden], (entries of the
        cache [batch, length, rank + rope],))."""
        key, value, config = self.key.get_value(), self.value.get_value(), self.config
        q, entry = self._project(x)
        q = rotate_tail(q, cos, sin, dtype=key.dtype.name)
        rope = rotate_tail(entry[:, :, None, config.rank :], cos, sin, dtype=key.dtype.name)[:, :, 0]
        latent = layers.rms_norm(entry[:, :, : config.rank], self.norm.get_value(), NORM_EPS).astype(key.dtype)
        k, v = (ops.matmul(latent, w.reshape(-1, config.rank), transpose_b=True) for w in (key, value))
        k, v = (y.reshape(*x.shape[:2], config.heads, -1) for y in (k, v))
        mixed = ops.mla_attention(q, k, rope, v, scale=config.scale).astype(x.dtype)
        x = self.over.term(layers.linear(mixed.reshape(*x.shape[:2], -1), self.output.get_value()))
        return x, (jnp.concatenate([latent, rope], axis=-1),)

    def step(self, x, cos, sin, slots: Slots):
        """Attention of the next t tokens of each row, x [batch * t, hidden], to this layer's part of the cache; returns
        (output [batch * t, hidden], the part of the cache with these tokens)."""
        key, value, config = self.key.get_value(), self.value.get_value(), self.config
        q, new = self._project(x)
        # q . (W c) = (W^T q) . c, and sum_j p_j (W c_j) = W sum_j p_j c_j
        plain = q[:, :, : config.plain].swapaxes(0, 1).astype(key.dtype)
        absorbed = ops.matmul(plain, key, out_dtype=jnp.float32).swapaxes(0, 1)
        query, slots = slots.append_latent(q, absorbed, new, self.norm.get_value(), cos, sin, NORM_EPS)
        mixed = slots.attend_latent(query, config.rank, config.scale)
        mixed = mixed.astype(value.dtype).swapaxes(0, 1)
        mixed = ops.matmul(mixed, value, transpose_b=True, out_dtype=x.dtype).swapaxes(0, 1)
        return self.over.term(layers.linear(mixed.reshape(x.shape[0], -1), self.output.get_value())), slots


def _halves(weight: jax.Array | QuantizedTensor, heads: int, rope: int) -> jax.Array | QuantizedTensor:
    """The rows [heads (d + rope), in], of which the last `rope` of each head are reordered from adjacent pairs to
    halves: rows of even index come first."""
    rows = np.arange(weight.shape[0]).reshape(heads, -1)
    plain, turned = np.split(rows, [rows.shape[1] - rope], axis=1)
    order = np.concatenate([plain, turned[:, ::2], turned[:, 1::2]], axis=1).reshape(-1)
    found, blocks = layers.rows(weight, order), np.arange(order.size) // BLOCKS
    if not isinstance(found, QuantizedTensor):
        return found
    return found if (order // BLOCKS == blocks).all() else dataclasses.replace(found, activations=None)


def _dense(weight: layers.Weight) -> jax.Array:
    """The weight as a dense array: queries and outputs absorb it, for which it is multiplied from both sides, and
    quantised weights cannot be."""
    return weight.dequantize(jnp.bfloat16) if isinstance(weight, QuantizedTensor) else weight
