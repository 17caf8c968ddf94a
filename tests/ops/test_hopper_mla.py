"""MLA's decode attention at the block level: in the interpreter, roles interleaved by seeds, against the form with all
scores; shares of the keys; what it is called from, without a GPU."""

import functools

import jax
import numpy as np
import pytest
from library import normal
from sass import spills_of_products

import jtile as jt
from jtile import ops
from jtile.ops import gpu_tiles, hopper_mla
from jtile.ops.hopper_shares import Units
from jtile.ops.latent_attention import mla_decode_reference
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

CASES = {  # batch, new tokens, heads, slots, rank, lengths; processors, slots of a page
    "rows in parts": ((3, 1, 16, 512, 128, (500, 0, 129)), 4, None),
    "parts without work": ((2, 2, 48, 256, 128, (230, 65)), 5, None),
    "pages": ((2, 1, 16, 384, 128, (383, 200)), 2, 64),
    "large pages": ((1, 3, 16, 256, 256, (129,)), 2, 128),
    "DeepSeek": ((1, 1, 16, 256, 512, (200,)), 2, None),
}


@pytest.fixture(autouse=True)
def interpreted():
    with jt.config(interpret=True):
        yield


def arguments(batch, t, heads, slots, rank, lengths, page=None, dtype="bfloat16"):
    """q, cache, lengths, table; what stands behind a length is NaN."""
    q, cache = normal(0, batch, t, heads, rank + 64, dtype=dtype), normal(1, batch, slots, rank + 64, dtype=dtype)
    lengths = np.array(lengths, np.int32)
    behind = np.arange(slots)[None, :, None] >= lengths[:, None, None]
    cache = np.where(behind, np.asarray(np.nan, cache.dtype), cache)
    if page is None:
        return np.asarray(q), cache, lengths, None
    order = np.random.default_rng(0).permutation(batch * slots // page)
    pool = cache.reshape(-1, page, rank + 64)[np.argsort(order)]
    return np.asarray(q), pool, lengths, order.reshape(batch, -1).astype(np.int32)


def reference(q, cache, lengths, table, rank):
    cache = np.where(np.isnan(cache), 0, cache).astype(cache.dtype)
    run = lambda q, cache: mla_decode_reference(q, cache, lengths, rank=rank, pages=table, scale=0.07)
    return evaluated(run)(q, cache)


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name, monkeypatch):
    sizes, processors, page = CASES[name]
    args, rank, kernel = arguments(*sizes, page=page), sizes[4], hopper_mla.hopper_mla
    monkeypatch.setattr(gpu_tiles, "processors", lambda: processors * jt.cdiv(sizes[1] * sizes[2], 64))
    want = reference(*args, rank)
    for seed in range(3 if page == 64 else 1):
        monkeypatch.setattr(hopper_mla, "hopper_mla", functools.partial(kernel.interpret, seed=seed))
        got = hopper_mla.of_batch(*args, rank=rank, scale=0.07)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert relative_error(got, want) < 4e-3


def logs_of(q, cache, lengths, table, rank):
    """The logarithms to base 2 of the sums of exponentials [batch, t, heads], in float64."""
    cache = cache if table is None else cache[table].reshape(q.shape[0], -1, rank + 64)
    cache, t, slots = np.where(np.isnan(cache), 0, cache).astype(float), q.shape[1], cache.shape[1]
    s = np.einsum("bthd,bsd->bths", q.astype(float), cache) * 0.07
    seen = np.arange(slots) <= (lengths[:, None] - t + np.arange(t))[:, :, None]
    with np.errstate(divide="ignore"):
        return np.log2(np.where(seen[:, :, None], np.exp(s), 0).sum(-1))


@pytest.mark.parametrize("name", CASES)
def test_logarithms_of_sums(name, monkeypatch):
    sizes, processors, page = CASES[name]
    args, rank = arguments(*sizes, page=page), sizes[4]
    monkeypatch.setattr(gpu_tiles, "processors", lambda: processors * jt.cdiv(sizes[1] * sizes[2], 64))
    monkeypatch.setattr(hopper_mla, "hopper_mla", hopper_mla.hopper_mla.interpret)
    o, logs = hopper_mla.of_batch(*args, rank=rank, scale=0.07, logs=True)
    assert relative_error(o, reference(*args, rank)) < 4e-3
    want = logs_of(*args, rank)
    np.testing.assert_allclose(np.where(want == -np.inf, -1e30, want), logs, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("page", [None, 64])
def test_batches_of_vmap_become_rows(page, monkeypatch):
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 3)
    q, cache, lengths, table = arguments(1, 1, 16, 128, 128, (100,), page=page)
    run = lambda q, cache, n: hopper_mla.mapped(128, 0.07)(q, cache, n, table)
    want = np.stack([reference(x, y, lengths, table, 128) for x, y in ((q, cache), (-q, -cache))])
    got = evaluated(jax.vmap(run, (0, 0, None)))(np.stack([q, -q]), np.stack([cache, -cache]), lengths)
    assert relative_error(got, want) < 4e-3
    got = evaluated(jax.vmap(run, (0, None, 0)))(np.stack([q, -q]), cache, np.stack([lengths, lengths]))
    assert relative_error(got, np.stack([reference(x, cache, lengths, table, 128) for x in (q, -q)])) < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize(("t", "page"), [(1, None), (2, None), (1, 64)])
def test_what_it_compiles_to(t, page):
    pytest.importorskip("triton")
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    cache = of("bfloat16", 8, 1024, 576) if page is None else of("bfloat16", 128, page, 576)
    table = None if page is None else of("int32", 8, 16)
    args = of("bfloat16", 8, t * 128, 576), cache, of("int32", 8), table
    options = {"parts": 66 // t, "units": Units(1024, 128), "heads": 128, "rank": 512, "scale": 0.1}
    found = hopper_mla.hopper_mla.lower(*args, **options, target="cuda:sm_90")
    assert spills_of_products(found.texts["sass"]) == []
    for what in ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG"):
        assert what in found.texts["sass"]


def test_the_op_without_the_gpu():
    """A machine without the GPU that the call was made for runs the kernel at tile level."""
    q, cache, lengths, _ = arguments(2, 1, 16, 192, 128, (192, 100))
    run = jax.jit(functools.partial(ops.mla_decode, rank=128, scale=0.07))
    with jt.config(arch="sm_90", interpret=False):
        assert "hopper_mla" in str(jax.make_jaxpr(run)(q, cache, lengths))
        got = run(q, cache, lengths)
    assert relative_error(got, reference(q, cache, lengths, None, 128)) < 4e-3
