"""Decode attention against the form with all scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, normal, shapes_and_dtypes

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import split_attention
from jtile.ops.split_attention import decode_attention_reference
from jtile.testing.evaluate import evaluated

TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
OPTIONS = [{"window": 20}, {"softcap": 4.0, "splits": 3}, {"splits": 1, "scale": 0.2}]


def operands(batch, slots, heads, groups, d, t, dtype="float32"):
    return normal(0, batch, t, heads, d, dtype=dtype), *(
        normal(k, batch, slots, groups, d, dtype=dtype) for k in (1, 2)
    )


@pytest.mark.parametrize(
    ("sizes", "dtype"), shapes_and_dtypes([(1, 700, 9, 3, 64, 1), (2, 40, 4, 4, 10, 1), (3, 600, 4, 2, 16, 5)])
)
def test_sizes(sizes, dtype):
    q, k, v = operands(*sizes, dtype=dtype)
    lengths = np.array([sizes[1], sizes[1] // 3, 7][: sizes[0]], np.int32)
    agree(ops.decode_attention, decode_attention_reference, q, k, v, lengths, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options):
    q, k, v = operands(2, 300, 4, 2, 16, 3)
    lengths = np.array([300, 111], np.int32)
    agree(ops.decode_attention, decode_attention_reference, q, k, v, lengths, tolerance=2e-6, **options)


@pytest.mark.parametrize("splits", [1, 3])
def test_finer_blocks_at_the_end(splits):
    """Keys in blocks of 64, and of 16 where a query does not see all of a block: lengths around the ends of both."""
    lengths = np.array([1, 15, 16, 17, 63, 64, 65, 81, 127, 128, 129, 0, 256, 250], np.int32)
    q, k, v = operands(len(lengths), 256, 4, 2, 8, 3)
    scale = 8**-0.5
    assert split_attention._finer(64) == 32 and split_attention._finer(117) is None
    run = lambda *x: split_attention.decode_splits(
        *x, None, (), splits=splits, bk=64, fine=16, scale=scale, softcap=None, window=None
    )
    whole = lambda *x: run(*x) if splits == 1 else split_attention.combined(*run(*x), dtype="float32")
    want = decode_attention_reference(q, k, v, lengths)
    np.testing.assert_allclose(whole(q, k, v, lengths), want, atol=2e-6)
    with jt.config(interpret=True):
        np.testing.assert_allclose(whole(q, k, v, lengths), want, atol=2e-6)


def test_sinks():
    (q, k, v), sinks = operands(2, 60, 4, 2, 8, 3), np.asarray(normal(5, 4))
    lengths = np.array([60, 2], np.int32)  # the first of three tokens sees no key
    agree(ops.decode_attention, decode_attention_reference, q, k, v, lengths, tolerance=2e-6, sinks=sinks, window=20)
    gradients = (
        evaluated(jax.grad(lambda q, s, f=f: (f(q, k, v, lengths, sinks=s) ** 2).sum(), (0, 1)))(q, sinks)
        for f in (ops.decode_attention, decode_attention_reference)
    )
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    with pytest.raises(KernelValueError, match="sinks"):
        ops.decode_attention(q, k, v, lengths, sinks=sinks[:3])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_in_the_interpreter(options):
    q, k, v = operands(2, 70, 4, 2, 8, 2)
    with jt.config(interpret=True):
        lengths = np.array([70, 9], np.int32)
        agree(ops.decode_attention, decode_attention_reference, q, k, v, lengths, tolerance=2e-6, **options)


def test_one_token_without_its_axis_and_rows_of_no_length():
    q, k, v = operands(3, 50, 4, 2, 8, 1)
    lengths = np.array([50, 0, 99], np.int32)  # past the cache: all of it
    agree(ops.decode_attention, decode_attention_reference, q[:, 0], k, v, lengths, tolerance=2e-6)
    assert not np.asarray(ops.decode_attention(q[:, 0], k, v, lengths))[1].any()
    assert ops.decode_attention(q[:0], k[:0], v[:0], lengths[:0]).shape == (0, 1, 4, 8)


def test_what_stands_behind_the_length_does_not_matter():
    q, k, v = operands(1, 300, 4, 2, 8, 1)
    spoiled = [np.where(np.arange(300)[:, None, None] >= 170, np.float32(np.nan), x) for x in (k, v)]
    of = evaluated(lambda k, v: ops.decode_attention(q, k, v, np.array([170], np.int32)))
    assert np.array_equal(of(*spoiled), of(k, v))


def in_pieces(order, x):
    pool = np.zeros_like(x)
    pool[order] = x
    return pool


@pytest.mark.parametrize("options", [{}, {"window": 20, "splits": 3}], ids=str)
def test_pages_are_a_cache_in_pieces(options):
    q, k, v = operands(2, 120, 4, 2, 8, 2)
    order = np.random.default_rng(0).permutation(6)
    k_pool, v_pool = (in_pieces(order, x.reshape(6, 40, 2, 8)) for x in (k, v))
    lengths, wild = np.array([120, 41], np.int32), order.reshape(2, 3).astype(np.int32)
    wild[1, 2] = -7  # behind the length
    want = evaluated(lambda q: decode_attention_reference(q, k, v, lengths, window=options.get("window")))(q)
    got = evaluated(lambda q: ops.decode_attention(q, k_pool, v_pool, lengths, pages=wild, **options))(q)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_gradients_go_to_the_pages():
    q, k, v = operands(2, 30, 4, 2, 8, 2)
    order = np.random.default_rng(0).permutation(6)
    k_pool, v_pool = (in_pieces(order, x.reshape(6, 10, 2, 8)) for x in (k, v))
    pages, lengths = order.reshape(2, 3).astype(np.int32), np.array([30, 11], np.int32)
    gradient = lambda op, *x, **more: evaluated(jax.grad(lambda *y: (op(*y, lengths, **more) ** 2).sum(), (0, 1)))(*x)
    dq, dk = gradient(ops.decode_attention, q, k_pool, v_pool, pages=pages)
    dq_want, dk_want = gradient(decode_attention_reference, q, k, v)
    np.testing.assert_allclose(dq, dq_want, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(dk[pages].reshape(k.shape), dk_want, rtol=2e-4, atol=1e-5)


def test_as_the_last_rows_of_attention():
    q, k, v = operands(1, 300, 4, 2, 8, 4)
    got = ops.decode_attention(q, k, v, jnp.array([300]))
    np.testing.assert_allclose(got, ops.attention(q, k, v, causal=True, offsets=jnp.array([296])), rtol=2e-5, atol=1e-6)


def test_errors():
    q, k, v = operands(1, 8, 4, 2, 8, 1)
    lengths = jnp.array([8])
    with pytest.raises(KernelValueError, match="a window is at least 1"):
        ops.decode_attention(q, k, v, lengths, window=0)
    with pytest.raises(KernelValueError, match="splits is at least 1"):
        ops.decode_attention(q, k, v, lengths, splits=0)
    with pytest.raises(KernelValueError, match="lengths has shape"):
        ops.decode_attention(q, k, v, jnp.array([8, 8]))
    with pytest.raises(KernelValueError, match="pages has shape"):
        ops.decode_attention(q, k, v, lengths, pages=jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(KernelTypeError, match="lengths is an array, got NoneType"):
        ops.decode_attention(q, k, v, None)
    with pytest.raises(KernelTypeError, match="pages is an array, got list"):
        ops.decode_attention(q, k, v, lengths, pages=[[0]])


def eight_bits(x, dtype):
    """x [..., slots, kv heads, d] in 8 bits, and the scales [..., kv heads, slots]."""
    scales = np.abs(x).max(-1, keepdims=True) / float(127 if dtype == "int8" else 448)
    whole = np.rint(x / scales) if dtype == "int8" else x / scales
    return np.asarray(jnp.asarray(whole).astype(dtype)), np.ascontiguousarray(scales[..., 0].swapaxes(-1, -2))


SCALED = [("int8", {"splits": 3}), ("float8_e4m3fn", {"window": 20}), ("int8", {"softcap": 4.0, "splits": 1})]


@pytest.mark.parametrize(("dtype", "options"), SCALED, ids=str)
def test_keys_and_values_of_eight_bits(dtype, options):
    q, *caches = operands(2, 300, 4, 2, 16, 3)
    (k, of_k), (v, of_v) = (eight_bits(x, dtype) for x in caches)
    of_k[1, :, 150:], of_v[1, :, 111:] = np.nan, np.inf  # behind the length
    lengths, bare = np.array([300, 111], np.int32), {"window": None} | options
    run = evaluated(lambda q: ops.decode_attention(q, k, v, lengths, scales=(of_k, of_v), **options))
    behind = np.arange(300) >= lengths[:, None, None]
    of_k, of_v = (np.where(behind, np.float32(0), x) for x in (of_k, of_v))
    want = evaluated(lambda q: decode_attention_reference(q, k, v, lengths, scales=(of_k, of_v), **bare))(q)
    np.testing.assert_allclose(run(q), want, rtol=2e-5, atol=2e-6)
    exact = np.asarray(evaluated(lambda q: decode_attention_reference(q, *caches, lengths, **bare))(q))
    assert np.abs(want - exact).max() < (0.02 if dtype == "int8" else 0.1)


def test_gradients_beside_eight_bits():
    q, *caches = operands(2, 30, 4, 2, 8, 2)
    (k, of_k), (v, of_v) = (eight_bits(x, "int8") for x in caches)
    lengths = np.array([30, 11], np.int32)
    gradients = lambda op: evaluated(jax.grad(lambda q, *of: (op(q, k, v, lengths, scales=of) ** 2).sum(), (0, 1, 2)))
    for got, want in zip(
        gradients(ops.decode_attention)(q, of_k, of_v),
        gradients(decode_attention_reference)(q, of_k, of_v),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-4)


def test_errors_of_scales():
    q, k, v = operands(1, 8, 4, 2, 8, 1)
    lengths, of = jnp.array([8]), jnp.ones((1, 2, 8))
    run = lambda *kv, scales=(of, of): ops.decode_attention(q, *kv, lengths, scales=scales)
    whole = jnp.ones(k.shape, jnp.int8)
    with pytest.raises(KernelTypeError, match="with scales k and v are both int8 or float8_e4m3fn, got float32"):
        run(k, v)
    with pytest.raises(KernelTypeError, match="got int8 and float32"):
        run(whole, v)
    with pytest.raises(KernelValueError, match="scales are those of keys and of values, got 1 arrays"):
        run(whole, whole, scales=(of,))
    with pytest.raises(KernelValueError, match=r"scales of values has shape \(1, 8, 2\), expected \(1, 2, 8\)"):
        run(whole, whole, scales=(of, of.swapaxes(1, 2)))
    with pytest.raises(KernelTypeError, match="scales of keys are float32"):
        run(whole, whole, scales=(of.astype(jnp.bfloat16), of))
    with pytest.raises(KernelTypeError, match="k is a float array, got int8"):
        ops.decode_attention(q, whole, whole, lengths)


@pytest.mark.parametrize(
    ("target", "dtype"), [("cuda:sm_90", "int8"), pytest.param("rocm:gfx942", "float8_e4m3fn", marks=pytest.mark.slow)]
)
def test_eight_bits_compile_for_gpus(target, dtype):
    shape, pool = jax.ShapeDtypeStruct, (6, 64, 2, 64)
    args = shape((2, 3, 8, 64), jnp.bfloat16), shape(pool, dtype), shape(pool, dtype), shape((2,), jnp.int32)
    args = *args, shape((2, 3), jnp.int32), (shape((6, 2, 64), jnp.float32),) * 2
    options = {"splits": 2, "bk": 32, "scale": 0.125, "softcap": None, "window": None}
    assert split_attention.decode_splits.lower(*args, **options, target=target).image


@pytest.mark.slow
@pytest.mark.parametrize(("t", "dtype", "window"), [(16, "float8_e4m3fn", None), (32, "int8", 100)])
def test_tiles_of_eight_bits_compile_at_the_block_level(t, dtype, window):
    shape, pool = jax.ShapeDtypeStruct, (6, 64, 2, 128)
    args = shape((2, t, 8, 128), jnp.bfloat16), shape(pool, dtype), shape(pool, dtype), shape((2,), jnp.int32)
    args = *args, shape((2, 3), jnp.int32), (shape((6, 2, 64), jnp.float32),) * 2
    options = {"splits": 1, "bk": 64, "scale": 0.125, "softcap": None, "window": window}
    found = split_attention.decode_splits.lower(*args, **options, target="cuda:sm_90")
    assert found.texts["schedule"].startswith("block level"), found.texts["schedule"]
