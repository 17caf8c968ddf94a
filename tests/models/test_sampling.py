"""Sampling against its definition: which tokens may come, how often, and the same ones for the same seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile._errors import PromptError
from jtile.models import sampling as module
from jtile.models.sampling import Sampling, begin, choose, noted

PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], np.float32)
ORDER = np.array([3, 0, 5, 2, 1, 4])  # token i of the vocabulary has PROBABILITIES[ORDER[i]]
LOGITS = np.log(PROBABILITIES[ORDER]) + 2.5
inf = float("inf")


run = jax.jit(choose, static_argnums=2)


def draw(n, **options):
    """n tokens of LOGITS, each of a row with a seed of its own, as indices into PROBABILITIES."""
    sampling, rows = Sampling(**options), np.broadcast_to(LOGITS, (n, 6))
    return ORDER[np.asarray(run(rows, np.int32(0), sampling.static, sampling.traced(n, 6), {}))]


CASES = [
    ({}, PROBABILITIES),
    ({"temperature": 0.5}, PROBABILITIES**2),
    ({"top_k": 2}, [0.4, 0.25, 0, 0, 0, 0]),
    ({"top_k": 99}, PROBABILITIES),
    ({"top_p": 0.7}, [0.4, 0.25, 0.15, 0, 0, 0]),  # 0.65 is too little, 0.8 is enough
    ({"top_p": 0.3}, [1, 0, 0, 0, 0, 0]),
    ({"top_p": 1.0}, PROBABILITIES),
    ({"top_k": 3, "top_p": 0.7}, [0.4, 0.25, 0, 0, 0, 0]),  # of the 0.8 that top_k leaves: 0.81
    ({"min_p": 0.3}, [0.4, 0.25, 0.15, 0, 0, 0]),  # at least 0.12
    ({"temperature": 2.0, "min_p": 0.51}, np.sqrt([0.4, 0.25, 0.15, 0, 0, 0])),  # of the flattened distribution
    ({"logit_bias": {1: -inf, 3: np.log(4)}}, [0, 0.25, 0.6, 0.1, 0.06, 0.04]),  # token 1 is of 0.4, token 3 of 0.15
    ({"temperature": 0.0}, [1, 0, 0, 0, 0, 0]),
    ({"temperature": 0.0, "logit_bias": {0: 3.0}}, [0, 0, 0, 1, 0, 0]),  # token 0 is of 0.1
    ({"top_k": 1}, [1, 0, 0, 0, 0, 0]),
    ({"temperature": 2e-38}, [1, 0, 0, 0, 0, 0]),  # by which 2.5 is beyond float32
    ({"logit_bias": {0: 3.4e38}, "top_p": 0.7}, [0, 0, 0, 1, 0, 0]),
]


def test_frequencies_of_rows_with_options_of_their_own():
    count, options = 5000, [{"temperature": 1.0} | options for options, _ in CASES]
    of_rows = {
        name: [of_case.get(name) for of_case in options for _ in range(count)]
        for name in ("temperature", "top_k", "top_p", "min_p", "logit_bias")
    }
    for tokens, (options, expected) in zip(draw(count * len(CASES), **of_rows).reshape(-1, count), CASES, strict=True):
        expected = np.asarray(expected) / np.sum(expected)
        seen = np.bincount(tokens, minlength=6) / count
        assert np.abs(seen - expected).max() < 0.024, options  # three standard deviations of 5000 draws
        assert not seen[expected == 0].any(), options


def test_seeds():
    """A row's tokens are those of its seed: in whatever batch it stands, and whatever its neighbours are."""
    a, b, c = (draw(500, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(a, b)
    assert np.array_equal(a[1:], c[:-1])  # an int is the seed of the first row
    assert np.mean(a == c) < 0.5
    seeds = np.arange(500)[::-1]
    assert np.array_equal(draw(500, temperature=1.0, seed=seeds)[:-1], a[seeds[:-1] - 1])
    drawn, rows = Sampling(temperature=1.0), np.broadcast_to(LOGITS, (500, 6))
    of_steps = [run(rows, np.int32(i), drawn.static, drawn.traced(500, 6), {}) for i in range(2)]
    assert np.mean(of_steps[0] == of_steps[1]) < 0.5
    rows = np.where(np.arange(500)[:, None] == 7, np.array([1, 2, np.nan, 3, 4, 5], np.float32), rows)
    tokens = run(rows, np.int32(0), drawn.static, drawn.traced(500, 6), {})
    assert np.array_equal(tokens, np.where(np.arange(500) == 7, 6, of_steps[0]))  # 6 is no token


@pytest.mark.parametrize("width", [1, 4])
def test_the_k_largest(monkeypatch, width):
    """Of CPUs and of GPUs, with numbers of both signs, infinities and equal ones."""
    monkeypatch.setitem(module.DIGIT, "host", width)
    logits = np.random.default_rng(0).normal(size=(5, 300)) * 10.0 ** np.arange(-4, 1)[:, None]
    logits = logits.astype(np.float32)
    logits[1, :200], logits[2, 10:20], logits[3, ::2] = -inf, logits[2, 10], 0.0
    heaviest = jax.jit(module._heaviest)
    for k in (1, 7, 299):
        kept = np.asarray(heaviest(logits, np.ones_like(logits), np.full((5, 1), k, np.float32)))
        smallest = np.sort(logits)[:, -k][:, None]  # of equal ones all
        np.testing.assert_array_equal(kept, np.where(logits >= smallest, logits, -inf))


def test_penalties():
    """Against their formulas, over an answer of three tokens, with one row that is ended after the first."""
    logits = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)
    ids, lengths = np.array([[1, 2, 2, 0], [5, 0, 0, 0]], np.int32), np.array([3, 1], np.int32)  # 0: padding
    sampling = Sampling(repetition_penalty=[1.3, 0.7], presence_penalty=0.2, frequency_penalty=[None, 0.5])
    steps, numbers = sampling.static, sampling.traced(2, 8)
    state, note = jax.jit(lambda *args: begin(*args, 8, steps))(ids, lengths), jax.jit(noted)
    counts = np.zeros((2, 8), int)
    for tokens, real in (([4, 5], None), ([4, 6], [True, False]), ([3, 6], [True, False])):
        state = note(state, np.array(tokens, np.int32), None if real is None else np.array(real))
        counts[[0, 1], tokens] += 1 if real is None else np.array(real)
    seen = counts > 0
    seen[0, [1, 2]] = seen[1, 5] = True
    penalty = np.array([[1.3], [0.7]])
    expected = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    expected = expected - counts * np.array([[0], [0.5]]) - 0.2 * (counts > 0)
    adjusted = jax.jit(lambda *args: module._adjusted(args[0], steps, *args[1:]))(logits, numbers, state)
    np.testing.assert_allclose(adjusted, expected, rtol=1e-6)


def test_only_what_is_asked_for_is_computed():
    """Greedy without penalties carries no state and takes no numbers."""
    sampling = Sampling(top_k=5, top_p=0.5, seed=3)
    assert sampling.static == Sampling().static == module.Steps()
    assert sampling.traced(2, 8) == begin(np.zeros((2, 4), np.int32), np.array([4, 4]), 8, sampling.static) == {}
    assert Sampling(temperature=0.7, top_k=[1, 4]).static == module.Steps(draws=True, greedy=True, top_k=True)
    assert Sampling(temperature=0.7, min_p=0.1).static == Sampling(temperature=1.7, min_p=0.2, seed=4).static


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": "hot"}, "temperature must be 0 .* got 'hot'"),
        ({"temperature": []}, "temperature is a number, or one a row"),
        ({"top_k": 0}, "top_k must be an int of at least 1"),
        ({"top_k": [3, 2.5]}, "top_k must be an int of at least 1"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a positive number"),
        ({"presence_penalty": inf}, "presence_penalty must be a finite number"),
        ({"frequency_penalty": True}, "frequency_penalty must be a finite number"),
        ({"seed": 1 << 40}, "seed"),
        ({"seed": [1, -(1 << 40)]}, "seed"),
        ({"logit_bias": 3}, "logit_bias is a mapping"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias maps token ids to numbers below infinity, .* got 'a': 1.0"),
        ({"logit_bias": [{2: inf}, None]}, "logit_bias maps"),
        ({"logit_bias": {2: 1e39}}, "logit_bias maps .* as float32 .* got 2: 1e\\+39"),
        ({"temperature": 1e-40}, "temperature must be 0 .* as float32 .* got 1e-40"),
        ({"temperature": np.complex64(1)}, "temperature must be 0 .* got np.complex64"),
        ({"top_p": 1e-50}, "top_p must be in .* as float32 .* got 1e-50"),
        ({"repetition_penalty": [1.0, 1e39, 1.0]}, "repetition_penalty must be .* as float32 .* got 1e\\+39"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty must be .* as float32 .* got 1e-46"),
        ({"presence_penalty": 10**400}, "presence_penalty must be .* as float32"),
        ({"temperature": [1.0, 0.0]}, "temperature is one value, or one a row; got 2 for 3 rows"),
        ({"logit_bias": [{}, {1: 1.0}]}, "logit_bias is one mapping, or one a row; got 2 for 3 rows"),
        ({"logit_bias": {8: 1.0}}, "logit_bias names the token 8, outside the vocabulary of 8 tokens"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(PromptError, match=message):
        Sampling(**options).traced(3, 8)


def test_greedy_takes_the_first_of_equals():
    logits = jnp.array([[1.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, -jnp.inf], [jnp.nan, 1.0, 2.0]])
    tokens = run(logits, np.int32(0), Sampling().static, {}, {})
    assert tokens.tolist() == [1, 0, 3]  # 3 is no token
