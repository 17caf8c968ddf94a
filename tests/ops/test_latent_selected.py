"""Attention to chosen entries of a latent cache against the form that gathers them, and against that to all entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import agree, gradients_agree, normal, shapes_and_dtypes

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops.latent_selected import mla_selected_reference, selected_latents
from jtile.testing.evaluate import evaluated

TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


def operands(batch, t, heads, slots, rank, rope, n, dtype="float32"):
    """Lists of `n` places, of which some are empty, and one is of them all."""
    rng = np.random.default_rng(0)
    q, cache = normal(0, batch, t, heads, rank + rope, dtype=dtype), normal(1, batch, slots, rank + rope, dtype=dtype)
    places = np.stack([rng.permutation(slots)[:n] for _ in range(batch * t)]).reshape(batch, t, n).astype(np.int32)
    counts = rng.integers(0, n, (batch, t)).astype(np.int32)
    counts[0, 0], counts[-1, -1] = n, n if batch * t == 1 else 0
    return q, cache, places, counts


@pytest.mark.parametrize("arch", [None, "sm_90"])
@pytest.mark.parametrize(
    ("sizes", "dtype"), shapes_and_dtypes([(1, 1, 16, 700, 64, 16, 600), (2, 3, 5, 40, 24, 5, 17)])
)
def test_sizes(sizes, dtype, arch):
    options = {"rank": sizes[4], "splits": {40: 1}.get(sizes[3]), "tolerance": TOLERANCE[dtype]}
    with jt.config(arch=arch):
        agree(ops.mla_selected, mla_selected_reference, *operands(*sizes, dtype), **options)


@pytest.mark.parametrize(("splits", "dtype"), [(1, "float32"), (2, "int8"), (1, "float8_e4m3fn")])
def test_pages_and_entries_of_eight_bits(splits, dtype):
    """Places behind the count may be anything, entries that no list names too."""
    q, cache, places, counts = operands(2, 2, 3, 48, 8, 2, 11)
    pool, pages = np.array(cache).reshape(6, 16, 10), np.array([[5, 0, 3], [1, 4, 2]], np.int32)
    named = [{(pages[b, p // 16], p % 16) for x, n in zip(places[b], counts[b]) for p in x[:n]} for b in range(2)]
    places = np.where(np.arange(11) < counts[..., None], places, -(2**30))
    scales, bits, whole = None, pool, pool
    if dtype != "float32":
        scales = np.abs(pool).max(-1) / float(127 if dtype == "int8" else 448)
        whole = pool / scales[..., None]
        bits = np.asarray(np.rint(whole) if dtype == "int8" else whole, jnp.dtype(dtype))
    spoilt = np.array(pool if scales is None else scales)
    for at in np.ndindex(6, 16):
        if at not in named[0] | named[1]:
            spoilt[at] = np.nan
    options = {"rank": 8, "pages": pages, "scale": 0.2}
    args = lambda dirty: (spoilt, None) if scales is None and dirty else (bits, spoilt if dirty else scales)

    def run(op, dirty, **more):
        cache, scales = args(dirty)
        return evaluated(lambda q: op(q, jnp.asarray(cache), places, counts, scales=scales, **options, **more))(q)

    want = run(mla_selected_reference, False)
    np.testing.assert_allclose(run(ops.mla_selected, True, splits=splits), want, rtol=2e-5, atol=1e-6)
    with jt.config(interpret=True):
        np.testing.assert_allclose(run(ops.mla_selected, True, splits=splits), want, rtol=2e-5, atol=1e-6)


def test_a_list_of_all_slots_is_decode_attention():
    q, cache, _, _ = operands(2, 1, 4, 50, 8, 4, 50)
    lengths = np.array([50, 21], np.int32)
    places = np.broadcast_to(np.arange(50, dtype=np.int32), (2, 1, 50))
    got = evaluated(lambda q: ops.mla_selected(q, cache, places, lengths[:, None], rank=8))(q)
    want = evaluated(lambda q: ops.mla_decode(q, cache, lengths, rank=8))(q)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_gradients_and_vmap():
    q, cache, places, counts = operands(2, 2, 3, 20, 8, 4, 6)
    gradients_agree(ops.mla_selected, mla_selected_reference, q, cache, places, counts, of=2, rank=8)
    each = lambda op: evaluated(jax.vmap(lambda q: op(q, cache, places, counts, rank=8)))(np.stack([q, -q]))
    np.testing.assert_allclose(each(ops.mla_selected), each(mla_selected_reference), rtol=2e-5, atol=1e-6)
    bits, scales = jnp.asarray(cache * 40).astype(jnp.int8), jnp.full((2, 20), 1 / 40)
    scaled = lambda op: lambda q, s: op(q, bits, places, counts, rank=8, scales=s)
    gradients_agree(scaled(ops.mla_selected), scaled(mla_selected_reference), q, scales, tolerance=1e-5)


def test_the_published_sizes_compile_for_hopper():
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    args = of("bfloat16", 4, 1, 128, 576), of("bfloat16", 99, 64, 576), of("int32", 4, 1, 2048), of("int32", 4, 1)
    options = {"rank": 512, "scale": 0.1, "splits": 4, "bm": 64, "bk": 32}
    assert (
        selected_latents.with_options(num_warps=8)
        .lower(*args, of("int32", 4, 64), None, target="cuda:sm_90", **options)
        .image
    )


def test_errors_and_nothing_to_attend_to():
    q, cache, places, counts = args = operands(1, 2, 4, 12, 8, 4, 5)
    table = {"pages": jnp.zeros((2, 3), jnp.int32)}
    for error, problem, given, options in [
        (KernelTypeError, "one dtype", (q, cache.astype(jnp.bfloat16), places, counts), {}),
        (KernelTypeError, "places is an integer array", (q, cache, q[0], counts), {}),
        (KernelValueError, "counts has shape", (q, cache, places, counts[:, :1]), {}),
        (KernelValueError, "places has shape", (q, cache, places[:, :1], counts), {}),
        (KernelValueError, "1 to 11 are values, got rank=12", args, {"rank": 12}),
        (KernelValueError, "splits is at least 1", args, {"splits": 0}),
        (KernelValueError, "pages has shape", args, table),
    ]:
        with pytest.raises(error, match=problem):
            ops.mla_selected(*given, **{"rank": 8, **options})
    assert not np.asarray(ops.mla_selected(q, cache, places[..., :0], counts * 0, rank=8)).any()


def test_a_number_of_rows_that_is_not_known():
    rows, of = jax.export.symbolic_shape("n")[0], jax.ShapeDtypeStruct
    shapes = of((rows, 2, 4, 12), "float32"), of((rows, 9, 12), "float32"), of((rows, 2, 5), "int32")
    found = jax.eval_shape(lambda *args: ops.mla_selected(*args, rank=8), *shapes, of((rows, 2), "int32"))
    assert found.shape == (rows, 2, 4, 8)
