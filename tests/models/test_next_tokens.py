"""What stands between two greedy steps on GPUs: the loop with one kernel for it makes the tokens of the other loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile.models import next_tokens, programs
from jtile.models.sampling import Steps
from jtile.ops import QuantizedTensor
from jtile.ops.operands import Weight


@pytest.fixture
def on(monkeypatch):
    """Takes the kernel on any target, and counts the programs that have it."""
    calls = []

    def fits(model, rows, steps, logprobs):
        calls.append(rows)
        return steps == Steps() and not logprobs

    def switch():
        monkeypatch.setattr(next_tokens, "fits", fits)
        programs.decode.clear_cache()
        return calls

    yield switch
    programs.decode.clear_cache()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_generation(short, outputs, on, name):
    """Also of rows that end at different tokens; several ropes, a scale of the embedding, and mixtures."""
    ids = outputs(name)["input_ids"][:2]
    lm = short(name, 2)
    whole = lm.generate(ids, 12, eos=None)
    ends = [int(whole[0, 3]), int(whole[1, 9])]
    ended = lm.generate(ids, 12, eos=ends)
    lm._executables.clear()
    calls = on()
    assert np.array_equal(lm.generate(ids, 12, eos=None), whole)
    assert np.array_equal(lm.generate(ids, 12, eos=ends), ended)
    assert calls == [2, 2]


TABLES = {
    "bfloat16": lambda w: w.astype(jnp.bfloat16),
    "q8_0": lambda w: QuantizedTensor.quantize(w, "q8_0"),
    "q8_0, packed": lambda w: QuantizedTensor.quantize(w, "q8_0").packed(),
}


@pytest.mark.parametrize("stored", TABLES)
def test_a_step(stored):
    """Of four rows: a first largest logit, NaN, one that is done, and one whose token is an end."""
    rng, hidden, vocab = np.random.default_rng(0), 96, 50
    table = TABLES[stored](jnp.asarray(rng.normal(size=(vocab, hidden)), jnp.float32))
    logits = jnp.asarray(rng.normal(size=(4, vocab)), jnp.float32)
    logits = logits.at[0, jnp.array([7, 20])].set(9.0).at[1, 30].set(jnp.nan).at[3, 11].set(8.0)
    done, lengths = jnp.array([False, False, True, False]), jnp.array([3, 4, 5, 6], jnp.int32)
    quantized = isinstance(table, QuantizedTensor)
    weight = Weight(table.codes, table.scale) if quantized else Weight(table)
    frequencies = (jnp.array([1.0, 0.25], jnp.float32), jnp.array([0.5], jnp.float32))
    tokens, ended, out, longer, x, rest, cos, sin, _, _ = jax.jit(
        lambda *args: next_tokens.next_tokens(
            *args, hidden=hidden, dtype="bfloat16", parts=4, bn=16, scale=2.0, factors=(1.0, 3.0)
        )
    )(
        logits, jnp.array([1, 2, 3, 4], jnp.int32), done, jnp.full((4, 3), -1, jnp.int32), lengths,
        jnp.array([11, 11], jnp.int32), jnp.int32(1), weight, frequencies,
    )  # fmt: skip
    assert tokens.tolist() == [7, vocab, 3, 11] and ended.tolist() == [False, False, True, True]
    assert out.tolist() == [[-1, t, -1] for t in tokens.tolist()] and longer.tolist() == [4, 5, 6, 7]
    want = (table.dequantize() if quantized else table).astype(jnp.bfloat16)[jnp.minimum(tokens, vocab - 1)] * 2
    assert np.array_equal(x, want.at[1].set(0)) and not np.asarray(rest).any()
    for f, c, s, factor in zip(frequencies, cos, sin, (1, 3)):
        angle = np.asarray(longer)[:, None] * np.asarray(f)[None]
        np.testing.assert_allclose(c, factor * np.cos(angle), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(s, factor * np.sin(angle), rtol=1e-5, atol=1e-6)


def test_which_steps_it_takes(short, monkeypatch):
    model = short("llama", 1).model
    monkeypatch.setattr(next_tokens, "ON_GPUS", True)
    assert not next_tokens.fits(model, 2, Steps(), False)  # a CPU has no threads that share a row
    monkeypatch.setattr(next_tokens, "_threads", lambda: True)
    assert next_tokens.fits(model, 2, Steps(), False)
    assert not next_tokens.fits(model, 2, Steps(), True)
    assert not next_tokens.fits(model, 2, Steps(draws=True), False)
    assert not next_tokens.fits(model, next_tokens.ROWS + 1, Steps(), False)
    monkeypatch.setattr(next_tokens, "ON_GPUS", False)
    assert not next_tokens.fits(model, 2, Steps(), False)
