"""What Llama 4 has beside other mixtures: chunks, layers without rotations, weighted rows. Its values are in
test_golden.py."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile._errors import ModelError, PromptError
from jtile.models import Engine, NGram, experts, layers
from jtile.models import cache as kv
from jtile.models.families import read_config
from jtile.models.folder import open_folder
from jtile.models.llama4 import Llama4Config
from jtile.models.rope import Rope, RopeScaling
from jtile.testing import relative_error


@pytest.fixture
def lm(model):
    return model("llama4")


@pytest.fixture
def config(data):
    return json.loads((data / "llama4" / "config_hub.json").read_text())


def test_the_router_chooses_the_experts_of_transformers(lm, outputs, monkeypatch):
    """Of which each row goes through one, a token's rows behind each other."""
    golden, found, mixture = outputs("llama4"), [], experts.mixture

    def recorded(x, chosen, *rest):
        found.append(chosen)
        return mixture(x, chosen, *rest)

    monkeypatch.setattr(experts, "mixture", recorded)
    ids = golden["input_ids"].astype(np.int32)
    got = jax.jit(lambda ids: (lm.model.hidden_states(ids), list(found))[1])(ids)
    assert np.array_equal(np.sort([x.reshape(*ids.shape, -1) for x in got]), golden["router_topk"])


@pytest.mark.parametrize("layout", [
    kv.Layout(32), kv.Layout(10, windows=(10, None, 10, None)), kv.Layout(32, "int8", (10, None, 10, None), 8),
], ids=["one chunk", "no ring", "a ring, int8, pages"])  # fmt: skip
def test_steps_go_on_behind_prompts(lm, outputs, layout):
    """Within the first chunk of 10 several tokens may come at once; behind it a ring holds the newest chunk."""
    golden, ring = outputs("llama4"), bool(layout.windows) and layout.slots > 10
    ids, lengths = golden["input_ids"].astype(np.int32), np.array([17, 10] if ring else [5, 3], np.int32)

    @jax.jit
    def run(ids, new):
        _, entries = lm.model.prefill(ids, lengths)
        cache = kv.from_prefill(entries, jnp.asarray(lengths), layout)
        first, cache = lm.model.step(new[:, 0] if ring else new[:, :3], cache)
        return first, lm.model.step(new[:, 1 if ring else 3], cache)

    new = np.stack([row[n : n + 4] for row, n in zip(ids, lengths)])
    first, (last, cache) = run(ids[:, :17] if ring else ids[:, :8], new)
    expected = np.stack([row[n : n + 4] for row, n in zip(golden["logits"], lengths)])
    near = 1e-4 if layout.dtype is None else 0.1
    assert np.abs(np.asarray(first) - (expected[:, 0] if ring else expected[:, :3])).max() < near
    assert np.abs(np.asarray(last) - expected[:, 1 if ring else 3]).max() < near
    assert [entry.ring for entry in cache.entries] == [ring, False, ring, False]


def test_chunks_are_those_of_a_mask():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 11, n, 8)), jnp.float32) for n in (4, 2, 2))
    place = np.arange(11)
    seen = (place[:, None] >= place[None]) & (place[:, None] // 4 == place[None] // 4)
    scores = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 2, axis=2)) / 8**0.5
    weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
    expected = jnp.einsum("bhts,bshd->bthd", weights, jnp.repeat(v, 2, axis=2))
    assert relative_error(layers.chunked_attention(q, k, v, 4), expected) < 1e-5
    assert relative_error(layers.chunked_attention(q[:, :3], k[:, :3], v[:, :3], 4), expected[:, :3]) < 1e-5


def test_the_text_of_a_model_with_images(data, config, tmp_path):
    """Whose tensors have a prefix; those of images are left alone."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(data / "llama4" / "model.safetensors")
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file({**named, "vision_model.class_embedding": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    text = {k: v for k, v in config.items() if k not in ("architectures", "eos_token_id")}
    whole = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "text_config": text,
             "vision_config": {"hidden_size": 8}, "eos_token_id": [2, 3]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    opened = open_folder(tmp_path)
    assert opened.config == read_config(config, "text") and opened.eos_ids == (2, 3)
    assert set(opened.tensors) == set(tensors)
    with pytest.raises(ModelError, match="'llama4' lacks 'text_config'"):
        read_config({"model_type": "llama4"}, "it")


def test_what_goes_beyond_a_chunk_is_refused(lm):
    with pytest.raises(PromptError, match="within the first 10 positions; 2 tokens of prompt, 8 new ones"):
        lm.generate([1, 2], 8, draft=NGram(), draft_tokens=3)
    with pytest.raises(ModelError, match="attend in chunks of 10 tokens, and an engine serves one chunk"):
        Engine(lm, max_length=11)


@pytest.mark.long
def test_drafts_and_engines_within_a_chunk(short):
    """Give the tokens of a stream."""
    lm = short("llama4", 1)
    expected = lm.generate([5, 6, 5, 6], 5, eos=None)
    assert np.array_equal(lm.generate([5, 6, 5, 6], 5, eos=None, draft=NGram(), draft_tokens=1), expected)
    with Engine(lm, rows=2, shapes=(8,)) as engine:
        (got,) = engine.generate([[5, 6, 5, 6]], max_tokens=5, eos=None)
        assert engine.settings.length == 10
    assert np.array_equal(got.ids, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers .* are not 4 of 0 and 1"),
        ({"no_rope_layers": [1, 0, 2, 0]}, "no_rope_layers .* are not 4 of 0 and 1"),
        ({"layer_types": ["sliding_attention"] * 4}, "are not 4 of chunked_attention, full_attention"),
        ({"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 4}, "it has no attention_chunk_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scales its rotations"),
        ({"attention_bias": True}, "this model has attention_bias"),
        ({"num_experts_per_tok": 5}, "chooses 5 experts of 4"),
    ],
)
def test_configurations_that_it_cannot_run(config, change, message):
    with pytest.raises(ModelError, match=message):
        Llama4Config.from_hf({**config, **change})


def test_configurations(config):
    read = Llama4Config.from_hf(config)
    assert read.turned == (True, False, True, False) and read.chunks == (10, None, 10, None)
    assert read.mixture.layers == (1, 3) and read.still.tempered == (0.5, 8.0)
    other = {"no_rope_layers": [1, 1, 1, 0, 0], "attention_chunk_size": None, "moe_layers": [0], "use_qk_norm": False}
    read = Llama4Config.from_hf({**config, **other, "attn_temperature_tuning": False})
    assert read.turned == (True, True, True, False) and read.chunks == (None,) * 4 and read.mixture.layers == (0,)
    assert read.still.tempered is None and read.attention.norm_eps is None


def test_ropes():
    """Llama 4's frequencies are kept or divided, with nothing between; a rope that turns nothing has none."""
    stretched = Rope(16, 500000.0, RopeScaling("llama3", 8.0, 1.0, 1.0, 64), adjacent=True)
    plain = dataclasses.replace(stretched, scaling=None).frequencies()
    periods = 64 * plain / (2 * np.pi)
    np.testing.assert_allclose(stretched.frequencies(), np.where(periods > 1, plain, plain / 8), rtol=1e-6)
    np.testing.assert_array_equal(stretched.order(), [*range(0, 16, 2), *range(1, 16, 2)])
    still = Rope(16, 1.0, rotated=0, tempered=(0.5, 8.0))
    assert still.order() is None and not still.frequencies().any()
    cos, sin = layers.rope_angles(jnp.asarray([0, 6, 7, 15]), jnp.asarray(still.frequencies()), 1.0, still.tempered)
    np.testing.assert_allclose(cos[:, 3], 1 + 0.5 * np.log1p([0, 0, 1, 2]), rtol=1e-6)
    assert not np.asarray(sin).any()
