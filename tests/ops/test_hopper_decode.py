"""Decode attention at the block level: in the interpreter, roles interleaved by seeds, against the form with all
scores; what it is called from, without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal
from sass import spills_of_products

import jtile as jt
from jtile import ops
from jtile.ops import gpu_tiles, hopper_decode
from jtile.ops.hopper_shares import Units, by_the_last, combined
from jtile.ops.split_attention import decode_attention_reference
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

CASES = {  # batch, new tokens, heads, kv heads, slots, d, lengths; programs, slots of a page, softcap
    "rows in parts": ((3, 1, 6, 2, 300, 64, (300, 0, 129)), 5, None, None),
    "a program for each short row": ((2, 1, 4, 1, 200, 64, (200, 70)), 4, None, None),
    "several tokens, a cap, large pages": ((1, 3, 8, 2, 256, 64, (257,)), 3, 128, 3.0),
    "pages": ((2, 1, 4, 1, 192, 64, (130, 1)), 2, 64, None),
    "small pages": ((2, 1, 4, 1, 144, 64, (140, 17)), 3, 16, None),
    "long heads, programs without work": ((1, 1, 4, 1, 130, 256, (130,)), 4, None, None),
}


@pytest.fixture(autouse=True)
def interpreted():
    with jt.config(interpret=True):
        yield


def arguments(batch, t, heads, kvs, slots, d, lengths, page=None, dtype="bfloat16"):
    """q, k, v, lengths, table; what stands behind a length is NaN."""
    q, k, v = (
        normal(i, batch, n, h, d, dtype=dtype) for i, (n, h) in enumerate(((t, heads), (slots, kvs), (slots, kvs)))
    )
    lengths = np.array(lengths, np.int32)
    behind = np.arange(slots)[None, :, None, None] >= lengths[:, None, None, None]
    k, v = (np.where(behind, np.asarray(np.nan, x.dtype), x) for x in (k, v))
    if page is None:
        return np.asarray(q), k, v, lengths, None
    order = np.random.default_rng(0).permutation(batch * slots // page)
    pool = lambda x: x.reshape(-1, page, kvs, d)[np.argsort(order)]
    return np.asarray(q), pool(k), pool(v), lengths, order.reshape(batch, -1).astype(np.int32)


def reference(q, k, v, lengths, table, softcap=None):
    k, v = (np.where(np.isnan(x), 0, x).astype(x.dtype) for x in (k, v))
    run = lambda q, k, v: decode_attention_reference(q, k, v, lengths, pages=table, scale=0.1, softcap=softcap)
    return evaluated(run)(q, k, v)


@pytest.mark.parametrize(
    ("name", "last"), [*((name, True) for name in CASES), ("rows in parts", False), ("small pages", False)]
)
def test_in_the_interpreter(name, last, monkeypatch):
    sizes, programs, page, softcap = CASES[name]
    if not last:  # a second kernel puts the parts together
        monkeypatch.setattr(hopper_decode, "by_the_last", lambda *_: False)
    args, kernel = arguments(*sizes, page=page), hopper_decode.hopper_decode
    monkeypatch.setattr(gpu_tiles, "processors", lambda: programs)
    want = reference(*args, softcap)
    for seed in range(2 if page == 64 else 1):
        monkeypatch.setattr(hopper_decode, "hopper_decode", functools.partial(kernel.interpret, seed=seed))
        got = hopper_decode.of_batch(*args, scale=0.1, softcap=softcap)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert relative_error(got, want) < 4e-3


@pytest.mark.parametrize(("last", "overlap", "softcap"), [(True, False, None), (False, True, 2.0)])
def test_queries_as_columns(last, overlap, softcap, monkeypatch):
    """Where kernels overlap, one role asks for keys ahead, and changes nothing."""
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 4)
    monkeypatch.setattr(hopper_decode, "by_the_last", lambda *_: last)
    args = arguments(4, 1, 8, 2, 320, 64, (300, 33, 0, 16))
    kernel, asked = hopper_decode.hopper_decode, []
    interpreted = lambda *a, **options: asked.append(options) or kernel.interpret(*a, seed=1, **options)
    monkeypatch.setattr(hopper_decode, "hopper_decode", interpreted)
    with jt.config(overlap=overlap):
        got = hopper_decode.of_batch(*args, scale=0.1, softcap=softcap)
    assert relative_error(got, reference(*args, softcap)) < 4e-3
    assert asked[0]["turned"] and asked[0].get("hints", 0) == (3 if overlap else 0)


def test_whole_rows_depend_on_nothing_beside_them(monkeypatch):
    """Bit for bit: with other rows, and the same tokens one by one."""
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 2)
    monkeypatch.setattr(hopper_decode, "hopper_decode", hopper_decode.hopper_decode.interpret)
    q, k, v, lengths, table = arguments(2, 2, 4, 2, 192, 64, (130, 1), page=64)
    run = functools.partial(hopper_decode.of_batch, scale=0.1, softcap=None, whole=True)
    got = run(q, k, v, lengths, table)
    assert relative_error(got, reference(q, k, v, lengths, table)) < 4e-3
    alone = run(q[:1], k, v, lengths[:1], table[:1])
    np.testing.assert_array_equal(alone, got[:1])
    single = run(q.reshape(4, 1, 4, 64), k, v, *each_alone(lengths, table))
    np.testing.assert_array_equal(single.reshape(got.shape), got)


def each_alone(lengths, table, t=2):
    """The lengths and pages of each of the t newest tokens as a row of its own."""
    return (lengths[:, None] - np.arange(t)[::-1]).reshape(-1).astype(np.int32), np.repeat(table, t, axis=0)


@pytest.mark.parametrize("page", [64])
def test_batches_of_vmap_become_rows(page, monkeypatch):
    monkeypatch.setattr(gpu_tiles, "processors", lambda: 3)
    q, k, v, lengths, table = arguments(1, 1, 4, 2, 128, 64, (100,), page=page)
    run = lambda q, k, v, n: hopper_decode.mapped(0.1, None)(q, k, v, n, table)
    both = lambda x: np.stack([x, -x])
    want = np.stack([reference(x, y, v, lengths, table) for x, y in ((q, k), (-q, -k))])
    got = evaluated(jax.vmap(run, (0, 0, None, None)))(both(q), both(k), v, lengths)
    assert relative_error(got, want) < 4e-3
    want = np.stack([reference(x, k, v, lengths, table) for x in (q, -q)])
    got = evaluated(jax.vmap(run, (0, None, None, 0)))(both(q), k, v, np.stack([lengths] * 2))
    assert relative_error(got, want) < 4e-3


def test_rows_of_one_unit_are_whole():
    whole = jnp.ones((4, 2, 64))
    assert combined(whole, jnp.ones((4, 2, 64)), jnp.ones((4, 2)), jnp.array([60, 7]), Units(60, 128, 2)) is whole


def test_who_puts_parts_together():
    """The last program, where it is few bytes: 17 parts of 4 queries, not of 64."""
    assert by_the_last(8, 4, 128, 132) and by_the_last(32, 8, 128, 132) and by_the_last(128, 16, 256, 132)
    assert not by_the_last(8, 64, 128, 132)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("page", [None, 16, 32, 64])
def test_on_the_gpu(page, last, monkeypatch):
    monkeypatch.setattr(hopper_decode, "by_the_last", lambda *_: last)
    args = arguments(3, 2, 8, 2, 640, 128, (640, 77, 333), page=page)
    with jt.config(interpret=False):
        run = jax.jit(functools.partial(hopper_decode.of_batch, scale=0.1, softcap=None))
        got = run(*args)
        assert all(np.array_equal(run(*args), got) for _ in range(5))
    assert relative_error(got, reference(*args)) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_queries_as_columns_on_the_gpu(overlap):
    lengths = [int(n) for n in np.random.default_rng(0).integers(0, 640, 40)]
    args = arguments(40, 1, 32, 8, 640, 128, lengths)
    with jt.config(interpret=False, overlap=overlap):
        run = jax.jit(functools.partial(hopper_decode.of_batch, scale=0.1, softcap=None))
        got = run(*args)
        assert all(np.array_equal(run(*args), got) for _ in range(5))
    assert relative_error(got, reference(*args)) < 4e-3


def test_the_op_without_the_gpu():
    """A machine without the GPU that the call was made for runs the kernel at tile level."""
    q, k, v, lengths, table = arguments(2, 1, 4, 2, 128, 64, (128, 100), page=64)
    run = jax.jit(functools.partial(ops.decode_attention, pages=table, scale=0.1))
    with jt.config(arch="sm_90", interpret=False):
        assert "hopper_decode" in str(jax.make_jaxpr(run)(q, k, v, lengths))
        got = run(q, k, v, lengths)
    assert relative_error(got, reference(q, k, v, lengths, table)) < 4e-3


@pytest.mark.parametrize("name", ["rows in parts", "a program for each short row"])
def test_lengths_and_older_keys_are_read_early(name, monkeypatch):
    """Where kernels overlap, unless the kernel in front may make the lengths; results are the same."""
    sizes, programs, _, _ = CASES[name]
    args, kernel, asked = arguments(*sizes), hopper_decode.hopper_decode, []
    monkeypatch.setattr(gpu_tiles, "processors", lambda: programs)

    def interpreted(*operands, **options):
        asked.append(options.get("early"))
        return kernel.interpret(*operands, seed=len(asked), **options)

    monkeypatch.setattr(hopper_decode, "hopper_decode", interpreted)
    run = functools.partial(hopper_decode.of_batch, *args, scale=0.1, softcap=None)
    with jt.config(overlap=True):
        early = run()
        with gpu_tiles.holding():
            late = run()
    assert asked == [True, False]
    assert np.array_equal(early, late) and relative_error(early, reference(*args)) < 4e-3


def test_programs_over_small_caches_start_early(monkeypatch):
    """Where nothing else is promised of kernels in front; the roles wait for these."""
    args, kernel, asked = arguments(*CASES["rows in parts"][0]), hopper_decode.hopper_decode, []

    def interpreted(*operands, **options):
        asked.append((options.get("begun", False), options.get("early", False)))
        return kernel.interpret(*operands, seed=len(asked), **options)

    monkeypatch.setattr(hopper_decode, "hopper_decode", interpreted)
    run = functools.partial(hopper_decode.of_batch, *args, scale=0.1, softcap=None)
    soon = run()
    with jt.config(overlap=True):
        run()
    monkeypatch.setattr(hopper_decode, "_SOON", 1 << 10)
    later = run()
    assert asked == [(True, False), (False, True), (False, False)]
    assert np.array_equal(soon, later) and relative_error(soon, reference(*args)) < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "page", "turned"),
    [(128, None, False), (128, None, True), (256, None, False), (128, 64, False), (128, 64, True)],
)
def test_what_it_compiles_to(d, page, turned):
    pytest.importorskip("triton")
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    cache = of("bfloat16", 8, 1024, 2, d) if page is None else of("bfloat16", 128, page, 2, d)
    table = None if page is None else of("int32", 8, 16)
    args = of("bfloat16", 16, 4, d), cache, cache, of("int32", 8), table
    units = Units(1024, 128 if d < 256 and page is None else 64, 2)
    options = {"parts": 132, "units": units, "t": 1, "scale": 0.1, "softcap": None, "last": True}
    options |= {"ahead": 1 if d == 256 else 2, "turned": turned}
    options |= {"hints": 3, "early": True} if turned else {}
    found = hopper_decode.hopper_decode.lower(*args, **options, target="cuda:sm_90")
    assert not spills_of_products(found.texts["sass"])
    for what in ("HGMMA", "UTMALDG", "SYNCS", "USETMAXREG", "ATOMG", "CCTL.IVALL"):
        assert what in found.texts["sass"]
