"""What the configurations of all decoders have in common."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
from flax import nnx

from jtile._errors import ModelError
from jtile.ops import QuantizedTensor

from .entries import number
from .rope import Rope, read_rope

LONGEST = 2**30  # no sequence has more tokens: positions and sums of two of them are int32
# Loads a weight by name and shape; it gives None for an expert that is on another device.
WeightSource = Callable[[str, tuple[int, ...]], "jax.Array | QuantizedTensor"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(abc.ABC):
    """The sizes that every decoder has; `max_length` is the longest sequence that it was trained for, in tokens.

    Embeddings are multiplied by `embedding_scale`; logits x become softcap * tanh(x / softcap), if that is given.
    `tied`: whether the embedding is the output head where the file does not say.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    norm_eps: float
    max_length: int
    embedding_scale: float = 1.0
    softcap: float | None = None
    tied: ClassVar[bool] = False

    def stored(self, weight: WeightSource) -> WeightSource:
        """The source of tensors in the form that the modules take, given the source of those that the checkpoint
        stores."""
        return weight

    @abc.abstractmethod
    def block(self, index: int, weight: WeightSource) -> nnx.Module:
        """Layer `index` with its weights: `weight(name, shape)` gives the tensor of that (transformers) name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention. `window`: a token sees its newest `window` keys, itself included (None: all keys; a
    window above `LONGEST` becomes None); `norm_eps`: the epsilon of the RMS norms of each head's queries and keys
    before they are rotated (None: no such norms); `scale`: the factor of the scores (None: 1 / sqrt(head_dim)), which
    become softcap * tanh(score / softcap), if given; `biased`: the projections of queries, keys and values have biases,
    and `output_biased` that of the output; `sinks`: each head has one more score in its softmax, like that of a key
    without a value; `chunk`: a token sees the keys of its own chunk of so many positions only, up to itself; `gated`:
    the output of a head is multiplied by the sigmoid of gates, whose weights stand behind those of its queries."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    norm_eps: float | None = None
    scale: float | None = None
    softcap: float | None = None
    biased: bool = False
    output_biased: bool = False
    sinks: bool = False
    gated: bool = False
    chunk: int | None = None

    def __post_init__(self):
        if self.window is not None and self.window > LONGEST:
            object.__setattr__(self, "window", None)
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} attention heads do not divide into {self.kv_heads} key-value heads")


def read_decoder(config: Mapping, activation: str = "silu") -> dict:
    """The fields of `DecoderConfig` from a `config.json`; `activation`: the one that the MLP must have, if the file
    names one.

    Raises:
      ModelError: a required key is missing or no number, or biases or another activation are asked for.
    """
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ModelError(f"this model has {key}, which jtile.models does not implement; use a model without")
    asked = config.get("hidden_activation") or config.get("hidden_act") or activation
    if (asked, activation) != ("swish", "silu") and asked != activation:
        raise ModelError(f"this model's MLP uses {asked!r}; jtile.models implements {activation!r} here")
    return dict(
        vocab_size=number(config, "vocab_size"),
        hidden_size=number(config, "hidden_size"),
        num_layers=number(config, "num_hidden_layers"),
        norm_eps=number(config, "rms_norm_eps", 1e-6, float),
        max_length=number(config, "max_position_embeddings", 2048),
    )


def read_attention(config: Mapping, **more) -> AttentionConfig:
    """The attention of a `config.json`; `more`: fields that only some models have.

    Raises:
      ModelError: as `read_decoder`.
    """
    heads = number(config, "num_attention_heads")
    head_dim = number(config, "head_dim", number(config, "hidden_size") // heads)
    kv_heads = number(config, "num_key_value_heads", heads)
    fields = {"rope": more.get("rope") or read_rope(config, head_dim)} | more
    return AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=head_dim, **fields)


def read_layer_types(
    config: Mapping, num_layers: int, window: int | None, slides: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """The window of each layer by `layer_types`; where the file has no such entry, layer i has a window if `slides(i)`.

    Raises:
      ModelError: an unknown type of layer, another number of them than layers, or windows of unknown size.
    """
    windows = {"sliding_attention": window, "full_attention": None}
    types = config.get("layer_types") or [("full_attention", "sliding_attention")[slides(i)] for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in list(windows) for kind in types):
        raise ModelError(f"the configuration's layer_types {types} are not {num_layers} of {', '.join(windows)}")
    if "sliding_attention" in types and window is None:
        raise ModelError("the configuration's layer_types ask for sliding_attention, but it has no sliding_window")
    return tuple(windows[kind] for kind in types)
