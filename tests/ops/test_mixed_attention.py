"""Attention of tokens that stand alone and of tiles of prompts: the op against its reference, and Hopper's kernels in
the interpreter, whose tiles get the bits of each token alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal
from sass import spills_of_products

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import gpu_tiles, hopper_chunks, hopper_decode, shown_pages
from jtile.ops.hopper_shares import Units
from jtile.ops.mixed_attention import (
    _op,
    mixed_attention,
    mixed_attention_reference,
    of_batch,
    of_batch_of_eight_bits,
    of_shown_batch,
)
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

SCALE, PAGE = 0.1, 64
OPTIONS = {"scale": SCALE, "softcap": None, "window": None}


def arguments(t, heads, kvs, d, alone, ends, dtype="bfloat16"):
    """q, k, v, lengths, table: tokens of these lengths, as many as a tile has, or padding, and a tile behind each of
    `ends`, the lengths of last tokens. What stands behind a row's last length is NaN."""
    rng = np.random.default_rng(0)
    of_tiles = [np.arange(end - t, end) + 1 for end in ends]
    lengths = np.concatenate([alone, np.zeros(t - len(alone)), *of_tiles]).astype(np.int32)
    width, last = jt.cdiv(max(*alone, *ends), PAGE) + 1, [*alone, *ends]
    rows = rng.permutation(len(last) * width).astype(np.int32).reshape(-1, width)
    padding = np.zeros((t - len(alone), width), np.int32)
    table = np.concatenate([rows[: len(alone)], padding, np.repeat(rows[len(alone) :], t, axis=0)])
    q = normal(1, len(lengths), heads, d, dtype=dtype)
    k, v = (np.array(normal(i, rows.size, PAGE, kvs, d, dtype=dtype)) for i in (2, 3))
    for row, end in zip(rows, last, strict=True):
        k.reshape(-1, kvs, d)[(row[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[end:]] = np.nan
        v.reshape(-1, kvs, d)[(row[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[end:]] = np.nan
    return np.asarray(q), k, v, lengths, table


def reference(q, k, v, lengths, table, t):
    k, v = (np.where(np.isnan(x), 0, x).astype(x.dtype) for x in (k, v))
    run = functools.partial(mixed_attention_reference, tiles=(t, t), scale=SCALE)
    return evaluated(run)(q, k, v, lengths, table)


@pytest.mark.parametrize(("t", "heads", "seed"), [(32, 4, 1), (16, 8, 2)])
def test_chunks_have_the_bits_of_each_token_alone(t, heads, seed, monkeypatch):
    """Tiles of two consumers, one of which begins with padding, beside tokens that stand alone."""
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 2)
    args = arguments(t, heads, 1, 64, (130, 5), (100, 7))
    q, k, v, lengths, table = args
    for module, name in ((hopper_chunks, "hopper_chunks"), (hopper_decode, "hopper_decode")):
        run = functools.partial(getattr(module, name).interpret, seed=seed)
        monkeypatch.setattr(module, name, run)
    with jt.config(interpret=True):
        got = np.asarray(of_batch(*args, tiles=(t, t), scale=SCALE, softcap=None, splits=1))
        alone = functools.partial(hopper_decode.of_batch, scale=SCALE, softcap=None, whole=True)
        each = np.asarray(alone(q[:, None], k, v, lengths, table))[:, 0]
    np.testing.assert_array_equal(got, each)
    assert relative_error(got, reference(*args, t)) < 4e-3


@pytest.mark.parametrize("splits", [1, None])
def test_the_op(splits):
    """On the machine at hand, also under vmap."""
    args = arguments(4, 4, 2, 32, (70, 3, 1), (66, 2), dtype="float32")
    run = functools.partial(mixed_attention, tiles=(4, 4), scale=SCALE, splits=splits)
    want = reference(*args, 4)
    assert relative_error(evaluated(run)(*args), want) < 1e-5
    both = evaluated(jax.vmap(run, (0, None, None, None, None)))(np.stack([args[0], -args[0]]), *args[1:])
    assert relative_error(both[0], want) < 1e-5


def test_what_it_chooses():
    """Two kernels for one array where tiles have 128 queries of a kv head; on other machines the same call works."""
    args = arguments(32, 8, 2, 64, (70, 3), (66,))
    flat = jax.tree.map(jnp.asarray, args)
    choice = lambda t, **options: _op.choice(*flat, (), None, tiles=(32, t), **(OPTIONS | {"splits": 1} | options))
    with jt.config(arch="sm_90"):
        assert choice(32).implementation == "two kernels for one array"
        assert "64 queries of a kv head, not 128" in str(choice(16))
        assert "there is a window" in str(choice(32, window=8))
        got = evaluated(functools.partial(mixed_attention, tiles=(32, 32), scale=SCALE, splits=1))(*args)
    assert relative_error(got, reference(*args, 32)) < 4e-3
    with pytest.raises(KernelValueError, match=r"64 tokens are not 20 and whole tiles of 32"):
        mixed_attention(*args, tiles=(20, 32))
    q, k, v, lengths, table = args
    with pytest.raises(KernelValueError, match=r"mixed_attention: lengths has shape \(63,\), expected \(64,\)"):
        mixed_attention(q, k, v, lengths[:63], table, tiles=(32, 32))
    with pytest.raises(KernelTypeError, match="mixed_attention: lengths is an integer array"):
        mixed_attention(q, k, v, lengths.astype(np.float32), table, tiles=(32, 32))


def narrow(x):
    """(codes of e4m3, scales [pages, kv heads, slots]) of a cache in pages."""
    x = np.where(np.isnan(x.astype(np.float32)), 0, x).astype(np.float32)
    unit = np.maximum(np.abs(x).max(-1), 1e-6) / 448.0
    return (x / unit[..., None]).astype(jnp.float8_e4m3fn), unit.swapaxes(1, 2).astype(np.float32)


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 5.0}])
def test_caches_of_eight_bits_in_one_array(options):
    q, k, v, lengths, table = arguments(32, 8, 2, 64, (70, 3), (66, 40))
    (k, of_k), (v, of_v) = narrow(k), narrow(v)
    of, scales = {"scale": SCALE, **options}, (of_k, of_v)
    run = lambda q, k, v, lengths, table, *scales: mixed_attention(
        q, k, v, lengths, table, scales=scales, tiles=(32, 32), splits=1, **of
    )
    args = *jax.tree.map(jnp.asarray, (q, k, v, lengths, table, scales)), None
    with jt.config(arch="sm_90"):
        full = OPTIONS | {"splits": 1, "tiles": (32, 32)} | options
        assert _op.choice(*args, **full).implementation == "two kernels for one array, of 8 bits"
        assert "rows are in parts" in str(_op.choice(*args, **(full | {"splits": 2})))
        with jt.config(arch="910b1"):
            assert "no GPU" in str(_op.choice(*args, **full))
        found = evaluated(run)(*args[:5], *scales)
        both = evaluated(jax.vmap(run, (0, *[None] * 6)))(np.stack([q, -q]), *args[1:5], *scales)
    reference = functools.partial(mixed_attention_reference, tiles=(32, 32), **of)
    want = evaluated(lambda *args: reference(*args[:5], scales=args[5:]))(*args[:5], *scales)
    kernels = functools.partial(of_batch_of_eight_bits, tiles=(32, 32), splits=1, **(OPTIONS | options))
    for y in (found, both[0], evaluated(kernels)(*args[:5], *scales)):
        assert relative_error(y, want) < 6e-3


def rows_of_tiles():
    """lengths [tiles] and table [tiles, n] of rows that follow each other: one of three tiles, two that begin alike,
    and padding."""
    lengths = np.array([64, 96, 130, 70, 65, -1, 0], np.int32)
    one, two, three = [7, 3, 9, -1], [5, 2, -1, -1], [5, 4, -1, -1]
    return lengths, np.array([one, one, one, two, three, [-1] * 4, [-1] * 4], np.int32)


def test_places_of_pages_that_tiles_see():
    lengths, table = rows_of_tiles()
    source, where = map(np.asarray, evaluated(functools.partial(shown_pages.places, page=PAGE, most=9))(lengths, table))
    assert source.tolist() == [7, 3, 9, 5, 2, 5, 4, -1, -1]
    for tile, length in enumerate(lengths):
        seen = max(0, jt.cdiv(int(length), PAGE))
        assert source[where[tile, :seen]].tolist() == table[tile, :seen].tolist()
    assert where.max() < 9  # also for pages that no tile sees


def test_pages_of_eight_bits_shown_as_sixteen():
    """A page stands at its place as codes times scales, and where there is none, nothing is written."""
    lengths, table = rows_of_tiles()
    k, v = (np.asarray(normal(seed, 10, PAGE, 2, 32)) for seed in (1, 2))
    (k, of_k), (v, of_v) = narrow(k), narrow(v)
    run = functools.partial(shown_pages.pages, most=9, dtype=jnp.bfloat16)
    got = evaluated(lambda k, v, lengths, table, *scales: run(k, v, lengths, table, scales))
    *found, where = map(np.asarray, got(k, v, lengths, table, of_k, of_v))
    for codes, scales, pages in ((k, of_k, found[0]), (v, of_v, found[1])):
        want = codes.astype(np.float32) * scales.swapaxes(1, 2)[..., None]
        for tile, length in enumerate(lengths):
            for page in range(max(0, jt.cdiv(int(length), PAGE))):
                got = pages[where[tile, page]].astype(np.float32)
                assert relative_error(got, want[table[tile, page]]) < 3e-3


def test_tiles_see_pages_of_eight_bits_as_sixteen(monkeypatch):
    """In the interpreter, with several tiles of a row."""
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 2)
    q, k, v, lengths, table = arguments(32, 4, 1, 64, (130, 5), (100, 7))
    table = np.concatenate([table, table[32:64]])  # the first row goes on with a second tile
    lengths = np.concatenate([lengths, lengths[32:64] + 32]).astype(np.int32)
    order = np.r_[0:64, 96:128, 64:96]  # tiles of a row follow each other
    lengths, table, q = lengths[order], table[order], np.concatenate([q, q[32:64]])[order]
    (k, of_k), (v, of_v) = narrow(k), narrow(v)
    interpreted = functools.partial(hopper_chunks.hopper_chunks.interpret, seed=1)
    monkeypatch.setattr(hopper_chunks, "hopper_chunks", interpreted)
    options = {"tiles": (32, 32), "scale": SCALE, "softcap": None, "splits": 1}
    with jt.config(interpret=True):
        got = np.asarray(of_shown_batch(*map(jnp.asarray, (q, k, v, lengths, table, of_k, of_v)), seen=5, **options))
    reference = functools.partial(mixed_attention_reference, tiles=(32, 32), scale=SCALE)
    want = evaluated(lambda *args: reference(*args[:5], scales=args[5:]))(q, k, v, lengths, table, of_k, of_v)
    assert relative_error(got, want) < 6e-3


def test_when_pages_are_shown():
    q, k, v, lengths, table = arguments(32, 8, 2, 64, (70, 3), (66,))
    (k, of_k), (v, of_v) = narrow(k), narrow(v)
    args = *jax.tree.map(jnp.asarray, (q, k, v, lengths, table, (of_k, of_v))), None
    choice = lambda seen, **more: _op.choice(*args, tiles=(32, 32), seen=seen, **(OPTIONS | {"splits": 1} | more))
    with jt.config(arch="sm_90"):
        assert choice(4).implementation == "two kernels for one array, of 8 bits shown as 16"
        assert "how many pages tiles see is not known" in str(choice(None))
        assert "there is a window" in str(choice(4, window=8))
    with pytest.raises(KernelValueError, match="seen is a number of pages, at least 1, or None; got 0"):
        mixed_attention(*args[:5], scales=args[5], tiles=(32, 32), seen=0)


@pytest.mark.gpu
def test_shown_pages_on_the_gpu():
    q, k, v, lengths, table = arguments(32, 32, 8, 128, (1100, 64, 1), (1024, 333, 31, 64))
    (k, of_k), (v, of_v) = narrow(k), narrow(v)
    options = {"tiles": (32, 32), "scale": SCALE}
    with jt.config(interpret=False):
        run = jax.jit(functools.partial(of_shown_batch, splits=1, softcap=None, seen=64, **options))
        got = run(q, k, v, lengths, table, of_k, of_v)
        assert all(np.array_equal(run(q, k, v, lengths, table, of_k, of_v), got) for _ in range(5))
    reference = functools.partial(mixed_attention_reference, scales=(of_k, of_v), **options)
    assert relative_error(got, evaluated(reference)(q, k, v, lengths, table)) < 6e-3


@pytest.mark.gpu
def test_on_the_gpu():
    args = arguments(32, 32, 8, 128, (1100, 64, 1), (1024, 333, 31, 64))
    q, k, v, lengths, table = args
    with jt.config(interpret=False):
        run = jax.jit(functools.partial(of_batch, tiles=(32, 32), scale=SCALE, softcap=None, splits=1))
        got = run(*args)
        assert all(np.array_equal(run(*args), got) for _ in range(5))
        alone = functools.partial(hopper_decode.of_batch, scale=SCALE, softcap=None, whole=True)
        np.testing.assert_array_equal(got, jax.jit(alone)(q[:, None], k, v, lengths, table)[:, 0])
    assert relative_error(got, reference(*args, 32)) < 4e-3


@pytest.mark.gpu
def test_caches_of_eight_bits_on_the_gpu():
    q, k, v, lengths, table = arguments(32, 32, 8, 128, (1100, 64, 1), (1024, 333, 31, 64))
    (k, of_k), (v, of_v) = narrow(k), narrow(v)
    options = {"tiles": (32, 32), "scale": SCALE}
    with jt.config(interpret=False):
        run = jax.jit(functools.partial(of_batch_of_eight_bits, splits=1, softcap=None, window=None, **options))
        got = run(q, k, v, lengths, table, of_k, of_v)
    reference = functools.partial(mixed_attention_reference, scales=(of_k, of_v), **options)
    assert relative_error(got, evaluated(reference)(q, k, v, lengths, table)) < 6e-3


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128])
def test_what_it_compiles_to(size):
    pytest.importorskip("triton")
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    q, cache = of("bfloat16", 512, 32, 128), of("bfloat16", 64, 64, 8, 128)
    args = q, cache, cache, of("int32", 8), of("int32", 8, 20), q
    options = {"parts": 132, "units": Units(1280, size, 8), "t": 32, "scale": 0.1, "softcap": None}
    found = hopper_chunks.hopper_chunks.lower(*args, **options, target="cuda:sm_90")
    assert not spills_of_products(found.texts["sass"])
    for what in ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG"):
        assert what in found.texts["sass"]
