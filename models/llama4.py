"""The text part of Llama 4: attention in chunks with rotations, and over all tokens without them; experts whose inputs
are weighted
(Meta 2025)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jtile import ops
from jtile._errors import ModelError

from . import experts as mixtures
from . import few_tokens
from .config import AttentionConfig, DecoderConfig, WeightSource, read_attention, read_decoder
from .decoder import Attention, Block, GatedMLP
from .entries import items, number
from .experts import Mixture
from .layers import as_float32
from .qwen3 import MixtureConfig
from .rope import Rope, read_rope

KINDS = ("chunked_attention", "full_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama4Config(DecoderConfig):
    """The sizes of one Llama 4. `attention`: the attention of layers with rotations; `still`: the rope of the others;
    `turned`: which layers have rotations; `chunks`: the chunk of each layer, see `AttentionConfig`;
    `intermediate_size`: that of a plain MLP."""

    attention: AttentionConfig
    still: Rope
    turned: tuple[bool, ...]
    chunks: tuple[int | None, ...]
    mixture: MixtureConfig
    intermediate_size: int

    @classmethod
    def from_hf(cls, config: Mapping) -> Llama4Config:
        """Reads the sizes from a `config.json` of transformers 5 or of the hub, or from its `text_config`.

        Raises:
          ModelError: a required key is missing, or the model uses a variant that this file does not implement.
        """
        sizes = read_decoder({"rms_norm_eps": 1e-5, **config})
        layers, head = sizes["num_layers"], number(config, "head_dim", 128)
        rope = read_rope({"rope_theta": 500000.0, **config}, head, adjacent=True)
        if rope.attention_factor != 1:
            raise ModelError(
                "this Llama 4 scales its rotations, behind which its norms stand; jtile runs 'default' and 'llama3'"
            )
        eps = sizes["norm_eps"] if config.get("use_qk_norm", True) else None
        turned = _turned(config, layers)
        return cls(
            **sizes,
            attention=read_attention({**config, "head_dim": head}, rope=rope, norm_eps=eps),
            still=Rope(head, 1.0, rotated=0, tempered=_tempered(config)),
            turned=turned,
            chunks=_chunks(config, turned),
            mixture=_mixture(config, layers),
            intermediate_size=number(config, "intermediate_size_mlp", 16384),
        )

    def stored(self, weight: WeightSource) -> WeightSource:
        """The norms of queries and keys have no weights in checkpoints, and are 1 here. They come before rotations,
        which change no length."""

        def read(name: str, shape: tuple[int, ...]):
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                return jnp.ones(shape, jnp.float32)
            return weight(name, shape)

        return read

    def block(self, index: int, weight: WeightSource) -> Block:
        prefix, hidden, config = f"model.layers.{index}.", self.hidden_size, self.attention
        if not self.turned[index]:
            config = dataclasses.replace(config, rope=self.still, norm_eps=None)
        config = dataclasses.replace(config, chunk=self.chunks[index])
        attention = Attention(config, hidden, weight, f"{prefix}self_attn.")
        source = f"{prefix}feed_forward."
        if index not in self.mixture.layers:
            return Block(self, weight, prefix, attention, GatedMLP(hidden, self.intermediate_size, weight, source))
        router = Router(self.mixture, hidden, weight, f"{source}router.")
        experts = Experts(self.mixture, hidden, weight, f"{source}experts.")
        shared = GatedMLP(hidden, self.mixture.features, weight, f"{source}shared_expert.")
        return Block(self, weight, prefix, attention, Mixture(router, experts, shared, weighted_rows=True))


def _turned(config: Mapping, layers: int) -> tuple[bool, ...]:
    every = number(config, "no_rope_layer_interval", 4)
    found = items(config, "no_rope_layers", int) or [int((i + 1) % every != 0) for i in range(layers)]
    if len(found) < layers or not set(found) <= {0, 1}:
        raise ModelError(f"the configuration's no_rope_layers {found} are not {layers} of 0 and 1")
    return tuple(bool(one) for one in found[:layers])


def _chunks(config: Mapping, turned: tuple[bool, ...]) -> tuple[int | None, ...]:
    size = None if config.get("attention_chunk_size", 8192) is None else number(config, "attention_chunk_size", 8192)
    kinds = items(config, "layer_types", str) or [KINDS[not one or size is None] for one in turned]
    if len(kinds) != len(turned) or not all(kind in KINDS for kind in kinds):
        raise ModelError(f"the configuration's layer_types {kinds} are not {len(turned)} of {', '.join(KINDS)}")
    if KINDS[0] in kinds and size is None:
        raise ModelError(
            "the configuration's layer_types ask for chunked_attention, but it has no attention_chunk_size"
        )
    return tuple(size if kind == KINDS[0] else None for kind in kinds)


def _tempered(config: Mapping) -> tuple[float, float] | None:
    if not config.get("attn_temperature_tuning", True):
        return None
    return number(config, "attn_scale", 0.1, float), float(number(config, "floor_scale", 8192))


def _mixture(config: Mapping, layers: int) -> MixtureConfig:
    every = number(config, "interleave_moe_layer_step", 1)
    asked = config.get("moe_layers")
    return MixtureConfig(
        experts=number(config, "num_local_experts", config.get("num_experts", 16)),
        chosen=number(config, "num_experts_per_tok", 1),
        features=number(config, "intermediate_size"),
        normalised=False,
        layers=tuple(range(every - 1, layers, every) if asked is None else items(config, "moe_layers", int)),
    )


class Router(nnx.Module):
    """The experts of the highest scores, weighted by the sigmoid of these."""

    def __init__(self, config: MixtureConfig, hidden: int, weight: WeightSource, prefix: str):
        self.chosen = config.chosen
        self.weight = nnx.Param(as_float32(weight(f"{prefix}weight", (config.experts, hidden))))

    def __call__(self, x) -> tuple[jax.Array, jax.Array]:
        """x float [tokens, hidden] -> experts int32 [tokens, chosen], their weights float32 [tokens, chosen]."""
        best, experts = ops.top_k(few_tokens.scores(x, self.weight.get_value()), self.chosen)
        return experts, jax.nn.sigmoid(best)


class Experts(nnx.Module):
    """The gated MLPs of a mixture. A checkpoint has float matrices [in, out], in which the gate comes before up."""

    def __init__(self, config: MixtureConfig, hidden: int, weight: WeightSource, prefix: str):
        count, features = config.experts, config.features
        self.gate_up = nnx.Param(mixtures.out_in(weight(f"{prefix}gate_up_proj", (count, hidden, 2 * features))))
        self.down = nnx.Param(mixtures.out_in(weight(f"{prefix}down_proj", (count, features, hidden))))

    def __call__(self, x, experts, weights):
        """See `experts.mixture`."""
        return mixtures.mixture(x, experts, weights, self.gate_up.get_value(), self.down.get_value())

    def of_sorted(self, x, sizes):
        """See `experts.sorted_mixture`."""
        return mixtures.sorted_mixture(x, sizes, self.gate_up.get_value(), self.down.get_value())
