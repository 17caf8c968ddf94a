"""Qwen3: Llama's decoder with norms of each head's queries and keys, dense or with mixtures of experts (Qwen 2025)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jtile._errors import ModelError

from . import few_tokens
from .config import (
    AttentionConfig,
    DecoderConfig,
    WeightSource,
    read_attention,
    read_decoder,
    read_layer_types,
)
from .decoder import Attention, Block, GatedMLP
from .entries import count, items, number
from .experts import Experts, Mixture
from .layers import as_float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Every token goes through `chosen` of `experts` MLPs of `features` each, weighted by their probabilities, which
    are divided by their sum if `normalised`. `layers`: the layers that have experts, not one MLP."""

    experts: int
    chosen: int
    features: int
    normalised: bool
    layers: tuple[int, ...]

    def __post_init__(self):
        if self.chosen > self.experts:
            raise ModelError(f"the router chooses {self.chosen} experts of {self.experts}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """The sizes of one Qwen3; `windows`: the window of each layer's attention (None: it sees all keys)."""

    intermediate_size: int
    attention: AttentionConfig
    windows: tuple[int | None, ...]
    mixture: MixtureConfig | None = None

    @classmethod
    def from_hf(cls, config: Mapping) -> Qwen3Config:
        """Reads the sizes from a `config.json` of transformers 5 or of the hub.

        Raises:
          ModelError: a required key is missing, or the model uses a variant that this file does not implement.
        """
        sizes, mixed = read_decoder(config), config.get("model_type") == "qwen3_moe"
        window = number(config, "sliding_window", 4096) if config.get("use_sliding_window") else None
        # dense models have windows from some layer on, those with experts in all layers
        start = 0 if mixed else count(config, "max_window_layers", 28)
        return cls(
            **sizes,
            intermediate_size=number(config, "intermediate_size"),
            attention=read_attention(config, norm_eps=sizes["norm_eps"]),
            windows=read_layer_types(config, sizes["num_layers"], window, lambda i: window is not None and i >= start),
            mixture=read_mixture(config, sizes["num_layers"]) if mixed else None,
        )

    def block(self, index: int, weight: WeightSource) -> Block:
        prefix, hidden = f"model.layers.{index}.", self.hidden_size
        attention = dataclasses.replace(self.attention, window=self.windows[index])
        if self.mixture is not None and index in self.mixture.layers:
            router = Router(self.mixture, hidden, weight, f"{prefix}mlp.gate.")
            experts = Experts(weight, f"{prefix}mlp.experts.", self.mixture.experts, self.mixture.features, hidden)
            mlp = Mixture(router, experts)
        else:
            mlp = GatedMLP(hidden, self.intermediate_size, weight, f"{prefix}mlp.")
        return Block(self, weight, prefix, Attention(attention, hidden, weight, f"{prefix}self_attn."), mlp)


def read_mixture(config: Mapping, num_layers: int) -> MixtureConfig:
    """The mixtures of a `config.json`, and which layers have them."""
    every, dense = number(config, "decoder_sparse_step", 1), items(config, "mlp_only_layers", int)
    return MixtureConfig(
        experts=number(config, "num_experts", config.get("num_local_experts")),
        chosen=number(config, "num_experts_per_tok", 8),
        features=number(config, "moe_intermediate_size", 768),
        normalised=bool(config.get("norm_topk_prob", False)),
        layers=tuple(i for i in range(num_layers) if (i + 1) % every == 0 and i not in dense),
    )


class Router(nnx.Module):
    """The most probable experts of each token."""

    def __init__(self, config: MixtureConfig, hidden: int, weight: WeightSource, prefix: str):
        self.config = config
        self.weight = nnx.Param(as_float32(weight(f"{prefix}weight", (config.experts, hidden))))

    @property
    def probable(self) -> dict[str, Any]:
        """The options of `few_tokens.choose`: how many experts a token has, and whether their weights sum to 1."""
        return {"k": self.config.chosen, "normalised": self.config.normalised}

    def __call__(self, x) -> tuple[jax.Array, jax.Array]:
        """x float [tokens, hidden] -> experts int32 [tokens, chosen], their weights float32 [tokens, chosen]."""
        return few_tokens.choose(x, self.weight.get_value(), **self.probable)
