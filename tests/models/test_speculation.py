"""Speculative decoding: the tokens are those of a generation without, whoever drafts and however they are chosen."""

import copy
import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jtile.models
from jtile._errors import PromptError
from jtile.models import NGram

TOTAL = 24


@pytest.fixture(scope="module")
def near(data, tmp_path_factory):
    """A model that often agrees with the tiny Llama: its weights, disturbed."""
    folder, rng = tmp_path_factory.mktemp("near"), np.random.default_rng(0)
    tensors = load_file(data / "llama" / "model.safetensors")
    disturbed = {name: (x * (1 + 0.05 * rng.normal(size=x.shape))).astype(x.dtype) for name, x in tensors.items()}
    save_file(disturbed, folder / "model.safetensors")
    (folder / "config.json").write_text((data / "llama" / "config.json").read_text())
    return jtile.models.load(folder)


def prompts(golden):
    """Two rows of different lengths; the second one repeats itself, which an n-gram sees."""
    ids = golden["input_ids"]
    return [ids[0].tolist(), ids[1, :9].tolist() * 2]


def rate(stream):
    return stream.stats.accepted_tokens / stream.stats.drafted_tokens


def test_greedy_tokens_are_those_without_drafts(tiny, near, golden):
    ids = prompts(golden)
    plain = tiny.generate(ids, TOTAL, eos=None)
    for draft, least in ((near, 0.2), (NGram(2), 0.0)):
        stream = tiny.stream(ids, TOTAL, eos=None, draft=draft, draft_tokens=3)
        assert np.array_equal(np.stack(list(stream), axis=1), plain)
        assert stream.stats.new_tokens == TOTAL
        assert least <= rate(stream) <= 1


def test_drawn_tokens_are_those_without_drafts(tiny, near, golden):
    """With penalties, whose counts go on from draft to draft and back; a draft draws with the noise of the target."""
    ids = prompts(golden)
    options = dict(temperature=[0.0, 0.8], top_k=40, repetition_penalty=1.2, frequency_penalty=0.1, seed=5)
    plain = tiny.stream(ids, TOTAL, eos=None, logprobs=True, **options)
    tokens = list(plain)
    stream = tiny.stream(ids, TOTAL, eos=None, logprobs=True, draft=near, draft_tokens=3, **options)
    assert np.array_equal(list(stream), tokens)
    assert rate(stream) > 0.15
    np.testing.assert_allclose(stream.logprobs, plain.logprobs, atol=1e-4)


def test_rows_end_where_they_would(tiny, near, golden):
    ids = prompts(golden)
    plain = tiny.generate(ids, TOTAL, eos=None)
    for end in (int(plain[0, 5]), int(plain[1, 0]), int(plain[1, 2])):
        wanted = tiny.generate(ids, TOTAL, eos=end)
        assert np.array_equal(tiny.generate(ids, TOTAL, eos=end, draft=near, draft_tokens=3), wanted)


def test_windows_and_pages(data, outputs):
    lm, golden = jtile.models.load(data / "gemma2", page_size=8), outputs("gemma2")
    ids = golden["input_ids"]
    assert np.array_equal(lm.generate(ids, 16, eos=None, draft=NGram(), draft_tokens=2), golden["greedy"])


def followed(row, n, count):
    """What `NGram(n)` should draft behind a row, by its definition."""
    for size in range(min(n, len(row) - 1), 0, -1):
        for end in range(len(row) - 1, size - 1, -1):  # the last place first
            if row[end - size : end] == row[-size:]:
                return [row[end + i % (len(row) - end)] for i in range(count)]
    return None


@pytest.mark.parametrize("n", [1, 3])
def test_ngrams(n):
    rng = np.random.default_rng(n)
    history, last = rng.integers(0, 4, (64, 20)).astype(np.int32), rng.integers(0, 20, 64).astype(np.int32)
    drafts = np.asarray(NGram(n).propose(history, last, 5)).tolist()
    cases = [
        (followed(row[: end + 1].tolist(), n, 5), draft) for row, end, draft in zip(history, last, drafts, strict=True)
    ]
    assert all(wanted == draft for wanted, draft in cases if wanted is not None)
    assert sum(wanted is not None for wanted, _ in cases) > 30


def test_drafts_that_do_not_fit(tiny):
    other = copy.copy(tiny)
    other.config = dataclasses.replace(tiny.config, vocab_size=300)
    for options, message in (
        ({"draft": "ngram"}, "a draft is a LanguageModel, an NGram or None, got 'ngram'"),
        ({"draft": NGram(), "draft_tokens": 0}, "draft_tokens is an int of at least 1, got 0"),
        (
            {"draft": other},
            r"the draft .*llama has another vocabulary \(300 tokens\) than .*llama \(256\)",
        ),
    ):
        with pytest.raises(PromptError, match=message):
            tiny.stream([1, 2], 4, **options)
    with pytest.raises(PromptError, match="the n of an n-gram is an int of at least 1, got 0"):
        NGram(0)
