"""Attention with dropout: which weights its bits drop, in all tiles and implementations alike, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import attention_gradients, dropouts
from jtile.ops.attention_backward import in_one_kernel
from jtile.ops.flash_attention import attention_reference, flash_attention
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

KEY = np.array([3, 7], np.uint32)


def operands(t=37, s=45, heads=4, kv=2, d=8, dtype="float32"):
    shapes = (2, t, heads, d), (2, s, kv, d), (2, s, kv, d)
    return tuple(np.asarray(normal(n, *shape, dtype=dtype)) for n, shape in enumerate(shapes))


def kept(batch, heads, t, s, dropout, key=KEY):
    """bool [batch, heads, t, s], from the definition alone."""
    seeds = np.asarray(dropouts.seeds(key, batch, heads)).astype(np.uint64)[:, :, None, None]
    i, j = np.arange(t, dtype=np.uint64)[:, None], np.arange(s, dtype=np.uint64)[None, :]
    word = np.uint64(0xFFFFFFFF)
    shape = (batch, heads, t, s)
    x = np.broadcast_to((i // 16 * 16 + i % 8 + seeds[..., 1]) & word, shape)
    y, k = np.broadcast_to(j // 16 * 16 + j % 8, shape), seeds[..., 0]
    for _ in range(7):
        product = x * np.uint64(0xD256D193)
        x, y = (product >> np.uint64(32)) ^ k ^ y, product & word
        k = (k + np.uint64(0x9E3779B9)) & word
    w = np.where(i // 8 % 2 == 0, x, y)
    w = np.where(j // 8 % 2 == 0, w, (w << np.uint64(16) | w >> np.uint64(16)) & word)
    return w >= round(dropout * 2**32)


def of_tiles(t, s, heads, bq, bk, dropout, key=KEY, transposed=False):
    """The same, in tiles, as kernels compute it."""
    seeds = dropouts.seeds(key, 1, heads)
    out = np.zeros((heads, t, s), bool)
    for h in range(heads):
        for i in range(0, t, bq):
            for j in range(0, s, bk):
                a, b = (1, 0) if transposed else (0, 1)
                sides = dropouts.places(i, bq, a), dropouts.places(j, bk, b)
                tile = np.asarray(dropouts.kept(tuple(seeds[0, h]), *sides, dropout))
                out[h, i : i + bq, j : j + bk] = (tile.T if transposed else tile)[: t - i, : s - j]
    return out


def test_bits_are_those_of_the_place():
    """In tiles of all sizes, and lying on either side; the seeds are those of `jax.random`'s generator."""
    want = kept(1, 2, 48, 48, 0.25)[0]
    for bq, bk, transposed in ((48, 48, False), (16, 48, True), (12, 24, False), (24, 32, True)):
        assert np.array_equal(of_tiles(48, 48, 2, bq, bk, 0.25, transposed=transposed), want), (bq, bk)
    counter = np.arange(1000, dtype=np.uint32)
    both = np.concatenate([counter, counter[::-1]])
    drawn = evaluated(lambda x, y: dropouts.threefry(KEY, x, y))(counter, counter[::-1].copy())
    assert np.array_equal(np.concatenate(drawn), threefry_2x32(KEY, both))


def test_known_words_of_philox():
    """The known answers of Random123 for Philox2x32 of 10 rounds, of which 7 are used here."""
    for counter, key, want in (
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ):
        of = lambda x, y, k: jnp.stack(dropouts.philox(k, x, y, rounds=10))
        assert tuple(evaluated(of)(*np.array([*counter, key], np.uint32))) == want


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_statistics(dropout):
    """4 million weights: how many are kept; pairs of them, near and far, in a row, a column, a cell, heads and keys."""
    found = kept(1, 4, 1024, 1024, dropout)[0].astype(np.float64) - (1 - dropout)
    one = np.sqrt(dropout * (1 - dropout) / found.size)  # the standard deviation of the mean
    assert abs(found.mean()) < 5 * one
    for axis, others in ((0, (1, 2)), (1, (0, 2)), (2, (0, 1))):
        means = found.mean(others)
        assert np.abs(means).max() < 6 * one * np.sqrt(found.shape[axis]), axis
    other = kept(1, 4, 1024, 1024, dropout, np.array([3, 8], np.uint32))[0] - (1 - dropout)
    limit = 5 * dropout * (1 - dropout) / np.sqrt(found.size / 2)
    assert abs((found * other).mean()) < limit
    for shift in ((0, 0, 1), (0, 1, 0), (0, 0, 8), (0, 8, 0), (0, 8, 8), (1, 0, 0), (0, 0, 16), (0, 16, 0), (2, 3, 5)):
        a, b = (found[tuple(slice(n, None) if k else slice(0, found.shape[x] - n) for x, n in enumerate(shift))]
                for k in (0, 1))  # fmt: skip
        assert abs((a * b).mean()) < limit, shift
    spectrum = np.abs(np.fft.rfft2(found[0])) ** 2 / found[0].size / (dropout * (1 - dropout))
    assert spectrum.max() < 25  # the largest of half a million exponential numbers is about 13


def test_values_and_gradients():
    of = lambda f: lambda q, k, v: f(q, k, v, causal=True, dropout=0.25, key=KEY)
    agree(of(ops.attention), of(attention_reference), *operands(), interpret=True)
    gradients_agree(of(ops.attention), of(attention_reference), *operands())


def test_what_the_reference_drops():
    """Values that are one-hot show the weights: those that the definition drops are zero, the others are larger."""
    t = s = 24
    q, k, _ = operands(t, s, 2, 2, s)
    v = np.broadcast_to(np.eye(s, dtype=np.float32)[None, :, None], (2, s, 2, s)).copy()
    whole, thinned = (np.asarray(evaluated(lambda q, k, v, d=d: ops.attention(q, k, v, dropout=d, key=KEY))(q, k, v))
                      for d in (0.0, 0.25))  # fmt: skip
    stays = np.moveaxis(kept(2, 2, t, s, 0.25), 1, 2)
    np.testing.assert_allclose(thinned, np.where(stays, whole / 0.75, 0), rtol=2e-5, atol=1e-7)
    assert 0.2 < 1 - stays.mean() < 0.3


@pytest.mark.parametrize("options", [{"window": 9, "softcap": 3.0}, {"lengths": (45, 20), "offsets": (8, 0)}])
def test_with_other_options(options):
    options = {n: np.array(x, np.int32) if isinstance(x, tuple) else x for n, x in options.items()}
    of = lambda f: lambda q, k, v: f(q, k, v, causal=True, dropout=0.4, key=jax.random.key(5), **options)
    gradients_agree(of(ops.attention), of(attention_reference), *operands())


def test_with_functions_for_scores_and_masks():
    near = lambda b, h, i, j, segments: segments[b, i] == segments[b, j]
    of = lambda f: (
        lambda q, k, v, slopes, segments: f(
            q, k, v, score=lambda s, b, h, i, j, slopes, _: s + slopes[h] * (j - i).astype(jnp.float32),
            mask=lambda b, h, i, j, _, segments: near(b, h, i, j, segments), extras=(slopes, segments),
            dropout=0.25, key=KEY,
        )
    )  # fmt: skip
    segments = np.sort(np.random.default_rng(0).integers(0, 3, (2, 37), np.int32), axis=1)
    args = *operands(37, 37), np.asarray(normal(4, 4)), segments
    agree(of(ops.attention), of(attention_reference), *args)
    gradients_agree(of(ops.attention), of(attention_reference), *args, of=4)


def test_tiles_of_all_implementations_agree():
    """Kernels at tile level for CPUs and GPUs, in other tiles forwards than backwards."""
    q, k, v = operands(40, 52, 2, 1)
    seeds, g = np.asarray(dropouts.seeds(KEY, 2, 2)), np.asarray(normal(9, *q.shape))
    options = {"scale": 0.3, "softcap": None, "window": (None, 0), "dropout": 0.3}
    of = lambda q, k, v: attention_reference(q, k, v, scale=0.3, causal=True, dropout=0.3, key=KEY)
    want, wanted = evaluated(of)(q, k, v), evaluated(lambda *x: jax.vjp(of, *x)[1](g))(q, k, v)
    with jt.config(interpret=True):
        for bq, bk in ((12, 16), (16, 32)):
            o, lse = flash_attention(q, k, v, None, None, seeds, bq=bq, bk=bk, save=True, **options)
            assert relative_error(o, want) < 2e-6
        for gradients in (in_one_kernel, attention_gradients.gradients):
            got = gradients(q, k, v, o, lse, g, None, None, None, seeds, **options)
            assert relative_error(got, wanted) < 5e-6


@pytest.mark.parametrize(("d", "causal"), [(64, True), (128, True), (128, False)])
def test_short_floats(d, causal):
    """In roles where there is Hopper: values and gradients, of more than one tile."""
    q, k, v = operands(300, 300, 4, 2, d, "bfloat16")
    wide = tuple(x.astype(np.float32) for x in (q, k, v))
    of = lambda f: lambda q, k, v: f(q, k, v, causal=causal, dropout=0.1, key=KEY)
    both = lambda f: lambda q, k, v: (of(f)(q, k, v), *jax.vjp(of(f), q, k, v)[1](q))
    want = evaluated(both(attention_reference))(*wide)
    for ours, exact in zip(evaluated(both(ops.attention))(q, k, v), want, strict=True):
        assert relative_error(ours, exact) < 8e-3


def test_forward_mode_and_second_derivatives():
    x, moved = operands(20, 20), operands(20, 20)[::-1]
    moved = moved[2], moved[1], moved[0][:, :, :2]
    of = lambda f: lambda q, k, v: f(q, k, v, causal=True, dropout=0.3, key=KEY)
    first = lambda f: lambda *x: jax.jvp(of(f), x, moved)[1]
    gradient = lambda f: jax.grad(lambda q, k, v: (of(f)(q, k, v) ** 2).sum(), (0, 1, 2))
    second = lambda f: lambda *x: jax.jvp(gradient(f), x, moved)[1]
    for what in (first, second):
        assert relative_error(evaluated(what(ops.attention))(*x), evaluated(what(attention_reference))(*x)) < 1e-5


def test_under_vmap_each_row_is_as_alone():
    q, k, v = (np.stack([x, x[::-1]]) for x in operands(20, 20))
    keys = jax.random.split(jax.random.key(1), 2)
    one = lambda key, q, k, v: ops.attention(q, k, v, causal=True, dropout=0.5, key=key)
    loss = lambda key, q, k, v: (one(key, q, k, v) ** 2).sum()
    for f in (one, jax.grad(loss, (1, 2, 3))):
        for spread, of in ((0, keys), (None, keys[0])):
            together = jax.jit(jax.vmap(f, (spread, 0, 0, 0)))(of, q, k, v)
            alone = [jax.jit(f)(of if spread is None else of[n], q[n], k[n], v[n]) for n in range(2)]
            assert relative_error(together, jax.tree.map(lambda *x: jnp.stack(x), *alone)) < 1e-6


def test_errors():
    for wrong, match in (({"dropout": 1.0}, "less than 1"), ({"dropout": 0.1}, "takes a key"),
                         ({"dropout": 0.1, "key": KEY[:1]}, "two words")):  # fmt: skip
        with pytest.raises(KernelValueError, match=match):
            ops.attention(*operands(), **wrong)
    for wrong in ({"dropout": "0.1"}, {"dropout": 0.1, "key": [3, 7]}):
        with pytest.raises(KernelTypeError, match=r"is a number|array of two words"):
            ops.attention(*operands(), **wrong)
    assert dropouts.limit(1 - 1e-12) == 2**32 - 1


def test_what_it_compiles_to():
    """One multiplication of 64 bits a round for four weights, in roles."""
    pytest.importorskip("triton")
    q = jax.ShapeDtypeStruct((2, 512, 4, 128), jnp.bfloat16)
    options = {"scale": 0.1, "softcap": None, "window": (None, 0), "bq": 128, "bk": 128}
    found = flash_attention.lower(
        q, q, q, None, None, jax.ShapeDtypeStruct((2, 4, 2), jnp.uint32), dropout=0.1, target="cuda:sm_90", **options
    )
    assert found.texts["schedule"].startswith("block level: 2 consumers")
    assert found.launch["resources"]["spills"] <= 32  # outside of loops
    calls = 64 * 128 // 128 // 4  # of the generator in a tile of one consumer, for each thread
    copies = 4  # of the loop's round: of two consumers, and in front of each of their loops
    assert calls * 6 * copies <= found.texts["sass"].count("IMAD.WIDE.U32") < calls * 6.5 * copies
