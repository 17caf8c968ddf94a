"""Generation: streaming, end tokens, limits, sampling through the whole model, and SmolLM2 against transformers."""

import copy
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile._errors import ModelError, PromptError
from jtile.models import cache as kv
from jtile.models import generate
from jtile.models.generate import CHUNK, LONG_CHUNK, SMALL, SMALL_ON_HOST, chunk_of


@pytest.fixture
def row(golden):
    return golden["input_ids"][0].tolist()


@pytest.mark.parametrize("count", [0, 1, 2, CHUNK, CHUNK + 1, CHUNK + 2])
def test_counts_around_the_size_of_a_chunk(tiny, golden, row, count):
    stream = tiny.stream(row, count)
    tokens = list(stream)
    assert tokens == golden["greedy"][0][:count].tolist()
    assert stream.stats.new_tokens == count
    assert stream.stats.prompt_tokens == 24


def test_small_models_have_longer_chunks(tiny, monkeypatch):
    with jt.config(arch="sm_90"):
        assert [chunk_of(SMALL - 1, steps) for steps in (CHUNK, CHUNK + 1)] == [CHUNK, LONG_CHUNK]
        assert chunk_of(SMALL, 100) == CHUNK
        monkeypatch.setattr(generate, "on_host", lambda: True)
        assert [chunk_of(SMALL_ON_HOST - 1, steps) for steps in (CHUNK, CHUNK + 1)] == [CHUNK, LONG_CHUNK]
        assert chunk_of(SMALL_ON_HOST, 100) == CHUNK
    assert tiny._nbytes == sum(w.nbytes for w in tiny._weights)


def test_tokens_do_not_depend_on_the_chunk(short, golden, monkeypatch):
    lm, ids, found = short("llama", 1), golden["input_ids"], []
    for chunk in (CHUNK, LONG_CHUNK):
        asked = set(lm._executables)
        monkeypatch.setattr(generate, "chunk_of", lambda nbytes, steps, chunk=chunk: chunk)
        found.append(lm.generate(ids, 20, eos=None))
        made = [dict(key[2]) for key in set(lm._executables) - asked]
        assert [static["chunk"] for static in made if "chunk" in static] == [chunk]
    assert np.array_equal(*found)


def test_end_tokens(tiny, golden, row):
    greedy = golden["greedy"][0].tolist()
    end = greedy[5]
    expected = greedy[: greedy.index(end) + 1]
    assert tiny.generate(row, 16, eos=end).tolist() == expected
    assert tiny.generate(row, 16, eos=[300, end, 301]).tolist() == expected
    programs = len(tiny._executables)
    assert tiny.generate(row, 16, eos=[301, 302, 303, end]).tolist() == expected
    assert len(tiny._executables) == programs  # three are four of which two are equal
    assert tiny.generate(row, 16, eos=None).tolist() == greedy


def test_a_row_that_ended_waits_for_the_others(tiny, golden):
    greedy = golden["greedy"]
    end = next(int(token) for token in greedy[0] if token not in greedy[1])
    at = greedy[0].tolist().index(end)
    out = tiny.generate(golden["input_ids"], 16, eos=end)
    assert out.shape == (2, 16)
    assert np.array_equal(out[1], greedy[1])
    assert np.array_equal(out[0, : at + 1], greedy[0, : at + 1])
    assert (out[0, at:] == end).all()


def test_sampled_rows_depend_on_their_seed_and_not_on_their_batch(short, golden):
    lm, options = short("llama", 1), dict(temperature=1.5, eos=None)
    ids = golden["input_ids"]
    both = lm.generate(ids, 20, seed=7, **options)
    assert np.array_equal(both[::-1], lm.generate(ids[::-1], 20, seed=[8, 7], **options))
    assert lm.generate(ids[1].tolist(), 20, seed=8, **options).tolist() == both[1].tolist()
    assert lm.generate(ids[1].tolist(), 20, seed=9, **options).tolist() != both[1].tolist()


def test_penalties_biases_and_log_probabilities(short, row):
    """Greedy with all of them, against the logits of whole sequences."""
    lm = short("llama", 1)
    stream = lm.stream(
        row, 12, eos=None, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={5: 4.0},
        logprobs=True,
    )  # fmt: skip
    made = list(stream)
    logits = np.asarray(lm.logits([row + made]), np.float64)[0, len(row) - 1 : -1]
    rest = np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(stream.logprobs, logits[np.arange(12), made] - rest, atol=1e-4)
    assert (logits.argmax(-1) != made).any()
    logits[:, 5] += 4
    for i, x in enumerate(logits):
        seen, counts = row + made[:i], np.bincount(made[:i], minlength=256)
        x[seen] = np.where(x[seen] > 0, x[seen] / 1.4, x[seen] * 1.4)
        assert made[i] == (x - 0.2 * counts - 0.3 * (counts > 0)).argmax()


def test_generation_ends_with_the_context(tiny, row):
    long = (row * 30)[:505]
    assert len(tiny.generate(long, 100, eos=None)) == 512 - 505
    assert len(tiny.generate((row * 30)[:512], 5)) == 0


def test_bad_arguments_raise_before_the_first_token(tiny, row):
    for ids, options, message in (
        ([], {}, "empty"),
        ([256], {}, "outside the vocabulary of 256"),
        (row * 30, {}, "context holds 512"),
        (row, {"max_new_tokens": -1}, "max_new_tokens"),
        (row, {"temperature": -0.1}, "temperature"),
        (row, {"logit_bias": {256: 1.0}}, "outside the vocabulary of 256"),
        ([row, row], {"seed": [1, 2, 3]}, "seed is one value, or one a row"),
        ("text", {}, "encode it first"),
        (row, {"eos": "<end>"}, "eos is 'model'"),
        (row, {"eos": 1.5}, "eos is 'model'"),
        (row, {"eos": [2, 2**40]}, "eos is 'model'"),
        (row, {"eos": ["<end>"]}, "eos is 'model'"),
        (row, {"max_new_tokens": 2.5}, "max_new_tokens is an int"),
        (None, {}, "prompt ids must be integers"),
    ):
        with pytest.raises(PromptError, match=message):
            tiny.stream(ids, **options)
    with pytest.raises(PromptError, match="outside the vocabulary"):
        tiny.logits([[0, 256]])


def test_a_stream_that_is_dropped_leaves_the_model_usable(tiny, golden, row):
    stream = tiny.stream(row, 200, eos=None)
    assert next(stream) == golden["greedy"][0][0]
    del stream
    assert tiny.generate(row, 16).tolist() == golden["greedy"][0].tolist()


def test_a_stream_that_is_dropped_leaves_no_cache_behind(tiny, row):
    """Python need not look for what refers to itself, which it does after a while, and the memory of a device is full
    before."""
    tiny.generate(row, 3, eos=None)
    enabled = gc.isenabled()
    gc.disable()
    try:
        before = len(jax.live_arrays())
        stream = tiny.stream(row, 3, eos=None)
        next(stream)
        assert len(jax.live_arrays()) > before
        del stream
        assert len(jax.live_arrays()) == before
    finally:
        if enabled:
            gc.enable()


def test_logits_that_are_no_numbers(tiny, golden, row):
    """From the second chunk of steps on; the programs are those of the test before."""
    chunk = chunk_of(tiny._nbytes, 199)
    lm = copy.copy(tiny)
    lm.dtype = "float16"  # as the error says
    stream = lm.stream(row, 200, eos=None)
    made = [next(stream)]
    lm._weights = [jnp.asarray(np.full(x.shape, np.nan, x.dtype)) for x in lm._weights]
    with pytest.raises(ModelError, match=rf"logits .* no numbers \(NaN\) at token {chunk + 1} .*='bfloat16' or"):
        made.extend(stream)
    assert len(made) == chunk + 1 and made[:16] == golden["greedy"][0][: chunk + 1].tolist()
    with pytest.raises(StopIteration):
        next(stream)


def test_buckets():
    assert [kv.bucket(n) for n in (1, 16, 17, 128, 129, 513)] == [16, 16, 32, 128, 144, 576]
    assert kv.bucket(500, 505) == 505
    for n in range(1, 3000):
        assert n <= kv.bucket(n) <= max(n + 15, n * 9 // 8)


def test_smollm2_makes_the_tokens_of_transformers(either_smollm2, smollm2_cases):
    """Of all prompts at once: two programs instead of eight."""
    made = either_smollm2.generate([case["prompt_ids"] for case in smollm2_cases], 48, eos=None).tolist()
    for found, case in zip(made, smollm2_cases, strict=True):
        assert found == case["greedy_ids"]
        assert either_smollm2.tokenizer.decode(found) == case["greedy_text"]


def test_smollm2_logits(either_smollm2, smollm2, smollm2_cases):
    """The four prompts as one left-padded batch, so that one compilation serves."""
    longest = max(len(case["prompt_ids"]) for case in smollm2_cases)
    ids, mask = np.full((4, longest), 2), np.zeros((4, longest), int)
    for i, case in enumerate(smollm2_cases):
        n = len(case["prompt_ids"])
        ids[i, longest - n :], mask[i, longest - n :] = case["prompt_ids"], 1
    last = np.asarray(either_smollm2.logits(ids, mask)[:, -1])
    for row, case in zip(last, smollm2_cases, strict=True):
        expected = {int(i): value for i, value in case["logits_probe"].items()}
        expected |= dict(zip(case["top5_ids"], case["top5_logits"], strict=True))
        limit = 1e-3 if either_smollm2 is smollm2 else 5e-2 if "byte tiles" in jt.target().features else 5e-3
        assert max(abs(row[i] - value) for i, value in expected.items()) < limit
        assert np.argsort(-row)[:5].tolist() == case["top5_ids"]


def test_smollm2_stops_at_its_end_token(smollm2, smollm2_cases):
    case = smollm2_cases[0]
    made = smollm2.generate(case["prompt_ids"], 48).tolist()
    assert made == case["greedy_ids"][: case["greedy_first_eos"] + 1]
