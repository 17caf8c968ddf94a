"""Llama: a decoder with grouped-query attention, rotary positions, RMS norms and a gated MLP (Touvron et al. 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .config import AttentionConfig, DecoderConfig, WeightSource, read_attention, read_decoder
from .decoder import Attention, Block, GatedMLP
from .entries import number


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The sizes of one Llama."""

    intermediate_size: int
    attention: AttentionConfig

    @classmethod
    def from_hf(cls, config: Mapping) -> LlamaConfig:
        """Reads the sizes from a `config.json` of transformers 5 (`rope_parameters`) or of the hub (`rope_theta`,
        `rope_scaling`).

        Raises:
          ModelError: a required key is missing, or the model uses a variant that this file does not implement.
        """
        features = number(config, "intermediate_size")
        return cls(**read_decoder(config), intermediate_size=features, attention=read_attention(config))

    def block(self, index: int, weight: WeightSource) -> Block:
        prefix = f"model.layers.{index}."
        attention = Attention(self.attention, self.hidden_size, weight, f"{prefix}self_attn.")
        mlp = GatedMLP(self.hidden_size, self.intermediate_size, weight, f"{prefix}mlp.")
        return Block(self, weight, prefix, attention, mlp)
