"""DeepSeek-V3 in NumPy at float64, one token and one expert at a time, as its papers write it: what variants without
golden data are compared with. It is itself compared with the golden data of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np


def forward(config: Mapping, tensors: Mapping[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits [length, vocab] of one sequence `ids` [length]; `config`: the entries of a hub's config.json."""
    w = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        x = x + _attention(
            config, w, f"{p}self_attn.", _norm(x, w[f"{p}input_layernorm.weight"], config["rms_norm_eps"])
        )
        y = _norm(x, w[f"{p}post_attention_layernorm.weight"], config["rms_norm_eps"])
        x = x + (_mlp(w, f"{p}mlp.", y) if i < config["first_k_dense_replace"] else _mixture(config, w, f"{p}mlp.", y))
    return _norm(x, w["model.norm.weight"], config["rms_norm_eps"]) @ w["lm_head.weight"].T


def _norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _mlp(w, prefix, x):
    gate, up = (x @ w[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ w[f"{prefix}down_proj.weight"].T


def _mixture(config, w, prefix, x):
    out = np.zeros_like(x)
    groups = config["n_group"]
    for t, row in enumerate(x):
        scores = 1 / (1 + np.exp(-w[f"{prefix}gate.weight"] @ row))
        biased = scores + w[f"{prefix}gate.e_score_correction_bias"]
        size = len(scores) // groups
        of_group = [np.sort(biased[g * size : (g + 1) * size])[-2:].sum() for g in range(groups)]
        for g in np.argsort(of_group)[: groups - config["topk_group"]]:
            biased[g * size : (g + 1) * size] = -np.inf
        chosen = np.argsort(biased)[-config["num_experts_per_tok"] :]
        total = scores[chosen].sum() if config["norm_topk_prob"] else 1.0
        for e in chosen:
            share = scores[e] / total * config["routed_scaling_factor"]
            out[t] += share * _mlp(w, f"{prefix}experts.{e}.", row)
    return out + (_mlp(w, f"{prefix}shared_experts.", x) if config["n_shared_experts"] else 0)


def _attention(config, w, prefix, x):
    heads, rank, rope = config["num_attention_heads"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config["q_lora_rank"] is None:
        q = x @ w[f"{prefix}q_proj.weight"].T
    else:
        q = _norm(x @ w[f"{prefix}q_a_proj.weight"].T, w[f"{prefix}q_a_layernorm.weight"], 1e-6)
        q = q @ w[f"{prefix}q_b_proj.weight"].T
    entry = x @ w[f"{prefix}kv_a_proj_with_mqa.weight"].T
    latent = _norm(entry[:, :rank], w[f"{prefix}kv_a_layernorm.weight"], 1e-6)
    shared = _turned(config, entry[:, rank:])
    kv = (latent @ w[f"{prefix}kv_b_proj.weight"].T).reshape(len(x), heads, -1)
    q = q.reshape(len(x), heads, -1)
    plain = q.shape[2] - rope
    scale = (plain + rope) ** -0.5 * _mscale(config, "mscale_all_dim") ** 2
    mixed = []
    for h in range(heads):
        scores = q[:, h, :plain] @ kv[:, h, :plain].T + _turned(config, q[:, h, plain:]) @ shared.T
        scores = np.where(np.tri(len(x), dtype=bool), scores * scale, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        mixed.append(weights / weights.sum(1, keepdims=True) @ kv[:, h, plain:])
    return np.concatenate(mixed, axis=1) @ w[f"{prefix}o_proj.weight"].T


def _mscale(config, key: str) -> float:
    """YaRN's factor 0.1 m ln(s) + 1 for m = `key`; 1 without YaRN or without `key`."""
    rope = config.get("rope_scaling") or {}
    return 0.1 * rope[key] * math.log(rope["factor"]) + 1 if rope.get(key) else 1.0


def _turned(config, x):
    """The rows of x [length, rope] as complex numbers times e^(i angle), at positions 0, 1, ...."""
    n = x.shape[1] // 2
    adjacent = config.get("rope_interleave", True)
    pairs = x[:, ::2] + 1j * x[:, 1::2] if adjacent else x[:, :n] + 1j * x[:, n:]
    factor = 1.0
    if config.get("rope_scaling"):
        factor = _mscale(config, "mscale") / _mscale(config, "mscale_all_dim")
    y = pairs * np.exp(1j * np.outer(np.arange(len(x)), _frequencies(config, n))) * factor
    # the order within a head does not matter, as long as queries and keys agree
    return np.concatenate([y.real, y.imag], axis=1)


def _frequencies(config, n: int):
    """YaRN: pair i of n that turns more than `beta_fast` times over the old context stays, one that turns less than
    `beta_slow` times is slowed by the factor, with a ramp over the pairs between."""
    theta, rope = config["rope_theta"], config.get("rope_scaling")
    base = np.array([theta ** (-i / n) for i in range(n)])
    if not rope:
        return base
    pair_of = lambda turns: n * math.log(rope["original_max_position_embeddings"] / (2 * math.pi * turns), theta)
    low = max(math.floor(pair_of(rope["beta_fast"])), 0)
    high = min(math.ceil(pair_of(rope["beta_slow"])), 2 * n - 1)
    slowed = np.array([min(max((i - low) / (high - low), 0), 1) for i in range(n)])
    return base * (1 - slowed) + base / rope["factor"] * slowed
