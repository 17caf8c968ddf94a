"""What GPT-OSS and Mixtral have beside other mixtures; their values are in test_golden.py."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jtile.models
from jtile._errors import ModelError
from jtile.models.gpt_oss import GptOssConfig
from jtile.models.mixtral import MixtralConfig
from jtile.models.rope import RopeScaling
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_the_router_chooses_the_experts_of_transformers(model, outputs, chosen_experts, name):
    golden = outputs(name)
    got = chosen_experts(model(name), golden["input_ids"].astype(np.int32))
    assert np.array_equal(got, golden["router_topk"])


@pytest.fixture
def config(data):
    return json.loads((data / "gpt_oss" / "config_hub.json").read_text())


def test_configurations(config):
    read = GptOssConfig.from_hf(config)
    assert (read.windows, read.limit, read.attention.sinks) == ((8, None), 2.0, True)
    assert isinstance(read.attention.rope.scaling, RopeScaling) and not read.attention.rope.scaling.whole_pairs
    bare = GptOssConfig.from_hf({**config, "layer_types": None, "attention_bias": False, "swiglu_limit": None})
    assert (bare.windows, bare.limit) == ((8, None), 7.0)
    assert not bare.attention.biased and not bare.attention.output_biased
    for kind in (GptOssConfig, MixtralConfig):
        with pytest.raises(ModelError, match="chooses 9 experts of 8"):
            kind.from_hf({**config, "num_experts_per_tok": 9, "attention_bias": False})


def numbers(blocks, scales):
    """What MXFP4 says: float32 [experts, in, out]."""
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
    values = np.where(codes < 8, 1, -1) * sizes[codes & 7] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


@pytest.fixture
def mxfp4(data, tmp_path, config):
    """The folder with experts of 4-bit floats, and its tensors."""
    rng, tensors = np.random.default_rng(0), load_file(data / "gpt_oss" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, out, inner // 32, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(100, 130, (experts, out, inner // 32), np.uint8)
    shutil.copy(data / "gpt_oss" / "config.json", tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    return tmp_path, tensors


def test_experts_of_four_bits(mxfp4):
    folder, tensors = mxfp4
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[f"{name}_scales"][0, 0] = 0  # 2^-127
    save_file(tensors, folder / "model.safetensors")
    experts = jtile.models.load(folder, dtype="float32").model.blocks[1].mlp.experts
    expected = numbers(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]).swapaxes(1, 2)
    gate_up = experts.gate_up.get_value()
    assert (gate_up.kind, gate_up.shape) == ("mxfp4", expected.shape)
    assert gate_up.nbytes == tensors[f"{name}_blocks"].size + tensors[f"{name}_scales"].size
    found = np.asarray(gate_up.dequantize())
    wanted = np.concatenate([expected[:, ::2], expected[:, 1::2]], axis=1)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-37)  # XLA flushes what is subnormal
    assert experts.gate_up_bias.get_value().dtype == jnp.float32
    of = np.ones((2, 32), np.float32), np.array([[0, 3], [3, 7]], np.int32), np.ones((2, 2), np.float32)
    run = lambda: evaluated(lambda *of: experts(*of))(*of)
    got = run()
    for part in (experts.gate_up, experts.down):
        part.set_value(part.get_value().dequantize())
    assert relative_error(got, run()) < 2e-6


def test_experts_of_four_bits_without_scales(mxfp4):
    folder, tensors = mxfp4
    name = "model.layers.0.mlp.experts.down_proj"
    scales = tensors.pop(f"{name}_scales")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="down_proj_scales is missing"):
        jtile.models.load(folder)
    save_file(tensors | {f"{name}_scales": scales[:, :3]}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"with scales uint8 \(8, 3, 1\); expected"):
        jtile.models.load(folder)


def test_biases_and_routers_stay_in_float32_beside_16_bits(data):
    block = jtile.models.load(data / "gpt_oss", dtype="bfloat16").model.blocks[0]
    held = block.mlp.router.weight, block.mlp.experts.down_bias, block.attention.bias, block.attention.sinks
    stored = load_file(data / "gpt_oss" / "model.safetensors")
    assert {str(x.get_value().dtype) for x in held} == {"float32"}
    assert np.array_equal(held[0].get_value(), stored["model.layers.0.mlp.router.weight"])
    assert np.array_equal(held[1].get_value(), stored["model.layers.0.mlp.experts.down_proj_bias"])
