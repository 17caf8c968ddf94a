"""Llama: a decoder with grouped-query attention, rotary positions, RMS norms and a gated MLP (Touvron et al. 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jtile._errors import ModelError

from .config import AttentionConfig, DecoderConfig, WeightSource, read_attention, read_decoder
from .decoder import Attention, Block, GatedMLP
from .entries import number
from .rope import Rope, RopeScaling, read_scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The sizes of one Llama."""

    intermediate_size: int
    attention: AttentionConfig

    @classmethod
    def from_hf(cls, config: Mapping) -> LlamaConfig:
        """From a `config.json` of transformers 5 (`rope_parameters`) or of the hub (`rope_theta`, `rope_scaling`).

        Raises:
          ModelError: a required key is missing, or the model uses a variant that this file does not implement.
        """
        features = number(config, "intermediate_size")
        return cls(**read_decoder(config), intermediate_size=features, attention=read_attention(config))

    @classmethod
    def from_gguf(cls, meta: Mapping, vocab_size: int, rope_factors: Sequence[float] = ()) -> LlamaConfig:
        """From the `llama.*` metadata of a GGUF file; `vocab_size` is the number of rows of its embedding and
        `rope_factors` its tensor `rope_freqs.weight`, if there is one."""
        if meta.get("llama.expert_count"):
            raise ModelError("this GGUF is a mixture of experts; jtile.models.llama implements the dense Llama only")
        hidden, heads = number(meta, "llama.embedding_length"), number(meta, "llama.attention.head_count")
        head_dim = number(meta, "llama.attention.key_length", hidden // heads)
        if number(meta, "llama.rope.dimension_count", head_dim) != head_dim:
            raise ModelError("this GGUF rotates only a part of each head, which jtile.models.llama does not implement")
        theta = number(meta, "llama.rope.freq_base", 10000.0, float)
        attention = AttentionConfig(
            heads=heads,
            kv_heads=number(meta, "llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            rope=Rope(head_dim, theta, _gguf_scaling(meta, head_dim, rope_factors)),
        )
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=number(meta, "llama.feed_forward_length"),
            num_layers=number(meta, "llama.block_count"),
            norm_eps=number(meta, "llama.attention.layer_norm_rms_epsilon", kind=float),
            max_length=number(meta, "llama.context_length", 2048),
            attention=attention,
        )

    def block(self, index: int, weight: WeightSource) -> Block:
        prefix = f"model.layers.{index}."
        attention = Attention(self.attention, self.hidden_size, weight, f"{prefix}self_attn.")
        mlp = GatedMLP(self.hidden_size, self.intermediate_size, weight, f"{prefix}mlp.")
        return Block(self, weight, prefix, attention, mlp)


def _gguf_scaling(meta: Mapping, head_dim: int, factors: Sequence[float]) -> RopeScaling | None:
    if len(factors):
        if len(factors) != head_dim // 2:
            raise ModelError(f"rope_freqs.weight has {len(factors)} numbers; heads of {head_dim} need {head_dim // 2}")
        return RopeScaling("factors", factors=tuple(float(f) for f in factors))
    kind, factor = meta.get("llama.rope.scaling.type", "none"), meta.get("llama.rope.scaling.factor")
    return None if kind == "none" else read_scaling({"type": kind, "factor": factor}, {})
