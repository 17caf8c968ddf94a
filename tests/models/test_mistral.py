"""What Mistral has beside Llama: a window of keys; its values are in test_golden.py."""

import json
import shutil

import numpy as np
import pytest

import jtile.models
from jtile._errors import ModelError
from jtile.models import mistral


@pytest.fixture
def config(data):
    return json.loads((data / "mistral" / "config_hub.json").read_text())


@pytest.mark.parametrize(
    ("change", "window"),
    [({}, 8), ({"sliding_window": None}, None), ({"sliding_window": 3}, 3), ({"sliding_window": 2**40}, None)],
)
def test_windows(config, change, window):
    assert mistral.from_hf(config | change).attention.window == window
    assert mistral.from_hf({k: v for k, v in config.items() if k != "sliding_window"}).attention.window is None


def test_a_window_that_is_none(config):
    with pytest.raises(ModelError, match="'sliding_window' = 0"):
        mistral.from_hf(config | {"sliding_window": 0})


def test_old_tokens_leave_the_window(model, outputs):
    """Three layers see 3 (8 - 1) tokens back: 22 tokens before the last one is too far, 21 are not."""
    lm, ids = model("mistral"), outputs("mistral")["input_ids"][:1].repeat(3, axis=0)
    ids[1, 1], ids[2, 2] = (ids[0, 1] + 1) % 256, (ids[0, 2] + 1) % 256
    last = np.asarray(lm.logits(ids))[:, -1]
    np.testing.assert_array_equal(last[0], last[1])
    assert np.abs(last[0] - last[2]).max() > 0


def test_steps_see_the_window_of_whole_prompts(model, outputs):
    lm, ids = model("mistral"), outputs("mistral")["input_ids"][:, :5]
    made = lm.generate(ids, 30, eos=None)
    logits = np.asarray(lm.logits(np.concatenate([ids, made], axis=1)))
    assert np.array_equal(logits.argmax(-1)[:, 4:-1], made)


def test_without_its_window_it_is_another_model(data, tmp_path, config, outputs):
    shutil.copy(data / "mistral" / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    golden = outputs("mistral")
    out = np.asarray(jtile.models.load(tmp_path).logits(golden["input_ids"]))
    assert np.abs(out - golden["logits"])[:, :8].max() < 1e-4
    assert np.abs(out - golden["logits"])[:, 8:].max() > 1
