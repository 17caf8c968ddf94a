"""Sampling against its definition: which tokens may come, how often, and the same ones for the same seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile._errors import PromptError
from jtile.models.sampling import Sampling, choose

PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], np.float32)


@pytest.fixture
def draw():
    """draw(n, **options): n tokens from PROBABILITIES (in a shuffled vocabulary), as indices into them."""
    order = np.array([3, 0, 5, 2, 1, 4])
    logits = jnp.asarray(np.log(PROBABILITIES[order]) + 2.5)

    def run(n, **options):
        sampling = Sampling(**options)
        static, numbers = sampling.static, sampling.traced()
        steps = jnp.arange(n // 500, dtype=jnp.int32)
        rows = jnp.broadcast_to(logits, (500, 6))
        tokens = jax.jit(jax.vmap(lambda step: choose(rows, step, static, numbers)))(steps)
        return order[np.asarray(tokens).reshape(-1)]

    return run


def frequencies(tokens):
    return np.bincount(tokens, minlength=6) / len(tokens)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, PROBABILITIES),
        ({"temperature": 0.5}, PROBABILITIES**2),
        ({"temperature": 1.0, "top_k": 2}, [0.4, 0.25, 0, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 99}, PROBABILITIES),
        ({"temperature": 1.0, "top_p": 0.7}, [0.4, 0.25, 0.15, 0, 0, 0]),  # 0.65 is too little, 0.8 is enough
        ({"temperature": 1.0, "top_p": 0.3}, [1, 0, 0, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 1.0}, PROBABILITIES),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.7}, [0.4, 0.25, 0, 0, 0, 0]),  # of the 0.8 that top_k leaves: 0.81
        ({"temperature": 0.0}, [1, 0, 0, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 1}, [1, 0, 0, 0, 0, 0]),
    ],
)
def test_frequencies(draw, options, expected):
    expected = np.asarray(expected) / np.sum(expected)
    seen = frequencies(draw(20000, **options))
    assert np.abs(seen - expected).max() < 0.012  # three standard deviations of 20000 draws
    assert not seen[expected == 0].any()


def test_seeds(draw):
    a, b, c = (draw(1000, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_equal_probabilities_enter_the_nucleus_together():
    sampling = Sampling(temperature=1.0, top_p=0.5)
    tokens = jax.jit(lambda: choose(jnp.zeros((60, 4)), jnp.int32(0), sampling.static, sampling.traced()))()
    assert set(np.asarray(tokens).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 1 << 40}, "seed"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(PromptError, match=message):
        Sampling(**options)


def test_greedy_takes_the_first_of_equals():
    static, numbers = Sampling().static, Sampling().traced()
    logits = jnp.array([[1.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, -jnp.inf], [jnp.nan, 1.0, 2.0]])
    tokens = choose(logits, jnp.int32(0), static, numbers)
    assert tokens[:2].tolist() == [1, 0]
    assert 0 <= int(tokens[2]) < 3
