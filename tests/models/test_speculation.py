"""Speculative decoding: the tokens are those of a generation without, whoever drafts and however they are chosen."""

import copy
import dataclasses

import jax
import numpy as np
import pytest

from jtile._errors import PromptError
from jtile.models import NGram

TOTAL = 20


@pytest.fixture(scope="module")
def target(short):
    return short("llama", 1)


@pytest.fixture(scope="module")
def near(short):
    """A model that often agrees with the target: its weights, disturbed."""
    return short("llama", 1, noise=0.05)


class SameVocabulary:
    """In the place of a tokenizer."""

    def same_vocabulary(self, other):
        return True


@pytest.fixture
def prompts(golden):
    """Two rows of different lengths."""
    return [row[:n].tolist() for row, n in zip(golden["input_ids"], (24, 17), strict=True)]


# A greedy row and one that is drawn, with penalties, whose counts go on from draft to draft and back.
OPTIONS = dict(temperature=[0.0, 0.8], top_k=40, repetition_penalty=1.2, frequency_penalty=0.1, seed=5)


def test_a_model_drafts(target, near, prompts):
    plain = target.stream(prompts, TOTAL, eos=None, logprobs=True, **OPTIONS)
    tokens = list(plain)
    stream = target.stream(prompts, TOTAL, eos=None, logprobs=True, draft=near, draft_tokens=3, **OPTIONS)
    assert np.array_equal(list(stream), tokens)
    np.testing.assert_allclose(stream.logprobs, plain.logprobs, atol=1e-4)
    stats = stream.stats
    assert stats.new_tokens == TOTAL
    assert 0.15 < stats.accepted_tokens / stats.drafted_tokens < 1
    assert stats.drafted_tokens % 3 == 0


@pytest.mark.parametrize("at", [(0, 5), (1, 0), (1, 2), (1, 9)], ids=str)
def test_rows_end_where_they_would(target, near, prompts, at):
    """Each in its own step; the programs are those of the test before."""
    run = lambda eos, **more: np.array(list(target.stream(prompts, TOTAL, eos=eos, logprobs=True, **OPTIONS, **more)))
    end = int(run(None)[at[::-1]])
    assert np.array_equal(run(end, draft=near, draft_tokens=3), run(end))


@pytest.mark.parametrize("vocab", [200, 272])
def test_a_draft_of_the_same_text_has_another_table_and_a_shorter_context(target, short, prompts, vocab):
    draft, alike = short("llama", 1, vocab=vocab), copy.copy(target)
    draft.tokenizer = alike.tokenizer = SameVocabulary()
    draft.config = dataclasses.replace(draft.config, max_length=26)
    assert max(map(max, prompts)) > 200
    stream = alike.stream(prompts, 8, eos=None, draft=draft, draft_tokens=2)
    assert np.array_equal(np.stack(list(stream), axis=1), target.generate(prompts, 8, eos=None))
    assert stream.stats.accepted_tokens > 0


def test_an_ngram_drafts(short, outputs):
    """Greedy, of a model with a window and pages; a prompt that is said twice begins again."""
    lm, ids = short("gemma2", 1, page_size=8), np.tile(outputs("gemma2")["input_ids"][:, :9], (1, 2))
    stream = lm.stream(ids, 12, eos=None, draft=NGram(2), draft_tokens=2)
    assert np.array_equal(np.stack(list(stream), axis=1), lm.generate(ids, 12, eos=None))
    assert stream.stats.drafted_tokens > 0


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
    drafts = np.asarray(jax.jit(NGram(n).propose, static_argnums=2)(history, last, 5)).tolist()
    cases = [
        (followed(row[: end + 1].tolist(), n, 5), draft) for row, end, draft in zip(history, last, drafts, strict=True)
    ]
    assert all(wanted == draft for wanted, draft in cases if wanted is not None)
    assert sum(wanted is not None for wanted, _ in cases) > 30


def test_drafts_that_do_not_fit(target):
    other = copy.copy(target)
    other.config = dataclasses.replace(target.config, vocab_size=300)
    for options, message in (
        ({"draft": "ngram"}, "a draft is a LanguageModel, an NGram or None, got 'ngram'"),
        ({"draft": NGram(), "draft_tokens": 0}, "draft_tokens is an int of at least 1, got 0"),
        (
            {"draft": other},
            r"the draft short llama has another vocabulary \(300 tokens\) than short llama \(256\)",
        ),
    ):
        with pytest.raises(PromptError, match=message):
            target.stream([1, 2], 4, **options)
    with pytest.raises(PromptError, match="the n of an n-gram is an int of at least 1, got 0"):
        NGram(0)
