"""The engine on tiny models: tokens and log-probabilities of requests under load are, bit for bit, those of requests
that are alone."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import sys
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from serving_checks import numbers, requests_of, run, until

import jtile as jt
from jtile._errors import EngineError, ModelError, PromptError, QueueFullError
from jtile.models import Engine
from jtile.models.sampling import Sampling
from jtile.models.serving import settings as serving_settings
from jtile.models.serving.core import Core
from jtile.models.serving.request import read_request
from jtile.models.serving.settings import default_shapes, settings_of
from jtile.models.serving.worker import responsive

SIZES = dict(rows=4, shapes=(24, 48), cache_tokens=96, max_length=64)


@pytest.fixture(scope="module")
def lm(short):
    lm = short("llama", 2, noise=0.3)
    lm.page_size = 8
    return lm


@pytest.fixture(scope="module")
def core(lm):
    return Core(lm, settings_of(lm, **SIZES))


@pytest.fixture(scope="module")
def engine(lm, core):
    """With the compiled programs of `core`."""
    with Engine(lm, **SIZES) as engine:
        engine._core.device._compiled = core.device._compiled
        yield engine


def test_tokens_do_not_depend_on_what_else_is_in_the_batch(lm, core):
    """With random arrivals, shared prefixes, copies of pages, and preemptions: ids and log-probabilities."""
    rng = np.random.default_rng(1)
    requests = requests_of(lm, rng, 20)
    together = run(core, requests, rng.integers(0, 25, len(requests)))
    counts = core.scheduler.counts
    assert counts.preemptions >= 3 and counts.cached > 50
    assert core.totals.finished == {"length": len(requests)}
    for request, completion in zip(requests, together, strict=True):
        core.scheduler.reset()
        (alone,) = run(core, [request], [0])
        if jt.platform() == "cpu":
            assert numbers(completion) == numbers(alone)
        else:  # XLA's products of float32 have another order of sums there for other numbers of rows
            assert completion.ids == alone.ids
            np.testing.assert_allclose(*([rate for _, rate in numbers(one)] for one in (completion, alone)), atol=1e-5)
        assert len(alone.ids) == request.max_tokens
    core.scheduler.reset()
    assert core.scheduler.pool.free == core.settings.pages


def test_tiles_of_tokens(lm, core, monkeypatch):
    """As on GPUs: chunks of prompts behind the tokens that stand alone, in tiles that begin with padding."""
    monkeypatch.setattr(serving_settings, "tile_of", lambda lm, cpu: 4)
    in_tiles = Core(lm, settings_of(lm, **SIZES))
    assert (in_tiles.settings.tile, in_tiles.settings.singles) == (4, 24)
    odd = settings_of(lm, **SIZES | {"shapes": (9, 24, 25, 30, 47)})  # a shape grows to whole tiles
    assert odd.shapes == (9, 25, 33, 49)
    assert [in_tiles.settings.layout(counts) for counts in ([1, 20], [1, 20, 4], [1, 1, 23])] == [
        (24, 24), (48, 24), (48, 24)
    ]  # fmt: skip
    rng = np.random.default_rng(2)
    requests = requests_of(lm, rng, 10)
    together = run(in_tiles, requests, rng.integers(0, 5, len(requests)))
    assert in_tiles.totals.finished == {"length": len(requests)}
    core.scheduler.reset()
    for got, want in zip(together, run(core, requests, [0] * 10), strict=True):
        assert got.ids == want.ids
        np.testing.assert_allclose([t.logprob for t in got.tokens], [t.logprob for t in want.tokens], atol=1e-3)


def test_tokens_are_those_of_generate(lm, engine):
    """With every kind of option: of `LanguageModel.generate`, but for near ties."""
    prompts = [[5, 6, 7, 8], [9, 10, 200]]
    options = {"temperature": 1.0, "min_p": 0.01, "seed": 2, "presence_penalty": 0.5, "logit_bias": {3: 2.0}}
    got = engine.generate(prompts, max_tokens=8, eos=None, **options)
    assert [c.ids for c in got] == lm.generate(prompts, 8, eos=None, **options).tolist()
    assert all(c.finish_reason == "length" and c.prompt_tokens == len(p) for c, p in zip(got, prompts, strict=True))


@pytest.mark.parametrize("seed", [{}, {"seed": np.int64(7)}, {"seed": 2**32 - 1}, {"seed": [3, 4]}])
def test_seeds_of_several_prompts(lm, engine, monkeypatch, seed):
    """As those of `LanguageModel.generate`: s, s + 1, ... as 32 bits, or one of each."""
    asked, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: asked.append(request) or submit(request))
    engine.generate(iter([[5], [5]]), max_tokens=1, temperature=1.0, **seed)
    assert [int(request.row.options["seed"][0]) for request in asked] == Sampling(**seed).rows(2)["seed"].tolist()


@pytest.mark.parametrize("prompts", ["text", None, 5])
def test_prompts_that_are_no_list(engine, prompts):
    with pytest.raises(PromptError, match="takes a list of prompts"):
        engine.generate(prompts)


@pytest.mark.parametrize(
    ("name", "cache_dtype", "page", "near"),
    [("gemma2", None, 1, 1e-4), ("deepseek_v3", "int8", 8, 0.2), ("deepseek_v32", None, 8, 1e-4)],
)
def test_windows_and_latent_caches(short, name, cache_dtype, page, near):
    """In pages, and prompts in chunks: log-probabilities against those of whole sequences."""
    lm = short(name, 1, cache_dtype=cache_dtype, page_size=page)
    ids = np.random.default_rng(0).integers(0, lm.model.config.vocab_size, 30).tolist()
    core = Core(lm, settings_of(lm, rows=2, shapes=(24,), max_length=48))
    (done,) = run(core, [read_request(lm, 48, ids, 10, None, None, True)], [0])
    rates = np.asarray(jax.nn.log_softmax(np.asarray(lm.logits([*ids, *done.ids]))[29:-1]))
    for token, row in zip(done.tokens, rates, strict=True):
        assert token.logprob == pytest.approx(row[token.id], abs=near)
        assert row[token.id] > row.max() - 2 * near


def test_equal_prompts_are_computed_once(lm, core):
    """Full pages are shared, the last page is copied, the newest token alone is computed again."""
    core.scheduler.reset()
    before = dataclasses.replace(core.scheduler.counts)
    request = read_request(lm, 64, list(range(20)), 3, None, None)
    completions = run(core, [request] * 4, [0, 1, 1, 2])
    assert len({tuple(c.ids) for c in completions}) == 1
    assert core.scheduler.counts.prefilled - before.prefilled == 20 + 3
    assert [c.cached_tokens for c in completions] == [0, 19, 19, 19]


def test_log_probabilities(lm, engine):
    (done,) = engine.generate([[1, 2, 3, 4, 5]], max_tokens=3, eos=None, logprobs=4)
    logits = np.asarray(lm.logits([1, 2, 3, 4, 5, *done.ids]))[4:-1]
    rates = np.asarray(jax.nn.log_softmax(logits))
    for token, row in zip(done.tokens, rates, strict=True):
        assert token.logprob == pytest.approx(row[token.id], abs=1e-5)
        assert [i for i, _ in token.best] == np.argsort(-row)[:4].tolist()
        assert token.best[0] == (token.id, token.logprob)
    assert engine.generate([[1]], max_tokens=1)[0].tokens[0].logprob is None


def test_end_tokens_and_room(lm, engine):
    """The end token is the last one; without one an answer ends where the context does."""
    ids = engine.generate([[3, 1, 4]], eos=None)[0].ids
    assert len(ids) == 64 - 3
    end = next(i for i in range(1, 61) if ids[i] not in ids[:i])
    (done,) = engine.generate([[3, 1, 4]], eos=ids[end])
    assert (done.ids, done.finish_reason) == (ids[: end + 1], "stop")


async def ids_of(stream) -> list[int]:
    return [token.id async for token in stream]


def test_streams_of_one_event_loop(engine):
    """Some are left half-way: they are cancelled, and the others do not notice."""
    alone = engine.generate([[7, i] for i in range(6)], max_tokens=12, eos=None)

    async def leave_early(i):
        async for token in engine.stream([7, i], max_tokens=40, eos=None):
            return token.id

    async def main():
        tasks = [ids_of(engine.stream([7, i], max_tokens=12, eos=None)) for i in range(6)]
        return await asyncio.gather(*tasks, *(leave_early(i) for i in range(6)))

    cancelled = engine.stats()["requests_cancelled_total"]
    results = asyncio.run(main())
    assert results[:6] == [c.ids for c in alone]
    assert results[6:] == [c.ids[0] for c in alone]
    until(lambda: engine.stats()["requests_cancelled_total"] == cancelled + 6)
    until(lambda: engine.stats()["pages_in_use"] == 0)


def test_what_comes_just_before_a_stream_waits(engine):
    """The engine may tell a stream of a token or the end between its look and its waiting."""
    stream = engine.stream([5, 6], max_tokens=1, eos=None)
    until(lambda: stream._mail.ended)
    mail, (token,) = stream._mail, stream._mail.items
    mail.items.clear()
    mail.ended = False
    came: list = []

    async def follow():
        loop = asyncio.get_running_loop()
        create = loop.create_future

        def late(what):
            mail._deliver(*what)
            mail.tell({})
            return create()

        with pytest.MonkeyPatch.context() as patch:
            for what in (([token], None), ([], None)):
                patch.setattr(loop, "create_future", lambda what=what: late(what))
                came.append(await anext(stream, None))

    mail._worker.open += 1  # for the second end
    asyncio.run(follow())
    assert came == [token, None]


def test_streams_of_several_threads(engine):
    alone = engine.generate([[8, i] for i in range(5)], max_tokens=6, eos=None)
    got = [None] * 5

    def client(i):
        got[i] = [token.id for token in engine.stream([8, i], max_tokens=6, eos=None)]

    threads = [threading.Thread(target=client, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [c.ids for c in alone]


def test_new_weights_take_the_place_of_the_old_ones(short, core):
    """In the middle of an answer: the rest is that of the new model behind the tokens so far, and nothing of the old
    one's cache is used."""
    lm, other = short("llama", 2, noise=0.3), short("llama", 2, noise=0.7)
    lm.page_size = other.page_size = 8
    prompt, new = list(range(30, 50)), Core(other, settings_of(other, **SIZES))
    new.device._compiled = core.device._compiled
    with Engine(lm, **SIZES) as engine:
        engine._core.device._compiled = core.device._compiled
        old = engine.generate([prompt], max_tokens=30, eos=None)[0].ids
        stream = engine.stream(prompt, max_tokens=30, eos=None)
        next(stream)
        engine.update_weights(nnx.state(other.model))
        mixed = stream.result().ids
        at = next(i for i in range(30) if mixed[i] != old[i])
        alone = [read_request(other, 64, ids, 30, None, None) for ids in ([*prompt, *old[:at]], prompt)]
        rest, fresh = run(new, alone, [0, 0])
        assert mixed == [*old[:at], *rest.ids][:30]
        assert engine.generate([prompt], max_tokens=30, eos=None)[0].ids == fresh.ids
        with pytest.raises(ModelError, match="another tree"):
            engine.update_weights({"a": jnp.zeros(3)})
        for tree in ({1: jnp.zeros(3), "a": jnp.zeros(3)}, [1]):  # keys without an order
            with pytest.raises(ModelError, match="another tree"):
                engine.update_weights(tree)
        wrong = jax.tree.map(lambda x: x[..., :1], nnx.state(other.model))
        with pytest.raises(ModelError, match="a new weight is float32"):
            engine.update_weights(wrong)
        with pytest.raises(ModelError, match="a new weight is ShapeDtypeStruct"):
            engine.update_weights(jax.eval_shape(lambda: nnx.state(other.model)))
        assert engine.generate([prompt], max_tokens=30, eos=None)[0].ids == fresh.ids


@pytest.mark.parametrize("numpy", [False, True])
def test_new_weights_are_copies(lm, core, numpy):
    """A trainer changes or donates its own afterwards."""
    before = lm._weights
    tree = jax.tree.map(np.array if numpy else jnp.copy, nnx.state(lm.model))
    with Engine(lm, **SIZES) as engine:
        engine._core.device._compiled = core.device._compiled
        ids = engine.generate([[5, 6]], max_tokens=4, eos=None)[0].ids
        try:
            engine.update_weights(tree)
            for leaf in jax.tree.leaves(tree):
                if numpy:
                    leaf[...] = 0
                else:
                    leaf.delete()
            assert engine.generate([[5, 6]], max_tokens=4, eos=None)[0].ids == ids
        finally:
            lm._weights = before


@pytest.mark.early
def test_an_engine_that_nobody_has_ends(lm, core):
    """With its thread; not while somebody still reads an answer of it."""
    engine = Engine(lm, **SIZES)
    engine._core.device._compiled = core.device._compiled
    thread, stream = engine._worker.thread, engine.stream([1, 2], max_tokens=5, eos=None)
    del engine
    gc.collect()
    assert len(list(stream)) == 5 and thread.is_alive()
    del stream
    gc.collect()
    thread.join(600)
    assert not thread.is_alive()


def test_engines_of_one_model_share_its_weights(short, core):
    """The other one drops its cache, too, when one gets new weights."""
    lm, other = short("llama", 2, noise=0.3), short("llama", 2, noise=0.7)
    lm.page_size = 8
    cores = [Core(lm, settings_of(lm, **SIZES)) for _ in range(2)]
    for one in cores:
        one.device._compiled = core.device._compiled
    request = read_request(lm, 64, list(range(30, 50)), 10, None, None)
    (before,) = run(cores[1], [request], [0])
    cores[0].update_weights(jax.tree.leaves(nnx.state(other.model)))
    after = [run(one, [request], [0])[0] for one in cores]
    assert after[0].ids == after[1].ids != before.ids and after[1].cached_tokens == 0


def test_a_full_queue_and_a_closed_engine(lm, core):
    engine = Engine(lm, **SIZES, max_waiting=1)
    engine._core.device._compiled = core.device._compiled
    release = threading.Event()
    engine._worker.do(release.wait)
    streams = [engine.stream([1, 2], max_tokens=5, eos=None) for _ in range(5)]
    with pytest.raises(QueueFullError, match="5 requests run and wait"):
        engine.stream([1])
    release.set()
    many = engine.generate([[i, 2] for i in range(9)], max_tokens=2, eos=None)
    assert all(len(c.ids) == 2 for c in many)
    assert len({tuple(s.result().ids) for s in streams}) == 1
    stream = engine.stream([1, 2], max_tokens=60, eos=None)
    engine.close(drain=True)
    assert stream.result().finish_reason == "length"
    with pytest.raises(EngineError, match="is closed"):
        engine.stream([1])


def test_closing_ends_what_is_under_way(lm, core):
    engine = Engine(lm, **SIZES)
    engine._core.device._compiled = core.device._compiled
    stream = engine.stream([1, 2], max_tokens=60, eos=None)
    next(stream)
    engine.close()
    assert stream.result().finish_reason == "cancelled"
    assert all(x.is_deleted() for x in jax.tree.leaves(engine._core.device._entries))  # though the engine is still here
    engine.close()


def test_a_step_that_fails(lm, monkeypatch):
    """Every client hears of it, and the engine takes no more requests."""
    engine = Engine(lm, **SIZES)
    monkeypatch.setattr(engine._core.device, "run", lambda *_: 1 / 0)
    stream = engine.stream([1, 2])
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        stream.result()
    with pytest.raises(EngineError, match="a step of the engine failed"):
        engine.stream([1])
    engine.close()


def test_a_scheduler_that_fails(lm, monkeypatch):
    """Every client hears of it, although their pages cannot be given back."""
    engine = Engine(lm, **SIZES)
    monkeypatch.setattr(engine._core.scheduler, "plan", lambda: 1 / 0)
    monkeypatch.setattr(engine._core.scheduler, "_leave", lambda *_: 1 / 0)
    monkeypatch.setattr(engine._core.scheduler, "waiting", [])
    streams = [engine.stream([1, i]) for i in range(3)]
    for stream in streams:
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            stream.result()


def test_the_end_of_python_ends_the_engine(lm, core, monkeypatch):
    """In time: a thread that is in XLA when Python ends would abort the process."""
    ends = []
    monkeypatch.setattr("atexit.register", ends.append)
    engine = Engine(lm, **SIZES)
    engine._core.device._compiled = core.device._compiled
    stream = engine.stream([1, 2], max_tokens=60, eos=None)
    next(stream)
    (end,) = ends
    end()
    assert not engine._worker.thread.is_alive() and stream.result().finish_reason == "cancelled"


def test_logits_that_are_no_numbers(short, core):
    lm = short("llama", 2)
    lm.page_size = 8
    lm._weights = [jnp.full_like(x, jnp.nan) if x.ndim == 1 else x for x in lm._weights]
    with Engine(lm, **SIZES) as engine:
        engine._core.device._compiled = core.device._compiled
        stream = engine.stream([1, 2])
        with pytest.raises(ModelError, match="no numbers"):
            list(stream)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [[1], [2]]}, "one request is one prompt"),
        ({"prompt": [256]}, "outside the vocabulary"),
        ({"prompt": "text"}, "no tokenizer"),
        ({"prompt": [1] * 64}, "has 64 tokens; prompt and answer together have at most 64"),
        ({"max_tokens": 0}, "max_tokens is an int of at least 1"),
        ({"stop": "x"}, "no text to stop at"),
        ({"stop": [""]}, "stop is a string"),
        ({"stop": 3}, "stop is a string"),
        ({"eos": "x"}, "eos is 'model'"),
        ({"logprobs": 21}, "0 to 20"),
        ({"logprobs": "yes"}, "0 to 20"),
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": [1.0, 2.0]}, "one value, or one a row"),
        ({"logit_bias": {256: 1.0}}, "outside the vocabulary"),
        ({"max_new_tokens": 3}, "no option 'max_new_tokens'; beside max_tokens, stop, .* temperature, top_k"),
    ],
)
def test_requests_that_are_none(engine, arguments, message):
    with pytest.raises(PromptError, match=message):
        engine.stream(**({"prompt": [1]} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows of an engine is an int"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"shapes": (17, 17)}, "ascending"),
        ({"shapes": 5}, "ascending"),
        ({"rows": 20, "shapes": (20,)}, "no room for a prompt beside 20 rows"),
    ],
)
def test_sizes_that_do_not_fit(lm, arguments, message):
    with pytest.raises(ModelError, match=message):
        Engine(lm, **arguments)


def test_models_that_no_engine_takes(lm, monkeypatch):
    with pytest.raises(ModelError, match=r"an engine is of a LanguageModel, .* got NoneType"):
        Engine(None)
    elsewhere = SimpleNamespace(sharding=SimpleNamespace(device_set={"gpu:1"}))
    monkeypatch.setattr(lm, "_weights", [*lm._weights, elsewhere])
    with pytest.raises(ModelError, match=r"the weights of short llama are on .*gpu:1"):
        Engine(lm, **SIZES)


def test_tiles_by_model(lm, monkeypatch):
    """Tiles are twice as large where Hopper's kernel for chunks takes them."""
    attention = lm.part.blocks[0].attention
    config = dataclasses.replace(attention.config, head_dim=64, heads=4, kv_heads=1)
    monkeypatch.setattr(attention, "config", config)
    part = SimpleNamespace(blocks=[SimpleNamespace(attention=attention)])

    def tile(cpu=False, **options):
        usual = {"part": part, "dtype": jnp.bfloat16, "cache_dtype": None, "page_size": None}
        return serving_settings.tile_of(SimpleNamespace(**usual | options), cpu)

    with jt.config(arch="sm_90"):
        assert (tile(), tile(cache_dtype="float8_e4m3fn"), tile(cpu=True)) == (32, 32, 1)
        assert tile(dtype=jnp.float32) == tile(cache_dtype="int8") == tile(page_size=16) == 16


def test_pages_are_shown_where_many_tiles_see_them(lm, core, monkeypatch):
    """Those of 8 bits, in the largest step: one program is for few pages, and one for any number."""
    monkeypatch.setattr(serving_settings, "tile_of", lambda lm, cpu: 8)
    plain = settings_of(lm, **SIZES)
    settings = dataclasses.replace(plain, shown=True)
    assert [[one.seen(shape) for shape in one.shapes] for one in (plain, settings)] == [[None, None], [None, 3]]
    rng = np.random.default_rng(3)
    read = lambda length, made: read_request(lm, 64, rng.integers(0, 256, length).tolist(), made, eos=None)
    requests = [read(5, 12), read(60, 4)]  # chunks of 24, 24 and 12 tokens, in pages of 8, beside one that decodes
    in_tiles, asked = Core(lm, settings), []
    step = in_tiles.device._step
    monkeypatch.setattr(in_tiles.device, "_step", lambda *of: (asked.append(of), step(*of))[1])
    found = run(in_tiles, requests, [0, 1])
    assert [of for of in asked if of[0] == 48] == [(48, 3), (48, None)]
    core.scheduler.reset()
    assert [one.ids for one in found] == [one.ids for one in run(core, requests, [0, 1])]
    keys: list[tuple] = []
    monkeypatch.setattr(in_tiles.device, "_get", lambda key, *args, **static: keys.append(key))
    in_tiles.device.compile()
    assert {("step", 24, None), ("step", 48, None), ("step", 48, 3)} <= set(keys)


def test_shapes_by_model(model, lm):
    """On CPUs: dense products of up to 16 rows sum in another order; experts have tiles for every number of rows."""
    assert default_shapes(lm, 16, True, True) == (24, 64, 256)
    assert default_shapes(lm, 16, True, False) == (1, 4, 16, 24, 64, 256)
    with jt.config(arch="sm_90"):  # 33 tiles of 128 tokens: with multiples of 16 beside them whole rounds of 132
        assert default_shapes(lm, 128, False, True) == (64, 128, 640, 2176, 33 * 128)
        assert default_shapes(lm, 256, False, True) == (64, 256, 768, 2304, 66 * 128)
    assert default_shapes(model("qwen3_moe"), 16, True, True) == (64,)
    assert default_shapes(model("gpt_oss"), 16, True, True) == (64,)


@pytest.mark.early
def test_a_responsive_process():
    before, frozen, held = sys.getswitchinterval(), gc.get_freeze_count(), [[] for _ in range(10_000)]
    with responsive():
        assert sys.getswitchinterval() < 0.2 * before < 0.01
        assert gc.get_freeze_count() > frozen + len(held)
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (before, 0)
    gc.freeze()  # as it was: what collects after this test is not to walk through all others
