"""Elements that lie near each other are loaded as neighbours and shuffled; a vector holds several short rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.lowering.cpu import strided

RNG = np.random.default_rng(5)
SHAPES = [(5, 3), (65, 2), (9, 4), (7, 2, 2), (6, 2, 8), (3, 5, 7), (33, 12), (1, 3, 1, 4), (16, 1)]


def whole_numbers(shape, dtype):
    """Numbers whose sums are exact, so that the order of a sum does not show."""
    return jnp.asarray(RNG.integers(-4, 5, shape), dtype)


def on_tiles(shape):
    """A kernel of many ways through a tile of the shape: as it is, backwards, turned, summed up, and with a row, a
    column and every second element of it."""
    turned = shape[::-1]

    def body(x, y, o, q, r, s):
        p = (jt.program_id(0), *(0 for _ in shape))
        t = x.tiles(None, *shape)[p]
        o.tiles(None, *shape)[p] = t * 2 + y.tiles(*shape)[p[1:]]
        q.tiles(None, *turned)[p] = jnp.transpose(t)[::-1]
        even = jnp.where(jt.arange(shape[-1]) % 2 == 0, t, t[..., ::-1])
        r.tiles(None, *shape)[p] = even + t[..., :1] + t[:1] + jnp.cumsum(t, -1)
        s.tiles(None, *s.shape[1:])[p] = t[::2, ..., ::2] - t[0::2, ..., :1]

    kinds = [shape, turned, shape, (-(-shape[0] // 2), *shape[1:-1], -(-shape[-1] // 2))]

    def kernel(x, y):
        out = [jax.ShapeDtypeStruct((x.shape[0], *k), x.dtype) for k in kinds]
        return jt.call(body, out_type=out, grid=x.shape[0])

    return kernel


@pytest.mark.parametrize("isa", [None, "avx2", "sse2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_short_rows(shape, isa):
    for dtype in ("float32", "bfloat16", "int8") if isa is None else ("float32", "int16"):
        x, y = whole_numbers((2, *shape), dtype), whole_numbers(shape, dtype)
        kernel = on_tiles(shape)(x, y)
        want = kernel.interpret(x, y)
        with jt.config(isa=isa):
            for g, w in zip(kernel(x, y), want, strict=True):
                np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))


@pytest.mark.parametrize("shape", [(64, 2), (64, 4), (32, 2, 4)], ids=str)
def test_short_rows_fill_vectors(shape):
    """No vector of a program that computes on whole tiles of dense arrays is shorter than the machine's."""

    def body(x, y, o):
        p = (jt.program_id(0), *(0 for _ in shape))
        o.tiles(None, *shape)[p] = x.tiles(None, *shape)[p] * y.tiles(None, *shape)[p]

    x = jax.ShapeDtypeStruct((3, *shape), jnp.float32)
    with jt.config(isa="avx512"):
        text = jt.call(body, out_type=x, grid=3).lower(x, x).texts["llvm"]
    assert "fmul contract <16 x float>" in text
    assert not any(word in text for word in ("<2 x float>", "<4 x float>", "<8 x float>", "gather", "scatter"))


@pytest.mark.parametrize("step", [2, 3, -1, -2])
@pytest.mark.parametrize("n", [16, 21, 40])
def test_steps_through_a_row(step, n):
    """Masked tails, too: nothing outside of the row is read, and nothing between the elements is written."""

    def body(x, o, p):
        t = x[jt.program_id(0), :]
        t = t[::-1] if step < 0 else t
        o[jt.program_id(0), :] = t[: (n - 1) * abs(step) + 1 : abs(step)] * 2
        p[jt.program_id(0), :] = jnp.full(p.shape[1:], -1, x.dtype)
        p[jt.program_id(0), jt.ds(0, n, abs(step))] = t[:n]

    wide = (n - 1) * abs(step) + 1
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        x = whole_numbers((3, wide), dtype)
        out = [jax.ShapeDtypeStruct((3, n), dtype), jax.ShapeDtypeStruct((3, wide), dtype)]
        kernel = jt.call(body, out_type=out, grid=3)
        for isa in (None, "avx2"):
            with jt.config(isa=isa):
                for g, w in zip(kernel(x), kernel.interpret(x), strict=True):
                    np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))


def test_every_second_element_is_not_gathered():
    def body(x, o):
        t = x[jt.program_id(0), :]
        o[jt.program_id(0), :] = t[::2] + t[1::2]

    x = jax.ShapeDtypeStruct((4, 128), jnp.float32)
    text = jt.call(body, out_type=jax.ShapeDtypeStruct((4, 64), jnp.float32), grid=4).lower(x).texts["llvm"]
    assert "shufflevector" in text
    assert "gather" not in text


def test_windows_hold_all_places_and_nothing_outside():
    for _ in range(300):
        n = int(RNG.choice([2, 4, 8, 16, 32]))
        places = tuple(int(k) for k in RNG.integers(-20, 60, n) * RNG.integers(1, 4))
        found = strided.windows(places)
        if found is None:
            continue
        assert 2 * len(found.starts) <= n
        assert [found.starts[k] + at for k, at in found.lanes] == list(places)
        assert all(0 <= at < found.size for _, at in found.lanes)
        assert min(found.starts) >= min(places)
        assert max(found.starts) + found.size - 1 <= max(places)
    assert strided.windows(tuple(range(0, 1600, 100))) is None


@pytest.mark.parametrize("shift", [-3, 0, 2])
def test_a_mask_that_says_what_the_bounds_say_costs_nothing(shift):
    """A convolution with stride 2, written by masked gathers: its loads are windows that end where the array does."""
    height, width = 24, 32

    def body(x, o):
        r, s = 2 * jt.arange(16) + shift, 2 * jt.arange(32) + shift
        inside = ((r >= 0) & (r < height))[:, None] & ((s >= 0) & (s < width))[None, :]
        o[jt.program_id(0), :, :] = jt.load(x, (jt.program_id(0), r[:, None], s[None, :]), mask=inside, other=0.0) * 2

    x = whole_numbers((3, height, width), jnp.float32)
    kernel = jt.call(body, out_type=jax.ShapeDtypeStruct((3, 16, 32), jnp.float32), grid=3)
    for isa in (None, "avx2", "sse2"):
        with jt.config(isa=isa):
            np.testing.assert_array_equal(kernel(x), kernel.interpret(x))
    text = kernel.lower(x).texts["llvm"]
    assert "gather" not in text
    assert "i8" not in text.replace("getelementptr i8", "")  # no mask stands in memory


@pytest.mark.parametrize("pad", [0.0, -0.0, 1.5])
def test_lanes_behind_an_edge_are_the_pad(pad):
    def body(x, o):
        i = jt.program_id(0)
        o.tiles(20)[i] = x.tiles(20, pad=pad)[i] + 0 * x.tiles(20, pad=pad)[i][::-1]

    x = whole_numbers((50,), jnp.float32)
    kernel = jt.call(body, out_type=jax.ShapeDtypeStruct((50,), jnp.float32), grid=3)
    np.testing.assert_array_equal(kernel(x), kernel.interpret(x))

    def ones(x, o):
        t = jt.load(x, (jt.ds(4, 40, 2),), other=pad)
        o[...] = jnp.copysign(jnp.ones_like(t), t) + t

    kernel = jt.call(ones, out_type=jax.ShapeDtypeStruct((40,), jnp.float32))
    np.testing.assert_array_equal(kernel(x), kernel.interpret(x))
