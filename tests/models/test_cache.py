"""Forms of the cache: rings of windows, pages, several tokens a step, and their bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile.models
from jtile._errors import ModelError
from jtile.models import cache as kv
from jtile.models import kernels

NEW = 6  # tokens behind the prompt


def in_other_pages(cache: kv.KVCache) -> kv.KVCache:
    """The same tokens, in pages whose order is another one."""
    order = np.random.default_rng(0).permutation(cache.table.size)
    entries = tuple(
        kv.Entry(*(tuple(x[np.argsort(order)] for x in of) for of in (entry.arrays, entry.scales)))
        for entry in cache.entries
    )
    return kv.KVCache(entries, cache.lengths, jnp.asarray(order, jnp.int32)[cache.table])


@pytest.mark.parametrize(("name", "page"), [("llama", None), ("gemma2", 5), ("deepseek_v3", 4)])
def test_steps_of_several_tokens(model, outputs, name, page):
    """Three tokens a row, of which the last one is taken back, then two, then one, against whole sequences."""
    lm, golden = model(name), outputs(name)
    ids = golden["input_ids"].astype(np.int32)

    @jax.jit
    def run(ids):
        start = ids.shape[1] - NEW
        _, entries = lm.model.prefill(ids[:, :start])
        layout = kv.Layout(ids.shape[1], page=page)
        cache = kv.from_prefill(entries, jnp.full(ids.shape[:1], start, jnp.int32), layout)
        cache = cache if page is None else in_other_pages(cache)
        first, cache = lm.model.step(ids[:, start : start + 3], cache)
        cache = kv.KVCache(cache.entries, cache.lengths - 1, cache.table)
        second, cache = lm.model.step(ids[:, start + 2 : start + 4], cache)
        last, cache = lm.model.step(ids[:, start + 4], cache)
        return first, second, last, cache.lengths

    first, second, last, lengths = run(ids)
    got = np.concatenate([first[:, :2], second, last[:, None]], axis=1)
    assert np.abs(got - golden["logits"][:, -NEW:-1]).max() < 1e-4
    assert (np.asarray(lengths) == ids.shape[1] - 1).all()


def test_rings_and_pages_of_one_model_give_its_tokens(data, outputs):
    """Layers 0 and 2 have a window of 8 tokens, the prompt has 24."""
    lm, golden = jtile.models.load(data / "gemma2", page_size=16), outputs("gemma2")
    assert np.array_equal(lm.generate(golden["input_ids"], 16, eos=None), golden["greedy"])


def test_bytes_of_a_cache():
    """A window of 8 keeps 8 tokens, one that is wider than the cache as many as that."""
    lengths, row = jnp.array([30, 3]), jnp.zeros((2, 32, 2, 16), jnp.float32)
    make = lambda **options: kv.from_prefill([(row, row)] * 3, lengths, kv.Layout(64, **options))
    token = 2 * 2 * 2 * 16 * 4  # rows, keys and values
    assert make().nbytes == 3 * 64 * token
    assert make(windows=(8, None, 100)).nbytes == (8 + 64 + 64) * token
    assert make(dtype="int8", windows=(8, None, 8)).nbytes == (8 + 64 + 8) * (token // 4 + token // 16)
    assert make(dtype="bfloat16", windows=(8, None, 8), page=24).nbytes == (8 + 72 + 8) * token // 2


def test_a_ring_begins_with_the_newest_tokens():
    """Of rows that are longer than it, and of one that is not."""
    lengths = np.array([20, 8, 5, 11], np.int32)
    tokens = np.where(np.arange(20) < lengths[:, None], np.arange(20), -1).astype(np.float32)[:, :, None]
    (ring,) = kv.from_prefill([(tokens,)], lengths, kv.Layout(32, windows=(8,))).entries[0].arrays
    for row, length in zip(np.asarray(ring)[:, :, 0], lengths, strict=True):
        held = range(max(0, length - 8), length)
        assert {int(p): row[p % 8] for p in held} == {p: p for p in held}


@pytest.mark.parametrize("ring", [False, True])
def test_where_tokens_are_put(ring):
    """Two tokens a row; those of the second row leave the cache, or come round, and the third row has lost its page."""
    qkv = np.random.default_rng(0).normal(size=(6, 3, 4)).astype(np.float32)
    lengths, turn = np.array([2, 7, 4], np.int32), (np.ones((6, 2), np.float32), np.zeros((6, 2), np.float32))
    table = None if ring else np.array([[3, 1], [0, 2], [5, -1]], np.int32)
    pool = np.zeros((3, 8, 1, 4) if ring else (6, 4, 1, 4), np.float32)
    sizes = dict(heads=1, kv_heads=1, ring=ring)
    _, keys, values = kernels.rope_append.interpret(qkv, *turn, lengths, pool, pool, (), table, **sizes)
    places = [(0, 2), (0, 3), (1, 7), (1, 0), (2, 4), (2, 5)] if ring else [(3, 2), (3, 3), (2, 3)]
    expected = np.zeros((2, *pool.shape))
    for token, place in enumerate(places):
        expected[:, *place, 0] = qkv[token, 1:]
    np.testing.assert_array_equal(np.stack([keys, values]), expected)


@pytest.mark.parametrize("dtype", kv.SCALED)
def test_keys_and_values_of_eight_bits_are_what_they_were(dtype):
    """In pages and with a ring, appended and of a prompt alike; a token of zeros has the scale 0."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2, 11, 4, 8)).astype(np.float32) * 10.0 ** rng.integers(-3, 3, size=(2, 11, 4, 1))
    rows[1, 4] = 0
    turn, lengths = (np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32)), np.array([10, 9], np.int32)
    for layout in (kv.Layout(12, dtype, page=4), kv.Layout(12, dtype, windows=(5,))):
        cache = kv.from_prefill([(rows[:, :10, :2], rows[:, :10, 2:])], lengths, layout)
        entry, ring = cache.entries[0], layout.windows
        qkv = np.concatenate([rows[[0, 1], lengths, :1], rows[[0, 1], lengths]], axis=1)
        options = dict(heads=1, kv_heads=2, ring=bool(ring))
        held = kernels.rope_append_scaled.interpret(
            qkv, *turn, lengths, *entry.arrays, *entry.scales, (), None if ring else cache.table, **options
        )[1:]
        for arrays, scales, want in zip(held[:2], held[2:], (rows[:, :, :2], rows[:, :, 2:]), strict=True):
            got = arrays.astype(np.float32) * np.asarray(scales).swapaxes(1, 2)[..., None]
            got = got if ring else got.reshape(2, 12, 2, 8)
            for b, length in enumerate(lengths + 1):
                for position in range(max(0, length - 5) if ring else 0, length):
                    off = np.abs(got[b, position % 5 if ring else position] - want[b, position]).max(-1)
                    assert (off <= np.abs(want[b, position]).max(-1) * (0.5 / 127 if dtype == "int8" else 1 / 28)).all()


def test_tokens_of_a_cache_of_eight_bits(data, golden):
    """Of a whole generation, in pages: those of the float cache but where two logits are nearly equal."""
    lm = jtile.models.load(data / "llama", cache_dtype="int8", page_size=16)
    same = lm.generate(golden["input_ids"], 16, eos=None) == golden["greedy"]
    assert same[:, :4].all()


@pytest.mark.parametrize("page_size", [0, 2.5, True])
def test_pages_of_no_size(tiny_folder, page_size):
    with pytest.raises(ModelError, match="page_size is an int of at least 1"):
        jtile.models.load(tiny_folder, page_size=page_size)
