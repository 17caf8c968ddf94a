"""Language models of published shapes with random weights, which are made on the device, dense or quantised; and what
their work needs."""

from __future__ import annotations

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.data import normal, size
from jtile.models import Decoder, LanguageModel
from jtile.models.llama import LlamaConfig
from jtile.ops import QuantizedTensor

DENSE = "bfloat16"
STORED = ("fp8", "int4")  # how the matrices of blocks may be stored else; tables stay dense, as in most checkpoints
_GROUP = 128  # weights of an int4 matrix that share a scale
_SCALE = 0.02  # of weights, as models are initialised: activations stay of the size that they have


def _llama(layers: int, hidden: int, features: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict:
    return dict(
        model_type="llama", num_hidden_layers=layers, hidden_size=hidden, intermediate_size=features,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocab, rms_norm_eps=1e-5,
        rope_theta=500000.0, max_position_embeddings=131072, tie_word_embeddings=tied,
    )  # fmt: skip


# The entries of the config.json of each that this needs.
SHAPES = {
    "Llama-3.2-1B": _llama(16, 2048, 8192, 32, 8, 128256, tied=True),
    "Llama-3.1-8B": _llama(32, 4096, 14336, 32, 8, 128256, tied=False),
}
TINY = {"tiny": _llama(1, 64, 96, 4, 2, 128, tied=True)}


def make(config: dict, stored: str = DENSE) -> LanguageModel:
    """A model of this shape; nothing of its weights is ever in the host's memory. stored: how its matrices are."""

    def weight(name: str, shape: tuple[int, ...]) -> jax.Array | QuantizedTensor:
        seed = zlib.crc32(name.encode()) >> 1
        if name.endswith("norm.weight"):
            return jnp.ones(shape, jnp.float32)
        if stored == DENSE or name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return normal(seed, *shape, dtype=DENSE, scale=_SCALE)
        return _float8(seed, *shape) if stored == "fp8" else _int4(seed, *shape)

    return LanguageModel(Decoder(LlamaConfig.from_hf(config), weight, config["tie_word_embeddings"], DENSE))


def _float8(seed: int, out: int, inner: int) -> QuantizedTensor:
    """Codes below 2 with a scale for each row, whose products of many rows are made in 8 bits."""
    codes = jax.random.bits(jax.random.key(seed), (out, inner), jnp.uint8) & np.uint8(0xBF)
    numbers = np.arange(64, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    scale = jnp.full((out, 1), _SCALE / np.sqrt((numbers**2).mean()), jnp.float32)
    found = QuantizedTensor.from_float8(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale)
    return dataclasses.replace(found, activations="rows")


def _int4(seed: int, out: int, inner: int) -> QuantizedTensor:
    """All codes, in groups without zero points."""
    codes = jax.random.bits(jax.random.key(seed), (out, inner // 2), jnp.uint8)
    group = _GROUP if inner % _GROUP == 0 else 32
    scale = jnp.full((out, inner // group), _SCALE / np.sqrt(np.mean((np.arange(16) - 8.0) ** 2)), jnp.float16)
    return QuantizedTensor(codes, scale, None, "q4_0")


@dataclasses.dataclass(frozen=True)
class Work:
    """What a model's prompt of `rows` times `tokens`, or one step behind it, needs at least.

    Attributes:
      lm: the model. rows, tokens: of the prompt. steps: that follow it, of which one is counted: the one in the middle.
      dense: of a quantised model one of its shape with dense weights, whose time is a peer's.
    """

    lm: LanguageModel
    rows: int
    tokens: int
    steps: int
    dense: LanguageModel | None = None

    def step_bytes(self) -> int:
        """Bytes that a step reads: all weights but rows of the embedding, and the keys and values of every row."""
        model, c = self.lm.model, llama(self.lm).attention
        weights = size(*jax.tree.leaves(model_state(model)))
        table = 0 if model.output is None else size(model.embedding.get_value())
        keys = self.rows * (self.tokens + self.steps // 2)
        width = jnp.dtype(self.lm.cache_dtype or self.lm.dtype).itemsize
        return weights - table + 2 * keys * c.kv_heads * c.head_dim * width * self.lm.config.num_layers

    def prompt_flops(self) -> int:
        """Operations of a prompt: two for each weight of the blocks and each token, and those of attention."""
        model, c = self.lm.model, llama(self.lm).attention
        matrices = jax.tree.leaves(model_state(model), is_leaf=lambda w: isinstance(w, QuantizedTensor))
        weights = sum(math.prod(w.shape) for w in matrices if w.ndim == 2)
        tables = self.lm.config.vocab_size * self.lm.config.hidden_size * (1 if model.output is None else 2)
        scores = self.rows * self.tokens * (self.tokens + 1) // 2 * c.heads * self.lm.config.num_layers
        return 2 * (weights - tables) * self.rows * self.tokens + 4 * scores * c.head_dim


def llama(lm: LanguageModel) -> LlamaConfig:
    """The sizes of a model of this file."""
    assert isinstance(lm.config, LlamaConfig)
    return lm.config


def model_state(model: Decoder):
    """The weights of a model as a tree of arrays."""
    from flax import nnx

    return nnx.to_pure_dict(nnx.state(model))
