"""Low-rank adapters of `peft`'s form: read, refused, written, and answering beside each other in one engine."""

from __future__ import annotations

import gc
import json

import jax
import numpy as np
import pytest
from draws import thorough
from safetensors.numpy import save_file
from serving_checks import idle, until
from stateless import run

import jtile.models
from jtile._errors import ContextError, ModelError, PromptError
from jtile.models import Engine, LanguageModel, read_adapter, save_adapter
from jtile.models.adapters import MODULES, apply_adapter
from jtile.models.lora import add_lora
from jtile.models.serving.core import Job
from jtile.models.serving.engine import Stream
from jtile.models.serving.scheduler import Sequence
from jtile.models.serving.settings import default_shapes
from jtile.models.serving.worker import Mail

SIZES = dict(rows=4, shapes=(24,), cache_tokens=256, max_length=48)
SHAPES = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
SHAPES |= {"gate_proj": (160, 64), "up_proj": (160, 64), "down_proj": (64, 160)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(modules, rank, seed, tensors changed, **entries of the configuration): an adapter as `peft` writes it."""

    def write(modules, rank=4, seed=0, change=None, **config):
        rng, path = np.random.default_rng(seed), tmp_path_factory.mktemp("adapter")
        tensors = {}
        for module in modules:
            out, inner = SHAPES[module]
            stem = f"base_model.model.model.layers.0.{MODULES[module][0]}.{module}"
            tensors[f"{stem}.lora_A.weight"] = rng.normal(size=(rank, inner)).astype(np.float32) / inner**0.5
            tensors[f"{stem}.lora_B.weight"] = rng.normal(size=(out, rank)).astype(np.float32)
        (change or (lambda tensors: None))(tensors)
        save_file(tensors, path / "adapter_model.safetensors")
        base = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": list(modules)}
        (path / "adapter_config.json").write_text(json.dumps(base | config))
        return path

    return write


@pytest.fixture(scope="module")
def adapters(folder):
    """One of every module, another of two, whose scale is alpha / sqrt(rank) and another one for v_proj."""
    some = folder(["q_proj", "v_proj"], 3, 1, use_rslora=True, alpha_pattern={"self_attn.v_proj": 1})
    return {"all": folder(SHAPES), "some": some}


@pytest.fixture(scope="module")
def engine(lm, adapters):
    with Engine(lm, **SIZES, adapters=adapters) as engine:
        yield engine


def merged(lm, path, alphas, root) -> LanguageModel:
    """The model whose weights are W + alpha / rank B A, by NumPy, of the files themselves."""
    from safetensors.numpy import load_file

    tensors, model = load_file(path / "adapter_model.safetensors"), lm.model
    delta = {}
    for name, a in tensors.items():
        if "lora_A" in name:
            module, rank = name.split(".")[-3], a.shape[0]
            scale = alphas(module) / (rank**0.5 if root else rank)
            delta[module] = scale * tensors[name.replace("lora_A", "lora_B")] @ a
    zeros = lambda module: np.zeros(SHAPES[module], np.float32)
    block, of = model.blocks[0], lambda module: delta.get(module, zeros(module))
    qkv = np.concatenate([of("q_proj"), of("k_proj"), of("v_proj")])
    changes = [(block.attention.qkv, qkv), (block.attention.output, of("o_proj")), (block.mlp.gate, of("gate_proj"))]
    for param, change in [*changes, (block.mlp.up, of("up_proj")), (block.mlp.down, of("down_proj"))]:
        param.set_value(param.get_value() + change)
    return LanguageModel(model)


def test_adapters_of_one_engine_answer_as_merged_weights_do(lm, engine, adapters):
    """The log-probabilities of each request, all in the same steps, are those of its own weights."""
    prompt, names = list(range(9)), [None, "all", "some"]
    models = [lm, merged(lm, adapters["all"], lambda module: 8, False)]
    models.append(merged(lm, adapters["some"], lambda module: 1 if module == "v_proj" else 6, True))
    streams = [engine.stream(prompt, max_tokens=6, eos=None, logprobs=True, adapter=name) for name in names]
    answers = [stream.result() for stream in streams]
    assert len({tuple(answer.ids) for answer in answers}) == 3
    for answer, model in zip(answers, models, strict=True):
        rates = np.asarray(jax.nn.log_softmax(np.asarray(model.logits([*prompt, *answer.ids]))[8:-1]))
        for token, row in zip(answer.tokens, rates, strict=True):
            assert token.logprob == pytest.approx(row[token.id], abs=2e-4)
            assert row[token.id] > row.max() - 4e-4


def test_answers_do_not_depend_on_the_adapters_beside_them(engine):
    """Bit for bit, and prefixes are shared within an adapter only."""
    asked = [([*range(20), i], name) for i in range(4) for name in (None, "all", "some")]
    ask = lambda prompt, name: engine.stream(prompt, max_tokens=5, eos=None, logprobs=True, adapter=name)
    together = [stream.result() for stream in [ask(*one) for one in asked]]
    engine._worker.finish(engine._core.scheduler.reset, "forgot its cache")
    for one, answer in zip(asked, together, strict=True):
        alone = ask(*one).result()
        assert [(t.id, t.logprob) for t in alone.tokens] == [(t.id, t.logprob) for t in answer.tokens]
    assert ask(asked[0][0], "all").result().cached_tokens == 20
    assert [c.ids for c in engine.generate([asked[1][0]] * 2, max_tokens=5, eos=None, adapter="all")] == [
        together[1].ids
    ] * 2


def kept(answer) -> list:
    return [(token.id, token.logprob) for token in answer.tokens]


@pytest.mark.early
def test_a_soak(engine):
    """Hundreds of requests of a few kinds, of which some are cancelled, dropped or no requests, while weights are
    replaced: each gets what it gets alone, or the beginning of it, and nothing is left."""
    rng, weights = np.random.default_rng(0), jax.tree.unflatten(engine.lm._structure[1], engine.lm._weights)
    kinds = [
        dict(prompt=[*range(10 * (i % 3), 10 * (i % 3) + int(rng.integers(2, 20)))], max_tokens=int(rng.integers(1, 9)))
        | dict(adapter=(None, "all", "some")[i % 3], temperature=float(i % 2), seed=i, eos=None, logprobs=True)
        for i in range(12)
    ]
    alone = [kept(engine.stream(**kind).result()) for kind in kinds]
    done, open_streams, whole = engine.stats()["steps_total"], [], 0
    count = 600 if thorough() else 200
    for i in range(count):
        which, fate = int(rng.integers(12)), int(rng.integers(10))
        stream = engine.stream(**kinds[which])
        if fate < 2:
            next(stream, None) if fate else None
            stream.cancel()
        if fate != 2:  # else nobody holds it any more
            open_streams.append((which, stream))
        del stream
        if fate == 3:
            with pytest.raises(ContextError):
                engine.stream([1] * 48)
        if i % 50 == 49:
            engine.update_weights(weights)
        if len(open_streams) > 12:
            which, stream = open_streams.pop(int(rng.integers(12)))
            answer = stream.result()
            assert kept(answer) == alone[which][: len(answer.tokens)]
            whole += len(answer.tokens) == len(alone[which])
    for which, stream in open_streams:
        assert kept(stream.result()) == alone[which][: len(stream.completion.tokens)]
    assert 3 * whole > 2 * count and 2 * (engine.stats()["steps_total"] - done) > count
    del stream, open_streams
    until(lambda: idle(engine))
    scheduler = engine._core.scheduler
    assert engine._worker.open == 0 and not engine._core.jobs and len(scheduler._slots) == scheduler.rows
    assert scheduler.pool.available == scheduler.pool.count
    gc.collect()
    assert not [x for x in gc.get_objects() if isinstance(x, Job | Mail | Sequence | Stream)]


def test_an_adapter_that_the_engine_lacks(lm, engine):
    with pytest.raises(PromptError, match=r"no adapter 'sql'; it has 'all', 'some'"):
        engine.stream([1], adapter="sql")
    with pytest.raises(ModelError, match="there is no LoRA adapter at"):
        Engine(lm, **SIZES, adapters={"sql": "/nowhere"})
    with pytest.raises(ModelError, match="a dict of names and folders"):
        Engine(lm, **SIZES, adapters=["/nowhere"])


def test_quantised_models_with_adapters_have_the_shapes_of_dense_ones(write_gguf, tmp_path):
    lm = jtile.models.load(write_gguf(tmp_path / "model.gguf", "Q4_0"), dtype="float32")
    assert default_shapes(lm, 16, True, True)[0] == 1
    assert default_shapes(lm, 16, True, True, adapters=True)[0] == 24


def test_a_trained_update_is_written_and_read_again(lm, tmp_path):
    """With ranks that differ; the model with what was read has the same weights, and can be trained further."""
    model = add_lora(add_lora(lm.model, 2, 6.0, ("qkv", "down")), 3, targets=("output",), key=jax.random.key(1))
    for holder, name in ((model.blocks[0].attention, "qkv"), (model.blocks[0].attention, "output")):
        b = getattr(holder, name).b
        b.set_value(jax.random.normal(jax.random.key(2), b.shape))
    path = save_adapter(model, tmp_path / "new" / "adapter")
    config = json.loads((path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "k_proj", "o_proj", "q_proj", "v_proj"]
    assert (config["r"], config["alpha_pattern"]) == (3, dict.fromkeys(config["rank_pattern"], 2))
    again = apply_adapter(lm.model, read_adapter(path, lm.model))
    for target in ("qkv", "output"):
        old, new = (getattr(m.blocks[0].attention, target).get_value() for m in (model, again))
        np.testing.assert_array_equal(old.a, new.a)
        np.testing.assert_allclose(old.scale * np.asarray(old.b), new.scale * np.asarray(new.b), rtol=1e-6)
    with pytest.raises(ModelError, match="have a LoRA update already"):
        apply_adapter(again, read_adapter(path, lm.model))
    with pytest.raises(ModelError, match="exists; give a new folder"):
        save_adapter(model, path)
    with pytest.raises(ModelError, match="no low-rank updates"):
        save_adapter(lm.model, tmp_path / "none")


def renamed(old, new):
    def change(tensors):
        tensors |= {name.replace(old, new): tensors.pop(name) for name in list(tensors)}

    return change


def without_b(tensors):
    del tensors[next(name for name in tensors if "lora_B" in name)]


def cut(tensors):
    for name in tensors:
        tensors[name] = np.ascontiguousarray(tensors[name][:, :-1])


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (None, {"peft_type": "IA3"}, "of the kind 'IA3'"),
        (None, {"use_dora": True}, "use_dora = True; jtile reads adapters of low-rank updates alone"),
        (None, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (None, {"lora_alpha": "16"}, "the alpha '16' for layers.0.self_attn.q_proj"),
        (None, {"alpha_pattern": {"(a+)+$": 1}}, r"alpha_pattern '\(a\+\)\+\$'; jtile reads ends of names"),
        (renamed("layers.0", "layers.7"), {}, "changes block 7 of a model; this one has 1 blocks"),
        (renamed("q_proj", "q_a_proj"), {}, "has the tensor .*q_a_proj.*; jtile reads updates of q_proj"),
        (renamed("self_attn", "mlp"), {}, "has the tensor"),
        (renamed("q_proj", "k_proj"), {}, r"changes k_proj of block 0 as a matrix of \(64, 64\); in this model it is"),
        (without_b, {}, "one half of the update of layers.0.self_attn.q_proj"),
        (cut, {}, "beside a lora_A of"),
        (dict.clear, {}, "has no tensor"),
    ],
)
def test_adapters_that_are_refused(lm, folder, change, config, message):
    with pytest.raises(ModelError, match=message):
        read_adapter(folder(["q_proj"], change=change, **config), lm.model)


def test_models_without_such_weights(short, folder):
    with pytest.raises(ModelError, match="block 0 has no weights 'qkv' of its own"):
        read_adapter(folder(["q_proj"]), short("deepseek_v3", 1).model)


def test_an_adapter_of_load(lm, write_gguf, folder, tmp_path):
    """Beside quantised weights, whose rows stand in another order in the file."""
    path = write_gguf(tmp_path / "model.gguf", "Q4_0")
    adapter = folder(["q_proj", "o_proj"])
    plain, adapted = jtile.models.load(path), jtile.models.load(path, adapter=adapter)
    base, lora = plain.model.blocks[0].attention, adapted.model.blocks[0].attention
    assert lora.qkv.get_value().a.shape == (4, 64)
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    from jtile.models import layers

    outputs = [run(lambda model, x: layers.linear(x, model.blocks[0].attention.output.get_value()), m.model, x)
               for m in (plain, adapted)]  # fmt: skip
    update = lora.output.get_value()
    np.testing.assert_allclose(outputs[1] - outputs[0], x @ np.asarray(update.a).T @ np.asarray(update.b).T, atol=1e-4)
    assert base.qkv.get_value() is not None
