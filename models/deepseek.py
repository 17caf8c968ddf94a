"""DeepSeek-V3: latent attention, and after the first layers a mixture of many small experts (DeepSeek-AI, 2024).

DeepSeek-V3.2 is the same with an indexer, which chooses the keys that a token attends to (DeepSeek-AI, 2025).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from flax import nnx

from jtile._errors import ModelError

from . import few_tokens, grouped_choice
from .config import DecoderConfig, WeightSource, read_decoder
from .decoder import Block, GatedMLP
from .entries import count, items, number, table
from .experts import Experts, Mixture
from .indexer import IndexConfig
from .latent import LatentAttention, LatentConfig
from .layers import as_float32
from .rope import Rope, read_rope, yarn_scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Sizes of a mixture. Experts stand in `groups` of equal size, of which the best `chosen_groups` take part. A token
    goes through the best `chosen` experts of these groups, weighted by `scale` times their scores, which are first
    divided by their sum if `normalised`. `shared`: experts that every token goes through; `features`: those of one
    expert."""

    experts: int
    chosen: int
    groups: int
    chosen_groups: int
    normalised: bool
    scale: float
    shared: int
    features: int

    def __post_init__(self):
        if self.experts % self.groups or self.experts // self.groups < 2:
            raise ModelError(f"{self.experts} experts do not make {self.groups} groups of equal size, of two or more")
        if self.chosen_groups > self.groups:
            raise ModelError(f"the router chooses topk_group = {self.chosen_groups} of n_group = {self.groups} groups")
        if self.chosen > self.chosen_groups * (self.experts // self.groups):
            raise ModelError(
                f"the router chooses {self.chosen} experts, but its {self.chosen_groups} groups hold "
                f"{self.chosen_groups * (self.experts // self.groups)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """The sizes of one DeepSeek-V3 or V3.2. `dense`: how many layers at the beginning have a plain MLP, of `features`
    features."""

    attention: LatentConfig
    mixture: MixtureConfig
    dense: int
    features: int

    @classmethod
    def from_hf(cls, config: Mapping) -> DeepseekConfig:
        """Reads the sizes from a `config.json` of transformers 5 or of the hub.

        Raises:
          ModelError: a required key is missing, or the model uses a variant that this file does not implement.
        """
        implemented = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        for key, value in implemented.items():
            if config.get(key, value) != value:
                raise ModelError(
                    f"this DeepSeek has {key} = {config[key]!r}; jtile.models.deepseek implements {value!r}"
                )
        dense = count(config, "first_k_dense_replace", 3)
        kinds = [("sparse", "dense")[i < dense] for i in range(number(config, "num_hidden_layers"))]
        if items(config, "mlp_layer_types", str) not in ([], kinds):
            raise ModelError(f"mlp_layer_types are not {dense} times 'dense' (first_k_dense_replace), then 'sparse'")
        return cls(
            **read_decoder(config),
            attention=_attention(config),
            mixture=_mixture(config),
            dense=dense,
            features=number(config, "intermediate_size"),
        )

    def block(self, index: int, weight: WeightSource) -> nnx.Module:
        prefix, hidden = f"model.layers.{index}.", self.hidden_size
        attention = LatentAttention(self.attention, hidden, weight, f"{prefix}self_attn.")
        if index < self.dense:
            mlp = GatedMLP(hidden, self.features, weight, f"{prefix}mlp.")
        else:
            mlp = _experts(self.mixture, hidden, weight, f"{prefix}mlp.")
        return Block(self, weight, prefix, attention, mlp)


def _attention(config: Mapping) -> LatentConfig:
    rope = read_rope(config, number(config, "qk_rope_head_dim"))
    plain = number(config, "qk_nope_head_dim")
    return LatentConfig(
        heads=number(config, "num_attention_heads"),
        query_rank=None if config.get("q_lora_rank") is None else number(config, "q_lora_rank"),
        rank=number(config, "kv_lora_rank"),
        plain=plain,
        value=number(config, "v_head_dim"),
        rope=rope,
        scale=_score_scale(plain + rope.size, rope, config),
        adjacent=bool(config.get("rope_interleave", True)),
        index=_index(config, rope) if config.get("model_type") == "deepseek_v32" else None,
    )


def _index(config: Mapping, rope: Rope) -> IndexConfig:
    number(config, "q_lora_rank")  # the indexer's queries come from that vector
    found = IndexConfig(
        heads=number(config, "index_n_heads", 64),
        size=number(config, "index_head_dim", 128),
        count=number(config, "index_topk", 2048),
    )
    if found.size <= rope.size:
        raise ModelError(
            f"the indexer rotates {rope.size} features of a head (qk_rope_head_dim), which has only {found.size} of "
            "them (index_head_dim); expected more"
        )
    return found


def _score_scale(size: int, rope: Rope, config: Mapping) -> float:
    """1 / sqrt(size), times the square of YaRN's factor for `mscale_all_dim`, if the model has one."""
    entries = table(config, "rope_parameters", "rope_scaling")
    if rope.scaling is None or not entries.get("mscale_all_dim"):
        return size**-0.5
    return size**-0.5 * yarn_scale(rope.scaling.factor, number(entries, "mscale_all_dim", kind=float)) ** 2


def _mixture(config: Mapping) -> MixtureConfig:
    return MixtureConfig(
        experts=number(config, "n_routed_experts"),
        chosen=number(config, "num_experts_per_tok"),
        groups=number(config, "n_group", 1),
        chosen_groups=number(config, "topk_group", 1),
        normalised=bool(config.get("norm_topk_prob", True)),
        scale=number(config, "routed_scaling_factor", 1.0, float),
        shared=count(config, "n_shared_experts", 0),
        features=number(config, "moe_intermediate_size"),
    )


def _experts(config: MixtureConfig, hidden: int, weight: WeightSource, prefix: str) -> Mixture:
    """The experts of a layer, with the shared ones as one gated MLP."""
    experts = Experts(weight, f"{prefix}experts.", config.experts, config.features, hidden)
    shared = config.shared * config.features
    together = GatedMLP(hidden, shared, weight, f"{prefix}shared_experts.") if shared else None
    return Mixture(Router(config, hidden, weight, f"{prefix}gate."), experts, together)


class Router(nnx.Module):
    """Which experts a token goes through. A learned bias, which balances their load, takes part in the choice only."""

    def __init__(self, config: MixtureConfig, hidden: int, weight: WeightSource, prefix: str):
        self.config = config
        self.weight = nnx.Param(as_float32(weight(f"{prefix}weight", (config.experts, hidden))))
        self.bias = nnx.Param(as_float32(weight(f"{prefix}e_score_correction_bias", (config.experts,))))

    def __call__(self, x):
        """x float [tokens, hidden] -> experts int32 [tokens, chosen], their weights float32 [tokens, chosen]."""
        c, bias = self.config, self.bias.get_value()
        options = {"groups": c.groups, "best": c.chosen_groups, "k": c.chosen}
        options |= {"normalised": c.normalised, "scale": float(c.scale)}
        parts = few_tokens.score_parts(x, self.weight.get_value())
        if x.shape[0] and grouped_choice.fits(c.experts, c.groups, c.chosen_groups, c.chosen):
            return grouped_choice.best(parts, bias, **options)
        return grouped_choice.choose(few_tokens.summed(parts), bias, **options)
