"""Tiles whose last axis is a pair: both elements are moved side by side, also in memory that is changed meanwhile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt

RNG = np.random.default_rng(2)


@jt.kernel(
    out_type=lambda x: [jt.like(x), jt.like(x), jt.like(x, (x.shape[0],))], grid=lambda x: jt.cdiv(x.shape[0], 16)
)
def turned(x, swapped, twice, second):
    i = jt.program_id(0)
    t = x.tiles(16, 2)[i, 0]
    swapped.tiles(16, 2)[i, 0] = jnp.stack([t[:, 1], t[:, 0]], -1)
    rows = jnp.concatenate([t[:, 1:], t[:, 1:]], -1)[::-1]
    twice.tiles(16, 2)[i, 0] = rows[::-1]
    second.tiles(16)[i] = t[:, 1]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int16", "int8", "bool"])
def test_pairs_of_every_width(dtype):
    with jax.enable_x64(True):
        for n in (1, 3, 16, 39):
            x = (RNG.standard_normal((n, 2)) * 20).astype(jnp.dtype(dtype))
            for got, want in zip(turned(x), [x[:, ::-1], x[:, [1, 1]], x[:, 1]], strict=True):
                np.testing.assert_array_equal(got, want)


def products(x, o, *, parts):
    i = jt.program_id(0)
    t = x.tiles(16)[i]
    o.tiles(16, parts)[i, 0] = jnp.stack([t * t if k % 2 else t + k for k in range(parts)], -1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int16"])
@pytest.mark.parametrize("isa", ["sse2", None])
def test_many_parts_side_by_side(dtype, isa):
    kernel = jt.kernel(
        out_type=lambda x, parts: jt.like(x, (*x.shape, parts)), grid=lambda x, **_: jt.cdiv(x.shape[0], 16)
    )(products)
    with jax.enable_x64(True), jt.config(isa=isa):
        for n, parts in ((5, 3), (39, 4), (16, 8)):
            x = (RNG.standard_normal(n) * 8).astype(jnp.dtype(dtype))
            want = np.stack([x * x if k % 2 else x + x.dtype.type(k) for k in range(parts)], -1)
            np.testing.assert_array_equal(kernel(x, parts=parts), want)


def test_parts_are_not_scattered():
    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    body = lambda x, o: products(x, o, parts=8)
    code = jt.call(body, out_type=jax.ShapeDtypeStruct((64, 8), jnp.float32), grid=4).lower(x).texts["llvm"]
    assert "shufflevector" in code
    assert "masked" not in code


def test_nothing_is_gathered():
    def body(a, b, o):
        i = jt.program_id(0)
        o.tiles(64)[i] = a.tiles(64)[i] * b.tiles(64)[i]

    types = [jax.ShapeDtypeStruct((256,), jnp.complex64)] * 2
    code = jt.call(body, out_type=types[0], grid=4).lower(*types).texts["llvm"]
    assert "shufflevector" in code
    assert "masked" not in code


def test_memory_that_is_read_and_written():
    alias = dict(out_type=lambda x: jt.like(x), alias={"x": "o"})

    @jt.kernel(**alias)
    def backwards(x, o):
        t = o[...]
        o[...] = jnp.stack([t[::-1, 1], t[:, 0]], -1)

    @jt.kernel(**alias)
    def shifted(x, o):
        t = x[...]
        o[1:] = jnp.stack([t[:-1, 1], t[:-1, 0]], -1)

    @jt.kernel(out_type=lambda x: [jt.like(x)] * 2, scratch=lambda x: jt.like(x))
    def sums(x, o, p, s):
        s[...] = jnp.zeros_like(x[...])
        for _ in jt.range(3):
            t, u = s[...], x[...]
            s[...] = jnp.stack([jnp.sin(t[..., 1]) + u[..., 0], t[..., 0] * t[..., 1] - u[..., 1]], -1)
        o[...] = s[...]
        t = s[...]
        s[...] = jnp.stack([t[..., 1], t[..., 0]], -1)
        p[...] = jnp.stack([s[..., 0], t[..., 0]], -1)

    for n in (1, 5, 16, 37):
        x = RNG.standard_normal((n, 2)).astype(np.float32)
        np.testing.assert_array_equal(backwards(x), np.stack([x[::-1, 1], x[:, 0]], -1))
        np.testing.assert_array_equal(shifted(x), np.concatenate([x[:1], x[:-1, ::-1]]))
    for shape in ((3, 5, 2), (4, 33, 2), (2,)):
        x = RNG.standard_normal(shape).astype(np.float32)
        for got, want in zip(sums(x), sums.interpret(x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@jt.kernel(out_type=lambda x, *, columns: jt.like(x, (x.shape[0], columns)), grid=lambda x, **_: jt.cdiv(x.shape[0], 4))
def rows_of_parts(x, o, *, columns, parts=2):
    i, n = jt.program_id(0), x.shape[1]
    t = x.tiles(4, n)[i, 0]
    shared = t * t
    made = jnp.stack([shared + t * k for k in range(parts)], -1).reshape(4, n * parts)
    o.tiles(4, n * parts)[i, 0] = made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16"])
@pytest.mark.parametrize("isa", ["sse2", None])
def test_rows_of_parts_are_stored_as_they_are_made(dtype, isa):
    """Rows that hang over the edge, in the middle of the parts of one place, too."""
    with jt.config(isa=isa):
        for n, parts, columns in ((40, 2, 80), (40, 2, 77), (24, 4, 96), (24, 4, 93), (5, 2, 9), (3, 4, 5)):
            x = RNG.integers(-4, 5, (10, n)).astype(jnp.dtype(dtype))
            want = np.stack([x * x + x * x.dtype.type(k) for k in range(parts)], -1).reshape(10, -1)[:, :columns]
            np.testing.assert_array_equal(rows_of_parts(x, columns=columns, parts=parts), want)


def test_rows_of_parts_need_no_memory_of_their_own():
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    for columns in (64, 63):
        lowered = rows_of_parts.lower(x, columns=columns, target="cpu")
        assert "getelementptr i8, ptr %ws" not in lowered.texts["llvm"]
        assert "scatter" not in lowered.texts["llvm"]


def of_one_row(x, n, o):
    at, o[:, :] = n[0], jnp.zeros(o.shape, o.dtype)
    o[at, :] = jnp.concatenate([x[0:1], x[1:2] + 1])


def over_the_edge(x, n, o):
    at, o[:, :] = n[0], jnp.zeros(o.shape, o.dtype)
    o[:, jt.ds(at, 2)] = jnp.stack([x[:], x[:] + 1], -1)


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("body", [of_one_row, over_the_edge])
def test_pairs_that_begin_where_data_says(body, n):
    """Nothing behind the place of a pair, or behind the array, is written."""
    x, n = np.arange(1.0, 9.0, dtype=np.float32), np.full((1,), n, np.int32)
    kernel = jt.kernel(out_type=jax.ShapeDtypeStruct((8, 2), jnp.float32), grid=1)(body)
    np.testing.assert_array_equal(kernel(x, n), kernel.interpret(x, n))
