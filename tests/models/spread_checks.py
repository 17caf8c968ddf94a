"""Checks on eight devices: models cut over a mesh give the tokens of transformers; run by test_spread.py."""

import dataclasses
import tempfile
from itertools import chain
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import jtile.models
from jtile.errors import ModelError, PromptError
from jtile.models import Engine, LanguageModel, parallel, read_adapter
from jtile.models.adapters import MODULES
from jtile.models.folder import open_folder
from jtile.models.mesh import Devices, devices_at_hand
from jtile.models.parallel import Term
from jtile.ops import gpu_tiles, hopper_normed, hopper_normed_sums, hopper_wide
from jtile.ops.hopper_wide import Form

DATA = Path(__file__).resolve().parent.parent / "data"
DEVICES = np.array(jax.devices())


def mesh_of(*shape: int) -> Mesh:
    return Mesh(DEVICES[: np.prod(shape)].reshape(shape), ("x", "y", "z")[: len(shape)])


def first_layer(path: Path, shape=None, parallel=None, **options):
    """The first layer of a model, on one device or several: it compiles in less time than all."""
    checkpoint = open_folder(path)
    checkpoint = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, num_layers=1))
    devices = shape and Devices.of(mesh_of(*shape), parallel, checkpoint.config)
    return LanguageModel.from_checkpoint(checkpoint, devices=devices, **options)


def greedy(name, shape, parallel, rows=slice(None), **options):
    """The tokens of the golden prompts, some of their rows, are those of one device."""
    golden = np.load(DATA / name / "io.npz")
    lm = jtile.models.load(DATA / name, mesh=mesh_of(*shape), parallel=parallel, **options)
    ids, want = golden["input_ids"][rows], golden["greedy"][rows]
    np.testing.assert_array_equal(lm.generate(ids, want.shape[1], eos=None), want)
    return lm


def check_llama_by_heads_and_its_logits():
    """On a mesh whose axes are explicit; those of a mesh that the caller has set are no business of the model."""
    golden = np.load(DATA / "llama" / "io.npz")
    lm = jtile.models.load(DATA / "llama", mesh=jax.make_mesh((2,), ("x",)))
    with jax.set_mesh(jax.make_mesh((4,), ("q",))):
        np.testing.assert_array_equal(lm.generate(golden["input_ids"], 16, eos=None), golden["greedy"])
        np.testing.assert_allclose(lm.logits(golden["input_ids"]), golden["logits"], atol=1e-4)
    of_device = sum(x.addressable_shards[0].data.nbytes for x in lm._weights)
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.tree.map(np.asarray, lm._weights)))
    assert 2 * of_device == whole
    one = sum(x.nbytes for x in jtile.models.load(DATA / "llama")._weights)
    assert of_device < 0.53 * one, "beside halves of matrices there are whole norms"
    with pytest.raises(ModelError, match="each of which has a module of its own"):
        _ = lm.model
    with pytest.raises(PromptError, match="neither drafts nor checks drafts"):
        lm.generate([1, 2], 2, draft=jtile.models.NGram())


def check_llama_whose_products_are_summed_in_their_kernels():
    """Or in what stands in for these kernels here."""
    asked = []
    wide = {"parts_of": lambda x, w: 3, "choice": lambda n, k, weights: Form(64, 3 if weights == 1 else 1, 2)}
    normed = {"misfit": lambda x, w, weights: asked.append(len(weights)), "choice": lambda n, k: Form(64, 2, 2)}
    with (
        mock.patch.object(hopper_normed_sums, "misfit_of_first", return_value=None),
        mock.patch.multiple(hopper_wide, **wide),
        mock.patch.multiple(hopper_normed, **normed),
    ):
        greedy("llama", (2,), {"tensor": "x"})
    assert set(asked) == {1, 2}


def check_gemma2_by_heads_and_tokens():
    greedy("gemma2", (2, 2), {"tensor": "x", "context": "y"})


def check_gemma3_with_one_head_of_keys_on_four_devices():
    greedy("gemma3", (4,), {"tensor": "x"})


def check_qwen2_by_tokens():
    greedy("qwen2", (4,), {"context": "x"}, page_size=8)


def check_qwen3_on_three_devices():
    """Which divide neither heads nor features nor the vocabulary, and keep their shares of the logits."""
    with mock.patch.object(parallel, "WHOLE", 0):
        greedy("qwen3", (3,), {"tensor": "x"})


def check_mistral_by_rings():
    greedy("mistral", (2, 2), {"tensor": "y", "context": "x"})


def check_mixtral_by_experts():
    """Eight devices, of which each has one expert and a row, or a copy of the last one."""
    golden = np.load(DATA / "mixtral" / "io.npz")
    lm = greedy("mixtral", (8,), {"expert": "x"})
    np.testing.assert_allclose(lm.logits(golden["input_ids"]), golden["logits"], atol=1e-4)


def check_qwen3_moe_by_heads_and_experts():
    greedy("qwen3_moe", (4, 2), {"tensor": "x", "expert": "y"}, rows=slice(1))


def check_gpt_oss_by_heads_and_experts():
    with mock.patch.object(parallel, "GATHERED", 0):  # as many rows do, each goes to its experts
        greedy("gpt_oss", (2, 2), {"tensor": "x", "expert": "y"})


def check_llama4_by_heads_and_experts():
    greedy("llama4", (2, 2), {"tensor": "x", "expert": "y"})


def check_qwen3_next_by_heads_and_experts():
    """Its gated DeltaNets are whole on each device."""
    golden = np.load(DATA / "qwen3_next" / "io.npz")
    lm = jtile.models.load(DATA / "qwen3_next", mesh=mesh_of(2, 2), parallel={"tensor": "x", "expert": "y"})
    np.testing.assert_allclose(lm.logits(golden["input_ids"]), golden["logits"], atol=1e-4)


def check_deepseek_by_all():
    greedy("deepseek_v3", (2, 2, 2), {"tensor": "x", "expert": "y", "context": "z"})


def check_quantised_weights_and_caches():
    """160 features are five groups of 32, of which the second device has two."""
    ids = np.load(DATA / "llama" / "io.npz")["input_ids"]
    options = {"cache_dtype": "int8"}
    with tempfile.TemporaryDirectory() as folder:
        path = jtile.models.quantize_folder(DATA / "llama", "q4_0", out=Path(folder) / "small")
        one, two = first_layer(path, **options), first_layer(path, (2, 2), {"tensor": "x", "context": "y"}, **options)
        np.testing.assert_array_equal(two.generate(ids, 6, eos=None), one.generate(ids, 6, eos=None))


def check_sampling_of_rows_on_several_devices():
    """Three rows on two devices, with options of their own."""
    ids = np.load(DATA / "mixtral" / "io.npz")["input_ids"][:1].repeat(3, 0)
    options = {"temperature": [0.0, 1.0, 2.0], "seed": 3, "logit_bias": {5: 2.0}, "presence_penalty": 0.5}
    found = []
    for lm in (first_layer(DATA / "mixtral"), first_layer(DATA / "mixtral", (2,), {"expert": "x"})):
        stream = lm.stream(ids, 6, eos=None, logprobs=True, **options)
        found.append((np.stack(list(stream)), np.stack(stream.logprobs)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-3)


ENGINE = dict(rows=3, shapes=(24,), cache_tokens=48)
ASKED = [[*range(1, 10), last] for last in (3, 3, 9)] + [[5, 6, 7]]
BIAS = {"logit_bias": {3: 0.5}}  # so that all take one program
OPTIONS = (BIAS, BIAS | {"adapter": "a"}, BIAS | {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5})


def write_adapter(path: Path) -> Path:
    """One that changes every matrix of the first layer of a Llama of 4 heads."""
    rng, tensors = np.random.default_rng(0), {}
    sizes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64), "gate": (160, 64), "up": (160, 64)}
    for name, (out, inner) in (sizes | {"down": (64, 160)}).items():
        stem = f"base_model.model.model.layers.0.{MODULES[f'{name}_proj'][0]}.{name}_proj"
        tensors[f"{stem}.lora_A.weight"] = rng.normal(size=(3, inner)).astype(np.float32)
        tensors[f"{stem}.lora_B.weight"] = rng.normal(size=(out, 3)).astype(np.float32)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 1}')
    return path


def answers(engine: Engine, prompts, **options) -> list:
    found = engine.generate(prompts, max_tokens=12, eos=None, logprobs=True, **options)
    return [(answer.ids, [token.logprob for token in answer.tokens]) for answer in found]


def check_engine_of_two_devices():
    """Its tokens are those of one device, and bit for bit those of a request alone; pages run out meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        one, two = (first_layer(DATA / "llama", shape, {"tensor": "x"}, page_size=8) for shape in (None, (2,)))
        path = write_adapter(Path(folder) / "a")
        adapted = first_layer(DATA / "llama", (2,), {"tensor": "x"}, adapter=path)
        with Engine(one, **ENGINE, adapters={"a": path}) as engine:
            wanted = [answers(engine, ASKED, **options) for options in OPTIONS]
        with Engine(two, **ENGINE, adapters={"a": path}) as engine:
            found = [answers(engine, ASKED, **options) for options in OPTIONS]
            stats = engine.stats()
            for options, together in zip(OPTIONS[:2], found[:2], strict=True):
                assert [answers(engine, [prompt], **options)[0] for prompt in ASKED] == together
            asked = dict(max_tokens=12, eos=None, temperature=0.8, seed=3)
            drawn, compiled = [one.ids for one in engine.generate(ASKED, **asked)], engine._core.device._compiled
            cache = engine._core.device._entries[0].arrays[0]
            assert 2 * cache.addressable_shards[0].data.nbytes == cache.nbytes
            with pytest.raises(ModelError, match="is cut over the devices of a mesh, whose weights are parts"):
                engine.update_weights(two._weights)
        with Engine(two, **ENGINE, adapters={"a": path}, launch_steps=2) as engine:
            engine._core.device._compiled = compiled
            assert [one.ids for one in engine.generate(ASKED, **asked)] == drawn
        with pytest.raises(ModelError, match="give the folder of the adapter 'a'"):
            Engine(two, **ENGINE, adapters={"a": read_adapter(path, one.model)})
    assert stats["preemptions_total"] > 0 and stats["cached_tokens_total"] > 0
    for (ids, rates), (same, those) in zip(chain(*found), chain(*wanted), strict=True):
        assert ids == same
        np.testing.assert_allclose(rates, those, atol=1e-4)
    ids, rates = found[1][3]
    logits = np.asarray(adapted.logits(ASKED[3] + ids), np.float64)[2:-1]
    np.testing.assert_allclose(logits[np.arange(12), ids] - np.log(np.exp(logits).sum(1)), rates, atol=2e-4)


def check_kernels_for_one_device_beside_others():
    """A model of one device has them whatever devices there are."""
    one, two = jnp.ones(2), jax.device_put(jnp.ones(2), NamedSharding(mesh_of(2), P("x")))
    assert not gpu_tiles.on_one_device()
    for weights, alone in (([one], True), ([one, two], False)):
        with gpu_tiles.beside(weights):
            assert gpu_tiles.on_one_device() == alone


def check_sums_that_do_not_depend_on_the_size():
    """Of a row that is in the small array of one kernel and in the large one of two: of the sum, and of its norm."""
    mesh, rng = mesh_of(4), np.random.default_rng(0)
    rows, weight = rng.normal(size=(4, 1200, 64)).astype(np.float32), np.ones((64,), np.float32)

    def both(x):
        return Term(x[0], "x", steady=True).add_norm(x[0] * 0, weight, 1e-6)

    run = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False))
    for few, many in zip(run(rows[:, :8]), run(rows), strict=True):
        np.testing.assert_array_equal(few, many[:8])


def check_what_is_refused():
    two = mesh_of(2)
    cases = [
        ("llama", dict(parallel={"tensor": "x"}), "give the mesh too"),
        ("llama", dict(mesh=two, adapter="there"), "there is no LoRA adapter at there"),
        ("llama", dict(mesh=DEVICES), "mesh is a jax.sharding.Mesh"),
        ("llama", dict(mesh=mesh_of(2, 2)), "parallel says what the axes 'x', 'y' of the mesh do"),
        ("llama", dict(mesh=two, parallel={}), "parallel says what the axes 'x' of the mesh do"),
        ("llama", dict(mesh=two, parallel={"pipeline": "x"}), "parallel has 'pipeline'; a model is cut by tensor"),
        ("llama", dict(mesh=two, parallel={"tensor": "w"}), "the axes of the mesh are 'x'"),
        ("llama", dict(mesh=two, parallel={"tensor": "x", "context": "x"}), "one axis of the mesh to two roles"),
        ("llama", dict(mesh=two, parallel={"expert": "x"}), "no mixtures of experts"),
        ("mixtral", dict(mesh=mesh_of(3), parallel={"expert": "x"}), "8 experts, which the 3 devices along 'x'"),
        ("llama", dict(mesh=Mesh(DEVICES[[1, 1]], ("x",))), "the mesh has a device twice: 1, 1"),
        ("llama", dict(mesh=mesh_of(8)), "4 heads of attention, fewer than the 8 devices along 'x'"),
    ]
    for name, options, words in cases:
        with pytest.raises(ModelError, match=words):
            jtile.models.load(DATA / name, **options)
    for name, axis in (("mixtral", "expert"), ("llama", "context")):
        with pytest.raises(ModelError, match=f"share a model by 'tensor', and .* is cut by '{axis}'"):
            Engine(first_layer(DATA / name, (2,), {axis: "x"}))
    for text, words in (
        ("3x", "devices is a number, as 2"),
        ("²", "devices is a number"),
        ("9999", "4096 at most"),
        ("tensor=4,expert=4", "over 16 devices, and there are 8"),
    ):
        with pytest.raises(ModelError, match=words):
            devices_at_hand(text)
    found = devices_at_hand("tensor=2,context=4")
    assert dict(found["mesh"].shape) == {"tensor": 2, "context": 4}
    assert found["parallel"] == {"tensor": "tensor", "context": "context"}
    assert dict(devices_at_hand("2")["mesh"].shape) == {"tensor": 2}


def check_the_largest_of_shares():
    """Tokens that are found in the shares of a vocabulary are those of the whole one: the first of equal logits, and no
    token where a logit is NaN. Columns behind the vocabulary, which the last device has, are none."""
    logits = np.random.default_rng(0).normal(size=(6, 90)).astype(np.float32)
    logits[1, [7, 40, 80]], logits[2, 3], logits[3], logits[4, 89] = 9, np.nan, -np.inf, 9
    wide = np.concatenate([logits, np.full((6, 6), 99, np.float32)], 1)
    for talk in (True, False):
        run = lambda x, talk=talk: parallel.Shares(x, "x", 90, talk).largest()
        found = jax.jit(jax.shard_map(run, mesh=mesh_of(4), in_specs=P(None, "x"), out_specs=P(), check_vma=False))
        np.testing.assert_array_equal(found(wide), [logits[0].argmax(), 7, 90, 0, 89, logits[5].argmax()])
