"""What Qwen3 has beside Llama: norms of heads, experts, windows of some layers; its values are in test_golden.py."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile._errors import ModelError
from jtile.models import LanguageModel
from jtile.models.decoder import GatedMLP
from jtile.models.experts import Mixture
from jtile.models.lora import add_lora
from jtile.models.qwen3 import MixtureConfig, Qwen3Config, Router


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def config(request, data):
    return json.loads((data / request.param / "config_hub.json").read_text())


@pytest.fixture
def moe(data):
    return json.loads((data / "qwen3_moe" / "config_hub.json").read_text())


def test_the_router_chooses_the_experts_of_transformers(model, outputs, chosen_experts):
    golden = outputs("qwen3_moe")
    got = chosen_experts(model("qwen3_moe"), golden["input_ids"].astype(np.int32))
    assert np.array_equal(got, golden["router_topk"])


@pytest.mark.parametrize("normalised", [False, True])
def test_router(normalised):
    values = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)
    config = MixtureConfig(experts=6, chosen=2, features=8, normalised=normalised, layers=(0,))
    experts, weights = Router(config, 16, lambda name, shape: jnp.asarray(values), "gate.")(jnp.asarray(x))
    p = np.asarray(jax.nn.softmax(x @ values.T))
    best = np.argsort(-p, axis=1)[:, :2]
    expected = np.take_along_axis(p, best, 1)
    np.testing.assert_array_equal(experts, best)
    np.testing.assert_allclose(
        weights, expected / expected.sum(1, keepdims=True) if normalised else expected, atol=1e-6
    )


def read(change, config):
    return Qwen3Config.from_hf(config | change)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, (0, 1, 2)),
        ({"decoder_sparse_step": 2}, (1,)),
        ({"mlp_only_layers": [0, 2]}, (1,)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": None}, (2,)),
    ],
)
def test_which_layers_have_experts(moe, change, layers):
    with pytest.raises(ModelError, match="'mlp_only_layers' = 2; expected a list of int"):
        read({"mlp_only_layers": 2}, moe)
    config = read(change, moe)
    assert config.mixture.layers == layers
    zeros = lambda name, shape: jnp.zeros(shape)
    kinds = [type(config.block(i, zeros).mlp) for i in range(3)]
    assert kinds == [Mixture if i in layers else GatedMLP for i in range(3)]


@pytest.mark.parametrize(
    ("change", "dense", "mixed"),
    [
        ({}, (None,) * 3, (None,) * 3),
        ({"sliding_window": 8}, (None,) * 3, (None,) * 3),  # without use_sliding_window
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (None, None, 8), (8, 8, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8, 8), (8, 8, 8)),
        (
            {"use_sliding_window": True, "sliding_window": 8,
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (8, None, 8), (8, None, 8),
        ),
    ],
)  # fmt: skip
def test_windows_of_the_layers(config, change, dense, mixed):
    expected = dense if config["model_type"] == "qwen3" else mixed
    assert read({"layer_types": None} | change, config).windows == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["full_attention"]}, "are not 3 of sliding_attention, full_attention"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "it has no sliding_window"),
        ({"head_dim": 15}, "even head size"),
    ],
)
def test_configurations_that_it_cannot_run(config, change, message):
    with pytest.raises(ModelError, match=message):
        read(change, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_experts_per_tok": 9}, "chooses 9 experts of 8"), ({"num_experts": None}, "lacks 'num_experts'")],
)
def test_mixtures_that_it_cannot_run(moe, change, message):
    with pytest.raises(ModelError, match=message):
        read(change, moe)


def test_a_tuned_mixture_generates(model, outputs):
    lm, ids = model("qwen3_moe"), outputs("qwen3_moe")["input_ids"][:, :11]
    tuned = add_lora(lm.model, targets=("qkv", "output"))
    for block in tuned.blocks:
        b = block.attention.output.b
        b.set_value(jax.random.normal(jax.random.key(1), b.shape) * 0.1)
    tuned = LanguageModel(tuned, lm.tokenizer, lm.eos_ids)
    made = tuned.generate(ids, 6, eos=None)
    logits = np.asarray(tuned.logits(np.concatenate([ids, made], axis=1)))
    assert np.array_equal(logits.argmax(-1)[:, ids.shape[1] - 1 : -1], made)
    assert np.abs(logits[:, :11] - outputs("qwen3_moe")["logits"][:, :11]).max() > 0.1
    with pytest.raises(ModelError, match="block 0 has no weights 'gate'"):
        add_lora(lm.model, targets=("gate",))
