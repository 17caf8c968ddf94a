"""Models of tests/data as GGUF files: names by the gguf package's own table, tensors as llama.cpp's converter stores
them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {  # model_type -> general.architecture
    "deepseek_v3": "deepseek2", "gemma2": "gemma2", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "llama": "llama",
    "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}  # fmt: skip


def write(folder: Path, path: Path, change=lambda name, tensor: (name, tensor), **metadata) -> Path:
    """The model of a folder as a GGUF file of float32; `change(GGUF name, tensor)` gives what is written for a tensor,
    a pair with raw bytes and a type for quantised ones, or None; `metadata`: further fields, "__" for dots."""
    config = json.loads((folder / "config_hub.json").read_text())
    kind, blocks = config["model_type"], config["num_hidden_layers"]
    writer = gguf.GGUFWriter(str(path), NAMES[kind])
    _fields(writer, config)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == NAMES[kind])
    table = gguf.get_tensor_name_map(arch, blocks)
    for name, tensor in _stored(load_file(folder / "model.safetensors"), config).items():
        found = table.get_name(name, try_suffixes=(".weight", ".bias")) or name
        found = change(found if found.startswith(("blk", "token", "output")) else name, tensor)
        if found is not None:
            name, tensor = found
            raw, quantised = tensor if isinstance(tensor, tuple) else (np.ascontiguousarray(tensor), None)
            writer.add_tensor(name, raw, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _fields(writer, config: dict) -> None:
    kind, heads = config["model_type"], config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if kind != "deepseek_v3":
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
        writer.add_value_length(config.get("head_dim") or config["hidden_size"] // heads)
    if config.get("sliding_window") and kind in ("mistral", "gemma2", "gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config["sliding_window"])
    if kind.startswith("gemma"):
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "gemma3_text":
        slides = [layer == "sliding_attention" for layer in config["layer_types"]]
        writer.add_sliding_window_pattern(slides)
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        scaling = config["rope_scaling"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    _mixture_fields(writer, config)


def _mixture_fields(writer, config: dict) -> None:
    count = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts")
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "qwen3_next":
        _delta_fields(writer, config)
    if config["model_type"] != "deepseek_v3":
        return
    latent, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(latent + turned)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _delta_fields(writer, config: dict) -> None:
    heads = config["linear_num_value_heads"]
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    writer.add_uint32("qwen3next.full_attention_interval", config["full_attention_interval"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))


def _delta(name: str, tensor: np.ndarray, config: dict) -> dict[str, np.ndarray]:
    """A tensor of a Qwen3-Next: queries, keys and values, and gates, of all heads each."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return {name: tensor + 1}
    if name.endswith("A_log"):
        return {name: -np.exp(tensor)}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): tensor}
    if name.endswith(("conv1d.weight", "shared_expert_gate.weight")):
        return {name: tensor.squeeze()}
    if "in_proj_qkvz" not in name:
        return {name: tensor}
    heads, hidden = config["linear_num_key_heads"], tensor.shape[1]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    value *= config["linear_num_value_heads"] // heads
    q, k, v, z = np.split(tensor.reshape(heads, -1, hidden), np.cumsum([key, key, value]), axis=1)
    qkv = np.concatenate([x.reshape(-1, hidden) for x in (q, k, v)])
    return {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): z.reshape(-1, hidden)}


def _stored(tensors: dict[str, np.ndarray], config: dict) -> dict[str, np.ndarray]:
    """Tensors as a file has them: experts together, interleaved heads of Llamas, norms of Gemmas with their 1, and the
    expansion of DeepSeek's latent vectors in two parts in all blocks but the first."""
    kind, found = config["model_type"], {}
    heads, blocks = config["num_attention_heads"], range(config["num_hidden_layers"])
    for name, tensor in tensors.items():
        if NAMES[kind] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = heads if "q_proj" in name else config["num_key_value_heads"]
            tensor = tensor.reshape(rows, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if kind == "gpt_oss":
            found |= _of_gpt_oss(name, tensor)
            continue
        if ".experts." not in name:
            found |= _delta(name, tensor, config) if kind == "qwen3_next" else {name: tensor}
    for block in blocks:
        for part in _experts(tensors, block):
            found[part[0]] = part[1]
        name = f"model.layers.{block}.self_attn.kv_b_proj.weight"
        if name in found and block:
            both = found.pop(name).reshape(heads, -1, config["kv_lora_rank"])
            plain = config["qk_nope_head_dim"]
            found[name.replace("kv_b", "k_b")] = both[:, :plain].swapaxes(1, 2)
            found[name.replace("kv_b", "v_b")] = both[:, plain:]
    return found


def _of_gpt_oss(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor of a GPT-OSS: gate and up apart, matrices as [experts, out, in], and what has no ending gets one."""
    if name.endswith("sinks"):
        return {f"{name}.weight": tensor}
    if ".experts." not in name:
        return {name: tensor}
    name, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    tensor = tensor.swapaxes(1, 2) if kind == "weight" else tensor
    if "gate_up" not in name:
        return {f"{name}.{kind}": tensor}
    return {f"{name.replace('gate_up', part)}.{kind}": tensor[:, i::2] for i, part in enumerate(("gate", "up"))}


def _experts(tensors: dict[str, np.ndarray], block: int):
    """The experts of a block: (name, [experts, rows, columns])."""
    for middle, parts in (("mlp", ("gate_proj", "down_proj", "up_proj")), ("block_sparse_moe", ("w1", "w2", "w3"))):
        for part in parts:
            prefix, all_of = f"model.layers.{block}.{middle}.experts.", []
            while (name := f"{prefix}{len(all_of)}.{part}.weight") in tensors:
                all_of.append(tensors[name])
            if all_of:
                yield f"{prefix}{part}.weight", np.stack(all_of)
