"""What stands between two greedy steps: the loop with one kernel for it makes the tokens of the other loop."""

import contextlib
import sys

import jax
import jax.numpy as jnp
import launch_order
import numpy as np
import pytest

import jtile as jt
from benchmarks.gpu import models
from jtile.models import cache as kv
from jtile.models import next_tokens, programs
from jtile.models.generate import CHUNK, Choice
from jtile.models.sampling import Sampling, Steps
from jtile.ops import QuantizedTensor, gpu_tiles, hopper_largest
from jtile.ops.argmax import keys_of
from jtile.ops.operands import Weight
from jtile.ops.step_attention import attention_product


@pytest.fixture
def on(monkeypatch):
    """Takes the kernel on any target from a call on, and counts the programs that have it."""
    calls = []
    monkeypatch.setattr(next_tokens, "TAKEN", False)
    programs.decode.clear_cache()

    def fits(model, rows, steps, logprobs):
        calls.append(rows)
        return steps == Steps() and not logprobs

    def switch():
        monkeypatch.setattr(next_tokens, "fits", fits)
        programs.decode.clear_cache()
        return calls

    yield switch
    programs.decode.clear_cache()


def forget(lm) -> None:
    """Has the loop of steps of a model traced and compiled anew."""
    for key in [key for key in lm._executables if key[0] == "decode"]:
        del lm._executables[key]
    programs.decode.clear_cache()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_generation(short, outputs, on, name):
    """Also of rows that end at different tokens; several ropes, a scale of the embedding, and mixtures."""
    ids = outputs(name)["input_ids"][:2]
    lm = short(name, 2)
    whole = lm.generate(ids, 12, eos=None)
    ends = [int(whole[0, 3]), int(whole[1, 9])]
    ended = lm.generate(ids, 12, eos=ends)
    forget(lm)
    calls = on()
    assert np.array_equal(lm.generate(ids, 12, eos=None), whole)
    assert np.array_equal(lm.generate(ids, 12, eos=ends), ended)
    assert calls == [2, 2]


@pytest.mark.parametrize("rows", [2, 3])
def test_generation_without_logits(short, outputs, on, monkeypatch, rows):
    """Where the head finds the largest logits by itself, tokens are the same."""
    ids = np.tile(outputs("llama")["input_ids"][:1], (rows, 1)) + np.arange(rows)[:, None]
    lm, made = short("llama", 2), []
    whole = lm.generate(ids, 6, eos=None)
    forget(lm)

    def largest(x, w):
        """By columns p, p + 3, ... for part p, as programs would."""
        made.append(x.shape)
        keys = keys_of(x @ w.T)
        places = [keys[:, p::3].argmax(1) * 3 + p for p in range(3)]
        return jnp.stack([keys[:, p::3].max(1) for p in range(3)], 1), jnp.stack(places, 1).astype(jnp.int32)

    monkeypatch.setattr(hopper_largest, "misfit", lambda x, w: None)
    monkeypatch.setattr(hopper_largest, "largest", largest)
    on()
    assert np.array_equal(lm.generate(ids, 6, eos=None), whole)
    assert made and made[0][0] == rows


TABLES = {
    "bfloat16": lambda w: w.astype(jnp.bfloat16),
    "q8_0": lambda w: QuantizedTensor.quantize(w, "q8_0"),
    "q8_0, packed": lambda w: QuantizedTensor.quantize(w, "q8_0").packed(),
    "q8_0, panels": lambda w: QuantizedTensor.quantize(w, "q8_0").in_panels(),
}


@pytest.mark.parametrize("stored", TABLES)
def test_a_step(stored):
    """Of four rows: a first largest logit, NaN, one that is done, and one whose token is an end."""
    rng, hidden, vocab = np.random.default_rng(0), 96, 48 if "panels" in stored else 50
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
    monkeypatch.setattr(next_tokens, "TAKEN", True)
    monkeypatch.setattr(next_tokens, "_threads", lambda: False)
    assert next_tokens.fits(model, 2, Steps(), False) == next_tokens.on_host()
    monkeypatch.setattr(next_tokens, "_threads", lambda: True)
    assert next_tokens.fits(model, 2, Steps(), False)
    assert not next_tokens.fits(model, 2, Steps(), True)
    assert not next_tokens.fits(model, 2, Steps(draws=True), False)
    assert not next_tokens.fits(model, next_tokens.ROWS + 1, Steps(), False)
    monkeypatch.setattr(next_tokens, "TAKEN", False)
    assert not next_tokens.fits(model, 2, Steps(), False)


@pytest.mark.cpu
def test_a_host_stops_where_a_row_ends(short, outputs, monkeypatch):
    """Steps behind the last token of all rows are not made: their logits would be a waste of the host's time."""
    ids, lm, made = outputs("llama")["input_ids"][:2], short("llama", 2), []
    whole = lm.generate(ids, 12, eos=None)
    ends = [int(whole[0, 3]), int(whole[1, 5])]
    real = next_tokens.next_tokens

    def counted(*args, **options):
        jax.debug.callback(lambda column: made.append(int(column)), args[6])
        return real(*args, **options)

    monkeypatch.setattr(next_tokens, "next_tokens", counted)
    forget(lm)
    lm.generate(ids, 12, eos=ends)
    jax.effects_barrier()
    forget(lm)
    last = max(next(n for n, t in enumerate(row) if t in ends) for row in whole.tolist())
    assert sorted(made) == [*range(last)]  # the prompt makes the first token


SMALL = dict(num_hidden_layers=1, vocab_size=512, hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
SHAPES = {
    "dense": ("Llama-3.2-1B", SMALL | dict(intermediate_size=512)),
    "mixture": ("Qwen3-30B-A3B", SMALL | dict(num_experts=8, moe_intermediate_size=256, head_dim=64)),
}


@pytest.fixture
def blank(monkeypatch):
    """Weights are zeros in a model whose programs are looked at, and never run."""
    monkeypatch.setattr(models, "normal", lambda seed, *shape, dtype="float32", scale=1.0: np.zeros(shape, dtype))


def decoding(lm, rows: int = 1):
    """The jaxpr of a loop of steps of so many rows."""
    a, choice = models.attention_of(lm), Choice.of(Sampling(), rows, lm.config.vocab_size, (), False)
    entry = (jnp.zeros((rows, 100, a.kv_heads, a.head_dim), lm.dtype),) * 2
    begin = lambda: kv.from_prefill([entry] * lm.config.num_layers, jnp.full((rows,), 100, jnp.int32), kv.Layout(128))
    memory, of = programs.Memory(jax.eval_shape(begin), {}), jax.ShapeDtypeStruct
    args = memory, of((rows,), jnp.int32), of((rows,), jnp.bool_), np.int32(0), np.int32(0), choice.numbers, choice.ends
    programs.decode.clear_cache()
    options = dict(chunk=CHUNK, steps=choice.steps, logprobs=False)
    return programs.decode.trace(lm._structure, lm._weights, *args, **options).jaxpr.jaxpr


@pytest.mark.skipif(jax.device_count() > 1, reason="kernels that read early are for one device")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("blank")
def test_no_early_read_of_what_it_writes(name, monkeypatch):
    """By the order in which kernels let the ones behind them start, whatever XLA puts in between: none reads early what
    a kernel in front may still write. Without `gpu_tiles.holding` attention behind a product that is held would."""
    monkeypatch.setattr(next_tokens, "TAKEN", True)
    attention = sys.modules[attention_product.__module__]
    monkeypatch.setattr(attention, "PRODUCTS", False)
    shape, cut = SHAPES[name]
    with jt.config(arch="sm_90"):
        lm = models.make(models.SHAPES[shape] | cut)
        order = launch_order.launches(decoding(lm))
        names = [one.name for one in order]
        assert names.count("next_tokens") == 2 and names.count("hopper_step") == 2
        assert launch_order.hazards(order) == []
        if name == "dense":
            with monkeypatch.context() as patch:  # attention in parts reads early, too
                patch.setattr(attention, "PRODUCTS", True)
                order = launch_order.launches(decoding(lm))
                assert [one.name for one in order].count("hopper_parts") == 2
                assert any(one.reads for one in order if one.name == "hopper_parts")
                assert launch_order.hazards(order) == []
            monkeypatch.setattr(gpu_tiles, "holding", contextlib.nullcontext)
            found = launch_order.hazards(launch_order.launches(decoding(lm)))
            assert found and all("hopper_step" in text and "next_tokens" in text for text in found)
    programs.decode.clear_cache()


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() > 1, reason="kernels that read early are for one device")
@pytest.mark.usefixtures("blank")
def test_early_reads_in_steps_of_many_rows(monkeypatch):
    """The kernels of 40 rows; attention reads keys early that the kernel in front does not append, which is all that
    the order of arrays finds."""
    monkeypatch.setattr(next_tokens, "TAKEN", True)
    monkeypatch.setattr(hopper_largest, "FORM", hopper_largest.Form(8, 1, 2))
    shape = models.SHAPES["Llama-3.1-8B"] | dict(num_hidden_layers=1, vocab_size=2048, intermediate_size=4096)
    with jt.config(arch="sm_90"):
        order = launch_order.launches(decoding(models.make(shape), 40))
    names = [one.name for one in order]
    assert names.count("hopper_largest") == names.count("tokens_of_largest") == names.count("hopper_append") == 2
    assert "next_tokens" not in names
    found = {found.split(" (")[0] + found.split("what")[1].split(" (")[0] for found in launch_order.hazards(order)}
    assert found == {"hopper_decode hopper_append"}
