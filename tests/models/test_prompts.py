"""Prompts as several programs: the same tokens and caches as by one."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jtile as jt
from jtile.models import programs, prompts
from jtile.ops import QuantizedTensor

FORMS = {  # the model, its layers, options of a stream, how its cache is laid out
    "llama": ("llama", 3, {"logprobs": True}, {}),
    "tied tables, windows": ("gemma3", 3, {}, {}),
    "states": ("qwen3_next", 4, {}, {}),
    "latent vectors, in pages": ("deepseek_v3", 2, {}, {"page_size": 5}),
    "drawn tokens, penalties": ("llama", 3, {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3}, {}),
    "a cache of 8 bits": ("llama", 2, {}, {"cache_dtype": "int8"}),
}


@pytest.mark.parametrize("name", FORMS)
def test_several_programs_give_what_one_does(name, short, outputs, monkeypatch):
    model, layers, options, layout = FORMS[name]
    lm, ids = short(model, layers), outputs(model)["input_ids"].astype(np.int32)
    for attribute, value in layout.items():
        monkeypatch.setattr(lm, attribute, value)
    monkeypatch.setattr(lm, "_executables", {})

    cut = ((0, 1), (1, 2), (2, 3)) if layers == 3 else ((0, 1), (1, layers))
    monkeypatch.setattr(prompts, "shared", lambda lm, tokens: cut)

    def run(several):
        monkeypatch.setattr(prompts, "_on_one_gpu", lambda lm: several)
        for key in [key for key in lm._executables if key[0] == "prompt"]:
            del lm._executables[key]
        stream = lm.stream(ids, 4, eos=None, **options)
        tokens = np.stack(list(stream))
        prompt, _, _ = stream._run.start(8)
        return tokens, stream.logprobs, prompt()

    tokens, rates, whole = run(several=False)
    found, others, parts = run(several=True)
    assert np.array_equal(found, tokens)
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(others, rates, strict=True))
    assert jax.tree.structure(parts) == jax.tree.structure(whole)
    of_host = {x.sharding.memory_kind for x in jax.tree.leaves(parts[1])}
    assert of_host == {prompts._memory_of_host(lm._weights).memory_kind}
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-4, rtol=1e-3)
    monkeypatch.setattr(lm, "_weights", [x + jnp.asarray(1, x.dtype) if x.ndim == 1 else x for x in lm._weights])
    others, _, _ = run(several=True)  # of other weights, without another compilation
    assert np.array_equal(run(several=False)[0], others)
    names = [key[0] for key in lm._executables]
    assert names.count("part") == len(cut) and names.count("prefill") == 1


def test_the_tokens_come_from_the_host_once(short, outputs, monkeypatch):
    """Each program gets them as one array, those behind the first one as an array of the device."""
    lm, ids = short("llama", 3), outputs("llama")["input_ids"].astype(np.int32)
    monkeypatch.setattr(prompts, "_on_one_gpu", lambda lm: True)
    monkeypatch.setattr(prompts, "shared", lambda lm, tokens: ((0, 1), (1, 2), (2, 3)))
    stream = lm.stream(ids, 1, eos=None)
    prompt, _, _ = stream._run.start(8)
    seen = []

    def watched(one):
        def run(weights, carried, *args):
            seen.append([type(x) for x in jax.tree.leaves(args)])
            return one(weights, carried, *args)

        return run

    found = [(watched(one), held) for one, held in prompt.args[0]]
    jax.block_until_ready(prompt.func(found, *prompt.args[1:]))
    assert [types.count(np.ndarray) for types in seen] == [1, 0, 0]
    given = programs.packed(ids, np.array([5] * len(ids)))
    assert given.dtype == np.int32
    assert all(map(np.array_equal, programs.unpacked(given), (ids, [5] * len(ids))))


def test_memory_of_the_host_is_that_of_the_weights_device():
    """Of a device that is not the default one, too; weights of several devices leave what the host reads on these."""
    lone, *_ = devices = jax.local_devices()[::-1]
    found = prompts._memory_of_host([np.ones(1), jax.device_put(jnp.ones(8), lone)])
    assert found.device_set == {lone} and found.memory_kind == "pinned_host"
    assert prompts._memory_of_host([jnp.ones(8)]).device_set == jnp.zeros(()).devices()
    if len(devices) > 1:
        assert prompts._memory_of_host([jax.device_put(jnp.ones(8), d) for d in devices]) is None


def _end(found, host, device):
    """When the device has run the programs of `found`, as their launches and their layers follow each other."""
    launched = end = 0.0
    for begin, behind in found:
        launched += prompts.PROGRAM + (behind - begin) * host
        end = max(end, launched) + prompts.BETWEEN + (behind - begin) * device
    return end


@pytest.mark.parametrize(("host", "device"), [(84, 180), (84, 60), (20, 2000), (300, 30)])
def test_programs_end_as_soon_as_they_can(host, device):
    ways = [w for n in range(prompts.MOST) for w in itertools.combinations(range(1, 9), n)]
    every = [tuple(itertools.pairwise((0, *way, 9))) for way in ways]
    assert _end(prompts.cuts(9, host, device), host, device) == min(_end(way, host, device) for way in every)


def test_how_layers_are_shared_out():
    first = [prompts.cuts(32, 84, device)[0][1] for device in (60, 100, 180, 320, 5000)]
    assert first == sorted(first, reverse=True) and first[-1] == 1
    assert prompts.cuts(1, 84, 180) == ((0, 1),)
    assert prompts.cuts(4, 1, 10) == ((0, 4),)  # nothing is gained by another launch
    for count in (1, 2, 3, 5, 126):
        found = prompts.cuts(count, 84, 180)
        assert found[0][0] == 0 and found[-1][1] == count and len(found) <= prompts.MOST
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found))


def test_which_prompts_are_several_programs(short, monkeypatch):
    lm = short("llama", 2)
    monkeypatch.setattr(lm, "_layer", prompts.Layer(84.0, 0.0, 10.0))
    assert prompts.shared(lm, 512) == ((0, 2),)  # too few bytes
    monkeypatch.setattr(prompts, "LARGE", 0)
    assert prompts.shared(lm, 512) == ((0, 1), (1, 2))
    assert prompts.shared(lm, 1) == ((0, 2),)  # too few tokens
    with jt.config(arch="sm_90"):
        assert prompts._on_one_gpu(lm)
        for of, name, value in (
            (lm, "devices", object()),
            (prompts, "APART", False),
            (prompts, "on_host", lambda: True),
        ):
            with monkeypatch.context() as now:
                now.setattr(of, name, value)
                assert not prompts._on_one_gpu(lm)


def test_a_prompt_of_a_known_size_asks_no_program_anything(short, outputs, monkeypatch):
    """A program takes a millisecond to tell its shapes, and the prompt of a small model takes the device three."""
    lm, ids = short("llama", 1), outputs("llama")["input_ids"].astype(np.int32)
    for several in (False, True):
        monkeypatch.setattr(lm, "_executables", {})
        monkeypatch.setattr(prompts, "_on_one_gpu", lambda lm, several=several: several)
        lm.stream(ids, 2, eos=None)._run.start(8)
        with monkeypatch.context() as now:
            now.setattr(jax.stages.Compiled, "out_info", property(lambda self: pytest.fail("asked")))
            lm.stream(ids + 1, 2, eos=None)._run.start(8)


def test_what_a_layer_takes(short):
    """By its arrays, its bytes, and the operations of its matrices; of stacks of experts only the bytes count."""
    lm = short("llama", 2)
    found, weights = lm._layer, nnx.to_pure_dict(nnx.state(lm.model.blocks[0]))
    arrays = jax.tree.leaves(weights)
    assert found.host == len(arrays) * prompts.ARRAY
    assert found.read == pytest.approx(sum(x.nbytes for x in arrays) / prompts.BYTES)
    products = sum(x.size for x in arrays if x.ndim == 2)
    assert found.token == pytest.approx(2 * products / prompts.WIDE)
    assert found.device(1) < found.device(10**9) == pytest.approx(10**9 * found.token + prompts.SMALL)
    assert found.device(0) == found.read + prompts.SMALL
    narrow = nnx.Dict({f"w{i}": nnx.Param(_rounded(x) if x.ndim == 2 else x) for i, x in enumerate(arrays)})
    assert prompts.Layer.of([narrow]).token == pytest.approx(found.token * prompts.WIDE / prompts.EIGHT)
    mixture = short("qwen3_moe", 1)
    rows = [x for x in jax.tree.leaves(nnx.to_pure_dict(nnx.state(mixture.model.blocks[0]))) if x.ndim == 2]
    assert mixture._layer.token == pytest.approx(2 * sum(x.size for x in rows) / prompts.WIDE)


def _rounded(x):
    tensor = QuantizedTensor.from_float8(x.astype(jnp.float8_e4m3fn), jnp.ones((x.shape[0], 1), jnp.float32))
    return dataclasses.replace(tensor, activations="rows")


def test_each_program_gets_what_it_needs(short):
    lm = short("llama", 3)
    some, rest = (prompts._needed(lm._structure, layers) for layers in ((0, 2), (2, 3)))
    assert not set(some) & set(rest) and sorted(some + rest) == list(range(len(lm._weights)))
    tied = short("gemma3", 3)
    some, rest = (prompts._needed(tied._structure, layers) for layers in ((0, 2), (2, 3)))
    assert len(set(some) & set(rest)) == 1  # the table
