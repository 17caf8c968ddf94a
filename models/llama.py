"""Llama: a decoder with grouped-query attention, rotary positions, RMS norms and a gated MLP (Touvron et al. 2023)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jtile import ops
from jtile._errors import ModelError
from jtile.models import cache as kv
from jtile.models import layers
from jtile.ops import QuantizedTensor

IGNORED = -100  # the label of a token that is not to be predicted


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched: "linear" (all by `factor`), "llama3" (low frequencies by `factor`), or
    "factors" (frequency i by `factors[i]`, as GGUF files store it)."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192
    factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The sizes of one Llama; `max_length` is the longest sequence that the model was trained for, in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_length: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads do not divide into {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise ModelError(f"rotary positions need an even head size, got {self.head_dim}")

    @classmethod
    def from_hf(cls, config: Mapping) -> LlamaConfig:
        """From a `config.json` of transformers 5 (`rope_parameters`) or of the hub (`rope_theta`, `rope_scaling`).

        Raises:
          ModelError: a required key is missing, or the model uses a variant that this file does not implement.
        """
        for key in ("attention_bias", "mlp_bias"):
            if config.get(key):
                raise ModelError(
                    f"this Llama has {key}, which jtile.models.llama does not implement; use a model without"
                )
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(f"this Llama's MLP uses {config['hidden_act']!r}; jtile.models.llama implements 'silu'")
        hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = _number(config, "rope_theta", 10000.0, float)
        return cls(
            vocab_size=_number(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_number(config, "intermediate_size"),
            num_layers=_number(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_number(config, "num_key_value_heads", heads),
            head_dim=_number(config, "head_dim", hidden // heads),
            norm_eps=_number(config, "rms_norm_eps", 1e-6, float),
            max_length=_number(config, "max_position_embeddings", 2048),
            rope_theta=_number(rope, "rope_theta", theta, float),
            rope_scaling=_rope_scaling(rope, config),
        )

    @classmethod
    def from_gguf(cls, meta: Mapping, vocab_size: int, rope_factors: Sequence[float] = ()) -> LlamaConfig:
        """From the `llama.*` metadata of a GGUF file; `vocab_size` is the number of rows of its embedding and
        `rope_factors` its tensor `rope_freqs.weight`, if there is one."""
        if meta.get("llama.expert_count"):
            raise ModelError("this GGUF is a mixture of experts; jtile.models.llama implements the dense Llama only")
        hidden, heads = _number(meta, "llama.embedding_length"), _number(meta, "llama.attention.head_count")
        head_dim = _number(meta, "llama.attention.key_length", hidden // heads)
        if _number(meta, "llama.rope.dimension_count", head_dim) != head_dim:
            raise ModelError("this GGUF rotates only a part of each head, which jtile.models.llama does not implement")
        kind, factor = meta.get("llama.rope.scaling.type", "none"), meta.get("llama.rope.scaling.factor")
        scaling = None if kind == "none" else _rope_scaling({"type": kind, "factor": factor}, {})
        if len(rope_factors):
            if len(rope_factors) != head_dim // 2:
                raise ModelError(
                    f"rope_freqs.weight has {len(rope_factors)} numbers; heads of {head_dim} need {head_dim // 2}"
                )
            scaling = RopeScaling("factors", factors=tuple(float(f) for f in rope_factors))
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=_number(meta, "llama.feed_forward_length"),
            num_layers=_number(meta, "llama.block_count"),
            num_heads=heads,
            num_kv_heads=_number(meta, "llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            norm_eps=_number(meta, "llama.attention.layer_norm_rms_epsilon", kind=float),
            max_length=_number(meta, "llama.context_length", 2048),
            rope_theta=_number(meta, "llama.rope.freq_base", 10000.0, float),
            rope_scaling=scaling,
        )


def _number(config: Mapping, key: str, default: float | None = None, kind: type = int):
    """The positive number `key` of a configuration; the default stands in for an absent or null entry."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise ModelError(f"the model's configuration lacks {key!r}; the file is no Llama checkpoint, or it is damaged")
    if not isinstance(value, (int, float)) or not 0 < value < float("inf") or kind(value) != value:
        raise ModelError(f"the model's configuration has {key!r} = {value!r}; expected a positive {kind.__name__}")
    return kind(value)


def _rope_scaling(rope: Mapping, config: Mapping) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", _number(rope, "factor", kind=float))
    if kind == "llama3":
        factor, low, high = (
            _number(rope, key, kind=float) for key in ("factor", "low_freq_factor", "high_freq_factor")
        )
        longest = _number(config, "max_position_embeddings", 8192)
        return RopeScaling(kind, factor, low, high, _number(rope, "original_max_position_embeddings", longest))
    raise ModelError(f"unknown rope scaling {kind!r}; jtile.models.llama implements 'default', 'linear' and 'llama3'")


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """float32 [head_dim / 2]: radians that pair i turns per position: theta^(-2i / head_dim), stretched as asked."""
    base = 1.0 / config.rope_theta ** (np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return base.astype(np.float32)
    if scaling.kind == "factors":
        return (base / np.asarray(scaling.factors)).astype(np.float32)
    if scaling.kind == "linear":
        return (base / scaling.factor).astype(np.float32)
    # llama3: keep short wavelengths, divide long ones by the factor, blend linearly in between (in periods per context)
    periods = scaling.original_max_length * base / (2 * math.pi)
    keep = np.clip((periods - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    return (base * (keep + (1 - keep) / scaling.factor)).astype(np.float32)


class Attention(nnx.Module):
    """Grouped-query self-attention; the query, key and value weights are one matrix, so that one kernel call serves."""

    def __init__(self, config: LlamaConfig, qkv: layers.Weight, output: layers.Weight):
        self.qkv, self.output = nnx.Param(qkv), nnx.Param(output)
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim

    def prefill(self, x, residual, cos, sin):
        """x [batch, length, hidden]; returns (residual plus output [batch, length, hidden], (k, v))."""
        qkv = layers.linear(x, self.qkv.get_value())
        q, k, v = layers.split_heads(qkv, cos, sin, self.heads, self.kv_heads)
        mixed = layers.attention(q, k, v)
        return layers.linear(mixed.reshape(*x.shape[:2], -1), self.output.get_value(), residual), (k, v)

    def step(self, x, residual, cos, sin, keys, values, lengths):
        """x [batch, hidden] against the cache of this layer; returns (residual plus output, keys, values)."""
        qkv = layers.linear(x, self.qkv.get_value())
        q, keys, values = layers.append_heads(qkv, cos, sin, lengths, keys, values, self.heads, self.kv_heads)
        mixed = layers.decode_attention(q, keys, values, lengths + 1)
        return layers.linear(mixed.reshape(x.shape[0], -1), self.output.get_value(), residual), keys, values


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, index: int, weight: WeightSource):
        inner, features = config.hidden_size, config.intermediate_size
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        prefix = f"model.layers.{index}."

        self.eps = config.norm_eps
        self.attention_norm = nnx.Param(_f32(weight(f"{prefix}input_layernorm.weight", (inner,))))
        shapes = {"q": (q_rows, inner), "k": (kv_rows, inner), "v": (kv_rows, inner), "o": (inner, q_rows)}
        *qkv, output = (weight(f"{prefix}self_attn.{name}_proj.weight", shape) for name, shape in shapes.items())
        self.attention = Attention(config, _fuse(qkv), output)
        self.mlp_norm = nnx.Param(_f32(weight(f"{prefix}post_attention_layernorm.weight", (inner,))))
        self.gate = nnx.Param(weight(f"{prefix}mlp.gate_proj.weight", (features, inner)))
        self.up = nnx.Param(weight(f"{prefix}mlp.up_proj.weight", (features, inner)))
        self.down = nnx.Param(weight(f"{prefix}mlp.down_proj.weight", (inner, features)))

    def mlp(self, x):
        normed = layers.rms_norm(x, self.mlp_norm.get_value(), self.eps)
        return layers.gated_mlp(normed, self.gate.get_value(), self.up.get_value(), self.down.get_value(), x)

    def prefill(self, x, cos, sin):
        normed = layers.rms_norm(x, self.attention_norm.get_value(), self.eps)
        x, pair = self.attention.prefill(normed, x, cos, sin)
        return self.mlp(x), pair

    def step(self, x, cos, sin, keys, values, lengths):
        normed = layers.rms_norm(x, self.attention_norm.get_value(), self.eps)
        x, keys, values = self.attention.step(normed, x, cos, sin, keys, values, lengths)
        return self.mlp(x), keys, values


WeightSource = Callable[[str, tuple[int, ...]], "jax.Array | QuantizedTensor"]


class Llama(nnx.Module):
    """The decoder. Rows of a batch are right-padded: row b holds `lengths[b]` tokens from position 0 on.

    Causality keeps the padding out of every real position, so no mask travels through the layers.
    """

    def __init__(self, config: LlamaConfig, weight: WeightSource, tied: bool):
        """`weight(name, shape)` gives the checkpoint's tensor of that (transformers) name, checked against `shape`;
        `tied`: the embedding serves as the output head."""
        table = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embedding = nnx.Param(weight("model.embed_tokens.weight", table))
        self.blocks = nnx.List([Block(config, i, weight) for i in range(config.num_layers)])
        self.norm = nnx.Param(_f32(weight("model.norm.weight", (config.hidden_size,))))
        self.output = None if tied else nnx.Param(weight("lm_head.weight", table))

    def _enter(self, ids):
        """(the embeddings [batch, length, hidden] of whole prompts, cos and sin of their positions)."""
        x = layers.embedding(self.embedding.get_value(), ids)
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)
        return x, *layers.rope_angles(positions, jnp.asarray(inverse_frequencies(self.config)))

    def head(self, hidden):
        """Logits float32 [..., vocab] of hidden states [..., hidden]."""
        normed = layers.rms_norm(hidden, self.norm.get_value(), self.config.norm_eps)
        return layers.linear(normed, (self.embedding if self.output is None else self.output).get_value())

    def prefill(self, ids):
        """Runs whole prompts: ids int32 [batch, length].

        Returns (hidden [batch, length, hidden_size] before the final norm, per-layer (key, value) pairs)."""
        x, cos, sin = self._enter(ids)
        pairs = []
        for block in self.blocks:
            x, pair = block.prefill(x, cos, sin)
            pairs.append(pair)
        return x, pairs

    def __call__(self, ids, *, remat: bool = False):
        """Logits float32 [batch, length, vocab] after every token of ids int32 [batch, length], without a cache.

        `remat`: reverse mode keeps only the input of each block, and computes the block again (`jax.checkpoint`).
        """
        x, cos, sin = self._enter(ids)
        for block in self.blocks:
            run = lambda x, block=block: block.prefill(x, cos, sin)[0]
            x = (jax.checkpoint(run) if remat else run)(x)
        return self.head(x)

    def loss(self, ids, lengths=None, remat: bool = False):
        """Mean loss of the next token, in nats: ids int32 [batch, length], right-padded; `lengths` int [batch] counts
        the tokens of each row (default: all). Row b gives `lengths[b] - 1` predictions; at least one in all."""
        targets = ids[:, 1:]
        if lengths is not None:
            real = jnp.arange(1, ids.shape[1], dtype=lengths.dtype)[None, :] < lengths[:, None]
            targets = jnp.where(real, targets, IGNORED)
        losses = ops.cross_entropy(self(ids[:, :-1], remat=remat), targets, ignore=IGNORED)
        return losses.sum() / (targets != IGNORED).sum().astype(losses.dtype)

    def step(self, tokens, cache: kv.KVCache):
        """One token per row: tokens int32 [batch] -> (logits float32 [batch, vocab], the cache one token longer)."""
        x = layers.embedding(self.embedding.get_value(), tokens)
        cos, sin = layers.rope_angles(cache.lengths, jnp.asarray(inverse_frequencies(self.config)))
        keys, values = [], []
        for block, layer_keys, layer_values in zip(self.blocks, cache.keys, cache.values, strict=True):
            x, layer_keys, layer_values = block.step(x, cos, sin, layer_keys, layer_values, cache.lengths)
            keys.append(layer_keys)
            values.append(layer_values)
        return self.head(x), kv.KVCache(tuple(keys), tuple(values), cache.lengths + 1)


def _f32(x):
    return x.dequantize() if isinstance(x, QuantizedTensor) else jnp.asarray(x, jnp.float32)


def _fuse(parts: Sequence) -> layers.Weight:
    """One matrix out of several that share their input, if their storage is alike; otherwise the parts themselves."""
    if all(isinstance(p, QuantizedTensor) for p in parts) and len({p.kind for p in parts}) == 1:
        return QuantizedTensor.concatenate(parts)
    if not any(isinstance(p, QuantizedTensor) for p in parts) and len({p.dtype for p in parts}) == 1:
        return jnp.concatenate(parts, axis=0)
    return tuple(parts)
