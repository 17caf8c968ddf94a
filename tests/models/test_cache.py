"""Forms of the cache: rings of windows, pages, several tokens a step, and their bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile.models
from jtile._errors import ModelError
from jtile.models import cache as kv
from jtile.models import kernels
from jtile.ops import gpu_tiles

pytestmark = pytest.mark.usefixtures("by_numpy")

NEW = 4  # tokens behind the prompt


def in_other_pages(cache: kv.KVCache) -> kv.KVCache:
    """The same tokens, in pages whose order is another one."""
    order = np.random.default_rng(0).permutation(cache.table.size)
    entries = tuple(
        kv.Entry(*(tuple(x[np.argsort(order)] for x in of) for of in (entry.arrays, entry.scales)))
        for entry in cache.entries
    )
    return kv.KVCache(entries, cache.lengths, jnp.asarray(order, jnp.int32)[cache.table])


@pytest.mark.parametrize(("dtype", "near"), [(None, 1e-4), ("int8", 0.3)])
def test_steps_of_several_tokens_in_pages(short, outputs, dtype, near):
    """Three tokens a row, of which the last two are taken back, then three again, against whole sequences."""
    model, ids = short("deepseek_v3", 1).model, outputs("deepseek_v3")["input_ids"].astype(np.int32)

    @jax.jit
    def run(ids):
        start = ids.shape[1] - NEW
        hidden, entries = model.prefill(ids)
        entries = [tuple(x[:, :start] for x in entry) for entry in entries]
        lengths = jnp.full(ids.shape[:1], start, jnp.int32)
        cache = in_other_pages(kv.from_prefill(entries, lengths, kv.Layout(ids.shape[1], dtype, page=5)))
        first, cache = model.step(ids[:, start : start + 3], cache)
        cache = kv.KVCache(cache.entries, cache.lengths - 2, cache.table)
        second, cache = model.step(ids[:, start + 1 : start + 4], cache)
        return jnp.concatenate([first, second], axis=1), cache.lengths, model.head(hidden[:, -NEW:])

    got, lengths, logits = run(ids)
    off = np.abs(got - logits[:, [0, 1, 2, 1, 2, 3]])
    assert off.max() < near
    assert (np.asarray(lengths) == ids.shape[1]).all()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prompts_of_which_one_token_is_asked_for(short, outputs, name):
    """Its hidden state is that of the whole prompt, and so are the entries of the cache, which may be made larger."""
    model, ids = short(name, 1).model, outputs(name)["input_ids"].astype(np.int32)
    at, slots = np.arange(len(ids), dtype=np.int32) + 3, ids.shape[1] + 9
    (hidden, entries), (one, same) = model.prefill(ids), model.prefill(ids, at=at, slots=slots)
    if model.windows == (None,):
        assert all((x.shape[1] == slots) and not np.asarray(x)[:, ids.shape[1] :].any() for x in same[0])
        same = [tuple(x[:, : ids.shape[1]] for x in same[0])]
    assert one.shape == (len(ids), hidden.shape[2])
    np.testing.assert_allclose(one, np.asarray(hidden)[np.arange(len(ids)), at], rtol=1e-4, atol=1e-5)
    for x, y in zip(jax.tree.leaves(entries), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_only_attention_of_the_first_layer_finds_lengths_that_are_new(short, outputs, monkeypatch):
    """Layers behind it may read them while the kernel in front of their attention runs."""
    lm, ids, asked = short("llama", 2), outputs("llama")["input_ids"].astype(np.int32), []
    held, attend = gpu_tiles.holds, kv.Slots._attended
    monkeypatch.setattr(kv.Slots, "_attended", lambda *of: asked.append(held()) or attend(*of))
    _, entries = jax.eval_shape(lm.model.prefill, ids)
    made = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), entries)
    cache = kv.from_prefill(made, jnp.full(len(ids), 3, jnp.int32), kv.Layout(ids.shape[1], page=4))
    jax.eval_shape(lm.model.step, ids[:, :2], cache)
    assert asked == [True, False]


def test_bytes_of_a_cache():
    """A window of 8 keeps 8 tokens, one that is wider than the cache as many as that."""
    lengths, row = jnp.array([30, 3]), jnp.zeros((2, 32, 2, 16), jnp.float32)
    make = lambda **options: jax.eval_shape(
        lambda: kv.from_prefill([(row, row)] * 3, lengths, kv.Layout(64, **options))
    )
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


@pytest.mark.parametrize("page", [1, 2])
def test_padding_is_put_nowhere(page):
    """Rows at position -1 read no table and write no page, whatever the number of slots of a page."""
    qkv, turn = np.ones((2, 3, 4), np.float32), (np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32))
    table, pool = np.array([[3, 1], [-1, -1]], np.int32), np.zeros((4, page, 1, 4), np.float32)
    lengths = np.array([page, -1], np.int32)
    _, keys, _ = kernels.rope_append.interpret(qkv, *turn, lengths, pool, pool, (), table, heads=1, kv_heads=1)
    expected = np.zeros_like(pool)
    expected[1, 0] = 1
    np.testing.assert_array_equal(keys, expected)


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


@pytest.mark.parametrize("normed", [False, True])
def test_turned_keys_of_eight_bits(normed):
    """What a cache of floats gets, rounded; queries are the same."""
    rng = np.random.default_rng(0)
    qkv, angles = rng.normal(size=(2, 4, 8)).astype(np.float32), rng.normal(size=(2, 4)).astype(np.float32)
    norms = tuple(rng.normal(size=(2, 8)).astype(np.float32)) if normed else ()
    lengths, options = np.array([1, 0], np.int32), dict(heads=2, kv_heads=1, eps=1e-5)
    pool = np.zeros((2, 2, 1, 8), np.float32)
    turn = np.cos(angles), np.sin(angles)
    q, *plain = kernels.rope_append.interpret(qkv, *turn, lengths, pool, pool, norms, None, **options)
    of_slots = np.zeros((2, 1, 2), np.float32)
    held = *[pool.astype(jnp.float8_e4m3fn)] * 2, of_slots, of_slots
    got, *held = kernels.rope_append_scaled.interpret(qkv, *turn, lengths, *held, norms, None, **options)
    np.testing.assert_allclose(got, q, rtol=1e-6)
    for x, eight, scales in zip(plain, held[:2], held[2:], strict=True):
        back = eight.astype(np.float32) * np.asarray(scales).swapaxes(1, 2)[..., None]
        np.testing.assert_allclose(back, x, atol=np.abs(x).max() / 28)


def test_rings_pages_and_eight_bits_of_one_model(short, outputs):
    """Layer 0 has a window of 8 tokens, the prompt 24: the tokens of whole sequences, but where two logits are nearly
    equal."""
    lm, ids = short("gemma2", 2, cache_dtype="int8", page_size=16), outputs("gemma2")["input_ids"]
    made = lm.generate(ids, 9, eos=None)
    likeliest = np.asarray(lm.logits(np.concatenate([ids, made], axis=1))).argmax(-1)[:, ids.shape[1] - 1 : -1]
    assert np.mean(made == likeliest) > 0.8


@pytest.mark.parametrize("page_size", [0, 2.5, True, 2**31])
def test_pages_of_no_size(tiny_folder, page_size):
    with pytest.raises(ModelError, match="page_size is an int of at least 1"):
        jtile.models.load(tiny_folder, page_size=page_size)
