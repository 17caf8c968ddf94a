"""MLA's decode attention against the form with all scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, normal, shapes_and_dtypes

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.latent_attention import mla_decode_reference
from jtile.testing.evaluate import evaluated

TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


def operands(batch, t, heads, slots, rank, rope, dtype="float32"):
    return normal(0, batch, t, heads, rank + rope, dtype=dtype), normal(1, batch, slots, rank + rope, dtype=dtype)


@pytest.mark.parametrize(("sizes", "dtype"), shapes_and_dtypes([(1, 1, 16, 700, 64, 16), (2, 3, 5, 40, 24, 5)]))
def test_sizes(sizes, dtype):
    q, cache = operands(*sizes, dtype=dtype)
    options = {"rank": sizes[4], "splits": {40: 1}.get(sizes[3]), "tolerance": TOLERANCE[dtype]}
    lengths = np.array([sizes[3], sizes[3] // 3, 7][: sizes[0]], np.int32)
    agree(ops.mla_decode, mla_decode_reference, q, cache, lengths, **options)


@pytest.mark.parametrize(("splits", "paged"), [(1, False), (2, True)])
def test_in_the_interpreter(splits, paged):
    q, cache = operands(2, 2, 3, 48, 8, 2)
    pages = np.array([[5, 0, 3], [1, 99, -7]], np.int32) if paged else None
    lengths = np.array([47, 9], np.int32)
    cache = normal(1, 6, 16, 10) if paged else cache
    with jt.config(interpret=True):
        got = evaluated(lambda q: ops.mla_decode(q, cache, lengths, rank=8, pages=pages, splits=splits, scale=0.2))(q)
    reference = lambda q: mla_decode_reference(q, cache, lengths, rank=8, pages=pages, scale=0.2)
    want = evaluated(reference)(q)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_pages_are_a_cache_in_pieces_and_what_stands_behind_the_length_does_not_matter():
    q, cache = operands(2, 1, 20, 192, 32, 8)
    cache = np.array(cache)
    cache[1, 65:] = np.nan
    order = np.random.default_rng(0).permutation(6)
    pool = cache.reshape(6, 64, 40)[np.argsort(order)]
    pages, lengths = order.reshape(2, 3).astype(np.int32), np.array([192, 65], np.int32)
    got = evaluated(lambda q, pool: ops.mla_decode(q, pool, lengths, rank=32, pages=pages))(q, pool)
    want = evaluated(lambda q, cache: ops.mla_decode(q, cache, lengths, rank=32))(q, cache)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_one_token_without_its_axis_and_rows_of_no_length():
    q, cache = operands(3, 1, 4, 50, 8, 4)
    lengths = np.array([50, 0, 99], np.int32)  # past the cache: all of it
    agree(ops.mla_decode, mla_decode_reference, q[:, 0], cache, lengths, rank=8, tolerance=2e-6)
    assert not np.asarray(ops.mla_decode(q[:, 0], cache, lengths, rank=8))[1].any()
    assert ops.mla_decode(q[:0], cache[:0], lengths[:0], rank=8).shape == (0, 1, 4, 8)


def test_gradients_vmap_and_a_gpus_tiles():
    q, cache = operands(2, 2, 3, 70, 8, 4)
    lengths = np.array([70, 11], np.int32)
    gradients_agree(ops.mla_decode, mla_decode_reference, q, cache, lengths, of=2, rank=8)
    each = lambda op: evaluated(jax.vmap(lambda q: op(q, cache, lengths, rank=8)))(np.stack([q, -q]))
    np.testing.assert_allclose(each(ops.mla_decode), each(mla_decode_reference), rtol=2e-5, atol=1e-6)
    with jt.config(arch="sm_90"):
        agree(ops.mla_decode, mla_decode_reference, q, cache, lengths, rank=8, tolerance=2e-6)


def test_errors():
    q, cache = operands(1, 1, 4, 8, 8, 4)
    lengths = jnp.array([8])
    for error, problem, args, options in [
        (KernelValueError, "1 to 11 are values, got rank=12", (q, cache, lengths), {"rank": 12}),
        (KernelValueError, "splits is at least 1", (q, cache, lengths), {"rank": 8, "splits": 0}),
        (KernelValueError, "lengths has shape", (q, cache, jnp.array([8, 8])), {"rank": 8}),
        (KernelValueError, "cache has shape", (q, cache[..., :10], lengths), {"rank": 8}),
        (KernelValueError, "pages has shape", (q, cache, lengths), {"rank": 8, "pages": jnp.zeros((2, 3), jnp.int32)}),
        (KernelTypeError, "one dtype", (q, cache.astype(jnp.bfloat16), lengths), {"rank": 8}),
    ]:
        with pytest.raises(error, match=problem):
            ops.mla_decode(*args, **options)


@pytest.mark.parametrize(("dtype", "splits"), [("int8", 1), ("float8_e4m3fn", 2)])
def test_entries_of_eight_bits(dtype, splits):
    """In pages; what stands behind the length may be anything, scales too."""
    q, pool = operands(2, 2, 6, 96, 24, 8)
    pool = np.asarray(pool).reshape(6, 32, 32)
    scales = np.abs(pool).max(-1) / float(127 if dtype == "int8" else 448)
    whole = pool / scales[..., None]
    bits = jnp.asarray(np.rint(whole) if dtype == "int8" else whole).astype(dtype)
    pool = jnp.asarray(pool)
    pages, lengths = np.array([[5, 0, 3], [1, 4, -7]], np.int32), np.array([96, 41], np.int32)
    scales[4, 9:] = np.nan
    run = lambda scales, op: evaluated(
        lambda q: op(q, bits, lengths, rank=24, pages=pages, scales=scales, splits=splits)
    )(q)
    got, want = run(scales, ops.mla_decode), run(np.nan_to_num(scales), mla_decode_reference)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    exact = evaluated(lambda q: mla_decode_reference(q, pool, lengths, rank=24, pages=pages))(q)
    assert np.abs(np.asarray(want) - np.asarray(exact)).max() < (0.03 if dtype == "int8" else 0.15)


def test_gradients_and_errors_of_scales():
    q, cache = operands(1, 1, 2, 12, 8, 4)
    bits, scales, lengths = jnp.asarray(cache * 40).astype(jnp.int8), jnp.full((1, 12), 1 / 40), np.array([9], np.int32)
    gradients = lambda op: evaluated(jax.grad(lambda q, s: (op(q, bits, lengths, rank=8, scales=s) ** 2).sum(), (0, 1)))
    for got, want in zip(gradients(ops.mla_decode)(q, scales), gradients(mla_decode_reference)(q, scales), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)
    run = lambda cache, scales: ops.mla_decode(q, cache, lengths, rank=8, scales=scales)
    with pytest.raises(KernelTypeError, match="with scales the cache is int8 or float8_e4m3fn, got float32"):
        run(cache, scales)
    with pytest.raises(KernelValueError, match=r"scales has shape \(12,\), expected \(1, 12\)"):
        run(bits, scales[0])
    with pytest.raises(KernelTypeError, match="the scales are float32, got bfloat16"):
        run(bits, scales.astype(jnp.bfloat16))
