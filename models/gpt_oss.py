"""GPT-OSS: sinks of attention, windows in every other layer, experts with biases and bounded gates (OpenAI 2025)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jtile import ops
from jtile._errors import ModelError

from . import experts as mixtures
from . import few_tokens, layers
from .config import AttentionConfig, DecoderConfig, WeightSource, read_attention, read_decoder, read_layer_types
from .decoder import Attention, Block
from .entries import number
from .experts import Mixture
from .layers import as_float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """The sizes of one GPT-OSS: every token goes through `chosen` of `experts` MLPs of `features` each. Gates g and
    inputs u of an expert become min(g, limit) sigmoid(alpha min(g, limit)) (1 + clip(u, limit)). `windows`: the
    window of each layer's attention (None: it sees all keys)."""

    attention: AttentionConfig
    windows: tuple[int | None, ...]
    experts: int
    chosen: int
    features: int
    alpha: float
    limit: float

    def __post_init__(self):
        if self.chosen > self.experts:
            raise ModelError(f"the router chooses {self.chosen} experts of {self.experts}")

    @classmethod
    def from_hf(cls, config: Mapping) -> GptOssConfig:
        """Reads the sizes from a `config.json` of transformers 5 or of the hub.

        Raises:
          ModelError: a required key is missing, or the model uses a variant that this file does not implement.
        """
        sizes = read_decoder({**config, "attention_bias": False})
        biased = bool(config.get("attention_bias", True))
        attention = read_attention(config, biased=biased, output_biased=biased, sinks=True)
        window = number(config, "sliding_window", 128)
        return cls(
            **sizes,
            attention=attention,
            windows=read_layer_types(config, sizes["num_layers"], window, lambda i: i % 2 == 0),
            experts=number(config, "num_local_experts", config.get("num_experts", 128)),
            chosen=number(config, "num_experts_per_tok", config.get("experts_per_token", 4)),
            features=number(config, "intermediate_size"),
            alpha=number(config, "swiglu_alpha", 1.702, float),
            limit=number(config, "swiglu_limit", 7.0, float),
        )

    def block(self, index: int, weight: WeightSource) -> Block:
        prefix, hidden = f"model.layers.{index}.", self.hidden_size
        config = dataclasses.replace(self.attention, window=self.windows[index])
        attention = Attention(config, hidden, weight, f"{prefix}self_attn.")
        router = Router(self, weight, f"{prefix}mlp.router.")
        return Block(self, weight, prefix, attention, Mixture(router, Experts(self, weight, f"{prefix}mlp.experts.")))


class Router(nnx.Module):
    """The experts of the highest scores, weighted by the softmax of these."""

    def __init__(self, config: GptOssConfig, weight: WeightSource, prefix: str):
        self.chosen = config.chosen
        self.weight = nnx.Param(as_float32(weight(f"{prefix}weight", (config.experts, config.hidden_size))))
        self.bias = nnx.Param(as_float32(weight(f"{prefix}bias", (config.experts,))))

    def __call__(self, x) -> tuple[jax.Array, jax.Array]:
        """x float [tokens, hidden] -> experts int32 [tokens, chosen], their weights float32 [tokens, chosen]."""
        scores = layers.with_bias(few_tokens.scores(x, self.weight.get_value()), self.bias.get_value())
        best, experts = ops.top_k(scores, self.chosen)
        return experts, ops.softmax(best)


class Experts(nnx.Module):
    """The gated MLPs of a mixture. A checkpoint has rows of gate and up alternately, and floats as matrices [in,
    out]."""

    def __init__(self, config: GptOssConfig, weight: WeightSource, prefix: str):
        count, features, hidden = config.experts, config.features, config.hidden_size
        self.alpha, self.limit = config.alpha, config.limit
        into = mixtures.out_in(weight(f"{prefix}gate_up_proj", (count, hidden, 2 * features)))
        parted = lambda x: jnp.concatenate([x[:, ::2], x[:, 1::2]], axis=1)  # the gate's rows come first
        self.gate_up = nnx.Param(jax.tree.map(parted, into))
        self.down = nnx.Param(mixtures.out_in(weight(f"{prefix}down_proj", (count, features, hidden))))
        self.gate_up_bias = nnx.Param(parted(as_float32(weight(f"{prefix}gate_up_proj_bias", (count, 2 * features)))))
        self.down_bias = nnx.Param(as_float32(weight(f"{prefix}down_proj_bias", (count, hidden))))

    def _gated(self, y):
        gate, up = jnp.split(y.astype(jnp.float32), 2, axis=-1)
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)).astype(y.dtype)

    def __call__(self, x, experts, weights):
        """See `experts.mixture`."""
        biases = self.gate_up_bias.get_value(), self.down_bias.get_value()
        matrices = self.gate_up.get_value(), self.down.get_value()
        return mixtures.mixture(x, experts, weights, *matrices, biases, self._gated)

    def of_sorted(self, x, sizes):
        """See `experts.sorted_mixture`."""
        biases = self.gate_up_bias.get_value(), self.down_bias.get_value()
        matrices = self.gate_up.get_value(), self.down.get_value()
        return mixtures.sorted_mixture(x, sizes, *matrices, biases, self._gated)
