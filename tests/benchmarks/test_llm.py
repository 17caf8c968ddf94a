"""The language models of the GPU suite: a tiny one on the CPU, and what those of published shapes need."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.gpu import kernels, llm, measure, models, routed, timing
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import relative_error
from benchmarks.harness import WrongResultError
from jtile.models import Decoder
from jtile.models.families import read_config
from jtile.models.llama import LlamaConfig

pytestmark = pytest.mark.usefixtures("by_numpy")

MACHINE = Machine("test", copy_rate=1e9, peaks={"bf16": 1e12, "fp8": 2e12}, threads=1)


def work(config, rows, tokens, steps):
    """Of a model whose weights are not made."""
    parsed = LlamaConfig.from_hf(config)
    blank = lambda name, shape: jnp.zeros(shape, jnp.float32 if len(shape) == 1 else jnp.bfloat16)
    model = nnx.eval_shape(lambda: Decoder(parsed, blank, config["tie_word_embeddings"], "bfloat16"))
    lm = types.SimpleNamespace(model=model, config=parsed, dtype="bfloat16", cache_dtype=None)
    return models.Work(lm, rows, tokens, steps)


@pytest.mark.parametrize(("name", "weights"), [("Llama-3.2-1B", 1_235_814_400), ("Llama-3.1-8B", 8_030_261_248)])
def test_work_of_the_published_shapes(name, weights):
    one = work(models.SHAPES[name], 16, 512, 32)
    leaves = jax.tree.leaves(models.model_state(one.lm.model))
    norms = sum(x.size for x in leaves if x.ndim == 1)
    assert sum(x.size for x in leaves) == weights
    c, config, tied = one.lm.config.attention, one.lm.config, models.SHAPES[name]["tie_word_embeddings"]
    table = config.vocab_size * config.hidden_size
    read = 2 * (weights - (0 if tied else table)) + 2 * norms  # norms are float32
    assert one.step_bytes() == read + 16 * 528 * config.num_layers * 2 * c.kv_heads * c.head_dim * 2
    products = weights - norms - table * (1 if tied else 2)
    scores = 16 * 512 * 513 // 2 * c.heads * config.num_layers
    unused = 3 * config.hidden_size * models.SHAPES[name]["intermediate_size"] * 16 * 511  # in the last MLP
    assert one.prompt_flops() == 2 * (products * 16 * 512 - unused) + 4 * scores * c.head_dim


def test_work_of_quantised_weights():
    """The matrices of blocks have fewer bits, and their products as many operations as those of dense ones."""
    config, matrices = models.TINY["tiny"], 128 * 64 + 64 * 64 + 3 * 64 * 96
    scales = {"fp8": 4 * (128 + 64 + 2 * 96 + 64), "int4": 2 * ((128 + 64 + 2 * 96) * 2 + 64 * 3)}
    dense, *stored = (models.Work(models.make(config, s), 1, 32, 8) for s in (models.DENSE, *models.STORED))
    for one, bits, of_scales in zip(stored, (8, 4), scales.values(), strict=True):
        assert dense.step_bytes() - one.step_bytes() == matrices * (16 - bits) // 8 - of_scales
        assert dense.prompt_flops() == one.prompt_flops()


def test_a_tiny_model_is_checked_and_timed():
    said = []
    options = measure.Options(repeats=2, without=("plain", "torch"), match=("tiny, 2 x 16, step b",), profile=True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # of jax.nn's attention
        prompt, step = llm.results(MACHINE, options, said.append, tiny=True)
    assert (prompt.record.config, step.record.config) == ("tiny, 2 x 16, prompt", "tiny, 2 x 16, step")
    assert 0 < step.record.error < 1.2 * step.record.peer_error < 0.02 and not step.record.peers
    assert set(step.record.kernels) == {"ours"}
    assert bool(step.record.kernels["ours"]) == (jax.default_backend() == "gpu")  # which the profiler sees
    assert step.record.bound_us > 0 and step.record.bound_frac > 0
    assert any("tokens/s" in line for line in said)
    assert prompt.record.ours_us > 0 and step.record.ours_us > 0
    assert not list(llm.results(MACHINE, measure.Options(match=("8B",)), said.append, tiny=True))


def test_prompts_have_more_samples_than_steps():
    """A prompt behind which steps begin is timed as often as the time allows, in turns; a sample of a step is a mean
    already. The spread of a ratio is what it differs by from run to run."""
    ran = []
    of = lambda name: llm.Runner(lambda: ran.append(name) or (3.0, 2.0), lambda: ran.append(name) or 1.0, lambda: None)
    runners = {name: of(name) for name in ("ours", "a")}
    found = llm._sampled(runners, measure.Options(repeats=15))
    assert found == {"ours": ([3.0] * 3 + [1.0] * 40, [2.0] * 3), "a": ([3.0] * 3 + [1.0] * 41, [2.0] * 3)}
    assert ran[:6] == ["ours", "a"] * 3 and ran.count("ours") == 43
    assert [len(of[0]) for of in llm._sampled(runners, measure.Options(repeats=1)).values()] == [6, 7]
    assert timing.spread([2.0] * 9, [3.0] * 5) == 0
    lots = np.random.default_rng(0)
    runs = [(lots.normal(10, 1, 40), lots.normal(15, 1, 40)) for _ in range(200)]
    ratios = [np.median(peer) / np.median(ours) for ours, peer in runs]
    assert timing.spread(*runs[0]) == pytest.approx(np.std(ratios), rel=0.4)


def test_a_quantised_table_is_checked():
    """As that of SmolLM2's file; and the matrices of published int4 weights are of no mean, as trained ones are."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        checked = llm._checked(models.make(models.TINY["tiny"], "q4_1"))
    assert 0 < checked.error < 1.2 * checked.peer < 0.02
    weight = models._int4(1, 64, 256).dequantize()
    assert abs(float(weight.mean())) < 4 * 0.02 / weight.size**0.5 and 0.019 < float(weight.std()) < 0.021
    assert llm.half_told("tiny, 2 x 16, prompt") and llm.half_told("prefill 512")
    assert not llm.half_told("tiny, 2 x 16, step") and not llm.half_told("decode 128 after 512")


def test_a_tiny_mixture_is_checked_and_its_routes_are_counted():
    options = measure.Options(repeats=2, without=("plain", "torch"), match=("mixture, 2 x 16, step bfloat16",))
    _, step = llm.results(MACHINE, options, lambda _: None, tiny=True)
    assert step.record.config == "tiny mixture, 2 x 16, step" and not step.record.peers
    assert 0 < step.record.error < 0.02 and step.record.peer_error is None
    lm = models.make(models.TINY["tiny mixture"])
    ids = jnp.arange(8, dtype=jnp.int32)[None]
    assert relative_error(lm.logits(ids), routed.logits(lm, ids, "float32")) < 0.02
    assert routed.touched(lm, ids) == 2 == routed.touched(lm, jnp.tile(ids, (5, 1)))
    assert 2 < routed.touched(lm, jnp.arange(64, dtype=jnp.int32).reshape(8, 8)) <= 4


def test_work_of_a_mixture():
    """A step reads the experts that are touched, and a token goes through those that are chosen."""
    lm = models.make(models.TINY["tiny mixture"])
    expert, every, two = 3 * 32 * 64, 128 * 64 + 64 * 64, models.Work(lm, 1, 32, 8, None, 2.0)
    rest = 2 * (every + 128 * 64) + 4 * (4 * 64 + 3 * 64 + 2 * 16)  # attention, the head, the router, norms
    assert two.step_bytes() == 2 * 2 * expert + rest + 36 * 2 * 2 * 16 * 2
    assert dataclasses.replace(two, touched=3.0).step_bytes() - two.step_bytes() == 2 * expert
    scores = 32 * 33 // 2 * 4
    assert two.prompt_flops() == 2 * (32 * every + 4 * 64 + 2 * expert) + 4 * scores * 16  # one token in the mixture


@pytest.mark.parametrize(("name", "entry"), [("Qwen3-30B-A3B", 2 * 4 * 128), ("DeepSeek-V3, 6 layers", 576)])
def test_entries_of_the_published_mixtures(name, entry):
    assert models.entry_of(read_config(models.SHAPES[name], name).attention) == entry


@pytest.mark.slow
def test_a_tiny_quantised_model():
    """Beside a dense one of its shape."""
    options = measure.Options(repeats=2, without=("plain", "torch"), match=("tiny, 2 x 16, step fp8",))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        _, step = llm.results(MACHINE, options, lambda _: None, tiny=True)
    assert (step.record.config, step.record.dtype) == ("tiny, 2 x 16, step", "fp8")
    assert 0 < step.record.error < 1.2 * step.record.peer_error < 0.02 and list(step.record.peers) == ["ours, dense"]


@pytest.mark.parametrize("ours", [0.0601, float("nan"), float("inf")])
def test_a_model_that_is_further_off_than_its_peer(ours):
    assert llm.near_enough(0.0599, 0.05, 32) == (0.0599, 0.05)
    with pytest.raises(WrongResultError, match=r"logits of 32 layers: relative error .*, and 0\.05 of plain jnp's"):
        llm.near_enough(ours, 0.05, 32)


def test_kernels_of_a_step():
    """Of the times of a whole run and of its prompt."""
    found = kernels.difference(
        {"a": (64, 640.0), "b": (5, 9.0), "c": (32, 960.0)}, {"a": (32, 320.0), "b": (5, 8.0)}, 32
    )
    assert found == {"c": (1.0, 30.0), "a": (1.0, 10.0)}
    lines = kernels.table(found).splitlines()
    assert [" ".join(line.split()) for line in lines[:2]] == ["2 kernels take 40 us", "75.0 % 30 us 1 x 30.0 us c"]
    assert kernels.rows(found, 1) == {"c": [1.0, 30.0]}
    assert "no kernel" in kernels.table(kernels.by_kernel(lambda: None))
