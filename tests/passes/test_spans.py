"""Gathers of elements equally far apart are loads of a box on CPUs; all others stay gathers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt

N = 32
X = jnp.asarray(np.random.default_rng(0).standard_normal((3, N, 64)), jnp.float32)


def arange(n, axis, rank=2):
    return jt.arange(n).reshape([n if k == axis else 1 for k in range(rank)])


# {name: (what a program loads of x, the shape of it, whether that is a box)}
CASES = {
    "rows and columns": (lambda x, p: x[1, p * 8 + arange(8, 0), 16 + arange(16, 1)], (8, 16), True),
    "from the other side": (lambda x, p: x[1, arange(8, 0) + p * 8, arange(16, 1) + 16], (8, 16), True),
    "from the first on": (lambda x, p: x[p, arange(8, 0), arange(16, 1)], (8, 16), True),
    "columns alone": (lambda x, p: x[2, p, p * 8 + arange(16, 1)], (1, 16), True),
    "three axes": (
        lambda x, p: x[p + arange(2, 0, 3), p * 2 + arange(4, 1, 3), 3 + arange(8, 2, 3)], (2, 4, 8), True,
    ),
    "turned": (lambda x, p: x[1, p * 8 + arange(8, 1), 16 + arange(16, 0)], (16, 8), False),
    "every second": (lambda x, p: x[1, p * 8 + arange(8, 0), 2 * arange(16, 1)], (8, 16), True),
    "every second, from the second on": (
        lambda x, p: x[1, p * 8 + arange(8, 0), ((arange(16, 1) << 1) + 1) * 2 - 1], (8, 16), True,
    ),
    "every second row, by a subtraction": (
        lambda x, p: x[1, 2 * (arange(8, 0) + 3) - (p + 2), arange(16, 1)], (8, 16), True,
    ),
    "numbers that may wrap around": (
        lambda x, p: x[1, p * 8 + arange(8, 0), (jt.arange(16, dtype=jnp.uint8) + 248)[None, :] & 31], (8, 16), False,
    ),
    "a diagonal": (lambda x, p: x[1, p + arange(8, 0), 16 + arange(8, 0)], (8, 1), False),
    "behind the end": (lambda x, p: x[1, p * 8 + arange(8, 0), p * 56 + arange(16, 1)], (8, 16), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_program_loads(name):
    load, shape, box = CASES[name]

    def body(x, o):
        p = jt.program_id(0)
        o.tiles(None, *shape)[p, *(0 for _ in shape)] = load(x, p)

    kernel = jt.call(body, out_type=jax.ShapeDtypeStruct((2, *shape), jnp.float32), grid=2)
    np.testing.assert_array_equal(kernel(X), kernel.interpret(X))
    if jax.default_backend() == "cpu":
        text = kernel.lower(X).texts["llvm"]
        assert ("gather" not in text and "insertelement" not in text) == box


@pytest.mark.parametrize("shift", [(0, 0), (-1, -3), (2, 5)], ids=str)
def test_masked_gathers_read_vectors_too(shift):
    """A mask says which of the consecutive elements lie in the array; the others are the pad."""

    def body(x, o):
        p = jt.program_id(0)
        i, j = p * 16 + arange(16, 0) + shift[0], arange(64, 1) + shift[1]
        inside = (i >= 0) & (i < N) & (j >= 0) & (j < 64)
        o.tiles(16, 64)[p, 0] = jt.load(x, (1, i, j), mask=inside, other=-1.0)

    kernel = jt.call(body, out_type=jax.ShapeDtypeStruct((N, 64), jnp.float32), grid=2)
    np.testing.assert_array_equal(kernel(X), kernel.interpret(X))
    if jax.default_backend() == "cpu":
        assert "masked.gather" not in kernel.lower(X).texts["llvm"]


@pytest.mark.parametrize("condition", ["all inside", "fewer columns"])
@pytest.mark.parametrize("shift", [(0, 0), (-1, -3), (2, 5)], ids=str)
def test_masked_scatters_write_vectors(shift, condition):
    """What lies in the array is written, by stores of vectors; those of whole tiles look at no lane."""
    last = 64 if condition == "all inside" else 50

    @jt.kernel(out_type=jax.ShapeDtypeStruct((N, 64), jnp.float32), grid=2, init=5.0)
    def body(x, o):
        p = jt.program_id(0)
        i, j = p * 16 + arange(16, 0) + shift[0], arange(64, 1) + shift[1]
        inside = (i >= 0) & (i < N) & (j >= 0) & (j < last)
        jt.store(o, (i, j), x[1, jt.ds(p * 16, 16), :] * 2, mask=inside)

    np.testing.assert_array_equal(body(X), body.interpret(X))
    if jax.default_backend() == "cpu":
        text = body.lower(X).texts["llvm"]
        assert "masked.scatter" not in text
        assert bool(re.search(r"icmp \w+ <\d+ x i32>", text)) == (condition == "fewer columns")


def test_unsigned_numbers_wrap_around():
    """Element -1 of unsigned numbers is far outside, and 0 comes behind it."""

    def body(x, o):
        i = jt.arange(16, dtype=jnp.uint32) - jnp.uint32(1)
        o[...] = jt.load(x, (0, 0, i), mask=i != 3, other=-1.0)

    kernel = jt.call(body, out_type=jax.ShapeDtypeStruct((16,), jnp.float32))
    np.testing.assert_array_equal(kernel(X), kernel.interpret(X))
    assert kernel(X)[0] == -1
