"""What Gemma 2 and 3 have beside Llama, as their configurations say it; their values are in test_golden.py."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jtile.models
from jtile._errors import ModelError
from jtile.models.gemma import GemmaConfig
from jtile.models.lora import TARGETS, add_lora
from jtile.models.rope import Rope, RopeScaling


@pytest.fixture
def second(data):
    return json.loads((data / "gemma2" / "config_hub.json").read_text())


@pytest.fixture
def third(data):
    return json.loads((data / "gemma3" / "config_hub.json").read_text())


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_gemma2_of_a_file_that_leaves_out_its_defaults(second):
    keys = (
        "layer_types",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "query_pre_attn_scalar",
        "sliding_window",
    )
    config = GemmaConfig.from_hf(without(second, *keys, "rope_theta"))
    assert config.windows == (4096, None, 4096, None)
    assert (config.attention.softcap, config.softcap, config.attention.scale) == (50.0, 30.0, 256**-0.5)
    assert config.attention.rope == config.window_rope == Rope(24, 10000.0)
    assert config.attention.norm_eps is None


def test_gemma3_of_a_file_that_leaves_out_its_defaults(third):
    keys = ("layer_types", "_sliding_window_pattern", "rope_theta", "rope_local_base_freq", "head_dim")
    config = GemmaConfig.from_hf(without(third, *keys) | {"num_hidden_layers": 13})
    assert config.windows == ((8,) * 5 + (None,)) * 2 + (8,)
    assert (config.attention.softcap, config.softcap, config.attention.norm_eps) == (None, None, 1e-6)
    assert (config.attention.rope, config.window_rope) == (Rope(256, 1e6), Rope(256, 10000.0))


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_patterns_of_windows(third, key):
    plain = without(third, "layer_types", "_sliding_window_pattern")
    assert GemmaConfig.from_hf(plain | {key: 2}).windows == (8, None, 8, None)


def test_only_layers_that_see_all_keys_are_stretched(third):
    linear = {"rope_type": "linear", "factor": 8.0}
    config = GemmaConfig.from_hf(third | {"rope_scaling": linear})
    assert (config.attention.rope.scaling, config.window_rope.scaling) == (RopeScaling("linear", 8.0), None)
    new = {"full_attention": {"rope_theta": 1e6} | linear, "sliding_attention": {"rope_theta": 1e4}}
    assert GemmaConfig.from_hf(without(third, "rope_theta") | {"rope_parameters": new}) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": True}, "causal"),
        ({"hidden_activation": "gelu"}, "uses 'gelu'; jtile.models implements 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["full_attention"]}, "are not 4 of"),
        ({"layer_types": 4}, "layer_types 4 are not 4 of"),
        ({"rope_parameters": "default"}, "expected an object"),
        ({"query_pre_attn_scalar": -1}, "'query_pre_attn_scalar' = -1"),
    ],
)
def test_configurations_that_it_cannot_run(second, third, change, message):
    for config in (second, third):
        with pytest.raises(ModelError, match=message):
            GemmaConfig.from_hf(config | change)


def test_embeddings_are_tied_unless_the_file_says_otherwise(data, tmp_path, second, outputs):
    """Published files of Gemma 2 leave the entry out."""
    tensors, golden = load_file(data / "gemma2" / "model.safetensors"), outputs("gemma2")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(without(second, "tie_word_embeddings")))
    assert jtile.models.load(tmp_path).model.output is None
    (tmp_path / "config.json").write_text(json.dumps(second | {"tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"lacks the tensor lm_head\.weight"):
        jtile.models.load(tmp_path)
    doubled = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}
    save_file(doubled, tmp_path / "model.safetensors")
    out = np.asarray(jtile.models.load(tmp_path).logits(golden["input_ids"][:, :1]))
    plain = 10 * np.arctanh(golden["logits"][:, :1] / 10)  # before the bound
    np.testing.assert_allclose(out, 10 * np.tanh(2 * plain / 10), atol=2e-4)


def test_a_low_rank_update_of_the_mlp_has_its_activation(model, outputs):
    """The way of a weight with an update takes no fused kernel; with an update of zero it must mean the same."""
    lm, golden = model("gemma3"), outputs("gemma3")
    tuned = add_lora(lm.model, rank=2, targets=TARGETS)
    got = np.asarray(tuned(jnp.asarray(golden["input_ids"], jnp.int32)))
    assert np.abs(got - golden["logits"]).max() < 1e-4
