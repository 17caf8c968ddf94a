"""Caches of 8 bits whose keys and values become float16: nothing is lost that bfloat16 keeps, whatever the range."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from library import normal

import jtile as jt
from jtile.ops import halves, narrow_caches, split_attention
from jtile.ops.split_attention import as_halves, decode_attention_reference, decode_splits
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated

OPTIONS = {"bk": 32, "scale": 0.1, "softcap": None, "window": None}
LENGTHS = np.array([70, 1, 130, 64], np.int32)


def arguments(of_q: float, of_v: float, kvs: int = 2, d: int = 64):
    """q, k, v, lengths, table and scales of rows of up to 130 keys. Queries and values are so large, and keys so small
    that scores are of the order of 1."""
    pages = 4 * 3
    q = (of_q * normal(0, 4, 1, 4 * kvs, d)).astype(jnp.bfloat16)
    k, v = (np.asarray(normal(seed, pages, 64, kvs, d), np.float32) for seed in (1, 2))
    units = [np.abs(x).max(-1) / 448.0 for x in (k, v)]
    k, v = ((x / unit[..., None]).astype(jnp.float8_e4m3fn) for x, unit in zip((k, v), units, strict=True))
    scales = [(unit * of).swapaxes(1, 2).astype(np.float32) for unit, of in zip(units, (1 / of_q, of_v), strict=True)]
    table = np.arange(pages, dtype=np.int32).reshape(4, 3)[:, ::-1].copy()
    return q, k, v, LENGTHS, table, *scales


def with_others(q, k, v, lengths, table, *scales):
    """The same, but the scales of keys that no row has are infinite."""
    found = [np.array(unit) for unit in scales]
    for row, length in zip(table, lengths, strict=True):
        for page, number in enumerate(row):
            for unit in found:
                unit[number, :, max(int(length) - 64 * page, 0) :] = np.inf
    return q, k, v, lengths, table, *found


def reference(*args):
    run = lambda *args: decode_attention_reference(*args[:4], pages=args[4], scales=args[5:], scale=0.1)
    return evaluated(run)(*args)


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12])
@pytest.mark.parametrize("splits", [1, 2])
def test_sums_of_float16(size, splits):
    args = arguments(size, 1 / size)
    options = OPTIONS | {"splits": splits, "stages": 3}

    def run(half, q, k, v, lengths, table, *scales):
        y = decode_splits(q, k, v, lengths, table, scales, half=half, **options)
        return y if splits == 1 else split_attention.combined(*y, dtype=q.dtype.name)

    want = evaluated(lambda *args: decode_attention_reference(*args[:4], pages=args[4], scales=args[5:], scale=0.1))(
        *args
    )
    errors = [relative_error(evaluated(functools.partial(run, half))(*args), want) for half in (False, True)]
    assert errors[1] < 4e-3 and errors[1] < 1.1 * errors[0]  # weights have three digits more


def test_values_of_every_size_in_one_row():
    """The keys of one row have values of very different sizes, the smallest ones first or last; what a token gets is
    right whichever have its weight."""
    q, k, v, lengths, table, of_k, of_v = arguments(1.0, 1.0)
    for row, sizes in enumerate(((1e-3, 1.0, 1e3), (1e3, 1.0, 1e-3), (1.0, 1e-3, 1e3), (1.0, 1.0, 1.0))):
        for page, size in zip(table[row], sizes, strict=True):
            of_v[page] *= np.float32(size)
            of_k[page] /= np.float32(size)
    args = q, k, v, np.full_like(lengths, 192), table, of_k, of_v
    run = lambda half, *args: decode_splits(*args[:5], args[5:], half=half, splits=1, **OPTIONS)
    as_bfloat16, as_float16 = (evaluated(functools.partial(run, half))(*args) for half in (False, True))
    for found, want in zip(as_float16, as_bfloat16, strict=True):
        assert relative_error(found, want) < 6e-3


def test_powers_of_two():
    @jt.kernel(out_type=lambda x: (jt.like(x), jt.like(x)), grid=lambda x: x.shape)
    def powers(x, y, z):
        i = jt.program_id(0)
        y[i] = halves.power(x[i])
        z[i] = halves.inverse(halves.power(x[i]))

    x = np.array([0.0, 1e-38, 0.75, 1.0, 1.99, 2.0, 3e5, 3e38], np.float32)
    y, z = map(np.asarray, evaluated(powers)(x))
    assert y.tolist() == [2.0**-100, 2.0**-100, 0.5, 1.0, 1.0, 2.0, 2.0**18, 2.0**100]
    assert (y * z).tolist() == [1.0] * len(x)


def test_when_numbers_become_float16():
    of = lambda dtype: jax.ShapeDtypeStruct((4, 1, 8, 64), dtype)
    q, k = of(jnp.bfloat16), of(jnp.float8_e4m3fn)
    with jt.config(arch="sm_90"):
        assert as_halves(q, k)
        assert (
            not as_halves(q, of(jnp.int8)) and not as_halves(of(jnp.float16), k) and not as_halves(of(jnp.float32), k)
        )
    with jt.config(arch="sm_80"):  # without instructions that make two of e4m3
        assert not as_halves(q, k)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12])
def test_on_the_gpu(size):
    q, k, v, lengths, table, *scales = arguments(size, 1 / size, kvs=8, d=128)
    run = functools.partial(narrow_caches.attention, scale=0.1, softcap=None, window=None)
    with jt.config(interpret=False):
        got = jax.jit(run)(q, k, v, lengths, table, tuple(scales))
        assert np.array_equal(got, jax.jit(run)(q, k, v, lengths, table, tuple(scales)))
    assert relative_error(got, reference(q, k, v, lengths, table, *scales)) < 4e-3
