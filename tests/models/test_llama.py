"""The tiny Llama against transformers, beside test_golden.py: ragged rows, the cache, rotary scalings, refusals."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jtile._errors import ModelError
from jtile.models import cache as kv
from jtile.models.llama import LlamaConfig
from jtile.models.rope import Rope, RopeScaling

TOLERANCE = 1e-4  # float32 noise is 4e-5; the smallest wrong feature moves logits by 0.87


def test_logits_of_a_right_padded_batch(tiny, golden):
    ids, mask = golden["input_ids"].copy(), np.ones((2, 24), bool)
    ids[1, 9:], mask[1, 9:] = 0, False
    out = np.asarray(tiny.logits(ids, mask))
    assert np.abs(out[mask] - golden["logits"][mask]).max() < TOLERANCE


def test_logits_of_one_row_and_of_one_token(tiny, golden):
    row = golden["input_ids"][0]
    assert np.abs(np.asarray(tiny.logits(row)) - golden["logits"][0]).max() < TOLERANCE
    assert np.abs(np.asarray(tiny.logits(row[:1].tolist())) - golden["logits"][0, :1]).max() < TOLERANCE


def test_greedy_continuation_of_one_row(tiny, golden):
    assert tiny.generate(golden["input_ids"][1], 16).tolist() == golden["greedy"][1].tolist()


def test_greedy_continuation_of_ragged_rows(tiny, golden):
    ids, mask = golden["lp_input_ids"], golden["lp_attention_mask"]
    ragged = [row[keep == 1].tolist() for row, keep in zip(ids, mask, strict=True)]
    assert np.array_equal(tiny.generate(ragged, 16), golden["lp_greedy"])


def test_the_cache_agrees_with_whole_prompts(tiny, golden):
    ids = golden["input_ids"][0].tolist()
    made = tiny.generate(ids, 12, eos=None).tolist()
    logits = np.asarray(tiny.logits(ids + made))
    assert logits.argmax(-1)[len(ids) - 1 : -1].tolist() == made


def test_some_tokens_alone_go_through_the_last_mlp(tiny, golden):
    """Where the logits of a few tokens are asked for: they are the same, and the last MLP has as many rows."""
    model, ids, of = tiny.model, jnp.asarray(golden["input_ids"]), np.array([3, 17, 40, 3], np.int32)
    empty = kv.from_prefill(model.prefill(ids)[1], jnp.zeros((2,), jnp.int32), kv.Layout(32))
    whole, rows, mlp = model.step(ids, empty)[0].reshape(48, -1), [], model.blocks[-1].mlp
    with pytest.MonkeyPatch.context() as patch:
        kept = type(mlp).behind_norm
        patch.setattr(
            type(mlp), "behind_norm", lambda self, x, *of, **more: (rows.append(len(x)), kept(self, x, *of, **more))[1]
        )
        some = model.step(ids, empty, of)[0]
    assert rows == [48] * (len(model.blocks) - 1) + [4]
    assert np.abs(np.asarray(some) - np.asarray(whole)[of]).max() < TOLERANCE


@pytest.mark.parametrize("spelling", ["config.json", "config_hub.json"])
def test_rope_scaling_in_both_spellings(tiny_folder, spelling):
    config = LlamaConfig.from_hf(json.loads((tiny_folder / spelling).read_text()))
    assert config.attention.rope == Rope(16, 500000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 64))


@pytest.fixture
def config(tiny_folder):
    return json.loads((tiny_folder / "config_hub.json").read_text())


def test_old_checkpoints_without_rope_scaling(config):
    del config["rope_scaling"], config["rope_theta"], config["head_dim"], config["num_key_value_heads"]
    parsed = LlamaConfig.from_hf(config).attention
    assert (parsed.rope, parsed.head_dim, parsed.kv_heads) == (Rope(16, 10000.0), 16, 4)


def test_rope_scalings():
    frequencies = lambda *scaling: Rope(16, 10000.0, RopeScaling(*scaling)).frequencies()
    base = Rope(16, 10000.0).frequencies()
    assert np.allclose(base, 10000.0 ** (-np.arange(8) / 8))
    assert np.allclose(frequencies("linear", 4.0), base / 4)
    factors = Rope(16, 10000.0, RopeScaling("factors", factors=tuple(range(1, 9))))
    assert np.allclose(factors.frequencies(), base / np.arange(1, 9))
    ratio = base / frequencies("llama3", 8.0, 1.0, 4.0, 64)
    assert ratio[0] == 1
    assert np.allclose(ratio[-3:], 8)
    assert np.all(np.diff(ratio) > -1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "unknown rope scaling 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks 'low_freq_factor'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' = 0; expected a positive int"),
        ({"num_attention_heads": "4"}, "'num_attention_heads' = '4'"),
        ({"rms_norm_eps": -1e-5}, "'rms_norm_eps' = -1e-05; expected a positive float"),
        ({"head_dim": 15}, "even head size"),
    ],
)
def test_configurations_that_it_cannot_run(config, change, message):
    with pytest.raises(ModelError, match=message):
        LlamaConfig.from_hf(config | change)
