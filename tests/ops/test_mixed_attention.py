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
from jtile.ops import gpu_tiles, hopper_chunks, hopper_decode
from jtile.ops.hopper_shares import Units
from jtile.ops.mixed_attention import _op, mixed_attention, mixed_attention_reference, of_batch, of_batch_of_eight_bits
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
