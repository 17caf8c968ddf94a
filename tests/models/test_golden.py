"""Every tiny model of tests/data against transformers: logits, layers, padded rows, greedy tokens, both spellings."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from stateless import run

from jtile._errors import ModelError
from jtile.models.families import FAMILIES, read_config

DATA = Path(__file__).resolve().parent.parent / "data"
NAMES = sorted(path.parent.name for path in DATA.glob("*/io.npz"))
TOLERANCE = 1e-4  # float32 noise is 4e-5; the smallest wrong feature of these models moves logits by 5e-2


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_every_family_has_its_model():
    kinds = {json.loads((DATA / name / "config.json").read_text())["model_type"] for name in NAMES}
    assert kinds == set(FAMILIES)


def test_logits(model, outputs, name):
    lm, golden = model(name), outputs(name)
    out = np.asarray(lm.logits(golden["input_ids"]))
    assert out.dtype == np.float32
    assert np.abs(out - golden["logits"]).max() < TOLERANCE


def test_logits_of_a_left_padded_batch(model, outputs, name):
    lm, golden = model(name), outputs(name)
    out = np.asarray(lm.logits(golden["lp_input_ids"], golden["lp_attention_mask"]))
    assert np.abs(out - golden["lp_logits"]).max() < TOLERANCE
    assert not out[golden["lp_attention_mask"] == 0].any()


def test_greedy_continuation(model, outputs, name):
    lm, golden = model(name), outputs(name)
    assert np.array_equal(lm.generate(golden["input_ids"], 16, eos=None), golden["greedy"])


def test_greedy_continuation_of_a_left_padded_batch(model, outputs, name):
    lm, golden = model(name), outputs(name)
    ids, mask = golden["lp_input_ids"], golden["lp_attention_mask"]
    assert np.array_equal(lm.generate(ids, 16, eos=None, attention_mask=mask), golden["lp_greedy"])


def test_hidden_states(model, outputs, name):
    lm, golden = model(name), outputs(name)
    states = run(lambda m, ids: m.hidden_states(ids), lm.model, golden["input_ids"].astype(np.int32))
    for got, expected in zip(states, golden["hidden_states"], strict=True):
        assert np.abs(np.asarray(got) - expected).max() < TOLERANCE


def test_both_spellings_of_the_configuration_say_the_same(name):
    new, old = (json.loads((DATA / name / file).read_text()) for file in ("config.json", "config_hub.json"))
    assert read_config(new, "new") == read_config(old, "old")
    for key in ("architectures", "model_type"):  # either of them says which model it is
        assert read_config({k: v for k, v in new.items() if k != key}, "new") == read_config(old, "old")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "of the type 'mamba' (no architectures); jtile runs 'deepseek_v3'"),
        ({"architectures": ["GPT2LMHeadModel"]}, "of the type None (GPT2LMHeadModel)"),
        ({"model_type": ["llama"]}, "of the type ['llama']"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' = 'LlamaForCausalLM'; expected a list of str"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "jtile runs LlamaForCausalLM"),
    ],
)
def test_other_models_are_refused(config, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        read_config(config, "it")
