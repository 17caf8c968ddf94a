"""GGUF files of every architecture: the same configuration and the same weights as the folder that they are made of,
whose logits test_golden.py compares with transformers."""

import dataclasses
import json
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf_models import NAMES, write
from k_quants import random_blocks
from safetensors.numpy import load_file, save_file

import jtile.models
from jtile._errors import ModelError
from jtile.ops import QuantizedTensor
from jtile.testing.evaluate import evaluated

pytestmark = pytest.mark.usefixtures("by_numpy")

DATA = Path(__file__).resolve().parent.parent / "data"
weights = evaluated(QuantizedTensor.dequantize)
FOLDERS = sorted(
    path.parent.name
    for path in DATA.glob("*/io.npz")
    if json.loads((path.parent / "config.json").read_text())["model_type"] in NAMES
)


def numbers(config) -> list:
    """A configuration as a flat list, its floats rounded to float32, which is what a file has."""
    if dataclasses.is_dataclass(config):
        return [n for field in dataclasses.fields(config) for n in numbers(getattr(config, field.name))]
    if isinstance(config, tuple):
        return [n for part in config for n in numbers(part)]
    return [pytest.approx(config, rel=1e-6) if isinstance(config, float) else config]


def leaves(model) -> list:
    return jax.tree.leaves_with_path(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    "name", [name for name in FOLDERS if name not in ("llama", "qwen3_next", "gpt_oss")]
)  # Llama has factors: test_load.py
def test_a_file_says_what_the_folder_says(model, tmp_path, name):
    folder, file = model(name), jtile.models.load(write(DATA / name, tmp_path / "it.gguf"))
    assert numbers(file.model.config) == numbers(folder.model.config)
    for (path, a), (other, b) in zip(leaves(file.model), leaves(folder.model), strict=True):
        assert path == other and (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=str(path))  # of Gemma's norms, which are stored plus 1


@pytest.fixture
def gpt_oss(tmp_path):
    """A folder with the model of that name and the bound of gates that files do not name."""
    folder = tmp_path / "oss"
    folder.mkdir()
    config = json.loads((DATA / "gpt_oss" / "config_hub.json").read_text()) | {"swiglu_limit": 7.0}
    for name in ("config.json", "config_hub.json"):
        (folder / name).write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((DATA / "gpt_oss" / "model.safetensors").read_bytes())
    return folder


def test_a_file_of_gpt_oss_says_what_the_folder_says(gpt_oss, tmp_path):
    folder, file = (jtile.models.load(path) for path in (gpt_oss, write(gpt_oss, tmp_path / "it.gguf")))
    assert numbers(file.model.config) == numbers(folder.model.config)
    for (path, a), (other, b) in zip(leaves(file.model), leaves(folder.model), strict=True):
        assert path == other and a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, err_msg=str(path))


def test_experts_of_gpt_oss_keep_their_bits(gpt_oss, tmp_path):
    """Of four bits, as its makers publish them; a file of which gate and up are not alike is refused."""

    def four_bits(name, tensor, parts=("gate", "up", "down")):
        if not name.endswith(tuple(f"ffn_{part}_exps.weight" for part in parts)):
            return name, tensor
        kind, (experts, out, _) = gguf.GGMLQuantizationType.MXFP4, tensor.shape
        codes = np.random.default_rng(len(name)).integers(0, 256, (experts, out, 17), np.uint8)
        codes[..., 0] = 120 + codes[..., 0] % 8  # powers near 1
        stored[name] = gguf.dequantize(codes, kind)
        return name, (codes, kind)

    stored: dict = {}
    lm = jtile.models.load(write(gpt_oss, tmp_path / "it.gguf", four_bits))
    for i, block in enumerate(lm.model.blocks):
        into, down = (w.get_value() for w in (block.mlp.experts.gate_up, block.mlp.experts.down))
        assert into.kind == down.kind == "mxfp4"
        gate_up = [stored[f"blk.{i}.ffn_{part}_exps.weight"] for part in ("gate", "up")]
        of = lambda w: np.stack([weights(jax.tree.map(lambda x, e=e: x[e], w)) for e in range(w.shape[0])])
        np.testing.assert_array_equal(of(into), np.concatenate(gate_up, axis=1))
        np.testing.assert_array_equal(of(down), stored[f"blk.{i}.ffn_down_exps.weight"])
    assert lm.generate(np.arange(3, 8), 3, eos=None).shape == (3,)
    path = write(gpt_oss, tmp_path / "other.gguf", lambda *of: four_bits(*of, parts=("gate",)))
    with pytest.raises(ModelError, match=r"MXFP4 of shape .* expected two that are alike"):
        jtile.models.load(path)


@pytest.fixture
def qwen3_next(tmp_path):
    """A folder with the model of that name without its layer of one MLP, which the files do not know."""
    folder, tensors = tmp_path / "next", {}
    for name, tensor in load_file(DATA / "qwen3_next" / "model.safetensors").items():
        if ".layers.2." not in name:
            tensors[name.replace(".layers.3.", ".layers.2.")] = tensor
    config = json.loads((DATA / "qwen3_next" / "config_hub.json").read_text())
    config |= {"num_hidden_layers": 3, "full_attention_interval": 3, "mlp_only_layers": []}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    for name in ("config.json", "config_hub.json"):
        (folder / name).write_text(json.dumps(config))
    return folder


def older(name, tensor):
    """A tensor as the first files of Qwen3-Next have it, the projection by heads; None for its second part."""
    if not name.endswith(("attn_qkv.weight", "attn_gate.weight")):
        return name, tensor
    whole = load_file(DATA / "qwen3_next" / "model.safetensors")
    block = name.split(".")[1]
    found = whole[f"model.layers.{block}.linear_attn.in_proj_qkvz.weight"]
    return (f"blk.{block}.ssm_in.weight", found) if "qkv" in name else None


@pytest.mark.parametrize("change", [lambda *of: of, older], ids=["in parts", "by heads"])
def test_a_file_of_qwen3_next_says_what_the_folder_says(qwen3_next, tmp_path, change):
    folder = jtile.models.load(qwen3_next)
    file = jtile.models.load(write(qwen3_next, tmp_path / "it.gguf", change))
    assert numbers(file.model.config) == numbers(folder.model.config)
    for (path, a), (other, b) in zip(leaves(file.model), leaves(folder.model), strict=True):
        assert path == other and (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7, err_msg=str(path))


def test_projections_of_qwen3_next_keep_their_bits(qwen3_next, tmp_path):
    """Each its own, as files of K-quants spend more of them on queries, keys and values; blocks behind the model's
    draft tokens and are left out, and a list may say which blocks have states."""
    types = {"attn_qkv": "Q8_0", "attn_gate": "Q4_0", "ssm_ba": "Q8_0", "ssm_out": "Q4_0"}

    def quantised(name, tensor):
        kind = types.get(name.split(".")[-2] if name.count(".") > 1 else "")
        if kind is None or tensor.shape[-1] % 32:
            return name, tensor
        type_ = gguf.GGMLQuantizationType[kind]
        return name, (gguf.quantize(np.ascontiguousarray(tensor), type_), type_)

    more = {"qwen3next__nextn_predict_layers": 1, "qwen3next__block_count": 4,
            "qwen3next__attention__recurrent_layers": [True, True, False, False]}  # fmt: skip
    lm = jtile.models.load(write(qwen3_next, tmp_path / "it.gguf", quantised, **more))
    folder = jtile.models.load(qwen3_next)
    assert lm.config.num_layers == 3 and lm.config.linear == (True, True, False)
    mixer, exact = (m.model.blocks[0].attention for m in (lm, folder))
    found, whole = mixer.into.get_value(), np.asarray(exact.into.get_value())
    assert [w.kind for w in found] == ["q8_0", "q4_0", "q8_0"] and mixer.output.get_value().kind == "q4_0"
    dense = np.concatenate([np.asarray(weights(w)) for w in found])
    assert dense.shape == whole.shape and np.abs(dense - whole).max() < 0.15 * np.abs(whole).max()


def test_experts_and_latent_projections_keep_their_bits(model, tmp_path):
    exact, q8 = {}, gguf.GGMLQuantizationType.Q8_0

    def quantised(name, tensor):
        if any(part in name for part in ("_exps", "attn_q_a.", "attn_k_b", "shexp")) and tensor.shape[-1] % 32 == 0:
            raw = gguf.quantize(tensor, q8)
            exact[name] = gguf.dequantize(raw, q8)
            return name, (raw, q8)
        return name, tensor

    lm = jtile.models.load(write(DATA / "deepseek_v3", tmp_path / "it.gguf", quantised))
    mixture = lm.model.blocks[1].mlp
    gate_up, down = mixture.experts.gate_up.get_value(), mixture.experts.down.get_value()
    assert (gate_up.kind, gate_up.shape, down.kind, mixture.shared.gate.get_value().kind) == (
        "q8_0", (8, 64, 64), "q8_0", "q8_0"
    )  # fmt: skip
    of = lambda part: exact[f"blk.1.ffn_{part}_exps.weight"]
    assert np.array_equal(gate_up.dequantize(), np.concatenate([of("gate"), of("up")], axis=1))
    assert np.array_equal(down.dequantize(), of("down"))
    attention = lm.model.blocks[0].attention
    first = attention.down.get_value()[0]  # beside floats
    assert first.kind == "q8_0" and np.array_equal(first.dequantize(), exact["blk.0.attn_q_a.weight"])
    assert attention.key.get_value().dtype == jnp.float32


@pytest.fixture
def k_quants(tmp_path):
    """k_quants(quantised): a Llama of one block in K-quants of every kind, or in the floats that they stand for."""
    hidden, vocab = 256, 32
    kinds = {"attn_q": "q4_k", "attn_k": "q4_k", "attn_v": "q6_k", "attn_output": "q5_k", "ffn_gate": "q3_k",
             "ffn_up": "q3_k", "ffn_down": "q2_k"}  # fmt: skip

    def build(quantised: bool):
        path, rng = tmp_path / f"{quantised}.gguf", np.random.default_rng(0)
        writer = gguf.GGUFWriter(str(path), "llama")
        for name, value in {"block_count": 1, "context_length": 64, "embedding_length": hidden, "head_count": 2,
                            "feed_forward_length": hidden, "layer_norm_rms_eps": 1e-6}.items():  # fmt: skip
            getattr(writer, f"add_{name}")(value)
        tensors = {f"blk.0.{name}.weight": (kind, hidden) for name, kind in kinds.items()}
        tensors["token_embd.weight"] = ("q6_k", vocab)
        for seed, (name, (kind, rows)) in enumerate(tensors.items()):
            type_ = gguf.GGMLQuantizationType[kind.upper()]
            raw = random_blocks(kind, rows, hidden, seed).reshape(rows, -1)
            writer.add_tensor(name, *((raw, None, type_) if quantised else (gguf.dequantize(raw, type_),)))
        for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
            writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, hidden).astype(np.float32))
        for step in ("header", "kv_data", "tensors"):
            getattr(writer, f"write_{step}_to_file")()
        writer.close()
        return jtile.models.load(path, dtype="float32")

    return build


def test_k_quants_stay_as_they_are_stored(k_quants):
    quantised, floats = k_quants(True), k_quants(False)
    qk, v = quantised.model.blocks[0].attention.qkv.get_value()  # of two kinds, so that two matrices
    assert (qk.kind, qk.shape, v.kind) == ("q4_k", (512, 256), "q6_k")
    assert {w.kind for w in jax.tree.leaves(nnx.state(quantised.model), is_leaf=is_quantised) if is_quantised(w)} == {
        "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"
    }  # fmt: skip
    for part, rows in ((qk, slice(0, 512)), (v, slice(512, 768))):  # in the order of heads that are not interleaved
        assert np.array_equal(weights(part), floats.model.blocks[0].attention.qkv.get_value()[rows])
    for name in ("gate", "up", "down"):
        held, expected = (getattr(lm.model.blocks[0].mlp, name).get_value() for lm in (quantised, floats))
        assert np.array_equal(weights(held), expected)


def is_quantised(x) -> bool:
    return isinstance(x, QuantizedTensor)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("mistral", {"llama__attention__temperature_scale": 0.1}, "attention.temperature_scale"),
        ("mistral", {"llama__rope__dimension_count": 8}, "rotates only a part of each head"),
        ("deepseek_v3", {"deepseek2__expert_gating_func": 1}, "scoring_func = 'softmax'"),
        ("qwen3", {"qwen3__rope__scaling__type": "longrope"}, "unknown rope scaling 'longrope'"),
        ("qwen3", {"tokenizer__ggml__eos_token_id": "2"}, "'eos_token_id' = .*'2'"),
        ("qwen3", {"tokenizer__ggml__eos_token_id": [2, 3]}, "'eos_token_id' = .*2, 3"),
    ],
)
def test_files_that_it_cannot_run(tmp_path, name, fields, message):
    with pytest.raises(ModelError, match=message):
        jtile.models.load(write(DATA / name, tmp_path / "it.gguf", **fields))


@pytest.mark.parametrize(
    ("factors", "message"),
    [(np.ones((2, 12)), r"F32 of shape \[12, 2\]"), (np.ones(3), "need 12 floats"), (np.arange(12), "by 0.0; its")],
)
def test_factors_of_frequencies_that_fit_no_head(tmp_path, factors, message):
    factors = ("rope_freqs.weight", factors.astype(np.float32))
    instead = lambda name, tensor: factors if "q_norm" in name and "blk.0" in name else (name, tensor)
    with pytest.raises(ModelError, match=message):
        jtile.models.load(write(DATA / "qwen3", tmp_path / "it.gguf", instead))


def test_biases_that_nobody_adds(tmp_path):
    rename = lambda name, tensor: (name.replace("attn_q_norm.weight", "attn_q.bias"), tensor)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias.* adds no biases"):
        jtile.models.load(write(DATA / "qwen3", tmp_path / "it.gguf", rename))
