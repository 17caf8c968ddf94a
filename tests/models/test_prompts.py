"""Prompts as several programs: the same tokens and caches as by one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.models import prompts

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

    def run():
        stream = lm.stream(ids, 4, eos=None, **options)
        tokens = np.stack(list(stream))
        prompt, _, _ = stream._start(8)
        return tokens, stream.logprobs, prompt()

    tokens, rates, whole = run()
    monkeypatch.setattr(prompts, "are_apart", lambda lm: True)
    monkeypatch.setattr(prompts, "cuts", lambda count: [(0, 1), (1, count)])
    found, others, parts = run()
    assert np.array_equal(found, tokens)
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(others, rates, strict=True))
    assert jax.tree.structure(parts) == jax.tree.structure(whole)
    of_host = {x.sharding.memory_kind for x in jax.tree.leaves(parts[1])}
    assert of_host == {prompts._memory_of_host(lm._weights).memory_kind}
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-4, rtol=1e-3)
    monkeypatch.setattr(lm, "_weights", [x + jnp.asarray(1, x.dtype) if x.ndim == 1 else x for x in lm._weights])
    others, _, _ = run()  # of other weights, without another compilation
    monkeypatch.setattr(prompts, "are_apart", lambda lm: False)
    assert np.array_equal(run()[0], others)
    names = [key[0] for key in lm._executables]
    assert names.count("part") == 2 and names.count("prefill") == 1


def test_memory_of_the_host_is_that_of_the_weights_device():
    """Of a device that is not the default one, too; weights of several devices leave what the host reads on these."""
    lone, *_ = devices = jax.local_devices()[::-1]
    found = prompts._memory_of_host([np.ones(1), jax.device_put(jnp.ones(8), lone)])
    assert found.device_set == {lone} and found.memory_kind == "pinned_host"
    assert prompts._memory_of_host([jnp.ones(8)]).device_set == jnp.zeros(()).devices()
    if len(devices) > 1:
        assert prompts._memory_of_host([jax.device_put(jnp.ones(8), d) for d in devices]) is None


def test_how_layers_are_shared_out(short, monkeypatch):
    assert prompts.cuts(32) == [(0, 4), (4, 16), (16, 32)]
    assert prompts.cuts(11) == [(0, 11)] and prompts.cuts(12) == [(0, 4), (4, 12)]
    for count in range(1, 130):
        found = prompts.cuts(count)
        assert found[0][0] == 0 and found[-1][1] == count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    lm = short("llama", 2)
    with jt.config(arch="sm_90"):
        assert not prompts.are_apart(lm)  # too few bytes
        monkeypatch.setattr(prompts, "LARGE", 0)
        assert not prompts.are_apart(lm)  # too few layers
        monkeypatch.setattr(prompts, "LAST", 0)
        monkeypatch.setattr(prompts, "FIRST", 1)
        assert prompts.are_apart(lm)
        monkeypatch.setattr(prompts, "on_host", lambda: True)
        assert not prompts.are_apart(lm)


def test_each_program_gets_what_it_needs(short):
    lm = short("llama", 3)
    some, rest = (prompts._needed(lm._structure, layers) for layers in ((0, 2), (2, 3)))
    assert not set(some) & set(rest) and sorted(some + rest) == list(range(len(lm._weights)))
    tied = short("gemma3", 3)
    some, rest = (prompts._needed(tied._structure, layers) for layers in ((0, 2), (2, 3)))
    assert len(set(some) & set(rest)) == 1  # the table
