"""Mixtral: Mistral with a mixture of experts in every layer (Jiang et al. 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from . import mistral
from .config import WeightSource
from .decoder import Attention, Block
from .entries import number
from .experts import Experts, Mixture
from .llama import LlamaConfig
from .qwen3 import MixtureConfig, Router

NAMES = {"gate": "w1", "up": "w3", "down": "w2"}  # what checkpoints call the matrices of an expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """The sizes of one Mixtral; `intermediate_size` is that of one expert."""

    mixture: MixtureConfig

    @classmethod
    def from_hf(cls, config: Mapping) -> MixtralConfig:
        """Reads the sizes from a `config.json` of transformers 5 or of the hub.

        Raises:
          ModelError: a required key is missing, or the model uses a variant that this file does not implement.
        """
        plain = mistral.from_hf(config)
        mixture = MixtureConfig(
            experts=number(config, "num_local_experts", config.get("num_experts", 8)),
            chosen=number(config, "num_experts_per_tok", 2),
            features=plain.intermediate_size,
            normalised=True,
            layers=tuple(range(plain.num_layers)),
        )
        fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        return cls(**fields, mixture=mixture)

    def block(self, index: int, weight: WeightSource) -> Block:
        prefix, hidden, mixture = f"model.layers.{index}.", self.hidden_size, self.mixture
        attention = Attention(self.attention, hidden, weight, f"{prefix}self_attn.")
        router = Router(mixture, hidden, weight, f"{prefix}block_sparse_moe.gate.")
        source = f"{prefix}block_sparse_moe.experts."
        experts = Experts(weight, source, mixture.experts, mixture.features, hidden, NAMES)
        return Block(self, weight, prefix, attention, Mixture(router, experts))
