"""Attention and mixtures that devices share: the checks of context_checks.py on eight host devices, in one child
process; and their kernels in the interpreter, which finds races and deadlocks."""

from pathlib import Path

import devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile.ops import collective_decode as decode
from jtile.ops import collective_experts as moe
from jtile.ops import ring_attention as ring

CHECKS = Path(__file__).with_name("context_checks.py")
RNG = np.random.default_rng(0)


@pytest.mark.long
@pytest.mark.parametrize("name", devices.names(CHECKS))
def test_on_devices(name, tmp_path_factory):
    failed = devices.outcome(CHECKS, name, tmp_path_factory)
    assert not failed, failed


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def test_the_ring_in_the_interpreter():
    """Three devices, so that buffers are used again; causal, in zigzag order, two heads of queries and one of keys."""
    q, g, k, v = floats(3, 1, 2, 1, 2, 2), floats(3, 1, 2, 1, 2, 2), floats(3, 1, 2, 1, 1, 2), floats(3, 1, 2, 1, 1, 2)
    options = dict(axis="x", bq=1, bk=1, programs=2, scale=1.0, softcap=None, window=(None, 0), mesh={"x": 3}, seed=1)
    o, lse, *_ = ring.ring_forward.interpret(q, k, v, **options)
    delta = (o * g).sum(-1).transpose(0, 1, 4, 2, 3)
    got = ring.ring_backward.interpret(q, k, v, g, lse, delta, **options)
    places = np.array([[r, 5 - r] for r in range(3)])
    flat = lambda x: x.reshape(6, -1, 2).astype(np.float64)
    Q, G, K, V = map(flat, (q, g, k, v))
    s = np.einsum("thd,sd->hts", Q, K[:, 0])
    p = np.exp(np.where(places.reshape(-1, 1) >= places.reshape(1, -1), s, -np.inf))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("thd,sd->hts", G, V[:, 0])
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    want = np.einsum("hts,sd->thd", ds, K[:, 0]), np.einsum("hts,thd->sd", ds, Q), np.einsum("hts,thd->sd", p, G)
    np.testing.assert_allclose(flat(o), np.einsum("hts,sd->thd", p, V[:, 0]), rtol=1e-5, atol=1e-6)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x.reshape(y.shape), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("merge", [decode.merge_parts, decode.merge_shares], ids=lambda k: k.name)
@pytest.mark.parametrize("heads", [1, 2])
def test_parts_of_a_softmax_in_the_interpreter(merge, heads):
    """Of three devices, two splits each; a device with no keys."""
    acc, l = floats(3, 2, 2, 2, 1, 2, 4), np.abs(floats(3, 2, 2, 2, 1, 2))
    m = floats(*l.shape)
    acc[1], l[1], m[1] = 0, 0, -1e30
    got = merge.interpret(acc, m, l, axis="x", dtype="float32", heads=heads, programs=2, mesh={"x": 3}, seed=1)
    w = np.exp2(m)[..., 0, :]
    want = (w[..., None] * acc[..., 0, :, :]).sum((0, 3)) / (w * l[..., 0, :]).sum((0, 3))[..., None]
    np.testing.assert_allclose(got, np.broadcast_to(want.reshape(2, 4, 4), got.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("merge", [decode.merge_parts, decode.merge_shares], ids=lambda k: k.name)
def test_parts_of_large_caches_compile_for_hopper(merge):
    """128 heads of 512 features asked for more shared memory than there is."""
    pytest.importorskip("triton")
    shape = (64, 1, 4, 1, 128, 512)
    acc, m = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:5], jnp.float32)
    heads = decode.divisor(shape[4], decode.PIECE // shape[5])
    options = dict(axis="x", dtype="bfloat16", heads=heads, programs=128, mesh={"x": 4})
    found = merge.lower(acc, m, m, **options, target="cuda:sm_90")
    assert found.launch["resources"]["spills"] == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_to_experts_and_back_in_the_interpreter(rows):
    """Three devices with two experts each; what comes back is what was sent, in its place."""
    counts = np.array([[[1, 0], [0, 2], [1, 0]], [[0, 0], [2, 1], [0, 1]], [[0, 1], [0, 0], [1, 1]]], np.int32)
    x = floats(3, 5, 2)
    options = dict(axis="x", bound=4, sent=5, programs=2, rows=rows, bn=2 // rows, mesh={"x": 3}, seed=1)
    there, received = moe.send_rows.interpret(x, counts, **options)
    np.testing.assert_array_equal(received, counts.swapaxes(0, 1))
    want = [[x[0, 0], x[2, 0]], [x[1, 0], x[1, 1], x[0, 1], x[0, 2], x[1, 2]], [x[0, 3], x[2, 1], x[1, 3], x[2, 2]]]
    np.testing.assert_array_equal(there, [np.pad(w, ((0, 12 - len(w)), (0, 0))) for w in want])
    back = moe.return_rows.interpret(there, counts, received, **options)
    sent = counts.sum((1, 2))
    np.testing.assert_array_equal(back, np.where(np.arange(5)[None, :, None] < sent[:, None, None], x, 0))
    place, weights = np.array([[[0, -1], [3, 1]], [[2, 0], [-1, -1]], [[1, 0], [2, 2]]], np.int32), floats(3, 2, 2)
    sums = moe.return_sums.interpret(there, counts, received, place, weights, **options)
    taken = np.where(place[..., None] < 0, 0, back[np.arange(3)[:, None, None], place])
    np.testing.assert_allclose(sums, (taken * weights[..., None]).sum(2), rtol=1e-6)
