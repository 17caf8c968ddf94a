"""Dtypes that few programs have, in whole kernels: interpreter, native code of the CPU and TTIR agree with NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ttir import run_ttir

import jtile as jt
from jtile.testing.evaluate import evaluated

FLOATS = ["float8_e4m3", "float8_e3m4", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"]


def _values(dtype: str) -> np.ndarray:
    """Every code once, in an order that is neither that of the codes nor of the values."""
    codes = np.random.default_rng(3).permutation(256).astype(np.uint8)
    return codes.view(jnp.dtype(dtype)).reshape(16, 16)


def _same(got, want) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def _everywhere(kernel, *args, want=None):
    """The results of a kernel, which are the same in native code, in the interpreter and in TTIR for two vendors."""
    got = jax.tree.leaves(kernel(*args))
    for x, y in zip(jax.tree.leaves(kernel.interpret(*args)), got, strict=True):
        _same(y, x)
    for target, arch in (("cuda:sm_90", "sm_90"), ("rocm:gfx942", "gfx942")):
        for x, y in zip(run_ttir(kernel.lower(*args, target=target).kernel, list(args), arch), got, strict=True):
            _same(x, y)
    for x, y in zip(got, [] if want is None else want, strict=want is not None):
        _same(x, y)
    return got


def _elementwise(x, y, plus, times, low, high, other, sign, next_, down, less, whole):
    a, b = x[...], y[...]
    plus[...], times[...] = a + b, a * b
    low[...], high[...] = jnp.minimum(a, b), jnp.maximum(a, b)
    other[...], sign[...] = -a, jnp.sign(a)
    next_[...], down[...] = jnp.nextafter(a, b), jnp.floor(a)
    less[...], whole[...] = a < b, a.astype(jnp.int32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_arithmetic(dtype):
    x, y = _values(dtype), _values(dtype)[::-1].copy()
    kinds = [dtype] * 8 + ["bool", "int32"]
    k = jt.call(_elementwise, out_type=tuple(jax.ShapeDtypeStruct(x.shape, jnp.dtype(d)) for d in kinds), grid=1)
    f, g = x.astype(np.float32), y.astype(np.float32)
    with np.errstate(all="ignore"):
        want = [f + g, f * g, np.minimum(f, g), np.maximum(f, g), -f, np.sign(f)]
        want = [w.astype(x.dtype) for w in want] + [np.nextafter(x, y), np.floor(f).astype(x.dtype), f < g]
    got = _everywhere(k, x, y)
    for a, b in zip(got, want, strict=False):
        _same(a, b)


def _rows(x, total, most, place, sorted_, sums, turned, halves):
    a = x[...]
    total[...], most[...], place[...] = a.sum(1), a.max(1), jnp.argmax(a, 1).astype(jnp.int32)
    sorted_[...], sums[...] = jnp.sort(a, 1), jnp.cumsum(a, 1)
    turned[...], halves[...] = a.T, x.tiles(12, 12, pad=1)[1, 1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows(dtype):
    """Sums of a few small numbers are exact in any order."""
    x = (np.random.default_rng(1).integers(-2, 3, (16, 16)) / 4).astype(jnp.dtype(dtype))
    d = x.dtype
    outs = ((16,), d), ((16,), d), ((16,), np.int32), ((16, 16), d), ((16, 16), d), ((16, 16), d), ((12, 12), d)
    k = jt.call(_rows, out_type=tuple(jax.ShapeDtypeStruct(*o) for o in outs), grid=1)
    total, most, place, in_order, _, turned, halves = _everywhere(k, x)
    f = x.astype(np.float32)
    _same(total, f.sum(1).astype(d))
    _same(most, f.max(1).astype(d))
    _same(place, f.argmax(1).astype(np.int32))
    _same(in_order, np.sort(f, 1).astype(d))
    _same(turned, x.T)
    _same(halves, np.pad(x[12:, 12:], ((0, 8), (0, 8)), constant_values=np.asarray(1, d)))
    codes = _values(dtype)
    sort = jt.call(
        lambda x, o: o.__setitem__(..., jnp.sort(x[...], 1)), out_type=jax.ShapeDtypeStruct((16, 16), d), grid=1
    )
    _same(*_everywhere(sort, codes), np.sort(codes.astype(np.float32), 1).astype(d))


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_and_atomics(dtype):
    """A product of two of them, and of one with bfloat16; sums by several programs; every element once by gathers."""
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-3, 4, (16, 32)).astype(jnp.dtype(dtype)) for _ in range(2))
    w = rng.integers(-3, 4, (32, 16)).astype(jnp.bfloat16)

    def body(a, b, w, both, one, sums):
        both[...], one[...] = jt.dot(a[...], b[...].T), jt.dot(a[...], w[...])
        jt.atomic_add(sums, jnp.arange(16), a[...][:, 0])
        jt.atomic_max(sums, jnp.arange(16), b[...][:, 0])

    out = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    k = jt.call(body, out_type=(out, out, jax.ShapeDtypeStruct((16,), a.dtype)), grid=1, init=(None, None, 0))
    both, one, sums = _everywhere(k, a, b, w)
    f, g, h = (x.astype(np.float32) for x in (a, b, w))
    _same(both, f @ g.T)
    _same(one, f @ h)
    _same(sums, np.maximum(f[:, 0], g[:, 0]).astype(a.dtype))
    target = {"float8_e4m3": "cuda:sm_90", "float8_e4m3fnuz": "rocm:gfx942"}.get(dtype)
    assert target is None or k.lower(a, b, w, target=target).image


def test_transforms():
    """Gradients with respect to what is read as such a float, and `vmap`."""
    k = jt.call(
        lambda x, w, o: o.__setitem__(..., x[...].astype(jnp.float32) * w[...]),
        out_type=lambda x, w: jt.like(w),
        grid=1,
    )
    x, w = _values("float8_e4m3fnuz")[:2, :8], np.arange(16, dtype=np.float32).reshape(2, 8)
    x = np.where(np.isnan(x.astype(np.float32)), np.asarray(1, x.dtype), x)
    want = x.astype(np.float32) * w
    _same(evaluated(jax.vmap(k))(x[:, None], w[:, None])[:, 0], want)
    dx, dw = evaluated(jax.grad(lambda x, w: k(x, w).sum(), (0, 1)))(x, w)
    _same(dx, w.astype(x.dtype))
    _same(dw, x.astype(np.float32))


def test_prints_look_like_numpy(capfd):
    def body(*refs):
        for x in refs:
            jt.print("{}", x[...])

    refs = [np.array([[0.25, -3, np.nan, 1.75]], jnp.dtype(d)) for d in FLOATS]
    k = jt.call(body, out_type=(), grid=1)
    jax.block_until_ready(k(*refs))
    native = capfd.readouterr().out
    k.interpret(*refs)
    assert native == capfd.readouterr().out
    assert "[[0.25 -3 nan 1.75]]" in native


PAIRS = ["int2", "uint2"]


def _all_pairs(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of values, 16 of them."""
    low = -2 if dtype == "int2" else 0
    x, y = np.meshgrid(np.arange(low, low + 4), np.arange(low, low + 4))
    return x.reshape(2, 8).astype(jnp.dtype(dtype)), y.reshape(2, 8).astype(jnp.dtype(dtype))


def _two_bits(x, y, plus, times, quotient, rest, high, negative, wide, half, ones, zeros, left, right, less):
    a, b = x[...], y[...]
    plus[...], times[...], negative[...] = a + b, a * b, -a
    quotient[...], rest[...], high[...] = jax.lax.div(a, b), jax.lax.rem(a, b), jnp.maximum(a, b)
    wide[...], half[...] = a.astype(jnp.int32), a.astype(jnp.bfloat16)
    ones[...], zeros[...] = jax.lax.population_count(a), jax.lax.clz(a)
    left[...], right[...] = jax.lax.shift_left(a, b), jax.lax.shift_right_logical(a, b)
    less[...] = a < b


@pytest.mark.parametrize("dtype", PAIRS)
def test_integers_of_two_bits(dtype):
    x, y = _all_pairs(dtype)
    kinds = [dtype] * 6 + ["int32", "bfloat16"] + [dtype] * 4 + ["bool"]
    outs = tuple(jax.ShapeDtypeStruct(x.shape, jnp.dtype(d)) for d in kinds)
    plus, times, quotient, _, high, negative, wide, half, ones, zeros, _, _, less = _everywhere(
        jt.call(_two_bits, out_type=outs, grid=1), x, y
    )
    a, b = x.astype(np.int64), y.astype(np.int64)
    wrapped = lambda v: (((v - a.min()) & 3) + a.min()).astype(x.dtype)
    _same(plus, wrapped(a + b))
    _same(times, wrapped(a * b))
    _same(negative, wrapped(-a))
    _same(quotient, np.where(b == 0, wrapped(np.full_like(a, -1)), wrapped((a / np.where(b == 0, 1, b)).astype(int))))
    _same(high, np.maximum(a, b).astype(x.dtype))
    _same(wide, a.astype(np.int32))
    _same(half, a.astype(jnp.bfloat16))
    bits = a & 3
    _same(ones, wrapped((bits & 1) + (bits >> 1)))
    _same(zeros, wrapped(np.array([2, 1, 0, 0])[bits]))
    _same(less, a < b)


@pytest.mark.parametrize("dtype", PAIRS)
def test_arrays_of_two_bits(dtype):
    """Four elements share a byte: tiles that hang over, rows that start inside a byte, scatters and atomics of
    neighbours by several programs, slices of a batch, and products."""
    rng = np.random.default_rng(5)
    low = -2 if dtype == "int2" else 0
    x = rng.integers(low, low + 4, (5, 7)).astype(jnp.dtype(dtype))
    at = rng.permutation(35).reshape(5, 7).astype(np.int32)

    def body(x, at, copy, put, most, product):
        i = jt.program_id(0)
        row = x[i, :]
        copy.tiles(None, 4)[i, 0], copy.tiles(None, 4)[i, 1] = x.tiles(None, 4)[i, 0], x.tiles(None, 4, pad=1)[i, 1]
        put[at[i, :]] = row
        jt.atomic_max(most, jnp.arange(7), row)
        product[i, :] = jt.dot(row[None, :], x[...].T)[0]

    like = lambda shape, d=x.dtype: jax.ShapeDtypeStruct(shape, d)
    outs = like((5, 7)), like((35,)), like((7,)), like((5, 5), jnp.int32)
    k = jt.call(body, out_type=outs, grid=5, init=(None, None, low, None))
    copy, put, most, product = _everywhere(k, x, at)
    _same(copy, x)
    _same(put[at], x)
    f = x.astype(np.int32)
    _same(most, f.max(0).astype(x.dtype))
    _same(product, f @ f.T)
    batch = np.stack([x, x[::-1]])
    _same(evaluated(jax.vmap(k, (0, None)))(batch, at)[0], batch)
    part = jt.call(lambda x, o: o.__setitem__(..., x[...]), out_type=lambda x: jt.like(x), grid=1)
    _same(jax.jit(lambda x: part(x[1:, 1:]))(jnp.asarray(x)), x[1:, 1:])
    assert k.lower(x, at, target={"int2": "cuda:sm_90", "uint2": "rocm:gfx942"}[dtype]).image
