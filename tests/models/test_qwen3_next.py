"""What Qwen3-Next has beside other mixtures: states instead of tokens, gates, rotations of a part of a head. Its values
are in test_golden.py."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jtile.models
from jtile._errors import ModelError, PromptError
from jtile.models import Engine, NGram
from jtile.models import cache as kv
from jtile.models.adapters import save_adapter
from jtile.models.lora import add_lora
from jtile.models.qwen3_next import Qwen3NextConfig
from jtile.models.rope import Rope, RopeScaling
from jtile.testing.evaluate import evaluated


@pytest.fixture
def lm(model):
    return model("qwen3_next")


@pytest.fixture
def config(data):
    return json.loads((data / "qwen3_next" / "config_hub.json").read_text())


def test_the_router_chooses_the_experts_of_transformers(lm, outputs, chosen_experts):
    golden = outputs("qwen3_next")
    got = chosen_experts(lm, golden["input_ids"].astype(np.int32))
    assert np.array_equal(got, golden["router_topk"])


@pytest.mark.parametrize("layout", [kv.Layout(32), kv.Layout(32, "int8", page=8)], ids=["plain", "int8 in pages"])
def test_steps_go_on_behind_rows_of_any_length(lm, outputs, layout):
    """Several tokens in a step and one, behind rows of which one is padded and one shorter than the convolution."""
    ids, lengths = outputs("qwen3_next")["input_ids"].astype(np.int32), np.array([17, 2], np.int32)

    @jax.jit
    def run(ids, new):
        _, entries = lm.model.prefill(ids, lengths)
        cache = kv.from_prefill(entries, jnp.asarray(lengths), layout)
        first, cache = lm.model.step(new[:, :3], cache)
        return first, lm.model.step(new[:, 3], cache)

    new = np.stack([row[n : n + 4] for row, n in zip(ids, lengths)])
    first, (last, cache) = run(ids[:, :20], new)
    golden = outputs("qwen3_next")["logits"]
    expected = np.stack([row[n : n + 4] for row, n in zip(golden, lengths)])
    near = 1e-4 if layout.dtype is None else 0.1
    assert np.abs(np.asarray(first) - expected[:, :3]).max() < near
    assert np.abs(np.asarray(last) - expected[:, 3]).max() < near
    states = [entry for entry in cache.entries if isinstance(entry, kv.State)]
    assert len(states) == 3 and all(s.state.dtype == jnp.float32 for s in states)


def test_training_goes_through_the_states(lm, outputs):
    ids = outputs("qwen3_next")["input_ids"][:, :8].astype(np.int32)

    graph, state = nnx.split(lm.model)
    loss, gradient = evaluated(jax.value_and_grad(lambda state: nnx.merge(graph, state).loss(ids)))(state)
    sizes = [float(np.abs(x).max()) for x in jax.tree.leaves(gradient)]
    assert 0 < loss < 20 and all(0 < size < 10 for size in sizes)


def test_drafts_and_engines_are_refused(lm):
    with pytest.raises(PromptError, match="keep a state of all tokens, from which drafts cannot be taken back"):
        lm.generate([1, 2], 4, draft=NGram())
    with pytest.raises(ModelError, match="keep a state and no tokens, and the pages of an engine hold tokens"):
        Engine(lm)


def test_adapters_of_its_attention_are_refused(data, tmp_path):
    tuned = jtile.models.load(data / "qwen3_next").model
    add_lora(tuned, 2, targets=("output",))
    with pytest.raises(ModelError, match="adapters do not fit the attention of block 0"):
        save_adapter(tuned, tmp_path / "new")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 3}, "3 heads of values do not divide into 2 heads of keys"),
        ({"layer_types": ["sliding_attention"] * 4}, "are not 4 of linear_attention, full_attention"),
        ({"layer_types": ["full_attention"]}, "are not 4 of linear_attention, full_attention"),
        ({"partial_rotary_factor": 2.0}, "an even number of the 32 features of a head, got 64"),
        ({"attention_bias": True}, "this model has attention_bias"),
        ({"num_experts_per_tok": 9}, "chooses 9 experts of 8"),
    ],
)
def test_configurations_that_it_cannot_run(config, change, message):
    with pytest.raises(ModelError, match=message):
        Qwen3NextConfig.from_hf({**config, **change})


def test_configurations(config):
    read = Qwen3NextConfig.from_hf(config)
    assert read.linear == (True, True, True, False) and read.mixture.layers == (0, 1, 3)
    assert (read.attention.rope.rotated, read.attention.gated, read.delta.channels) == (8, True, 160)
    every = Qwen3NextConfig.from_hf({**config, "full_attention_interval": 2})
    assert every.linear == (True, False, True, False)


def test_rotations_of_a_part_of_a_head():
    """The others stand still, also where frequencies are stretched; features stand so that pairs are halves."""
    for scaling in (None, RopeScaling("yarn", 4.0, original_max_length=64)):
        part, whole = Rope(32, 1e4, scaling, 8), Rope(8, 1e4, scaling)
        np.testing.assert_array_equal(part.frequencies(), np.pad(whole.frequencies(), (0, 12)))
    order = part.order()
    assert sorted(order) == list(range(32)) and whole.order() is None
    np.testing.assert_array_equal(order[:4] + 4, order[16:20])
    np.testing.assert_array_equal(order[:4], range(4))
