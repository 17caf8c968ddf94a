"""Gemma 2 and 3: norms on both sides of attention and MLP, windows in most layers, bounded scores (Gemma Team 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from flax import nnx

from jtile._errors import ModelError

from . import layers
from .config import (
    AttentionConfig,
    DecoderConfig,
    WeightSource,
    read_attention,
    read_decoder,
    read_layer_types,
)
from .decoder import Attention, GatedMLP, enter, mlp_behind_norm, tokens_at
from .entries import number, table
from .layers import as_float32
from .rope import Rope, read_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """The sizes of one Gemma; `windows`: the window of each layer's attention (None: it sees all keys); `window_rope`:
    the rotation of layers with a window."""

    intermediate_size: int
    attention: AttentionConfig
    windows: tuple[int | None, ...]
    window_rope: Rope
    tied: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, config: Mapping) -> GemmaConfig:
        """Reads the sizes from a `config.json` of transformers 5 or of the hub, of the types "gemma2" and
        "gemma3_text".

        Raises:
          ModelError: a required key is missing, or the model uses a variant that this file does not implement.
        """
        if config.get("use_bidirectional_attention"):
            raise ModelError("this Gemma has use_bidirectional_attention; jtile.models.gemma is causal")
        third, sizes = config.get("model_type") == "gemma3_text", read_decoder(config, "gelu_pytorch_tanh")
        rope, window_rope = _ropes(config, number(config, "head_dim", 256), third)
        attention = read_attention(
            {**config, "head_dim": rope.size},
            rope=rope,
            norm_eps=sizes["norm_eps"] if third else None,
            scale=number(config, "query_pre_attn_scalar", 256, float) ** -0.5,
            softcap=_bound(config, "attn_logit_softcapping", None if third else 50.0),
        )
        pattern = config.get("_sliding_window_pattern") or 6  # the last of every so many layers sees all keys
        every = number(config, "sliding_window_pattern", pattern) if third else 2
        window = number(config, "sliding_window", 4096)
        return cls(
            **sizes,
            embedding_scale=sizes["hidden_size"] ** 0.5,
            softcap=_bound(config, "final_logit_softcapping", None if third else 30.0),
            intermediate_size=number(config, "intermediate_size"),
            attention=attention,
            windows=read_layer_types(config, sizes["num_layers"], window, lambda i: (i + 1) % every != 0),
            window_rope=window_rope,
        )

    def stored(self, weight: WeightSource) -> WeightSource:
        """The source of tensors as the modules take them. Norms multiply by 1 + w, so that 1 is added to their weights
        as they are read."""

        def read(name: str, shape: tuple[int, ...]):
            return as_float32(weight(name, shape)) + 1 if name.endswith("norm.weight") else weight(name, shape)

        return read

    def block(self, index: int, weight: WeightSource) -> Block:
        prefix, window = f"model.layers.{index}.", self.windows[index]
        rope = self.attention.rope if window is None else self.window_rope
        config = dataclasses.replace(self.attention, window=window, rope=rope)
        attention = Attention(config, self.hidden_size, weight, f"{prefix}self_attn.")
        mlp = GatedMLP(self.hidden_size, self.intermediate_size, weight, f"{prefix}mlp.", "gelu_tanh")
        return Block(self, weight, prefix, attention, mlp)


def _bound(config: Mapping, key: str, default: float | None) -> float | None:
    """The soft bound `key` of a configuration; null stands for no bound."""
    return None if config.get(key, default) is None else number(config, key, default, float)


def _ropes(config: Mapping, size: int, third: bool) -> tuple[Rope, Rope]:
    """The rotations of layers that see all keys, and of those with a window."""
    parameters = table(config, "rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    if all(kind in parameters for kind in kinds):
        full, sliding = (read_rope({**config, "rope_parameters": parameters[kind]}, size) for kind in kinds)
        return full, sliding
    full = read_rope({"rope_theta": 1e6 if third else 1e4, **config}, size)
    return full, Rope(size, number(config, "rope_local_base_freq", 1e4, float)) if third else full


class Block(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: GemmaConfig, weight: WeightSource, prefix: str, attention: Attention, mlp: GatedMLP):
        norm = lambda name: nnx.Param(weight(f"{prefix}{name}_layernorm.weight", (config.hidden_size,)))
        self.eps, self.rope = config.norm_eps, attention.rope
        self.attention_norm, self.attention, self.attended_norm = norm("input"), attention, norm("post_attention")
        self.mlp_norm, self.mlp, self.mixed_norm = norm("pre_feedforward"), mlp, norm("post_feedforward")

    def _run(self, x, delta, attend, at=None, hold: bool = False):
        """((x, delta) behind this block, the entry of the cache) for x + delta in front of it; `attend(entered)` runs
        the attention; at: see `decoder.Block.prefill`; hold: see `decoder.enter`."""
        norm = lambda y, weight: layers.rms_norm(layers.whole(y), weight.get_value(), self.eps)
        x, entered = enter(self.attention, x, delta, self.attention_norm, self.eps, hold)
        attended, entry = attend(entered)
        x, attended = tokens_at((x, attended), at)
        x, mixed = mlp_behind_norm(self.mlp, x, norm(attended, self.attended_norm), self.mlp_norm, self.eps)
        return (x, norm(mixed, self.mixed_norm)), entry

    def prefill(self, x, delta, cos, sin, at=None, slots=None):
        """See `decoder.Block`."""
        return self._run(x, delta, lambda entered: self.attention.prefill(entered, cos, sin, slots), at)

    def step(self, x, delta, cos, sin, slots, hold=False):
        """See `decoder.Block`."""
        return self._run(x, delta, lambda entered: self.attention.step(entered, cos, sin, slots), hold=hold)
