"""GGUF's architectures in the words of transformers: configurations, names of tensors, and how tensors are stored.

What a file's metadata says becomes the entries of a `config.json`, which the family of the model reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jtile._errors import ModelError

from . import mixtral
from .entries import count, number
from .experts import PROJECTIONS

# entry of a config.json -> the name of the metadata, which follows the name of the architecture and a dot
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}
MIXTURE = {
    "num_experts_per_tok": "expert_used_count",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
}
GEMMA = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
}
LATENT = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
YARN = {
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}

# names in files -> names of transformers: `TOP_NAMES` for tensors of the model, `BLOCK_NAMES` for those of a block,
# without "weight" or "bias"; `EXPERTS` begins the names of one expert's tensors
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
DELTA = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
DELTA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
EXPERTS = "mlp.experts.{expert}."  # stands before the names of `PROJECTIONS`


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`.

    Attributes:
      model_type: the family's name in a config.json.
      entries: what it has beside `SIZES`: entries of a config.json -> metadata.
      names: the names of tensors of a block beside `BLOCK_NAMES`.
      biases: tensors of a block that have biases.
      experts: (what stands before the names of an expert's tensors, these names).
      interleaved: rows of queries and keys stand with the two halves of each head interleaved.
      norms_of_one: the weights of norms are stored with the 1 that the model adds to them, except those of norms
        whose names end with `plain_norms`.
      turns_parts: whether `rope.dimension_count` may be a part of a head.
      floats: parts of the (transformers) names of matrices that the model takes as floats only.
      more: gives further entries, from the file's metadata without the architecture's name.
    """

    model_type: str
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    biases: tuple[str, ...] = ()
    experts: tuple[str, Mapping[str, str]] = (EXPERTS, PROJECTIONS)
    interleaved: bool = False
    norms_of_one: bool = False
    plain_norms: tuple[str, ...] = ()
    turns_parts: bool = False
    floats: tuple[str, ...] = ()
    more: Callable[[Mapping[str, Any]], dict] = lambda meta: {}

    def config(self, meta: Mapping[str, Any], vocab_size: int) -> dict:
        """The entries of a config.json; `meta`: the metadata without the architecture's name in front."""
        found = {key: meta[name] for key, name in {**SIZES, **self.entries}.items() if meta.get(name) is not None}
        if "kv_lora_rank" not in found:
            found["head_dim"] = _head(meta) if self.turns_parts else _whole_head(meta)
        found |= {"model_type": self.model_type, "vocab_size": vocab_size, "rope_scaling": _scaling(meta)}
        return found | self.more(meta)

    def block_names(self) -> dict[str, str]:
        return {**BLOCK_NAMES, **self.names}


def _whole_head(meta: Mapping[str, Any]) -> int:
    size = _head(meta)
    if number(meta, "rope.dimension_count", size) != size:
        raise ModelError("this GGUF rotates only a part of each head, which jtile.models does not implement here")
    return size


def _head(meta: Mapping[str, Any]) -> int:
    hidden, heads = (number(meta, key) for key in ("embedding_length", "attention.head_count"))
    size = number(meta, "attention.key_length", hidden // heads)
    if number(meta, "attention.value_length", size) != size:
        raise ModelError("this GGUF has values of another size than keys, which jtile.models does not implement")
    return size


def _scaling(meta: Mapping[str, Any]) -> dict | None:
    kind = meta.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    found = {"type": kind, "factor": meta.get("rope.scaling.factor")}
    found |= {key: meta[name] for key, name in YARN.items() if kind == "yarn" and meta.get(name) is not None}
    if meta.get("rope.scaling.yarn_log_multiplier"):  # a tenth of mscale_all_dim, to which mscale is equal
        scale = 10 * number(meta, "rope.scaling.yarn_log_multiplier", kind=float)
        found |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def _llama(meta: Mapping[str, Any]) -> dict:
    """Further entries for a Llama; with a window it is a Mistral, which files store as a Llama."""
    if meta.get("attention.temperature_scale"):
        raise ModelError(
            "this GGUF scales queries by their position (attention.temperature_scale), which jtile.models does not "
            "implement; take a model without"
        )
    return {"model_type": "mistral"} if meta.get("attention.sliding_window") else {}


def _gemma(large: int) -> Callable[[Mapping[str, Any]], dict]:
    """Further entries for a Gemma: the scale of scores, which files seldom name. It follows from the size of a head,
    or, in the model of `large` blocks, from the hidden size divided by the number of heads."""

    def more(meta: Mapping[str, Any]) -> dict:
        size = number(meta, "attention.key_length", 256)
        if meta.get("block_count") == large:
            size = number(meta, "embedding_length") / number(meta, "attention.head_count")
        if meta.get("attention.scale"):
            size = number(meta, "attention.scale", kind=float) ** -2
        pattern = meta.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):  # whether each block has a window
            kinds = [("full_attention", "sliding_attention")[bool(slides)] for slides in pattern]
            return {"query_pre_attn_scalar": size, "layer_types": kinds}
        return {"query_pre_attn_scalar": size, "sliding_window_pattern": pattern}

    return more


def _latent(meta: Mapping[str, Any]) -> dict:
    """Further entries for latent attention: the sizes of heads. Files whose key length is that of the latent vector
    name the sizes of the expanded heads in other entries."""
    both, value = (
        number(meta, f"attention.{kind}_length_mla", meta.get(f"attention.{kind}_length")) for kind in ("key", "value")
    )
    return {
        "v_head_dim": value,
        "qk_nope_head_dim": both - number(meta, "rope.dimension_count"),
        "scoring_func": "sigmoid" if meta.get("expert_gating_func") == 2 else "softmax",
        "norm_topk_prob": bool(meta.get("expert_weights_norm", False)),
    }


def _delta(meta: Mapping[str, Any]) -> dict:
    """Further entries for gated DeltaNets. The last blocks of a file may be those that draft tokens; they are left
    out."""
    heads, inner = number(meta, "ssm.time_step_rank"), number(meta, "ssm.inner_size")
    found: dict[str, Any] = {
        "linear_value_head_dim": inner // heads,
        "partial_rotary_factor": number(meta, "rope.dimension_count", _head(meta)) / _head(meta),
        "norm_topk_prob": True,
        "num_hidden_layers": number(meta, "block_count") - count(meta, "nextn_predict_layers", 0),
    }
    recurrent = meta.get("attention.recurrent_layers")
    if isinstance(recurrent, list):  # one entry for each block
        kinds = [("full_attention", "linear_attention")[bool(one)] for one in recurrent]
        found["layer_types"] = kinds[: found["num_hidden_layers"]]
    return found


def _gpt_oss(meta: Mapping[str, Any]) -> dict:
    """Further entries for a GPT-OSS: the features of its experts, and the limits of YaRN, which its makers do not
    round to whole features."""
    found: dict[str, Any] = {}
    if meta.get("expert_feed_forward_length") is not None:
        found["intermediate_size"] = meta["expert_feed_forward_length"]
    if (scaling := _scaling(meta)) is not None:
        found["rope_scaling"] = scaling | {"truncate": False}
    return found


LLAMA = Architecture("llama", interleaved=True, more=_llama)
MIXTRAL = Architecture(  # files store it as a Llama, too
    "mixtral",
    entries=MIXTURE,
    names={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=("block_sparse_moe.experts.{expert}.", mixtral.NAMES),
    interleaved=True,
)
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral3": LLAMA,
    "qwen2": Architecture("qwen2", biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": Architecture("qwen3", names=HEAD_NORMS),
    "qwen3moe": Architecture(
        "qwen3_moe", entries=MIXTURE, names=HEAD_NORMS | ROUTER, more=lambda meta: {"norm_topk_prob": True}
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        entries=MIXTURE | DELTA,
        names=HEAD_NORMS | ROUTER | DELTA_NAMES,
        norms_of_one=True,
        plain_norms=("linear_attn.norm.weight",),
        turns_parts=True,
        more=_delta,
    ),
    "gemma2": Architecture("gemma2", entries=GEMMA, names=GEMMA_NORMS, norms_of_one=True, more=_gemma(46)),
    "gemma3": Architecture(
        "gemma3_text", entries=GEMMA, names=GEMMA_NORMS | HEAD_NORMS, norms_of_one=True, more=_gemma(62)
    ),
    "gpt-oss": Architecture(  # what is of experts and sinks: gguf_tensors.py
        "gpt_oss",
        entries=MIXTURE,
        names={"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        biases=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp"),
        experts=("", {}),
        more=_gpt_oss,
    ),
    "deepseek2": Architecture(
        "deepseek_v3", entries=MIXTURE | LATENT, names=LATENT_NAMES | ROUTER, floats=("kv_b_proj",), more=_latent
    ),
}


def architecture_of(meta: Mapping[str, Any], source: str) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of a file with this metadata, and what stands behind the architecture's name in it.

    Raises:
      ModelError: an architecture that jtile does not run.
    """
    name = meta.get("general.architecture")
    if name not in list(ARCHITECTURES):  # a list, since the entry comes from a file and may be unhashable
        raise ModelError(
            f"{source} holds a model of the architecture {name!r}; of GGUF files jtile runs "
            f"{', '.join(map(repr, ARCHITECTURES))}"
        )
    prefix = f"{name}."
    own = {key[len(prefix) :]: value for key, value in meta.items() if key.startswith(prefix)}
    return MIXTRAL if ARCHITECTURES[name] is LLAMA and own.get("expert_count") else ARCHITECTURES[name], own
