"""Qwen3-Next: three gated DeltaNets to one layer of gated attention, and mixtures of experts (Qwen 2025)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
from flax import nnx

from jtile._errors import ModelError

from .config import AttentionConfig, DecoderConfig, WeightSource, read_attention, read_decoder
from .decoder import Attention, Block, GatedMLP
from .entries import count, items, number, table
from .experts import Experts, Mixture
from .gated_delta import DeltaConfig, GatedDeltaNet
from .layers import as_float32
from .qwen3 import MixtureConfig, Router, read_mixture
from .rope import read_rope

KINDS = ("linear_attention", "full_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(DecoderConfig):
    """The sizes of one Qwen3-Next. `linear`: which layers are gated DeltaNets; `shared`: features of the expert that
    every token goes through."""

    intermediate_size: int
    attention: AttentionConfig
    delta: DeltaConfig
    linear: tuple[bool, ...]
    mixture: MixtureConfig
    shared: int

    @classmethod
    def from_hf(cls, config: Mapping) -> Qwen3NextConfig:
        """Reads the sizes from a `config.json` of transformers 5 or of the hub.

        Raises:
          ModelError: a required key is missing, or the model uses a variant that this file does not implement.
        """
        sizes = read_decoder(config)
        head = number(config, "head_dim", 256)
        rope = read_rope(config, head, _rotated(config, head))
        attention = read_attention({**config, "head_dim": head}, norm_eps=sizes["norm_eps"], rope=rope, gated=True)
        return cls(
            **sizes,
            intermediate_size=number(config, "intermediate_size"),
            attention=attention,
            delta=_delta(config, sizes["norm_eps"]),
            linear=_linear(config, sizes["num_layers"]),
            mixture=read_mixture(config, sizes["num_layers"]),
            shared=count(config, "shared_expert_intermediate_size", 512),
        )

    def stored(self, weight: WeightSource) -> WeightSource:
        """The source of tensors as the modules take them. Norms of this model multiply by 1 + w, except those of the
        gated DeltaNets. The projections of the latter have one matrix in a checkpoint and two here."""
        size = self.delta.channels + self.delta.value_heads * self.delta.value

        def read(name: str, shape: tuple[int, ...]):
            for gates, part in enumerate(("in_proj_qkv.", "in_proj_z.")):
                if part in name:
                    both = weight(name.replace(part, "in_proj_qkvz."), (size, *shape[1:]))
                    return self.delta.part(both, bool(gates))
            plus = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
            return as_float32(weight(name, shape)) + 1 if plus else weight(name, shape)

        return read

    def block(self, index: int, weight: WeightSource) -> Block:
        prefix, hidden = f"model.layers.{index}.", self.hidden_size
        if self.linear[index]:
            mixer = GatedDeltaNet(self.delta, self.attention.rope, hidden, weight, f"{prefix}linear_attn.")
        else:
            mixer = Attention(self.attention, hidden, weight, f"{prefix}self_attn.")
        if index not in self.mixture.layers:
            return Block(self, weight, prefix, mixer, GatedMLP(hidden, self.intermediate_size, weight, f"{prefix}mlp."))
        router = Router(self.mixture, hidden, weight, f"{prefix}mlp.gate.")
        experts = Experts(weight, f"{prefix}mlp.experts.", self.mixture.experts, self.mixture.features, hidden)
        shared = SharedExpert(hidden, self.shared, weight, f"{prefix}mlp.") if self.shared else None
        return Block(self, weight, prefix, mixer, Mixture(router, experts, shared))


def _rotated(config: Mapping, head: int) -> int:
    """How many features of a head are rotated."""
    entries = table(config, "rope_parameters", "rope_scaling")
    share = number(config, "partial_rotary_factor", 0.25, float)
    return int(head * number(entries, "partial_rotary_factor", share, float))


def _delta(config: Mapping, eps: float) -> DeltaConfig:
    sizes = DeltaConfig(
        heads=number(config, "linear_num_key_heads", 16),
        value_heads=number(config, "linear_num_value_heads", 32),
        key=number(config, "linear_key_head_dim", 128),
        value=number(config, "linear_value_head_dim", 128),
        width=number(config, "linear_conv_kernel_dim", 4),
        norm_eps=eps,
    )
    if sizes.value_heads % sizes.heads:
        raise ModelError(f"{sizes.value_heads} heads of values do not divide into {sizes.heads} heads of keys")
    return sizes


def _linear(config: Mapping, num_layers: int) -> tuple[bool, ...]:
    every = number(config, "full_attention_interval", 4)
    kinds = items(config, "layer_types", str) or [KINDS[(i + 1) % every == 0] for i in range(num_layers)]
    if len(kinds) != num_layers or not all(kind in KINDS for kind in kinds):
        raise ModelError(f"the configuration's layer_types {kinds} are not {num_layers} of {', '.join(KINDS)}")
    return tuple(kind == "linear_attention" for kind in kinds)


class SharedExpert(nnx.Module):
    """An MLP for every token; its output is multiplied by the sigmoid of a number that is computed from the token."""

    def __init__(self, hidden: int, features: int, weight: WeightSource, prefix: str):
        self.mlp = GatedMLP(hidden, features, weight, f"{prefix}shared_expert.")
        self.gate = nnx.Param(as_float32(weight(f"{prefix}shared_expert_gate.weight", (1, hidden))))

    def __call__(self, x):
        """x [..., hidden] -> [..., hidden]."""
        gate = (x.astype("float32") * self.gate.get_value().reshape((1,) * (x.ndim - 1) + (-1,))).sum(-1, keepdims=True)
        return (self.mlp(x).astype("float32") * jax.nn.sigmoid(gate)).astype(x.dtype)
