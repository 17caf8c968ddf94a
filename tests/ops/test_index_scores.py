"""The scores of an indexer against the form that has those of all heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, normal, shapes_and_dtypes

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.index_scores import index_scores_reference, index_tiles
from jtile.testing.evaluate import evaluated


def seen(op):
    """`op` with the scores of keys behind a token set to zero, if they are -inf; otherwise to NaN."""

    def run(q, keys, weights, lengths, **options):
        y, slots = op(q, keys, weights, lengths, **options), keys.shape[-2]
        pages = options.get("pages")
        slots = slots if pages is None else slots * pages.shape[1]
        t, n = q.shape[1], jnp.minimum(lengths, slots)[:, None, None]
        behind = jnp.arange(slots)[None, None] > n - t + jnp.arange(t)[None, :, None]
        return jnp.where(behind, jnp.where(y == -jnp.inf, 0.0, jnp.nan), y)

    return run


def operands(batch, t, heads, d, slots, dtype="float32"):
    return (
        normal(0, batch, t, heads, d, dtype=dtype),
        normal(1, batch, slots, d, dtype=dtype),
        normal(2, batch, t, heads),
    )


TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-6, "float16": 1e-6}  # products of 16-bit numbers are exact in float32


@pytest.mark.parametrize("arch", [None, "sm_90"])
@pytest.mark.parametrize(("sizes", "dtype"), shapes_and_dtypes([(1, 1, 16, 64, 300), (2, 37, 3, 20, 90)]))
def test_sizes(sizes, dtype, arch):
    lengths = np.array([sizes[4], sizes[4] // 3][: sizes[0]], np.int32)
    with jt.config(arch=arch):
        agree(
            seen(ops.index_scores), seen(index_scores_reference), *operands(*sizes, dtype), lengths,
            tolerance=TOLERANCE[dtype],
        )  # fmt: skip


@pytest.mark.parametrize(("dtype", "arch"), [("float32", "sm_90"), ("int8", None), ("float8_e4m3fn", "sm_90")])
def test_pages_and_keys_of_eight_bits(dtype, arch):
    """What stands behind the length may be anything: numbers of pages, keys and scales. The tiles of a GPU have more
    queries than there are."""
    q, pool, weights = operands(2, 3, 4, 16, 48)
    pool = np.array(pool).reshape(6, 16, 16)
    pages, lengths = np.array([[5, 0, 3], [1, 99, -7]], np.int32), np.array([99, 9], np.int32)
    scales, bits = None, jnp.asarray(pool)
    if dtype != "float32":
        scales = np.abs(pool).max(-1) / float(127 if dtype == "int8" else 448)
        whole = pool / scales[..., None]
        bits = jnp.asarray(np.rint(whole) if dtype == "int8" else whole).astype(dtype)
        scales[1, 9:] = np.nan
    run = lambda op, scales: evaluated(lambda q: seen(op)(q, bits, weights, lengths, pages=pages, scales=scales))(q)
    want = run(index_scores_reference, None if scales is None else np.nan_to_num(scales))
    np.testing.assert_allclose(run(ops.index_scores, scales), want, rtol=1e-5, atol=1e-5)
    with jt.config(interpret=True, arch=arch):
        np.testing.assert_allclose(run(ops.index_scores, scales), want, rtol=1e-5, atol=1e-5)


def test_gradients_and_vmap():
    q, keys, weights = operands(2, 3, 4, 8, 12)
    lengths = np.array([12, 5], np.int32)
    gradients_agree(seen(ops.index_scores), seen(index_scores_reference), q, keys, weights, lengths, of=3)
    each = lambda op: evaluated(jax.vmap(lambda q: seen(op)(q, keys, weights, lengths)))(np.stack([q, -q]))
    np.testing.assert_allclose(each(ops.index_scores), each(index_scores_reference), rtol=1e-5, atol=1e-5)
    bits, scales = jnp.asarray(keys * 40).astype(jnp.int8), jnp.full((2, 12), 1 / 40)
    scaled = lambda op: lambda q, w, scales, n: seen(op)(q, bits, w, n, scales=scales)
    gradients_agree(scaled(ops.index_scores), scaled(index_scores_reference), q, weights, scales, lengths, of=3)


def test_the_published_sizes_compile_for_hopper():
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    rows = of("bfloat16", 4, 1, 64, 128), of("bfloat16", 99, 64, 128), of("float32", 4, 1, 64), of("int32", 4)
    assert index_tiles.lower(*rows, of("int32", 4, 64), None, bq=1, bk=64, target="cuda:sm_90").image


def test_errors_and_nothing_to_score():
    q, keys, weights = operands(1, 2, 4, 8, 12)
    lengths = np.array([12], np.int32)
    for error, problem, args, options in [
        (KernelTypeError, "one dtype", (q, keys.astype(jnp.bfloat16), weights, lengths), {}),
        (KernelTypeError, "lengths is an integer array", (q, keys, weights, weights[0, 0, :1]), {}),
        (KernelTypeError, "int8 or float8", (q, keys, weights, lengths), {"scales": jnp.ones((1, 12))}),
        (KernelTypeError, "scales are float32", (q, keys.astype(jnp.int8), weights, lengths),
         {"scales": jnp.ones((1, 12), jnp.bfloat16)}),
        (KernelValueError, "weights has shape", (q, keys, weights[:, :1], lengths), {}),
        (KernelValueError, "keys has shape", (q, keys[..., :4], weights, lengths), {}),
        (KernelValueError, "pages has shape", (q, keys, weights, lengths), {"pages": jnp.zeros((2, 3), jnp.int32)}),
    ]:  # fmt: skip
        with pytest.raises(error, match=problem):
            ops.index_scores(*args, **options)
    assert ops.index_scores(q, keys[:, :0], weights, lengths).shape == (1, 2, 0)
    want = np.where(np.arange(12) <= np.array([[6], [7]]), 0, -np.inf)[None]
    for cut in ((q[..., :0], keys[..., :0], weights), (q[:, :, :0], keys, weights[..., :0])):
        np.testing.assert_array_equal(ops.index_scores(*cut, np.array([8], np.int32)), want)
